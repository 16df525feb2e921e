"""What the client does with dispatch: outages, answers that may not be trusted, and what it keeps between starts."""

import asyncio
import json
import ssl

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import stormline
from stormline.client.store import Store
from stormline.core import limits, limits_network, limits_platform
from stormline.core.codes import Code
from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.testing.gateway import answering
from stormline.testing.origin import plain, running_origin
from stormline.testing.world import (
    APP,
    BOTH,
    HOST,
    bundle_for,
    rules_for,
    running_dispatch,
    wait_until,
)
from stormline.wire import plan as wire_plan
from stormline.wire.plan import Plan

pytestmark = pytest.mark.loopback
URL = f"https://{HOST}/"
ONLY_LONG = frozenset({"direct"})
CLOSED = Address("127.0.0.1", 1)


def story(response):
    return "\n".join(line for _, line in response.extensions["stormline"].timeline.story)


def server_context(files):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(files.certificate, files.key)
    return context


def signed(pki, gateway, *, key=None, kid=None, app=APP, version=1, age_s=0, life_s=600, hosts=(HOST, BOTH)):
    now = int(SystemClock().wall()) - age_s
    rules = rules_for(gateway)
    made = Plan(
        app=app,
        version=version,
        issued_at=now,
        expires_at=now + life_s,
        hosts={host: rules.hosts[host] for host in hosts},
        gateways=rules.gateways[APP],
    )
    return wire_plan.sign(made, key=key or pki.plan_key.key, kid=kid or pki.plan_key.kid)


def scripted_dispatch(pki, answers):
    """A dispatch whose plans are the given texts in order, the last for all that follow; devices are enrolled."""
    asked = []

    async def answer(request, writer):
        if request.target == "/v1/devices":
            body = {"device": "d", "token": f"token-{len(asked)}", "expires_at": 2**33}
            writer.write(plain(json.dumps(body).encode(), status="201 Created"))
            return
        asked.append(json.loads(request.body))
        text = answers[min(len(asked), len(answers)) - 1]
        writer.write(text if isinstance(text, bytes) else plain(text.encode()))

    return running_origin(answer, ssl=server_context(pki.dispatch)), asked


class TestOutage:
    async def test_dead_first_address_is_passed_for_the_second(self, world):
        here = await world(answering())
        bundle = bundle_for(here.pki, CLOSED, here.dispatch)
        async with here.client(bundle=bundle, disabled=ONLY_LONG) as client:
            assert (await client.post(URL, content=b"x")).text == "x"

    async def test_mute_first_address_costs_one_try(self, world, monkeypatch):
        monkeypatch.setattr(limits_platform, "DISPATCH_TRY_S", 0.3)
        here = await world(answering())

        async def mute(request, writer):
            await asyncio.sleep(60)

        async with running_origin(mute, ssl=server_context(here.pki.dispatch)) as dead:
            bundle = bundle_for(here.pki, dead.address, here.dispatch)
            async with here.client(bundle=bundle, disabled=ONLY_LONG) as client:
                assert (await client.post(URL, content=b"x")).text == "x"

    async def test_busy_first_address_is_passed_for_the_second_also_for_enrolment(self, world):
        here = await world(answering())

        async def busy(request, writer):
            writer.write(plain(b"{}", status="503 Busy"))

        async with running_origin(busy, ssl=server_context(here.pki.dispatch)) as first:
            bundle = bundle_for(here.pki, first.address, here.dispatch)
            async with here.client(bundle=bundle, disabled=ONLY_LONG) as client:
                assert (await client.post(URL, content=b"x")).text == "x"

    async def test_without_dispatch_requests_go_directly_and_the_story_says_why(self, world, origin):
        here, there = await world(answering()), await origin()
        async with here.client(bundle=bundle_for(here.pki, CLOSED)) as client:
            for _ in range(3):
                response = await client.get(there.url(host=BOTH))
        assert response.text == "ok"
        assert "dispatch cannot be reached: 127.0.0.1:1" in story(response)
        assert here.gateway.ends == []

    async def test_question_to_dispatch_is_bounded_by_the_call_s_deadline(self, world, origin):
        async def mute(request, writer):
            await asyncio.sleep(60)

        here, there = await world(answering()), await origin()
        async with (
            running_origin(mute, ssl=server_context(here.pki.dispatch)) as dead,
            here.client(bundle=bundle_for(here.pki, dead.address), deadline_s=0.3) as client,
        ):
            started = asyncio.get_running_loop().time()
            with pytest.raises(stormline.errors.DeadlineExceeded) as caught:
                await client.get(there.url(host=BOTH))
            assert asyncio.get_running_loop().time() - started < 1.5
        assert caught.value.maybe_delivered is False

    async def test_stale_plan_serves_while_dispatch_is_away(self, world, monkeypatch):
        monkeypatch.setattr(limits, "PLAN_LIFE_S", 0.2)
        here = await world(answering())
        async with here.client(disabled=ONLY_LONG) as client:
            await client.post(URL, content=b"x")
            await here.stop_dispatch()
            scheduling = client._storm.runtime().scheduling
            await wait_until(lambda: scheduling.stale)
            first = await client.post(URL, content=b"y")
            second = await client.post(URL, content=b"z")
        assert (first.text, second.text) == ("y", "z")
        assert "stale" in story(second)

    async def test_host_that_dispatch_does_not_know_goes_directly(self, world, origin):
        here, there = await world(answering()), await origin()
        async with here.client() as client:
            response = await client.get(there.url(host="127.0.0.1"))
        assert response.text == "ok"
        assert here.gateway.ends == []

    async def test_new_hosts_of_a_burst_are_asked_for_together(self, world):
        pki = (await world(answering())).pki
        runner, asked = scripted_dispatch(pki, [plain(b"{}", status="503 Busy")])
        async with runner as dispatch:
            config = stormline.Config(bundle=bundle_for(pki, dispatch.address), report=False, deadline_s=3)
            async with stormline.AsyncClient(config=config) as client:
                hosts = [f"https://h{n}.invalid/" for n in range(20)]
                await asyncio.gather(*(client.get(url) for url in hosts), return_exceptions=True)
        assert len(asked) <= 3
        assert len(asked[-1]["hosts"]) == 20


