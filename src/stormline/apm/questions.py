"""What operators ask the store: the SQL, and the shape of the answers.

Windows count by arrival (`received_at`): a report is in every answer from the moment it is acknowledged, whatever
the device's clock says.
"""

from typing import Any

import msgspec

from stormline.apm.judging import AddressCounts
from stormline.apm.store import Answer, Store
from stormline.core import limits_platform as limits
from stormline.telemetry.timeline import STAGES

_IN_WINDOW = """
received_at >= fromUnixTimestamp64Milli({since:Int64}) AND ({app:String} = '' OR app = {app:String})
"""

_TOP = f"""
SELECT
    grouping(host) AS is_total,
    host,
    count() AS calls,
    countIf(ok) AS successes,
    countIf(ok_network) AS answered,
    countIf(ok_network AND ok_http) AS http_successes,
    countIf(ok_network AND ok_http AND ok_parse IS NOT NULL) AS judged,
    countIf(ok_network AND ok_http AND ok_parse = 1) AS parse_successes,
    quantiles(0.5, 0.95, 0.99)(total_ms) AS quantiles_ms,
    sumMapIf(map(toString(kind), toUInt64(1)), NOT ok) AS failures
FROM calls
WHERE {_IN_WINDOW}
GROUP BY GROUPING SETS ((host), ())
ORDER BY is_total DESC, calls DESC, host
LIMIT {limits.APM_HOSTS_MAX + 1}
"""  # noqa: S608 - constants only; values go in as parameters

_SERIES = f"""
SELECT
    host,
    intDiv(toUnixTimestamp64Milli(received_at) - {{since:Int64}}, {{step:Int64}}) AS point,
    count() AS calls,
    countIf(ok) AS successes
FROM calls
WHERE {_IN_WINDOW}
GROUP BY host, point
"""  # noqa: S608 - as above

_PLAIN = (
    "app", "device", "user", "platform", "client", "call_id", "method", "host", "path", "business", "status", "ok",
    "ok_network", "ok_http", "ok_parse", "kind", "failure", "phase", "plan_version", "network", "family", "means",
    "address", "bytes_up", "bytes_down", "total_ms", "clock_off",
)  # fmt: skip
_ATTEMPT = (
    "means", "address", "carrier", "reused", "failure", "phase", "maybe_delivered", "start_ms", "duration_ms",
)  # fmt: skip

_CALLS = f"""
SELECT
    toUnixTimestamp64Milli(started_at) AS started_at_ms,
    toUnixTimestamp64Milli(received_at) AS received_at_ms,
    {", ".join(_PLAIN)},
    {", ".join(f"{stage}_ms" for stage in STAGES)},
    {", ".join(f"attempts.{name} AS attempts_{name}" for name in _ATTEMPT)}
FROM calls
WHERE {_IN_WINDOW} AND ({{host:String}} = '' OR host = {{host:String}})
ORDER BY received_at DESC, started_at DESC
LIMIT {{limit:UInt32}}
"""  # noqa: S608 - as above


_ARMS = """
SELECT plan_version, count() AS calls, countIf(ok) AS successes
FROM calls
WHERE received_at >= fromUnixTimestamp64Milli({since:Int64}) AND plan_version IN ({new:UInt64}, {old:UInt64})
GROUP BY plan_version
"""

_ADDRESSES = f"""
SELECT
    address,
    count() AS tries,
    countIf(failed) AS failures,
    uniqExact(device) AS devices,
    uniqExactIf(device, failed) AS failing
FROM (
    SELECT
        device,
        attempts.address AS address,
        attempts.failure NOT IN ('', 'cancelled')
            AND NOT match(attempts.failure, '^(client|gateway)[.]')
            AND NOT (startsWith(attempts.carrier, 'sl-') AND startsWith(attempts.failure, 'http.')) AS failed
    FROM calls ARRAY JOIN attempts
    WHERE {_IN_WINDOW} AND attempts.address != ''
)
GROUP BY address
ORDER BY tries DESC, address
LIMIT {limits.APM_ADDRESSES_MAX}
"""  # noqa: S608 - constants only; values go in as parameters

