"""The fields of heads: HPACK (RFC 7541) with a memory, and what makes an answer malformed (RFC 9113 section 8.1.1).

Requests of a client resemble each other, and so do the heads of one server's answers. How a field is coded, and what a
block means, is the same until an entry comes into the header table or the table's size changes; so it is remembered
until then. `hpack` does what was not met yet.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import hpack
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from stormline.core import limits

_INDEXED: Final = 0x80
"""A field by its index in the tables (RFC 7541 section 6.1). All other representations begin with a smaller byte."""
_CHANGING: Final = 0x20
"""From here to `_INDEXED`: size updates (6.3) and literals that enter the table (6.2.1). Below are literals that leave
the tables alone (6.2.2, 6.2.3)."""
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
"""RFC 9113 section 8.2.1: a token without upper case."""
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_STATUS: Final = re.compile(rb"[1-9][0-9][0-9]")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
CONNECTION_SPECIFIC: Final = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Fields of HTTP/1's connections, malformed in HTTP/2 (RFC 9113 section 8.2.2)."""

# hpack writes every header it codes to its log, credentials too. A level set by the application itself stays.
if logging.getLogger("hpack").level == logging.NOTSET:
    logging.getLogger("hpack").setLevel(logging.INFO)

Fields = list[tuple[bytes, bytes]]


class Answer(NamedTuple):
    """What a field block says as the head of an answer.

    Attributes:
        status: 0 where it has none: trailers, or a fault.
        fields: without the status. Shared: to be copied before it is given away.
        length: of the body, by Content-Length; None where that is not said.
        fault: why it is malformed; empty where it is not.
    """

    status: int
    fields: Fields
    length: int | None
    fault: str


def read_answer(fields: Fields) -> Answer:
    """Look at the fields of a block, whatever they are."""
    status, rest = 0, fields
    if fields and fields[0][0] == b":status":
        if not _STATUS.fullmatch(fields[0][1]):
            return Answer(0, [], None, "its status is no number of three digits")
        status, rest = int(fields[0][1]), fields[1:]
    fault = _fault(rest)
    lengths = [value for name, value in rest if name == b"content-length"]
    if not fault and lengths and (len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0])):
        fault = "the content length is not one number"
    return Answer(status, rest, int(lengths[0]) if lengths and not fault else None, fault)


def _fault(fields: Fields) -> str:
    if len(fields) > limits.HTTP_HEADERS_MAX:
        return f"more than {limits.HTTP_HEADERS_MAX} fields"
    for name, value in fields:
        if not _NAME.fullmatch(name):
            return "a field name that is none"  # also a pseudo-header field in the wrong place, or a second one
        if not _VALUE.fullmatch(value):
            return "a control character in a field"
        if name in CONNECTION_SPECIFIC:
            return f"the field {name.decode()}, which belongs to HTTP/1"
    return ""


class Huffman:
    """Codes texts as `hpack.huffman.HuffmanEncoder` does, in a fifth of its time."""

    _bits: Final = [f"{code:0{size}b}" for code, size in zip(REQUEST_CODES, REQUEST_CODES_LENGTH, strict=True)]

    def encode(self, text: bytes) -> bytes:
        """Code a text (RFC 7541 section 5.2)."""
        if not text:
            return b""
        bits = "".join(map(self._bits.__getitem__, text))
        bits += "1" * (-len(bits) % 8)
        return int(bits, 2).to_bytes(len(bits) // 8, "big")


class FieldEncoder(hpack.Encoder):
    """`hpack.Encoder` that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.huffman_coder = Huffman()  # type: ignore[assignment]  # all that is used of it
        self._known: dict[tuple[bytes, bytes], bytes] = {}
        self._known_never: dict[tuple[bytes, bytes], bytes] = {}  # those that are to enter no table, equal to others

    @property
    def header_table_size(self) -> int:
        """Bytes of the header table: what the peer allows, and no more than `limits.H2_HEADER_TABLE_BYTES`."""
        return self.header_table.maxsize

    @header_table_size.setter
    def header_table_size(self, size: int) -> None:
        # The same size again is no change: `hpack` would forget that it has one to announce.
        size = min(size, limits.H2_HEADER_TABLE_BYTES)
        if size != self.header_table.maxsize:
            self._forget()
            self.header_table.maxsize = size
            # Of several changes between two heads the smallest and the last are announced (RFC 7541 section 4.2).
            changes = [*self.table_size_changes, size]
            smallest = min(changes)
            self.table_size_changes = [size] if smallest == size else [smallest, size]

    def _forget(self) -> None:
        self._known.clear()
        self._known_never.clear()

    def encode(self, headers: Iterable[Any], huffman: bool = True) -> bytes:
        """Code the fields of one head, at least one: tuples of bytes, `NeverIndexedHeaderTuple` for no table."""
        known, known_never = self._known, self._known_never
        coded_fields = []
        for field in headers:
            coded = (known if field.__class__ is tuple else known_never).get(field)
            if coded is None:
                coded = self._encode_new(field, huffman)
            coded_fields.append(coded)
        return b"".join(coded_fields)

    def _encode_new(self, field: tuple[bytes, bytes], huffman: bool) -> bytes:
        coded = super().encode((field,), huffman)
        if _CHANGING <= coded[0] < _INDEXED:
            self._forget()
            return coded
        known = self._known if field.__class__ is tuple else self._known_never
        if len(known) >= limits.H2_FIELDS_KNOWN:
            known.clear()
        if len(coded) <= limits.H2_KNOWN_BYTES_MAX:
            known[field] = coded
        return coded


class FieldDecoder(hpack.Decoder):
    """`hpack.Decoder` that remembers blocks which leave the header table as it was."""

    def __init__(self, *, max_header_list_size: int) -> None:
        super().__init__(max_header_list_size=max_header_list_size)
        self._known: dict[bytes, Answer] = {}
        self._changed = False  # the last block changed the header table

    def decode(self, data: bytes | memoryview, raw: bool = False) -> list[Any]:
        """Read the fields of one head.

        Raises:
            HPACKError: the block is malformed, or too large a head. The decoder cannot be used any more.
        """
        table = self.header_table
        entries = table.dynamic_entries
        first, before = entries[0] if entries else None, (len(entries), table.maxsize)
        fields = list(super().decode(bytes(data), raw))
        # An entry that comes in is a new object at the front; one that goes out, alone, makes the table shorter.
        self._changed = first is not (entries[0] if entries else None) or before != (len(entries), table.maxsize)
        if self._changed:
            self._known.clear()
        return fields

    def answer(self, block: bytes) -> Answer:
        """Read a block as the head of an answer.

        Raises:
            HPACKError: see `decode`.
        """
        answer = self._known.get(block)
        if answer is None:
            answer = read_answer([(name, value) for name, value in self.decode(block, raw=True)])
            if not self._changed and len(block) <= limits.H2_KNOWN_BYTES_MAX:
                if len(self._known) >= limits.H2_FIELDS_KNOWN:
                    self._known.clear()
                self._known[block] = answer
        return answer
