"""Names under real requests: a system resolver that lies, a real server for DNS over HTTPS, certificates that tell.

The laboratory's DNS (`stormline.lab.dns`) is the system's resolver here, asked as the C library would ask; hypercorn
serves DNS over HTTPS by HTTP/2, as large operators do.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import time

import dns.message
import dns.rdatatype
import httpx2
import pytest

import stormline
from stormline.client.outside import Outside
from stormline.core import errors, limits_names
from stormline.lab.chance import SeededRng
from stormline.lab.dns import Zone
from stormline.lab.specs import DnsSpec
from stormline.net.clock import SystemClock
from stormline.net.resolve import NoName, SystemNames
from stormline.outbound.dial import Dialer
from stormline.outbound.doh import DohNames, DohServer, NoNames
from stormline.testing.foreign import running_server
from stormline.testing.origin import plain, running_origin
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback

SHOP, DNS = "shop.test", "dns.test"
HERE, THERE = "127.0.0.1", "127.0.0.2"
"""The true address, and that of somebody else."""
MEDIA = "application/dns-message"
DOH_APP = """
import base64, json, pathlib, urllib.parse
import dns.message, dns.rcode, dns.rdatatype, dns.rrset

ZONE = json.loads(pathlib.Path(__file__).with_name("zone.json").read_text())

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    assert scope["method"] == "POST" and scope["path"] == "/dns-query", scope
    query = dns.message.from_wire(body)
    answer = dns.message.make_response(query, recursion_available=True)
    name, kind = query.question[0].name, query.question[0].rdtype
    known = ZONE.get(name.to_text(omit_final_dot=True).lower())
    if known is None:
        answer.set_rcode(dns.rcode.NXDOMAIN)
        soa = dns.rrset.from_text("test.", 300, "IN", "SOA", "ns.test. who.test. 1 2 3 4 7")
        answer.authority.append(soa)
    for address in known or ():
        if (":" in address) == (kind == dns.rdatatype.AAAA):
            answer.answer.append(dns.rrset.from_text(name, 60, "IN", dns.rdatatype.to_text(kind), address))
    wire = answer.to_wire()
    headers = [(b"content-type", b"application/dns-message"), (b"content-length", b"%d" % len(wire)),
               (b"age", b"20"), (b"x-version", scope["http_version"].encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": wire})
"""


def context_of(files):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context


@pytest.fixture(scope="module", name="doh_server")
def _doh_server(pki, tmp_path_factory):
    """Run DNS over HTTPS for `dns.test`, which knows the truth."""
    folder = tmp_path_factory.mktemp("doh")
    zone = {SHOP: [HERE], "both.test": ["203.0.113.7", "2001:db8::7"], "none.test": []}
    (folder / "zone.json").write_text(json.dumps(zone))
    with running_server("hypercorn", folder, pki.ca.issue("doh", names=[DNS]), app=DOH_APP) as server:
        yield DohServer(f"https://{DNS}:{server.address.port}/dns-query", (HERE,))


@pytest.fixture(name="shop")
async def _shop(pki):
    """Run the shop at its true address, and somebody else with another certificate at the same port of another."""
    true, other = pki.ca.issue("shop", names=[SHOP]), pki.ca.issue("bank", names=["bank.test"])
    async with contextlib.AsyncExitStack() as stack:
        origin = await stack.enter_async_context(running_origin(ssl=context_of(true)))
        liar = await asyncio.start_server(
            lambda reader, writer: writer.close(), THERE, origin.address.port, ssl=context_of(other)
        )
        stack.push_async_callback(liar.wait_closed)
        stack.callback(liar.close)
        yield origin


class Dns:
    """A system resolver that asks the laboratory's name server."""

    def __init__(self, spec, seed=1, hold_s=0.0):
        self.zone = Zone({SHOP: [HERE], DNS: [THERE]}, [THERE], spec, SeededRng("dns", seed))
        self.hold_s = hold_s
        self.asked = 0

    def lookup(self, host):
        self.asked += 1
        time.sleep(self.hold_s)
        wire = self.zone.answer_plain(dns.message.make_query(host, "A").to_wire(), udp=True)
        if wire is None:
            time.sleep(1.5)  # the C library would wait for 5
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        answer = dns.message.from_wire(wire)
        found = [record.address for each in answer.answer for record in each]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (each, 0)) for each in found]

    @property
    def outside(self):
        return Outside(names=lambda: SystemNames(lookup=self.lookup))


@contextlib.asynccontextmanager
async def client(dns, trust, **config):
    settings = stormline.Config(trust_env=False, private_hosts=frozenset({"test"}), **config)
    transport = stormline.AsyncTransport(config=settings, verify=trust(), outside=dns.outside)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield http, transport


async def ask(http, shop):
    """Ask once; give status and story."""
    answer = await http.get(f"https://{SHOP}:{shop.address.port}/")
    return answer.status_code, "\n".join(line for _, line in answer.extensions["stormline"].timeline.story)


