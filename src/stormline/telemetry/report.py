"""A batch of call records, and diagnoses, on its way to the APM: MessagePack, one struct, versioned."""

import contextlib
from typing import Final, NamedTuple, TypeVar

import msgspec

from stormline.core.limits_diagnosis import REPORT_DIAGNOSES_MAX
from stormline.telemetry.diagnosis import Diagnosis
from stormline.telemetry.timeline import CallRecord

T = TypeVar("T")

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
        diagnoses: what was found out about failures, `REPORT_DIAGNOSES_MAX` at most.
    """

    version: int = 1
    platform: str = ""
    client: str = ""
    dropped: int = 0
    calls: list[CallRecord] = []
    diagnoses: list[Diagnosis] = []


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
    diagnoses: list[msgspec.Raw] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_record_decoder = msgspec.msgpack.Decoder(CallRecord)
_diagnosis_decoder = msgspec.msgpack.Decoder(Diagnosis)
# A deep nest of arrays in an unknown field ends in RecursionError before it can hurt.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(report: Report) -> bytes:
    """Encode a batch."""
    return _encoder.encode(report)


def _check(report: Report | _Envelope) -> None:
    if report.version != 1:
        raise ValueError(f"report version {report.version} is not known")
    if len(report.calls) > BATCH_RECORDS_MAX:
        raise ValueError(f"report of {len(report.calls)} records, at most {BATCH_RECORDS_MAX}")
    if len(report.diagnoses) > REPORT_DIAGNOSES_MAX:
        raise ValueError(f"report of {len(report.diagnoses)} diagnoses, at most {REPORT_DIAGNOSES_MAX}")


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
    _check(report)
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
    _check(report)
    return Salvaged(report, 0)


def _salvage_each(data: bytes) -> Salvaged:
    try:
        envelope = _envelope_decoder.decode(data)
    except _MALFORMED as error:
        raise ValueError(f"malformed report: {error}") from error
    _check(envelope)
    calls = _readable(envelope.calls, _record_decoder)
    diagnoses = _readable(envelope.diagnoses, _diagnosis_decoder)
    report = Report(
        version=envelope.version,
        platform=envelope.platform,
        client=envelope.client,
        dropped=envelope.dropped,
        calls=calls,
        diagnoses=diagnoses,
    )
    lost = len(envelope.calls) - len(calls) + len(envelope.diagnoses) - len(diagnoses)
    return Salvaged(report, lost)


def _readable(raws: list[msgspec.Raw], decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
    """Decode those that can be."""
    found = []
    for raw in raws:
        with contextlib.suppress(*_MALFORMED):
            found.append(decoder.decode(raw))
    return found
