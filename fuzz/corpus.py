"""Valid inputs to start from, made by the code that writes them; a mutation of one gets far into a parser."""

import functools
import gzip
import struct
import zlib

import brotli
import msgspec
from backports import zstd
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.client import memory
from stormline.core.values import Address
from stormline.net import probes, rtnetlink
from stormline.outbound import http2_codec
from stormline.outbound.messages import HttpRequest
from stormline.policy import snapshot
from stormline.telemetry import feedback, netlog, report
from stormline.telemetry.timeline import AttemptRecord, CallRecord
from stormline.wire import (
    bhttp,
    bundle,
    dns,
    dns_server,
    frames,
    httpsig,
    jws,
    ohttp,
    plan,
    proxyprotocol,
    short,
    tokens,
)
from stormline.wire import messages as m

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
"""A key that everybody knows: signs what the fuzzer makes."""
KID = "fuzz"
KEYS = {KID: KEY.public_key()}
NOW = 1_800_000_000
APP = "shop"
HOST = "api.example"

_HELLO = m.Hello(versions=(1,), app=APP, token="t", network="cell", client="fuzz/1", capabilities=(m.PLAN, m.RESUME))
_WELCOME = m.Welcome(version=1, session="s", device="d", heartbeat_s=60.0, capabilities=(m.PLAN, m.RESUME))
_FROM_CLIENT: tuple[tuple[m.Message, ...], ...] = (
    (m.Call(1, "rpc", "orders.create", body=b"{}", deadline_ms=900), m.Ping(1)),
    (
        m.Call(1, "api", "POST", "https://api.example/x", (("a", "b"),), b"1", True),
        m.Data(1, b"2", True, (("t", "v"),)),
    ),
    (m.Call(1, "rpc", "a.b"), m.Call(3, "rpc", "a.b", more=True), m.Cancel(1), m.Data(3, b""), m.Cancel(3, 502)),
    (m.Ack((1,)), m.Reply(2, 200, (("a", "b"),), b"x", True), m.Data(2, b"y", True), m.GoAway(200, 2)),
    (m.Fail(2, 505, "no", 100, True), m.Credit(4, 1000), m.Pong(1), m.Close(0, "bye", 5)),
    (m.Call(1, "rpc", "a.b"), m.Received(0), m.Ping(1), m.Received(1)),
)
_FROM_SERVER: tuple[tuple[m.Message, ...], ...] = (
    (m.Reply(1, 200, (("a", "b"),), b"x", True), m.Data(1, b"y"), m.Data(1, b"", True), m.Ping(9)),
    (m.Push(1, "p1", "orders", (("a", "b"),), b"hello", NOW * 1000), m.Push(2, "p2"), m.Credit(3, 5)),
    (m.Call(2, "session", "refresh", more=True), m.Data(2, b"x", True), m.Cancel(2), m.Fail(1, 501)),
    (m.Notice(7, (HOST,)), m.Notice(8), m.Push(1, "p1"), m.Notice(8, (HOST, "b.example"))),
    (m.GoAway(200, 1, "update", 3000, 60_000), m.Reply(1, 0), m.Pong(1), m.Close(405, "twin")),
    (m.Received(1), m.Reply(1, 0), m.Received(2), m.Ping(3), m.Received(9)),
)


def _flight(*messages: m.Message) -> bytes:
    return b"".join(map(frames.encode, messages))


def from_client() -> list[bytes]:
    """Whole conversations as a server reads them, HELLO first."""
    return [_flight(_HELLO, *rest) for rest in _FROM_CLIENT]


def from_server() -> list[bytes]:
    """Whole conversations as a client reads them, WELCOME first."""
    return [_flight(_WELCOME, *rest) for rest in _FROM_SERVER] + [_flight(m.Close(302, "no token"))]


def frames_of_all() -> list[bytes]:
    """Both directions."""
    return from_client() + from_server()


LOST = b"\n-- lost --\n"
"""Between the flights of two transports of one session."""