# -- lies -------------------------------------------------------------------------------------------------------------
async def test_hijacked_name_is_answered_within_the_first_request(shop, trust, doh_server):
    dns = Dns(DnsSpec(lie_pct=100))
    async with client(dns, trust, doh=(doh_server,)) as (http, _):
        status, story = await ask(http, shop)
        assert (status, shop.counts["GET"]) == (200, 1)
        assert "certificate refused" in story
        assert f"asking another than the system for {SHOP}" in story
        assert f"DoH {DNS} gives {HERE}" in story
        assert "try direct" in story
        assert story.count("try direct") == 1, "one attempt: the dial itself found the way"


async def test_hijacked_name_without_doh_fails_as_ever(shop, trust):
    async with client(Dns(DnsSpec(lie_pct=100)), trust, deadline_s=3.0) as (http, _):
        with pytest.raises(errors.TlsError):
            await ask(http, shop)
    assert shop.counts["GET"] == 0


async def test_hijacked_name_with_a_backup_address_is_answered(shop, trust):
    async with client(Dns(DnsSpec(lie_pct=100)), trust, backup_addresses={SHOP: (HERE,)}) as (http, _):
        status, story = await ask(http, shop)
        assert (status, f"in reserve: {HERE}" in story) == (200, True)


async def test_pinned_name_asks_nobody(shop, trust):
    dns = Dns(DnsSpec(lie_pct=100))
    async with client(dns, trust, pinned={SHOP: (HERE,)}) as (http, _):
        assert (await ask(http, shop))[0] == 200
    assert dns.asked == 0


async def test_pinned_address_of_somebody_else_is_refused_and_not_got_round(shop, trust, doh_server):
    async with client(Dns(DnsSpec()), trust, pinned={SHOP: (THERE,)}, doh=(doh_server,), deadline_s=3.0) as (http, _):
        with pytest.raises(errors.TlsError):
            await ask(http, shop)


@pytest.mark.parametrize("seed", range(1, 6))
async def test_flaky_name_server_loses_no_request(shop, trust, doh_server, seed):
    dns = Dns(DnsSpec(lie_pct=30, drop_pct=30), seed=seed)
    async with client(dns, trust, doh=(doh_server,)) as (http, transport):
        for _ in range(12):
            assert (await ask(http, shop))[0] == 200
            # Every request connects anew and asks anew, as if its answers were all too old.
            runtime = transport.runtime()
            runtime._pool.doubt()
            runtime.names._memory.doubt_all()
    assert shop.counts["GET"] == 12


# -- no waiting -------------------------------------------------------------------------------------------------------
async def test_known_name_waits_for_no_name_server_that_is_dead(shop, trust):
    dns = Dns(DnsSpec())
    async with client(dns, trust) as (http, transport):
        await ask(http, shop)
        dns.hold_s = 0.5
        for _ in range(10):
            runtime = transport.runtime()
            runtime._pool.doubt()
            runtime.names.doubt(SHOP)
            answer = await http.get(f"https://{SHOP}:{shop.address.port}/")
            record = answer.extensions["stormline"].record
            assert record.stages_ms.get("resolve", 0.0) < 100.0
        await wait_until(lambda: not runtime.names._sources._system._jobs)


async def test_app_that_returns_needs_no_name_server(shop, trust, tmp_path):
    async with client(Dns(DnsSpec()), trust, store=tmp_path) as (http, _):
        await ask(http, shop)
    dead = Dns(DnsSpec(drop_pct=100))
    async with client(dead, trust, store=tmp_path) as (http, transport):
        status, story = await ask(http, shop)
        assert status == 200
        assert "remembered for" in story
        assert "proven" in story
        await wait_until(lambda: not transport.runtime().names._sources._system._jobs)


async def test_name_found_before_it_is_needed(shop, trust):
    dns = Dns(DnsSpec())
    async with client(dns, trust) as (http, transport):
        assert await transport.resolve(SHOP) == (HERE,)
        assert (await ask(http, shop))[0] == 200
        assert dns.asked == 1
        with pytest.raises(errors.ResolveError):
            await transport.resolve("other.test")


# -- DNS over HTTPS itself --------------------------------------------------------------------------------------------
@pytest.fixture(name="names_of")
async def _names_of(trust):
    made = []

    def make(*servers, **more):
        dialer = Dialer(NoNames(), trust(), **more)
        made.append(DohNames(servers, dialer, SystemClock()))
        return made[-1]

    yield make
    for each in made:
        each.close()


@contextlib.asynccontextmanager
async def doh_at(pki, answer, *, name=DNS):
    """Run an HTTP/1.1 server for names; `answer(question)` gives the bytes of its answer, None: nothing."""

    async def serve(request, writer):
        reply = answer(dns.message.from_wire(request.body))
        if reply is None:
            await asyncio.Event().wait()
        writer.write(reply)

    async with running_origin(serve, ssl=context_of(pki.ca.issue("doh1", names=[name]))) as origin:
        origin.server = DohServer(f"https://{name}:{origin.address.port}/dns-query", (HERE,))
        yield origin


