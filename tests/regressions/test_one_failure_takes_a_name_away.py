"""One SERVFAIL took a name away for as long as the cache's least TTL said, up to an hour.

The story: a failure inherited the floor meant for answers (systemd/systemd #18769, razvandimescu/numa #376), or a kept
failure stood before an answer that was still good (coredns/coredns #7956). Found here by the same play: an absence told
to others with more than its zone's time and without its age, an absence that stood in for a failing server for an
hour, four seconds of waiting before an answer that had run out was given, and an answer of 2 s kept for 30.

A zone, a scheduling centre that forwards to it, and a client that asks the centre: the real parts, on virtual time,
asked once a second. The rules say 3600 s wherever a floor could come from.
"""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

import dns.edns
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.client.config import Config
from stormline.client.names import NameService
from stormline.core import limits_names
from stormline.core import limits_platform as limits
from stormline.core.values import Address, Secret
from stormline.dispatch import rules, upstream
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.doh import DohConfig
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.service import DispatchService
from stormline.outbound.doh import DohNames
from stormline.outbound.doh_server import DohServer
from stormline.testing.simloop import SimClock, SimRng, on_virtual_time
from stormline.wire import dns_server, jws, plan
from stormline.wire.plan import Endpoint, HostPlan, PlanRequest

SHOP, ORIGIN = "shop.example", "origin.example"
OLD, NEW = "192.0.2.1", "192.0.2.2"
TTL_S, FAILS_S, RECOVERED_S = 30, 3, 5
PLAN_KEY, TOKEN_KEY = (jws.SigningKey(Ed25519PrivateKey.generate(), kid) for kid in ("plan", "token"))
FLOOR_S = 3600


class Authority:
    """The zone's server.

    Attributes:
        does: `answer`, `servfail`, `silent` or `absent`.
        address: of the name.
        soa: TTL and minimum of what it says with an absence; None: it says nothing.
    """

    def __init__(self) -> None:
        self.does, self.address = "answer", OLD
        self.soa: tuple[int, int] | None = (900, 5)
        self.asked = 0

    async def ask(self, question: upstream.Question) -> dns_server.Relayed:
        self.asked += 1
        await asyncio.sleep(0)
        if self.does == "silent":
            await asyncio.sleep(3600)
        query = dns.message.from_wire(bytes(4) + b"\0\1" + bytes(6) + question.wire)
        answer = dns.message.make_response(query)
        asked = query.question[0]
        if self.does == "servfail":
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif self.does == "answer" and asked.rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(asked.name, TTL_S, "IN", "A", self.address))
        else:
            if self.does == "absent":
                answer.set_rcode(dns.rcode.NXDOMAIN)
            if self.soa is not None:
                text = f"ns. admin. 1 2 3 4 {self.soa[1]}"
                answer.authority.append(dns.rrset.from_text("example.", self.soa[0], "IN", "SOA", text))
        return dns_server.read_relayed(answer.to_wire(), 0, question.wire)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Said:
    """An answer by DNS over HTTPS: TTLs are the longest that anybody may keep it by."""

    rcode: int
    addresses: tuple[str, ...]
    stale: bool
    ttl_s: int
    max_age_s: int
    took_s: float