def sessions() -> list[bytes]:
    """Sessions that lose their transport and go on over the next, as a server and as a client read them."""

    def of_client(received: int) -> m.Hello:
        return m.Hello((1,), APP, resume="t", capabilities=(m.PLAN, m.RESUME), received=received)

    def of_server(received: int) -> m.Welcome:
        return m.Welcome(1, "s", "d", capabilities=(m.PLAN, m.RESUME), resumed=True, received=received)

    greeting = _flight(_HELLO)
    return [
        LOST.join((_flight(_HELLO, *begin), _flight(of_client(count), *rest)))
        for count, begin in enumerate(_FROM_CLIENT[:3])
        for rest in ((), (m.Ping(1), m.Received(1)), (m.Ack((1,)), m.Call(9, "rpc", "a.b", body=b"1")))
    ] + [
        LOST.join(
            (greeting, _flight(of_client(0), m.Call(1, "rpc", "a.b")), _flight(of_client(1), m.Call(3, "rpc", "c")))
        ),
        LOST.join((_flight(_WELCOME, m.Push(1, "p1")), _flight(of_server(1), m.Push(2, "p2"), m.Reply(1, 200)))),
        LOST.join((_flight(_WELCOME), _flight(of_server(0), m.Reply(1, 200, (), b"x", True)), _flight(of_server(1)))),
        LOST.join((_flight(_WELCOME, m.Received(1)), _flight(of_server(1), m.Call(2, "rpc", "a.b"), m.Push(1, "p")))),
    ]


def device_tokens() -> list[bytes]:
    """Claims, and tokens of them."""
    claims = [
        tokens.DeviceToken(app=APP, device="d", iat=NOW, exp=NOW + 9),
        tokens.DeviceToken(app=APP, device="d" * 64, user="u", iat=NOW, exp=2**53 - 1, nbf=NOW + 1),
        tokens.DeviceToken(app=APP, device="d", iat=0, exp=NOW),
    ]
    return [*map(msgspec.json.encode, claims), *(tokens.mint(each, key=KEY, kid=KID).encode() for each in claims)]


def websockets() -> list[bytes]:
    """Upgrades and what follows them; masked with zeros, so that damage to what is inside is damage to it alone."""

    def head(*lines: str) -> bytes:
        return "\r\n".join(("GET /stormline HTTP/1.1", "Host: gateway.example", *lines, "", "")).encode()

    def frame(opcode: int, body: bytes, *, final: bool = True) -> bytes:
        size = struct.pack("!B", 0x80 | len(body)) if len(body) < 126 else struct.pack("!BH", 0xFE, len(body))
        return bytes((opcode | (0x80 if final else 0),)) + size + bytes(4) + body

    upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
               "Sec-WebSocket-Version: 13", "Sec-WebSocket-Protocol: sl.1")  # fmt: skip
    opened, said = head(*upgrade), _flight(_HELLO, m.Ping(1))
    return [
        opened + frame(2, said),
        opened + frame(2, said[:9], final=False) + frame(9, b"ping") + frame(0, said[9:]),
        opened + frame(2, bytes(300)) + frame(10, b"") + frame(8, struct.pack("!H", 1000) + b"bye"),
        opened + frame(1, b"text"),
        head(*upgrade, "Origin: http://gateway.example", "Sec-WebSocket-Extensions: permessage-deflate")
        + frame(2, said),
        head(*upgrade, "Origin: https://elsewhere.example"),
        head("Content-Length: 3") + b"abc",
    ]


