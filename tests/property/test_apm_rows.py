"""Whatever devices send, cleaning names it good or bad, and what is good the store's types can hold."""

from typing import Any

import msgspec
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from stormline.apm import schema
from stormline.apm.rows import Bad, Origin, clean, clean_diagnosis
from stormline.core.checks import CheckName, CheckState
from stormline.telemetry import report
from stormline.telemetry.diagnosis import Check, Diagnosis
from stormline.telemetry.timeline import STAGES, AttemptRecord, CallRecord

NOW_MS = 1_800_000_000_000

_texts = st.text(st.characters(codec=None), max_size=200) | st.sampled_from(["", "x" * 5000, "\ud800", "a\0b"])
_floats = st.floats() | st.floats(0, 1000)
_ints = st.integers() | st.integers(0, 600) | st.sampled_from([2**63 - 1, 2**63, 2**64, -1])
_attempts = st.builds(
    AttemptRecord, means=_texts, address=_texts, carrier=_texts, reused=st.booleans(), failure=_texts, phase=_texts,
    maybe_delivered=st.booleans(), start_ms=_floats, duration_ms=_floats,
)  # fmt: skip


def _records(texts: Any, floats: Any, ints: Any, attempts: Any) -> Any:
    return st.builds(
        CallRecord, call_id=texts, started_at_ms=ints | st.just(NOW_MS), method=texts, host=texts, path=texts,
        business=texts, status=ints, ok_network=st.booleans(), ok_http=st.booleans(),
        ok_parse=st.none() | st.booleans(), failure=texts, phase=texts, network=texts, family=ints, means=texts,
        address=texts, bytes_up=ints, bytes_down=ints, total_ms=floats,
        stages_ms=st.dictionaries(st.sampled_from(STAGES) | texts, floats, max_size=12),
        attempts=st.lists(attempts, max_size=4),
    )  # fmt: skip


_wild = _records(_texts, _floats, _ints, _attempts)
# Mostly good, so that rows get through and their types are put to the test.
_good_texts = st.text(min_size=1, max_size=100)
_good_floats = st.floats(0, 1e6)
_mild = _records(
    _good_texts, _good_floats, st.sampled_from([0, 4, 6]),
    st.builds(AttemptRecord, means=_good_texts, start_ms=_good_floats, duration_ms=_good_floats, reused=st.booleans()),
)  # fmt: skip


@given(record=_wild | _mild, platform=_texts)
def test_clean_of_any_record_gives_bad_or_a_row_the_store_can_hold(record: CallRecord, platform: str) -> None:
    row = clean(record, Origin("demo", "d", platform=platform), NOW_MS)
    if isinstance(row, Bad):
        assert row.kind
        return
    table = pa.Table.from_pylist([row], schema=schema.ARROW)
    table.validate(full=True)
    assert table.num_rows == 1


@given(record=_mild)
def test_clean_of_sensible_records_gives_rows(record: CallRecord) -> None:
    assert not isinstance(clean(record, Origin("demo", "d"), NOW_MS), Bad)


_values = st.recursive(
    st.none() | st.booleans() | _floats | _ints | _texts | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)
_diagnoses = st.builds(
    Diagnosis, url=_texts, host=_texts, network=_texts, automatic=st.booleans(), started_at=_floats | st.just(1.8e9),
    took_s=_floats, verdict=_texts | st.just("ok"), confidence=_texts, hint=_texts, why=_texts,
    checks=st.lists(
        st.builds(Check, name=st.sampled_from(CheckName), state=st.sampled_from(CheckState), took_s=_floats,
                  detail=_texts, data=st.dictionaries(_texts, _values, max_size=4)),
        max_size=3,
    ) | st.just([Check(name=CheckName.TCP, state=CheckState.OK)] * 80),
)  # fmt: skip


@given(diagnosis=_diagnoses)
def test_clean_of_any_diagnosis_gives_bad_or_a_row_the_store_can_hold(diagnosis: Diagnosis) -> None:
    row = clean_diagnosis(diagnosis, Origin("demo", "d"), NOW_MS)
    if isinstance(row, Bad):
        assert row.kind
        return
    pa.Table.from_pylist([row], schema=schema.DIAGNOSIS_ARROW).validate(full=True)
    assert set(row) == {column.name for column in schema.DIAGNOSIS_COLUMNS}
    assert len(msgspec.json.decode(row["checks"])) == len(diagnosis.checks)


@given(data=st.binary(max_size=400))
def test_salvage_of_any_bytes_gives_a_report_or_value_error(data: bytes) -> None:
    try:
        salvaged = report.salvage(data)
    except ValueError:
        return
    assert salvaged.malformed >= 0


@given(records=st.lists(_mild, max_size=5), junk=st.lists(st.sampled_from([None, 5, "x", [], {"host": 1}]), max_size=5))
def test_salvage_keeps_every_good_record_beside_any_junk(records: list[CallRecord], junk: list[Any]) -> None:
    calls = [msgspec.to_builtins(record) for record in records]
    mixed = [item for pair in zip(calls, junk, strict=False) for item in pair] + calls[len(junk) :] + junk[len(calls) :]
    salvaged = report.salvage(msgspec.msgpack.encode({"calls": mixed}))
    assert salvaged.report.calls == records
    assert salvaged.malformed == len(junk)
