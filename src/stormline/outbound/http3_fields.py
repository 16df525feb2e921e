"""The fields of HTTP/3's heads: QPACK (RFC 9204) by its static table alone, with a memory.

We allow the peer no dynamic table and use none: no head ever waits for bytes of another stream, which a lost packet
would hold up, and how a field is coded never changes, so that what was coded once is remembered. What it costs is that
a field which the static table does not have is sent whole each time, some hundred bytes for usual requests.
"""

from typing import Final

from hpack import HPACKDecodingError
from hpack.huffman_table import decode_huffman

from stormline.core import limits
from stormline.outbound.http2_fields import Answer, Fields, Huffman, read_answer

_TABLE: Final = """\
:authority|
:path|/
age|0
content-disposition|
content-length|0
cookie|
date|
etag|
if-modified-since|
if-none-match|
last-modified|
link|
location|
referer|
set-cookie|
:method|CONNECT
:method|DELETE
:method|GET
:method|HEAD
:method|OPTIONS
:method|POST
:method|PUT
:scheme|http
:scheme|https
:status|103
:status|200
:status|304
:status|404
:status|503
accept|*/*
accept|application/dns-message
accept-encoding|gzip, deflate, br
accept-ranges|bytes
access-control-allow-headers|cache-control
access-control-allow-headers|content-type
access-control-allow-origin|*
cache-control|max-age=0
cache-control|max-age=2592000
cache-control|max-age=604800
cache-control|no-cache
cache-control|no-store
cache-control|public, max-age=31536000
content-encoding|br
content-encoding|gzip
content-type|application/dns-message
content-type|application/javascript
content-type|application/json
content-type|application/x-www-form-urlencoded
content-type|image/gif
content-type|image/jpeg
content-type|image/png
content-type|text/css
content-type|text/html; charset=utf-8
content-type|text/plain
content-type|text/plain;charset=utf-8
range|bytes=0-
strict-transport-security|max-age=31536000
strict-transport-security|max-age=31536000; includesubdomains
strict-transport-security|max-age=31536000; includesubdomains; preload
vary|accept-encoding
vary|origin
x-content-type-options|nosniff
x-xss-protection|1; mode=block
:status|100
:status|204
:status|206
:status|302
:status|400
:status|403
:status|421
:status|425
:status|500
accept-language|
access-control-allow-credentials|FALSE
access-control-allow-credentials|TRUE
access-control-allow-headers|*
access-control-allow-methods|get
access-control-allow-methods|get, post, options
access-control-allow-methods|options
access-control-expose-headers|content-length
access-control-request-headers|content-type
access-control-request-method|get
access-control-request-method|post
alt-svc|clear
authorization|
content-security-policy|script-src 'none'; object-src 'none'; base-uri 'none'
early-data|1
expect-ct|
forwarded|
if-range|
origin|
purpose|prefetch
server|
timing-allow-origin|*
upgrade-insecure-requests|1
user-agent|
x-forwarded-for|
x-frame-options|deny
x-frame-options|sameorigin
"""
STATIC: Final = tuple(
    (name.encode("ascii"), value.encode("ascii"))
    for name, _, value in (line.partition("|") for line in _TABLE.splitlines())
)
"""RFC 9204 appendix A."""
_EXACT: Final = {field: index for index, field in reversed(list(enumerate(STATIC)))}
_NAMES: Final = {name: index for index, (name, _) in reversed(list(enumerate(STATIC)))}
_CREDENTIALS: Final = frozenset({b"authorization", b"cookie", b"proxy-authorization"})
_INTEGER_MAX: Final = 2**30
"""More than any length we take."""


class FieldsBroken(Exception):
    """A field section that cannot be read, or is too large; its text names no data."""


