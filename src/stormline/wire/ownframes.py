"""Messages of an own protocol in the bodies of a call and its answer: each behind its length, four bytes big-endian."""

from stormline.core.errors import RemoteProtocolError

_LENGTH_BYTES = 4


def pack(message: bytes) -> bytes:
    """Give a message as it goes into a body.

    Raises:
        OverflowError: it has 4 GiB or more.
    """
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


class Unpacker:
    """Takes a body in pieces and gives the messages in it. Pure.

    Args:
        message_bytes_max: largest message taken.
    """

    __slots__ = ("_held", "_most")

    def __init__(self, message_bytes_max: int) -> None:
        self._most = message_bytes_max
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Give the messages that are whole by now.

        Raises:
            RemoteProtocolError: a message is too large; nothing more can be read then.
        """
        held = self._held
        held += data
        found: list[bytes] = []
        at = 0
        while len(held) - at >= _LENGTH_BYTES:
            size = int.from_bytes(held[at : at + _LENGTH_BYTES], "big")
            if size > self._most:
                raise RemoteProtocolError(f"message of {size} bytes, at most {self._most}")
            end = at + _LENGTH_BYTES + size
            if len(held) < end:
                break
            found.append(bytes(held[at + _LENGTH_BYTES : end]))
            at = end
        del held[:at]
        return found

    @property
    def partial(self) -> bool:
        """A message has begun and is not whole."""
        return bool(self._held)