def first_bytes() -> list[bytes]:
    """What connections begin with: PROXY headers of the three kinds, ClientHellos, frames, upgrades, other things."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64))
    carried = [hello, _flight(_HELLO), websockets()[0]]
    return [
        *carried,
        *(header + each for header in proxy_headers()[:3] for each in carried),
        b"SSH-2.0-x\r\n",
        b"POST / HTTP/1.1\r\n\r\n",
        *proxy_headers(),
    ]


def plans() -> list[bytes]:
    """Payloads of dispatch answers, and questions to dispatch."""
    endpoints = (
        plan.Endpoint(host="192.0.2.1", port=443, unit="eu", weight=10),
        plan.Endpoint(host="2001:db8::1", port=8443, carrier=plan.Carrier.H1, server_name="a.example"),
    )
    whole = plan.Plan(
        app=APP,
        version=7,
        issued_at=NOW,
        expires_at=NOW + 60,
        unit="eu",
        hosts={
            HOST: plan.HostPlan(
                endpoints=endpoints,
                connect_timeout_s=1.5,
                deadline_s=10.0,
                ttl_s=60,
                policy=plan.Policy(
                    preset="key", tries={"clear": 1}, relays=endpoints, sample=0.5, urgency=3, clear=True
                ),
                paths=(
                    plan.PathPlan(
                        path="/a/*/b",
                        methods=("GET",),
                        query={"v": "1"},
                        headers={"x-plan": None},
                        business="home",
                        policy=plan.Policy(order=("direct", "long"), read_timeout_s=2.0, disabled=("h3",)),
                    ),
                ),
            )
        },
        gateways=endpoints[:1],
        keys={"next": jws.SigningKey(KEY, "next").public_text},
        digest="held",
        unknown=("other.example",),
        report=endpoints[0],
        disabled=("long",),
    )
    return [
        msgspec.json.encode(whole),
        msgspec.json.encode(msgspec.structs.replace(whole, base="held", gone=(HOST,), unknown=(HOST,), hosts={})),
        msgspec.json.encode(
            plan.Unchanged(
                app=APP,
                version=7,
                issued_at=NOW,
                expires_at=NOW + 60,
                held="held",
                asked=plan.question_digest(APP, [HOST]),
            )
        ),
        msgspec.json.encode(plan.PlanRequest(app=APP, hosts=(HOST, "b.example"), version=3)),
        msgspec.json.encode(
            plan.PlanRequest(app=APP, hosts=(HOST,), device="d", role="push", token="t", held="held", kids=("a",))
        ),
    ]


def signed_texts() -> list[bytes]:
    """A device token, a plan and a text of the target's own use, all signed."""
    token = tokens.DeviceToken(app=APP, device="d1", user="u1", iat=NOW, exp=NOW + 60)
    texts = [
        tokens.mint(token, key=KEY, kid=KID),
        jws.sign(plans()[0], key=KEY, kid=KID, typ=plan.TYP),
        jws.sign(b"payload", key=KEY, kid=KID, typ="fuzz+jws"),
    ]
    return [text.encode() for text in texts]


def bundles() -> list[bytes]:
    """Client bundle files."""
    key = jws.SigningKey(KEY, KID).public_text
    full = bundle.Bundle(
        app=APP,
        dispatch=("192.0.2.1:443", "[2001:db8::1]:8443"),
        dispatch_name="dispatch.example",
        dispatch_keys={KID: key, "next": key},
        ca_pem="-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n",
        token="a-very-secret-token",
        preload=(HOST,),
    )
    small = bundle.Bundle(app=APP, dispatch=("127.0.0.1:1",), dispatch_name="d", dispatch_keys={KID: key})
    return [bundle.encode(full), bundle.encode(small)]


def reports() -> list[bytes]:
    """Batches of call records."""
    attempt = AttemptRecord(means="long", address="192.0.2.1:443", failure="reset", phase="send", maybe_delivered=True)
    call = CallRecord(
        call_id="c1",
        started_at_ms=NOW * 1000,
        method="GET",
        host=HOST,
        path="/x",
        status=200,
        ok_network=True,
        ok_parse=False,
        total_ms=12.5,
        stages_ms={"send": 1.0, "body": 11.5},
        attempts=[attempt, attempt],
    )
    return [
        report.encode(report.Report(platform="linux", client="fuzz/1", dropped=3, calls=[call, call])),
        report.encode(report.Report()),
    ]


def addresses() -> list[bytes]:
    """Addresses as people write them."""
    return [b"127.0.0.1:443", b"[2001:db8::1]:8443", b"api.example:1", b" host:65535 ", b"::1", b"[fe80::1%eth0]:5"]


def proxy_settings() -> list[bytes]:
    """A proxy's URL on the first line, then a `NO_PROXY` list."""
    return [
        b"http://user:p%40ss@proxy.example:3128/\na.example,.b.example,*.c.example, ,10.0.0.0/8",
        b"socks5h://[2001:db8::1]:1080\n[::1]:443,fd00::/8,::1,http://d.example,*:8080",
        b"proxy.example\n*",
    ]


SIGNED_FOR = httpsig.Asked("GET", "http", HOST, "/x?y=1", ((b"host", HOST.encode()),))
SIGNED_HEAD = ((b"content-type", b"text/plain"),)
SIGNED_BODY = b"the body that was signed"
SIGNED_SECRET = b"a secret for fuzzing only"


def signed_answers() -> list[bytes]:
    """The three field lines of a signed answer, one a line, and its body."""
    sign = httpsig.Signer("hmac-sha256", SIGNED_SECRET)
    answers = []
    for nonce in ("n", None):
        fields = httpsig.sign_answer(
            SIGNED_FOR, 200, SIGNED_HEAD, SIGNED_BODY, keyid="k", sign=sign, created=NOW, nonce=nonce,
            cover=("content-type",),
        )  # fmt: skip
        values = dict(fields)
        lines = (values[b"signature-input"], values[b"signature"], values[b"content-digest"], SIGNED_BODY)
        answers.append(b"\n".join(lines))
    return answers


