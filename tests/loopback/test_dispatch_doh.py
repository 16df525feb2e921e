"""DNS over HTTPS of a real scheduling centre, asked by clients not written here: dnspython, curl, kdig, Chromium."""

import asyncio
import base64
import contextlib
import json
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import dns.edns
import dns.flags
import dns.message
import dns.query
import dns.rcode
import dns.rdatatype
import httpx2
import msgspec
import pytest

from stormline.assembly.authority import Authority, ensure_authority, ensure_signing_key
from stormline.core import limits_platform
from stormline.core.values import Address, Secret
from stormline.dispatch import service
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.doh import DohConfig
from stormline.dispatch.rules import Network, Region, RuleSet
from stormline.dispatch.zone import Resolver
from stormline.lab import dns as lab_dns
from stormline.lab.chance import SeededRng
from stormline.lab.specs import DnsSpec
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.resolve import NoName
from stormline.outbound.dial import Dialer
from stormline.outbound.doh import DohNames, NoNames
from stormline.outbound.doh_server import DohServer
from stormline.testing.foreign import find, running_server
from stormline.testing.origin import plain, running_origin
from stormline.testing.ranked import ranked
from stormline.wire import dns_server
from stormline.wire.plan import Endpoint, HostPlan

pytestmark = pytest.mark.loopback

NAME, SHOP, MEDIA = "dispatch.stormline.test", "shop.example", "application/dns-message"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CERTUTIL = shutil.which("certutil")
KDIG = shutil.which("kdig")
CURL = shutil.which("curl")
PAGE = "<html><body><p>the page came</p></body></html>"


class Centre:
    """A running centre."""

    def __init__(self, address: Address, plain_address: Address, ca: Authority) -> None:
        self.address = address
        self.plain = plain_address
        self.ca = ca
        self.trust = ssl.create_default_context(cadata=ca.ca_pem)
        self.server = DohServer(f"https://{NAME}:{address.port}/dns-query", ("127.0.0.1",))

    @property
    def url(self) -> str:
        return f"https://{self.address}/dns-query"


def rules(port: int = 443, *carriers: str, host: str = "127.0.0.1") -> RuleSet:
    endpoints = ranked(Endpoint(host=host, port=port, carrier=each) for each in carriers or ("h1",))
    return RuleSet(version=3, hosts={SHOP: HostPlan(endpoints=endpoints)}, apps={"shop": frozenset({SHOP})})


@pytest.fixture(name="start")
async def _start(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Centre]]]:
    ends: list[Callable[[], Awaitable[Any]]] = []
    ca = ensure_authority(tmp_path / "pki", clock=SystemClock(), rng=SystemRng())

    async def start(given: RuleSet | None = None, *, tls: bool = True, **doh: Any) -> Centre:
        config = DispatchConfig(
            host="127.0.0.1",
            port=0,
            plain_port=0,
            tls=ca.issue("dispatch", names=[NAME], ips=["127.0.0.1"]) if tls else None,
            unit="u1",
            rules=given or rules(),
            plan_key=ensure_signing_key(tmp_path / "pki" / "plan-sign.pem", "plan"),
            token_key=ensure_signing_key(tmp_path / "pki" / "token-sign.pem", "token"),
            admin_key=Secret("an-admin-key-0123"),
            doh=DohConfig(resolver=Resolver(name=NAME), **doh),
        )
        stop, found = asyncio.Event(), asyncio.get_running_loop().create_future()
        plains: list[Address] = []
        task = asyncio.create_task(
            service.run(
                config,
                clock=SystemClock(),
                rng=SystemRng(),
                started=found.set_result,
                stop=stop,
                plain_started=plains.append,
            )
        )

        async def end() -> None:
            stop.set()
            await task

        ends.append(end)
        await asyncio.wait({task, found}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return Centre(found.result(), plains[0], ca)

    yield start
    for end in reversed(ends):
        await end()


async def ask(centre: Centre, name: str, kind: str, **more: Any) -> dns.message.Message:
    query = dns.message.make_query(name, kind, **more)
    async with client(centre) as http:
        answer = await http.post("/dns-query", content=query.to_wire(), headers={"content-type": MEDIA})
    assert answer.status_code == 200
    return dns.message.from_wire(answer.content)


def client(centre: Centre) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"https://{centre.address}", verify=centre.trust, trust_env=False)


