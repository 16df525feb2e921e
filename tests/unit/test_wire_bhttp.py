"""Binary HTTP as the examples of RFC 9292 section 5 have it, and the messages that section 4 calls invalid."""

import pytest

from stormline.core import limits_relay
from stormline.core.errors import RemoteProtocolError
from stormline.wire import bhttp

unhex = bytes.fromhex
FIELDS = (
    (b"user-agent", b"curl/7.16.3 libcurl/7.16.3 OpenSSL/0.9.7l zlib/1.2.3"),
    (b"host", b"www.example.com"),
    (b"accept-language", b"en, mi"),
)
HELLO = bhttp.Request(b"GET", b"https", b"", b"/hello.txt", FIELDS)
_LINES = (
    "0a757365722d6167656e74346375726c2f372e31362e33206c69626375726c2f372e31362e33204f70656e53534c2f302e392e376c207a6c69"
    "622f312e322e3304686f73740f7777772e6578616d706c652e636f6d0f6163636570742d6c616e677561676506656e2c206d69"
)
KNOWN_REQUEST = unhex("0003474554056874747073000a2f68656c6c6f2e747874406c" + _LINES + "0000")
STREAMED_REQUEST = unhex("0203474554056874747073000a2f68656c6c6f2e747874" + _LINES + "00000000000000000000000000")
STREAMED_RESPONSE = unhex(
    "0340660772756e6e696e670a22736c65657020313522004067046c696e6b233c2f7374796c652e6373733e3b2072656c3d7072656c6f61643b"
    "2061733d7374796c65046c696e6b243c2f7363726970742e6a733e3b2072656c3d7072656c6f61643b2061733d7363726970740040c8046461"
    "74651d4d6f6e2c203237204a756c20323030392031323a32383a353320474d5406736572766572064170616368650d6c6173742d6d6f646966"
    "6965641d5765642c203232204a756c20323030392031393a31353a353620474d5404657461671422333461613338372d642d31353638656230"
    "30220d6163636570742d72616e6765730562797465730e636f6e74656e742d6c656e67746802353104766172790f4163636570742d456e636f"
    "64696e670c636f6e74656e742d747970650a746578742f706c61696e003348656c6c6f20576f726c6421204d7920636f6e74656e7420696e63"
    "6c75646573206120747261696c696e672043524c462e0d0a0000"
)
KNOWN_RESPONSE = unhex(
    "0140c8001d5468697320636f6e74656e7420636f6e7461696e732043524c462e0d0a0d07747261696c65720474657874"
)


def test_request_of_known_length_is_the_published_one():
    assert bhttp.encode_request(HELLO) == KNOWN_REQUEST
    assert bhttp.decode_request(KNOWN_REQUEST) == HELLO


def test_request_of_indeterminate_length_with_padding_means_the_same():
    assert bhttp.decode_request(STREAMED_REQUEST) == HELLO
    head = bhttp.request_head(bhttp.RequestHead(b"GET", b"https", b"", b"/hello.txt", FIELDS))
    assert head + bhttp.end() + bytes(10) == STREAMED_REQUEST


@pytest.mark.parametrize("cut", range(13))
def test_empty_parts_may_be_left_out_at_the_end(cut):
    assert bhttp.decode_request(STREAMED_REQUEST[: len(STREAMED_REQUEST) - cut]) == HELLO
    assert bhttp.decode_request(KNOWN_REQUEST[: len(KNOWN_REQUEST) - min(cut, 2)]) == HELLO


def test_informational_responses_come_before_the_real_one():
    events = bhttp.Decoder().feed(STREAMED_RESPONSE, last=True)
    heads = [event for event in events if isinstance(event, bhttp.ResponseHead)]
    assert [head.status for head in heads] == [102, 103, 200]
    assert heads[0].headers == ((b"running", b'"sleep 15"'),)
    response = bhttp.decode_response(STREAMED_RESPONSE)
    assert response.content == b"Hello World! My content includes a trailing CRLF.\r\n"
    assert dict(response.headers)[b"content-length"] == b"51"


def test_response_with_trailers_is_the_published_one():
    response = bhttp.Response(200, (), b"This content contains CRLF.\r\n", ((b"trailer", b"text"),))
    assert bhttp.decode_response(KNOWN_RESPONSE) == response
    assert bhttp.encode_response(response) == KNOWN_RESPONSE


def test_streamed_content_is_given_as_it_comes():
    decoder = bhttp.Decoder()
    assert decoder.feed(bhttp.response_head(bhttp.ResponseHead(200, ()))) == [bhttp.ResponseHead(200, ())]
    piece = bhttp.chunk(b"abcdef")
    assert decoder.feed(piece[:4]) == [bhttp.Data(b"abc")]
    assert decoder.feed(piece[4:] + bhttp.chunk(b"")) == [bhttp.Data(b"def")]
    assert decoder.feed(bhttp.end(((b"a", b"b"),)), last=True) == [bhttp.End(((b"a", b"b"),))]