def told(query, *addresses, rcode=0):
    answer = dns.message.make_response(query)
    answer.set_rcode(rcode)
    for address in addresses:
        if query.question[0].rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(query.question[0].name, 60, "IN", "A", address))
    return plain(answer.to_wire(), content_type=MEDIA)


async def test_doh_gives_both_families_over_one_http2_connection(names_of, doh_server, monkeypatch):
    monkeypatch.setattr(limits_names, "DOH_OTHER_FAMILY_S", 10.0)
    names = names_of(doh_server)
    found = await asyncio.gather(*(names.ask("both.test") for _ in range(10)))
    assert {tuple(sorted(each.addresses)) for each in found} == {("2001:db8::7", "203.0.113.7")}
    assert {(each.ttl_s, each.source) for each in found} == {(40.0, f"DoH {DNS}")}, "a cache has had it for 20 s"
    (place,) = names._pool._places.values()
    assert len(place.shared) == 1


async def test_doh_says_what_does_not_exist_and_for_how_long(names_of, doh_server):
    names = names_of(doh_server)
    with pytest.raises(NoName) as caught:
        await names.ask("absent.test")
    assert (caught.value.errno, caught.value.ttl_s) == (socket.EAI_NONAME, 0.0), "7 s, of which 20 are over"
    with pytest.raises(NoName, match="no address"):
        await names.ask("none.test")


@pytest.mark.parametrize(
    "answer",
    [
        lambda query: plain(b"busy", status="503 Service Unavailable"),
        lambda query: plain(b"<html>", content_type="text/html"),
        lambda query: plain(b"\0" * 9, content_type=MEDIA),
        lambda query: plain(b"\0" * 70_000, content_type=MEDIA),
        lambda query: told(query, rcode=2),
        lambda query: b"nonsense\r\n\r\n",
        lambda query: None,
    ],
    ids=["503", "page", "junk", "large", "servfail", "no-http", "silence"],
)
async def test_doh_server_that_does_not_do_has_the_next_one_asked(pki, names_of, monkeypatch, answer):
    monkeypatch.setattr(limits_names, "DOH_STAGGER_S", 0.2)
    notes = []
    async with doh_at(pki, answer) as bad, doh_at(pki, lambda query: told(query, HERE)) as good:
        names = names_of(bad.server, good.server)
        assert (await names.ask(SHOP, on_note=notes.append)).addresses == (HERE,)
        if answer(dns.message.make_query(SHOP, "A")) is not None:
            assert notes


async def test_doh_server_that_failed_goes_last_for_a_while(pki, names_of):
    async with (
        doh_at(pki, lambda query: plain(b"", status="500 No")) as bad,
        doh_at(pki, lambda query: told(query, HERE)) as good,
    ):
        names = names_of(bad.server, good.server)
        for number in range(5):
            await names.ask(f"n{number}.test")
        assert bad.counts["POST"] <= 2
        assert good.counts["POST"] == 10
        names.doubt()
        await names.ask(SHOP)
        assert bad.counts["POST"] > 2


async def test_doh_server_with_another_certificate_is_not_asked(pki, names_of):
    async with doh_at(pki, lambda query: told(query, THERE), name="liar.test") as liar:
        names = names_of(DohServer(f"https://{DNS}:{liar.address.port}/dns-query", (HERE,)))
        with pytest.raises(OSError, match="certificate refused"):
            await names.ask(SHOP)
        assert liar.requests == []


async def test_doh_connection_that_died_is_replaced(pki, names_of, monkeypatch):
    monkeypatch.setattr(limits_names, "DOH_STAGGER_S", 0.1)
    deaf = [False]

    def answer(query):
        return None if deaf[0] else told(query, HERE)

    async with doh_at(pki, answer) as origin:
        names = names_of(origin.server)
        await names.ask("a.test")
        deaf[0] = True
        asking = asyncio.create_task(names.ask("b.test"))
        await wait_until(lambda: origin.counts["POST"] > 2)
        deaf[0] = False  # the old connection stays deaf: its question is not answered any more
        assert (await asking).addresses == (HERE,)


async def test_doh_ask_cancelled_leaves_nothing(pki, names_of):
    async with doh_at(pki, lambda query: None) as origin:
        names = names_of(origin.server)
        asking = asyncio.create_task(names.ask(SHOP))
        await wait_until(lambda: origin.counts["POST"])
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not [task for task in asyncio.all_tasks() if SHOP in task.get_name()]


async def test_doh_nobody_there_says_so(names_of):
    with socket.socket() as sock:
        sock.bind((HERE, 0))
        port = sock.getsockname()[1]
    names = names_of(DohServer(f"https://{DNS}:{port}/dns-query", (HERE,)))
    with pytest.raises(OSError, match="refused"):
        await names.ask(SHOP)
    with pytest.raises(OSError, match="no other"):
        await names.ask(SHOP, avoid=(f"DoH {DNS}",))
