"""HTTP/1.1 reading: the outcome does not depend on how bytes are cut, and no bytes bring anything but our errors."""

import httptools
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors
from stormline.outbound.http1_codec import ResponseReader, encode
from stormline.outbound.messages import HttpRequest

_TOKEN = st.text("abcXYZ09-_!~", min_size=1, max_size=12).map(str.encode)
_VALUE = st.text("ab ,;=\t\u00e9", max_size=20).map(lambda text: text.encode("latin-1").strip(b" \t"))
_FIELDS = st.lists(st.tuples(_TOKEN.map(lambda name: b"X-" + name), _VALUE), max_size=5)
_CHUNKS = st.lists(st.binary(min_size=1, max_size=40), max_size=5)


def _lines(fields):
    return b"".join(b"%s: %s\r\n" % field for field in fields)


@st.composite
def _answers(draw):
    """Give a valid answer, with what must be read from it."""
    interim = b"".join(
        b"HTTP/1.1 %d x\r\n%s\r\n" % (draw(st.sampled_from([100, 102, 103, 199])), _lines(draw(_FIELDS)))
        for _ in range(draw(st.integers(0, 2)))
    )
    status = draw(st.sampled_from([200, 201, 206, 301, 400, 404, 500, 599]))
    fields = draw(_FIELDS)
    chunks = draw(_CHUNKS)
    body = b"".join(chunks)
    kind = draw(st.sampled_from(["length", "chunked", "close"]))
    if kind == "length":
        framing, wire = b"Content-Length: %d\r\n" % len(body), body
    elif kind == "chunked":
        framing = b"Transfer-Encoding: chunked\r\n"
        wire = b"".join(b"%x;e=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        wire += b"0\r\n" + _lines(draw(_FIELDS)) + b"\r\n"
    else:
        framing, wire = b"", body
    data = interim + b"HTTP/1.1 %d Reason\r\n" % status + _lines(fields) + framing + b"\r\n" + wire
    return data, status, fields, body


def _outcome(pieces, *, is_head=False):
    """Give all that can be seen of reading `pieces`, then the end."""
    reader = ResponseReader(is_head=is_head)
    body, failure = b"", None
    try:
        for piece in pieces:
            reader.receive_data(piece)
            body += reader.take_body()
        reader.receive_eof()
    except errors.TransportError as error:
        failure = (type(error), error.phase)
        body += reader.take_body()
    return reader.status, reader.reason, reader.headers, body, reader.complete, failure


@st.composite
def _cut(draw, data):
    points = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    pieces = [data[start:end] for start, end in zip([0, *points], [*points, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


@given(_answers(), st.data())
def test_reader_valid_answer_reads_the_same_however_it_is_cut(answer, data):
    wire, status, fields, body = answer
    whole = _outcome([wire])
    assert whole == _outcome([wire[at : at + 1] for at in range(len(wire))])
    assert whole == _outcome(data.draw(_cut(wire)))
    got_status, _, got_fields, got_body, complete, failure = whole
    assert (got_status, got_body, complete, failure) == (status, body, True, None)
    assert [field for field in got_fields if field[0].startswith(b"X-")] == fields


@st.composite
def _damaged(draw):
    wire = bytearray(draw(_answers())[0])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(wire)))
        match draw(st.sampled_from(["replace", "insert", "cut"])):
            case "replace":
                wire[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "insert":
                wire[at:at] = draw(st.sampled_from([b"\r", b"\n", b"\r\n", b"\0", b":", b" ", b"9", b"\r\n\r\n"]))
            case _:
                del wire[at:]
    return bytes(wire)


@given(st.one_of(_damaged(), st.binary(max_size=200), st.binary(max_size=80).map(lambda tail: b"HTTP/1.1 " + tail)))
def test_reader_any_bytes_give_an_answer_or_our_errors_however_they_are_cut(wire):
    whole = _outcome([wire] if wire else [])
    single = _outcome([wire[at : at + 1] for at in range(len(wire))])
    assert whole == single


class _Heard:
    def __init__(self):
        self.target, self.fields, self.body, self.done = b"", [], b"", False

    def on_url(self, url):
        self.target += url

    def on_header(self, name, value):
        self.fields.append((name, value))

    def on_body(self, data):
        self.body += data

    def on_message_complete(self):
        self.done = True


@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
    st.text("abz/?&=%20.", max_size=20).map(lambda text: b"/" + text.encode()),
    _FIELDS,
    st.binary(max_size=50),
)
def test_encode_what_is_sent_is_what_a_server_reads(method, target, fields, body):
    encoded = encode(HttpRequest(method, "http", "a.test", 80, target, tuple(fields), body))
    heard = _Heard()
    parser = httptools.HttpRequestParser(heard)
    parser.feed_data(encoded.head + encoded.body)
    assert parser.get_method() == method.encode()
    assert (heard.target, heard.body, heard.done) == (target, body, True)
    assert [field for field in heard.fields if field[0].startswith(b"X-")] == fields
