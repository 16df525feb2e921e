"""Parts of the laboratory that need neither root nor Linux's devices."""

import os
from pathlib import Path

import msgspec
import pytest

from stormline.core.errors import ConfigError, PlatformError
from stormline.lab import messages as m
from stormline.lab import namespaces, traces
from stormline.lab.chance import SeededRng
from stormline.lab.shaper import LatenessHistogram, ip_protocol
from stormline.lab.validate import Figure, Validation, validate


def test_laboratory_without_root_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PlatformError, match=r"root.*sudo"):
        namespaces.require_lab()
    with pytest.raises(PlatformError, match="root"):
        namespaces.Topology()


def test_uplinks_share_no_address() -> None:
    names = [
        getattr(up, name)
        for up in namespaces.UPLINKS
        for name in (
            "device_v4", "router_v4", "wan_v4", "server_v4", "device_v6", "router_v6", "wan_v6", "server_v6", "table",
        )
    ]  # fmt: skip
    assert len(set(names)) == len(names)


def test_seeded_chance_repeats_by_name_and_seed() -> None:
    draws = {(name, seed): SeededRng(name, seed).random() for name in ("up", "down") for seed in (1, 2)}
    assert len(set(draws.values())) == 4
    assert SeededRng("up", 1).random() == draws["up", 1]
    assert len(SeededRng("up", 1).token_bytes(16)) == 16


def test_lateness_gives_percentiles_and_the_exact_maximum() -> None:
    late = LatenessHistogram()
    assert late.summary() == m.Lateness(0, 0.0, 0.0, 0.0)
    for _ in range(98):
        late.add(0.00012)
    late.add(-0.5)
    late.add(1.5)
    summary = late.summary()
    assert (summary.count, summary.max_s) == (100, 1.5)
    assert summary.p50_s == pytest.approx(0.00015)
    assert summary.p99_s == pytest.approx(0.00015)


@pytest.mark.parametrize(
    ("packet", "protocol"),
    [
        (bytes([0x45]) + bytes(8) + bytes([17]) + bytes(10), 17),
        (bytes([0x60]) + bytes(5) + bytes([6]) + bytes(33), 6),
        (bytes([0x45]), 255),
        (bytes([0x60]) + bytes(20), 255),
        (b"", 255),
    ],
)
def test_ip_protocol_of_a_packet_is_read(packet: bytes, protocol: int) -> None:
    assert ip_protocol(packet) == protocol


def test_commands_survive_their_encoding() -> None:
    port = m.Port("/run/netns/x", "wifi0")
    commands: list[m.Command] = [
        m.Setup(links=[m.LinkSetup(name="wifi0", near=port, far=port, up={"delay_s": 0.1})]),
        m.Reconfigure(link="wifi0", fields={"loss_pct": 1}),
        m.StartBlackout(link="wifi0", direction=m.Direction.UP, mode="hold", duration_s=2),
        m.EndBlackout(link="wifi0"),
        m.Follow(link="wifi0", steps=[{"at_s": 1, "end_blackout": True}], start_s=5),
        m.SetFades(link="wifi0", fades=None),
        m.AskStatistics(reset_lateness=True),
        m.AskDrops(),
        m.Stop(),
    ]
    for command in commands:
        assert msgspec.json.decode(msgspec.json.encode(command), type=m.Command) == command


def test_recorded_traces_are_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "lift.up").write_text("5\n10\n")
    (tmp_path / "README.md").write_text("no trace")
    assert traces.recorded(tmp_path) == ["lift.up"]
    assert traces.load("lift.up", tmp_path).period_s == 0.01
    assert traces.recorded(tmp_path / "nowhere") == []


@pytest.mark.parametrize("name", ["nowhere.up", "README.md", "../lift.up", "", "lift", "lte-like.sideways"])
def test_trace_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, name: str) -> None:
    (tmp_path / "README.md").write_text("1\n")
    (tmp_path / "lift.up").write_text("1\n")
    folder = tmp_path / "inner"
    folder.mkdir()
    with pytest.raises(ConfigError, match="lte-like"):
        traces.load(name, folder)


def test_synthetic_traces_are_always_there_and_differ_by_direction(tmp_path: Path) -> None:
    assert traces.synthetic() == [
        "evdo-like.down", "evdo-like.up", "lte-like.down", "lte-like.up", "umts-like.down", "umts-like.up",
    ]  # fmt: skip
    up, down = traces.load("evdo-like.up", tmp_path), traces.load("evdo-like.down", tmp_path)
    assert up.name == "evdo-like.up"
    assert up.format() != down.format()


def test_validation_is_ok_where_every_figure_is() -> None:
    good = Figure(name="a", value=1.0, unit="ms", target=2.0, better="lower")
    bad = Figure(name="b", value=1.0, unit="packets/s", target=2.0, better="higher", tries=3)
    assert Validation(figures=(good,), scheduler="fifo", memory_locked=True).ok
    both = Validation(figures=(good, bad), scheduler="other", memory_locked=False)
    assert not both.ok
    assert both.repeated
    assert both.data()["figures"][1] == {
        "name": "b", "value": 1.0, "unit": "packets/s", "target": 2.0, "better": "higher", "tries": 3, "ok": False,
    }  # fmt: skip


def test_validation_of_no_effort_is_refused() -> None:
    with pytest.raises(ConfigError, match="effort"):
        validate(effort=0)
