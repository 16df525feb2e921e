"""DNS as a server speaks it: questions read (RFC 1035, EDNS RFC 6891), answers made, answers of other servers relayed.

A question keeps the bytes of its name as they came, and an answer repeats them, so every record about that name points
to the same place in the message and can be made before the question is known.
"""

import ipaddress
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from stormline.core import limits_names
from stormline.core import limits_platform as limits
from stormline.core.errors import RemoteProtocolError
from stormline.wire import dns
from stormline.wire.dns import Rcode, RecordType

CLASS_IN: Final = 1
QR: Final = 0x8000
OPCODE: Final = 0x7800
AA: Final = 0x0400
TC: Final = 0x0200
RD: Final = 0x0100
RA: Final = 0x0080
CD: Final = 0x0010
HEADER_BYTES: Final = 12
STALE: Final = 3
NOT_AUTHORITATIVE: Final = 20
NO_REACHABLE_AUTHORITY: Final = 22
"""Extended errors that are given (RFC 8914 section 4)."""

_HEADER: Final = struct.Struct("!HHHHHH")
_RECORD: Final = struct.Struct("!HHIH")  # type, class, TTL, length of the data
_PAIR: Final = struct.Struct("!HH")
_ECS: Final = struct.Struct("!HBB")
_DNSSEC_OK: Final = 0x8000
_OPTION_ECS, _OPTION_PADDING, _OPTION_EDE = 8, 12, 15
_OWNER: Final = b"\xc0\x0c"
"""Points to the name in the question, which always stands behind the header."""
_TTL_S_MAX: Final = 0x7FFF_FFFF
_BITS: Final = {1: 32, 2: 128}