def _integer(value: int, bits: int, flags: int) -> bytes:
    """Code a number behind flags (RFC 7541 section 5.1)."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((flags | value,))
    out = bytearray((flags | most,))
    value -= most
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class FieldCoder:
    """Codes and reads field sections; remembers as `http2_fields` does, at most `limits.H2_FIELDS_KNOWN` of each."""

    __slots__ = ("_answers", "_huffman", "_known")

    def __init__(self) -> None:
        self._huffman = Huffman()
        self._known: dict[tuple[bytes, bytes], bytes] = {}
        self._answers: dict[bytes, Answer] = {}

    # -- out ------------------------------------------------------------------------------------------------------
    def encode(self, fields: Fields) -> bytes:
        """Code a head: tuples of bytes; credentials as `NeverIndexedHeaderTuple` enter no table on their way."""
        known = self._known
        parts = [b"\0\0"]
        for field in fields:
            coded = known.get(field)
            parts.append(self._encode_new(field) if coded is None else coded)
        return b"".join(parts)

    def _encode_new(self, field: tuple[bytes, bytes]) -> bytes:
        name, value = field
        exact, named = _EXACT.get((name, value)), _NAMES.get(name)
        if exact is not None:
            coded = _integer(exact, 6, 0xC0)
        elif field.__class__ is not tuple and name in _CREDENTIALS:
            # The name in full: some servers take "never" with a name of the table for one of a dynamic table.
            coded = self._text(name, 3, 0x30) + self._text(value, 7, 0)
        elif named is not None:
            coded = _integer(named, 4, 0x50) + self._text(value, 7, 0)
        else:
            coded = self._text(name, 3, 0x20) + self._text(value, 7, 0)
        known = self._known
        if len(known) >= limits.H2_FIELDS_KNOWN:
            known.clear()
        if len(coded) <= limits.H2_KNOWN_BYTES_MAX:
            known[field] = coded
        return coded

    def _text(self, text: bytes, bits: int, flags: int) -> bytes:
        short = self._huffman.encode(text)
        if len(short) < len(text):
            return _integer(len(short), bits, flags | 1 << bits) + short
        return _integer(len(text), bits, flags) + text

    # -- in -------------------------------------------------------------------------------------------------------
    def answer(self, block: bytes) -> Answer:
        """Read a field section as the head of an answer.

        Raises:
            FieldsBroken: it is malformed, speaks of a dynamic table, or has more than `limits.HTTP_HEAD_BYTES_MAX`.
        """
        answer = self._answers.get(block)
        if answer is None:
            answer = read_answer(decode(block))
            if len(block) <= limits.H2_KNOWN_BYTES_MAX:
                if len(self._answers) >= limits.H2_FIELDS_KNOWN:
                    self._answers.clear()
                self._answers[block] = answer
        return answer


def decode(block: bytes) -> Fields:
    """Read the fields of one section.

    Raises:
        FieldsBroken: see `FieldCoder.answer`.
    """
    try:
        return _Reader(block).fields()
    except (IndexError, HPACKDecodingError):  # its text quotes the block
        raise FieldsBroken("a field section that cannot be read") from None


class _Reader:
    """Reads one section; past its end an IndexError."""

    __slots__ = ("_at", "_block")

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._at = 0

    def fields(self) -> Fields:
        required = self._number(8)
        self._number(7)  # the base, which only a dynamic table has
        if required:
            raise FieldsBroken("a field section for a dynamic table, of which there is none")
        fields: Fields = []
        size = 0
        while self._at < len(self._block):
            name, value = field = self._field()
            fields.append(field)
            size += len(name) + len(value) + 32  # RFC 9114 section 4.2.2
            if size > limits.HTTP_HEAD_BYTES_MAX:
                raise FieldsBroken(f"a head of more than {limits.HTTP_HEAD_BYTES_MAX} bytes")
        return fields

    def _field(self) -> tuple[bytes, bytes]:
        first = self._block[self._at]
        if first & 0xC0 == 0xC0:
            return STATIC[self._number(6)]
        if first & 0xD0 == 0x50:
            return STATIC[self._number(4)][0], self._text(7)
        if first & 0xE0 == 0x20:
            return self._text(3), self._text(7)
        raise FieldsBroken("a field of a dynamic table, of which there is none")

    def _number(self, bits: int) -> int:
        most = (1 << bits) - 1
        value = self._block[self._at] & most
        self._at += 1
        if value < most:
            return value
        shift = 0
        while True:
            byte = self._block[self._at]
            self._at += 1
            value += (byte & 127) << shift
            if value > _INTEGER_MAX:
                raise FieldsBroken("a number without end in a field section")
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise FieldsBroken("a number without end in a field section")

    def _text(self, bits: int) -> bytes:
        coded = self._block[self._at] & (1 << bits)
        size = self._number(bits)
        end = self._at + size
        if end > len(self._block):
            raise IndexError
        text = self._block[self._at : end]
        self._at = end
        return decode_huffman(text) if coded else text
