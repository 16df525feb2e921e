"""Names, numbers and layout of HTTP/2's frames (RFC 9113 sections 4 to 7)."""

import enum
import struct
from typing import Final

from stormline.core import limits

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""First bytes of a client (section 3.4)."""
HEADER_BYTES: Final = 9
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = 0x0, 0x1, 0x2, 0x3, 0x4, 0x5
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0x6, 0x7, 0x8, 0x9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = 0x1, 0x1, 0x4, 0x8, 0x20
STREAM_ID_MAX: Final = 2**31 - 1
WINDOW_MAX: Final = 2**31 - 1
WINDOW_BYTES: Final = 65_535
"""Every window until something else is said (section 6.9.2)."""
FRAME_BYTES_LEAST: Final = 16 * 1024
"""Payload of a frame that every peer takes (section 4.2); we send none that is larger."""

parse_header: Final = struct.Struct(">HBBBL").unpack_from
"""Bytes and a position to: size above its last byte, its last byte, type, flags, and stream with the reserved bit."""
_pack_header: Final = struct.Struct(">HBBBL").pack
_pack_setting: Final = struct.Struct(">HL").pack
parse_settings: Final = struct.Struct(">HL").iter_unpack
"""A payload of whole settings to pairs of name and value."""


class ErrorCode(enum.IntEnum):
    """Why a stream or a connection ended (section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Setting(enum.IntEnum):
    """What a SETTINGS frame can say (section 6.5.2)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


class ConnectionBroken(Exception):
    """The peer broke HTTP/2 itself: the connection cannot go on. The GOAWAY that says so waits in `data_to_send`.

    Attributes:
        code: what that GOAWAY says.
    """

    def __init__(self, what: str, code: ErrorCode) -> None:
        super().__init__(what)
        self.code: Final = code


def code_name(code: int) -> str:
    """Give the name of an error code (RFC 9113 section 7)."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"code {code}"


def header(size: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Give the 9 bytes before a payload of `size` bytes, less than 2**24."""
    return _pack_header(size >> 8, size & 0xFF, kind, flags, stream_id)


def fields_frames(stream_id: int, block: bytes, *, ended: bool) -> bytes:
    """Put a field block into a HEADERS frame, and what does not fit it into CONTINUATION frames (section 6.10)."""
    flags = END_STREAM if ended else 0
    if len(block) <= FRAME_BYTES_LEAST:
        return header(len(block), HEADERS, flags | END_HEADERS, stream_id) + block
    pieces = [block[at : at + FRAME_BYTES_LEAST] for at in range(0, len(block), FRAME_BYTES_LEAST)]
    frames = [header(len(pieces[0]), HEADERS, flags, stream_id), pieces[0]]
    for number, piece in enumerate(pieces[1:], 2):
        frames += (
            header(len(piece), CONTINUATION, END_HEADERS if number == len(pieces) else 0, stream_id),
            piece,
        )
    return b"".join(frames)


def window_update(stream_id: int, size: int) -> bytes:
    """Give credit for `size` bytes, of stream 0 for the connection."""
    return header(4, WINDOW_UPDATE, 0, stream_id) + size.to_bytes(4, "big")


def rst_stream(stream_id: int, code: int) -> bytes:
    """End a stream."""
    return header(4, RST_STREAM, 0, stream_id) + code.to_bytes(4, "big")


def goaway(code: int) -> bytes:
    """End the connection. We took no stream of the peer's."""
    return header(8, GOAWAY, 0, 0) + code.to_bytes(8, "big")


def settings(*values: tuple[Setting, int]) -> bytes:
    """Give a SETTINGS frame."""
    payload = b"".join(_pack_setting(name, value) for name, value in values)
    return header(len(payload), SETTINGS, 0, 0) + payload


def opening(window_bytes: int) -> bytes:
    """Give what a connection begins with: preface, our settings, and the window of the connection.

    Args:
        window_bytes: of each stream.
    """
    ours = settings(
        (Setting.ENABLE_PUSH, 0),
        (Setting.INITIAL_WINDOW_SIZE, window_bytes),
        (Setting.MAX_HEADER_LIST_SIZE, limits.HTTP_HEAD_BYTES_MAX),
    )
    return PREFACE + ours + window_update(0, limits.H2_CONNECTION_WINDOW_BYTES - WINDOW_BYTES)
