"""One function per parser that meets bytes from outside. Each returns, or raises: then its invariant is broken.

Raised are AssertionError where the text of the invariant is broken, and whatever else a parser lets out that it does
not document.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from fuzz import corpus, gateway
from stormline.client import memory
from stormline.client.decoding import Verifier
from stormline.core import (
    codes,
    errors,
    limits,
    limits_carriers,
    limits_means,
    limits_memory,
    limits_names,
    limits_netlog,
    limits_platform,
)
from stormline.core.values import parse_address
from stormline.gateway import short_http
from stormline.net import probes, recorded, rtnetlink
from stormline.outbound import http2_codec, proxy_rules
from stormline.policy import network, snapshot, strategy
from stormline.policy.addresses import AddressBook, Candidate
from stormline.policy.shape import Network, RequestShape
from stormline.policy.timeouts import TimeoutPolicy
from stormline.telemetry import feedback, netlog, report
from stormline.wire import bhttp, bundle, dns, dns_server, frames, httpsig, jws, ohttp, plan, proxyprotocol, short
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State

FUZZED_CONTENT_BYTES_MAX = 1 << 20
"""A mutation may make a bomb; its beginning is enough."""


def _messages(data: bytes, piece_bytes: int) -> tuple[list[m.Message], str]:
    buffer = frames.FrameBuffer(limits.FRAME_BYTES_MAX)
    found: list[m.Message] = []
    try:
        for at in range(0, len(data), piece_bytes):
            buffer.feed(data[at : at + piece_bytes])
            found += iter(buffer.next_message, None)
            assert len(buffer) <= limits.FRAME_BYTES_MAX + frames.PREFIX_BYTES, "more than one frame is held"
    except errors.RemoteProtocolError as error:
        return found, str(error)
    return found, ""


def fuzz_frames(data: bytes) -> None:
    """Give messages or RemoteProtocolError, the same ones however the bytes are cut; a message encodes to itself."""
    whole = _messages(data, max(1, len(data)))
    assert repr(_messages(data, 1)) == repr(whole), "another cut, another reading"
    for message in whole[0]:
        again = frames.decode_payload(frames.encode(message)[frames.PREFIX_BYTES :])
        assert repr(again) == repr(message), "a message does not survive encoding"


def _converse(machine: Connection, data: bytes, piece_bytes: int) -> tuple[str, str]:
    heard: list[e.Event] = []
    fault = ""
    for at in range(0, len(data), piece_bytes):
        machine.receive_data(data[at : at + piece_bytes], 1.0)
        while True:
            try:
                heard += iter(machine.next_event, None)
            except errors.RemoteProtocolError as error:
                fault = f"{error.code}: {error}"
            if not (machine.role is Role.SERVER and machine.state is State.GREETING):
                break
            machine.send_welcome(m.Welcome(1, "s", "d", capabilities=(m.RESUME,)))
        assert len(machine._calls) <= 2 * limits.CALLS_IN_FLIGHT_MAX, "the table of calls has no bound"
    said, no_fault = _messages(machine.data_to_send(), 1 << 20)
    assert not no_fault, "the machine says what it cannot read itself"
    if fault:
        assert isinstance(said[-1], m.Close), "a violation without a CLOSE"
        assert codes.action(said[-1].code) is codes.Action.STOP, "a violation with a code that invites another try"
    if machine.state is State.CLOSED:
        assert machine.next_timer() is None, "a timer on a closed connection"
    else:
        timer = machine.next_timer()
        assert timer is None or math.isfinite(timer), "a timer that never comes"
    for event in heard:
        for name in ("retry_after_s", "deadline_s", "spread_s", "rtt_s"):
            span = getattr(event, name, None)
            assert span is None or 0 <= span < math.inf, f"{name} of {span}"
    return repr(heard), fault


def _fuzz_connection(make: Callable[[], Connection], data: bytes) -> None:
    whole = _converse(make(), data, max(1, len(data)))
    assert _converse(make(), data, 1) == whole, "another cut, another conversation"


def _server() -> Connection:
    return Connection(Role.SERVER, 0.0, idle_s=150.0)


def _client() -> Connection:
    client = Connection(Role.CLIENT, 0.0, heartbeat_s=60.0)
    client.send_hello(m.Hello((1,), corpus.APP, capabilities=(m.PLAN, m.RESUME)))
    client.send_call("rpc", "a.b")
    client.send_call("api", "GET", more=True)
    client.data_to_send()
    return client


def fuzz_connection_server(data: bytes) -> None:
    """A server gives events or RemoteProtocolError with a CLOSE, the same ones however the bytes are cut."""
    _fuzz_connection(_server, data)


def fuzz_connection_client(data: bytes) -> None:
    """A client with calls open gives events or RemoteProtocolError with a CLOSE, the same ones however cut."""
    _fuzz_connection(_client, data)


_SIGNED = frozenset(corpus.signed_texts())


def fuzz_jws(data: bytes) -> None:
    """Nothing is taken for signed but what was signed, to the byte, and only for its own use."""
    for typ in ("fuzz+jws", plan.TYP, "stormline-device+jwt"):
        with contextlib.suppress(errors.SignatureError):
            payload = jws.verify(data, keys=corpus.KEYS, typ=typ, size_max=limits.PLAN_BYTES_MAX)
            assert data in _SIGNED, "a forged text was accepted"
            assert jws.sign(payload, key=corpus.KEY, kid=corpus.KID, typ=typ).encode() == data, "of another use"


_HELD_PLAN = plan.Plan(
    app=corpus.APP,
    version=3,
    issued_at=corpus.NOW,
    expires_at=corpus.NOW,
    digest="held",
    hosts={corpus.HOST: plan.HostPlan()},
)


def _verify_plan(text: str | bytes, held: plan.Plan | None = None) -> plan.Plan | None:
    try:
        return plan.verify(
            text,
            keys=corpus.KEYS,
            app=corpus.APP,
            hosts=[corpus.HOST],
            version_min=3,
            wall=float(corpus.NOW),
            held=held,
        )
    except errors.AnswerRejected:
        return None


def fuzz_plan(data: bytes) -> None:
    """A genuine answer of any content gives a Plan that keeps the client's conditions, or AnswerRejected; never more.

    A question of any content is a PlanRequest or ValueError.
    """
    assert _verify_plan(data) is None, "an unsigned answer was accepted"
    found = _verify_plan(jws.sign(data, key=corpus.KEY, kid=corpus.KID, typ=plan.TYP))
    if found is not None:
        assert found.app == corpus.APP
        assert found.version >= 3
        assert found.expires_at + limits.CLOCK_SKEW_S > corpus.NOW
        assert corpus.HOST in found.hosts or corpus.HOST in found.unknown
        assert _verify_plan(plan.sign(found, key=corpus.KEY, kid=corpus.KID)) == found, "it does not survive signing"
    for typ in (plan.TYP, plan.TYP_CHANGES, plan.TYP_UNCHANGED):
        found = _verify_plan(jws.sign(data, key=corpus.KEY, kid=corpus.KID, typ=typ), _HELD_PLAN)
        if found is not None:
            assert found.app == corpus.APP
            assert found.version >= 3
            assert corpus.HOST in found.hosts or corpus.HOST in found.unknown
            assert not found.base, "a part was given for the whole"
            for host_plan in found.hosts.values():
                plan.policy_for(host_plan, "GET", "/a/x/b", [("v", "1")], [("X-Plan", "")], "home")
    with contextlib.suppress(ValueError):
        plan.decode_request(data)


def fuzz_dns(data: bytes) -> None:
    """An answer of DNS gives RemoteProtocolError or addresses within their bounds, the same ones each time."""
    for kind in (dns.RecordType.A, dns.RecordType.AAAA):
        try:
            found = dns.parse_reply(data, corpus.HOST, kind)
        except errors.RemoteProtocolError:
            continue
        assert len(found.addresses) == len(set(found.addresses)) <= limits_names.DNS_ADDRESSES_MAX
        assert all((":" in each) == (kind is dns.RecordType.AAAA) for each in found.addresses), "of the other family"
        assert 0 <= found.ttl_s < 2**31
        assert dns.parse_reply(data, corpus.HOST, kind) == found


def fuzz_dns_server(data: bytes) -> None:
    """A question gives RemoteProtocolError or an answer that repeats it; another server's answer stays in bounds."""
    with contextlib.suppress(errors.RemoteProtocolError):
        query = dns_server.read_query(data)
        answer = dns_server.answer(query, query.fault)
        assert answer[:2] == data[:2], "an answer to another question"
        assert query.question in data, "a question that was not asked"
        if query.edns is not None and query.edns.padded and not query.fault:
            assert len(answer) % limits_platform.DOH_PAD_BYTES == 0, "not filled up"
    question = dns.question(corpus.HOST, dns.RecordType.A)[dns_server.HEADER_BYTES :]
    with contextlib.suppress(errors.RemoteProtocolError):
        relayed = dns_server.read_relayed(data, 0, question)
        assert 0 <= relayed.ttl_s < 2**31
        given = relayed.aged(question, 5, ttl_s_max=60)
        assert len(given.data) <= len(data), "more than was said"


