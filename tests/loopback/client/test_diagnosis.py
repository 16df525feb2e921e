"""Diagnoses of real servers: each fault that can be made on one machine, and what is said of it.

Faults of networks are made in the laboratory: tests/lab/test_lab_diagnosis.py.
"""

import asyncio
import contextlib
import datetime
import email.utils
import hashlib
import json
import socket
import ssl
import struct
import sys

import dns.message
import dns.rdatatype
import dns.rrset
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import stormline
from stormline.assembly.authority import ensure_authority
from stormline.cli import main
from stormline.client.background import BACKGROUND
from stormline.client.outside import Outside
from stormline.core import errors, limits_network
from stormline.core import limits_diagnosis as limits
from stormline.core.checks import CheckName, CheckState, Reason
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.recorded import PushedNetwork
from stormline.net.resolve import SystemNames
from stormline.outbound.doh_server import DohServer
from stormline.policy.presets import KEY
from stormline.testing.origin import plain
from stormline.testing.world import APM_NAME, APP, HOST, wait_until
from stormline.wire import quic
from stormline.wire.plan import Carrier, Endpoint, HostPlan

pytestmark = pytest.mark.loopback

SHOP, DNS = "shop.test", "dns.test"
HERE, THERE = "127.0.0.1", "127.0.0.2"
DAY = datetime.timedelta(days=1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name, value in (("STALL_S", 0.2), ("QUIC_PAUSE_S", 0.02), ("QUIC_S", 0.3), ("QUIET_LOOK_S", 0.01),
                        ("TRACE_S", 0.3), ("MTU_S", 0.1), ("NAT_LIMIT_S_MIN", 0.8), ("NAT_REST_S", 0.02),
                        ("NAT_TOLD_S", 0.05)):  # fmt: skip
        monkeypatch.setattr(limits, f"DIAGNOSIS_{name}", value)
    # A busy machine is no slow network.
    monkeypatch.setattr(limits, "DIAGNOSIS_SLOW_RTT_S", 60.0)
    monkeypatch.setattr(limits_network, "VERDICT_SLOW_S", 60.0)


@pytest.fixture(scope="session", name="foreign")
def _foreign(tmp_path_factory):
    """Give an authority that nobody trusts."""
    return ensure_authority(tmp_path_factory.mktemp("foreign"), clock=SystemClock(), rng=SystemRng())


def context_of(certificate, key):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def served_by(authority, name, names=(SHOP,)):
    files = authority.issue(name, names=list(names))
    return context_of(files.certificate, files.key)


def dated(skew_s=0.0, **headers):
    async def answer(request, writer):
        date = email.utils.formatdate(SystemClock().wall() + skew_s, usegmt=True)
        writer.write(plain(b"ok", date=date, **headers))

    return answer


def names(*addresses, fails=False):
    """Give a machine whose resolver answers so."""

    def lookup(host):
        if fails or not addresses:
            raise socket.gaierror(socket.EAI_AGAIN if fails else socket.EAI_NONAME, "no")
        return [(0, 0, 0, "", (each, 0)) for each in addresses]

    return Outside(names=lambda: SystemNames(lookup=lookup), environ={})


@pytest.fixture(name="diagnose")
def _diagnose(trust):
    """Diagnose a URL: `await diagnose(url)`."""

    async def diagnose(url, *, outside=None, ask=None, **config):
        config.setdefault("trust_env", False)
        settings = stormline.Config(network_watch="off", private_hosts=frozenset({"test"}), **config)
        client = stormline.AsyncClient(config=settings, verify=trust(), outside=outside or names(HERE))
        async with client:
            return await client.diagnose(url, **(ask or {}))

    return diagnose


def only(found, name):
    [check] = found.named(name)
    return check


def url_of(origin, path="/", host=SHOP):
    return f"https://{host}:{origin.address.port}{path}"


# -- well -------------------------------------------------------------------------------------------------------------
async def test_healthy_origin_is_ok_and_every_check_says_what_it_saw(pki, origin, diagnose):
    shop = await origin(dated(), ssl=served_by(pki.ca, "shop"))
    found = await diagnose(f"https://user:secret@{SHOP}:{shop.address.port}/cart?token=secret#there")
    assert (found.verdict, found.confidence, found.host) == ("ok", "high", SHOP)
    assert found.url == f"https://{SHOP}:{shop.address.port}/cart"
    assert shop.requests[0].target == "/cart?token=secret"
    assert "secret" not in msgspec.json.encode(found).decode()
    names_made = [check.name for check in found.checks]
    assert names_made == sorted(names_made, key=list(CheckName).index)
    assert set(names_made) == set(CheckName) - {CheckName.NAT}
    assert only(found, CheckName.DNS_SYSTEM).data["addresses"] == [HERE]
    tcp, tls = only(found, CheckName.TCP), only(found, CheckName.TLS)
    assert (tcp.data["address"], tcp.data["family"], tcp.data["sources"]) == (HERE, 4, ["system"])
    assert (tls.data["version"], tls.data["verified"]) == ("TLSv1.3", True)
    assert len(tls.data["fingerprint"]) == 64
    assert only(found, CheckName.HTTP).data["status"] == 200
    assert abs(only(found, CheckName.CLOCK).data["skew_s"]) < 60
    for name in (CheckName.DNS_DOH, CheckName.DNS_DISPATCH, CheckName.GATEWAY, CheckName.CAPTIVE, CheckName.PROXY):
        assert (only(found, name).state, bool(only(found, name).detail)) == (CheckState.SKIPPED, True)
    trace = only(found, CheckName.TRACE)
    assert trace.state in (CheckState.OK, CheckState.SKIPPED)  # skipped where this system cannot


async def test_sync_client_and_wish_for_nat_get_an_answer(origin):
    shop = await origin(dated())

    def ask():
        with stormline.Client(config=stormline.Config(network_watch="off", trust_env=False)) as client:
            return client.diagnose(shop.url(), nat=True, nat_limit_s=0.8, trace=False)

    try:
        found = await asyncio.to_thread(ask)
    finally:
        BACKGROUND.stop()
    assert found.verdict == "ok"
    assert only(found, CheckName.NAT).data["answered_s"] >= 0.76
    assert only(found, CheckName.TRACE).detail == "not asked for"


# -- silence that is kept ---------------------------------------------------------------------------------------------
def ends_after(silence_s, *, hard=False):
    """Serve HTTP/1.1, and end a connection that is silent for so long; `hard`: with a reset."""

    async def serve(reader, writer):
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            while True:
                async with asyncio.timeout(silence_s):
                    await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        if hard:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    return serve


@pytest.mark.parametrize("hard", [False, True])
async def test_end_by_the_server_is_no_limit_of_the_network_and_a_reset_may_be(diagnose, hard):
    told = []
    server = await asyncio.start_server(ends_after(0.3, hard=hard), HERE, 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        found = await diagnose(
            f"http://{HERE}:{port}/", ask={"nat": True, "nat_limit_s": 0.8, "nat_told": told.append, "trace": False}
        )
    nat = only(found, CheckName.NAT)
    assert nat.state is CheckState.OK
    assert nat.data["answered_s"] > 0.0
    assert told[-1].limit_s == 0.8
    if hard:
        assert nat.data["reset"]
        assert 0.0 < nat.data["lost_s"] < 0.8
        assert "is reset after" in nat.detail
    else:
        assert nat.data["lost_s"] is None
        assert 0.0 < nat.data["closed_s"] < 0.8
        assert told[-1].waiting == 0
        assert "the server ends" in nat.detail


async def test_measurement_is_bounded_and_can_be_given_up(origin):
    shop = await origin(dated())
    async with stormline.AsyncClient(config=stormline.Config(network_watch="off", trust_env=False)) as client:
        for limit_s in (0.0, -1.0, float("nan"), float("inf"), limits.DIAGNOSIS_NAT_LIMIT_S_MAX * 1.01):
            with pytest.raises(errors.ConfigError, match="nat_limit_s"):
                await client.diagnose(shop.url(), nat=True, nat_limit_s=limit_s)
        told = asyncio.Queue()
        asking = asyncio.create_task(
            client.diagnose(shop.url(), nat=True, nat_limit_s=3600.0, trace=False, nat_told=told.put_nowait)
        )
        progress = await told.get()
        assert progress.waiting == limits.DIAGNOSIS_NAT_CONNECTIONS
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_what_the_long_connection_has_learned_is_told_where_nothing_can_be_measured():
    async with stormline.AsyncClient(config=stormline.Config(network_watch="off", trust_env=False)) as client:
        steering = client._storm.runtime().steering
        unknown = await client.diagnose(None, nat=True)
        heartbeats, now = steering.strategy.heartbeats, asyncio.get_running_loop().time()
        heartbeats.observe(steering.network.id, 240.0, now, alive=True)
        heartbeats.observe(steering.network.id, 300.0, now, alive=False)
        heartbeats.dialled(steering.network.id, now, worked=True)
        found = await client.diagnose(None, nat=True)
    assert only(unknown, CheckName.NAT).state is CheckState.SKIPPED
    nat = only(found, CheckName.NAT)
    assert nat.data["learned"] == {"answered_s": 240.0, "lost_s": 300.0, "settled": False}
    assert "answered after 240 s" in nat.detail


async def test_network_alone_is_looked_at_where_nothing_has_failed_yet(diagnose):
    found = await diagnose(None)
    assert (found.url, found.host) == ("", "")
    assert not found.named(CheckName.TCP)


async def test_url_that_is_none_is_refused(diagnose):
    for url in ("ftp://shop.test/", "shop.test", "http://", "http://shop.test:70000/", "https://shop.test/a b"):
        with pytest.raises(errors.ConfigError):
            await diagnose(url)


# -- certificates -----------------------------------------------------------------------------------------------------
async def test_right_name_from_an_unknown_issuer_is_interception(foreign, origin, diagnose):
    shop = await origin(ssl=served_by(foreign, "shop"))
    found = await diagnose(url_of(shop))
    tls = only(found, CheckName.TLS)
    assert (found.verdict, found.confidence) == ("tls_interception", "low")
    assert (tls.data["reason"], tls.data["minted"]) == (Reason.UNTRUSTED, False)
    assert tls.data["issuer"] != tls.data["subject"]
    assert all(request.target == "/" for request in shop.requests), "a stranger is told no path"


async def test_certificate_made_up_for_any_name_is_surely_interception(foreign, origin, diagnose):
    base = served_by(foreign, "box")

    def mint(sock, name, _):
        sock.context = served_by(foreign, f"minted-{name.partition('.')[0]}", [name])

    base.sni_callback = mint
    shop = await origin(ssl=base)
    found = await diagnose(url_of(shop))
    assert (found.verdict, found.confidence) == ("tls_interception", "high")


async def test_stranger_where_another_source_knows_better_is_a_hijack(pki, origin, diagnose):
    shop = await origin(dated(), ssl=served_by(pki.ca, "shop"))
    bank = served_by(pki.ca, "bank", ["bank.test"])
    liar = await asyncio.start_server(lambda _, writer: writer.close(), THERE, shop.address.port, ssl=bank)
    doh = await origin(knows(HERE), ssl=served_by(pki.ca, "doh", [DNS]))
    server = DohServer(f"https://{DNS}:{doh.address.port}/dns-query", (HERE,))
    async with liar:
        found = await diagnose(url_of(shop), outside=names(THERE), doh=(server,))
        alone = await diagnose(url_of(shop), outside=names(THERE))
    assert (found.verdict, found.confidence) == ("dns_hijack", "high")
    by_address = {check.data["address"]: check for check in found.named(CheckName.TLS)}
    assert by_address[THERE].data["reason"] == Reason.WRONG_NAME
    assert by_address[HERE].state is CheckState.OK
    assert only(found, CheckName.HTTP).data["status"] == 200
    assert (alone.verdict, alone.confidence) == ("captive_portal", "low")  # nobody can tell them apart


def knows(address):
    async def answer(request, writer):
        query = dns.message.from_wire(request.body)
        reply = dns.message.make_response(query)
        if query.question[0].rdtype == dns.rdatatype.A:
            reply.answer.append(dns.rrset.from_text(query.question[0].name, 60, "IN", "A", address))
        writer.write(plain(reply.to_wire(), content_type="application/dns-message"))

    return answer


def certificate_of(authority_key, folder, begins, ends):
    """Make a certificate for the shop that is valid from `begins` to `ends`, signed by its own key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "odd times")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(authority_key.public_key())
        .serial_number(1)
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SHOP)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    pem = folder / "odd.pem"
    key = authority_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key)
    return pem


@pytest.mark.parametrize(
    ("begins", "ends", "skew_s", "verdict"),
    [
        (-30, -2, 0.0, "server_side"),  # expired, and the server agrees with our clock
        (-30, -2, -10 * 86400.0, "clock_wrong"),  # the server lives when it was valid
        (5, 30, 10 * 86400.0, "clock_wrong"),
    ],
)
async def test_certificate_out_of_its_time_is_told_from_a_wrong_clock(tmp_path, origin, begins, ends, skew_s, verdict):
    now = datetime.datetime.fromtimestamp(SystemClock().wall(), datetime.UTC)
    pem = certificate_of(ec.generate_private_key(ec.SECP256R1()), tmp_path, now + begins * DAY, now + ends * DAY)
    shop = await origin(dated(skew_s), ssl=context_of(pem, pem))
    config = stormline.Config(network_watch="off", trust_env=False)
    trusted = ssl.create_default_context(cafile=pem)
    async with stormline.AsyncClient(config=config, verify=trusted, outside=names(HERE)) as client:
        found = await client.diagnose(url_of(shop), trace=False)
    assert (found.verdict, found.confidence) == (verdict, "high")
    assert only(found, CheckName.TLS).data["reason"] in (Reason.EXPIRED, Reason.NOT_YET_VALID)


async def test_clock_that_one_server_contradicts_is_doubted(pki, origin, diagnose):
    shop = await origin(dated(86_400.0), ssl=served_by(pki.ca, "shop"))
    found = await diagnose(url_of(shop))
    assert (found.verdict, found.confidence) == ("clock_wrong", "low")
    assert -86_460 < only(found, CheckName.CLOCK).data["skew_s"] < -86_340


# -- servers that are unwell ------------------------------------------------------------------------------------------
async def test_server_that_cuts_the_handshake_is_at_fault(diagnose):
    def cut(_, writer):
        writer.transport.abort()

    server = await asyncio.start_server(cut, HERE, 0)
    async with server:
        found = await diagnose(f"https://{SHOP}:{server.sockets[0].getsockname()[1]}/")
    assert (found.verdict, found.confidence) == ("server_side", "low")
    assert only(found, CheckName.TLS).data["reason"] == Reason.CUT
    assert only(found, CheckName.HTTP).state is CheckState.SKIPPED


async def test_server_that_is_silent_after_tcp_ends_within_bounds(diagnose, monkeypatch):
    monkeypatch.setattr(limits, "DIAGNOSIS_TLS_S", 1.5)
    monkeypatch.setattr(limits, "DIAGNOSIS_HTTP_S", 1.5)

    async def hold(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, HERE, 0)
    async with server:
        found = await diagnose(f"https://{SHOP}:{server.sockets[0].getsockname()[1]}/")
    assert only(found, CheckName.TLS).data["reason"] == Reason.SILENT
    assert found.verdict == "server_side"
    assert only(found, CheckName.MTU).data["small_works"] is False, "silent to small packets too"


async def test_status_503_and_refused_connections_are_the_server_s(origin, diagnose):
    async def unwell(request, writer):
        writer.write(plain(status="503 Service Unavailable"))

    shop = await origin(unwell)
    found = await diagnose(shop.url(host=SHOP))
    assert (found.verdict, found.confidence) == ("server_side", "high")
    closed = await diagnose("http://127.0.0.1:1/")
    assert closed.verdict == "server_side"
    assert only(closed, CheckName.TCP).data["reason"] == Reason.REFUSED


async def test_name_that_does_not_exist_or_is_not_found(diagnose):
    absent = await diagnose(f"https://{SHOP}/", outside=names())
    assert (absent.verdict, only(absent, CheckName.DNS_SYSTEM).data["error"]) == ("server_side", "absent")
    failed = await diagnose(f"https://{SHOP}/", outside=names(fails=True))
    assert (failed.verdict, failed.confidence) == ("dns_broken", "low")


# -- QUIC -------------------------------------------------------------------------------------------------------------
class Udp(asyncio.DatagramProtocol):
    """Speaks just enough QUIC to say which versions it knows; answers one datagram in `every`."""

    def __init__(self, every):
        self.every, self.heard = every, 0

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, peer):
        self.heard += 1
        if self.every and self.heard % self.every == 0:
            destination, source = data[6:14], data[15:23]
            ids = bytes((8,)) + source + bytes((8,)) + destination
            self.transport.sendto(b"\xc0\0\0\0\0" + ids + (1).to_bytes(4, "big"), peer)


@pytest.mark.parametrize(
    ("every", "verdict"), [(1, "ok"), (0, "udp_blocked"), (limits.DIAGNOSIS_QUIC_DATAGRAMS, "udp_degraded")]
)
async def test_quic_that_the_origin_names_is_asked(pki, origin, diagnose, monkeypatch, every, verdict):
    if every:  # then an answer ends the wait, and a busy machine is no loss
        for name in ("PAUSE_S", "PAUSE_S_MAX", "S"):
            monkeypatch.setattr(limits, f"DIAGNOSIS_QUIC_{name}", 3.0 if every == 1 else 0.3)
    transport, udp = await asyncio.get_running_loop().create_datagram_endpoint(lambda: Udp(every), local_addr=(HERE, 0))
    port = transport.get_extra_info("sockname")[1]
    shop = await origin(dated(alt_svc=f'h3=":{port}"; ma=60'), ssl=served_by(pki.ca, "shop"))
    with contextlib.closing(transport):
        found = await diagnose(url_of(shop))
    check = only(found, CheckName.QUIC)
    assert (found.verdict, found.confidence) == (verdict, "high")
    assert (check.data["expected"], check.data["port"]) == ("alt-svc", port)
    if every == 1:
        assert check.data["versions"] == ["00000001"]
        assert udp.heard == limits.DIAGNOSIS_QUIC_ENOUGH, "no more than is needed"
    assert len(quic.question(bytes(8), bytes(8))) == quic.DATAGRAM_BYTES


async def test_quic_that_nobody_speaks_of_is_no_fault(pki, origin, diagnose):
    shop = await origin(dated(), ssl=served_by(pki.ca, "shop"))
    found = await diagnose(url_of(shop))
    assert only(found, CheckName.QUIC).state is CheckState.UNKNOWN
    assert found.verdict == "ok"


# -- pages in clear HTTP ----------------------------------------------------------------------------------------------
PAGE = b"<html><body>" + b"wares " * 50 + b"</body></html>"


def page(body, **headers):
    async def answer(request, writer):
        status = "302 Found" if "location" in headers else "200 OK"
        writer.write(plain(body, status=status, **headers))

    return answer


@pytest.mark.parametrize(
    ("clear", "said"),
    [
        (page(PAGE), ("ok", "high", "")),
        (page(PAGE.replace(b"</body>", b"<script>ads</script></body>")), ("injected_page", "high", "inserted")),
        (page(b"something else"), ("injected_page", "low", "content")),
        (page(b"", location="http://ads.test/"), ("injected_page", "high", "redirect")),
        (page(b"", location="https://www.shop.test/"), ("ok", "high", "")),
    ],
)
async def test_page_in_clear_http_is_held_against_the_one_over_tls(pki, origin, diagnose, clear, said):
    secure = await origin(page(PAGE), ssl=served_by(pki.ca, "shop"))
    open_page = await origin(clear)
    found = await diagnose(url_of(secure, "/home"), ask={"plain_url": open_page.url("/home", host=SHOP)})
    check = only(found, CheckName.CLEAR_HTTP)
    assert (found.verdict, found.confidence, check.data.get("proof", "")) == said, found.why


async def test_page_with_a_known_digest_needs_nothing_to_be_held_against(origin, diagnose):
    shop = await origin(page(PAGE))
    for body, verdict in ((PAGE, "ok"), (b"other", "injected_page")):
        ask = {"plain_url": shop.url("/home"), "plain_sha256": hashlib.sha256(body).hexdigest()}
        assert (await diagnose(shop.url("/home"), ask=ask)).verdict == verdict


async def test_login_page_of_the_network_is_a_portal(origin, diagnose):
    async def login(request, writer):
        writer.write(plain(b"log in", status="511 Network Authentication Required"))
        writer.close()

    shop = await origin(login)
    found = await diagnose(shop.url(), captive_url=shop.url("/check"))
    assert found.verdict == "captive_portal"
    assert only(found, CheckName.CAPTIVE).data["finding"] == "foreign"


# -- proxies ----------------------------------------------------------------------------------------------------------
async def test_dead_proxy_is_at_fault(origin, diagnose):
    shop = await origin()
    found = await diagnose(shop.url(host=SHOP), proxy="http://user:secret@127.0.0.1:1")
    assert (found.verdict, found.confidence) == ("proxy_fault", "high")
    assert "secret" not in msgspec.json.encode(found).decode()
    assert not found.named(CheckName.TCP), "the origin is not reached around its proxy"


async def test_origin_is_asked_through_its_proxy(origin, diagnose):
    async def proxy(request, writer):
        writer.write(plain(b"by proxy") if request.target.startswith(f"http://{SHOP}") else plain(status="400 No"))

    way = await origin(proxy)
    found = await diagnose(f"http://{SHOP}/", proxy=f"http://127.0.0.1:{way.address.port}")
    assert (found.verdict, only(found, CheckName.HTTP).data["status"]) == ("ok", 200)


# -- its own end ------------------------------------------------------------------------------------------------------
async def test_cancelled_diagnosis_leaves_nothing_behind(trust):
    async def hold(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, HERE, 0)
    async with server:
        config = stormline.Config(network_watch="off", trust_env=False)
        async with stormline.AsyncClient(config=config, verify=trust(), outside=names(HERE)) as client:
            for wait_s in (0.0, 0.01, 0.3):
                task = asyncio.create_task(client.diagnose(f"https://{SHOP}:{server.sockets[0].getsockname()[1]}/"))
                await asyncio.sleep(wait_s)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task


async def test_diagnosis_that_takes_too_long_says_what_it_did_not_do(monkeypatch, diagnose):
    monkeypatch.setattr(limits, "DIAGNOSIS_S", 1.5)

    async def hold(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, HERE, 0)
    async with server:
        found = await diagnose(f"https://{SHOP}:{server.sockets[0].getsockname()[1]}/")
    tls = only(found, CheckName.TLS)
    assert (tls.state, tls.detail) == (CheckState.UNKNOWN, "not done in time")


# -- by itself --------------------------------------------------------------------------------------------------------
def automatic(**config):
    """Give a client that may look by itself; its network has no router, and hosts are given by number."""
    port = PushedNetwork()
    port.push({"kind": "wifi", "ssid": "Home", "interface": "wlan0", "addresses": ["192.0.2.20/24"]})
    config = {"deadline_s": 0.5, "network_probes": True, "network_port": port, "trust_env": False, **config}
    return stormline.AsyncClient(config=stormline.Config(**config))


async def fail(client, plan, path="/cart?token=secret"):
    with pytest.raises(errors.TransportError):
        await client.get(f"http://127.0.0.1:1{path}", extensions={"stormline.plan": plan})


async def test_failed_key_request_is_diagnosed_once_on_a_network(origin):
    async with automatic() as client:
        runtime = client._storm.runtime()
        await fail(client, "ordinary")
        assert runtime._diagnostics is None, "who never needs it does not load it"
        await fail(client, KEY.name)
        await wait_until(lambda: runtime._diagnostics.latest is not None)
        made = runtime._diagnostics.latest
        assert (made.verdict, made.automatic, made.url) == ("server_side", True, "http://127.0.0.1:1/cart")
        await fail(client, KEY.name, "/other")
        assert runtime._diagnostics._task is None, "one is enough for a while"
        asked = await client.diagnose()
        assert (asked.url, asked.automatic) == ("http://127.0.0.1:1/other", False)


@pytest.mark.parametrize("config", [{"diagnose": False}, {"network_probes": False}])
async def test_nothing_is_diagnosed_by_itself_where_that_is_off(config):
    async with automatic(**config) as client:
        await fail(client, KEY.name)
        diagnostics = client._storm.runtime()._diagnostics
        assert diagnostics is None or diagnostics._task is None


async def test_nothing_is_diagnosed_by_itself_in_the_background():
    async with automatic() as client:
        client.set_activity("background")
        await fail(client, KEY.name)
        assert client._storm.runtime()._diagnostics._task is None


async def test_nothing_is_diagnosed_by_itself_beside_calls(monkeypatch):
    monkeypatch.setattr(limits, "DIAGNOSIS_QUIET_LOOKS", 3)
    async with automatic() as client:
        runtime = client._storm.runtime()
        monkeypatch.setattr(runtime.steering, "busy", lambda: True)
        await fail(client, KEY.name)
        await wait_until(lambda: runtime._diagnostics._task is None)
        assert runtime._diagnostics.latest is None
        monkeypatch.undo()
        await fail(client, KEY.name)
        await wait_until(lambda: runtime._diagnostics.latest is not None)


async def test_client_that_closes_ends_the_diagnosis_under_way(monkeypatch):
    monkeypatch.setattr(limits, "DIAGNOSIS_QUIET_LOOK_S", 60.0)
    async with automatic() as client:
        monkeypatch.setattr(client._storm.runtime().steering, "busy", lambda: True)
        await fail(client, KEY.name)
        task = client._storm.runtime()._diagnostics._task
        assert task is not None
    assert task.cancelled()


async def test_diagnosis_goes_to_the_platform(world, pki, origin, monkeypatch):
    from stormline.core import limits as general
    from stormline.telemetry import report
    from stormline.testing.gateway import answering

    monkeypatch.setattr(general, "REPORT_INTERVAL_S", 0.05)
    reports = []

    async def take(request, writer):
        reports.append(report.decode(request.body))
        writer.write(plain(b"{}", status="202 Accepted"))

    apm = await origin(take, ssl=context_of(pki.apm.certificate, pki.apm.key))
    endpoint = Endpoint(host=HERE, port=apm.address.port, carrier=Carrier.H1, server_name=APM_NAME)
    there = await world(answering(), report=endpoint)
    async with there.client(report=True) as client:
        await client.get(f"https://{HOST}/")
        made = await client.diagnose("http://127.0.0.1:1/", trace=False)
        await wait_until(lambda: any(each.diagnoses for each in reports))
    [told] = [each for batch in reports for each in batch.diagnoses]
    assert msgspec.json.encode(told) == msgspec.json.encode(made)


async def test_scheduling_centre_is_asked_and_its_addresses_and_gateways_are_reached(world, origin):
    shop = await origin(dated())
    port = shop.address.port
    direct = Endpoint(host=HERE, port=port, carrier=Carrier.H1)
    gateway = Endpoint(host=HERE, port=1, carrier=Carrier.LONG_TLS, server_name="gateway.test")
    there = await world(hosts={SHOP: HostPlan(endpoints=(direct, gateway))}, apps={APP: frozenset({SHOP})})
    async with stormline.AsyncClient(config=there.config(), outside=names(HERE)) as client:
        found = await client.diagnose(f"http://{SHOP}:{port}/", trace=False)
        nothing = await client.diagnose("http://nowhere.test/", trace=False)
    told = only(found, CheckName.DNS_DISPATCH)
    assert (told.state, told.data["addresses"]) == (CheckState.OK, [HERE])
    roles = {check.data.get("role", ""): check for check in found.named(CheckName.TCP)}
    assert {"system", "dispatch"} <= set(roles[""].data["sources"])
    assert roles["gateway"].data["carrier"] == "sl-tls"
    assert (roles["gateway"].state, roles["gateway"].data["reason"]) == (CheckState.BAD, Reason.REFUSED)
    assert only(nothing, CheckName.DNS_DISPATCH).data == {"addresses": [], "fresh": True, "by_gateway": False}


async def test_host_that_only_the_platform_serves_is_well_where_its_gateways_answer(world):
    """It has no name; the plan says that requests go by the gateways, so that is what counts."""
    from stormline.testing.gateway import answering

    there = await world(answering())
    async with stormline.AsyncClient(config=there.config(), outside=names()) as client:
        found = await client.diagnose(f"https://{HOST}/", trace=False)
    assert (found.verdict, found.confidence) == ("ok", "high"), found.why
    assert "gateways" in found.why
    assert only(found, CheckName.DNS_SYSTEM).data["error"] == "absent"
    assert only(found, CheckName.TCP).data["role"] == "gateway"
    dead = Endpoint(host=HERE, port=1, carrier=Carrier.LONG_TLS, server_name="gateway.test")
    there = await world(hosts={HOST: HostPlan(endpoints=(dead,))}, apps={APP: frozenset({HOST})})
    async with stormline.AsyncClient(config=there.config(), outside=names()) as client:
        found = await client.diagnose(f"https://{HOST}/", trace=False)
    assert (found.verdict, found.confidence) == ("server_side", "high"), found.why
    assert "refuse" in found.why


# -- the command ------------------------------------------------------------------------------------------------------
def test_command_shows_how_far_a_measurement_is_on_a_terminal_alone(capsys, monkeypatch):
    from stormline.cli.diagnose import _progress
    from stormline.telemetry.diagnosis import NatProgress

    with _progress(json=False) as told:
        assert told is None  # what is behind a pipe wants the end alone
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with _progress(json=True) as told:
        assert told is None
    with _progress(json=False) as told:
        told(NatProgress(61.0, 300.0, 5, 40.4, None))
        told(NatProgress(90.0, 300.0, 4, 40.4, 60.0))
    shown = capsys.readouterr().out
    assert "4 connections silent for 90 of 300 s; answered after 40 s, lost after 60 s" in shown


@pytest.mark.parametrize("status", ["200 OK", "503 No"])
async def test_command_prints_the_diagnosis_and_ends_with_its_code(origin, capfd, monkeypatch, status):
    async def answer(request, writer):
        writer.write(plain(status=status))

    monkeypatch.setenv("STORMLINE_NETWORK_WATCH", "off")
    shop = await origin(answer)
    code = await asyncio.to_thread(main.run, ["diagnose", shop.url("/page?x=1"), "--json", "--no-trace"])
    told = json.loads(capfd.readouterr().out)
    assert code == (0 if status == "200 OK" else 1)
    assert told["verdict"] == ("ok" if code == 0 else "server_side")
    assert {"version", "url", "host", "started_at", "took_s", "confidence", "hint", "why", "checks"} <= set(told)
    assert {"name", "state", "took_s", "detail", "data"} == set(told["checks"][0])
    assert await asyncio.to_thread(main.run, ["diagnose", shop.url("/page"), "--no-trace"]) == code
    shown = capfd.readouterr().out
    assert told["hint"] in shown
    assert told["verdict"] in shown