HTTP2_REQUEST = http2_codec.encode(HttpRequest("POST", "https", HOST, 443, b"/", (), b""))


def http2_answers() -> list[bytes]:
    """What a server says over one connection on which the client has streams 1, 3 and 5 open."""

    def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload

    begin = frame(4, 0, 0, b"\x00\x03\x00\x00\x00\x64\x00\x04\x00\x01\x00\x00") + frame(4, 1, 0)
    head = b"\x88\x5f\x10application/json\x5c\x0227"
    return [
        begin + frame(1, 4, 1, head) + frame(0, 1, 1, bytes(27)) + frame(1, 5, 3, b"\x88\x0f\x0d\x010"),
        begin + frame(1, 4, 1, b"\x08\x03103") + frame(1, 0, 1, head[:9]) + frame(9, 0, 1, head[9:])
        + frame(9, 4, 1) + frame(0, 8, 1, b"\x02" + bytes(29)) + frame(1, 5, 1, b"\x40\x01t\x01v"),
        begin + frame(8, 0, 0, bytes(3) + b"\x09") + frame(8, 0, 5, bytes(3) + b"\x09") + frame(6, 0, 0, bytes(8))
        + frame(3, 0, 3, bytes(3) + b"\x07") + frame(1, 0x2C, 5, b"\x01" + bytes(5) + b"\x88\x00")
        + frame(2, 0, 7, bytes(5)) + frame(0xFA, 0, 0, b"grease"),
        begin + frame(1, 4, 1, head) + frame(1, 4, 3, b"\x88\xbf\xbe") + frame(7, 0, 0, b"\x00\x00\x00\x03" + bytes(4))
        + frame(0, 0, 3, bytes(20)) + frame(4, 0, 0, b"\x00\x01\x00\x00\x00\x00") + frame(0, 1, 3, bytes(7)),
    ]  # fmt: skip


CODINGS = (("gzip",), ("deflate",), ("br",), ("zstd",), ("gzip", "br"))


def coded_bodies() -> list[bytes]:
    """Bodies of every coding, each of which is damage to the others."""
    text = b"text that is long enough to be coded, and coded, and coded again" * 3
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    packed = gzip.compress(text, mtime=0)
    return [
        packed,
        packed + gzip.compress(b"", mtime=0) + bytes(9) + packed,
        zlib.compress(text),
        raw.compress(text) + raw.flush(),
        brotli.compress(text),
        brotli.compress(packed),
        zstd.compress(text) + zstd.compress(b"more", options={zstd.CompressionParameter.checksum_flag: 1}),
    ]


def network_files() -> list[bytes]:
    """What a client keeps of a network: nothing, and everything."""
    host = snapshot.HostRecord(
        HOST,
        NOW,
        uses=3.5,
        tls_port=443,
        ipv6=snapshot.FamilyRecord(2, NOW - 5),
        addresses=(
            snapshot.AddressRecord("192.0.2.1", 443, "", NOW, 0b101, True, NOW + 60, None),
            snapshot.AddressRecord("2001:db8::1", 8443, "h3", NOW - 9, 0, False, 0, 31),
        ),
        rtt=(3, 9, 51),
        paths=(snapshot.PathRecord("00112233aabbccdd", (7, 8), 1200),),
        protocols=(snapshot.ProtocolRecord("h2", 3.25, 1.0, 80, NOW), snapshot.ProtocolRecord("h1", 0.0, 0.0, None, 0)),
    )
    whole = snapshot.NetworkRecord(
        at=NOW,
        ipv6=snapshot.FamilyRecord(1, NOW),
        rtt=(4, 5),
        up=snapshot.RateRecord(1000.5, NOW),
        down=snapshot.RateRecord(8e6, NOW - 1),
        heartbeat=snapshot.HeartbeatRecord(NOW - 60, 240_000, 300_000, 2, NOW - 900, True, 0),
        carriers=(snapshot.CarrierRecord("sl-tls", NOW + 60, 120),),
        hosts=(host._replace(host="b.example", at=NOW - 100), host),
    )
    return [memory.encode(snapshot.NetworkRecord(at=NOW)), memory.encode(whole)]