def fuzz_bundle(data: bytes) -> None:
    """A bundle file gives BundleError, or a bundle that can be used and written again and shows no token."""
    try:
        found = bundle.decode(data)
    except errors.BundleError:
        return
    assert found.addresses()
    assert found.dispatch_keys
    assert bundle.decode(bundle.encode(found)) == found, "it does not survive writing"
    assert len(found.token) < 8 or found.token not in repr(found), "the token is shown"


def fuzz_report(data: bytes) -> None:
    """A batch gives ValueError or a report within its bounds; what `decode` takes, `salvage` takes whole."""
    salvaged: report.Salvaged | None = None
    with contextlib.suppress(ValueError):
        salvaged = report.salvage(data)
    if salvaged is not None:
        assert len(salvaged.report.calls) + salvaged.malformed <= report.BATCH_RECORDS_MAX
    try:
        decoded = report.decode(data)
    except ValueError:
        return
    assert salvaged is not None, "decode takes what salvage refuses"
    assert repr(salvaged) == repr(report.Salvaged(decoded, 0)), "salvage loses records that are good"
    assert repr(report.decode(report.encode(decoded))) == repr(decoded), "it does not survive encoding"


def fuzz_address(data: bytes) -> None:
    """A text gives ConfigError or a host with a port from 1 to 65535 that survives writing."""
    text = data.decode("utf-8", "surrogateescape")
    for default_port in (None, 443):
        try:
            found = parse_address(text, default_port=default_port)
        except errors.ConfigError:
            continue
        assert found.host
        assert 0 < found.port < 65536
        assert parse_address(str(found)) == found, "it does not survive writing"


