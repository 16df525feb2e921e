"""A user logs in and out over a session that stands."""

import asyncio
import json

import pytest

from stormline.core import errors
from stormline.core.codes import Code
from stormline.net.clock import SystemClock
from stormline.testing.gateway import answering
from stormline.testing.world import APP, wait_until
from stormline.wire import tokens

pytestmark = pytest.mark.loopback


def token_of(pki, user, device="d1", *, life_s=600):
    now = int(SystemClock().wall())
    claims = tokens.DeviceToken(app=APP, device=device, user=user, iat=now - 5, exp=now + life_s)
    return tokens.mint(claims, key=pki.token_key.key, kid=pki.token_key.kid)


@pytest.fixture(name="served")
async def _served(gated):
    """Give a real gateway."""
    return await gated()


async def test_session_goes_on_as_the_user_s_and_back(served, pki):
    async with served.channel(user="") as channel:
        before = channel.session
        bound = await channel.bind(token_of(pki, "ann"))
        assert (bound.user, bound.session, channel.user) == ("ann", before.session, "ann")
        assert bound.resume != before.resume
        assert (await channel.bind(token_of(pki, "bob"))).user == "bob"
        assert (await channel.unbind()).user == ""
        assert channel.session.session == before.session


async def test_session_is_resumed_as_the_user_s(served, pki):
    async with served.channel(user="") as channel:
        bound = await channel.bind(token_of(pki, "ann"))
        link = channel._longline.link
        link.stream.close()
        await wait_until(lambda: channel._longline.link is not None and channel.session is not None)
        await wait_until(lambda: not channel._longline.link.detached)
        assert (channel.session.session, channel.user) == (bound.session, "ann")


async def test_next_session_is_the_user_s_too(served, pki):
    async with served.channel(user="") as channel:
        await channel.bind(token_of(pki, "ann"))
        before = channel.session.session
        await channel._longline.link.close()
        await wait_until(lambda: channel.session is not None and channel.session.session != before)
        assert channel.user == "ann"


@pytest.mark.parametrize(
    ("change", "why"),
    [({"device": "d2"}, "another device"), ({"life_s": -1}, "expired")],
)
async def test_token_of_another_device_or_time_changes_nothing(served, pki, change, why):
    async with served.channel(user="eve") as channel:
        with pytest.raises(errors.CallError, match=why) as raised:
            await channel.bind(token_of(pki, "ann", **change))
        assert (raised.value.code, channel.user) == (Code.CALL_REFUSED, "eve")
        with pytest.raises(errors.CallError):
            await channel.bind("nonsense")
        assert channel.session is not None


async def test_user_whose_token_ends_is_logged_out_and_the_device_stays(served, pki):
    async with served.channel(user="") as channel:
        await channel.bind(token_of(pki, "ann", life_s=1))
        await wait_until(lambda: channel.session is not None and channel.user == "")


async def test_what_is_left_waits_for_its_user(world, pki, tmp_path):
    """Bound and unbound over one connection, a call that was left goes only as its own user's."""
    arrivals, users, hold = [], [""], asyncio.Event()

    async def handle(end, call):
        if call.gate == "session":
            users.append(tokens.user_of(call.body.decode()))
            end.reply(call, json.dumps({"user": users[-1], "resume": ""}).encode(), status=0)
        elif not hold.is_set():
            end.machine.send_fail(call.call_id, Code.CALL_UNAVAILABLE, "later")
            end.flush()
        else:
            arrivals.append((users[-1], dict(call.headers)["idempotency-key"]))
            end.reply(call, b"null", status=0)

    here = await world(answering(handle), token=token_of(pki, ""))
    async with here.client(store=tmp_path) as client, client.channel() as channel:
        await channel.wait_connected()
        await channel.bind(token_of(pki, "ann"))
        await channel.enqueue("orders.create", id="hers", lane="hers")
        await channel.unbind()
        hold.set()
        await channel.enqueue("orders.create", id="nobody-s", lane="other")
        await wait_until(lambda: arrivals)
        assert [each.id for each in await channel.queued()] == ["hers"]
        await channel.bind(token_of(pki, "ann"))
        await wait_until(lambda: len(arrivals) == 2)
    assert arrivals == [("", "nobody-s"), ("ann", "hers")]


async def test_answer_that_does_not_come_gives_the_connection_up(world, pki):
    async def handle(end, call):
        pass

    here = await world(answering(handle), token=token_of(pki, "eve"))
    async with here.client() as client, client.channel() as channel:
        await channel.wait_connected()
        with pytest.raises(errors.DeadlineExceeded) as raised:
            await channel.bind(token_of(pki, "ann"), deadline_s=0.3)
        assert raised.value.maybe_delivered
        await wait_until(lambda: len(here.gateway.ends) == 2)
        await channel.wait_connected()
        hello = here.gateway.ends[1].hello
        assert tokens.user_of(hello.token) == "eve"
