"""Networks on which it is checked how a client does elsewhere than where its thresholds were chosen.

They are for levels (`stormline bench levels`). The figures of `WATCHED` were looked at while thresholds were chosen on
`stormline.lab.profiles`; `FRESH` was played afterwards. What is looked into while something is chosen is fresh no more:
move it, and let another take its place.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
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
_DRAWINGS: Final = (2, 3)
"""Of the synthetic traces, for `WATCHED` and `FRESH`; the profiles' own are the first."""


def _changing(rtt_ms: float, down_mbps: float, up_mbps: float, *points: tuple[float, float]) -> LinkSpec:
    base = link(rtt_ms=rtt_ms, down_mbps=down_mbps, up_mbps=up_mbps)
    return LinkSpec(up=base.up, down=base.down, rtt=RttQuantiles(points=points))


def _traced(name: str, about: str, stem: str, rtt_ms: float, *, queue_kb: int = 256, requests: int = 300) -> Profile:
    wifi = recorded_link(rtt_ms=rtt_ms, down=f"{stem}.down", up=f"{stem}.up", queue_kb=queue_kb)
    return Profile(name=name, about=about, wifi=wifi, requests=requests)


WATCHED: Final = (
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
            wifi=_changing(120, 3, 1, (0, 60), (50, 120), (75, 250), (95, 700), (99, 1500), (100, 2500))),
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
"""There on every machine; their figures were looked at."""
WATCHED_RECORDED: Final = (
    _traced("tr-lte", "Recorded capacity of LTE in a moving car (AT&T).", "ATT-LTE-driving", 60),
    _traced("tr-umts", "Recorded capacity of UMTS in a moving car (T-Mobile US).", "TMobile-UMTS-driving", 120,
            queue_kb=128),
    _traced("tr-evdo", "Recorded capacity of EV-DO in a moving car (Verizon).", "Verizon-EVDO-driving", 150,
            queue_kb=128, requests=150),
    _traced("tr-lte-2016", "Recorded capacity of LTE in a moving car (AT&T, 2016).", "ATT-LTE-driving-2016", 60),
    _traced("tr-lte-tmo", "Recorded capacity of LTE (T-Mobile US).", "TMobile-LTE-short", 60),
    _traced("tr-lte-vz", "Recorded capacity of LTE (Verizon).", "Verizon-LTE-short", 60),
)  # fmt: skip
"""Need recordings, see `traces.folder`; their figures were looked at."""
FRESH: Final = (
    Profile(
        name="fr-hills", about="180 ms, 1.2/0.5 Mbit/s, 1 % loss; 4 s of dark once in each 15 s.",
        wifi=link(rtt_ms=180, down_mbps=1.2, up_mbps=0.5, loss_pct=1),
        plan=episodes(Dark(), every_s=15.0, length_s=4.0),
    ),
    Profile(
        name="fr-metro", about="70 ms, 15/5 Mbit/s; 20 s of light, 12 s of dark.",
        wifi=link(rtt_ms=70, down_mbps=15, up_mbps=5), plan=blinking(Dark(), good_s=20.0, bad_s=12.0),
    ),
    Profile(
        name="fr-crowd", about="90 ms, 0.6/0.3 Mbit/s, 1.5 % loss, a queue of 128 KB; 200 requests.",
        wifi=link(rtt_ms=90, down_mbps=0.6, up_mbps=0.3, loss_pct=1.5, queue_kb=128), requests=200,
    ),
    Profile(
        name="fr-kitchen", about="10 ms, 20/10 Mbit/s, 1 % loss; every 1.2 s a fade of 0.2 s that loses 70 %.",
        wifi=with_fades(
            link(rtt_ms=10, down_mbps=20, up_mbps=10, loss_pct=1), period_s=1.2, duration_s=0.2, loss_pct=70.0,
            distribution="uniform",
        ),
    ),
    Profile(name="fr-train", about="40 to 3000 ms, drawn anew every second, half below 200; 1.5/0.5 Mbit/s.",
            wifi=_changing(200, 1.5, 0.5, (0, 40), (50, 200), (75, 350), (95, 1000), (99, 2000), (100, 3000))),
    Profile(
        name="fr-arriving", about="320 ms and 300/150 kbit/s; for 20 s in each 50 s 30 ms and 25/10 Mbit/s.",
        wifi=link(rtt_ms=320, down_mbps=0.3, up_mbps=0.15, loss_pct=1), cell=link(rtt_ms=30, down_mbps=25, up_mbps=10),
        plan=episodes(Handover(), every_s=50.0, length_s=20.0),
    ),
    _traced("fr-lte", "As syn-lte, a third drawing.", "lte-like-3", 60),
    _traced("fr-umts", "As syn-umts, a third drawing.", "umts-like-3", 120, queue_kb=128),
    _traced("fr-evdo", "As syn-evdo, a third drawing.", "evdo-like-3", 150, queue_kb=128, requests=150),
)  # fmt: skip
"""There on every machine; played when all was chosen."""
FRESH_RECORDED: Final = (
    Profile(
        name="fr-lte-drive", about="Recorded capacity of LTE in a moving car (T-Mobile US), upwards of another run.",
        wifi=recorded_link(rtt_ms=60, down="TMobile-LTE-driving.down", up="TMobile-LTE-short.up", queue_kb=256),
    ),
)  # fmt: skip
"""Need recordings; played when all was chosen."""


def there(profiles: Sequence[Profile], folder: Path | None = None) -> tuple[Profile, ...]:
    """Give those of some profiles whose recordings are in a folder; None: the usual one."""
    found = traces.folder() if folder is None else folder
    known = drawings()
    return tuple(each for each in profiles if not set(each.missing_traces(found)) - set(known))


@functools.cache
def drawings() -> Mapping[str, Trace]:
    """Make the synthetic traces by name."""
    made = {}
    for shape, drawing, way in itertools.product(SHAPES, _DRAWINGS, ("up", "down")):
        name = f"{shape.name}-{drawing}.{way}"
        made[name] = make_trace(shape, SeededRng(f"{shape.name}.{way}", drawing), _TRACE_S)
        made[name].name = name
    return made