def fuzz_proxy_settings(data: bytes) -> None:
    """A URL gives ConfigError or a proxy that can be written again; a list is read, and its entries hold one by one."""
    first, _, rest = data.decode("utf-8", "surrogateescape").partition("\n")
    with contextlib.suppress(errors.ConfigError):
        proxy = proxy_rules.parse_proxy(first)
        assert 0 < proxy.address.port < 65536
        again = proxy_rules.parse_proxy(f"{proxy.scheme}://{proxy.address}")
        assert (again.scheme, again.address) == (proxy.scheme, proxy.address), "it does not survive writing"
        secrets = [] if proxy.username is None else [proxy.username.reveal(), proxy.password.reveal()]
        shown = f"{proxy} {proxy!r}".replace(str(proxy.address), "").replace(repr(proxy.address), "")
        assert not any(len(secret) > 7 and secret in shown for secret in secrets), "a credential is shown"
    exemptions, _ = proxy_rules.parse_no_proxy(rest)
    for entry in rest.split(","):
        for host in ("a.example", "x.b.example", "10.0.0.1", "::1", entry):
            if proxy_rules.parse_no_proxy(entry)[0].cover("https", host, 443):
                assert exemptions.cover("https", host, 443), "an entry does not hold in the list"


def _decoded(codings: tuple[str, ...], data: bytes, piece_bytes: int) -> tuple[bytes, bool]:
    verifier, content = Verifier(codings), b""
    try:
        for at in range(0, len(data), piece_bytes):
            for piece in verifier.decode(data[at : at + piece_bytes]):
                assert 0 < len(piece) <= 2 * limits.DECODE_PIECE_BYTES, "a piece has no bound"
                content += piece
                if len(content) > FUZZED_CONTENT_BYTES_MAX:
                    return content[:FUZZED_CONTENT_BYTES_MAX], True
        verifier.finish()
    except errors.DecodeError:
        return content, False
    return content, True


