"""Frames: a message with its length in front (four bytes, big-endian, the length not counted)."""

from struct import Struct
from typing import Final

import msgspec

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import RemoteProtocolError
from stormline.wire.messages import Message

PREFIX_BYTES: Final = 4

_LENGTH: Final = Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Give the message as one frame.

    Raises:
        ValueError: the frame would be larger than `limits.FRAME_BYTES_MAX`; bodies are cut by the caller.
    """
    payload = _encoder.encode(message)
    if len(payload) > limits.FRAME_BYTES_MAX:
        raise ValueError(f"{type(message).__name__} of {len(payload)} bytes, at most {limits.FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(payload)) + payload


def decode_payload(payload: bytes | bytearray | memoryview) -> Message:
    """Read a frame's payload.

    Raises:
        RemoteProtocolError: not MessagePack, an unknown tag, or fields of wrong types.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message: {error}") from error


class FrameBuffer:
    """Bytes in, frames out. Refuses a frame by its declared length, before it buffers any of it.

    Attributes:
        frame_bytes_max: largest frame accepted; raised by the owner once the peer is known.
        frame_bytes: payload of the frame given out last.
    """

    __slots__ = ("_buffer", "_start", "frame_bytes", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.frame_bytes = 0
        self._buffer: bytes | bytearray = b""  # what came last, as it came, where nothing was left of what came before
        self._start = 0

    def __len__(self) -> int:
        """Bytes held and not yet given out."""
        return len(self._buffer) - self._start

    def feed(self, data: bytes) -> None:
        """Add bytes from the peer."""
        if self._start == len(self._buffer):
            self._buffer, self._start = data, 0
            return
        if isinstance(self._buffer, bytearray):
            del self._buffer[: self._start]
        else:
            self._buffer = bytearray(memoryview(self._buffer)[self._start :])
        self._start = 0
        self._buffer += data

    def next_message(self) -> Message | None:
        """Give the next whole message, None where more bytes are needed.

        Raises:
            RemoteProtocolError: the frame is too large, empty, or malformed.
        """
        buffer, body = self._buffer, self._start + PREFIX_BYTES
        if len(buffer) < body:
            return None
        [length] = _LENGTH.unpack_from(buffer, self._start)
        if length > self.frame_bytes_max:
            raise RemoteProtocolError(
                f"frame of {length} bytes announced, at most {self.frame_bytes_max} are accepted here",
                Code.FRAME_TOO_LARGE,
            )
        if length == 0:
            raise RemoteProtocolError("empty frame")
        end = body + length
        if len(buffer) < end:
            return None
        message = decode_payload(buffer[body:end])
        self.frame_bytes = length
        if end == len(buffer):
            self._buffer, self._start = b"", 0
        else:
            self._start = end
        return message