class ClientSubnet(NamedTuple):
    """Where a client is, as a resolver tells it (RFC 7871).

    Attributes:
        family: 1 for IPv4, 2 for IPv6; 0 where nothing is told.
        source_bits: how many bits of the address are told; 0: they are not to be used.
        address: those bits, the last byte filled up with zeros.
    """

    family: int
    source_bits: int
    address: bytes

    @property
    def scope_bits(self) -> int:
        """How many of them are looked at here."""
        return min(self.source_bits, limits.ECS_V4_BITS if self.family == 1 else limits.ECS_V6_BITS)

    @property
    def network(self) -> str:
        """The network that is looked at, empty where none is told."""
        if not self.source_bits:
            return ""
        packed = self.address.ljust(_BITS[self.family] // 8, b"\0")
        return str(ipaddress.ip_network((packed, self.scope_bits), strict=False))


class Edns(NamedTuple):
    """What a question says of the one who asks (RFC 6891).

    Attributes:
        dnssec_ok: signatures are wanted.
        subnet: where the client is, None where it is not said.
        padded: the question is filled up, so the answer is to be too (RFC 7830 section 4).
    """

    dnssec_ok: bool = False
    subnet: ClientSubnet | None = None
    padded: bool = False


class Query(NamedTuple):
    """A question.

    Attributes:
        ident: its id.
        flags: its flags.
        question: name, type and class, as they came.
        name: in lower case without the root's dot, None where it cannot be written so (a dot inside a label, bytes
            outside ASCII).
        kind: type of records asked for.
        edns: None where it has none.
        fault: what is wrong with it; NOERROR: nothing. The answer then says this alone.
    """

    ident: int
    flags: int
    question: bytes
    name: str | None
    kind: int
    edns: Edns | None
    fault: Rcode = Rcode.NOERROR


class Record(NamedTuple):
    """One record; its owner is the name asked for where `owner` is empty."""

    kind: int
    ttl_s: int
    data: bytes
    owner: str = ""


class Counts(NamedTuple):
    """Records of each section."""

    answers: int = 0
    authorities: int = 0
    additionals: int = 0


class Sections(NamedTuple):
    """What stands behind the question: encoded records and their numbers."""

    data: bytes = b""
    counts: Counts = Counts()


EMPTY: Final = Sections()


# -- questions --------------------------------------------------------------------------------------------------------
def read_query(data: bytes) -> Query:
    """Read a question. What is wrong with a message that is one all the same is said in `Query.fault`.

    Raises:
        RemoteProtocolError: no DNS message, an answer, or cut short within its question.
    """
    if len(data) < HEADER_BYTES:
        raise RemoteProtocolError(f"a DNS message of {len(data)} bytes")
    ident, flags, questions, answers, authorities, additionals = _HEADER.unpack_from(data)
    if flags & QR:
        raise RemoteProtocolError("a DNS answer where a question was expected")
    if flags & OPCODE:
        return Query(ident, flags, b"", None, 0, None, Rcode.NOTIMP)
    if questions != 1 or answers or authorities or additionals > limits.DOH_QUESTION_RECORDS_MAX:
        return Query(ident, flags, b"", None, 0, None, Rcode.FORMERR)  # RFC 9619: one question
    name, at = _question_name(data)
    end = at + 4
    if len(data) < end:
        raise RemoteProtocolError("a DNS question is cut short")
    kind, of_class = _PAIR.unpack_from(data, at)
    question = data[HEADER_BYTES:end]
    fault, edns = (Rcode.NOERROR, None) if len(data) == end and not additionals else _edns(data, end, additionals)
    if not fault and of_class != CLASS_IN:
        fault = Rcode.REFUSED
    return Query(ident, flags, question, name, kind, edns, fault)


def _question_name(data: bytes) -> tuple[str | None, int]:
    """Read the name of a question, which cannot be compressed: nothing stands before it."""
    at = HEADER_BYTES
    labels: list[bytes] = []
    try:
        while length := data[at]:
            if length > 63:
                raise RemoteProtocolError("a DNS label of an unknown kind, in a question")
            at += 1
            labels.append(data[at : at + length])
            at += length
    except IndexError:
        raise RemoteProtocolError("a DNS name is cut short") from None
    if at + 1 - HEADER_BYTES > 255:
        raise RemoteProtocolError("a DNS name of more than 255 bytes")
    name = b".".join(labels)
    if not name.isascii() or name.count(b".") >= max(1, len(labels)):
        return None, at + 1
    return name.decode("ascii").lower(), at + 1


def _edns(data: bytes, at: int, additionals: int) -> tuple[Rcode, Edns | None]:
    found: Edns | None = None
    try:
        for _ in range(additionals):
            owner, at = dns.read_name(data, at)
            kind, _, ttl, size = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            if len(data) < at + size or (kind == RecordType.OPT and (owner or found is not None)):
                return Rcode.FORMERR, found
            if kind == RecordType.OPT:
                found = Edns(dnssec_ok=bool(ttl & _DNSSEC_OK))
                if ttl >> 16 & 0xFF:  # another version than 0
                    return Rcode.BADVERS, found
                options = _options(data[at : at + size])
                if options is None:
                    return Rcode.FORMERR, found
                found = found._replace(subnet=options[0], padded=options[1])
            at += size
    except (RemoteProtocolError, struct.error):
        return Rcode.FORMERR, found
    return (Rcode.NOERROR if at == len(data) else Rcode.FORMERR), found


def _options(data: bytes) -> tuple[ClientSubnet | None, bool] | None:
    """Read the options that are heeded; None where they are malformed."""
    subnet, padded, at = None, False, 0
    while at < len(data):
        if len(data) < at + 4:
            return None
        code, size = _PAIR.unpack_from(data, at)
        at += 4
        if len(data) < at + size:
            return None
        if code == _OPTION_PADDING:
            padded = True
        elif code == _OPTION_ECS:
            subnet = _subnet(data[at : at + size])
            if subnet is None:
                return None
        at += size
    return subnet, padded


def _subnet(data: bytes) -> ClientSubnet | None:
    # RFC 7871 section 6: a scope of 0 in questions, as many bytes as the bits need, zeros behind them.
    if len(data) < _ECS.size:
        return None
    family, source, scope = _ECS.unpack_from(data)
    address = data[_ECS.size :]
    if scope or source > _BITS.get(family, 0) or len(address) != (source + 7) // 8:
        return None
    if source % 8 and address[-1] & (0xFF >> source % 8):
        return None
    return ClientSubnet(family, source, address)


# -- answers ----------------------------------------------------------------------------------------------------------
def sections(answers: Iterable[Record], authorities: Iterable[Record] = ()) -> Sections:
    """Encode the records of an answer.

    Raises:
        ValueError: an owner cannot be a name in DNS.
    """
    some, more = tuple(answers), tuple(authorities)
    return Sections(b"".join(map(_record, (*some, *more))), Counts(len(some), len(more)))


def _record(record: Record) -> bytes:
    owner = name_bytes(record.owner) if record.owner else _OWNER
    return b"".join((owner, _RECORD.pack(record.kind, CLASS_IN, record.ttl_s, len(record.data)), record.data))


def name_bytes(name: str) -> bytes:
    """Encode a name without compression; empty is the root.

    Raises:
        ValueError: it cannot be a name in DNS.
    """
    labels = dns.labels_of(name) if name else ()
    return b"".join(bytes((len(each),)) + each for each in labels) + b"\0"


def soa_data(primary: str, contact: str, *, serial: int, minimum_s: int) -> bytes:
    """Encode a zone's authority (RFC 1035 section 3.3.13); `minimum_s` is how long a "no" of it holds (RFC 2308)."""
    numbers = struct.pack("!5I", serial & 0xFFFF_FFFF, 3600, 600, 86_400, minimum_s)
    return name_bytes(primary) + name_bytes(contact) + numbers


def answer(
    query: Query,
    rcode: int,
    content: Sections = EMPTY,
    *,
    flags: int = 0,
    scope_bits: int = 0,
    extended: int | None = None,
) -> bytes:
    """Answer a question.

    Args:
        query: the question.
        rcode: the outcome, above 15 only where the question has EDNS.
        content: records.
        flags: of `AA` and `RA` those that hold.
        scope_bits: for how much of the client's subnet the answer holds (RFC 7871 section 7.2.1).
        extended: an extended error (RFC 8914), for those that use EDNS.
    """
    edns = query.edns
    head = QR | (query.flags & (OPCODE | RD | CD)) | flags | (rcode & 0xF)
    some, more, others = content.counts
    asked = 1 if query.question else 0
    if edns is None:
        return _HEADER.pack(query.ident, head, asked, some, more, others) + query.question + content.data
    options = b""
    if edns.subnet is not None:
        told = edns.subnet
        options = _PAIR.pack(_OPTION_ECS, _ECS.size + len(told.address))
        options += _ECS.pack(told.family, told.source_bits, scope_bits) + told.address
    if extended is not None:
        options += _PAIR.pack(_OPTION_EDE, 2) + extended.to_bytes(2)
    if edns.padded:
        size = HEADER_BYTES + len(query.question) + len(content.data) + 1 + _RECORD.size + len(options) + 4
        options += _PAIR.pack(_OPTION_PADDING, -size % limits.DOH_PAD_BYTES) + bytes(-size % limits.DOH_PAD_BYTES)
    ttl = (rcode >> 4) << 24 | (_DNSSEC_OK if edns.dnssec_ok else 0)
    return b"".join(
        (
            _HEADER.pack(query.ident, head, asked, some, more, others + 1),
            query.question,
            content.data,
            b"\0",
            _RECORD.pack(RecordType.OPT, limits.FORWARD_UDP_BYTES, ttl, len(options)),
            options,
        )
    )


# -- other servers ----------------------------------------------------------------------------------------------------
class Relayed(NamedTuple):
    """An answer of another server, to be given on.

    Attributes:
        rcode: its outcome.
        message: all of it up to where its EDNS stood, with id 0.
        counts: records of each section, EDNS and what stood behind it left out.
        ttl_places: where in `message` a TTL stands.
        ttl_s: how long it holds: the least TTL of its answer, of a "no" what its zone says (RFC 2308 section 5), 0
            where it says nothing.
        positive: it has what was asked for; else it is a "no".
        truncated: it did not fit and is to be asked for by TCP.
    """

    rcode: int
    message: bytes
    counts: Counts
    ttl_places: tuple[int, ...]
    ttl_s: int
    positive: bool
    truncated: bool

    def aged(self, question: bytes, age_s: int, *, ttl_s_max: int) -> Sections:
        """Give its records as they stand `age_s` seconds after they came, no TTL above `ttl_s_max`."""
        data = bytearray(self.message)
        for at in self.ttl_places:
            ttl_s = int.from_bytes(data[at : at + 4])
            ttl_s = 0 if ttl_s > _TTL_S_MAX else max(0, ttl_s - age_s)  # RFC 2181 section 8
            data[at : at + 4] = min(ttl_s, ttl_s_max).to_bytes(4)
        return Sections(bytes(data[HEADER_BYTES + len(question) :]), self.counts)


def forward_query(
    ident: int, question: bytes, *, dnssec_ok: bool, checking_disabled: bool, block_bytes: int = 0
) -> bytes:
    """Ask another server.

    Args:
        ident: id.
        question: name, type and class.
        dnssec_ok: ask for signatures too.
        checking_disabled: ask for what may be forged too.
        block_bytes: fill the message up to a multiple of this; 0: not.
    """
    options = b""
    if block_bytes:
        size = HEADER_BYTES + len(question) + 1 + _RECORD.size + 4
        options = _PAIR.pack(_OPTION_PADDING, -size % block_bytes) + bytes(-size % block_bytes)
    flags = RD | (CD if checking_disabled else 0)
    opt = _RECORD.pack(RecordType.OPT, limits.FORWARD_UDP_BYTES, _DNSSEC_OK if dnssec_ok else 0, len(options))
    return _HEADER.pack(ident, flags, 1, 0, 0, 1) + question + b"\0" + opt + options


def read_relayed(data: bytes, ident: int, question: bytes) -> Relayed:
    """Read another server's answer to a question of ours.

    Raises:
        RemoteProtocolError: no DNS message, malformed, or not the answer to this question.
    """
    if not HEADER_BYTES <= len(data) <= limits_names.DNS_MESSAGE_BYTES_MAX:
        raise RemoteProtocolError(f"a DNS message of {len(data)} bytes")
    got, flags, questions, answers, authorities, additionals = _HEADER.unpack_from(data)
    if got != ident or not flags & QR or flags & OPCODE or questions != 1:
        raise RemoteProtocolError("no answer to the question that was asked")
    at = HEADER_BYTES + len(question)
    shown = data[HEADER_BYTES:at]
    # Names are compared without case, type and class as they are.
    if shown[-4:] != question[-4:] or shown[:-4].lower() != question[:-4].lower():
        raise RemoteProtocolError("a DNS answer to another question")
    if answers + authorities + additionals > limits_names.DNS_RECORDS_MAX:
        raise RemoteProtocolError(f"a DNS answer with {answers + authorities + additionals} records")
    reading = _Reading(int.from_bytes(question[-4:-2]))
    ends = []
    for section, count in enumerate((answers, authorities, additionals)):
        at = reading.read(data, at, count, section)
        ends.append(at)
    end = ends[-1] if reading.cut_at is None else reading.cut_at
    rcode = flags & 0xF | reading.extended << 4
    counts = Counts(answers, authorities, reading.additionals)
    message = _HEADER.pack(0, flags, 1, *counts) + data[HEADER_BYTES:end]
    positive = reading.found and rcode == Rcode.NOERROR
    return Relayed(rcode, message, counts, tuple(reading.places), reading.ttl_s(rcode), positive, bool(flags & TC))


class _Reading:
    """The records of a relayed answer, walked through."""

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._answer_ttl_s = _TTL_S_MAX
        self._absent_ttl_s = 0
        self.found = False
        self.places: list[int] = []
        self.extended = 0
        self.additionals = 0
        self.cut_at: int | None = None

    def read(self, data: bytes, at: int, count: int, section: int) -> int:
        for _ in range(count):
            began = at
            _, at = dns.read_name(data, at)
            if len(data) < at + _RECORD.size:
                raise RemoteProtocolError("a DNS record is cut short")
            kind, _, ttl, size = _RECORD.unpack_from(data, at)
            after = at + _RECORD.size
            if len(data) < after + size:
                raise RemoteProtocolError("a DNS record is cut short")
            if kind == RecordType.OPT:
                if section != 2 or self.cut_at is not None:
                    raise RemoteProtocolError("EDNS at a wrong place of a DNS answer")
                # What stands behind it may point across it, so it goes too; additional records can be missed.
                self.cut_at, self.extended = began, ttl >> 24
            elif self.cut_at is None:
                self._take(data, section, kind, ttl if ttl <= _TTL_S_MAX else 0, after, size)
                self.places.append(at + 4)
            at = after + size
        return at

    def _take(self, data: bytes, section: int, kind: int, ttl_s: int, at: int, size: int) -> None:
        if section == 0:
            self.found = self.found or kind == self._kind or self._kind == RecordType.ANY
            self._answer_ttl_s = min(self._answer_ttl_s, ttl_s)
        elif section == 1 and kind == RecordType.SOA:
            if size < 22:
                raise RemoteProtocolError("a DNS record of authority of a wrong length")
            minimum = int.from_bytes(data[at + size - 4 : at + size])
            self._absent_ttl_s = min(ttl_s, minimum if minimum <= _TTL_S_MAX else 0)
        elif section == 2:
            self.additionals += 1

    def ttl_s(self, rcode: int) -> int:
        if rcode not in (Rcode.NOERROR, Rcode.NXDOMAIN):
            return 0
        if self.found and rcode == Rcode.NOERROR:
            return self._answer_ttl_s
        return min(self._answer_ttl_s, self._absent_ttl_s)
