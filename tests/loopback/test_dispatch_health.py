"""Probes of real servers on loopback: good ones, and each way in which one is ill."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.assembly.authority import Authority, ensure_authority
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch.beside import Beside
from stormline.dispatch.head import Drained
from stormline.dispatch.health import Drains, HealthPolicy, Part, Target, Verdict
from stormline.dispatch.probing import HealthConfig, HttpCheck, Monitor, Prober
from stormline.dispatch.rules import RuleSet, check
from stormline.dispatch.signer import PlanSigner
from stormline.dispatch.unit import HeldRules
from stormline.engine.port import Message, Reply
from stormline.net.clock import SystemClock, SystemRng
from stormline.testing.foreign import find, running_server
from stormline.wire import plan as wire_plan
from stormline.wire.jws import SigningKey
from stormline.wire.plan import Endpoint, HostPlan, PlanRequest

pytestmark = pytest.mark.loopback

NAME = "shop.test"
FAST = HealthPolicy(interval_s=0.05, fall=2, rise=2)


@dataclass
class Server:
    """A TLS server that answers every request with `answer`, as long as it is `up`."""

    port: int
    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    up: bool = True
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0


Serve = Callable[..., Awaitable[Server]]


@pytest.fixture(name="authority")
def _authority(tmp_path: Path) -> Authority:
    return ensure_authority(tmp_path / "pki", clock=SystemClock(), rng=SystemRng())


@pytest.fixture(name="serve")
async def _serve(authority: Authority) -> AsyncIterator[Serve]:
    """Give what starts a TLS server for `names`, with `alpn`."""
    servers: list[asyncio.AbstractServer] = []
    writers: set[asyncio.StreamWriter] = set()

    async def serve(*names: str, alpn: tuple[str, ...] = ("http/1.1",), tls: bool = True) -> Server:
        context = None
        if tls:
            files = authority.issue(f"s{len(servers)}", names=list(names or (NAME,)), ips=["127.0.0.1"])
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.certificate, files.key)
            context.set_alpn_protocols(list(alpn))
        server = Server(0)

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.add(writer)
            server.connections += 1
            with contextlib.suppress(OSError, EOFError):
                server.heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(server.answer if server.up else b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
                if server.answer:
                    await reader.read()
            writer.transport.abort()

        one = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
        servers.append(one)
        server.port = one.sockets[0].getsockname()[1]
        return server

    yield serve
    for one in servers:
        one.close()
    for writer in writers:
        writer.transport.abort()


def target(port: int, carrier: str = "h1", server_name: str = "") -> Target:
    return Target("127.0.0.1", port, carrier, server_name)


def prober(authority: Authority, check: HttpCheck | None = None) -> Prober:
    config = HealthConfig(ca_pem=authority.ca_pem.encode(), checks={NAME: check} if check else {})
    return Prober(config, rng=SystemRng())


class TestProbe:
    @pytest.mark.parametrize(
        ("carrier", "alpn"),
        [
            ("h1", ("http/1.1",)),
            ("h1", ()),
            ("h2", ("h2",)),
            ("sl-tls", ("sl/1",)),
            ("sl-wss", ("http/1.1",)),
            ("sl-short", ("http/1.1",)),
        ],
    )
    async def test_server_that_shakes_hands_is_good(self, authority, serve, carrier, alpn):
        server = await serve(alpn=alpn)
        assert await prober(authority).probe(target(server.port, carrier), NAME) == (True, "")

    @pytest.mark.parametrize("carrier", ["h2", "sl-tls"])
    async def test_server_of_another_protocol_is_not(self, authority, serve, carrier):
        server = await serve(alpn=())
        outcome = await prober(authority).probe(target(server.port, carrier), NAME)
        assert not outcome.good
        assert "no protocol by name" in outcome.reason

    async def test_wrong_name_and_unknown_authority_are_refused(self, authority, serve, tmp_path):
        server = await serve("other.test")
        outcome = await prober(authority).probe(target(server.port), NAME)
        assert not outcome.good
        assert outcome.reason.startswith("tls: certificate refused")
        stranger = ensure_authority(tmp_path / "stranger", clock=SystemClock(), rng=SystemRng())
        outcome = await prober(stranger).probe(target(server.port), "other.test")
        assert not outcome.good
        assert "certificate refused" in outcome.reason

    async def test_refused_connection_is_ill(self, authority):
        with contextlib.closing(await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)) as gone:
            port = gone.sockets[0].getsockname()[1]
        await gone.wait_closed()
        outcome = await prober(authority).probe(target(port), NAME)
        assert outcome == (False, "connect: connection refused")

    async def test_server_that_accepts_and_is_silent_is_ill_in_time(self, authority, monkeypatch):
        monkeypatch.setattr(limits, "HEALTH_TIMEOUT_S", 0.2)
        held: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda reader, writer: held.append(writer), "127.0.0.1", 0)
        outcome = await prober(authority).probe(target(silent.sockets[0].getsockname()[1]), NAME)
        assert outcome == (False, "tls: nothing within 0.2 s")
        silent.close()
        for writer in held:
            writer.transport.abort()

    async def test_plain_server_is_ill(self, authority, serve):
        server = await serve(tls=False)
        server.answer = b"HTTP/1.1 400 Bad Request\r\n\r\n"
        outcome = await prober(authority).probe(target(server.port), NAME)
        assert not outcome.good

    @pytest.mark.parametrize(
        ("answer", "good", "reason"),
        [
            (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\nthe rest never comes", True, ""),
            (b"HTTP/1.1 204 No Content\r\n\r\n", True, ""),
            (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", False, "http: status 503"),
            (b"HTTP/1.1 301 Moved\r\nlocation: https://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", False, "status 301"),
            (b"nonsense\r\n\r\n", False, "http: "),
            (b"", False, "http: "),
        ],
        ids=["200", "204", "503", "redirect", "nonsense", "end"],
    )
    async def test_http_check_wants_its_status_and_follows_nothing(self, authority, serve, answer, good, reason):
        server = await serve()
        server.answer = answer
        with_check = prober(authority, check=HttpCheck("/health?x=1"))
        found = await with_check.probe(target(server.port), NAME)
        assert found.good is good
        assert reason in found.reason
        assert server.connections == 1
        assert server.heads[0].startswith(b"GET /health?x=1 HTTP/1.1\r\n")
        assert f"\r\nhost: {NAME}\r\n".encode() in server.heads[0].lower()

    async def test_carrier_of_which_only_the_connection_is_tried_is_good_where_it_stands(self, authority, serve):
        server = await serve(tls=False)
        tcp = Prober(HealthConfig(tcp=frozenset({"other"})), rng=SystemRng())
        assert tcp.can_probe(target(server.port, "other"))
        assert await tcp.probe(target(server.port, "other"), NAME) == (True, "")

    async def test_each_is_tried_once_and_the_ill_ones_named_with_a_reason(self, authority, serve, monkeypatch):
        monkeypatch.setattr(limits, "HEALTH_PROBES_MAX", 2)
        well, stranger = await serve(), await serve("other.test")
        gone = target(1)
        names = {target(well.port): NAME, target(stranger.port): NAME, gone: NAME, target(1, "none"): NAME}
        ill = await prober(authority).ill(names)
        assert set(ill) == {target(stranger.port), gone}
        assert ill[gone] == "connect: connection refused"
        assert "certificate refused" in ill[target(stranger.port)]
        assert well.connections == 1

    async def test_other_carriers_and_names_are_not_probed(self, authority):
        one = prober(authority)
        assert not one.can_probe(target(443, "sl-pigeon"))
        assert not one.can_probe(Target("shop.test", 443, "h1", ""))
        assert one.can_probe(Target("::1", 443, "sl-tls", ""))

    def test_config_malformed_is_refused(self):
        with pytest.raises(errors.ConfigError):
            HealthConfig(checks={NAME: HttpCheck("health")})
        with pytest.raises(errors.ConfigError):
            HealthConfig(checks={NAME: HttpCheck("/", frozenset())})
        with pytest.raises(errors.ConfigError):
            Prober(HealthConfig(ca_pem=b"nothing"), rng=SystemRng())


class Udp(asyncio.DatagramProtocol):
    """A UDP port that answers as `answer` says: each datagram by any number of others."""

    def __init__(self, answer: Callable[[bytes], list[bytes]]) -> None:
        self._answer = answer
        self.heard: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.port: int = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.heard.append(data)
        for each in self._answer(data):
            self.transport.sendto(each, addr)


def said(asked: bytes, *versions: int) -> bytes:
    """Say versions as a server does: the ids of the question, each in the place of the other."""
    destination, source = asked[6:14], asked[15:23]
    return (
        b"\xc0"
        + bytes(4)
        + b"\x08"
        + source
        + b"\x08"
        + destination
        + b"".join(version.to_bytes(4) for version in versions)
    )


class TestQuic:
    @pytest.fixture(name="udp")
    async def _udp(self) -> AsyncIterator[Callable[..., Awaitable[Udp]]]:
        made: list[Udp] = []

        async def make(answer: Callable[[bytes], list[bytes]]) -> Udp:
            _, one = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: Udp(answer), local_addr=("127.0.0.1", 0)
            )
            made.append(one)
            return one

        yield make
        for one in made:
            one.transport.close()

    @pytest.mark.skipif(find("caddy") is None, reason="caddy is not installed (apt-get install caddy)")
    async def test_real_server_is_good_as_long_as_it_runs(self, authority, tmp_path):
        files = authority.issue("caddy", names=["localhost"])
        (folder := tmp_path / "caddy").mkdir()
        one = prober(authority)
        with running_server("caddy", folder, files, http="3") as server:
            for carrier in ("h3", "sl-quic"):
                assert await one.probe(target(server.address.port, carrier), "localhost") == (True, "")
        outcome = await one.probe(target(server.address.port, "h3"), "localhost")
        assert outcome == (False, "quic: connection refused")

    @pytest.mark.skipif(find("caddy") is None, reason="caddy is not installed (apt-get install caddy)")
    async def test_server_that_speaks_tcp_alone_is_ill(self, authority, tmp_path):
        files = authority.issue("caddy", names=["localhost"])
        (folder := tmp_path / "caddy").mkdir()
        with running_server("caddy", folder, files) as server:
            outcome = await prober(authority).probe(target(server.address.port, "h3"), "localhost")
        assert outcome == (False, "quic: connection refused")

    async def test_lost_datagrams_are_sent_again_and_forged_ones_passed_over(self, authority, udp, monkeypatch):
        monkeypatch.setattr(limits, "HEALTH_QUIC_REPEAT_S", 0.05)

        def answer(asked: bytes) -> list[bytes]:
            if len(server.heard) < 3:
                return [b"", bytes(40), said(bytes(40), 1)]
            return [said(asked, 0x1A2A3A4A, 1)]

        server = await udp(answer)
        assert await prober(authority).probe(target(server.port, "h3"), NAME) == (True, "")
        assert len(server.heard) >= 3
        assert {len(each) for each in server.heard} == {1200}

    async def test_silence_says_nothing_where_no_other_server_answers(self, authority, udp, watched, monkeypatch):
        monkeypatch.setattr(limits, "HEALTH_TIMEOUT_S", 0.1)
        silent, mute = await udp(lambda asked: []), await udp(lambda asked: [])
        one = prober(authority)
        found = await one.probe(target(silent.port, "h3"), NAME)
        assert found == (None, "quic: silent, as all servers of QUIC are from here")
        assert await one.ill({target(silent.port, "h3"): NAME}) == {}
        endpoints = tuple(Endpoint(host="127.0.0.1", port=each.port, carrier="h3") for each in (silent, mute))
        watched.monitor.watch(RuleSet(version=1, hosts={NAME: HostPlan(endpoints=endpoints)}))
        await watched.until(lambda: len(silent.heard) > 10)
        assert watched.verdict(silent.port) is Verdict.UNKNOWN
        assert watched.told == []

    async def test_server_of_other_versions_is_ill_and_so_is_a_silent_one(self, authority, udp, monkeypatch):
        other, silent = await udp(lambda asked: [said(asked, 0xFF00001D)]), await udp(lambda asked: [])
        one = prober(authority)
        outcome = await one.probe(target(other.port, "h3"), NAME)
        assert outcome == (False, "quic: it speaks 0xff00001d and no version of ours")
        monkeypatch.setattr(limits, "HEALTH_TIMEOUT_S", 0.3)
        outcome = await one.probe(target(silent.port, "h3"), NAME)
        assert outcome == (False, "quic: nothing within 0.3 s")

    async def test_endpoint_whose_udp_is_lost_is_left_out_after_several_probes_and_taken_back(self, udp, watched):
        up = True
        server, steady = (
            await udp(lambda asked: [said(asked, 1)] if up else []),
            await udp(lambda asked: [said(asked, 1)]),
        )
        endpoints = tuple(Endpoint(host="127.0.0.1", port=each.port, carrier="h3") for each in (server, steady))
        watched.monitor.watch(RuleSet(version=1, hosts={NAME: HostPlan(endpoints=endpoints)}))
        await watched.until(lambda: watched.verdict(server.port) is Verdict.WELL)
        up = False
        await watched.until(lambda: watched.told)
        assert watched.monitor(endpoints) == endpoints[1:]
        up = True
        await watched.until(lambda: len(watched.told) == 2)
        assert watched.monitor(endpoints) == endpoints


class Watched:
    """A monitor that runs, and what it told."""

    def __init__(self, authority: Authority, drains: Drains) -> None:
        self.told: list[frozenset[Part]] = []
        check = HttpCheck("/health")
        self.monitor = Monitor(FAST, drains, prober(authority, check=check), rng=SystemRng(), told=self.told.append)
        self.task = asyncio.create_task(self.monitor.run())

    def verdict(self, port: int) -> Verdict | None:
        states = {state.address: state.verdict for state in self.monitor.snapshot().targets}
        return states.get(f"127.0.0.1:{port}")

    async def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise TimeoutError

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


@pytest.fixture(name="drains")
def _drains() -> Drains:
    return Drains()


@pytest.fixture(name="watched")
async def _watched(authority: Authority, drains: Drains) -> AsyncIterator[Watched]:
    watched = Watched(authority, drains)
    yield watched
    await watched.end()


class TestMonitor:
    async def test_server_that_goes_and_comes_is_left_out_and_taken_back_and_told(self, serve, watched):
        first, second = await serve(), await serve()
        endpoints = tuple(Endpoint(host="127.0.0.1", port=each.port, carrier="h1") for each in (first, second))
        plan = HostPlan(endpoints=endpoints)
        watched.monitor.watch(RuleSet(version=1, hosts={NAME: plan, "b.test": plan}))
        await watched.until(lambda: watched.verdict(second.port) is Verdict.WELL)
        assert watched.told == [], "what was believed is confirmed: nothing changed"
        second.up = False
        await watched.until(lambda: watched.told)
        assert watched.told == [frozenset({Part(host=NAME), Part(host="b.test")})]
        assert watched.monitor(endpoints) == endpoints[:1]
        revision = watched.monitor.revision
        second.up = True
        await watched.until(lambda: len(watched.told) == 2)
        assert watched.monitor(endpoints) == endpoints
        assert watched.monitor.revision > revision

    async def test_flapping_server_is_not_believed_at_once(self, serve, watched):
        server, steady = await serve(), await serve()
        endpoints = tuple(Endpoint(host="127.0.0.1", port=each.port, carrier="h1") for each in (server, steady))
        watched.monitor.watch(RuleSet(version=1, hosts={NAME: HostPlan(endpoints=endpoints)}))
        for _ in range(4):
            server.up = False
            await watched.until(lambda: watched.verdict(server.port) is Verdict.ILL)
            server.up = True
            await watched.until(lambda: watched.verdict(server.port) in (Verdict.WELL, Verdict.DAMPED))
        assert watched.verdict(server.port) is Verdict.DAMPED
        assert watched.monitor(endpoints) == endpoints[1:]

    async def test_drain_is_told_for_its_hosts_alone_and_the_last_one_stays(self, serve, watched, drains):
        one, two = await serve(), await serve()
        first, second = (Endpoint(host="127.0.0.1", port=each.port, carrier="h1") for each in (one, two))
        hosts = {NAME: HostPlan(endpoints=(first, second)), "b.test": HostPlan(endpoints=(second,))}
        watched.monitor.watch(RuleSet(version=1, hosts=hosts))
        drains.put(Drained(host="127.0.0.1", port=one.port))
        assert watched.told == [frozenset({Part(host=NAME)})]
        assert watched.monitor((first, second)) == (second,)
        drains.put(Drained(host="127.0.0.1", port=two.port))
        assert watched.told[1:] == [frozenset({Part(host=NAME)})]
        assert watched.monitor((second,)) == (second,)
        drains.end(Drained(host="127.0.0.1", port=one.port))
        drains.end(Drained(host="127.0.0.1", port=two.port))
        assert watched.monitor((first, second)) == (first, second)

    async def test_gateways_of_an_app_are_told_beside_its_hosts(self, serve, watched):
        one, two = await serve(alpn=("sl/1",)), await serve(alpn=("h2",))
        first, second = (
            Endpoint(host="127.0.0.1", port=each.port, carrier="sl-tls", server_name=NAME) for each in (one, two)
        )
        hosts = {"b.test": HostPlan(endpoints=(first,)), "c.test": HostPlan(endpoints=(first, second))}
        watched.monitor.watch(RuleSet(version=1, hosts=hosts, gateways={"a": (first, second), "b": (first,)}))
        await watched.until(lambda: watched.told)
        assert watched.told == [frozenset({Part(app="a"), Part(host="c.test")})]

    async def test_two_rule_sets_at_once_are_each_judged_as_they_are(self, serve, watched):
        servers = [await serve() for _ in range(3)]
        one, two, three = (Endpoint(host="127.0.0.1", port=each.port, carrier="h1") for each in servers)
        old, new = (
            RuleSet(version=number, hosts={NAME: HostPlan(endpoints=endpoints)})
            for number, endpoints in ((1, (one, two)), (2, (one, two, three)))
        )
        watched.monitor.watch(old, new)
        servers[2].up = False
        await watched.until(lambda: watched.told)
        assert watched.told == [frozenset({Part(host=NAME)})]
        assert watched.monitor((one, two)) == (one, two)
        assert watched.monitor((one, two, three)) == (one, two)

    async def test_no_more_probes_at_once_than_the_bound(self, authority, monkeypatch):
        monkeypatch.setattr(limits, "HEALTH_PROBES_MAX", 4)
        held: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda reader, writer: held.append(writer), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        watched = Watched(authority, Drains())
        names = [f"h{number}.test" for number in range(20)]
        plans = {
            name: HostPlan(endpoints=(Endpoint(host="127.0.0.1", port=port, carrier="h1", server_name=name),))
            for name in names
        }
        watched.monitor.watch(RuleSet(version=1, hosts=plans))
        await watched.until(lambda: len(held) == 4)
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert len(held) == 4
        await watched.end()
        silent.close()
        for writer in held:
            writer.transport.abort()


async def test_centre_hands_out_only_what_answers_and_all_of_it_where_nothing_does(authority, serve):
    """The parts together: what the probes find ill is left out of the signed plan, and never all of it."""
    server = await serve(NAME)
    good = Endpoint(host="127.0.0.1", port=server.port, carrier="h1", server_name=NAME)
    dead = Endpoint(host="127.0.0.1", port=1, carrier="h1", server_name=NAME)
    hosts = {NAME: HostPlan(endpoints=(good, dead)), "lost.test": HostPlan(endpoints=(dead,))}
    rules = check(RuleSet(version=1, hosts=hosts, apps={"shop": frozenset(hosts)}))
    health = HealthConfig(policy=FAST, ca_pem=authority.certificate.read_bytes())
    beside = Beside(HeldRules(rules), health, SystemRng())
    key = SigningKey(Ed25519PrivateKey.generate(), "k")
    signer = PlanSigner(key, standing=beside.monitor)

    async def nobody(message: Message) -> Reply:
        raise AssertionError("nobody asks")

    def given(host: str) -> set[int]:
        text = signer.answer(PlanRequest(app="shop", hosts=(host,)), rules, 1e9)
        keys = {key.kid: key.key.public_key()}
        plan = wire_plan.verify(text, keys=keys, app="shop", hosts=(host,), version_min=1, wall=1e9)
        return {each.port for each in plan.hosts[host].endpoints}

    beside.begin("u1", nobody, None)
    try:
        assert given(NAME) == {server.port, 1}, "nothing is known yet"
        for _ in range(2000):
            if given(NAME) == {server.port}:
                break
            await asyncio.sleep(0.01)
        assert (given(NAME), given("lost.test")) == ({server.port}, {1})
    finally:
        await beside.end()
