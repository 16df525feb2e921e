"""The examples in docs/explanation/timeouts.md are what the code gives.

.venv/bin/python tests/unit/test_policy_timeouts_page.py     print the table as it should be
"""

from pathlib import Path
from typing import NamedTuple

from stormline.policy.quality import State
from stormline.policy.shape import Network, Pattern, Queue, RequestShape
from stormline.policy.timeouts import Outcome, TimeoutPolicy

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "timeouts.md"
HEAD = (
    "| network | request | connect | first packet | must show life by | packet to packet | read-write |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)
PATIENCE_S = 15.0


class Seen(NamedTuple):
    """What a network has shown: round trips and rates, and how it did."""

    network: Network
    trip_s: tuple[float, ...] = ()
    down_bps: float = 0.0
    good: bool = True


NETWORKS = {
    "WiFi, nothing measured": Seen(Network("w", "wifi")),
    "cellular, nothing measured": Seen(Network("c", "cell")),
    "WiFi, 20 ms, 40 Mbit/s": Seen(Network("w", "wifi"), (0.02,) * 39 + (0.1,), 40e6),
    "4G, 60 ms, 12 Mbit/s": Seen(Network("c", "cell"), (0.06,) * 38 + (0.1, 0.3), 12e6),
    "the same, failing": Seen(Network("c", "cell"), (0.06,) * 38 + (0.1, 0.3), 12e6, good=False),
    "UMTS dead spot, 0.3 to 3 s, 50 kbit/s": Seen(Network("c", "cell"), (0.3, 0.6, 1.0, 3.0) * 10, 50e3),
    "EDGE, 0.6 to 2 s, 100 kbit/s": Seen(Network("c", "cell"), (0.6, 0.7, 0.9, 2.0) * 10, 100e3),
}
SMALL = RequestShape(host="a", path_class="GET /", request_bytes=600, answer_bytes=1024)
REQUESTS = {
    "600 B, answer 1 KB": (SMALL, Queue()),
    "the same behind 128 KB": (SMALL, Queue(1, 0, 128 * 1024)),
    "600 B, answer unknown": (RequestShape(host="a", request_bytes=600), Queue()),
    "64 KB, answer 1 KB": (RequestShape(host="a", request_bytes=64 * 1024, answer_bytes=1024), Queue()),
    "server needs 3 s": (RequestShape(host="a", request_bytes=600, answer_bytes=1024, server_cost_s=3.0), Queue()),
    "event stream": (RequestShape(host="a", request_bytes=600, pattern=Pattern.STREAM), Queue()),
}
SHOWN = [
    *((network, "600 B, answer 1 KB") for network in NETWORKS),
    *(("WiFi, 20 ms, 40 Mbit/s", request) for request in list(REQUESTS)[1:]),
    ("EDGE, 0.6 to 2 s, 100 kbit/s", "the same behind 128 KB"),
]


def policy_that_saw(seen: Seen) -> TimeoutPolicy:
    policy = TimeoutPolicy()
    for number, trip_s in enumerate(seen.trip_s):
        policy.observe_rtt(seen.network, "a", trip_s, number)
        policy.observe_rate(seen.network, number, up_bytes_per_s=seen.down_bps / 16, down_bytes_per_s=seen.down_bps / 8)
        policy.observe(
            Outcome(network=seen.network, host="a", answered=seen.good, total_s=trip_s, answer_bytes=5000), number
        )
    return policy


def row(network: str, request: str) -> str:
    seen, (shape, queue) = NETWORKS[network], REQUESTS[request]
    now = float(len(seen.trip_s))
    plan = policy_that_saw(seen).plan(shape, seen.network, now, deadline=now + PATIENCE_S, attempts=4, queue=queue)
    cells = (plan.connect_s, plan.first_packet_s, plan.first_by_s, plan.packet_gap_s, plan.read_write_s)
    return (
        f"| {network} | {request} | " + " | ".join("none" if each is None else f"{each:.1f}" for each in cells) + " |"
    )


def table() -> str:
    return "\n".join([HEAD, *(row(network, request) for network, request in SHOWN)])


def test_examples_on_the_page_are_what_the_code_gives() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def test_examples_show_the_states_they_speak_of() -> None:
    states = {
        name: policy_that_saw(seen).state(seen.network, float(len(seen.trip_s))) for name, seen in NETWORKS.items()
    }
    assert states["WiFi, 20 ms, 40 Mbit/s"] is State.EXCELLENT
    assert states["the same, failing"] is State.BAD
    assert states["cellular, nothing measured"] is State.EVALUATING


if __name__ == "__main__":
    print(table())
