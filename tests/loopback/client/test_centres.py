"""Asking several centres, one of them always broken in some way; what was kept serves where all are gone."""

import asyncio
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.client.store import Store
from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.testing.gateway import answering
from stormline.testing.origin import plain, running_origin
from stormline.testing.world import APP, HOST, bundle_for, running_dispatch, wait_until
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire import plan as wire_plan
from stormline.wire.bundle import Centre
from stormline.wire.plan import Plan

from .test_dispatch import (  # noqa: TID252 - the tests of one folder share what they play
    CLOSED,
    ONLY_LONG,
    URL,
    scripted_dispatch,
    server_context,
    signed,
    story,
)

pytestmark = pytest.mark.loopback
PATIENCE_S = 10.0


async def asked_within_patience(client):
    async with asyncio.timeout(PATIENCE_S):
        return await client.post(URL, content=b"x")


async def mute(request, writer):
    await asyncio.sleep(60)


def liars(here):
    other = Ed25519PrivateKey.generate()
    return {
        "forged": signed(here.pki, here.gateway.address, key=other),
        "unknown-key": signed(here.pki, here.gateway.address, kid="another"),
        "expired": signed(here.pki, here.gateway.address, age_s=9000),
        "wrong-app": signed(here.pki, here.gateway.address, app="other"),
        "truncated": signed(here.pki, here.gateway.address)[:-9],
        "busy": plain(b"{}", status="503 Busy"),
    }


@pytest.mark.parametrize("how", ["forged", "unknown-key", "expired", "wrong-app", "truncated", "busy"])
async def test_lying_centre_is_passed_for_the_next_and_left_alone(world, how):
    here = await world(answering())
    runner, asked = scripted_dispatch(here.pki, [liars(here)[how]])
    async with runner as liar:
        bundle = bundle_for(here.pki, liar.address, here.dispatch)
        async with here.client(bundle=bundle, disabled=ONLY_LONG) as client:
            assert (await asked_within_patience(client)).text == "x"
            for _ in range(3):
                await client._storm.runtime().scheduling.refresh()
    assert len(asked) == 1


async def test_silent_centre_costs_a_head_start_not_its_time_out(world):
    here = await world(answering())
    async with running_origin(mute, ssl=server_context(here.pki.dispatch)) as dead:
        bundle = bundle_for(here.pki, dead.address, here.dispatch)
        async with here.client(bundle=bundle, disabled=ONLY_LONG) as client:
            scheduling = client._storm.runtime().scheduling
            assert (await scheduling.refresh()).app == APP
            assert scheduling._asker.centres.next_timer() is not None


async def test_centres_of_the_own_unit_are_asked_first(world):
    here = await world(answering())
    ours, our_questions = scripted_dispatch(here.pki, [signed(here.pki, here.gateway.address)])
    theirs, their_questions = scripted_dispatch(here.pki, [signed(here.pki, here.gateway.address)])
    async with ours as own, theirs as other:
        centres = tuple(
            Centre(host=each.address.host, port=each.address.port, unit=unit)
            for each, unit in ((other, "u2"), (own, "u1"))
        )
        async with here.client(bundle=bundle_for(here.pki, centres=centres), disabled=ONLY_LONG) as client:
            scheduling = client._storm.runtime().scheduling
            scheduling.unit = "u1"
            await scheduling.refresh()
    assert (len(our_questions), len(their_questions)) == (1, 0)


async def test_plan_comes_in_clear_http_and_the_token_does_not(world):
    here = await world(answering())
    asked = []

    async def answer(request, writer):
        asked.append(request.target)
        writer.write(plain(signed(here.pki, here.gateway.address, hosts=(HOST,)).encode()))

    async with running_origin(answer) as clear:
        centres = (Centre(host="127.0.0.1", port=1, plain_port=clear.address.port),)
        async with here.client(bundle=bundle_for(here.pki, centres=centres), disabled=ONLY_LONG) as client:
            scheduling = client._storm.runtime().scheduling
            assert HOST in (await scheduling.refresh()).hosts
            with pytest.raises(Exception, match="cannot be enrolled"):
                await scheduling.token()
    assert set(asked) == {"/v1/plan"}


async def test_real_centre_serves_plans_in_clear_http(world):
    here = await world(answering())
    ports = []
    async with running_dispatch(here.pki, here.rules, plain_port=0, started_plain=ports.append) as (address, _):
        centres = (Centre(host="127.0.0.1", port=1, plain_port=ports[0].port),)
        async with here.client(bundle=bundle_for(here.pki, centres=centres)) as client:
            assert (await client._storm.runtime().scheduling.refresh()).app == APP
    assert address


