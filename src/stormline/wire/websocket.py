"""The long connection inside a WebSocket (RFC 6455): names, and how frames are put into messages.

Each binary message holds whole frames of `wire.frames`, one or several; a reader takes the bytes of all messages in
order. Text messages are refused, extensions (compression) are not used.
"""

from collections.abc import Iterator
from typing import Final

from stormline.core import limits_carriers
from stormline.wire.frames import PREFIX_BYTES

PATH: Final = "/stormline"
"""Path of the request that opens the WebSocket."""
SUBPROTOCOL: Final = "sl.1"
"""`Sec-WebSocket-Protocol` (RFC 6455 section 11.3.4)."""
ALPN: Final = "http/1.1"
"""What is agreed in TLS below (RFC 7301)."""


def messages(data: bytes) -> Iterator[bytes]:
    """Cut whole frames into messages of at most `limits_carriers.WS_MESSAGE_BYTES`; a larger frame has one for itself.

    Args:
        data: whole frames, as `wire.Connection.data_to_send` gives them.
    """
    if len(data) <= limits_carriers.WS_MESSAGE_BYTES:
        if data:
            yield data
        return
    start = end = 0
    while end < len(data):
        size = PREFIX_BYTES + int.from_bytes(data[end : end + PREFIX_BYTES], "big")
        if end > start and end + size - start > limits_carriers.WS_MESSAGE_BYTES:
            yield data[start:end]
            start = end
        end += size
    yield data[start:]


def same_origin(scheme: str, host: str) -> str:
    """Give the origin (RFC 6454 section 6.2) of a page that was served under the same name and port.

    Args:
        scheme: `https`, or `http` where no TLS is below.
        host: the request's `Host`.
    """
    port = ":443" if scheme == "https" else ":80"
    return f"{scheme}://{host.lower().removesuffix(port)}"