@pytest.mark.parametrize(
    ("number", "data"),
    [
        (0, "00"),
        (37, "25"),
        (63, "3f"),
        (64, "4040"),
        (15293, "7bbd"),
        (494878333, "9d7f3e7d"),
        (1 << 30, "c000000040000000"),
        (151288809941952652, "c2197c5eff14e88c"),
    ],
)
def test_numbers_are_those_of_rfc_9000(number, data):
    assert bhttp.varint(number) == unhex(data)
    assert bhttp.read_varint(unhex(data), 0) == (number, len(data) // 2)


def test_a_number_need_not_be_of_the_least_length():
    assert bhttp.decode_request(b"\x40\x00" + KNOWN_REQUEST[1:]) == HELLO


@pytest.mark.parametrize("number", [-1, 1 << 62])
def test_numbers_beyond_62_bits_are_not_written(number):
    with pytest.raises(ValueError, match="62"):
        bhttp.varint(number)


def test_padding_hides_the_length_and_is_zero():
    padded = bhttp.encode_response(bhttp.Response(200, content=b"hi"), pad_to=64)
    assert len(padded) == 64
    assert bhttp.decode_response(padded).content == b"hi"
    with pytest.raises(RemoteProtocolError, match="behind its end"):
        bhttp.decode_response(padded[:-1] + b"\1")


def raw(method, path, fields=b"", scheme=b"https", authority=b"", tail=b"\0\0"):
    texts = b"".join(bhttp.varint(len(text)) + text for text in (method, scheme, authority, path))
    return b"\0" + texts + bhttp.varint(len(fields)) + fields + tail


def line(name, value):
    return bhttp.varint(len(name)) + name + bhttp.varint(len(value)) + value


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "cut short"),
        (b"\5", "framing 5"),
        (KNOWN_REQUEST[:8], "cut short"),
        (KNOWN_REQUEST[:40], "cut short"),
        (STREAMED_REQUEST[:40], "cut short"),
        (KNOWN_RESPONSE, "no request"),
        (raw(b"GE T", b"/"), "no method"),
        (raw(b"", b"/"), "no method"),
        (raw(b"GET", b""), "no path"),
        (raw(b"GET", b"x"), "no path"),
        (raw(b"GET", b"/a b"), "no path"),
        (raw(b"GET", b"/\xc3\xa9"), "no path"),
        (raw(b"GET", b"*"), "no path"),
        (raw(b"GET", b"/", scheme=b"HTTPS"), "no scheme"),
        (raw(b"GET", b"/", scheme=b""), "no scheme"),
        (raw(b"GET", b"/", authority=b"me@shop.test"), "no authority"),
        (raw(b"GET", b"/", authority=b"shop.test/"), "no authority"),
        (raw(b"CONNECT", b"/", authority=b"shop.test:1"), "CONNECT"),
        (raw(b"CONNECT", b"", scheme=b""), "CONNECT"),
        (raw(b"GET", b"/", line(b":method", b"POST")), "no field name"),
        (raw(b"GET", b"/", line(b"Accept", b"a")), "no field name"),
        (raw(b"GET", b"/", line(b"", b"a")), "no field name"),
        (raw(b"GET", b"/", line(b"x", b"a\r\nb: c")), "'x' cannot be sent"),
        (raw(b"GET", b"/", line(b"x", b"a\0")), "'x' cannot be sent"),
        (raw(b"GET", b"/", line(b"x", b" a")), "'x' cannot be sent"),
        (raw(b"GET", b"/", line(b"x", b"a\t")), "'x' cannot be sent"),
        (raw(b"GET", b"/", b"\1x\5ab"), "over its section's end"),
        (raw(b"GET", b"/", b"\1x"), "cut short"),
        (raw(b"GET", b"/", tail=b"\0\0\1"), "behind its end"),
        (raw(b"GET", b"/", tail=b"\5abc"), "cut short"),
        (raw(b"GET", b"/", tail=bhttp.varint(1 << 40) + b"abc"), "cut short"),
        (b"\0" + bhttp.varint(limits_relay.RELAY_HEAD_BYTES_MAX + 1), "more than"),
        (b"\2\3GET\5https\0\1/" + bhttp.varint(1 << 20), "more than"),
        (b"\2\3GET\5https\0\1/\1x" + bhttp.varint(1 << 20), "more than"),
        (raw(b"GET", b"/")[:-3] + bhttp.varint(1 << 20), "more than"),
    ],
)
def test_invalid_requests_are_refused(data, match):
    with pytest.raises(RemoteProtocolError, match=match):
        bhttp.decode_request(data)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\1" + bhttp.varint(99), "no status"),
        (b"\1" + bhttp.varint(600), "no status"),
        (b"\1" + bhttp.varint(102), "cut short"),
        (b"\1" + (bhttp.varint(102) + b"\0") * 40 + bhttp.varint(200), "more than 16"),
        (KNOWN_REQUEST, "no response"),
    ],
)
def test_invalid_responses_are_refused(data, match):
    with pytest.raises(RemoteProtocolError, match=match):
        bhttp.decode_response(data)


@pytest.mark.parametrize(
    "request_", [HELLO._replace(method=b""), HELLO._replace(path=b"x"), HELLO._replace(headers=((b"A", b""),))]
)
def test_what_cannot_be_a_message_is_not_written(request_):
    with pytest.raises(ValueError):  # noqa: PT011  which of the rules is the reader's matter
        bhttp.encode_request(request_)


def test_informational_status_is_not_written_as_final():
    for status in (102, 600):
        with pytest.raises(ValueError, match="not final"):
            bhttp.encode_response(bhttp.Response(status))
        with pytest.raises(ValueError, match="not final"):
            bhttp.response_head(bhttp.ResponseHead(status, ()))


def test_connect_and_options_have_forms_of_their_own():
    connect = bhttp.Request(b"CONNECT", b"", b"shop.test:443", b"")
    options = bhttp.Request(b"OPTIONS", b"https", b"shop.test", b"*")
    for request in (connect, options):
        assert bhttp.decode_request(bhttp.encode_request(request)) == request