def fuzz_decoding(data: bytes) -> None:
    """A body of any coding gives content or DecodeError, the same however it is cut."""
    for codings in corpus.CODINGS:
        content, whole = _decoded(codings, data, max(1, len(data)))
        again, whole_again = _decoded(codings, data, 1)
        assert whole == whole_again, "another cut, another verdict"
        assert not whole or content == again, "another cut, another content"


def fuzz_httpsig(data: bytes) -> None:
    """Lines of an answer and a body: no answer is trusted that was not signed, and what is read is written back.

    The input is `Signature-Input`, `Signature` and `Content-Digest`, one a line, then the body.
    """
    *lines, body = (*data.split(b"\n", 3), b"", b"", b"")[:4]
    for line in lines:
        with contextlib.suppress(ValueError):
            found = httpsig.parse_dictionary(line.decode("latin-1"))
            written = ", ".join(f"{name}={httpsig.serialize(member)}" for name, member in found.items())
            assert len(found) <= limits_means.SIGNATURE_MEMBERS_MAX, "members have no bound"
            assert len(written) > limits_means.SIGNATURE_FIELD_CHARS_MAX or (
                httpsig.parse_dictionary(written) == found
            ), "another reading of what was read"
    names = (b"signature-input", b"signature", b"content-digest")
    verdict = httpsig.check_answer(
        corpus.SIGNED_FOR,
        200,
        (*corpus.SIGNED_HEAD, *zip(names, lines, strict=True)),
        body,
        keys={"k": httpsig.VerifyKey("hmac-sha256", corpus.SIGNED_SECRET)},
        nonce="n",
        now_s=float(corpus.NOW),
    )
    assert verdict.why, "a verdict without a reason"
    if verdict.trusted:
        assert body == corpus.SIGNED_BODY, "a body that nobody signed is trusted"


def _http2(data: bytes, piece_bytes: int) -> tuple[str, bytes]:
    codec, seen = http2_codec.Http2Codec(), ""
    for number in range(3):
        codec.open(corpus.HTTP2_REQUEST, ended=number != 2)
    codec.data_to_send()
    unread: dict[int, int] = {}
    try:
        for at in range(0, len(data), piece_bytes):
            for event in codec.receive_data(data[at : at + piece_bytes]):
                seen += f"{event}\n"
                if isinstance(event, http2_codec.Data):
                    unread[event.stream_id] = unread.get(event.stream_id, 0) + len(event.data)
            assert len(codec._buffer) <= limits.H2_FRAME_BYTES_MAX + 9, "more than one frame is held"
            assert len(codec._block) <= limits.HTTP_HEAD_BYTES_MAX + limits.H2_FRAME_BYTES_MAX, "a head has no bound"
    except http2_codec.ConnectionBroken as error:
        seen += f"{error.code!r} {error}"
    assert codec.unread_bytes == sum(unread.values()), "a byte is not told of"
    sent = codec.data_to_send()
    assert len(sent) <= limits.H2_CONTROL_BYTES_MAX + 1000, "what the peer asks for has no bound"
    return seen, sent


