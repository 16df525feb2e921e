"""What a user says of the app, with the last failures, on its way to the APM: MessagePack, one struct, versioned."""

from collections.abc import Sequence
from typing import Final

import msgspec

from stormline.core import limits_netlog as limits
from stormline.telemetry.netlog import FileWriter

MEDIA_TYPE: Final = "application/vnd.stormline.feedback+msgpack"
PATH: Final = "/v1/feedback"
_ID_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyz234567")
_ID_LENGTH: Final = 26
"""`core.ids.new_id`: 128 random bits. Who sends one again sends the same id, and it is stored once."""


class Feedback(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One feedback. App, device and user come from the token it is sent with, not from here.

    Attributes:
        version: 1.
        id: unique, drawn by the device.
        said_at_ms: wall time of the device, milliseconds since 1970.
        text: what the user said.
        client: name and version of the sending library.
        platform: operating system of the device.
        log: the last failures as a file of the network log (`telemetry.netlog`), sealed where the app has a key for
            that; empty for none.
    """

    version: int = 1
    id: str
    said_at_ms: int
    text: str
    client: str = ""
    platform: str = ""
    log: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Feedback)


def encode(feedback: Feedback) -> bytes:
    """Encode one."""
    return _encoder.encode(feedback)


def is_id(text: str) -> bool:
    """Say whether a text can be the id of feedback, and so the name of a file."""
    return len(text) == _ID_LENGTH and _ID_CHARS.issuperset(text)


def decode(data: bytes) -> Feedback:
    """Decode one.

    Raises:
        ValueError: too large, malformed, of an unknown version, or beyond its bounds; the message says which.
    """
    if len(data) > limits.FEEDBACK_BYTES_MAX:
        raise ValueError(f"feedback of {len(data)} bytes, at most {limits.FEEDBACK_BYTES_MAX}")
    try:
        found = _decoder.decode(data)
        for text in (found.text, found.client, found.platform):
            text.encode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"malformed feedback: {error}") from error
    if found.version != 1:
        raise ValueError(f"feedback version {found.version} is not known")
    if not is_id(found.id):
        raise ValueError("feedback without an id")
    if not 0 < len(found.text) <= limits.FEEDBACK_TEXT_CHARS_MAX:
        raise ValueError(f"feedback has 1 to {limits.FEEDBACK_TEXT_CHARS_MAX} characters")
    if max(len(found.client), len(found.platform)) > limits.FEEDBACK_WORD_CHARS_MAX:
        raise ValueError(f"client and platform have at most {limits.FEEDBACK_WORD_CHARS_MAX} characters")
    if not 0 <= found.said_at_ms < 2**53:
        raise ValueError("feedback of no time")
    return found


def pack_log(records: Sequence[bytes], writer: FileWriter) -> bytes:
    """Give the newest records as one file of the network log, at most `limits_netlog.FEEDBACK_LOG_BYTES_MAX`.

    Args:
        records: encoded, the newest at the end.
        writer: makes the file; nothing else may be written with it.
    """
    kept: list[bytes] = []
    size = 0
    for record in reversed(records):
        size += len(record)
        if size > limits.NETLOG_LAST_BYTES:
            break
        kept.append(record)
    kept.reverse()
    while kept:
        data = writer.header + writer.block(kept, 0)
        if len(data) <= limits.FEEDBACK_LOG_BYTES_MAX:
            return data
        kept = kept[(len(kept) + 1) // 2 :]
    return b""
