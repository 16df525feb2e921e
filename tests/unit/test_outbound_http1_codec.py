"""HTTP/1.1 without I/O: what is sent, what is refused, and how answers are read."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.outbound.http1_codec import ResponseReader, encode
from stormline.outbound.messages import HttpRequest


async def _no_chunks() -> AsyncIterator[bytes]:
    return
    yield b""


def _request(method="GET", *, host="a.test", port=80, scheme="http", target=b"/", headers=(), body=None):
    return HttpRequest(method, scheme, host, port, target, tuple(headers), body)


def test_encode_get_has_host_and_no_framing():
    encoded = encode(_request(target=b"/a?b=c", headers=[(b"Accept", b"*/*")]))
    assert encoded.head == b"GET /a?b=c HTTP/1.1\r\nHost: a.test\r\nAccept: */*\r\n\r\n"
    assert (encoded.body, encoded.length, encoded.chunked) == (b"", 0, False)


@pytest.mark.parametrize(
    ("request_", "host"),
    [
        (_request(port=8080), b"a.test:8080"),
        (_request(scheme="https", port=443), b"a.test"),
        (_request(scheme="https", port=80), b"a.test:80"),
        (_request(host="::1"), b"[::1]"),
        (_request(host="::1", port=81), b"[::1]:81"),
        (_request(headers=[(b"host", b"b.test")]), b"b.test"),
    ],
)
def test_encode_host_follows_origin_unless_given(request_, host):
    lines = encode(request_).head.split(b"\r\n")
    assert [line.partition(b": ")[2] for line in lines if line.lower().startswith(b"host:")] == [host]


@pytest.mark.parametrize(
    ("request_", "framing"),
    [
        (_request("POST", body=b"ab"), b"Content-Length: 2"),
        (_request("POST"), b"Content-Length: 0"),
        (_request("POST", body=b"ab", headers=[(b"content-length", b"2")]), b"content-length: 2"),
        (_request("POST", body=_no_chunks()), b"Transfer-Encoding: chunked"),
        (_request("POST", body=b"ab", headers=[(b"Transfer-Encoding", b"chunked")]), b"Transfer-Encoding: chunked"),
        (_request("PUT", body=_no_chunks(), headers=[(b"Content-Length", b"7")]), b"Content-Length: 7"),
    ],
)
def test_encode_body_is_framed_once(request_, framing):
    head = encode(request_).head
    lines = [line for line in head.split(b"\r\n") if line.lower().startswith((b"content-length", b"transfer-encoding"))]
    assert lines == [framing]


@pytest.mark.parametrize(
    "request_",
    [
        _request("GE T"),
        _request("GET\r\nX: y"),
        _request(""),
        _request("CONNECT"),
        _request("GÉT"),
        _request(target=b""),
        _request(target=b"/ HTTP/1.1\r\nX: y"),
        _request(target=b"/a b"),
        _request(target=b"/\x00"),
        _request(target="/ü".encode()),
        _request(headers=[(b"X", b"a\r\nY: b")]),
        _request(headers=[(b"X", b"a\nb")]),
        _request(headers=[(b"X", b"a\x00b")]),
        _request(headers=[(b"X\r\nY", b"a")]),
        _request(headers=[(b"X:", b"a")]),
        _request(headers=[(b"X ", b"a")]),
        _request(headers=[(b"", b"a")]),
        _request(host="a.test\r\nX: y"),
        _request(host="a test"),
        _request(host=""),
        _request(headers=[(b"Host", b"a"), (b"host", b"b")]),
        _request("POST", body=b"ab", headers=[(b"Content-Length", b"3")]),
        _request("POST", body=b"ab", headers=[(b"Content-Length", b"+2")]),
        _request("POST", body=b"ab", headers=[(b"Content-Length", b"2"), (b"content-length", b"2")]),
        _request("POST", body=b"ab", headers=[(b"Content-Length", b"2"), (b"Transfer-Encoding", b"chunked")]),
        _request("POST", body=b"ab", headers=[(b"Transfer-Encoding", b"gzip, chunked")]),
        _request("GET", headers=[(b"Content-Length", b"5")]),
    ],
)
def test_encode_what_breaks_out_of_its_place_is_refused(request_):
    with pytest.raises(errors.LocalProtocolError):
        encode(request_)


def test_request_repr_shows_no_credentials():
    request = _request("POST", target=b"/?key=hunter2", headers=[(b"Authorization", b"hunter2")], body=b"hunter2")
    assert "hunter2" not in repr(request) + repr(encode(request))


def _read(data, *, is_head=False, eof=False):
    reader = ResponseReader(is_head=is_head)
    reader.receive_data(data)
    if eof:
        reader.receive_eof()
    return reader, reader.take_body()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("data", "status", "body", "keep_alive"),
    [
        (OK + b"Content-Length: 2\r\n\r\nab", 200, b"ab", True),
        (OK + b"Content-Length: 0\r\n\r\n", 200, b"", True),
        (OK + b"Content-Length: 2\r\nConnection: close\r\n\r\nab", 200, b"ab", False),
        (OK + b"Content-Length: 2\r\nConnection: x, Close\r\n\r\nab", 200, b"ab", False),
        (OK + b"Content-Length: 2\r\nConnection: x\r\nConnection: close\r\n\r\nab", 200, b"ab", False),
        (OK + b"Content-Length: 2\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nab", 200, b"ab", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab", 200, b"ab", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nab", 200, b"ab", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, b"", True),
        (b"HTTP/1.1 999\r\nContent-Length: 0\r\n\r\n", 999, b"", True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=\"y\"\r\nc\r\n0\r\n\r\n", 200, b"abc", True),
        (OK + b"Transfer-Encoding: Chunked\r\n\r\n0\r\nX: y\r\n\r\n", 200, b"", True),
        (b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 103 E\r\nA: b\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\na", 200, b"a", True),
        # more than the answer: it stands, and the connection is done with
        (OK + b"Content-Length: 2\r\n\r\nabc", 200, b"ab", False),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n", 200, b"a", False),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\ngarbage", 200, b"a", False),
        (b"HTTP/1.1 204 No Content\r\n\r\nx", 204, b"", False),
    ],
)  # fmt: skip
def test_reader_whole_answer_is_complete(data, status, body, keep_alive):
    reader, got = _read(data)
    assert (reader.status, got, reader.complete, reader.keep_alive) == (status, body, True, keep_alive)


def test_reader_head_of_final_answer_is_kept_as_it_came():
    reader, _ = _read(b"HTTP/1.1 100 C\r\nA: 1\r\n\r\nHTTP/1.1 200 All Good\r\nX-Empty:\r\nB:  2 \t\r\nb: 3\r\n\r\n")
    assert reader.headers == [(b"X-Empty", b""), (b"B", b"2"), (b"b", b"3")]
    assert (reader.reason, reader.http_version) == (b"All Good", "HTTP/1.1")


@pytest.mark.parametrize("framing", [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b""])
def test_reader_answer_to_head_ends_with_its_head(framing):
    reader, body = _read(OK + framing + b"\r\n", is_head=True)
    assert (reader.complete, body) == (True, b"")


def test_reader_body_without_length_ends_with_the_connection():
    reader, body = _read(OK + b"\r\nabc")
    assert (body, reader.complete) == (b"abc", False)
    reader.receive_eof()
    assert (reader.complete, reader.keep_alive) == (True, False)


@pytest.mark.parametrize(
    ("data", "phase"),
    [
        (b"H", Phase.FIRST_BYTE),
        (OK + b"Content-Le", Phase.FIRST_BYTE),
        (b"HTTP/1.1 100 Continue\r\n\r\n", Phase.FIRST_BYTE),
        (OK + b"Content-Length: 5\r\n\r\nabcd", Phase.BODY),
        (OK + b"Content-Length: 5\r\n\r\n", Phase.BODY),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", Phase.BODY),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", Phase.BODY),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n", Phase.BODY),
    ],
)
def test_reader_end_before_the_end_is_a_read_error(data, phase):
    with pytest.raises(errors.ReadError) as caught:
        _read(data, eof=True)
    assert caught.value.phase is phase


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"RTSP/1.0 200 OK\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.7 200 OK\r\n\r\n",
        b"\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 099 Low\r\n\r\n",
        b"HTTP/1.1 1000 High\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\n\n",
        b"HTTP/1.1 200 OK\r\nA: b\n\r\n",
        OK + b"A : b\r\n\r\n",
        OK + b"A\x00: b\r\n\r\n",
        OK + b"A: b\x00\r\n\r\n",
        OK + b"A: b\rc\r\n\r\n",
        OK + b": b\r\n\r\n",
        OK + b"A: b\r\n folded\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        OK + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab",
        OK + b"Content-Length: 2, 2\r\n\r\nab",
        OK + b"Content-Length: -1\r\n\r\nab",
        OK + b"Content-Length: +2\r\n\r\nab",
        OK + b"Content-Length: 0x2\r\n\r\nab",
        OK + b"Content-Length: 99999999999999999999999\r\n\r\nab",
        OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\nab",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 9\r\n\r\n",
        OK + b"A: " + b"b" * limits.HTTP_HEAD_BYTES_MAX,
        OK + b"A: b\r\n" * (limits.HTTP_HEADERS_MAX + 1) + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * (limits.HTTP_HEAD_BYTES_MAX // 24),
    ],
)  # fmt: skip
def test_reader_what_breaks_http_is_a_violation(data):
    with pytest.raises(errors.ProtocolViolation):
        _read(data)


@pytest.mark.parametrize("endless", [b"1;" + b"x" * 4096, b"0\r\nA: " + b"x" * 4096])
def test_reader_extensions_or_trailers_without_end_are_a_violation(endless):
    reader, _ = _read(OK + b"Transfer-Encoding: chunked\r\n\r\n" + endless)
    for _ in range(limits.HTTP_HEAD_BYTES_MAX // 4096 - 2):
        reader.receive_data(b"x" * 4096)
    with pytest.raises(errors.ProtocolViolation):
        reader.receive_data(b"x" * 8192)


_names = st.sampled_from([b"A", b"content-length", b"Content-Length", b"Connection", b"Transfer-Encoding", b"a b", b""])
_values = st.sampled_from([b"", b"2", b"2 ", b"chunked", b"close", b"a\tb", b"x: y", b"\xff", b"\x00", b"\n", b"a\r"])
_lines = st.builds(
    b"%b%b%b%b".__mod__,
    st.tuples(_names, st.sampled_from([b": ", b":", b":  ", b" : ", b""]), _values, st.sampled_from([b"\r\n", b"\n"])),
)
_starts = st.sampled_from(
    [OK, b"HTTP/1.1 404 \r\n", b"HTTP/1.1 204\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 100 C\r\n\r\n" + OK]
)


def _outcome(pieces, *, is_head):
    reader = ResponseReader(is_head=is_head)
    try:
        for piece in pieces:
            reader.receive_data(piece)
    except errors.ProtocolViolation:
        return None
    told = reader.status, reader.reason, reader.http_version, reader.headers
    return told, reader.complete, reader.keep_alive, reader.take_body()


@given(
    start=_starts, lines=st.lists(_lines, max_size=4), rest=st.sampled_from([b"", b"ab", b"abc"]), is_head=st.booleans()
)
@example(start=OK, lines=[b"A: b\r\n", b"Content-Length: 2\r\n"], rest=b"ab", is_head=False)
@example(start=OK, lines=[b"A: b \r\n"], rest=b"", is_head=True)
def test_reader_outcome_is_the_same_however_the_bytes_are_cut(start, lines, rest, is_head):
    data = start + b"".join(lines) + b"\r\n" + rest
    whole = _outcome([data], is_head=is_head)
    assert whole == _outcome([data[at : at + 1] for at in range(len(data))], is_head=is_head)
