"""From what a driver told to the result: percentiles, kinds, trust, and the file it is kept in."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_lab
from stormline.core.errors import ConfigError, PlatformError
from stormline.lab import results, workload
from stormline.lab.results import Fault, Outcome, Result, RunKey, Traffic, Trust

KEY = RunKey(profile="wifi", client="httpx2", seed=1, requests=4, duration_s=10.0)
TRAFFIC = Traffic(connections=2, bytes_up=1000, bytes_down=5000, duplicates=1)
PROMISED = [
    "profile", "client", "seed", "requests", "ok", "p50_s", "p95_s", "p99_s", "failures", "connections", "bytes_up",
    "bytes_down", "duplicates",
]  # fmt: skip


def line(id: int, end_s: float, kind: str = "") -> dict[str, Any]:
    return {"id": id, "start_s": 0.0, "end_s": end_s, "ok": kind == "", "kind": kind, "detail": ""}


def result(**changes: Any) -> Result:
    found = [Outcome(0, 0.2, ""), Outcome(1, 4.0, ""), Outcome(2, 10.0, "timeout"), Outcome(3, 0.1, "tls")]
    made = results.summarise(KEY, found, TRAFFIC, Trust(), events=[Fault(1, "dark", 2)], cpu_s=0.5)
    return msgspec.structs.replace(made, **changes)


# -- percentiles ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([1.0, 2.0], 0.5, 1.0), ([1.0, 2.0, 3.0, 4.0], 0.95, 4.0),
     ([float(n) for n in range(1, 101)], 0.95, 95.0), ([float(n) for n in range(1, 101)], 0.99, 99.0)],
)  # fmt: skip
def test_percentile_is_the_nearest_rank(values: list[float], share: float, expected: float | None) -> None:
    assert results.percentile(values, share) == expected


@given(values=st.lists(st.floats(0, 100), min_size=1), share=st.floats(0, 1))
def test_percentile_is_a_value_that_the_share_does_not_pass(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = results.percentile(ordered, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


# -- outcomes ---------------------------------------------------------------------------------------------------------
def test_outcomes_join_asks_with_what_was_told() -> None:
    asks = [workload.Ask(0, 1.0, 10), workload.Ask(1, 2.0, 10), workload.Ask(2, 3.0, 10)]
    found = results.outcomes(asks, [line(0, 1.25), line(1, 12.0, "timeout")])
    assert found == [Outcome(1.0, 0.25, ""), Outcome(2.0, 10.0, "timeout"), Outcome(3.0, 10.0, "other")]


def test_outcomes_time_counts_from_the_moment_it_was_due() -> None:
    late = {**line(0, 3.0), "start_s": 2.9}
    assert results.outcomes([workload.Ask(0, 1.0, 10)], [late])[0].took_s == 2.0


def test_outcomes_answer_after_the_users_patience_is_no_success() -> None:
    end_s = workload.PATIENCE_S + limits_lab.LAB_LATE_END_S + 0.01
    assert results.outcomes([workload.Ask(0, 0.0, 10)], [line(0, end_s)])[0].kind == "timeout"


def test_outcomes_failure_without_a_kind_is_other() -> None:
    told = {**line(0, 1.0), "ok": False}
    assert results.outcomes([workload.Ask(0, 0.0, 10)], [told])[0].kind == "other"


def test_examples_give_the_most_frequent_words_of_each_kind() -> None:
    lines = [{**line(n, 1.0, "timeout"), "detail": "ReadTimeout: "} for n in range(3)]
    lines += [{**line(3, 1.0, "timeout"), "detail": "PoolTimeout: "}]
    lines += [{**line(4, 1.0, "tls"), "detail": "bad"}, line(5, 1.0)]
    assert results.examples(lines) == {"timeout": "ReadTimeout:  (3 of 4)", "tls": "bad (1 of 1)"}


def test_duplicates_count_what_came_again() -> None:
    assert results.count_duplicates({"0": 1, "1": 3, "2": 2}) == 3
    assert results.count_duplicates({}) == 0


# -- the result -------------------------------------------------------------------------------------------------------
def test_result_counts_and_names() -> None:
    made = result()
    assert (made.ok, made.ok_3s, made.p50_s, made.p95_s, made.p99_s) == (2, 1, 0.2, 4.0, 4.0)
    assert made.failures == {"timeout": 1, "tls": 1}
    assert made.key() == KEY


def test_result_without_success_has_no_times() -> None:
    made = results.summarise(KEY, [Outcome(0, 10, "timeout")], TRAFFIC, Trust())
    assert (made.p50_s, made.p95_s, made.p99_s) == (None, None, None)


def test_result_json_begins_with_the_promised_fields() -> None:
    shown = results.data(result(), whole=False)
    assert list(shown)[: len(PROMISED)] == PROMISED
    assert "outcomes" not in shown
    json.dumps(shown)


@pytest.mark.parametrize(
    ("trust", "word"),
    [
        (Trust(wait_p99_ms=limits_lab.LAB_WAIT_P99_MS_MAX + 1), "p99"),
        (Trust(wait_max_ms=limits_lab.LAB_WAIT_MS_MAX + 1), "core"),
        (Trust(server_lag_ms=limits_lab.LAB_WAIT_MS_MAX + 1), "servers"),
        (Trust(shaper_p99_ms=limits_lab.LAB_SHAPER_LATE_MS_MAX + 1), "shaper"),
        (Trust(problem="the client ended early"), "ended early"),
    ],
)
def test_trust_names_what_was_out_of_bounds(trust: Trust, word: str) -> None:
    assert word in results.summarise(KEY, [], TRAFFIC, trust).distrust


def test_trust_within_bounds_says_nothing() -> None:
    assert Trust(wait_p99_ms=3, wait_max_ms=40, lag_max_ms=900, server_lag_ms=30, shaper_p99_ms=0.2).reason() == ""


# -- the file ---------------------------------------------------------------------------------------------------------
def test_file_gives_back_what_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lab.jsonl"
    other = result(seed=2)
    for each in (result(), other):
        results.append(path, each)
    assert results.read(path) == [result(), other]


def test_file_run_that_was_repeated_counts_once_with_its_last_result(tmp_path: Path) -> None:
    path = tmp_path / "lab.jsonl"
    results.append(path, result(ok=1))
    results.append(path, result(ok=3))
    assert [each.ok for each in results.read(path)] == [3]


def test_file_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lab.jsonl"
    results.append(path, result())
    with path.open("a") as file:
        file.write('{"profile":"wi')
    assert results.read(path) == [result()]


@pytest.mark.parametrize("broken", ['{"profile":"wifi"}\n', "nonsense\n", "[]\n"])
def test_file_line_that_is_no_result_is_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "lab.jsonl"
    path.write_text(broken)
    with pytest.raises(ConfigError, match=r"lab\.jsonl, line 1"):
        results.read(path)


def test_file_missing_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=r"nowhere\.jsonl"):
        results.read(tmp_path / "nowhere.jsonl")


# -- what was measured ------------------------------------------------------------------------------------------------
def test_bytes_of_the_runs_that_are_kept_are_at_most_a_fifth_above_the_best_peers() -> None:
    folder = Path(__file__).parents[2] / "bench/results"
    kept = json.loads((folder / "lab.json").read_text())["runs"]
    for name in ("lab_engine", "lab_metered"):
        kept += json.loads((folder / f"{name}.json").read_text())
    runs: dict[tuple[str, float, str], dict[int, dict[str, Any]]] = {}
    for each in kept:
        if not each.get("without"):
            runs.setdefault((each["profile"], each["duration_s"], each["client"]), {})[each["seed"]] = each

    def total(key: tuple[str, float, str], what: str, seeds: Iterable[int]) -> int:
        return sum(int(runs[key][seed][what]) for seed in seeds)

    compared = 0
    for profile, duration_s, client in runs:
        ours, seeds = (profile, duration_s, client), runs[profile, duration_s, client].keys()
        peers = [key for key in runs if key[:2] == ours[:2] and not key[2].startswith("stormline")]
        peers = [key for key in peers if seeds <= runs[key].keys() and total(key, "ok", seeds)]
        if not client.startswith("stormline") or not peers:
            continue
        carried = {key: total(key, "bytes_up", seeds) + total(key, "bytes_down", seeds) for key in [*peers, ours]}
        # The best is the one that answered most; of several the one that did it with the fewest bytes.
        best = max(peers, key=lambda key: (total(key, "ok", seeds), -carried[key]))
        assert carried[ours] <= 1.2 * carried[best], (ours, best)
        assert total(ours, "ok", seeds) >= 0.995 * total(best, "ok", seeds)
        compared += 1
    assert compared >= 45