_DIAGNOSIS_PLAIN = (
    "app", "device", "user", "platform", "client", "host", "url", "network", "automatic", "verdict", "confidence",
    "why", "took_ms", "clock_off", "checks",
)  # fmt: skip
_OF_DIAGNOSES = f"""
FROM diagnoses
WHERE {_IN_WINDOW}
    AND ({{host:String}} = '' OR host = {{host:String}}) AND ({{verdict:String}} = '' OR verdict = {{verdict:String}})
"""
_DIAGNOSES = f"""
SELECT
    toUnixTimestamp64Milli(started_at) AS started_at_ms,
    toUnixTimestamp64Milli(received_at) AS received_at_ms,
    {", ".join(_DIAGNOSIS_PLAIN)}
{_OF_DIAGNOSES}
ORDER BY received_at DESC, started_at DESC
LIMIT {{limit:UInt32}}
"""
_VERDICTS = f"""
SELECT verdict, count() AS times, uniqExact(device) AS devices
{_OF_DIAGNOSES}
GROUP BY verdict
ORDER BY times DESC, verdict
LIMIT {limits.APM_FAILURE_KINDS_MAX}
"""


def _pct(part: int, whole: int) -> float | None:
    return round(100.0 * part / whole, 3) if whole else None


def _failures(kinds: dict[str, int]) -> dict[str, int]:
    """Most frequent first; what does not fit is summed as `other`."""
    ranked = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    named, rest = ranked[: limits.APM_FAILURE_KINDS_MAX], ranked[limits.APM_FAILURE_KINDS_MAX :]
    failures = dict(named)
    if rest:
        failures["other"] = failures.get("other", 0) + sum(count for _, count in rest)
    return failures


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    calls = row["calls"]
    p50, p95, p99 = (round(value, 3) if calls else None for value in row["quantiles_ms"])
    return {
        "calls": calls,
        "success_pct": _pct(row["successes"], calls),
        "network_pct": _pct(row["answered"], calls),
        "http_pct": _pct(row["http_successes"], row["answered"]),
        "parse_pct": _pct(row["parse_successes"], row["judged"]),
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "failures": _failures(row["failures"]),
    }


async def top(store: Store, *, since_ms: int, app: str) -> dict[str, Any]:
    """Health per host, hosts with most calls first, at most `limits.APM_HOSTS_MAX`, and over all hosts.

    `success_pct` is the business's: network, HTTP and (where given) parse held. The others are kept apart, each a
    share of what reached it: `network_pct` of all calls, `http_pct` of those answered, `parse_pct` of those with a
    good status and a verdict; None where nothing did. Times are of all calls, failed ones too: what users waited.

    Args:
        store: where to ask.
        since_ms: wall time from which arrivals count.
        app: only this app; empty for all.

    Raises:
        StoreError: the store cannot answer now.
    """
    answer = await store.query(_TOP, {"since": since_ms, "app": app})
    total = next((row for row in answer if row["is_total"]), None)
    hosts = [{"host": row["host"], **_summary(row)} for row in answer if not row["is_total"]]
    if total is None:
        total = {"calls": 0, "successes": 0, "answered": 0, "http_successes": 0, "judged": 0, "parse_successes": 0,
                 "quantiles_ms": (0.0, 0.0, 0.0), "failures": {}}  # fmt: skip
    return {"total": _summary(total), "hosts": hosts}


async def series(store: Store, *, since_ms: int, step_ms: int, points: int, app: str) -> dict[str, Any]:
    """Calls and successes over time: over all hosts, and for the `limits.APM_SERIES_HOSTS_MAX` busiest.

    Each list has `points` numbers; point N covers `since_ms + N * step_ms` and the `step_ms` after it.

    Raises:
        StoreError: the store cannot answer now.
    """
    answer = await store.query(_SERIES, {"since": since_ms, "step": step_ms, "app": app})
    return _lines(answer, points)