async def run(*command: str, **env: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin:/usr/sbin", **env},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 40)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode(errors="replace")[-2000:]
    return out.decode(errors="replace")


# -- HTTP -------------------------------------------------------------------------------------------------------------
async def test_get_and_post_give_the_same_answer_with_its_least_ttl_as_freshness(start):
    centre = await start()
    wire = dns.message.make_query(SHOP, "A", id=0).to_wire()
    text = base64.urlsafe_b64encode(wire).rstrip(b"=").decode()
    async with client(centre) as http:
        got = await http.get("/dns-query", params={"dns": text})
        posted = await http.post("/dns-query", content=wire, headers={"content-type": MEDIA})
        head = await http.head("/dns-query", params={"dns": text})
    assert got.content == posted.content
    found = dns.message.from_wire(got.content)
    assert (found.id, found.answer[0].ttl, [str(each) for each in found.answer[0]]) == (0, 30, ["127.0.0.1"])
    for each in (got, posted, head):
        assert (each.headers["content-type"], each.headers["cache-control"]) == (MEDIA, "max-age=30")
        assert int(each.headers["content-length"]) == len(got.content)
    assert head.content == b""


async def test_bad_requests_get_the_status_that_says_why(start):
    centre = await start()
    wire = dns.message.make_query(SHOP, "A").to_wire()
    typed = {"content-type": MEDIA}
    async with client(centre) as http:
        answers = [
            await http.post("/dns-query", content=wire, headers={"content-type": "text/plain"}),
            await http.post("/dns-query", content=wire),
            await http.post("/dns-query", content=b"junk", headers=typed),
            await http.post("/dns-query", content=bytes(5000), headers=typed),
            await http.get("/dns-query"),
            await http.get("/dns-query?dns=AAAA&dns=AAAA"),
            await http.get("/dns-query?dns=a*b"),
            await http.get("/dns-query?dns=" + "A" * 6000),
            await http.put("/dns-query", content=wire, headers=typed),
        ]
        assert [each.status_code for each in answers] == [415, 415, 400, 413, 400, 400, 400, 414, 405]
        assert {each.headers["cache-control"] for each in answers} == {"no-store"}
        assert answers[-1].headers["allow"] == "GET, HEAD, POST"
    async with httpx2.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"http://{centre.plain}/dns-query", content=wire, headers=typed)
        assert answer.status_code == 404, "questions go over TLS only"


# -- records ----------------------------------------------------------------------------------------------------------
async def test_known_host_is_told_with_its_port_and_protocols(start):
    centre = await start(rules(8443, "h2", "h1"))
    found = await ask(centre, SHOP, "HTTPS")
    assert [str(each) for each in found.answer[0]] == ['1 . alpn="h2" port="8443" ipv4hint="127.0.0.1"']
    found = await ask(centre, f"_8443._https.{SHOP}", "HTTPS")
    assert [str(each) for each in found.answer[0]] == [f'1 {SHOP}. alpn="h2" ipv4hint="127.0.0.1"']
    found = await ask(centre, SHOP, "AAAA")
    assert (found.rcode(), found.answer, found.authority[0].rdtype) == (0, [], dns.rdatatype.SOA)


async def test_server_tells_how_it_is_asked_itself(start):
    centre = await start()
    found = await ask(centre, "_dns.resolver.arpa", "SVCB")
    (record,) = found.answer[0]
    assert str(record.target) == f"{NAME}."
    assert record.params[dns.rdtypes.svcbbase.ParamKey.PORT].port == centre.address.port
    assert record.params[7].value == b"/dns-query{?dns}"


async def test_unknown_name_without_an_upstream_server_is_refused(start):
    centre = await start()
    found = await ask(centre, "other.example", "A", use_edns=0)
    assert found.rcode() == dns.rcode.REFUSED
    assert [each.code for each in found.options] == [dns.edns.EDECode.NOT_AUTHORITATIVE]


# -- upstream servers -------------------------------------------------------------------------------------------------
class _Udp(asyncio.DatagramProtocol):
    def __init__(self, zone: lab_dns.Zone) -> None:
        self.zone = zone

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        answer = self.zone.answer_plain(data, udp=True)
        if answer is not None:
            self.transport.sendto(answer, addr)


