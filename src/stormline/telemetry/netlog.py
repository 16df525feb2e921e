"""The network log's records and its file format. Pure: the store that writes such files is `net.logfile`.

A file is a header and blocks. Each block stands for itself, so that a torn or damaged file still gives every block that
is whole; files may stand one behind the other, and zeros between blocks are room that was not used.

    header   magic 8, version 1, suite 1, zero 2, instance 8, started_ms 8, key id 8, HPKE enc 32, CRC-32 4
    block    magic 4, length 4, flags 1, records 4, first number 8, CRC-32 4, payload

The payload is an array of records in MessagePack; by flag it is a zstd frame, and sealed. Records are numbered within
their instance (one opening of a store), so what stands in two files is given once, and a gap shows what was lost.

Sealed files: the header carries an HPKE encapsulation (RFC 9180, X25519, HKDF-SHA256) to the reader's public key; from
it comes the key of the file, under which each block is sealed with ChaCha20-Poly1305 (RFC 8439), its header
authenticated, its first number the nonce. Who wrote the file forgets the key, and cannot read it again.
"""

import hashlib
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from stormline.core import errors, limits_netlog, zstandard
from stormline.telemetry.timeline import CallRecord

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

VERSION: Final = 1
SUFFIX: Final = ".slog"
ENTROPY_BYTES: Final = 32
INSTANCE_BYTES: Final = 8
_FILE_MAGIC: Final = b"\x8bSLNLOG\n"
_FILE: Final = struct.Struct(">8sBB2x8sQ8s32sI")
_BLOCK_MAGIC: Final = b"\xb5SLB"
_BLOCK: Final = struct.Struct(">4sIBIQI")
_CRC_BYTES: Final = 4
_TAG_BYTES: Final = 16
_CLEAR: Final = 0
_SEALED_SUITE: Final = 1
_ZSTD: Final = 1
_SEALED: Final = 2
_START: Final = re.compile(re.escape(_BLOCK_MAGIC) + b"|" + re.escape(_FILE_MAGIC))
_INFO: Final = b"stormline network log\0"

HEADER_BYTES: Final = _FILE.size
BLOCK_OVERHEAD_BYTES: Final = _BLOCK.size + _TAG_BYTES + 1
"""What a block of one record has beside the record, at most."""


