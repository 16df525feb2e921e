"""A batch of call records on its way to the APM: MessagePack, one struct, versioned."""

from typing import Final

import msgspec

from stormline.telemetry.timeline import CallRecord

MEDIA_TYPE: Final = "application/vnd.stormline.report+msgpack"
BATCH_RECORDS_MAX: Final = 500
"""Records in one batch: one insert of the store; about 250 KB."""
BATCH_BYTES_MAX: Final = 1024 * 1024
"""Encoded size of one batch; larger is refused unread."""


class Report(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One batch. App, device and user come from the token it is sent with, not from here.

    Attributes:
        version: 1.
        platform: operating system of the device, for grouping.
        client: name and version of the sending library.
        dropped: records lost since the last batch because the queue was full.
        calls: the records.
    """

    version: int = 1
    platform: str = ""
    client: str = ""
    dropped: int = 0
    calls: list[CallRecord] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)


def encode(report: Report) -> bytes:
    """Encode a batch."""
    return _encoder.encode(report)


def decode(data: bytes) -> Report:
    """Decode a batch.

    Raises:
        ValueError: too large, malformed, too many records or an unknown version; the message says which.
    """
    if len(data) > BATCH_BYTES_MAX:
        raise ValueError(f"report of {len(data)} bytes, at most {BATCH_BYTES_MAX}")
    try:
        report = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"malformed report: {error}") from error
    if report.version != 1:
        raise ValueError(f"report version {report.version} is not known")
    if len(report.calls) > BATCH_RECORDS_MAX:
        raise ValueError(f"report of {len(report.calls)} records, at most {BATCH_RECORDS_MAX}")
    return report