def dns_answers() -> list[bytes]:
    """Answers of DNS for `HOST`: addresses over an alias, and a name that does not exist."""

    def record(owner: bytes, kind: int, data: bytes) -> bytes:
        return owner + struct.pack("!HHIH", kind, 1, 300, len(data)) + data

    def answer(kind: dns.RecordType, rcode: int, records: list[bytes], authority: list[bytes]) -> bytes:
        asked = dns.question(HOST, kind)[12:]
        head = struct.pack("!HHHHHH", 0, 0x8180 | rcode, 1, len(records), len(authority), 0)
        return head + asked + b"".join(records) + b"".join(authority)

    name, alias = b"\xc0\x0c", b"\x03cdn\xc0\x10"
    soa = b"\x02ns\xc0\x10\x01x\xc0\x10" + struct.pack("!5I", 1, 2, 3, 4, 60)
    return [
        answer(dns.RecordType.A, 0, [record(name, 5, alias), record(alias, 1, bytes((192, 0, 2, 1)))], []),
        answer(dns.RecordType.AAAA, 0, [record(name, 28, bytes(range(16))), record(name, 28, bytes(16))], []),
        answer(dns.RecordType.A, 3, [], [record(b"\xc0\x10", 6, soa)]),
    ]


def dns_messages() -> list[bytes]:
    """Questions with all that is heeded in them, and answers of other servers."""
    question = dns.question(HOST, dns.RecordType.HTTPS)[12:]
    padded = dns_server.forward_query(7, question, dnssec_ok=True, checking_disabled=True, block_bytes=128)
    subnet = b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x0b\x00\x08\x00\x07\x00\x01\x18\x00\xc0\x00\x02"
    told = struct.pack("!HHHHHH", 0, 0x0100, 1, 0, 0, 1) + question + subnet
    return [padded, told, dns.question(HOST, dns.RecordType.A), *dns_answers()]


def kernel_messages() -> list[bytes]:
    """Datagrams of the routing socket as a kernel writes them, and our own questions, which are of the same make."""
    link = (
        "300000001000000001000000000000000000010004000000430001000000000009000300657468300000000007001200030061"
        "0000000000"
    )
    address = "2c00000014000000020000000000000002188000040000000800010a0000020008000200c000020200000000"
    route = "2c0000001800000003000000000000000200000000fe0300010000000000000008000500c00002010800040004000000"
    asked = rtnetlink.ask_route("2001:db8::1", 5) + rtnetlink.ask_neighbour(4, "192.0.2.1", 6)
    return [bytes.fromhex(link), bytes.fromhex(address), bytes.fromhex(route), bytes.fromhex(route) + asked, asked]


def network_stories() -> list[bytes]:
    """Stories of networks as phones tell them."""
    home = b'{"at_s": 0, "kind": "wifi", "ssid": "Home sweet home", "addresses": ["192.0.2.2/24"], "signal_dbm": -50}'
    cell = b'{"at_s": 5.5, "kind": "cell", "carrier": "Op", "addresses": ["2001:db8::2"], "metered": true}'
    return [home, cell, home + b"\n# a comment\n\n" + cell, b'{"at_s": 1, "airplane": true, "connected": false}']


def probe_answers() -> list[bytes]:
    """Answers of check pages and name servers."""
    question = probes.dns_question("shop.test", 1)
    return [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nsuccess\n",
        b'{"captive": true, "user-portal-url": "https://portal.test/"}',
        question[2:3] + b"\x81\x83" + question[4:],
    ]


def short_exchanges() -> list[bytes]:
    """Bodies of exchanges of short HTTP, both ways."""
    frame = frames.encode(_HELLO)
    return [
        short.encode(short.Ask("")),
        short.encode(short.Ask("n1.0123456789abcdef0123456789abcdef", 7, 0, frame, 25_000, 4096)),
        short.encode(short.Tell("n1.0123456789abcdef0123456789abcdef", len(frame), 3, frame, ended=True)),
    ]


def short_requests() -> list[bytes]:
    """Requests of short HTTP: of both versions, in chunks, with a query, and with another behind."""
    body = short_exchanges()[1]
    sized = b"Host: g.example\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    start = b"POST /stormline/short HTTP/1.1\r\n"
    return [
        start + sized,
        b"POST /stormline/short?a=b HTTP/1.0\r\nConnection: keep-alive\r\n" + sized,
        start + b"Transfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nT: v\r\n\r\n",
        start + sized + start + sized,
        start + b"Origin: https://a.example\r\n" + sized,
        b"GET /stormline/short HTTP/1.1\r\nHost: g.example\r\n\r\n",
    ]


