"""From a call record, or a diagnosis, of unknown quality to a row the store can hold. Pure.

Reports come from devices: clocks are wrong, libraries have bugs, and some senders mean harm. A row is either clean
or named as bad; nothing here raises on what a device sent.
"""

from typing import Any, NamedTuple, TypeAlias

import msgspec

from stormline.core import limits_diagnosis
from stormline.core import limits_platform as limits
from stormline.telemetry.diagnosis import Diagnosis
from stormline.telemetry.timeline import STAGES, AttemptRecord, CallRecord

Row: TypeAlias = dict[str, Any]
"""One value per column of `apm.schema.COLUMNS`, by name."""

INT64_MAX = 2**63 - 1
_FAMILIES = (0, 4, 6)


class Origin(NamedTuple):
    """Who sent a report (from the token) and with what (from the report)."""

    app: str
    device: str
    user: str = ""
    platform: str = ""
    client: str = ""


class Bad(NamedTuple):
    """Why a record was left out: a short kind for counting, never the value itself."""

    kind: str


def _texts_fit(*texts: tuple[str, int]) -> bool:
    for text, chars_max in texts:
        if len(text) > chars_max:
            return False
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:  # lone surrogates: no store can hold them
                return False
    return True


def _duration_fits(value: float) -> bool:
    # NaN fails every comparison, so it falls out here too.
    return 0.0 <= value <= limits.REPORT_DURATION_MS_MAX


def _attempt_defect(attempt: AttemptRecord) -> str:
    text = limits.REPORT_TEXT_CHARS_MAX
    if not _texts_fit(
        (attempt.means, text), (attempt.address, text), (attempt.carrier, text), (attempt.failure, text),
        (attempt.phase, text),
    ):  # fmt: skip
        return "text"
    if not (_duration_fits(attempt.start_ms) and _duration_fits(attempt.duration_ms)):
        return "duration"
    return ""


def _defect(record: CallRecord) -> str:
    """Name what is wrong with a record, empty for nothing."""
    text = limits.REPORT_TEXT_CHARS_MAX
    if not _texts_fit(
        (record.host, limits.REPORT_HOST_CHARS_MAX), (record.path, limits.REPORT_PATH_CHARS_MAX),
        (record.call_id, text), (record.method, text), (record.business, text), (record.failure, text),
        (record.phase, text), (record.network, text), (record.means, text), (record.address, text),
    ):  # fmt: skip
        return "text"
    if not record.call_id or not record.host:
        return "nameless"
    if not 0 <= record.started_at_ms <= limits.REPORT_WALL_MS_MAX:
        return "time"
    if not _duration_fits(record.total_ms):
        return "duration"
    if not all(_duration_fits(record.stages_ms[stage]) for stage in STAGES if stage in record.stages_ms):
        return "duration"
    if not (0 <= record.status <= 999 and record.family in _FAMILIES):
        return "number"
    if not all(0 <= number <= INT64_MAX for number in (record.bytes_up, record.bytes_down, record.plan_version)):
        return "number"
    if len(record.attempts) > limits.REPORT_ATTEMPTS_MAX:
        return "attempts"
    for attempt in record.attempts:
        if defect := _attempt_defect(attempt):
            return defect
    return ""


def _label(text: str) -> str:
    """A grouping text from the report's head: cut rather than refused, since it is no row's fault."""
    return text[: limits.REPORT_TEXT_CHARS_MAX].encode("utf-8", "replace").decode()


def kind_of_failure(record: CallRecord) -> str:
    """Name why the business did not succeed, empty where it did: the failure itself, `http-NNN`, or `parse`."""
    if record.ok:
        return ""
    if record.failure:
        return record.failure
    if not record.ok_network:
        return "unknown"
    return f"http-{record.status}" if not record.ok_http else "parse"


