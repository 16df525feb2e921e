"""A short set of real runs: what must come out, by counts and with wide margins; never by milliseconds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stormline.core.errors import ConfigError
from stormline.lab import clients, results, run
from stormline.lab.results import Result

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

Runs = Callable[..., dict[str, Result]]


@pytest.fixture(name="runs")
def _runs(tmp_path: Path) -> Runs:
    """Run every client there is on a profile, side by side; give results by client."""

    def runs(profile: str, duration_s: float, *names: str, requests: int | None = None) -> dict[str, Result]:
        standard = [client.name for client in clients.CLIENTS.values() if client.standard]
        there = [name for name in names or standard if _available(name)]
        if missing := [name for name in names if name not in there]:
            pytest.skip(f"not installed: {', '.join(missing)} (make peers)")
        keys = run.plan([profile], there, [1], duration_s=duration_s, requests=requests)
        found = run.run_all(keys, jobs=8, out=tmp_path / "lab.jsonl", environ=os.environ)
        assert results.read(tmp_path / "lab.jsonl") == found
        return {result.client: result for result in found}

    return runs


def _available(name: str) -> bool:
    try:
        clients.python_for(clients.get(name), os.environ)
    except ConfigError:
        return False
    return True


def percents(found: dict[str, Result]) -> dict[str, float]:
    return {name: 100 * result.ok / result.requests for name, result in found.items()}


def test_wifi_every_client_succeeds_always(runs: Runs) -> None:
    found = runs("wifi", 8.0, requests=40)
    assert percents(found) == dict.fromkeys(found, 100)
    assert {"stormline", "httpx2"} <= set(found)
    for result in found.values():
        assert result.failures == {}
        assert 1 <= result.connections <= 40
        assert result.duplicates == 0
        # 38 of 1 KB, one of 30 KB, one of 128 KB at the least, with headers.
        assert result.bytes_down > 40 * 1024 + 128 * 1024


def test_elevator_costs_a_client_without_retries_some_and_not_all(runs: Runs) -> None:
    found = runs("elevator", 30.0)
    percent = percents(found)
    assert 50 < percent["httpx2"] < 98
    assert all(share > 50 for share in percent.values()), percent
    assert [fault.what.split()[0] for fault in found["httpx2"].events] == ["dark"]
    lost = [outcome for outcome in found["httpx2"].outcomes if outcome.kind]
    (dark,) = found["httpx2"].events
    # What failed was asked in the dark, or waited for what was.
    assert all(dark.at_s - 10 <= outcome.at_s <= dark.until_s + 5 for outcome in lost)


def test_dns_hijack_leaves_a_client_that_asks_dns_nothing(runs: Runs) -> None:
    found = runs("dns-hijack", 6.0, "httpx2", "httpx_tenacity", "aiohttp_retry")
    for result in found.values():
        assert result.ok == 0
        assert result.failures == {"tls": result.requests}
        assert result.connections == 0  # none reached the origin


def test_dns_hijack_costs_our_client_nothing_where_it_may_ask_elsewhere(runs: Runs) -> None:
    ours = runs("dns-hijack", 6.0, "stormline")["stormline"]
    assert (ours.ok, ours.failures) == (ours.requests, {})
    assert ours.connections >= 1


@pytest.mark.parametrize("profile", ["dns-flaky", "dns-slow", "dns-empty"])
def test_unwell_name_server_costs_our_client_nothing_where_it_may_ask_elsewhere(runs: Runs, profile: str) -> None:
    ours = runs(profile, 10.0, "stormline")["stormline"]
    assert (ours.ok, ours.failures) == (ours.requests, {})


def test_dead_address_is_stepped_over(runs: Runs) -> None:
    percent = percents(runs("dead-ip", 15.0))
    assert percent["stormline"] >= 95
    assert percent["httpx2"] >= 90


def test_foreign_page_with_status_200_is_no_success(runs: Runs) -> None:
    found = runs("http-hijack", 5.0)
    assert {name: (result.ok, result.failures) for name, result in found.items()} == {
        name: (0, {"body": result.requests}) for name, result in found.items()
    }


def test_command_gives_one_object_for_each_client() -> None:
    words = ["lab", "run", "--profile", "wifi", "--client", "stormline", "--client", "httpx2", "--without", "quic,long",
             "--duration", "4", "--requests", "10", "--json"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "stormline.cli.main", *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ours, peer = (json.loads(line) for line in done.stdout.splitlines())
    assert list(ours)[:13] == [
        "profile", "client", "seed", "requests", "ok", "p50_s", "p95_s", "p99_s", "failures", "connections", "bytes_up",
        "bytes_down", "duplicates",
    ]  # fmt: skip
    assert (ours["client"], ours["without"], ours["no_effect"]) == ("stormline", ["quic", "long"], ["quic"])
    assert (peer["client"], peer["without"]) == ("httpx2", [])
    assert ours["requests"] == peer["requests"] == ours["ok"] == peer["ok"] == 10
