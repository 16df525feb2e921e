"""Networks as phones tell them: recorded stories, their changes, and what is wrong with a wrong event."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import stormline.testing
from stormline.core import limits_network as limits
from stormline.core.errors import ConfigError
from stormline.net.recorded import PushedNetwork, load_story, parse_story, read_event
from stormline.policy.network import NOTHING_KNOWN, Change, NetworkTracker
from stormline.policy.verdict import Condition, VerdictMachine

STORIES = Path(stormline.testing.__file__).parent / "networks"
KEY = bytes(32)


def play(name: str) -> list[tuple[str, Change | None, Condition]]:
    """Give, for each event of a story, its note, the change that is told and the verdict; a loss when it has lasted."""
    events = load_story(STORIES / f"{name}.jsonl")
    tracker, machine = NetworkTracker(KEY, events[0].info), VerdictMachine()
    machine.changed(tracker.info, 0.0)
    told = []
    ends = [event.at_s for event in events[1:]] + [events[-1].at_s + 60]
    for event, until_s in zip(events, ends, strict=True):
        change = tracker.observe(event.info, event.at_s)
        due = tracker.lost_due_at
        if due is not None and due <= until_s:
            change = tracker.observe(event.info, due)
        machine.changed(tracker.info, event.at_s)
        told.append((event.note, change and change.change, machine.judge(event.at_s).condition))
    return told


def test_commute_tells_each_network_once_and_no_gap() -> None:
    assert [(change, verdict) for _, change, verdict in play("android-commute")] == [
        (None, Condition.OK),
        (None, Condition.OK),
        (None, Condition.NO_NETWORK),  # for 0.4 s: nobody is told of a loss
        (Change.NEW, Condition.OK),
        (Change.LOST, Condition.NO_NETWORK),
        (Change.SAME, Condition.OK),
        (Change.NEW, Condition.OK),
        (Change.ROAMED, Condition.OK),
    ]


def test_other_sim_is_another_network_though_the_address_is_the_same() -> None:
    assert [change for _, change, _ in play("android-dual-sim")] == [None, Change.LOST, Change.NEW, Change.NEW]


def test_flight_mode_is_told_from_its_wifi() -> None:
    assert [(change, verdict) for _, change, verdict in play("ios-airplane")] == [
        (None, Condition.OK),
        (Change.LOST, Condition.AIRPLANE),
        (Change.NEW, Condition.OK),
        (Change.LOST, Condition.AIRPLANE),
        (Change.NEW, Condition.OK),
    ]


def test_app_that_may_not_use_the_network_is_told_so() -> None:
    verdicts = [verdict for _, _, verdict in play("android-permission")]
    assert verdicts == [Condition.OK, Condition.PERMISSION, Condition.OK]


def test_vpn_is_a_network_of_its_own_on_each_network() -> None:
    assert [change for _, change, _ in play("ios-vpn")] == [None, Change.NEW, Change.NEW, Change.NEW]


def test_every_story_is_there_and_begins_at_zero() -> None:
    names = sorted(path.stem for path in STORIES.glob("*.jsonl"))
    assert names == ["android-commute", "android-dual-sim", "android-permission", "ios-airplane", "ios-vpn"]
    assert all(load_story(STORIES / f"{name}.jsonl")[0].at_s == 0 for name in names)


def test_event_is_read_whole() -> None:
    info = read_event(
        {"kind": "wifi", "interface": "wlan0", "addresses": ["192.168.1.20/24"], "gateway": "192.168.1.1",
         "ssid": "Home", "signal_dbm": -60, "metered": False, "airplane": False, "denied": False, "vpn": False}
    )  # fmt: skip
    assert (info.kind, info.addresses, info.prefixes) == ("wifi", ("192.168.1.20",), ("192.168.1.0/24",))
    assert info.name is not None
    assert info.name.reveal() == "Home"
    assert (info.signal_dbm, info.metered, info.routed) == (-60, False, True)
    assert read_event({}).routed is False


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"knid": "wifi"}, "unknown field 'knid'"),
        ({"kind": "5g"}, "kind '5g'"),
        ({"kind": 5}, "kind: expected a text"),
        ({"addresses": "10.0.0.1"}, "addresses: expected a list"),
        ({"addresses": [1]}, "addresses: expected texts"),
        ({"addresses": ["here"]}, "'here' is no IP address"),
        ({"addresses": ["10.0.0.1/x"]}, "length of a prefix"),
        ({"addresses": ["10.0.0.1"] * 99}, "at most 16"),
        ({"gateway": "router"}, "'router' is no IP address"),
        ({"ssid": "a", "carrier": "b"}, "either ssid or carrier"),
        ({"ssid": "x" * 1000}, "at most 128"),
        ({"signal_dbm": 5}, "signal_dbm"),
        ({"signal_dbm": True}, "signal_dbm"),
        ({"metered": "no"}, "metered: expected true or false"),
    ],
)
def test_wrong_event_is_refused_with_its_field(event: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        read_event(event)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no event"),
        ("# only a comment\n", "no event"),
        ("{", "line 1: not JSON"),
        ("[]", "line 1: expected an object"),
        ('{"kind": "wifi"}', "line 1: at_s"),
        ('{"at_s": true}', "line 1: at_s"),
        ('{"at_s": NaN}', "line 1: at_s"),
        ('{"at_s": 5}\n\n{"at_s": 4}', "line 3: at_s: 4 is before"),
        ('{"at_s": 0, "note": 1}', "line 1: note"),
        ('{"at_s": 0, "kind": "x"}', "story, line 1: kind"),
        ("[" * 5000, "not JSON"),
        ('{"at_s": 0, "ssid": "' + "x" * limits.NETWORK_STORY_BYTES_MAX + '"}', "longer than"),
    ],
)
def test_wrong_story_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse_story(text)


def test_story_that_cannot_be_read_is_refused_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        load_story(tmp_path / "missing.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_story(tmp_path / "bytes")
    (tmp_path / "fine").write_text(json.dumps({"at_s": 0}))
    assert len(load_story(tmp_path / "fine")) == 1


def test_pushed_network_tells_whoever_watches() -> None:
    port, told = PushedNetwork(), []
    assert port.look() == NOTHING_KNOWN
    port.watch(lambda: told.append(port.look().kind))
    port.push({"kind": "wifi", "addresses": ["10.0.0.1"]})
    port.push({"kind": "cell", "addresses": ["10.0.0.2"]})
    assert told == ["wifi", "cell"]
    port.close()
    port.push({"kind": "wired", "addresses": ["10.0.0.3"]})
    assert told == ["wifi", "cell"]
    assert port.look().kind == "wired"
