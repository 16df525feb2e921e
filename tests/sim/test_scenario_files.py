"""Scenarios as TOML: what is read, and what is refused with a word on where."""

import json
from pathlib import Path

import pytest

from stormline.cli import main
from stormline.core.errors import ConfigError
from stormline.netmodel.params import LinkParams
from stormline.testing import scenario
from stormline.testing.buggify import ACTIVE_PCT, SITES, Buggify
from stormline.testing.simloop import SimRng

GOOD = """
about = "x"
[link]
delay_s = [0.01, 0.05]
queue_bytes = 5000
[[faults]]
kind = "blackout"
every_s = 5
"""
DIRECT = """
[workload]
mix = { get = 1 }
[direct]
"""


@pytest.mark.parametrize("name", scenario.names())
def test_shipped_scenario_is_read(name) -> None:
    assert scenario.load(name).about.endswith(".")


def test_ranges_are_drawn_from_and_numbers_taken_as_they_are() -> None:
    read = scenario.read(GOOD, where="here")
    links = [scenario.draw_link(read.link, SimRng(seed)) for seed in range(20)]
    assert all(0.01 <= link.delay_s <= 0.05 and link.queue_bytes == 5000 for link in links)
    assert len({link.delay_s for link in links}) == 20
    assert scenario.draw_link({}, SimRng(0), base=LinkParams(delay_s=3)).delay_s == 3
    assert scenario.draw_fades({}, SimRng(0)) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("about = 1", "about"),
        ("", "about"),
        ("about = ", "here"),
        (GOOD + 'mode = "sometimes"', "mode"),
        (GOOD + "at_s = 3", "at_s"),
        (GOOD.replace("every_s = 5", ""), "at_s"),
        (GOOD.replace("blackout", "earthquake"), "earthquake"),
        (GOOD.replace("delay_s", "delay_ms"), "delay_ms"),
        (GOOD.replace("[0.01, 0.05]", "[0.01, 0.05, 0.1]"), "length 2"),
        (GOOD.replace("[0.01, 0.05]", "-1"), "delay_s"),
        (GOOD.replace("every_s = 5", 'every_s = 5\nset = { loss = 3 }'), "loss"),
        (GOOD + "[workload]\nmix = {}", "mix"),
        (GOOD + "[workload]\nmix = { put = 1 }", "put"),
        (GOOD + "[workload]\ndevices = 0", "devices"),
        (GOOD + "[extra]\n", "extra"),
        (GOOD.replace("blackout", "mute"), "needs [direct]"),
        (GOOD.replace("blackout", "engine-cut") + DIRECT, "[direct] has none"),
        (GOOD + "[direct]\n", "rpc"),
        (GOOD + "[workload]\nmix = { events = 1 }", "events"),
        (GOOD + DIRECT + "addresses = 0", "addresses"),
        (GOOD.replace("[link]", '[fades]\nperiod_s = 1\n[link]'), "fades"),
    ],
)  # fmt: skip
def test_what_is_no_scenario_is_refused_with_its_place(text, names) -> None:
    with pytest.raises(ConfigError, match="here") as caught:
        scenario.read(text, where="here")
    assert names in str(caught.value)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="elevator"):
        scenario.load("hurricane")
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        scenario.load("nowhere.toml")


class TestCommand:
    def test_own_file_runs_and_gives_json(self, tmp_path: Path, capsys):
        path = tmp_path / "mine.toml"
        path.write_text(GOOD + "[workload]\ndevices = 1\n")
        assert main.run(["sim", str(path), "--seed", "3", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["ok"], told["seed"], told["problems"]) == (True, 3, [])
        assert told["repeat"] == f"stormline sim {path} --seed 3"
        assert told["calls"] > 0

    def test_check_that_fails_gives_exit_code_one_and_the_command_to_repeat_it(self, tmp_path: Path, capsys):
        path = tmp_path / "mine.toml"
        dark = GOOD.replace("every_s = 5", "every_s = 0.1\nlasts_s = 9\nall_pct = 100")
        path.write_text(f"{dark}[checks]\nsuccess_pct = 100\n")
        assert main.run(["sim", str(path), "--seed", "3"]) == 1
        told = capsys.readouterr().out
        assert "check: success" in told
        assert f"repeat it with: stormline sim {path} --seed 3" in told

    def test_several_seeds_and_a_log(self, capsys):
        assert main.run(["sim", "elevator", "--seed", "1", "--seeds", "2"]) == 0
        assert "2 runs from seed 1" in capsys.readouterr().out
        assert main.run(["sim", "elevator", "--seed", "1", "--log"]) == 0
        assert "fault blackout" in capsys.readouterr().out

    def test_soak_ends_by_time_and_names_its_first_seed(self, capsys):
        assert main.run(["sim", "all", "--seed", "1", "--seconds", "0.01"]) == 0
        assert f"{len(scenario.names())} runs from seed 1" in capsys.readouterr().out

    def test_without_a_name_scenarios_are_listed(self, capsys):
        assert main.run(["sim", "--json"]) == 0
        assert [each["name"] for each in json.loads(capsys.readouterr().out)] == list(scenario.names())
        assert main.run(["sim"]) == 0
        assert "elevator" in capsys.readouterr().out

    def test_wrong_use_is_refused(self, capsys):
        assert main.run(["sim", "hurricane"]) == 1
        assert main.run(["sim", "all", "--seeds", "1", "--seconds", "1"]) == 1
        assert "one of them" in capsys.readouterr().err


class TestBuggify:
    def test_a_quarter_of_the_sites_is_on_and_depends_on_the_seed_alone(self):
        on = [set(Buggify(SimRng(seed)).fired) for seed in range(400)]
        share = 100 * sum(len(each) for each in on) / (400 * len(SITES))
        assert abs(share - ACTIVE_PCT) < 3
        asked = Buggify(SimRng(5))
        for _ in range(10):
            asked.fires("dial-slow")
        assert set(asked.fired) == on[5]

    def test_site_that_is_on_fires_at_its_rate_and_is_counted(self):
        sites = Buggify(SimRng(1), only=frozenset({"dial-refused"}))
        fired = sum(sites.fires("dial-refused") for _ in range(2000))
        assert abs(fired / 2000 - SITES["dial-refused"] / 100) < 0.05
        assert sites.fired == {"dial-refused": fired}
        assert not any(sites.fires("dial-slow") for _ in range(100))

    def test_short_sizes_are_never_empty(self):
        sites = Buggify(SimRng(1), only=frozenset({"receive-short"}))
        sizes = [sites.size("receive-short", 5000) for _ in range(500)]
        assert {5000} < set(sizes)
        assert all(1 <= size <= 5000 for size in sizes)
        assert sites.size("receive-short", 1) == 1
        assert sites.size("send-short", 70) == 70
