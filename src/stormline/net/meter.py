"""What sockets carried: plain numbers, added to where the bytes pass."""

from typing import Final


class Meter:
    """Counts for the streams it is given to (`TcpStream.meter`).

    Attributes:
        bytes_up: taken by the kernel, TLS included, TCP and IP not.
        bytes_down: the same, taken from it.
        connections: made, whether they were used or not.
        handshakes: of TLS that were begun.
    """

    __slots__ = ("bytes_down", "bytes_up", "connections", "handshakes")

    def __init__(self) -> None:
        self.bytes_up = self.bytes_down = self.connections = self.handshakes = 0


UNREAD: Final = Meter()
"""Of streams that nobody measures."""
