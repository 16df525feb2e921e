"""A batch of call records on its way to the APM: MessagePack, one struct, versioned."""

from typing import Final, NamedTuple

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


class Salvaged(NamedTuple):
    """What `salvage` could read: the batch with its good records, and how many records it had to leave out."""

    report: Report
    malformed: int


class _Envelope(msgspec.Struct, kw_only=True):
    """A batch whose records are still bytes; the fields of `Report`."""

    version: int = 1
    platform: str = ""
    client: str = ""
    dropped: int = 0
    calls: list[msgspec.Raw] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_record_decoder = msgspec.msgpack.Decoder(CallRecord)
# A deep nest of arrays in an unknown field ends in RecursionError before it can hurt.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(report: Report) -> bytes:
    """Encode a batch."""
    return _encoder.encode(report)


def _check(version: int, records: int) -> None:
    if version != 1:
        raise ValueError(f"report version {version} is not known")
    if records > BATCH_RECORDS_MAX:
        raise ValueError(f"report of {records} records, at most {BATCH_RECORDS_MAX}")


def _check_size(data: bytes) -> None:
    if len(data) > BATCH_BYTES_MAX:
        raise ValueError(f"report of {len(data)} bytes, at most {BATCH_BYTES_MAX}")


def decode(data: bytes) -> Report:
    """Decode a batch, all or nothing.

    Raises:
        ValueError: too large, malformed, too many records or an unknown version; the message says which.
    """
    _check_size(data)
    try:
        report = _decoder.decode(data)
    except _MALFORMED as error:
        raise ValueError(f"malformed report: {error}") from error
    _check(report.version, len(report.calls))
    return report


def salvage(data: bytes) -> Salvaged:
    """Decode a batch and leave out single records that are malformed: one device's bug costs only what it touched.

    Raises:
        ValueError: too large, not a report at all, too many records or an unknown version.
    """
    _check_size(data)
    try:
        report = _decoder.decode(data)
    except _MALFORMED:
        return _salvage_each(data)
    _check(report.version, len(report.calls))
    return Salvaged(report, 0)


def _salvage_each(data: bytes) -> Salvaged:
    try:
        envelope = _envelope_decoder.decode(data)
    except _MALFORMED as error:
        raise ValueError(f"malformed report: {error}") from error
    _check(envelope.version, len(envelope.calls))
    calls = []
    for raw in envelope.calls:
        try:
            calls.append(_record_decoder.decode(raw))
        except _MALFORMED:
            continue
    report = Report(
        version=envelope.version,
        platform=envelope.platform,
        client=envelope.client,
        dropped=envelope.dropped,
        calls=calls,
    )
    return Salvaged(report, len(envelope.calls) - len(calls))
