"""DNS messages as DNS over HTTPS carries them: a question for addresses, and what its answer says.

Only what a client needs to find a host (RFC 1035, RFC 3596): A and AAAA records and the aliases (CNAME) to them, and of
a "no" how long it may be believed (RFC 2308). Everything else in an answer is passed over.
"""

import enum
import ipaddress
import struct
from typing import Final, NamedTuple

from stormline.core import limits_names
from stormline.core import limits_platform as limits
from stormline.core.errors import RemoteProtocolError


class RecordType(enum.IntEnum):
    """Types of records that are read or written."""

    A = 1
    CNAME = 5
    SOA = 6
    HINFO = 13
    AAAA = 28
    OPT = 41
    SVCB = 64
    HTTPS = 65
    ANY = 255


class Rcode(enum.IntEnum):
    """Outcomes that are told apart or given (RFC 1035 section 4.1.1, RFC 6891 section 9)."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    REFUSED = 5
    BADVERS = 16


class Reply(NamedTuple):
    """What an answer says.

    Attributes:
        rcode: the server's outcome; `Rcode` names those that mean something here.
        addresses: IP literals in the answer's order, each once, at most `limits_names.DNS_ADDRESSES_MAX`.
        ttl_s: how long it may be kept: of addresses the least TTL on the way to them, of a "no" what its zone says (RFC
            2308 section 5), 0 where it says nothing.
    """

    rcode: int
    addresses: tuple[str, ...]
    ttl_s: int


_HEADER: Final = struct.Struct("!HHHHHH")
_RECORD: Final = struct.Struct("!HHIH")  # type, class, TTL, length of the data
_QUESTION: Final = struct.Struct("!HH")
_CLASS_IN: Final = 1
_QR: Final = 0x8000
_OPCODE: Final = 0x7800
_TC: Final = 0x0200
_RD: Final = 0x0100
_RCODE: Final = 0x000F
_LABEL_BYTES_MAX: Final = 63
_NAME_BYTES_MAX: Final = 255
_TTL_S_MAX: Final = 0x7FFF_FFFF
_POINTERS_MAX: Final = 32
"""Pointers in one name: who compresses well needs one or two."""

Name = tuple[bytes, ...]
"""Labels of a name, without the root's."""


def question(name: str, kind: RecordType) -> bytes:
    """Give a question as it goes into a request. Its id is 0, so that caches on the way may serve it (RFC 8484 4.1).

    Raises:
        ValueError: `name` cannot be a name in DNS: not ASCII, an empty or overlong label, more than 255 bytes.
    """
    labels = labels_of(name)
    head = _HEADER.pack(0, _RD, 1, 0, 0, 0)
    return b"".join((head, *(bytes((len(each),)) + each for each in labels), b"\0", _QUESTION.pack(kind, _CLASS_IN)))


def parse_reply(data: bytes, name: str, kind: RecordType) -> Reply:
    """Read the answer to `question(name, kind)`.

    Of the records only those count that lead from the name to addresses of the kind asked for: whatever else a server
    puts in is not believed.

    Raises:
        RemoteProtocolError: not a DNS message, cut short, or not the answer to this question.
        ValueError: `name` cannot be a name in DNS.
    """
    asked = labels_of(name.lower())
    if not _HEADER.size <= len(data) <= limits_names.DNS_MESSAGE_BYTES_MAX:
        raise RemoteProtocolError(f"a DNS message of {len(data)} bytes")
    ident, flags, questions, answers, authorities, _ = _HEADER.unpack_from(data)
    if not flags & _QR or flags & _OPCODE or ident:
        raise RemoteProtocolError("no answer to a DNS question of ours")
    if flags & _TC:
        raise RemoteProtocolError("a DNS answer cut short, over HTTPS")
    rcode = flags & _RCODE
    if questions == 0 and rcode not in (Rcode.NOERROR, Rcode.NXDOMAIN):
        return Reply(rcode, (), 0)  # a server that could not even read the question
    if questions != 1:
        raise RemoteProtocolError(f"a DNS answer with {questions} questions")
    shown, at = read_name(data, _HEADER.size)
    if len(data) < at + _QUESTION.size or _QUESTION.unpack_from(data, at) != (kind, _CLASS_IN) or shown != asked:
        raise RemoteProtocolError("a DNS answer to another question")
    if answers + authorities > limits_names.DNS_RECORDS_MAX:
        raise RemoteProtocolError(f"a DNS answer with {answers + authorities} records")
    found = _Records(kind)
    at = found.read(data, at + _QUESTION.size, answers)
    addresses, ttl_s = found.follow(asked)
    if addresses:
        return Reply(rcode, addresses, ttl_s)
    authority = _Records(kind)
    authority.read(data, at, authorities)
    return Reply(rcode, (), authority.absent_ttl_s)