@contextlib.asynccontextmanager
async def name_server(addresses: dict[str, list[str]], spec: DnsSpec) -> AsyncIterator[tuple[lab_dns.Zone, Address]]:
    zone = lab_dns.Zone(addresses, ["127.0.0.9"], spec, SeededRng("dns", 1))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            size = int.from_bytes(await reader.readexactly(2))
            answer = zone.answer_plain(await reader.readexactly(size), udp=False)
            assert answer is not None
            writer.write(len(answer).to_bytes(2) + answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Udp(zone), ("127.0.0.1", port))
    try:
        yield zone, Address("127.0.0.1", port)
    finally:
        transport.close()
        server.close()
        await server.wait_closed()


async def test_unknown_name_is_asked_upstream_once_and_kept(start):
    async with name_server({"other.example": ["192.0.2.7"]}, DnsSpec(ttl_s=60)) as (zone, address):
        centre = await start(upstream=(address,))
        found = await asyncio.gather(*(ask(centre, name, "A") for name in ("other.example", "OTHER.example") * 5))
        assert {str(each.answer[0][0]) for each in found} == {"192.0.2.7"}
        assert zone.questions == 1
        assert (await ask(centre, "absent.example", "A")).rcode() == dns.rcode.NXDOMAIN
        assert str((await ask(centre, SHOP, "A")).answer[0][0]) == "127.0.0.1"
        assert zone.questions == 2


async def test_large_upstream_answer_comes_by_tcp(start):
    many = [f"192.0.{part}.{n}" for part in (2, 3) for n in range(1, 60)]
    async with name_server({"many.example": many}, DnsSpec()) as (zone, address):
        centre = await start(upstream=(address,))
        found = await ask(centre, "many.example", "A")
        assert (len(found.answer[0]), bool(found.flags & dns.flags.TC)) == (len(many), False)
        assert zone.questions == 2


async def test_silent_upstream_server_has_the_next_one_asked(start):
    async with (
        name_server({}, DnsSpec(drop_pct=100)) as (_, silent),
        name_server({}, DnsSpec(servfail_pct=100)) as (_, failing),
        name_server({"other.example": ["192.0.2.7"]}, DnsSpec()) as (_, good),
    ):
        centre = await start(upstream=(silent, failing, good))
        assert str((await ask(centre, "other.example", "A")).answer[0][0]) == "192.0.2.7"
        centre = await start(upstream=(failing,))
        assert (await ask(centre, "other.example", "A")).rcode() == dns.rcode.SERVFAIL


async def test_centre_asks_another_centre_over_https(start):
    other = await start(rules(host="192.0.2.1"))
    given = RuleSet(version=1, hosts={}, apps={})
    centre = await start(
        given, upstream=(other.server,), upstream_trust=ssl.create_default_context(cadata=other.ca.ca_pem)
    )
    assert str((await ask(centre, SHOP, "A")).answer[0][0]) == "192.0.2.1"


async def test_host_under_another_name_has_that_names_addresses(start):
    async with name_server({"cdn.example": ["192.0.2.7"]}, DnsSpec(ttl_s=9)) as (_, address):
        centre = await start(rules(host="cdn.example"), upstream=(address,))
        found = await ask(centre, SHOP, "A")
        assert [(str(each.name), str(each[0]), each.ttl) for each in found.answer] == [
            (f"{SHOP}.", "cdn.example.", 30),
            ("cdn.example.", "192.0.2.7", 9),
        ]
        found = await ask(centre, SHOP, "HTTPS")
        assert [str(each) for each in found.answer[0]] == ["0 cdn.example."]


