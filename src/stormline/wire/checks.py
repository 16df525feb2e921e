"""What the machine of the long connection checks of single fields, and how it writes time spans."""

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.wire import messages as m


def milliseconds(seconds: float | None) -> int | None:
    """Give whole milliseconds for the wire; a pause below zero is none, one without end is the longest."""
    return None if seconds is None else round(min(max(0.0, seconds), limits.WIRE_SECONDS_MAX) * 1000)


def seconds(milliseconds: int | None) -> float | None:
    """Read a time span of the wire."""
    return None if milliseconds is None else max(0, milliseconds) / 1000


def check_chunk(body: bytes, headers: m.Headers) -> None:
    """Refuse here what the peer would answer by closing the whole connection; raises LocalProtocolError."""
    if len(body) > limits.CHUNK_BYTES_MAX:
        raise LocalProtocolError(f"chunk of {len(body)} bytes, at most {limits.CHUNK_BYTES_MAX}")
    if fault := headers_fault(headers):
        raise LocalProtocolError(fault)


def check_body(call_id: int, body: bytes) -> None:
    """Refuse a chunk of the peer that is too large; raises RemoteProtocolError."""
    if len(body) > limits.CHUNK_BYTES_MAX:
        raise RemoteProtocolError(
            f"call {call_id}: chunk of {len(body)} bytes, at most {limits.CHUNK_BYTES_MAX}", Code.FRAME_TOO_LARGE
        )


def check_headers(headers: m.Headers) -> None:
    """Refuse headers of the peer beyond their bounds; raises RemoteProtocolError."""
    if fault := headers_fault(headers):
        raise RemoteProtocolError(fault)


def headers_fault(headers: m.Headers) -> str:
    """Say what is wrong with headers, nothing where all is well."""
    if not headers:
        return ""
    if len(headers) > limits.CALL_HEADERS_MAX:
        return f"{len(headers)} headers, at most {limits.CALL_HEADERS_MAX}"
    size = 0
    for name, value in headers:
        size += len(name) + len(value)
    if size > limits.CALL_HEADER_BYTES_MAX:
        return f"headers of {size} characters, at most {limits.CALL_HEADER_BYTES_MAX}"
    return ""