# -- records ----------------------------------------------------------------------------------------------------------
class Network(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was known of the network at that moment. No name of it, no address of the device.

    Attributes:
        kind: `wifi`, `cell`, `wired` or `unknown`.
        id: its hashed name.
        interface: of the default route.
        metered: its bytes cost money; None for this and the next two: nobody can tell.
        routed: there is a default route.
        signal_dbm: strength of the radio signal.
        vpn: the default route is a tunnel's.
        condition: the verdict on it.
        confidence: how sure that is.
        why: what the verdict is said from.
        level: its quality.
        evidence: what speaks for the level.
    """

    kind: str = ""
    id: str = ""
    interface: str = ""
    metered: bool | None = None
    routed: bool | None = None
    signal_dbm: int | None = None
    vpn: bool = False
    condition: str = ""
    confidence: str = ""
    why: str = ""
    level: str = ""
    evidence: str = ""


class Began(msgspec.Struct, kw_only=True, omit_defaults=True, tag="began"):
    """A process began to write.

    Attributes:
        at_ms: wall time, milliseconds since 1970, as in all records.
        client: name and version of this library.
        platform: operating system.
        pid: number of the process.
    """

    at_ms: int
    client: str = ""
    platform: str = ""
    pid: int = 0


class Failure(msgspec.Struct, kw_only=True, omit_defaults=True, tag="failure"):
    """One call that failed, in full.

    Attributes:
        at_ms: when it ended.
        call: its timeline, outcome and attempts with their addresses.
        story: every decision: milliseconds since the call's start, line.
        causes: the chain of errors, the last one first.
        network: what was known of the network.
    """

    at_ms: int
    call: CallRecord
    story: list[tuple[float, str]] = []
    causes: list[str] = []
    network: Network = msgspec.field(default_factory=Network)


class Summary(msgspec.Struct, kw_only=True, omit_defaults=True, tag="summary"):
    """Calls that succeeded, counted.

    Attributes:
        at_ms: end of the span.
        since_ms: its beginning.
        calls: how many.
        total_ms: their times together.
        slowest_ms: the longest of them.
        bytes_up: sent.
        bytes_down: received.
        lost: records of any kind that were dropped in this span for want of room, or were too large.
    """

    at_ms: int
    since_ms: int
    calls: int = 0
    total_ms: float = 0.0
    slowest_ms: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    lost: int = 0


class Line(msgspec.Struct, kw_only=True, omit_defaults=True, tag="line"):
    """One line of the app's own log.

    Attributes:
        at_ms: when it was said.
        level: as in `logging`.
        name: of the level.
        logger: who said it.
        text: what was said, formatted.
        trace: the traceback, empty for none.
    """

    at_ms: int
    level: int
    name: str = ""
    logger: str = ""
    text: str = ""
    trace: str = ""


class Finding(msgspec.Struct, kw_only=True, omit_defaults=True, tag="finding"):
    """What a diagnosis found.

    Attributes:
        at_ms: when.
        call_id: of the call that it was made for, empty for none.
        content: what was found, in MessagePack.
    """

    at_ms: int
    call_id: str = ""
    content: bytes = b""


Record = Began | Failure | Summary | Line | Finding

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Record)
_list_decoder: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(record: Record) -> bytes:
    """Encode one record."""
    return _encoder.encode(record)


def shown(record: Record) -> dict[str, Any]:
    """Give a record as JSON can hold it; a finding's content is read."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    if isinstance(record, Finding):
        try:
            plain["content"] = msgspec.to_builtins(msgspec.msgpack.decode(record.content))
        except (*_MALFORMED, TypeError):
            plain["content"] = None
    return plain


# -- keys -------------------------------------------------------------------------------------------------------------
def key_id(public: bytes) -> bytes:
    """Give the name of a public key: the beginning of its SHA-256."""
    return hashlib.sha256(public).digest()[:8]


@lru_cache(1)
def _suite() -> Any:
    from pyhpke import AEADId, CipherSuite, KDFId, KEMId  # only who seals or opens pays for it

    return CipherSuite.new(KEMId.DHKEM_X25519_HKDF_SHA256, KDFId.HKDF_SHA256, AEADId.CHACHA20_POLY1305)


def check_public(public: bytes) -> bytes:
    """Give back a public key that files can be sealed to.

    Raises:
        ConfigError: it is none.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:  # a point of small order is found out by using it
        X25519PrivateKey.from_private_bytes(bytes(range(32))).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise errors.ConfigError("expected an X25519 public key, 32 bytes") from None
    return public


# -- writing ----------------------------------------------------------------------------------------------------------
class FileWriter:
    """Makes the bytes of one file. Holds the key of a sealed one, and nothing else that could open it.

    Args:
        instance: `INSTANCE_BYTES` random bytes, the same in all files of one opening of a store.
        started_ms: wall time of that opening.
        public: X25519 key to seal to, checked; None: the file is clear.
        entropy: `ENTROPY_BYTES` random bytes that are used for nothing else, ever; none where nothing is sealed.

    Attributes:
        header: the file's first bytes.
    """

    __slots__ = ("_aead", "header")

    def __init__(self, instance: bytes, started_ms: int, *, public: bytes | None = None, entropy: bytes = b"") -> None:
        self._aead: ChaCha20Poly1305 | None = None
        key_name, enc = bytes(8), bytes(32)
        if public is not None:
            key_name = key_id(public)
            head = _bound(instance, started_ms, key_name)
            enc, self._aead = _encapsulate(public, entropy, head)
        suite = _CLEAR if public is None else _SEALED_SUITE
        head = _FILE.pack(_FILE_MAGIC, VERSION, suite, instance, started_ms, key_name, enc, 0)[:-_CRC_BYTES]
        self.header: Final = head + zlib.crc32(head).to_bytes(_CRC_BYTES, "big")

    def record(self, record: bytes, number: int) -> bytes:
        """Give a block of one record, not compressed."""
        return self._block(b"\x91" + record, 1, number, 0)

    def block(self, records: Sequence[bytes], number: int) -> bytes:
        """Give a block of some records, compressed.

        Args:
            records: encoded; at most `limits_netlog.NETLOG_BLOCK_BYTES_MAX` together.
            number: of the first one; the others follow without a gap.
        """
        content = _array(len(records)) + b"".join(records)
        packed = zstandard.zstd().compress(content, limits_netlog.NETLOG_LEVEL)
        return self._block(packed, len(records), number, _ZSTD)

    def _block(self, payload: bytes, count: int, number: int, flags: int) -> bytes:
        aead, length = self._aead, len(payload)
        if aead is not None:
            length += _TAG_BYTES
            flags |= _SEALED
        head = _BLOCK.pack(_BLOCK_MAGIC, length, flags, count, number, 0)[:-_CRC_BYTES]
        if aead is not None:
            payload = aead.encrypt(_nonce(number), payload, head)
        return b"%b%b%b" % (head, zlib.crc32(payload, zlib.crc32(head)).to_bytes(_CRC_BYTES, "big"), payload)


def _array(count: int) -> bytes:
    return bytes((0x90 | count,)) if count < 16 else b"\xdd" + count.to_bytes(4, "big")


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _bound(instance: bytes, started_ms: int, key_name: bytes) -> bytes:
    """Give what the key of a file is bound to."""
    return _INFO + bytes((VERSION, _SEALED_SUITE)) + instance + started_ms.to_bytes(8, "big") + key_name


def _encapsulate(public: bytes, entropy: bytes, info: bytes) -> "tuple[bytes, ChaCha20Poly1305]":
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from pyhpke import KEMKey, KEMKeyPair

    ours = X25519PrivateKey.from_private_bytes(entropy)
    pair = KEMKeyPair(KEMKey.from_pyca_cryptography_key(ours), KEMKey.from_pyca_cryptography_key(ours.public_key()))
    theirs = KEMKey.from_pyca_cryptography_key(X25519PublicKey.from_public_bytes(public))
    enc, context = _suite().create_sender_context(theirs, info=info, eks=pair)
    return enc, ChaCha20Poly1305(context.export(b"blocks", 32))


def _decapsulate(private: "X25519PrivateKey", enc: bytes, info: bytes) -> "ChaCha20Poly1305 | None":
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from pyhpke import KEMKey

    try:
        context = _suite().create_recipient_context(enc, KEMKey.from_pyca_cryptography_key(private), info=info)
    except ValueError:  # no point of the curve: nobody sealed anything with it
        return None
    return ChaCha20Poly1305(context.export(b"blocks", 32))


# -- reading ----------------------------------------------------------------------------------------------------------
class Entry(NamedTuple):
    """A record and its place.

    Attributes:
        started_ms: when its instance began; with `instance` and `number` its order.
        instance: the store's opening that it was written in.
        number: its number there.
        record: itself.
    """

    started_ms: int
    instance: str
    number: int
    record: Record


@dataclass(slots=True)
class Reading:
    """What could be read.

    Attributes:
        entries: the records, in order of instance and number, none twice.
        lost: records that are missing between those which are there.
        damaged_bytes: bytes that are no whole block.
        malformed: records of whole blocks that make no sense, or are of a later version.
        sealed: records in whole blocks that the key at hand does not open.
        keys: names of the keys that such blocks are sealed to, in hexadecimal.
    """

    entries: list[Entry] = field(default_factory=list)
    lost: int = 0
    damaged_bytes: int = 0
    malformed: int = 0
    sealed: int = 0
    keys: set[str] = field(default_factory=set)


class Block(NamedTuple):
    """A whole block as it stands in a file.

    Attributes:
        header: of its file.
        data: all its bytes, as they can be copied.
        number: of its first record.
        records: how many it has.
        flags: how its payload is written.
    """

    header: "Header"
    data: bytes
    number: int
    records: int
    flags: int


class Header(NamedTuple):
    """The header of a file.

    Attributes:
        data: its bytes.
        instance: who wrote it.
        started_ms: when that began.
        key_id: whom it is sealed to; zeros where it is clear.
        enc: the encapsulated key.
        sealed: it is sealed.
    """

    data: bytes
    instance: bytes
    started_ms: int
    key_id: bytes
    enc: bytes
    sealed: bool


def blocks(data: bytes, reading: Reading) -> Iterator[Block]:
    """Give every whole block of files that stand one behind the other; what is passed over is counted in `reading`."""
    at, end, header = 0, len(data), None
    budget = limits_netlog.NETLOG_READ_FACTOR * end + HEADER_BYTES
    while at < end:
        if data[at] == 0:
            at = _after_zeros(data, at)
            continue
        found = _header_at(data, at)
        if found is not None:
            header = found
            at += HEADER_BYTES
            continue
        block = None
        if header is not None and budget > 0 and data.startswith(_BLOCK_MAGIC, at):
            block, looked = _block_at(data, at, header)
            budget -= looked
        if block is not None:
            yield block
            at += len(block.data)
            continue
        start = _START.search(data, at + 1)
        following = end if start is None else start.start()
        reading.damaged_bytes += following - at
        at = following


def _after_zeros(data: bytes, at: int) -> int:
    step = 4096
    while at < len(data):
        piece = data[at : at + step]
        rest = piece.lstrip(b"\0")
        if rest:
            return at + len(piece) - len(rest)
        at += len(piece)
    return at


def _header_at(data: bytes, at: int) -> Header | None:
    if not data.startswith(_FILE_MAGIC, at) or at + HEADER_BYTES > len(data):
        return None
    raw = data[at : at + HEADER_BYTES]
    _, version, suite, instance, started_ms, key_name, enc, crc = _FILE.unpack(raw)
    if crc != zlib.crc32(raw[:-_CRC_BYTES]) or version != VERSION or suite not in (_CLEAR, _SEALED_SUITE):
        return None
    return Header(raw, instance, started_ms, key_name, enc, suite == _SEALED_SUITE)


def _block_at(data: bytes, at: int, header: Header) -> tuple[Block | None, int]:
    """Give the block that begins here, and how many bytes were looked at."""
    raw = data[at : at + _BLOCK.size]
    if len(raw) < _BLOCK.size:
        return None, 0
    _, length, flags, count, number, crc = _BLOCK.unpack(raw)
    if (
        length > limits_netlog.NETLOG_BLOCK_BYTES_MAX + _TAG_BYTES
        or not 0 < count <= limits_netlog.NETLOG_BLOCK_RECORDS_MAX
        or number + count >= 2**64
        or flags & ~(_ZSTD | _SEALED)
        or bool(flags & _SEALED) is not header.sealed
        or at + _BLOCK.size + length > len(data)
    ):
        return None, _BLOCK.size
    payload = data[at + _BLOCK.size : at + _BLOCK.size + length]
    if crc != zlib.crc32(payload, zlib.crc32(raw[:-_CRC_BYTES])):
        return None, length
    return Block(header, raw + payload, number, count, flags), length


class Opener:
    """Reads the records of blocks; keeps what it needs for the files it has seen last.

    Args:
        private: the key that sealed files are sealed to; None: such blocks stay closed.
    """

    def __init__(self, private: "X25519PrivateKey | None" = None) -> None:
        self._private = private
        self._name = b"" if private is None else key_id(private.public_key().public_bytes_raw())
        self._of: tuple[bytes, ChaCha20Poly1305 | None] = (b"", None)

    def raw(self, block: Block) -> list[bytes] | None:
        """Give the records of a block, encoded; None where it stays closed.

        Raises:
            ValueError: it is not what a writer makes.
        """
        payload = block.data[_BLOCK.size :]
        if block.flags & _SEALED:
            aead = self._aead(block.header)
            if aead is None:
                return None
            from cryptography.exceptions import InvalidTag

            try:
                payload = aead.decrypt(_nonce(block.number), payload, block.data[: _BLOCK.size - _CRC_BYTES])
            except InvalidTag:
                raise ValueError("it is not what was sealed") from None
        if block.flags & _ZSTD:
            payload = _decompressed(payload)
        try:
            records = _list_decoder.decode(payload)
        except _MALFORMED as error:
            raise ValueError(str(error)) from None
        if len(records) != block.records:
            raise ValueError(f"{len(records)} records where {block.records} were told")
        return [bytes(each) for each in records]

    def _aead(self, header: Header) -> "ChaCha20Poly1305 | None":
        if self._private is None or header.key_id != self._name:
            return None
        if self._of[0] != header.data:
            info = _bound(header.instance, header.started_ms, header.key_id)
            self._of = (header.data, _decapsulate(self._private, header.enc, info))
        return self._of[1]


def _decompressed(payload: bytes) -> bytes:
    zstd = zstandard.zstd()
    machine = zstd.ZstdDecompressor()
    size_max = limits_netlog.NETLOG_BLOCK_BYTES_MAX + 8
    try:
        content: bytes = machine.decompress(payload, size_max)
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from None
    if not machine.eof or machine.unused_data:
        raise ValueError(f"no zstd frame of at most {size_max} bytes")
    return content


def read(files: Iterable[bytes], private: "X25519PrivateKey | None" = None) -> Reading:
    """Read files; raises nothing, whatever they hold.

    Args:
        files: their bytes, in any order.
        private: the key that they are sealed to, where they are.
    """
    reading, opener = Reading(), Opener(private)
    found: dict[tuple[int, bytes], dict[int, Record | None]] = {}
    for data in files:
        for block in blocks(data, reading):
            numbers = range(block.number, block.number + block.records)
            place = found.setdefault((block.header.started_ms, block.header.instance), {})
            try:
                records = opener.raw(block)
            except ValueError:
                reading.damaged_bytes += len(block.data)
                continue
            if records is None:
                reading.sealed += sum(number not in place for number in numbers)
                reading.keys.add(block.header.key_id.hex())
                place.update(dict.fromkeys((number for number in numbers if number not in place), None))
                continue
            for number, raw in zip(numbers, records, strict=True):
                if number not in place:
                    place[number] = _record(raw, reading)
    for (started_ms, instance), place in sorted(found.items()):
        if place:
            reading.lost += max(place) - min(place) + 1 - len(place)
        name = instance.hex()
        reading.entries += (
            Entry(started_ms, name, number, record)
            for number, record in sorted(place.items(), key=lambda item: item[0])
            if record is not None
        )
    return reading


def _record(raw: bytes, reading: Reading) -> Record | None:
    try:
        return _decoder.decode(raw)
    except _MALFORMED:
        reading.malformed += 1
        return None
