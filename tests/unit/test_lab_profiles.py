"""Named networks: complete, repeatable, and what they say of themselves."""

from pathlib import Path

import pytest

from stormline.core import limits_lab
from stormline.core.errors import ConfigError
from stormline.lab import faults, profiles
from stormline.lab.chance import SeededRng
from stormline.lab.profiles_model import Event, LinkSpec, Profile, RttQuantiles, ServerSpec, link
from stormline.lab.specs import Behaviour, DnsSpec
from stormline.netmodel.params import read_fades, read_params
from stormline.netmodel.schedule import read_schedule
from stormline.netmodel.trace import Trace

NAMED = (
    "wifi", "4g", "3g", "edge", "lossy4g", "subway", "elevator", "dead-ip", "dns-hijack", "ssl-cut", "stall-accept",
    "fake-wifi", "handover", "ip-dies", "stall-body", "accept-only", "dns-flaky", "e5xx", "rst", "v6-dead",
    "udp-block", "udp-lossy", "http-hijack", "uber", "tr-lte", "tr-umts", "tr-evdo", "syn-lte", "syn-umts",
    "syn-evdo", "trap-hol", "trap-v6", "trap-concurrency", "trap-oversize",
)  # fmt: skip
EVERY = list(profiles.PROFILES.values())
every_profile = pytest.mark.parametrize("profile", EVERY, ids=[profile.name for profile in EVERY])


def test_profiles_hold_every_known_weak_network() -> None:
    assert set(NAMED) <= set(profiles.PROFILES)
    assert sum(len(group) for group in profiles.GROUPS.values()) == len(profiles.PROFILES)
    assert set(profiles.STANDARD) | set(profiles.QUICK) <= set(profiles.PROFILES)


def test_unknown_profile_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"'5g'.*wifi, 4g"):
        profiles.get("5g")
    assert profiles.get("4g").name == "4g"


@every_profile
def test_profile_says_what_it_is_in_one_sentence(profile: Profile) -> None:
    assert profile.about[0].isupper() or profile.about[0].isdigit()
    assert profile.about.endswith(".")
    assert ". " not in profile.about
    assert profile.wifi.numbers()


@every_profile
def test_profile_parameters_are_understood_by_the_link_model(profile: Profile) -> None:
    known = {name: Trace([100], name=name) for name in profile.trace_names()}
    for spec in (profile.wifi, profile.cell or LinkSpec()):
        for way in (spec.up, spec.down):
            read_params(way, traces=known)
        if spec.fades is not None:
            read_fades(spec.fades)
        if spec.rtt is not None:
            read_schedule(spec.rtt.steps(profile.duration_s, SeededRng("test", 1)))


@every_profile
def test_same_seed_gives_the_same_events(profile: Profile) -> None:
    assert profile.expand(7) == profile.expand(7)
    for duration_s in (10.0, 30.0, profile.duration_s):
        events = profile.expand(1, duration_s)
        assert all(0 <= event.at_s < duration_s for event in events)
        assert [event.at_s for event in events] == sorted(event.at_s for event in events)


def test_events_move_with_the_seed_and_keep_their_length() -> None:
    elevator = profiles.get("elevator")
    one, other = elevator.expand(1), elevator.expand(2)
    assert one != other
    assert len(one) == len(other) == 4
    assert {round((event.until_s or 0.0) - event.at_s, 6) for event in (*one, *other)} == {8.0}
    assert len(elevator.expand(1, 30.0)) == 1


def test_subway_is_dark_for_three_seconds_in_seven() -> None:
    events = profiles.get("subway").expand(3)
    dark_s = sum(min(120.0, event.until_s or 0.0) - event.at_s for event in events)
    assert 45 < dark_s < 57


def test_addresses_die_one_after_the_other() -> None:
    events = profiles.get("ip-dies").expand(1)
    assert [(event.what, event.at_s, event.until_s) for event in events] == [
        ("dead-address address=0", 15.0, 45.0),
        ("dead-address address=1", 45.0, 75.0),
        ("dead-address address=2", 75.0, 105.0),
    ]


