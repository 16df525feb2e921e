"""Networks that no threshold was chosen on: how a client does on them says how it will do elsewhere.

They are for levels (`stormline bench levels`). What is looked at while a threshold is chosen belongs into
`stormline.lab.profiles`; once one of these was used for that, another has to take its place.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stormline.lab import traces
from stormline.lab.chance import SeededRng
from stormline.lab.faults import Dark, Handover
from stormline.lab.profiles_model import (
    LinkSpec,
    Profile,
    RttQuantiles,
    blinking,
    episodes,
    link,
    recorded_link,
    with_fades,
)
from stormline.netmodel.synthetic import SHAPES, make_trace
from stormline.netmodel.trace import Trace

_TRACE_S: Final = 600.0
_DRAWING: Final = 2
"""Of the synthetic traces; the profiles' own are the first."""
_MOVING: Final = RttQuantiles(points=((0, 60), (50, 120), (75, 250), (95, 700), (99, 1500), (100, 2500)))


def _moving() -> LinkSpec:
    base = link(rtt_ms=120, down_mbps=3, up_mbps=1)
    return LinkSpec(up=base.up, down=base.down, rtt=_MOVING)


def _traced(name: str, about: str, stem: str, rtt_ms: float, *, queue_kb: int = 256, requests: int = 300) -> Profile:
    wifi = recorded_link(rtt_ms=rtt_ms, down=f"{stem}.down", up=f"{stem}.up", queue_kb=queue_kb)
    return Profile(name=name, about=about, wifi=wifi, requests=requests)


MADE: Final = (
    Profile(
        name="ho-tunnels", about="150 ms, 2/0.8 Mbit/s, 0.5 % loss; 6 s of dark once in each 20 s.",
        wifi=link(rtt_ms=150, down_mbps=2, up_mbps=0.8, loss_pct=0.5),
        plan=episodes(Dark(), every_s=20.0, length_s=6.0),
    ),
    Profile(
        name="ho-garage", about="50 ms, 20/8 Mbit/s; 9 s of light, 2 s of dark.",
        wifi=link(rtt_ms=50, down_mbps=20, up_mbps=8),
        plan=blinking(Dark(), good_s=9.0, bad_s=2.0),
    ),
    Profile(
        name="ho-far-wifi", about="15 ms, 6/3 Mbit/s, 2 % loss; every 3 s a fade of 0.4 s that loses 90 %.",
        wifi=with_fades(
            link(rtt_ms=15, down_mbps=6, up_mbps=3, loss_pct=2), period_s=3.0, duration_s=0.4, loss_pct=90.0,
            distribution="uniform",
        ),
    ),
    Profile(
        name="ho-rural", about="400 ms, 200/80 kbit/s, 2 % loss; 10 s of dark once in each 45 s; 120 requests.",
        wifi=link(rtt_ms=400, down_mbps=0.2, up_mbps=0.08, loss_pct=2, queue_kb=64),
        plan=episodes(Dark(), every_s=45.0, length_s=10.0), requests=120,
    ),
    Profile(name="ho-moving", about="60 to 2500 ms, drawn anew every second, half below 120; 3/1 Mbit/s.",
            wifi=_moving()),
    Profile(name="ho-satellite", about="620 ms, 8/2 Mbit/s, 0.3 % loss.",
            wifi=link(rtt_ms=620, down_mbps=8, up_mbps=2, loss_pct=0.3)),
    Profile(
        name="ho-leaving", about="WiFi of 20 ms and 30/30 Mbit/s; for 25 s in each minute 280 ms and 400/200 kbit/s.",
        wifi=link(rtt_ms=20, down_mbps=30, up_mbps=30), cell=link(rtt_ms=280, down_mbps=0.4, up_mbps=0.2, loss_pct=1),
        plan=episodes(Handover(), every_s=60.0, length_s=25.0),
    ),
    _traced("ho-lte", "As syn-lte, another drawing.", "lte-like-2", 60),
    _traced("ho-umts", "As syn-umts, another drawing.", "umts-like-2", 120, queue_kb=128),
    _traced("ho-evdo", "As syn-evdo, another drawing.", "evdo-like-2", 150, queue_kb=128, requests=150),
)  # fmt: skip
"""Those that are there on every machine."""
RECORDED: Final = (
    _traced("tr-lte", "Recorded capacity of LTE in a moving car (AT&T).", "ATT-LTE-driving", 60),
    _traced("tr-umts", "Recorded capacity of UMTS in a moving car (T-Mobile US).", "TMobile-UMTS-driving", 120,
            queue_kb=128),
    _traced("tr-evdo", "Recorded capacity of EV-DO in a moving car (Verizon).", "Verizon-EVDO-driving", 150,
            queue_kb=128, requests=150),
    _traced("tr-lte-2016", "Recorded capacity of LTE in a moving car (AT&T, 2016).", "ATT-LTE-driving-2016", 60),
    _traced("tr-lte-tmo", "Recorded capacity of LTE (T-Mobile US).", "TMobile-LTE-short", 60),
    _traced("tr-lte-vz", "Recorded capacity of LTE (Verizon).", "Verizon-LTE-short", 60),
)  # fmt: skip
"""Those that need recordings; see `traces.folder`."""


def profiles(folder: Path | None = None) -> tuple[Profile, ...]:
    """Give all that can be played: `MADE`, and of `RECORDED` those whose recordings are there."""
    there = traces.folder() if folder is None else folder
    return (*MADE, *(each for each in RECORDED if not each.missing_traces(there)))


def drawings() -> Mapping[str, Trace]:
    """Make the synthetic traces by name."""
    made = {}
    for shape in SHAPES:
        for way in ("up", "down"):
            name = f"{shape.name}-2.{way}"
            made[name] = make_trace(shape, SeededRng(f"{shape.name}.{way}", _DRAWING), _TRACE_S)
            made[name].name = name
    return made
