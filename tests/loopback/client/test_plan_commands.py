"""What a plan commands is what the client does: a real scheduling centre, a real origin, and each field seen to act."""

import asyncio
import contextlib
import logging
import socket
import ssl
from dataclasses import dataclass

import h2.events
import httpx2
import msgspec
import pytest

import stormline
from stormline.core import errors
from stormline.core.values import Address
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.unit import HeldRules
from stormline.testing.http2 import Peer
from stormline.testing.origin import plain, read_request
from stormline.testing.world import APP, bundle_for, running_dispatch, wait_until
from stormline.wire import httpsig
from stormline.wire.plan import Endpoint, HostPlan, PathPlan, Policy

pytestmark = pytest.mark.loopback
NAME = "site.test"
LONG_S = 60.0
"""A time that no test waits for."""


async def endless(request, writer):
    await asyncio.sleep(LONG_S)


async def busy(request, writer):
    writer.write(plain(b"", status="503 Busy", retry_after="0"))


def record(response):
    return response.extensions["stormline"].record


def means_of(response):
    return [attempt.means for attempt in record(response).attempts]


@dataclass
class Platform:
    """A centre whose rules the test holds, and a client that asks it.

    Attributes:
        source: the rules.
        http: the client.
        transport: what is under it.
    """

    source: HeldRules
    http: httpx2.AsyncClient
    transport: stormline.AsyncTransport

    @property
    def runtime(self):
        return self.transport.runtime()

    async def command(self, host_plan=None, **rules):
        """Change the rules, and have the client hear of it."""
        old = self.source.current()
        hosts = old.hosts if host_plan is None else {NAME: host_plan}
        self.source.put(msgspec.structs.replace(old, version=old.version + 1, hosts=hosts, **rules))
        await self.runtime.scheduling.refresh()

    async def get(self, url=f"https://{NAME}/", **options):
        return await self.http.get(url, **options)


@pytest.fixture(name="tls")
def _tls(pki):
    """Make a server's context with a certificate for `NAME`."""

    def make(*alpn):
        files = pki.ca.issue(NAME.replace(".", "-"), names=[NAME])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols(list(alpn or ("http/1.1",)))
        return context

    return make


