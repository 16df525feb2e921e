import math
from typing import Any

import pytest

from stormline.apm import schema
from stormline.apm.rows import Bad, Origin, clean
from stormline.core import limits_platform as limits
from stormline.telemetry.timeline import AttemptRecord, CallRecord

NOW_MS = 1_800_000_000_000
ORIGIN = Origin("demo", "device-1", "ann", "linux", "stormline/0.1")


def _record(**fields: Any) -> CallRecord:
    defaults: dict[str, Any] = {
        "call_id": "c1",
        "started_at_ms": NOW_MS - 100,
        "method": "GET",
        "host": "api.example",
        "path": "/",
        "total_ms": 5.0,
    }
    return CallRecord(**(defaults | fields))


def test_clean_row_has_exactly_the_columns_of_the_store() -> None:
    row = clean(_record(), ORIGIN, NOW_MS)
    assert not isinstance(row, Bad)
    assert set(row) == {column.name for column in schema.COLUMNS}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"total_ms": math.nan}, "duration"),
        ({"total_ms": -0.001}, "duration"),
        ({"total_ms": math.inf}, "duration"),
        ({"total_ms": limits.REPORT_DURATION_MS_MAX * 2}, "duration"),
        ({"stages_ms": {"tls": math.nan}}, "duration"),
        ({"started_at_ms": -1}, "time"),
        ({"started_at_ms": 2**63}, "time"),
        ({"status": -1}, "number"),
        ({"status": 70000}, "number"),
        ({"family": 5}, "number"),
        ({"bytes_up": 2**63}, "number"),
        ({"bytes_down": -1}, "number"),
        ({"host": ""}, "nameless"),
        ({"call_id": ""}, "nameless"),
        ({"host": "h" * 254}, "text"),
        ({"path": "/" * 1025}, "text"),
        ({"business": "b" * 129}, "text"),
        ({"failure": "\ud800"}, "text"),
        ({"attempts": [AttemptRecord(means="long")] * 33}, "attempts"),
        ({"attempts": [AttemptRecord(means="m" * 129)]}, "text"),
        ({"attempts": [AttemptRecord(means="long", duration_ms=math.nan)]}, "duration"),
        ({"attempts": [AttemptRecord(means="long", start_ms=-1.0)]}, "duration"),
    ],
)
def test_clean_record_with_a_defect_is_named_bad(fields: dict[str, Any], kind: str) -> None:
    assert clean(_record(**fields), ORIGIN, NOW_MS) == Bad(kind)


@pytest.mark.parametrize(
    ("offset_s", "off"),
    [
        (0, False),
        (limits.REPORT_EARLY_S, False),
        (limits.REPORT_EARLY_S + 1, True),
        (-limits.REPORT_LATE_S, False),
        (-limits.REPORT_LATE_S - 1, True),
    ],
)
def test_clean_start_far_from_arrival_is_flagged_and_moved(offset_s: float, off: bool) -> None:
    started = NOW_MS + int(offset_s * 1000)
    row = clean(_record(started_at_ms=started), ORIGIN, NOW_MS)
    assert not isinstance(row, Bad)
    assert (row["clock_off"], row["started_at"]) == (off, NOW_MS if off else started)


def test_clean_unknown_stage_is_left_out_and_the_rest_kept() -> None:
    row = clean(_record(stages_ms={"warp": -5.0, "tls": 2.0}), ORIGIN, NOW_MS)
    assert not isinstance(row, Bad)
    assert row["tls_ms"] == 2.0
    assert row["connect_ms"] is None
    assert "warp_ms" not in row


def test_clean_overlong_report_head_is_cut_not_refused() -> None:
    row = clean(_record(), Origin("demo", "d", platform="p" * 500, client="\ud800x"), NOW_MS)
    assert not isinstance(row, Bad)
    assert row["platform"] == "p" * limits.REPORT_TEXT_CHARS_MAX
    assert row["client"] == "?x"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"ok_network": True, "ok_http": True}, ""),
        ({"ok_network": True, "ok_http": True, "ok_parse": True, "failure": "timeout"}, ""),
        ({"ok_network": True, "ok_http": True, "ok_parse": False}, "parse"),
        ({"ok_network": True, "status": 502}, "http-502"),
        ({"ok_network": True, "status": 502, "failure": "upstream"}, "upstream"),
        ({}, "unknown"),
        ({"failure": "tls"}, "tls"),
    ],
)
def test_clean_kind_names_why_the_business_failed(fields: dict[str, Any], kind: str) -> None:
    row = clean(_record(**fields), ORIGIN, NOW_MS)
    assert not isinstance(row, Bad)
    assert row["kind"] == kind
    assert row["ok"] is (kind == "")
