"""`stormline lab` where it needs no laboratory: refusals, lists and the report."""

import json
import os
from pathlib import Path

import pytest

from stormline.cli import main
from stormline.lab import results, verdicts
from stormline.lab.results import Outcome, RunKey, Traffic, Trust
from stormline.policy.verdict import Condition, Confidence


@pytest.mark.parametrize(
    "words",
    [
        ["lab"],
        ["lab", "run", "--profile", "wifi"],
        ["lab", "validate"],
        ["lab", "starts"],
        ["lab", "relay"],
        ["lab", "diagnose"],
    ],
)
def test_lab_without_root_says_so_in_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main.run(words) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert "root" in said.err


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--profile", "nowhere"], "nowhere"),
        (["--profile", "wifi", "--client", "netscape"], "netscape"),
        (["--profile", "wifi", "--without", "hedge,magic"], "magic"),
        (["--profile", "wifi", "--requests", "0"], "requests"),
        (["--profile", "wifi", "--duration", "-3"], "duration"),
    ],
)
def test_lab_run_unknown_word_is_named(words: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["lab", "run", *words]) == 1
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "word"), [(["--way", "pigeon"], "origin, long, names"), (["--restarts", "5"], "6 or more")]
)
def test_lab_starts_that_cannot_be_are_refused(words: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["lab", "starts", *words]) == 1
    assert word in capsys.readouterr().err


def test_lab_diagnose_of_what_is_not_made_names_what_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["lab", "diagnose", "--case", "meteor"]) == 1
    said = capsys.readouterr().err
    assert "meteor" in said
    assert "tls-box" in said


def test_lab_list_shows_profiles_and_clients(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["lab", "list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    names = {profile["name"] for profile in shown["profiles"] if profile["standard"]}
    assert {"wifi", "elevator", "fake-wifi"} <= names
    assert {"stormline", "httpx2", "pycurl"} <= {client["name"] for client in shown["clients"]}
    assert main.run(["lab", "list"]) == 0
    assert "elevator" in capsys.readouterr().out


def test_lab_report_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = RunKey(profile="wifi", client="httpx2", seed=1, requests=1, duration_s=1.0)
    traffic = Traffic(connections=1, bytes_up=1, bytes_down=1, duplicates=0)
    results.append(tmp_path / "lab.jsonl", results.summarise(key, [Outcome(0, 0.1, "")], traffic, Trust()))
    page = tmp_path / "deep" / "lab.html"
    assert main.run(["lab", "report", "--in", str(tmp_path / "lab.jsonl"), "--out", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(page), "runs": 1, "distrusted": 0}
    assert page.read_text().startswith("<!doctype html>")


def test_lab_report_without_results_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["lab", "report", "--in", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_verdicts_are_kept_with_figures_matrix_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = verdicts.CASES[0]
    looks = {
        1: (Condition.OK, Confidence.HIGH),
        2: (Condition.DEAD_WIFI, Confidence.HIGH),
        3: (Condition.DEAD_WIFI, Confidence.LOW),
    }

    def run(case: verdicts.Case, seed: int, folder: Path, *, watch: str) -> verdicts.Outcome:
        condition, confidence = looks[seed]
        seen = verdicts.Seen(at_s=20.0, condition=condition, confidence=confidence, why="so it is")
        return verdicts.judge(case, seed, [seen], None)

    monkeypatch.setattr(verdicts, "run", run)
    monkeypatch.setattr("stormline.lab.namespaces.require_lab", lambda: None)
    words = ["lab", "verdicts", "--case", case.name, "--out", str(tmp_path)]
    for seed in looks:
        words += ["--seed", str(seed)]
    assert main.run(words) == 1  # it was surely wrong
    kept = json.loads((tmp_path / "verdicts.json").read_text())
    figures = {row["name"]: (row["ours"], row["ok"]) for row in kept["rows"]}
    assert figures == {
        "verdict_wifi_right_pct": (33.333, False),
        "verdict_wifi_surely_wrong": (1, False),
        "verdict_all_surely_wrong": (1, False),
    }
    assert kept["matrix"] == {"wifi": {"ok": 1, "dead_wifi": 1, "dead_wifi?": 1}}
    assert [run["seed"] for run in kept["runs"]] == [1, 2, 3]


def test_lab_relay_has_two_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["lab", "relay", "--part", "pigeon"]) == 1
    assert "incident, ablation" in capsys.readouterr().err
