"""Tables of the analytics store, and how they come to be.

`COLUMNS` is the one list of what a stored call holds: the newest table, the inserts and the rows all follow it; and
`DIAGNOSIS_COLUMNS` that of a stored diagnosis.
`MIGRATIONS` says how any store gets there, in order: the first step makes the newest table, every later one changes
a table that was made before it (`ADD COLUMN IF NOT EXISTS` and the like) and finds nothing to do on a new one.

Attempts are nested arrays inside the call, not a table of their own: a report then is one insert into one table,
so a call and its attempts are stored together or not at all and one `fsync` covers both. A call has a few attempts,
and `ARRAY JOIN attempts` gives one line each where a question is about attempts.

Partitions, TTL and order follow `received_at`, our own clock, never `started_at`, the device's: a million wrong
device clocks must not make a million partitions.
"""

from typing import Final, NamedTuple

import pyarrow as pa

from stormline.core import limits_netlog
from stormline.core import limits_platform as limits
from stormline.telemetry.timeline import STAGES


class Column(NamedTuple):
    """One column: its name, its type in ClickHouse and the Arrow type it is sent as."""

    name: str
    sql: str
    arrow: pa.DataType


_TIME = "DateTime64(3, 'UTC')"
_WORD = "LowCardinality(String)"
_ms = pa.timestamp("ms", "UTC")
_text = pa.string()
_texts = pa.list_(pa.string())

COLUMNS: Final[tuple[Column, ...]] = (
    Column("received_at", _TIME, _ms),
    Column("started_at", _TIME, _ms),
    Column("clock_off", "Bool", pa.bool_()),
    Column("app", _WORD, _text),
    Column("device", "String", _text),
    Column("user", "String", _text),
    Column("platform", _WORD, _text),
    Column("client", _WORD, _text),
    Column("call_id", "String", _text),
    Column("method", _WORD, _text),
    Column("host", _WORD, _text),
    Column("path", "String", _text),
    Column("business", _WORD, _text),
    Column("status", "UInt16", pa.uint16()),
    Column("ok_network", "Bool", pa.bool_()),
    Column("ok_http", "Bool", pa.bool_()),
    Column("ok_parse", "Nullable(Bool)", pa.bool_()),
    Column("ok", "Bool", pa.bool_()),
    Column("kind", _WORD, _text),
    Column("failure", _WORD, _text),
    Column("phase", _WORD, _text),
    Column("plan_version", "UInt64", pa.uint64()),
    Column("network", _WORD, _text),
    Column("family", "UInt8", pa.uint8()),
    Column("means", _WORD, _text),
    Column("address", "String", _text),
    Column("bytes_up", "UInt64", pa.uint64()),
    Column("bytes_down", "UInt64", pa.uint64()),
    Column("total_ms", "Float32", pa.float32()),
    *(Column(f"{stage}_ms", "Nullable(Float32)", pa.float32()) for stage in STAGES),
    Column("attempts.means", "Array(LowCardinality(String))", _texts),
    Column("attempts.address", "Array(String)", _texts),
    Column("attempts.carrier", "Array(LowCardinality(String))", _texts),
    Column("attempts.reused", "Array(Bool)", pa.list_(pa.bool_())),
    Column("attempts.failure", "Array(LowCardinality(String))", _texts),
    Column("attempts.phase", "Array(LowCardinality(String))", _texts),
    Column("attempts.maybe_delivered", "Array(Bool)", pa.list_(pa.bool_())),
    Column("attempts.start_ms", "Array(Float32)", pa.list_(pa.float32())),
    Column("attempts.duration_ms", "Array(Float32)", pa.list_(pa.float32())),
)

DIAGNOSIS_COLUMNS: Final[tuple[Column, ...]] = (
    Column("received_at", _TIME, _ms),
    Column("started_at", _TIME, _ms),
    Column("clock_off", "Bool", pa.bool_()),
    Column("app", _WORD, _text),
    Column("device", "String", _text),
    Column("user", "String", _text),
    Column("platform", _WORD, _text),
    Column("client", _WORD, _text),
    Column("host", _WORD, _text),
    Column("url", "String", _text),
    Column("network", _WORD, _text),
    Column("automatic", "Bool", pa.bool_()),
    Column("verdict", _WORD, _text),
    Column("confidence", _WORD, _text),
    Column("why", "String", _text),
    Column("took_ms", "Float32", pa.float32()),
    Column("checks", "String", _text),
)

ARROW: Final = pa.schema([(column.name, column.arrow) for column in COLUMNS])

DIAGNOSIS_ARROW: Final = pa.schema([(column.name, column.arrow) for column in DIAGNOSIS_COLUMNS])

# fsync_*: an acknowledged report survives a power cut too, for no measurable time (10 ms for 500 rows either way).
_CREATE_CALLS = f"""
CREATE TABLE IF NOT EXISTS calls (
    {", ".join(f"`{column.name}` {column.sql}" for column in COLUMNS)}
)
ENGINE = MergeTree
PARTITION BY toDate(received_at)
ORDER BY (toStartOfMinute(received_at), app, host, received_at)
TTL toDate(received_at) + INTERVAL {limits.STORE_DAYS} DAY DELETE
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1, ttl_only_drop_parts = 1
"""

# What users say (`apm.feedback`); the log is in base64, as columns of text hold text.
_CREATE_FEEDBACK = f"""
CREATE TABLE IF NOT EXISTS feedback (
    received_at DateTime64(3, 'UTC'),
    said_at DateTime64(3, 'UTC'),
    app LowCardinality(String),
    id String,
    device String,
    user String,
    platform LowCardinality(String),
    client LowCardinality(String),
    text String,
    log_bytes UInt32,
    log String
)
ENGINE = ReplacingMergeTree
ORDER BY (app, id)
TTL toDate(received_at) + INTERVAL {limits_netlog.FEEDBACK_DAYS} DAY DELETE
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1
"""
_CREATE_DIAGNOSES = f"""
CREATE TABLE IF NOT EXISTS diagnoses (
    {", ".join(f"`{column.name}` {column.sql}" for column in DIAGNOSIS_COLUMNS)}
)
ENGINE = MergeTree
PARTITION BY toDate(received_at)
ORDER BY (toStartOfMinute(received_at), app, host, received_at)
TTL toDate(received_at) + INTERVAL {limits.STORE_DAYS} DAY DELETE
SETTINGS fsync_after_insert = 1, fsync_part_directory = 1, ttl_only_drop_parts = 1
"""

CREATE_VERSIONS: Final = """
CREATE TABLE IF NOT EXISTS schema_versions (version UInt32, applied_at DateTime('UTC') DEFAULT now('UTC'))
ENGINE = MergeTree ORDER BY version SETTINGS fsync_after_insert = 1
"""
READ_VERSION: Final = "SELECT max(version) FROM schema_versions"
RECORD_VERSION: Final = "INSERT INTO schema_versions (version) VALUES ({version:UInt32})"

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (_CREATE_CALLS,),
    ("ALTER TABLE calls ADD COLUMN IF NOT EXISTS plan_version UInt64",),
    (_CREATE_FEEDBACK,),
    (_CREATE_DIAGNOSES,),
)
"""Step N (from 1) is a list of statements, each of which may run twice: a crash can fall between a statement and the
record that it ran."""