def fuzz_http2(data: bytes) -> None:
    """A client with streams open gives events or ConnectionBroken with a GOAWAY, the same ones however they are cut."""
    whole = _http2(data, max(1, len(data)))
    assert _http2(data, 1) == whole, "another cut, another reading"


def fuzz_network_memory(data: bytes) -> None:
    """A file gives ValueError or a record within its bounds that survives writing, and that the policies can take."""
    try:
        found = memory.decode(data)
    except ValueError:
        return
    assert len(found.hosts) <= limits_memory.MEMORY_HOSTS_MAX
    assert memory.decode(memory.encode(found)) == found, "it does not survive writing"
    assert snapshot.merge(found, found) == found, "it is not what it is joined with itself"
    network, book, patience = Network("n", "wifi"), AddressBook(), TimeoutPolicy()
    known = strategy.Strategy(book.worked_within)
    strategy.recall(found, network, book, patience, known, 1.0, float(corpus.NOW))
    again = strategy.collect(network, book, patience, known, 2.0, float(corpus.NOW))
    assert len(memory.encode(again)) <= limits_memory.MEMORY_FILE_BYTES_MAX
    for host in [each.host for each in found.hosts]:
        places = [Candidate("192.0.2.1", 443), Candidate("2001:db8::1", 443)]
        assert book.plan("n", host, places, 3.0), "no address is left"
        assert set(known.choose("n", host, ("h2", "h1"), 3.0).protocols) == {"h2", "h1"}
        planned = patience.plan(RequestShape(host=host), network, 3.0, deadline=13.0)
        assert planned is not None
        assert 0.0 < planned.first_packet_s <= 10.0, "a time-out beyond the deadline"