def clean(record: CallRecord, origin: Origin, received_ms: int) -> Row | Bad:
    """Make a row of a record.

    A start far from `received_ms` (`limits.REPORT_LATE_S`, `REPORT_EARLY_S`) is a wrong device clock: the row is
    kept, its start becomes the time of arrival and `clock_off` is set. Stages this version does not know are left
    out, so that a newer client's records still count.

    Args:
        record: as decoded.
        origin: who sent it.
        received_ms: wall time of arrival, milliseconds since 1970.
    """
    if defect := _defect(record):
        return Bad(defect)
    age_s = (received_ms - record.started_at_ms) / 1000.0
    clock_off = not -limits.REPORT_EARLY_S <= age_s <= limits.REPORT_LATE_S
    attempts = record.attempts
    row: Row = {
        "received_at": received_ms,
        "started_at": received_ms if clock_off else record.started_at_ms,
        "clock_off": clock_off,
        "app": origin.app,
        "device": origin.device,
        "user": origin.user,
        "platform": _label(origin.platform),
        "client": _label(origin.client),
        "call_id": record.call_id,
        "method": record.method,
        "host": record.host,
        "path": record.path,
        "business": record.business,
        "status": record.status,
        "ok_network": record.ok_network,
        "ok_http": record.ok_http,
        "ok_parse": record.ok_parse,
        "ok": record.ok,
        "kind": kind_of_failure(record),
        "failure": record.failure,
        "phase": record.phase,
        "plan_version": record.plan_version,
        "network": record.network,
        "family": record.family,
        "means": record.means,
        "address": record.address,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "total_ms": record.total_ms,
        "attempts.means": [a.means for a in attempts],
        "attempts.address": [a.address for a in attempts],
        "attempts.carrier": [a.carrier for a in attempts],
        "attempts.reused": [a.reused for a in attempts],
        "attempts.failure": [a.failure for a in attempts],
        "attempts.phase": [a.phase for a in attempts],
        "attempts.maybe_delivered": [a.maybe_delivered for a in attempts],
        "attempts.start_ms": [a.start_ms for a in attempts],
        "attempts.duration_ms": [a.duration_ms for a in attempts],
    }
    for stage in STAGES:
        row[f"{stage}_ms"] = record.stages_ms.get(stage)
    return row


def _diagnosis_defect(diagnosis: Diagnosis) -> str:
    """Name what is wrong with a diagnosis, empty for nothing."""
    text = limits.REPORT_TEXT_CHARS_MAX
    if not _texts_fit(
        (diagnosis.host, limits.REPORT_HOST_CHARS_MAX), (diagnosis.url, limits.REPORT_PATH_CHARS_MAX),
        (diagnosis.network, text), (diagnosis.verdict, text), (diagnosis.confidence, text),
        (diagnosis.why, limits.REPORT_PATH_CHARS_MAX),
    ):  # fmt: skip
        return "text"
    if not diagnosis.verdict:
        return "nameless"
    if not 0 <= diagnosis.started_at * 1000 <= limits.REPORT_WALL_MS_MAX:
        return "time"
    if not _duration_fits(diagnosis.took_s * 1000):
        return "duration"
    return "checks" if len(diagnosis.checks) > limits_diagnosis.DIAGNOSIS_CHECKS_MAX else ""


def clean_diagnosis(diagnosis: Diagnosis, origin: Origin, received_ms: int) -> Row | Bad:
    """Make a row of a diagnosis, its checks as one JSON text; for a wrong device clock see `clean`.

    Args:
        diagnosis: as decoded.
        origin: who sent it.
        received_ms: wall time of arrival, milliseconds since 1970.
    """
    if defect := _diagnosis_defect(diagnosis):
        return Bad(defect)
    try:
        checks = msgspec.json.encode(diagnosis.checks).decode()
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return Bad("checks")
    if len(checks) > limits_diagnosis.DIAGNOSIS_RECORD_BYTES_MAX:
        return Bad("checks")
    started_ms = int(diagnosis.started_at * 1000)
    clock_off = not -limits.REPORT_EARLY_S <= (received_ms - started_ms) / 1000.0 <= limits.REPORT_LATE_S
    return {
        "received_at": received_ms,
        "started_at": received_ms if clock_off else started_ms,
        "clock_off": clock_off,
        "app": origin.app,
        "device": origin.device,
        "user": origin.user,
        "platform": _label(origin.platform),
        "client": _label(origin.client),
        "host": diagnosis.host,
        "url": diagnosis.url,
        "network": diagnosis.network,
        "automatic": diagnosis.automatic,
        "verdict": diagnosis.verdict,
        "confidence": diagnosis.confidence,
        "why": diagnosis.why,
        "took_ms": diagnosis.took_s * 1000,
        "checks": checks,
    }