@pytest.mark.parametrize(
    ("subnet", "scope", "first"),
    [
        (("203.0.113.77", 32), 24, "192.0.2.1"),
        (("203.0.113.0", 24), 24, "192.0.2.1"),
        (("198.51.100.9", 32), 24, "192.0.2.2"),
        (("198.51.100.0", 22), 22, "192.0.2.2"),
        (("2001:db8:5:6:7:8:9:a", 128), 56, "192.0.2.1"),
        (("2001:db9::", 48), 48, "192.0.2.2"),
    ],
)
async def test_answer_is_for_the_network_of_the_client_that_is_told_and_says_for_how_much_of_it(
    start, subnet, scope, first
):
    """What lies beyond 24 and 56 bits is not looked at: there each network has a part of the other region."""
    networks = {
        "203.0.113.0/24": "east",
        "203.0.113.64/26": "west",
        "198.51.100.0/22": "west",
        "2001:db8::/32": "east",
        "2001:db8:5:6::/64": "west",
        "2001:db9::/32": "west",
    }
    places = (
        Endpoint(host=host, port=443, carrier="h1", region=region, weight=100)
        for host, region in (("192.0.2.1", "east"), ("192.0.2.2", "west"))
    )
    given = msgspec.structs.replace(
        rules(),
        hosts={SHOP: HostPlan(endpoints=tuple(places))},
        regions={"east": Region(), "west": Region()},
        networks={network: Network(region=region) for network, region in networks.items()},
    )
    centre = await start(given)
    async with client(centre) as http:
        query = dns.message.make_query(SHOP, "A", use_edns=0, options=[dns.edns.ECSOption(*subnet)])
        answer = await http.post("/dns-query", content=query.to_wire(), headers={"content-type": MEDIA})
    found = dns.message.from_wire(answer.content)
    assert str(found.answer[0][0]) == first
    [told] = [option for option in found.options if isinstance(option, dns.edns.ECSOption)]
    assert (told.address, told.srclen, told.scopelen) == (*subnet, scope)
    assert answer.headers["cache-control"] == "max-age=30", "whoever keeps it knows whom it is for"


async def test_answer_for_a_client_that_tells_nothing_of_itself_is_for_that_client_alone(start):
    """A source of 0 bits says that its address is not to be used (RFC 7871 section 7.1.2)."""
    given = msgspec.structs.replace(
        rules(), regions={"east": Region()}, networks={"127.0.0.0/8": Network(region="east")}
    )
    centre = await start(given)
    async with client(centre) as http:
        for options in ([dns.edns.ECSOption("0.0.0.0", 0)], []):
            query = dns.message.make_query(SHOP, "A", use_edns=0, options=options)
            answer = await http.post("/dns-query", content=query.to_wire(), headers={"content-type": MEDIA})
            assert answer.headers["cache-control"].startswith("private, ")
            assert [each.scopelen for each in dns.message.from_wire(answer.content).options] == [0] * len(options)


# -- real clients -----------------------------------------------------------------------------------------------------
@pytest.fixture(name="shop")
async def _shop(start, tmp_path):
    """A page over TLS under the shop's name, and a centre that alone knows where it is."""
    ca = ensure_authority(tmp_path / "pki", clock=SystemClock(), rng=SystemRng())
    files = ca.issue("shop", names=[SHOP])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)

    async def serve(request: Any, writer: Any) -> None:
        writer.write(plain(PAGE.encode(), content_type="text/html"))

    async with running_origin(serve, ssl=context) as origin:
        centre = await start(rules(origin.address.port))
        yield centre, origin


async def test_dnspython_asks_over_https(start):
    centre = await start()
    query = dns.message.make_query(SHOP, "A")
    for post in (True, False):
        found = await asyncio.to_thread(
            dns.query.https,
            query,
            f"https://{NAME}:{centre.address.port}/dns-query",
            bootstrap_address="127.0.0.1",
            verify=centre.trust,
            post=post,
            timeout=10,
        )
        assert str(found.answer[0][0]) == "127.0.0.1"


@pytest.mark.skipif(CURL is None, reason="curl is not installed (apt-get install curl)")
async def test_curl_finds_the_page_by_doh(shop):
    centre, origin = shop
    page = await run(
        str(CURL), "-sS", "--noproxy", "*", "--max-time", "20", "--cacert", str(centre.ca.certificate), "--doh-url",
        centre.url, f"https://{SHOP}:{origin.address.port}/",
    )  # fmt: skip
    assert page == PAGE


