"""Binary and oblivious HTTP under any cut, any message and any damage."""

import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors
from stormline.wire import bhttp, ohttp

KEY = ohttp.GatewayKey(7, X25519PrivateKey.from_private_bytes(bytes(range(32))))
KEYS = {7: KEY}
ENTROPY = bytes(range(1, 33))
_TOKEN = "abcdefghijklmnopqrstuvwxyz0123456789-_"
names = st.text(_TOKEN, min_size=1, max_size=20).map(str.encode)
values = st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF), max_size=30).map(lambda t: t.encode("latin-1"))
fields = st.lists(st.tuples(names, values), max_size=6).map(tuple)
contents = st.binary(max_size=300)
paths = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=40).map(lambda t: b"/" + t.encode())
requests = st.builds(
    bhttp.Request,
    st.sampled_from([b"GET", b"POST", b"PATCH", b"x-own"]),
    st.sampled_from([b"https", b"http"]),
    st.sampled_from([b"", b"shop.test", b"[2001:db8::1]:8443"]),
    paths,
    fields,
    contents,
    fields,
)
responses = st.builds(bhttp.Response, st.integers(200, 599), fields, contents, fields)


def pieces(data, cuts):
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in itertools.pairwise(marks)] or [b""]


def joined(events):
    """The events with neighbouring pieces of content made one."""
    found = []
    for event in events:
        if isinstance(event, bhttp.Data) and found and isinstance(found[-1], bhttp.Data):
            found[-1] = bhttp.Data(found[-1].content + event.content)
        else:
            found.append(event)
    return found


@given(requests, st.integers(1, 128))
def test_requests_come_back_as_they_were(request, pad_to):
    data = bhttp.encode_request(request, pad_to=pad_to)
    assert len(data) % pad_to == 0
    assert bhttp.decode_request(data) == request


@given(responses, st.lists(st.integers(0, 2000), max_size=6), st.lists(st.integers(0, 300), max_size=4))
def test_streamed_responses_come_back_however_they_are_written_and_cut(response, cuts, chunks):
    head = bhttp.response_head(bhttp.ResponseHead(response.status, response.headers))
    body = b"".join(bhttp.chunk(piece) for piece in pieces(response.content, chunks))
    data = head + body + bhttp.end(response.trailers)
    assert bhttp.decode_response(data) == response
    decoder, events = bhttp.Decoder(), []
    cut = pieces(data, cuts)
    for at, piece in enumerate(cut):
        events += decoder.feed(piece, last=at == len(cut) - 1)
    assert joined(events) == joined(bhttp.Decoder().feed(data, last=True))


@given(requests, st.lists(st.integers(0, 2000), max_size=6), st.booleans())
def test_requests_are_read_alike_however_they_are_cut(request, cuts, known):
    if known:
        data = bhttp.encode_request(request)
    else:
        data = bhttp.request_head(bhttp.RequestHead(*request[:5])) + bhttp.chunk(request.content)
        data += bhttp.end(request.trailers)
    decoder, events = bhttp.Decoder(), []
    cut = pieces(data, cuts)
    for at, piece in enumerate(cut):
        events += decoder.feed(piece, last=at == len(cut) - 1)
    assert joined(events) == joined(bhttp.Decoder().feed(data, last=True))
    assert bhttp.decode_request(data) == request


@given(requests, st.integers(0, 500), st.integers(0, 255), st.integers(0, 500))
def test_a_request_here_whole_is_read_or_refused_as_one_that_comes_in_pieces(request, at, change, length):
    data = bytearray(bhttp.encode_request(request))
    data[at % len(data)] ^= change
    data = bytes(data[: len(data) - length if length < len(data) else None])
    found = []
    for cut in ([data], [data[:1], data[1:]]):
        decoder, events = bhttp.Decoder(head_bytes_max=300), []
        try:
            for number, piece in enumerate(cut):
                events += decoder.feed(piece, last=number == len(cut) - 1)
        except errors.RemoteProtocolError:
            events = None
        found.append(events and joined(events))
    assert found[0] == found[1]


@given(st.one_of(st.binary(max_size=200), st.tuples(responses, st.integers(0, 500), st.integers(0, 255))))
def test_any_bytes_are_read_or_refused_with_one_error(given_):
    if isinstance(given_, bytes):
        data = given_
    else:
        changed = bytearray(bhttp.encode_response(given_[0]))
        changed[given_[1] % len(changed)] = given_[2]
        data = bytes(changed)
    for read in (bhttp.decode_request, bhttp.decode_response):
        try:
            read(data)
        except errors.RemoteProtocolError as error:
            assert str(error)
    try:
        ohttp.decode_keys(data)
    except errors.RemoteProtocolError as error:
        assert str(error)


@given(st.binary(max_size=400), st.binary(max_size=400), st.lists(st.integers(0, 2000), max_size=6))
def test_chunks_come_back_however_they_are_cut(content, answer, cuts):
    sealer = ohttp.RequestSealer(KEY.config, entropy=ENTROPY)
    parts = pieces(content, cuts)
    sealed = b"".join(sealer.chunk(part, last=at == len(parts) - 1) for at, part in enumerate(parts))
    opener, opened = ohttp.RequestOpener(KEYS), b""
    came = pieces(sealed, cuts)
    for at, piece in enumerate(came):
        opened += b"".join(opener.feed(piece, last=at == len(came) - 1))
    assert opened == content
    answering = ohttp.ResponseSealer(opener.response, nonce=ENTROPY)
    back = answering.chunk(answer[:100]) + answering.chunk(answer[100:], last=True)
    reading, read = ohttp.ResponseOpener(sealer.response), b""
    came = pieces(back, cuts)
    for at, piece in enumerate(came):
        read += b"".join(reading.feed(piece, last=at == len(came) - 1))
    assert read == answer


@given(st.binary(max_size=100), st.integers(0, 500), st.integers(1, 255))
def test_no_change_to_a_sealed_message_goes_unnoticed(content, at, change):
    sealed, opens = ohttp.seal_request(KEY.config, content, entropy=ENTROPY)
    _, seals = ohttp.open_request(KEYS, sealed)
    answer = ohttp.seal_response(seals, content, nonce=ENTROPY)
    for data, read in (
        (sealed, lambda changed: ohttp.open_request(KEYS, changed)),
        (answer, lambda changed: ohttp.open_response(opens, changed)),
    ):
        changed = bytearray(data)
        changed[at % len(changed)] ^= change
        with pytest.raises(errors.SignatureError):
            read(bytes(changed))