class TestDistrust:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"key": Ed25519PrivateKey.generate()}, "signature"),
            ({"kid": "another"}, "unknown-key"),
            ({"app": "other"}, "wrong-app"),
            ({"age_s": 4000}, "expired"),
            ({"age_s": -4000}, "not-yet-valid"),
            ({"hosts": ()}, "malformed"),
        ],
    )
    async def test_answer_that_may_not_be_trusted_is_never_used(self, world, origin, change, reason):
        here, there = await world(answering()), await origin()
        runner, _ = scripted_dispatch(here.pki, [signed(here.pki, here.gateway.address, **change)])
        async with runner as dispatch, here.client(bundle=bundle_for(here.pki, dispatch.address)) as client:
            response = await client.get(there.url(host=BOTH))
        assert response.text == "ok"
        assert f"rejected ({reason})" in story(response)
        assert here.gateway.ends == []

    async def test_older_version_is_a_replay_and_the_newer_plan_stays(self, world, monkeypatch):
        monkeypatch.setattr(limits, "PLAN_LIFE_S", 0.2)
        monkeypatch.setattr(limits, "PLAN_RETRY_S", 0.0)
        here = await world(answering())
        texts = [signed(here.pki, here.gateway.address, version=5), signed(here.pki, CLOSED, version=4)]
        runner, asked = scripted_dispatch(here.pki, texts)
        async with (
            runner as dispatch,
            here.client(bundle=bundle_for(here.pki, dispatch.address), disabled=ONLY_LONG) as client,
        ):
            await client.post(URL, content=b"x")
            scheduling = client._storm.runtime().scheduling
            await wait_until(lambda: scheduling.stale)
            await client.post(URL, content=b"x")
            await wait_until(lambda: scheduling.last_error is not None)
            response = await client.post(URL, content=b"x")
        assert response.text == "x"
        assert len(asked) >= 2
        assert "plan version 5" in story(response)
        assert "rejected (stale-version)" in story(response)

    async def test_dispatch_with_a_foreign_certificate_is_not_asked(self, world, origin, tmp_path):
        here, there = await world(answering()), await origin()
        async with here.client(
            bundle=bundle_for(here.pki, here.dispatch, dispatch_name="other.stormline.test")
        ) as client:
            response = await client.get(there.url(host=BOTH))
        assert "certificate refused" in story(response)
        assert response.text == "ok"

    async def test_oversized_answer_is_refused(self, world, origin):
        here, there = await world(answering()), await origin()
        runner, _ = scripted_dispatch(here.pki, ["x" * (limits.PLAN_BYTES_MAX + 1)])
        async with runner as dispatch, here.client(bundle=bundle_for(here.pki, dispatch.address)) as client:
            response = await client.get(there.url(host=BOTH))
        assert f"more than {limits.PLAN_BYTES_MAX} bytes" in story(response)