async def test_hijacked_clear_http_gives_no_plan(world):
    here = await world(answering())

    async def hijacker(request, writer):
        writer.write(plain(b"<html>please log in</html>"))

    async with running_origin(hijacker) as clear:
        centres = (
            Centre(host="127.0.0.1", port=1, plain_port=clear.address.port),
            Centre(host=here.dispatch.host, port=here.dispatch.port),
        )
        async with here.client(bundle=bundle_for(here.pki, centres=centres), disabled=ONLY_LONG) as client:
            assert (await asked_within_patience(client)).text == "x"


async def test_notice_over_the_long_connection_leads_to_a_question_through_it(world):
    newer = []

    async def script(end):
        await end.welcome(capabilities=(m.PLAN,))
        while True:
            call = await end.next(e.CallReceived)
            if call.gate == "dispatch":
                newer.append(json.loads(call.body))
                end.reply(call, signed(here.pki, here.gateway.address, version=9).encode())
            else:
                end.reply(call, b"x")
                end.machine.send_notice(9, (HOST,))
                end.machine.send_notice(9, ("not-ours.test",))
                end.flush()

    here = await world(script)
    async with here.client(disabled=ONLY_LONG) as client:
        await client.post(URL, content=b"x")
        scheduling = client._storm.runtime().scheduling
        await wait_until(lambda: scheduling.plan.version == 9)
    assert [each["hosts"] for each in newer] == [[HOST]]
    assert newer[0]["version"] == 1


@pytest.mark.parametrize(("named", "asked"), [((m.GATEWAYS,), 1), (("not-ours.test",), 0), ((), 0)])
async def test_notice_of_gateways_is_heeded_under_the_same_version_too(world, named, asked):
    questions = []

    async def script(end):
        await end.welcome(capabilities=(m.PLAN,))
        while True:
            call = await end.next(e.CallReceived)
            if call.gate == "dispatch":
                questions.append(json.loads(call.body))
                end.reply(call, signed(here.pki, here.gateway.address, version=1).encode())
            else:
                if call.body != b"last":
                    end.machine.send_notice(1, named)
                end.reply(call, b"x")
                end.flush()

    here = await world(script)
    async with here.client(disabled=ONLY_LONG) as client:
        await client.post(URL, content=b"x")
        await wait_until(lambda: len(questions) == asked)
        await client.post(URL, content=b"last")
    assert len(questions) == asked


async def test_start_with_a_cached_plan_asks_nobody_before_the_first_answer(world, tmp_path):
    here = await world(answering())
    store = Store(tmp_path, APP)
    store.open()
    store.save_plan(signed(here.pki, here.gateway.address))
    store.save_token("kept")
    store.close()
    runner, asked = scripted_dispatch(here.pki, [signed(here.pki, here.gateway.address)])
    async with runner as dispatch:
        config = {"store": tmp_path, "bundle": bundle_for(here.pki, dispatch.address), "disabled": ONLY_LONG}
        async with here.client(**config) as client:
            assert (await client.post(URL, content=b"x")).text == "x"
            assert asked == []


async def test_all_centres_dead_and_a_plan_of_last_month_serves_as_stale(world, tmp_path):
    here = await world(answering())
    store = Store(tmp_path, APP)
    store.open()
    store.save_plan(signed(here.pki, here.gateway.address, age_s=30 * 86400))
    store.save_token("kept")
    store.close()
    bundle = bundle_for(here.pki, CLOSED, Address("127.0.0.1", 2))
    async with here.client(store=tmp_path, bundle=bundle, disabled=ONLY_LONG) as client:
        response = await asked_within_patience(client)
    assert response.text == "x"
    assert "stale" in story(response)


async def test_centre_that_a_plan_names_is_asked_before_the_bundle_s(world):
    here = await world(answering())
    later, asked = scripted_dispatch(here.pki, [signed(here.pki, here.gateway.address, version=3)])
    async with later as told:
        now = int(SystemClock().wall())
        first = wire_plan.sign(
            Plan(
                app=APP,
                version=2,
                issued_at=now,
                expires_at=now + 600,
                centres=(wire_plan.Endpoint(host=told.address.host, port=told.address.port, carrier="h1"),),
            ),
            key=here.pki.plan_key.key,
            kid=here.pki.plan_key.kid,
        )
        once, _ = scripted_dispatch(here.pki, [first])
        async with once as dispatch, here.client(bundle=bundle_for(here.pki, dispatch.address)) as client:
            scheduling = client._storm.runtime().scheduling
            await scheduling.refresh()
            assert (await scheduling.refresh()).version == 3
    assert len(asked) == 1