class Centre:
    """A scheduling centre that forwards to the zone; also what `DohNames` takes for its pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.zone = Authority()
        monkeypatch.setattr(upstream, "servers_of", lambda *_, **__: [self.zone])
        loop = asyncio.get_running_loop()
        host = HostPlan(endpoints=(Endpoint(host=ORIGIN, port=443),), ttl_s=FLOOR_S)
        made = RuleSet(version=1, hosts={SHOP: host}, apps={"shop": frozenset({SHOP})})
        self.service = DispatchService(
            DispatchConfig(
                host="127.0.0.1", port=0, tls=None, unit="u1", rules=rules.check(made), plan_key=PLAN_KEY,
                token_key=TOKEN_KEY, admin_key=Secret("an-admin-key-0123"),
                doh=DohConfig(upstream=(Address("192.0.2.53", 53),)),
            ),
            clock=SimClock(loop), rng=SimRng(1),
        )  # fmt: skip

    async def post(self, body: bytes) -> tuple[int, tuple[tuple[bytes, bytes], ...], bytes]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        head = [(b"content-type", b"application/dns-message")]
        await self.service.doh({"type": "http", "method": "POST", "headers": head, "query_string": b""}, receive, send)
        return sent[0]["status"], tuple(sent[0]["headers"]), sent[1]["body"]

    async def ask(self, name: str) -> Said:
        began = now()
        _, headers, body = await self.post(dns.message.make_query(name, "A", use_edns=0).to_wire())
        found = dns.message.from_wire(body)
        kept = dict(headers)[b"cache-control"]
        ttls = [each.ttl for each in (*found.answer, *found.authority)]
        return Said(
            found.rcode(),
            tuple(str(each) for rows in found.answer if rows.rdtype == dns.rdatatype.A for each in rows),
            any(isinstance(each, dns.edns.EDEOption) and each.code == dns_server.STALE for each in found.options),
            min(ttls, default=0),
            0 if kept == b"no-store" else int(kept.rpartition(b"=")[2]),
            round(now() - began, 3),
        )

    def endpoint(self) -> str:
        """Give where the signed plan says that the shop is."""
        text = self.service.answer(PlanRequest(app="shop", hosts=(SHOP,)))
        keys = {PLAN_KEY.kid: PLAN_KEY.key.public_key()}
        wall = SimClock(asyncio.get_running_loop()).wall()
        found = plan.verify(text, keys=keys, app="shop", hosts=(SHOP,), version_min=0, wall=wall)
        return found.hosts[SHOP].endpoints[0].host

    # -- `HttpPool` -----------------------------------------------------------------------------------------------
    async def request(self, request: Any, **_: Any) -> Any:
        return _Response(*await self.post(request.body))

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class _Response:
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    async def read(self, _: int) -> bytes:
        return self.body

    async def aclose(self) -> None:
        """It was read."""


class NoSystem:
    """A system's resolver that is out of order, so that the centre is asked."""

    def ask(self, host: str, *, refresh: bool) -> asyncio.Future[Any]:
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
        return failed

    def withdraw(self, host: str) -> None:
        """Nothing runs."""


class Client:
    """The client's own names."""

    def __init__(self, centre: Centre) -> None:
        server = DohServer("https://dispatch.example/dns-query", ("192.0.2.80",))
        asking = DohNames([server], None, SimClock(asyncio.get_running_loop()))  # type: ignore[arg-type]
        asking._pool = centre  # type: ignore[assignment]
        self.names = NameService(Config(), NoSystem(), doh=asking, wall_s=lambda: 1e9)

    async def find(self) -> str | int | None:
        """Give the address, or the number of the error."""
        try:
            return (await self.names.find(ORIGIN, 443))[0].host
        except OSError as error:
            return error.errno


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Second:
    """What everybody said in one second since the answer ran out."""

    at_s: float
    forwarded: Said
    alias: Said
    client: str | int | None


