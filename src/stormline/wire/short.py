"""Short HTTP: a stream of bytes both ways, of which each HTTP exchange carries a piece.

A *channel* is that stream. The client opens it by an exchange without a name and is given one. After that each exchange
names the channel, brings bytes up, and says how many it has of those that came down; the answer says how many bytes
have come up, and brings some down. Bytes are counted from 0 in each direction, and their sender keeps them until the
other side says that it has them: what was lost with a connection is sent again, what comes twice is dropped. To the
session above it is a connection like any other.

An exchange is one POST to `PATH` with an `Ask` as its body, answered by a `Tell`, both as MessagePack. It needs nothing
of HTTP that HTTP/1.0 does not have: a length, and an answer.
"""

from typing import Final, TypeVar

import msgspec

from stormline.core import limits_carriers
from stormline.core.errors import RemoteProtocolError

PATH: Final = "/stormline/short"
"""Path of every exchange."""
ALPN: Final = "http/1.1"
"""What is agreed in TLS below (RFC 7301)."""
CONTENT_TYPE: Final = "application/octet-stream"
"""Of both bodies."""


class Ask(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a client sends.

    Attributes:
        channel: the channel's name; to open one, empty or the name of a node and a dot: the node of its session.
        received: how many bytes the client has that came down.
        begin: number of the first byte of `data`; all before it were confirmed.
        data: bytes that go up.
        wait_ms: how long the answer may be held until there is something to bring down; 0: nothing is asked for.
        room: how many bytes may come down at most; the gateway has a bound of its own.
    """

    channel: str
    received: int = 0
    begin: int = 0
    data: bytes = b""
    wait_ms: int = 0
    room: int = limits_carriers.SHORT_DOWN_BYTES

    def __repr__(self) -> str:
        """Show all but the channel's name, which is a credential, and what goes through it."""
        return f"Ask({self.received=}, {self.begin=}, {len(self.data)} bytes, {self.wait_ms=})"


class Tell(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the gateway answers.

    Attributes:
        channel: the channel's name.
        received: how many bytes the gateway has that went up.
        begin: number of the first byte of `data`.
        data: bytes that come down.
        ended: nothing follows these: the channel is over.
    """

    channel: str
    received: int = 0
    begin: int = 0
    data: bytes = b""
    ended: bool = False

    def __repr__(self) -> str:
        """Show all but the channel's name, and what goes through it."""
        return f"Tell({self.received=}, {self.begin=}, {len(self.data)} bytes, {self.ended=})"


_encoder = msgspec.msgpack.Encoder()
_asks = msgspec.msgpack.Decoder(Ask)
_tells = msgspec.msgpack.Decoder(Tell)


def encode(message: Ask | Tell) -> bytes:
    """Give the body of a request or of an answer."""
    return _encoder.encode(message)


def decode_ask(body: bytes) -> Ask:
    """Read the body of a request.

    Raises:
        RemoteProtocolError: it is none, or too large.
    """
    return _checked(_asks, body, limits_carriers.SHORT_UP_BYTES)


def decode_tell(body: bytes) -> Tell:
    """Read the body of an answer.

    Raises:
        RemoteProtocolError: it is none, or too large: somebody else has answered.
    """
    tell = _checked(_tells, body, limits_carriers.SHORT_DOWN_BYTES)
    if not tell.channel:
        raise RemoteProtocolError("an answer without a channel")
    return tell


Body = TypeVar("Body", Ask, Tell)


def _checked(decoder: "msgspec.msgpack.Decoder[Body]", body: bytes, data_bytes_max: int) -> Body:
    try:
        message = decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed exchange: {error}") from error
    if len(message.data) > data_bytes_max or len(message.channel) > limits_carriers.SHORT_NAME_CHARS_MAX:
        raise RemoteProtocolError("an exchange over its bounds")
    if message.received < 0 or message.begin < 0:
        raise RemoteProtocolError("a count below 0")
    return message


def node_of(channel: str) -> str:
    """Say which node a channel is at, as far as one can tell from its name; empty where it is at none."""
    return channel.rpartition(".")[0]


class Outgoing:
    """The bytes of one direction at their sender.

    Attributes:
        confirmed: how many the other side has.
    """

    __slots__ = ("_kept", "confirmed")

    def __init__(self) -> None:
        self._kept = bytearray()
        self.confirmed = 0

    def __len__(self) -> int:
        """Bytes that the other side may not have."""
        return len(self._kept)

    @property
    def end(self) -> int:
        """How many were put out in all."""
        return self.confirmed + len(self._kept)

    def put(self, data: bytes | memoryview) -> None:
        """Send these."""
        self._kept += data

    def confirm(self, received: int) -> None:
        """Take the other side's word that it has so many; less than it has said before changes nothing.

        Raises:
            RemoteProtocolError: there never were so many.
        """
        if received > self.end:
            raise RemoteProtocolError(f"{received} bytes confirmed, {self.end} were sent")
        if received > self.confirmed:
            del self._kept[: received - self.confirmed]
            self.confirmed = received

    def take(self, size_max: int) -> bytes:
        """Give what the other side may not have, `size_max` bytes at most, from `confirmed` on; it is kept."""
        return bytes(self._kept[:size_max])


class Incoming:
    """The bytes of one direction at their receiver.

    Attributes:
        received: how many have come.
    """

    __slots__ = ("received",)

    def __init__(self) -> None:
        self.received = 0

    def take(self, begin: int, data: bytes) -> bytes:
        """Give those that are new.

        Raises:
            RemoteProtocolError: some before them never came.
        """
        if begin > self.received:
            raise RemoteProtocolError(f"bytes from {begin} on, after {self.received}")
        fresh = data[self.received - begin :]
        self.received += len(fresh)
        return fresh
