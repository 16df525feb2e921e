"""The checker finds bugs: faults planted into the product are found within a few seeds."""

from collections.abc import Callable
from typing import Any

import pytest

from stormline.client.channel import Channel
from stormline.client.link import LinkCall
from stormline.core import errors
from stormline.testing import scenario, simworld

SEEDS_MAX = 50
NAMES = [
    name
    for name in scenario.names()
    if (loaded := scenario.load(name)).direct is None and loaded.workload.devices < 100
]


def found_by(base_seed: int) -> str:
    """Run seeds until one shows a problem; name the first invariant that broke, empty where none did."""
    for offset in range(SEEDS_MAX):
        report = simworld.run(NAMES[offset % len(NAMES)], base_seed + offset)
        for problem in report.problems:
            return problem.partition(": ")[2].partition(":")[0]
    return ""


def plant_resend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever failed is sent again, delivered or not."""

    def always(method: str, *, maybe_delivered: bool, has_key: bool) -> bool:
        return True

    monkeypatch.setattr("stormline.policy.means.may_resend", always)
    monkeypatch.setattr("stormline.client.channel.may_resend", always)


def plant_early_ack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push is confirmed when it arrives, not when the application has taken it over."""
    line_push = Channel.line_push

    def ack_first(self: Channel, link: Any, push: Any) -> None:
        link.ack(push.seq)
        line_push(self, link, push)

    monkeypatch.setattr(Channel, "line_push", ack_first)


def plant_forgotten_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in flight are not told that their connection was lost."""
    fail = LinkCall.fail

    def forget(self: LinkCall, error: BaseException) -> None:
        if not isinstance(error, errors.ChannelLost):
            fail(self, error)

    monkeypatch.setattr(LinkCall, "fail", forget)


def plant_blind_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ever counts as delivered."""
    monkeypatch.setattr(LinkCall, "maybe_delivered", property(lambda self: False))


@pytest.mark.parametrize(
    ("plant", "invariants"),
    [
        (plant_resend, {"no_write_happens_twice"}),
        (plant_early_ack, {"a_confirmed_push_was_seen"}),
        (plant_forgotten_calls, {"no_call_waits_on_a_dead_link"}),
        (plant_blind_boundary, {"no_write_happens_twice", "undelivered_means_unprocessed"}),
    ],
)
def test_planted_fault_is_found_within_fifty_seeds(
    plant: Callable[[pytest.MonkeyPatch], None],
    invariants: set[str],
    monkeypatch: pytest.MonkeyPatch,
    base_seed: int,
) -> None:
    plant(monkeypatch)
    assert found_by(base_seed) in invariants