def test_requests_keep_their_rate_in_a_shorter_run() -> None:
    assert profiles.get("edge").requests_in(12.0) == 10
    assert profiles.get("edge").requests_in(0.1) == 1


def test_round_trips_have_the_published_percentiles() -> None:
    uber = profiles.get("uber").wifi.rtt
    assert uber is not None
    steps = uber.steps(1000.0, SeededRng("test", 1))
    times_ms = sorted(step["set"]["delay_s"] * 2000 for step in steps)
    for share, expected_ms in ((50, 350), (75, 425), (95, 725), (99, 2300)):
        assert times_ms[share * 10 - 1] == pytest.approx(expected_ms, rel=0.05)
    assert [step["at_s"] for step in steps] == [float(second) for second in range(1000)]


def test_recordings_that_are_missing_are_named(tmp_path: Path) -> None:
    assert profiles.get("tr-lte").missing_traces(tmp_path) == ["ATT-LTE-driving.down", "ATT-LTE-driving.up"]
    (tmp_path / "ATT-LTE-driving.down").write_text("10\n")
    assert profiles.get("tr-lte").missing_traces(tmp_path) == ["ATT-LTE-driving.up"]
    assert profiles.get("syn-lte").missing_traces(tmp_path) == []


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Event(at_s=1.0, fault=faults.Dark(), until_s=1.0)], "ends before it begins"),
        ([Event(at_s=-1.0, fault=faults.Dark())], "ends before it begins"),
        ([Event(at_s=0.0, fault=faults.Dark()), Event(at_s=5.0, fault=faults.Dark())], "overlaps itself"),
        (
            [Event(at_s=n * 1.0, fault=faults.DeadAddress(address=n)) for n in range(limits_lab.LAB_EVENTS_MAX + 1)],
            "more",
        ),
    ],
    ids=["empty", "negative", "overlap", "many"],
)
def test_events_that_make_no_sense_are_refused(events: list[Event], message: str) -> None:
    profile = Profile(name="test", about="A test.", wifi=link(rtt_ms=1), plan=lambda duration_s, rng: events)
    with pytest.raises(ConfigError, match=message):
        profile.expand(1)


@pytest.mark.parametrize(
    "points", [((0, 1),), ((0, 1), (50, 2)), ((0, 5), (100, 2)), ((0, 1), (50, 2), (50, 3), (100, 4))]
)
def test_quantiles_that_do_not_rise_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match="rtt quantiles"):
        RttQuantiles(points=points)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cut_pct": 60, "reset_pct": 50},
        {"error_pct": -1},
        {"slow_bps": 1},
        {"requests_max": 0},
        {"in_flight_hold_s": 1e9},
    ],
)
def test_behaviour_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="behaviour"):
        Behaviour(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"lie_pct": 60, "drop_pct": 60}, {"delay_s": -1}, {"ttl_s": -1}])
def test_dns_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="dns"):
        DnsSpec(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ServerSpec(v4=0),
        lambda: ServerSpec(v4=99),
        lambda: ServerSpec(special={3: Behaviour()}),
        lambda: faults.SynDrop(pct=0),
        lambda: faults.OnlyProtocol(protocol="sctp"),
        lambda: faults.NatForgets(after_s=0),
    ],
)
def test_servers_and_faults_out_of_range_are_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ConfigError):
        wrong()


def test_faults_say_what_they_do() -> None:
    assert faults.Dark().what == "dark"
    assert faults.Dark(uplink=None, mode="hold").what == "dark uplink=None mode=hold"
    assert faults.UnitCut(unit=(0, 2)).what == "unit-cut unit=0+2"
    assert faults.Unwell(behaviour=Behaviour(error_pct=50), unit=(1,)).what == "unwell error_pct=50 at 1"