def _lines(answer: Answer, points: int) -> dict[str, Any]:
    def line() -> dict[str, list[int]]:
        return {"calls": [0] * points, "successes": [0] * points}

    total = line()
    hosts: dict[str, dict[str, list[int]]] = {}
    for row in answer:
        point = min(row["point"], points - 1)  # what arrived while we asked belongs to the last point
        for target in (total, hosts.setdefault(row["host"], line())):
            target["calls"][point] += row["calls"]
            target["successes"][point] += row["successes"]
    busiest = sorted(hosts.items(), key=lambda item: (-sum(item[1]["calls"]), item[0]))
    return {"total": total, "hosts": dict(busiest[: limits.APM_SERIES_HOSTS_MAX])}


async def calls(store: Store, *, since_ms: int, app: str, host: str, limit: int) -> list[dict[str, Any]]:
    """The latest calls, newest arrival first, each with its stages and attempts.

    Args:
        store: where to ask.
        since_ms: wall time from which arrivals count.
        app: only this app; empty for all.
        host: only this host; empty for all.
        limit: at most this many.

    Raises:
        StoreError: the store cannot answer now.
    """
    answer = await store.query(_CALLS, {"since": since_ms, "app": app, "host": host, "limit": limit})
    return [_call(row) for row in answer]


def _call(row: dict[str, Any]) -> dict[str, Any]:
    columns = [row[f"attempts_{name}"] for name in _ATTEMPT]
    return {
        "started_at_ms": row["started_at_ms"],
        "received_at_ms": row["received_at_ms"],
        **{name: row[name] for name in _PLAIN},
        "stages_ms": {stage: row[f"{stage}_ms"] for stage in STAGES if row[f"{stage}_ms"] is not None},
        "attempts": [dict(zip(_ATTEMPT, values, strict=True)) for values in zip(*columns, strict=True)],
    }


async def arms(store: Store, *, since_ms: int, new: int, old: int) -> dict[int, tuple[int, int]]:
    """Calls and successes by version of the plan they were made by, for two versions; one without calls is absent.

    Raises:
        StoreError: the store cannot answer now.
    """
    answer = await store.query(_ARMS, {"since": since_ms, "new": new, "old": old})
    return {row["plan_version"]: (row["calls"], row["successes"]) for row in answer}


async def addresses(store: Store, *, since_ms: int, app: str = "") -> list[AddressCounts]:
    """How attempts at each address fared, the busiest `limits.APM_ADDRESSES_MAX` of them.

    What is not the address's fault is no failure of it: an attempt that was given up for another one or by the caller,
    one that the client itself refused, and what a gateway says of those behind it.

    Args:
        store: where to ask.
        since_ms: wall time from which arrivals count.
        app: only this app; empty for all.

    Raises:
        StoreError: the store cannot answer now.
    """
    answer = await store.query(_ADDRESSES, {"since": since_ms, "app": app})
    return [AddressCounts(**row) for row in answer]


async def diagnoses(
    store: Store, *, since_ms: int, app: str, host: str, verdict: str, limit: int
) -> dict[str, list[dict[str, Any]]]:
    """Diagnoses: how many of each verdict from how many devices, and the latest, newest arrival first.

    Args:
        store: where to ask.
        since_ms: wall time from which arrivals count.
        app: only this app; empty for all.
        host: only about this host; empty for all.
        verdict: only with this verdict; empty for all.
        limit: at most this many of the latest.

    Raises:
        StoreError: the store cannot answer now.
    """
    asked = {"since": since_ms, "app": app, "host": host, "verdict": verdict}
    counts = await store.query(_VERDICTS, asked)
    latest = await store.query(_DIAGNOSES, {**asked, "limit": limit})
    return {
        "verdicts": [dict(row) for row in counts],
        "diagnoses": [{**row, "checks": msgspec.json.decode(row["checks"])} for row in latest],
    }


async def answers(store: Store) -> None:
    """Return where the store answers.

    Raises:
        StoreError: it does not.
    """
    await store.query("SELECT count() FROM schema_versions", {})