@pytest.mark.skipif(KDIG is None, reason="kdig is not installed (apt-get install knot-dnsutils)")
@pytest.mark.skipif(find("nginx") is None, reason="nginx is not installed (apt-get install nginx-light)")
async def test_kdig_reads_every_record_through_a_proxy_that_speaks_http2(start, tmp_path):
    """kdig speaks HTTP/2 alone, so nginx ends it before the centre, as the how-to has it."""
    centre = await start(rules(8443, "h3", "h2"), tls=False)
    files = centre.ca.issue("front", names=["localhost"])
    (folder := tmp_path / "nginx").mkdir()
    with running_server("nginx", folder, files, upstream=centre.address) as front:

        async def kdig(*words: str) -> str:
            return await run(
                str(KDIG), "@127.0.0.1", "-p", str(front.address.port), f"+tls-ca={centre.ca.certificate}",
                "+tls-hostname=localhost", *words,
            )  # fmt: skip

        said = (await kdig("+https", SHOP, "HTTPS", "+padding", "+subnet=192.0.2.77/32")).replace('"', "")
        assert "status: NOERROR" in said
        assert "alpn=h3,h2 no-default-alpn port=8443 ipv4hint=127.0.0.1" in said
        assert "CLIENT-SUBNET: 192.0.2.77/32/0" in said
        assert await kdig("+https-get", SHOP, "A", "+short") == "127.0.0.1\n"


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
@pytest.mark.skipif(CERTUTIL is None, reason="certutil is not installed (apt-get install libnss3-tools)")
async def test_chromium_that_trusts_the_platforms_authority_finds_the_page_by_doh(shop, tmp_path, monkeypatch):
    centre, origin = shop
    asked: set[tuple[str | None, int]] = set()
    read = dns_server.read_query

    def noted(data: bytes) -> dns_server.Query:
        query = read(data)
        asked.add((query.name, query.kind))
        return query

    monkeypatch.setattr(dns_server, "read_query", noted)
    database = tmp_path / ".pki" / "nssdb"
    database.mkdir(parents=True)
    await run(str(CERTUTIL), "-N", "--empty-password", "-d", f"sql:{database}")
    await run(str(CERTUTIL), "-A", "-n", "ours", "-t", "C,,", "-i", str(centre.ca.certificate), "-d", f"sql:{database}")
    profile = tmp_path / "profile"
    profile.mkdir()
    template = centre.url + "{?dns}"
    state = {"dns_over_https": {"mode": "secure", "templates": template}}
    (profile / "Local State").write_text(json.dumps(state))
    page = await run(
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--no-first-run",
        f"--user-data-dir={profile}", "--virtual-time-budget=10000",
        "--dump-dom", f"https://{SHOP}:{origin.address.port}/", HOME=str(tmp_path),
    )  # fmt: skip
    assert "the page came" in page
    assert (SHOP, dns.rdatatype.A) in asked
    assert (f"_{origin.address.port}._https.{SHOP}", dns.rdatatype.HTTPS) in asked


# -- two centres, one of them broken ----------------------------------------------------------------------------------
@pytest.mark.parametrize("broken", ["refuses", "silent", "lies"])
async def test_names_survive_a_broken_centre(start, tmp_path, broken):
    centre = await start()
    async with contextlib.AsyncExitStack() as stack:
        if broken == "lies":  # it would give another address, under a certificate nobody vouches for
            ca = ensure_authority(tmp_path / "liar", clock=SystemClock(), rng=SystemRng())
            files = ca.issue("dispatch", names=[NAME], ips=["127.0.0.1"])
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.certificate, files.key)

            async def lie(request: Any, writer: Any) -> None:
                raise AssertionError("it was asked")

            liar = await stack.enter_async_context(running_origin(lie, ssl=context))
            port = liar.address.port
        else:
            held: list[asyncio.StreamWriter] = []
            server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            stack.callback(lambda: [each.close() for each in held])
            stack.callback(server.close)
            if broken == "refuses":
                server.close()
        bad = DohServer(f"https://{NAME}:{port}/dns-query", ("127.0.0.1",))
        names = DohNames((bad, centre.server), Dialer(NoNames(), centre.trust), SystemClock())
        stack.callback(names.close)
        assert (await names.ask(SHOP)).addresses == ("127.0.0.1",)
        with pytest.raises((NoName, OSError)):
            await names.ask("other.example")


async def test_body_that_never_ends_is_given_up(start, monkeypatch):
    monkeypatch.setattr(limits_platform, "REQUEST_BODY_TIMEOUT_S", 0.2)
    centre = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", centre.address.port, ssl=centre.trust)
    writer.write(
        f"POST /dns-query HTTP/1.1\r\nhost: a\r\ncontent-type: {MEDIA}\r\ncontent-length: 40\r\n\r\nabc".encode()
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
