"""What is run: plans, groups, clients and their Pythons, means left out, and the names of failures."""

import asyncio
import socket
import ssl
import sys
from pathlib import Path

import pytest

from stormline.core.errors import ConfigError
from stormline.lab import ablation, clients, profiles, results, run
from stormline.lab.drivers import _harness as harness
from stormline.lab.drivers import _taken_out
from stormline.lab.results import Outcome, Result, RunKey, Traffic, Trust


# -- plan -------------------------------------------------------------------------------------------------------------
def test_plan_has_every_run_once() -> None:
    keys = run.plan(["wifi", "elevator", "wifi"], ["httpx2", "pycurl"], [1, 2], duration_s=30.0)
    assert len(keys) == len(set(keys)) == 8
    assert {key.duration_s for key in keys} == {30.0}


def test_plan_shorter_run_keeps_the_rate() -> None:
    profile = profiles.get("wifi")
    (key,) = run.plan(["wifi"], ["httpx2"], [1], duration_s=profile.duration_s / 4)
    assert key.requests == round(profile.requests / 4)
    (whole,) = run.plan(["wifi"], ["httpx2"], [1])
    assert (whole.requests, whole.duration_s) == (profile.requests, profile.duration_s)


def test_plan_means_are_left_out_of_our_client_alone() -> None:
    keys = run.plan(["wifi"], ["stormline", "httpx2"], [1], without=["hedge", "hedge"])
    assert [(key.client, key.without) for key in keys] == [("stormline", ("hedge",)), ("httpx2", ())]