@pytest.fixture(name="platform")
async def _platform(pki, trust, names):
    """Make platforms: `await platform({name: address}, host_plan, **config)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(places, host_plan, *, timeout=5.0, rules=(), **config):
            source = HeldRules(RuleSet(version=1, hosts={NAME: host_plan}, apps={APP: frozenset({NAME})}))
            dispatch, _ = await stack.enter_async_context(running_dispatch(pki, source.current(), source=source))
            settings = {"bundle": bundle_for(pki, dispatch), "trust_env": False, "report": False, "rules": rules}
            transport = stormline.AsyncTransport(
                config=stormline.Config(**(settings | config)), verify=lambda alpn: trust(*alpn), outside=names(places)
            )
            http = await stack.enter_async_context(httpx2.AsyncClient(transport=transport, timeout=timeout))
            return Platform(source, http, transport)

        yield make


def by_name(**policy):
    """Give a plan that has no endpoints and this policy."""
    return HostPlan(dns=True, policy=Policy(**policy))


class TestTimes:
    async def test_silence_is_borne_as_long_as_the_plan_says(self, origin, tls, platform):
        server = await origin(endless, ssl=tls())
        here = await platform({NAME: server.address}, by_name(read_timeout_s=0.3))
        with pytest.raises(errors.DeadlineExceeded, match=r"0\.3 s"):
            await here.http.post(f"https://{NAME}/", content=b"x")

    async def test_connection_is_waited_for_as_long_as_the_plan_says(self, platform):
        with socket.create_server(("127.0.0.1", 0)) as listening:  # TCP stands, and nobody speaks TLS
            mute = Address(*listening.getsockname())
            told = by_name(connect_timeout_s=0.3, tries={"direct": 1})
            usual = {"connect_timeout_s": LONG_S, "deadline_s": LONG_S}
            here = await platform({NAME: mute}, told, timeout=httpx2.Timeout(None, connect=LONG_S), **usual)
            with pytest.raises(errors.TransportError) as caught:
                await asyncio.wait_for(here.get(), 20)
        assert caught.value.maybe_delivered is False

    async def test_whole_call_takes_no_longer_than_the_plan_says(self, origin, tls, platform):
        server = await origin(endless, ssl=tls())
        here = await platform({NAME: server.address}, by_name(deadline_s=0.4), timeout=LONG_S, read_timeout_s=LONG_S)
        with pytest.raises(errors.DeadlineExceeded):
            await asyncio.wait_for(here.get(), 20)

    async def test_first_request_of_a_host_obeys_too(self, origin, tls, platform):
        server = await origin(busy, ssl=tls())
        here = await platform({NAME: server.address}, by_name(tries={"direct": 2}))
        assert here.runtime.scheduling.plan is None
        assert means_of(await here.get()) == ["direct"] * 2

    async def test_what_the_call_and_the_rule_say_counts_before_the_plan(self, origin, tls, platform):
        async def late(request, writer):
            await asyncio.sleep(0.6)
            writer.write(plain())

        server = await origin(late, ssl=tls())
        told = by_name(deadline_s=0.2, read_timeout_s=0.2)
        rule = stormline.BusinessRule(path="/rule", deadline_s=20)
        here = await platform({NAME: server.address}, told, rules=(rule,))
        assert (await here.get(timeout=20.0)).text == "ok"
        with pytest.raises(errors.DeadlineExceeded):
            await here.get()
        with pytest.raises(errors.DeadlineExceeded):  # of silence: the rule says nothing of that
            await here.get(f"https://{NAME}/rule", extensions={"stormline.retries": False})


class TestMeans:
    async def test_plan_s_tries_and_preset_are_those_of_the_ladder(self, origin, tls, platform):
        server = await origin(busy, ssl=tls())
        here = await platform({NAME: server.address}, by_name())
        assert len(means_of(await here.get())) == 4
        await here.command(by_name(tries={"direct": 2}))
        answer = await here.get()
        assert len(means_of(answer)) == 2
        story = [line for _, line in answer.extensions["stormline"].timeline.story]
        assert 'the plan says {"tries":{"direct":2}}' in story
        await here.command(by_name(preset="key"))
        assert len(means_of(await here.get())) == 6

    async def test_means_are_tried_in_the_plan_s_order(self, origin, tls, platform):
        dead = await origin(busy, ssl=tls())
        at = Endpoint(host="127.0.0.1", port=dead.address.port, carrier="h1")
        places = {NAME: dead.address}
        here = await platform(places, HostPlan(endpoints=(at,)))
        url = f"https://{NAME}:{dead.address.port}/"
        assert means_of(await here.get(url))[:2] == ["ip-direct", "direct"]
        await here.command(HostPlan(endpoints=(at,), policy=Policy(order=("direct", "ip-direct"))))
        assert means_of(await here.get(url))[:2] == ["direct", "ip-direct"]

    async def test_preset_login_of_a_plan_asks_over_tls_only(self, origin, platform):
        server = await origin()
        here = await platform({NAME: server.address}, by_name(preset="login"))
        with pytest.raises(errors.LocalProtocolError, match="over TLS only"):
            await here.get(f"http://{NAME}/")
        assert server.requests == []

    async def test_names_of_a_later_version_are_left_out_with_one_line_each(self, origin, tls, platform, caplog):
        server = await origin(ssl=tls())
        told = {"preset": "swift", "order": ("pigeon", "direct"), "tries": {"pigeon": 2}, "disabled": ("warp",)}
        caplog.set_level(logging.WARNING, "stormline.client")
        here = await platform({NAME: server.address}, by_name())
        here.source.put(msgspec.structs.replace(here.source.current(), version=2, hosts={NAME: by_name(**told)}))
        for number in range(3):
            assert (await here.get(f"https://{NAME}/{number}")).text == "ok"
            await here.runtime.scheduling.refresh()
        lines = [line for line in caplog.messages if "does not know" in line]
        assert len(lines) == 3
        assert all(any(name in line for line in lines) for name in ("swift", "pigeon", "warp"))


class TestSwitches:
    @pytest.fixture(name="both")
    async def _both(self, tls):
        """An origin that answers over HTTP/2 and HTTP/1.1 with the name of what was spoken."""
        tasks = set()

        async def answering(peer):
            for number in range(1, 100):
                asked = await peer.wait(h2.events.RequestReceived, number)
                peer.h2.send_headers(asked.stream_id, [(":status", "200"), ("content-length", "2")])
                peer.h2.send_data(asked.stream_id, b"h2", end_stream=True)
                await peer.flush()

        async def connected(reader, writer):
            tasks.add(asyncio.current_task())
            with contextlib.suppress(OSError, EOFError):
                if writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2":
                    await Peer(reader, writer).serve(answering)
                while True:
                    await read_request(reader)
                    writer.write(plain(b"h1"))
            writer.close()

        listening = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls("h2", "http/1.1"))
        yield Address(*listening.sockets[0].getsockname()[:2])
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @pytest.mark.parametrize("where", ["host", "path", "plan"])
    async def test_http2_that_is_switched_off_is_not_spoken(self, both, platform, where):
        off = Policy(disabled=("h2",))
        here = await platform({NAME: both}, by_name())
        assert (await here.get()).text == "h2"
        if where == "plan":
            await here.command(disabled=("h2",))
        elif where == "host":
            await here.command(HostPlan(dns=True, policy=off))
        else:
            await here.command(HostPlan(dns=True, paths=(PathPlan(path="/h1/**", policy=off),)))
            assert (await here.get(f"https://{NAME}/other")).text == "h2"
        assert (await here.get(f"https://{NAME}/h1/x")).text == "h1"
        await here.command(by_name(), disabled=())
        assert (await here.get(f"https://{NAME}/h1/x")).text == "h2"

    @pytest.mark.parametrize("name", ["h1", "ip-direct"])
    async def test_endpoints_whose_carrier_or_means_is_off_are_not_asked(self, origin, tls, platform, name):
        by_address, named = await origin(ssl=tls()), await origin(ssl=tls())
        at = Endpoint(host="127.0.0.1", port=by_address.address.port, carrier="h1")
        here = await platform({NAME: named.address}, HostPlan(endpoints=(at,), policy=Policy(disabled=(name,))))
        assert means_of(await here.get(f"https://{NAME}:{by_address.address.port}/")) == ["direct"]
        assert (len(by_address.requests), len(named.requests)) == (0, 1)

    async def test_switched_off_dispatch_leaves_plain_dns(self, origin, tls, platform):
        by_address, named = await origin(ssl=tls()), await origin(ssl=tls())
        at = Endpoint(host="127.0.0.1", port=by_address.address.port, carrier="h1")
        here = await platform({NAME: named.address}, HostPlan(endpoints=(at,), policy=Policy(deadline_s=LONG_S)))
        url = f"https://{NAME}:{by_address.address.port}/"
        assert means_of(await here.get(url)) == ["ip-direct"]
        await here.command(dns_only=True)
        assert means_of(await here.get(url)) == ["direct"]
        await here.command(dns_only=False)
        assert means_of(await here.get(url)) == ["ip-direct"]

    @pytest.mark.parametrize("said", [None, True, False])
    async def test_clear_http_needs_the_app_and_the_plan(self, origin, platform, said):
        async def unsigned(request, writer):
            writer.write(plain(b"whatever"))

        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            server = await origin(unsigned)
            keys = {"k": httpsig.VerifyKey("hmac-sha256", b"0123456789abcdef")}
            consent = stormline.ClearHttp(keys=keys, port=server.address.port, give_untrusted=True)
            rule = stormline.BusinessRule(host=NAME, clear=consent, tries={"direct": 1})
            places = {f"{NAME}:443": Address(*closed.getsockname()), f"{NAME}:{server.address.port}": server.address}
            here = await platform(places, by_name(clear=said), rules=(rule,))
            if said is False:
                with pytest.raises(errors.ConnectError):
                    await here.get()
                assert server.requests == []
            else:
                assert means_of(await here.get()) == ["direct", "clear"]

    async def test_plan_alone_does_not_open_clear_http(self, origin, platform):
        server = await origin()
        here = await platform({f"{NAME}:80": server.address}, by_name(clear=True, tries={"clear": 3}))
        with pytest.raises(errors.ResolveError):
            await here.get()
        assert server.requests == []


class TestWhenItActs:
    async def test_changed_plan_holds_for_the_next_request_and_not_for_the_one_that_runs(self, origin, tls, platform):
        go = asyncio.Event()

        async def held(request, writer):
            await go.wait()
            writer.write(plain())

        server = await origin(held, ssl=tls())
        here = await platform({NAME: server.address}, by_name(read_timeout_s=LONG_S, deadline_s=LONG_S))
        running = asyncio.create_task(here.get())
        await wait_until(lambda: server.requests)
        await here.command(by_name(read_timeout_s=0.2, deadline_s=0.4))
        with pytest.raises(errors.DeadlineExceeded):
            await here.get()
        assert not running.done()
        go.set()
        assert (await running).text == "ok"

    async def test_first_path_that_fits_query_header_and_tag_counts(self, origin, tls, platform):
        paths = (
            PathPlan(path="/a/*", query={"beta": None}, policy=Policy(tries={"direct": 1})),
            PathPlan(path="/a/*", headers={"X-Kind": "big"}, policy=Policy(tries={"direct": 2})),
            PathPlan(business="pay", methods=("GET",), policy=Policy(tries={"direct": 3})),
        )
        server = await origin(busy, ssl=tls())
        rule = stormline.BusinessRule(path="/till", business="pay")
        here = await platform({NAME: server.address}, HostPlan(dns=True, paths=paths), rules=(rule,))

        async def tried(path, **options):
            return len(means_of(await here.get(f"https://{NAME}{path}", **options)))

        assert await tried("/a/b?x=1&beta=") == 1
        assert await tried("/a/b", headers={"x-kind": "big"}) == 2
        assert await tried("/b", extensions={"stormline.business": "pay"}) == 3
        assert await tried("/till") == 3
        assert await tried("/a/b?betab=1", headers={"x-kind": "small"}) == 4


class TestSampleAndUrgency:
    async def test_only_the_plan_s_share_of_the_calls_is_reported(self, origin, tls, platform, records):
        server = await origin(ssl=tls())
        here = await platform({NAME: server.address}, by_name(sample=0.5), report=True)
        heard = []
        here.runtime.on_record = heard.append
        for number in range(60):
            await here.get(f"https://{NAME}/{number}")
        assert len(heard) == 60
        assert 10 <= len(records) <= 50  # fewer or more once in ten million runs
        for share, most in ((0.0, 0), (1.0, 5)):
            await here.command(by_name(sample=share))
            records.clear()
            for number in range(5):
                await here.get(f"https://{NAME}/{number}")
            assert len(records) == most

    async def test_plan_s_urgency_is_that_of_the_gate(self, origin, tls, platform):
        server = await origin(ssl=tls())
        here = await platform({NAME: server.address}, by_name(urgency=6))
        await here.runtime.scheduling.host_plan(NAME)
        gate, seen = here.runtime._executor.admission, []
        enter = gate.enter
        gate.enter = lambda guest: seen.append(guest.urgency) or enter(guest)
        await here.get()
        await here.get(extensions={"stormline.priority": 1})
        await here.command(by_name(preset="key"))
        await here.get()
        assert seen == [6, 1, 0]