def fuzz_rtnetlink(data: bytes) -> None:
    """A datagram of the routing socket gives bounded values, and a cut one a beginning of them."""
    whole = list(rtnetlink.parse(data))
    assert len(whole) <= len(data) // 16, "more messages than there can be"
    part = list(rtnetlink.parse(data[: len(data) // 2]))
    assert part == whole[: len(part)], "what follows changes what was read"


def fuzz_network_story(data: bytes) -> None:
    """A story of a network is read or refused with ConfigError; what is read has an id that shows no name."""
    with contextlib.suppress(errors.ConfigError):
        for event in recorded.parse_story(data.decode("utf-8", "replace")):
            named = network.identify(bytes(32), event.info)
            assert named == network.NO_NETWORK_ID or len(named) == 16, "an id has another form"
            name = "" if event.info.name is None else event.info.name.reveal()
            assert len(name) < 8 or name not in repr(event.info), "a name is shown"


def fuzz_probe_answer(data: bytes) -> None:
    """Answers to probes are findings, whatever they are."""
    probes.read_captive_answer(data)
    probes.read_captive_answer(b"HTTP/1.1 200 OK\r\ncontent-type: application/captive+json\r\n\r\n" + data)
    question = probes.dns_question("shop.test", 1)
    probes.read_dns_answer(data, question)
    probes.read_dns_answer(question[:2] + data, question)


def _binary(data: bytes, piece_bytes: int) -> tuple[list[bhttp.Event], str]:
    decoder, events = bhttp.Decoder(), []
    try:
        for at in range(0, len(data), piece_bytes):
            events += decoder.feed(data[at : at + piece_bytes])
        return events + decoder.feed(b"", last=True), ""
    except errors.RemoteProtocolError as error:
        return events, str(error)


def fuzz_bhttp(data: bytes) -> None:
    """A binary HTTP message is the same one however it is cut, or RemoteProtocolError; what is read can be written."""
    whole, why = _binary(data, max(1, len(data)))
    pieces, why_not = _binary(data, 1)
    assert bool(why) == bool(why_not), "another cut, another reading"
    if why:
        return
    text = b"".join(event.content for event in whole if isinstance(event, bhttp.Data))
    assert text == b"".join(event.content for event in pieces if isinstance(event, bhttp.Data)), "another content"
    if isinstance(whole[0], bhttp.RequestHead):
        request = bhttp.decode_request(data)
        assert bhttp.decode_request(bhttp.encode_request(request)) == request, "a request does not survive encoding"
    else:
        response = bhttp.decode_response(data)
        assert bhttp.decode_response(bhttp.encode_response(response)) == response, "a response does not survive"


def fuzz_ohttp(data: bytes) -> None:
    """Keys and sealed messages are read, or refused with the errors that are documented; nothing forged is opened."""
    with contextlib.suppress(errors.RemoteProtocolError):
        found = ohttp.decode_keys(data)
        assert all(ohttp.choose(config) for config in found), "a key that cannot be used"
        assert ohttp.decode_keys(ohttp.encode_keys(found)) == found, "keys do not survive encoding"
    genuine = corpus.sealed_messages()
    refused = (errors.RemoteProtocolError, errors.SignatureError)
    with contextlib.suppress(*refused):
        ohttp.open_request(corpus.RELAY_KEYS, data)
        assert data in genuine, "a forged request was opened"
    with contextlib.suppress(*refused):
        opener = ohttp.RequestOpener(corpus.RELAY_KEYS)
        for at in range(0, len(data), 7):
            opener.feed(data[at : at + 7])
        opener.feed(b"", last=True)
        assert data in genuine, "a forged request was opened piece by piece"
    with contextlib.suppress(*refused):
        ohttp.open_response(corpus.RELAY_ANSWER, data)
        assert data in genuine, "a forged answer was opened"


def fuzz_proxy_header(data: bytes) -> None:
    """Give an address, none, or RemoteProtocolError; an address that was read is written back."""
    with contextlib.suppress(errors.RemoteProtocolError):
        size = proxyprotocol.size_of(data[: proxyprotocol.HEAD_BYTES])
        assert size <= limits_carriers.PROXY_HEADER_BYTES_MAX, "a header has no bound"
        source = proxyprotocol.parse(data[:size])
        if source is not None:
            assert proxyprotocol.parse(proxyprotocol.encode(source, source)) == source, "another reading"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser under fuzzing: the function that holds its invariant, and valid inputs to start from."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def fuzz_network_log(data: bytes) -> None:
    """Files give records that were whole, each once and in order, and a bounded count of the rest."""
    alone = netlog.read([data], corpus.NETLOG_KEY)
    places = [(each.started_ms, each.instance, each.number) for each in alone.entries]
    assert places == sorted(set(places)), "a record comes twice, or out of order"
    assert 0 <= alone.damaged_bytes <= len(data), "more is damaged than there is"
    twice = netlog.read([data, data], corpus.NETLOG_KEY)
    assert [each[:3] for each in twice.entries] == places, "a file that is read twice gives more"
    for entry in alone.entries:
        netlog.shown(entry.record)
    closed = netlog.read([data])
    assert len(closed.entries) <= len(alone.entries), "without the key there is more"


def fuzz_feedback(data: bytes) -> None:
    """What a device sends is feedback within its bounds or ValueError, and survives writing."""
    try:
        said = feedback.decode(data)
    except ValueError:
        return
    assert 0 < len(said.text) <= limits_netlog.FEEDBACK_TEXT_CHARS_MAX
    assert "/" not in said.id, "an id that is a path"
    assert feedback.decode(feedback.encode(said)) == said, "it does not survive writing"


def fuzz_short_exchange(data: bytes) -> None:
    """Bodies of exchanges are read within their bounds or refused, survive writing, and never make a gap."""
    for decode in (short.decode_ask, short.decode_tell):
        try:
            message = decode(data)
        except errors.RemoteProtocolError:
            continue
        assert len(message.data) <= limits_carriers.SHORT_DOWN_BYTES
        assert decode(short.encode(message)) == message, "it does not survive writing"
        incoming, outgoing = short.Incoming(), short.Outgoing()
        outgoing.put(b"0123456789")
        with contextlib.suppress(errors.RemoteProtocolError):
            outgoing.confirm(message.received)
        with contextlib.suppress(errors.RemoteProtocolError):
            assert incoming.take(message.begin, message.data) == message.data[-message.begin :]
        assert outgoing.end == 10, "bytes come or go by what the other side says"
        assert incoming.received <= len(message.data)


def _request(data: bytes, piece_bytes: int) -> tuple[object, ...]:
    reader = short_http.RequestReader()
    for at in range(0, len(data), piece_bytes):
        reader.feed(data[at : at + piece_bytes])
    assert len(reader.body) <= limits_carriers.SHORT_BODY_BYTES_MAX + len(data)
    if not reader.done:
        return (reader.fault,)
    return reader.method, reader.path, reader.version, tuple(reader.headers), bytes(reader.body), reader.excess


def fuzz_short_request(data: bytes) -> None:
    """A request of HTTP is read or refused, the same however the bytes are cut."""
    whole = _request(data, max(1, len(data)))
    assert _request(data, 1) == whole, "another cut, another request"


TARGETS = {
    "frames": Target(run=fuzz_frames, seeds=corpus.frames_of_all),
    "connection_server": Target(run=fuzz_connection_server, seeds=corpus.from_client),
    "connection_client": Target(run=fuzz_connection_client, seeds=corpus.from_server),
    "jws": Target(run=fuzz_jws, seeds=corpus.signed_texts),
    "plan": Target(run=fuzz_plan, seeds=corpus.plans),
    "dns": Target(run=fuzz_dns, seeds=corpus.dns_answers),
    "dns_server": Target(run=fuzz_dns_server, seeds=corpus.dns_messages),
    "bundle": Target(run=fuzz_bundle, seeds=corpus.bundles),
    "report": Target(run=fuzz_report, seeds=corpus.reports),
    "address": Target(run=fuzz_address, seeds=corpus.addresses),
    "proxy_settings": Target(run=fuzz_proxy_settings, seeds=corpus.proxy_settings),
    "httpsig": Target(run=fuzz_httpsig, seeds=corpus.signed_answers),
    "http2": Target(run=fuzz_http2, seeds=corpus.http2_answers),
    "bhttp": Target(run=fuzz_bhttp, seeds=corpus.binary_messages),
    "ohttp": Target(run=fuzz_ohttp, seeds=corpus.sealed_messages),
    "decoding": Target(run=fuzz_decoding, seeds=corpus.coded_bodies),
    "network_memory": Target(run=fuzz_network_memory, seeds=corpus.network_files),
    "rtnetlink": Target(run=fuzz_rtnetlink, seeds=corpus.kernel_messages),
    "network_story": Target(run=fuzz_network_story, seeds=corpus.network_stories),
    "probe_answer": Target(run=fuzz_probe_answer, seeds=corpus.probe_answers),
    "network_log": Target(run=fuzz_network_log, seeds=corpus.network_logs),
    "feedback": Target(run=fuzz_feedback, seeds=corpus.feedbacks),
    "proxy_header": Target(run=fuzz_proxy_header, seeds=corpus.proxy_headers),
    "first_bytes": Target(run=gateway.fuzz_first_bytes, seeds=corpus.first_bytes),
    "websocket": Target(run=gateway.fuzz_websocket, seeds=corpus.websockets),
    "tokens": Target(run=gateway.fuzz_tokens, seeds=corpus.device_tokens),
    "resumption": Target(run=gateway.fuzz_resumption, seeds=corpus.sessions),
    "short_exchange": Target(run=fuzz_short_exchange, seeds=corpus.short_exchanges),
    "short_request": Target(run=fuzz_short_request, seeds=corpus.short_requests),
}