def proxy_headers() -> list[bytes]:
    """PROXY protocol headers: both families, values behind the addresses, and a front's own look."""
    one, six = Address("192.0.2.7", 4711), Address("2001:db8::7", 443)
    header = proxyprotocol.encode(one, one)
    values = b"\x20\x00\x03\x01\x00\x00"
    return [
        header,
        proxyprotocol.encode(six, six),
        header[:14] + (12 + len(values)).to_bytes(2, "big") + header[16:] + values,
        proxyprotocol.SIGNATURE + b"\x20\x00\x00\x00",
    ]


_RELAY_KEY = ohttp.GatewayKey(1, X25519PrivateKey.from_private_bytes(bytes(range(32))))
RELAY_KEYS = {1: _RELAY_KEY}
"""A key of a relay that everybody knows."""
_SEALED, RELAY_ANSWER = ohttp.seal_request(_RELAY_KEY.config, b"\0\3GET\5https\0\1/", entropy=bytes(range(1, 33)))


def binary_messages() -> list[bytes]:
    """Requests and responses of both forms."""
    fields = ((b"accept", b"*/*"), (b"x-id", b"7"))
    head = bhttp.RequestHead(b"POST", b"https", HOST.encode(), b"/x?y=1", fields)
    request = bhttp.Request(*head, b"hello", ((b"digest", b"1"),))
    informational = b"\3" + bhttp.varint(103) + b"\4link\1a\0"
    final = bhttp.response_head(bhttp.ResponseHead(200, fields))[1:] + bhttp.chunk(b"abc") + bhttp.chunk(b"de")
    return [
        bhttp.encode_request(request),
        bhttp.request_head(head) + bhttp.chunk(b"hello") + bhttp.end(request.trailers),
        bhttp.encode_response(bhttp.Response(404, fields, b"no"), pad_to=32),
        informational + final + bhttp.end() + bytes(4),
    ]


@functools.cache
def sealed_messages() -> list[bytes]:
    """Lists of keys, sealed requests whole and in chunks, and an answer."""
    sealer = ohttp.RequestSealer(_RELAY_KEY.config, entropy=bytes(range(1, 33)))
    _, seals = ohttp.open_request(RELAY_KEYS, _SEALED)
    return [
        ohttp.encode_keys([_RELAY_KEY.config, _RELAY_KEY.config._replace(key_id=2)]),
        _SEALED,
        sealer.chunk(b"\0\3GET") + sealer.chunk(b"\5https\0\1/", last=True),
        ohttp.seal_response(seals, b"\1\x40\xc8", nonce=bytes(range(32))),
    ]


NETLOG_KEY = X25519PrivateKey.from_private_bytes(bytes(range(32)))


def network_logs() -> list[bytes]:
    """Files of the network log: a clear one, a tail with room in it, a sealed one, and two behind each other."""
    records = [
        netlog.encode(netlog.Began(at_ms=NOW, client="fuzz/1", platform="linux", pid=7)),
        netlog.encode(netlog.Line(at_ms=NOW, level=30, name="WARNING", logger="shop", text="a line")),
        netlog.encode(netlog.Summary(at_ms=NOW, since_ms=NOW - 9, calls=3, total_ms=7.5)),
        netlog.encode(netlog.Finding(at_ms=NOW, call_id="c", content=b"\x81\xa1a\x01")),
    ]
    clear = netlog.FileWriter(b"instance", NOW)
    sealed = netlog.FileWriter(
        b"INSTANCE", NOW, public=NETLOG_KEY.public_key().public_bytes_raw(), entropy=bytes(range(1, 33))
    )
    ring = clear.header + clear.block(records, 0) + clear.block(records[1:], 4)
    tail = clear.header + bytes(20) + b"".join(clear.record(each, 7 + n) for n, each in enumerate(records)) + bytes(99)
    closed = sealed.header + sealed.block(records, 0) + sealed.record(records[1], 4)
    return [ring, tail, closed, ring + closed]


def feedbacks() -> list[bytes]:
    """What users say."""
    said = feedback.Feedback(id="a" * 26, said_at_ms=NOW, text="It hangs", client="fuzz/1", platform="linux", log=b"x")
    return [feedback.encode(said), feedback.encode(feedback.Feedback(id="b" * 26, said_at_ms=0, text="no"))]