class Play:
    """Asks everybody once a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.centre = Centre(monkeypatch)
        self.zone = self.centre.zone
        self.client = Client(self.centre)

    async def second(self, began: float) -> Second:
        at_s = now() - began
        forwarded, alias, client = await asyncio.gather(
            self.centre.ask(ORIGIN), self.centre.ask(SHOP), self.client.find()
        )
        assert self.centre.endpoint() == ORIGIN, "the signed plan does not depend on DNS"
        return Second(at_s, forwarded, alias, client)

    async def run(self, does: str, *, fails_s: float = FAILS_S, watch_s: float = 60.0) -> list[Second]:
        """Have the good answer run out, the zone do something else for a while, and then answer anew."""
        await self.second(now())
        await asyncio.sleep(TTL_S)
        began = now()
        self.zone.does, self.zone.address = does, NEW
        healed = asyncio.get_running_loop().call_later(fails_s, setattr, self.zone, "does", "answer")
        seconds = []
        while now() - began < watch_s:
            next_at = now() + 1.0
            seconds.append(await self.second(began))
            await asyncio.sleep(max(0.0, next_at - now()))
        healed.cancel()
        return seconds

    async def close(self) -> None:
        await self.client.names.aclose()
        await self.centre.service.doh.close()


def play(story: Any) -> Any:
    """Run a story on virtual time, with a `Play`."""

    def run(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        @on_virtual_time
        async def scene() -> None:
            playing = Play(monkeypatch)
            await story(playing, **more)
            await playing.close()

        scene()

    return run


class TestFailure:
    @pytest.mark.parametrize("does", ["servfail", "silent"])
    def test_last_good_answer_serves_marked_as_stale_and_the_new_one_comes_within_seconds(self, monkeypatch, does):
        @play
        async def story(playing: Play) -> None:
            seconds = await playing.run(does)
            for each in seconds:
                for said in (each.forwarded, each.alias):
                    assert said.rcode == dns.rcode.NOERROR
                    assert said.took_s < limits_names.DOH_STAGGER_S, "before a client asks another server"
                    if each.at_s < FAILS_S:
                        assert (said.addresses, said.stale) == ((OLD,), True)
                        assert said.max_age_s <= RECOVERED_S
                        assert said.ttl_s <= RECOVERED_S
                    elif each.at_s >= FAILS_S + RECOVERED_S:
                        assert (said.addresses, said.stale) == ((NEW,), False)
                        assert said.max_age_s <= TTL_S
                assert each.client in (OLD, NEW)
                assert each.client == NEW or each.at_s < FAILS_S + RECOVERED_S
            assert playing.zone.asked < 2 * len(seconds)

        story(monkeypatch)

    @pytest.mark.parametrize("does", ["servfail", "silent"])
    def test_name_of_which_nothing_is_known_fails_for_seconds_only(self, monkeypatch, does):
        @play
        async def story(playing: Play) -> None:
            playing.zone.does = does
            said = await playing.centre.ask(ORIGIN)
            assert (said.rcode, said.addresses, said.max_age_s) == (dns.rcode.SERVFAIL, (), 0)
            assert await playing.client.find() == socket.EAI_AGAIN
            playing.zone.does = "answer"
            await asyncio.sleep(RECOVERED_S)
            assert (await playing.centre.ask(ORIGIN)).addresses == (OLD,)
            assert await playing.client.find() == OLD

        story(monkeypatch)

    def test_failure_does_not_stand_before_an_answer_that_is_still_good(self, monkeypatch):
        @play
        async def story(playing: Play) -> None:
            await playing.second(now())
            playing.zone.does = "servfail"
            await playing.centre.post(dns.message.make_query(ORIGIN, "A", want_dnssec=True).to_wire())
            await asyncio.sleep(TTL_S - 1)
            for each in (await playing.centre.ask(ORIGIN), await playing.centre.ask(SHOP)):
                assert (each.addresses, each.stale) == ((OLD,), False)

        story(monkeypatch)

    def test_answer_stands_in_for_its_window_and_no_longer(self, monkeypatch):
        @play
        async def story(playing: Play) -> None:
            await playing.centre.ask(ORIGIN)
            playing.zone.does = "servfail"
            await asyncio.sleep(TTL_S + limits.FORWARD_STALE_S - 1)
            assert (await playing.centre.ask(ORIGIN)).stale
            await asyncio.sleep(1)
            assert (await playing.centre.ask(ORIGIN)).rcode == dns.rcode.SERVFAIL

        story(monkeypatch)


class TestAbsence:
    @pytest.mark.parametrize(("soa", "lasts_s"), [((900, 5), 5), ((5, 900), 5), ((86_400, 86_400), 60), (None, 0)])
    def test_absence_takes_the_place_of_the_answer_for_what_its_zone_says(self, monkeypatch, soa, lasts_s):
        @play
        async def story(playing: Play) -> None:
            playing.zone.soa = soa
            seconds = await playing.run("absent", watch_s=80.0)
            back_s = max(FAILS_S, lasts_s)
            for each in seconds:
                said = each.forwarded
                if each.at_s < back_s:
                    assert (said.rcode, said.addresses, said.stale) == (dns.rcode.NXDOMAIN, (), False)
                    assert said.max_age_s <= max(0, lasts_s - each.at_s)
                    assert said.ttl_s <= max(0, lasts_s - each.at_s)
                    assert each.alias.rcode == dns.rcode.NXDOMAIN, "of the last name (RFC 6604 section 3)"
                    assert each.client == socket.EAI_NONAME or each.at_s < 1, "asked behind the old answer, once"
                elif each.at_s >= back_s + RECOVERED_S:
                    assert (said.addresses, each.alias.addresses, each.client) == ((NEW,), (NEW,), NEW)

        story(monkeypatch)

    def test_absence_told_late_is_not_kept_for_its_whole_time_again(self, monkeypatch):
        @play
        async def story(playing: Play) -> None:
            playing.zone.does, playing.zone.soa = "absent", (86_400, 86_400)
            await playing.centre.ask(ORIGIN)
            await asyncio.sleep(50)
            assert await playing.client.find() == socket.EAI_NONAME
            playing.zone.does = "answer"
            await asyncio.sleep(limits.FORWARD_ABSENT_S_MAX - 50)
            assert await playing.client.find() == OLD

        story(monkeypatch)

    def test_absence_that_has_run_out_does_not_stand_in_for_a_server_that_fails(self, monkeypatch):
        @play
        async def story(playing: Play) -> None:
            playing.zone.does = "absent"
            await playing.centre.ask(ORIGIN)
            playing.zone.does = "servfail"
            await asyncio.sleep(5)
            assert (await playing.centre.ask(ORIGIN)).rcode == dns.rcode.SERVFAIL

        story(monkeypatch)