class TestStore:
    async def test_plan_and_token_are_found_again_at_the_next_start(self, world, tmp_path):
        here = await world(answering())
        async with here.client(store=tmp_path / "store") as client:
            await client.post(URL, content=b"x")
        await here.stop_dispatch()
        async with here.client(store=tmp_path / "store", disabled=ONLY_LONG) as client:
            assert (await client.post(URL, content=b"y")).text == "y"
        first, second = (end.hello.token for end in here.gateway.ends)
        assert first == second != ""

    async def test_two_clients_at_once_do_not_share_a_token(self, world, tmp_path):
        here = await world(answering())
        config = {"store": tmp_path / "store", "disabled": ONLY_LONG}
        async with here.client(**config) as one, here.client(**config) as two:
            await one.post(URL, content=b"x")
            await two.post(URL, content=b"x")
        first, second = (end.hello.token for end in here.gateway.ends)
        assert first != second

    async def test_stored_token_that_is_no_good_any_more_is_replaced(self, world, tmp_path):
        async def unknown(end):
            await end.refuse(Code.TOKEN_INVALID, "not ours")

        here = await world(unknown, answering())
        store = Store(tmp_path, APP)
        assert store.open()
        store.save_token("of an earlier platform")
        store.close()
        async with here.client(store=tmp_path, disabled=ONLY_LONG) as client:
            await client.post(URL, content=b"x")
        assert here.gateway.ends[0].hello.token == "of an earlier platform"
        assert store.open()
        assert store.load_token() == here.gateway.ends[1].hello.token
        store.close()

    @pytest.mark.parametrize("content", [b"", b"\xff\x00", b"junk", b"a.b.c"])
    async def test_damaged_store_is_as_good_as_none(self, world, tmp_path, content):
        here = await world(answering())
        for name in (f"{APP}.plan",):
            (tmp_path / name).write_bytes(content)
        async with here.client(store=tmp_path, disabled=ONLY_LONG) as client:
            assert (await client.post(URL, content=b"x")).text == "x"

    async def test_unusable_folder_is_one_clear_error(self, world, tmp_path):
        here = await world(answering())
        (tmp_path / "file").write_text("")
        with pytest.raises(stormline.errors.ConfigError, match="client store"):
            async with here.client(store=tmp_path / "file" / "store") as client:
                await client.get(URL)

    async def test_files_are_for_their_owner_alone(self, world, tmp_path):
        here = await world(answering())
        async with here.client(store=tmp_path / "store") as client:
            await client.post(URL, content=b"x")
        found = list((tmp_path / "store").rglob("*"))
        modes = {path.name: path.stat().st_mode & 0o777 for path in found if path.is_file()}
        assert set(modes.values()) == {0o600}
        assert set(modes) >= {f"{APP}.token", f"{APP}.plan", f"{APP}.floor", f"{APP}.lock", "network.key"}
        assert {path.name for path in found if path.is_dir()} == {"networks", "netlog"}
        for folder in (tmp_path / "store", tmp_path / "store" / "networks", tmp_path / "store" / "netlog"):
            assert folder.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize(
        ("age_s", "first"),
        [(601, "plan version 1, stale"), (24 * 600, "plan version 1, stale"), (25 * 600 + 1, "plan version 2:")],
        ids=["just expired", "not long ago", "long ago"],
    )
    async def test_life_spent_while_not_running_counts(self, world, tmp_path, monkeypatch, age_s, first):
        monkeypatch.setattr(limits_network, "PLAN_STALE_WAIT_S", limits.PLAN_WAIT_S)
        here = await world(answering())
        store = Store(tmp_path, APP)
        assert store.open()
        store.save_plan(signed(here.pki, here.gateway.address, age_s=age_s, life_s=600))
        store.close()
        runner, asked = scripted_dispatch(here.pki, [signed(here.pki, here.gateway.address, version=2)])
        async with runner as dispatch:
            bundle = bundle_for(here.pki, dispatch.address)
            async with here.client(store=tmp_path, bundle=bundle, disabled=ONLY_LONG) as client:
                response = await client.post(URL, content=b"x")
                await wait_until(lambda: client._storm.runtime().scheduling.plan.version == 2)
                second = await client.post(URL, content=b"x")
        assert first in story(response)
        assert "plan version 2:" in story(second)
        assert len(asked) == 1

    async def test_plan_that_expired_lately_waits_for_no_silent_centre(self, world, tmp_path, monkeypatch):
        monkeypatch.setattr(limits_network, "PLAN_STALE_WAIT_S", 600.0)
        here, asked = await world(answering()), asyncio.Event()

        async def mute(request, writer):
            if request.target == "/v1/plan":
                asked.set()
                await asyncio.sleep(600)
            writer.write(plain(b"{}", status="503 Busy"))

        store = Store(tmp_path, APP)
        assert store.open()
        store.save_plan(signed(here.pki, here.gateway.address, age_s=4000))
        store.save_token("kept")
        store.close()
        async with running_origin(mute, ssl=server_context(here.pki.dispatch)) as dead:
            bundle = bundle_for(here.pki, dead.address)
            async with here.client(store=tmp_path, bundle=bundle, disabled=ONLY_LONG, deadline_s=600) as client:
                response = await client.post(URL, content=b"x")
                await asked.wait()
        assert "plan version 1, stale" in story(response)
        assert "dispatch cannot be reached" not in story(response)


async def test_dispatch_is_asked_by_running_service_of_the_real_kind(pki):
    async with running_dispatch(pki, rules_for(Address("127.0.0.1", 9))) as (address, _):
        config = stormline.Config(bundle=bundle_for(pki, address), report=False)
        async with stormline.AsyncClient(config=config) as client:
            plan = await client._storm.runtime().scheduling.refresh()
    assert plan.app == APP