class _Records:
    """Records of one section, those that matter."""

    def __init__(self, kind: RecordType) -> None:
        self._kind = kind
        self._aliases: dict[Name, tuple[Name, int]] = {}
        self._addresses: dict[Name, list[tuple[str, int]]] = {}
        self.absent_ttl_s = 0

    def read(self, data: bytes, at: int, count: int) -> int:
        """Read `count` records from `at`; give where they end."""
        for _ in range(count):
            owner, at = read_name(data, at)
            if len(data) < at + _RECORD.size:
                raise RemoteProtocolError("a DNS record is cut short")
            kind, of_class, ttl_s, size = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            if len(data) < at + size:
                raise RemoteProtocolError("a DNS record is cut short")
            if of_class == _CLASS_IN:
                # The highest bit set means 0 (RFC 2181 section 8).
                self._take(data, owner, kind, ttl_s if ttl_s <= _TTL_S_MAX else 0, at, size)
            at += size
        return at

    def _take(self, data: bytes, owner: Name, kind: int, ttl_s: int, at: int, size: int) -> None:
        if kind == RecordType.CNAME:
            target, end = read_name(data, at)
            if end != at + size:
                raise RemoteProtocolError("a DNS alias is longer or shorter than its record")
            self._aliases.setdefault(owner, (target, ttl_s))
        elif kind == self._kind:
            if size != (4 if kind == RecordType.A else 16):
                raise RemoteProtocolError(f"an address of {size} bytes in a DNS answer")
            address = str(ipaddress.ip_address(data[at : at + size]))
            self._addresses.setdefault(owner, []).append((address, ttl_s))
        elif kind == RecordType.SOA:
            _, middle = read_name(data, at)
            _, numbers = read_name(data, middle)
            if numbers + 20 != at + size:
                raise RemoteProtocolError("a DNS record of authority of a wrong length")
            minimum = int.from_bytes(data[numbers + 16 : numbers + 20])
            self.absent_ttl_s = min(ttl_s, minimum if minimum <= _TTL_S_MAX else 0)

    def follow(self, name: Name) -> tuple[tuple[str, ...], int]:
        """Give the addresses of a name over its aliases, and how long that holds."""
        ttl_s = _TTL_S_MAX
        for _ in range(limits_names.DNS_ALIASES_MAX + 1):
            found = self._addresses.get(name)
            if found:
                unique = tuple(dict.fromkeys(address for address, _ in found))
                return unique[: limits_names.DNS_ADDRESSES_MAX], min(ttl_s, *(each for _, each in found))
            alias = self._aliases.get(name)
            if alias is None:
                break
            name = alias[0]
            ttl_s = min(ttl_s, alias[1])
        return (), 0


def labels_of(name: str) -> Name:
    """Give the labels of a name in text form.

    Raises:
        ValueError: it cannot be a name in DNS.
    """
    text = name.removesuffix(".")
    if not text.isascii() or not 0 < len(text) <= limits.HOST_CHARS_MAX:
        raise ValueError(f"{name[:80]!r} is no name for DNS")
    labels = tuple(each.encode("ascii") for each in text.split("."))
    if any(not 0 < len(each) <= _LABEL_BYTES_MAX for each in labels):
        raise ValueError(f"{name[:80]!r} is no name for DNS: a label has 1 to {_LABEL_BYTES_MAX} bytes")
    return labels


def read_name(data: bytes, at: int) -> tuple[Name, int]:
    """Read a name, in lower case, and give where it ends.

    A pointer leads to a place before the piece of name it stands in (RFC 1035 section 4.1.4), so every name ends.

    Raises:
        RemoteProtocolError: no name, cut short, too long, or it points ahead of itself.
    """
    labels: list[bytes] = []
    size = 1
    pointers = 0
    end: int | None = None
    start = at
    while True:
        if at >= len(data):
            raise RemoteProtocolError("a DNS name is cut short")
        length = data[at]
        if length >= 0xC0:
            if at + 1 >= len(data):
                raise RemoteProtocolError("a DNS name is cut short")
            target = (length & 0x3F) << 8 | data[at + 1]
            if end is None:
                end = at + 2
            pointers += 1
            if target >= start or pointers > _POINTERS_MAX:
                raise RemoteProtocolError("a DNS name that points ahead of itself, or too often")
            at = start = target
            continue
        if length > _LABEL_BYTES_MAX:
            raise RemoteProtocolError("a DNS label of an unknown kind")
        at += 1
        if length == 0:
            return tuple(labels), at if end is None else end
        size += length + 1
        if size > _NAME_BYTES_MAX:
            raise RemoteProtocolError("a DNS name of more than 255 bytes")
        if at + length > len(data):
            raise RemoteProtocolError("a DNS name is cut short")
        labels.append(data[at : at + length].lower())
        at += length