@pytest.mark.parametrize(
    ("profile", "client", "options", "word"),
    [
        ("nowhere", "httpx2", {}, "nowhere"),
        ("wifi", "netscape", {}, "netscape"),
        ("wifi", "httpx2", {"without": ["magic"]}, "magic"),
        ("wifi", "httpx2", {"requests": 0}, "requests"),
        ("wifi", "httpx2", {"duration_s": -1.0}, "duration"),
        ("wifi", "httpx2", {"duration_s": float("nan")}, "duration"),
    ],
)
def test_plan_unknown_word_or_number_is_named(profile: str, client: str, options: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        run.plan([profile], [client], [1], **options)


def test_groups_hold_one_profile_and_seed_and_no_more_than_the_jobs() -> None:
    keys = run.plan(["wifi", "elevator"], ["httpx2", "pycurl", "niquests"], [1, 2])
    made = list(run.groups(keys, 2))
    assert [key for group in made for key in group] == keys
    assert all(len(group) <= 2 and len({(key.profile, key.seed) for key in group}) == 1 for group in made)
    assert len(made) == 8


@pytest.mark.parametrize("jobs", [0, -1, 1000])
def test_run_all_jobs_out_of_range_are_refused(jobs: int) -> None:
    with pytest.raises(ConfigError, match="jobs"):
        run.run_all([], jobs=jobs, environ={})


def test_run_all_takes_what_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "lab.jsonl"
    (key,) = run.plan(["wifi"], ["stormline"], [1])
    kept = results.summarise(key, [], Traffic(connections=0, bytes_up=0, bytes_down=0, duplicates=0), Trust())
    results.append(path, kept)
    told = []
    assert run.run_all([key], jobs=1, out=path, environ={}, on_progress=told.append) == [kept]
    assert [event.what for event in told] == ["kept"]


class Doubtful:
    """Runs that the machine got in the way of: the first of each client, and all of niquests."""

    def __init__(self, *_: object) -> None:
        self.seen: list[RunKey] = []

    def run_group(self, group: list[RunKey]) -> list[Result]:
        found = []
        for key in group:
            late = key.client == "niquests" or key not in self.seen
            wait_ms = 900.0 - 100 * self.seen.count(key) if late else 1.0
            self.seen.append(key)
            traffic = Traffic(connections=0, bytes_up=0, bytes_down=0, duplicates=0)
            found.append(results.summarise(key, [], traffic, Trust(wait_max_ms=wait_ms)))
        return found


def test_run_all_repeats_once_what_is_not_to_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_Runner", Doubtful)
    monkeypatch.setattr(clients, "python_for", lambda *_: Path(sys.executable))
    keys = run.plan(["wifi"], ["httpx2", "niquests"], [1])
    told = []
    good, doubtful = run.run_all(keys, jobs=2, out=tmp_path / "lab.jsonl", environ={}, on_progress=told.append)
    assert (good.distrust, good.wait_max_ms) == ("", 1.0)
    assert "core: 800 ms" in doubtful.distrust  # the better one of both
    assert [event.what for event in told] == ["again", "again", "result", "result"]
    assert results.read(tmp_path / "lab.jsonl") == [good, doubtful]


# -- clients ----------------------------------------------------------------------------------------------------------
def test_clients_each_have_a_driver() -> None:
    assert all(client.driver.is_file() for client in clients.CLIENTS.values())
    drivers = {path.stem for path in clients.DRIVERS.glob("*.py") if not path.stem.startswith("_")}
    assert drivers == set(clients.CLIENTS)


def test_client_ours_runs_in_our_own_python() -> None:
    assert clients.python_for(clients.get("stormline"), {}) == Path(sys.executable)


def test_client_peer_runs_in_the_named_environment(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    assert clients.python_for(clients.get("niquests"), {clients.PEERS_VARIABLE: str(tmp_path)}) == python


def test_client_peer_that_is_nowhere_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make peers"):
        clients.python_for(clients.get("niquests"), {clients.PEERS_VARIABLE: str(tmp_path)})


def test_client_peer_that_we_have_ourselves_needs_no_environment(tmp_path: Path) -> None:
    assert clients.python_for(clients.get("httpx2"), {clients.PEERS_VARIABLE: str(tmp_path)}) == Path(sys.executable)


# -- ablation ---------------------------------------------------------------------------------------------------------
def test_split_tells_what_this_version_has() -> None:
    assert ablation.split(["long", "ip-direct", "quic"]) == (("long", "ip-direct"), ("quic",))


def made(client: str, seed: int, ok: int, *, without: tuple[str, ...] = (), bytes_down: int = 1000) -> Result:
    key = RunKey(profile="3g", client=client, seed=seed, requests=10, duration_s=10.0, without=without)
    found = [Outcome(0, 0.1, "")] * ok + [Outcome(0, 10.0, "timeout")] * (10 - ok)
    traffic = Traffic(connections=1, bytes_up=0, bytes_down=bytes_down, duplicates=0)
    return results.summarise(key, found, traffic, Trust(), no_effect=[])


def test_compare_pairs_runs_of_the_same_seed() -> None:
    runs = [
        made("stormline", 1, 10),
        made("stormline", 2, 9),
        made("stormline", 1, 7, without=("long",), bytes_down=500),
        made("stormline", 3, 0, without=("long",)),
        made("httpx2", 1, 1),
    ]
    (worth,) = ablation.compare(runs)
    assert (worth.without, worth.pairs, worth.success_points, worth.bytes_ratio) == (("long",), 1, 30.0, 2.0)
    assert worth.p95_s == 0
    assert ablation.label(runs[2]) == "stormline without long"


# -- kinds of failure -------------------------------------------------------------------------------------------------
class ConnectTimeout(OSError):
    pass


class NewConnectionError(ConnectTimeout):
    """As urllib3 has it: a refused connection that inherits from a time-out."""


class RemoteProtocolError(Exception):
    pass


def raised(error: Exception, *, cause: Exception | None = None, hidden: Exception | None = None) -> Exception:
    error.__cause__ = cause
    if hidden is not None:
        error.__context__, error.__suppress_context__ = hidden, True
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), "timeout"),
        (ConnectTimeout(), "timeout"),
        (NewConnectionError(), "connect"),
        (ConnectionRefusedError(), "connect"),
        (ConnectionResetError(), "read"),
        (RemoteProtocolError(), "read"),
        (socket.gaierror(), "dns"),
        (ssl.SSLCertVerificationError(), "tls"),
        (raised(ConnectTimeout(), cause=socket.gaierror()), "dns"),
        (raised(ConnectTimeout(), hidden=ssl.SSLCertVerificationError()), "tls"),
        (raised(TimeoutError(), cause=ssl.SSLWantReadError()), "timeout"),
        (raised(ConnectionResetError(), cause=ssl.SSLEOFError()), "read"),
        (ValueError(), "other"),
        (AttributeError("a bug of the client"), "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value)[:50],
)
def test_kind_of_an_error_says_what_went_wrong(error: Exception, kind: str) -> None:
    assert harness.kind_of(error) == kind
    assert kind in harness.KINDS


def test_kind_of_errors_in_a_circle_ends() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert harness.kind_of(first) == "other"


def test_lag_that_was_no_wait_for_a_core_is_the_clients_own() -> None:
    lag = harness.Lag()
    for _ in range(99):
        lag.note(0.001, 0.002)
    lag.note(0.5, 0.01)
    assert lag.data() == {"lag_max_ms": 500.0, "lag_p99_ms": 500.0, "wait_max_ms": 10.0, "wait_p99_ms": 10.0}
    assert set(harness.Lag().data().values()) == {0.0}


def test_harness_needs_no_package_of_ours() -> None:
    text = Path(harness.__file__).read_text()
    assert "import stormline" not in text
    assert "from stormline" not in text
    assert asyncio.iscoroutinefunction(harness.Run.run)


def test_means_to_take_out_are_those_the_driver_knows():
    assert set(_taken_out._HOW) == set(ablation.TAKEN_OUT) <= set(ablation.WITHOUT)
