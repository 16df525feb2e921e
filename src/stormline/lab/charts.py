"""Small SVG drawings for the report. Colours are classes, so that the page sets them for light and dark."""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from stormline.lab.results import Fault, Outcome

CDF_WIDTH: Final = 340
CDF_HEIGHT: Final = 200
CDF_LEFT: Final = 34
CDF_TOP: Final = 8
CDF_PLOT: Final = (CDF_WIDTH - CDF_LEFT - 8, CDF_HEIGHT - CDF_TOP - 22)
TIMES_S: Final = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Ticks of a logarithmic axis of seconds."""
FIRST_S: Final = 0.02
"""Where that axis begins; what is quicker stands at its edge."""

LANE_WIDTH: Final = 1080
LANE_HEIGHT: Final = 54
LANE_LABEL: Final = 150
FAULT_ROW: Final = 15
FAULT_CHAR: Final = 6.2
"""Width of a letter of a fault's label, to keep labels apart."""


class Curve(NamedTuple):
    """One line of a CDF."""

    label: str
    colour: str
    """Class name."""
    times_s: Sequence[float]
    """Sorted times of the successes."""
    requests: int


class Lane(NamedTuple):
    """One client of a timeline."""

    label: str
    colour: str
    outcomes: Sequence[Outcome]


def tag(name: str, *inside: str, **attributes: str | float) -> str:
    """Give an element; `_` in a name of an attribute stands for `-`, a last one is left out (`class_`)."""
    words = [name]
    for key, value in attributes.items():
        shown = value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
        words.append(f'{key.rstrip("_").replace("_", "-")}="{html.escape(shown)}"')
    return f"<{' '.join(words)}>{''.join(inside)}</{name}>" if inside else f"<{' '.join(words)}/>"


def text(words: str, *, x: float, y: float, class_: str = "tick", anchor: str = "start") -> str:
    """Give a text element."""
    return tag("text", html.escape(words), class_=class_, x=x, y=y, text_anchor=anchor)


def title(words: str) -> str:
    """Give what is shown when the pointer rests on an element."""
    return tag("title", html.escape(words))


def cdf(curves: Iterable[Curve], label: str) -> str:
    """Draw the share of all requests that had succeeded after a time; who fails stays below the top."""
    parts = _cdf_axes()
    for curve in reversed(list(curves)):  # the first one on top
        path = [f"M{_cdf_x(0):.1f} {_cdf_y(0):.1f}"]
        for count, time_s in enumerate(curve.times_s, 1):
            path.append(f"H{_cdf_x(time_s):.1f}V{_cdf_y(count / curve.requests):.1f}")
        path.append(f"H{_cdf_x(TIMES_S[-1]):.1f}")
        told = title(f"{curve.label}: {len(curve.times_s)} of {curve.requests}")
        parts.append(tag("path", told, class_=f"curve {curve.colour}", d="".join(path)))
    return tag(
        "svg", *parts, class_="cdf", viewBox=f"0 0 {CDF_WIDTH} {CDF_HEIGHT}", role="img", aria_label=label
    )  # fmt: skip


def _cdf_x(time_s: float) -> float:
    share = math.log(max(time_s, FIRST_S) / FIRST_S) / math.log(TIMES_S[-1] / FIRST_S)
    return CDF_LEFT + CDF_PLOT[0] * min(1.0, share)


def _cdf_y(share: float) -> float:
    return CDF_TOP + CDF_PLOT[1] * (1 - share)


def _cdf_axes() -> list[str]:
    width, height = CDF_PLOT
    parts = []
    for time_s in TIMES_S:
        x, last = _cdf_x(time_s), time_s == TIMES_S[-1]
        kind = "grid patience" if time_s in (3.0, 10.0) else "grid"
        parts.append(tag("line", class_=kind, x1=x, x2=x, y1=CDF_TOP, y2=CDF_TOP + height))
        words = f"{time_s:g} s" if last else f"{time_s:g}"
        parts.append(text(words, x=x + 6 if last else x, y=CDF_HEIGHT - 6, anchor="end" if last else "middle"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _cdf_y(share)
        parts.append(tag("line", class_="grid", x1=CDF_LEFT, x2=CDF_LEFT + width, y1=y, y2=y))
        if share in (0, 0.5, 1):
            parts.append(text(f"{share * 100:.0f}{'%' if share else ''}", x=CDF_LEFT - 5, y=y + 3.5, anchor="end"))
    return parts


def brief(what: str) -> str:
    """Give a fault's name without its particulars (`dark uplink=wifi0` is `dark`)."""
    return " ".join(word for word in what.split() if "=" not in word) or what


def rows_for(faults: Sequence[Fault], scale: float) -> list[int]:
    """Give each fault's label a row, so that labels do not lie on one another. Faults are in order of time."""
    ends: list[float] = []
    rows = []
    for fault in faults:
        begin = fault.at_s * scale
        row = next((row for row, end in enumerate(ends) if end <= begin), len(ends))
        ends[row : row + 1] = [begin + FAULT_CHAR * len(brief(fault.what)) + 8]
        rows.append(row)
    return rows


def timeline(lanes: Sequence[Lane], faults: Sequence[Fault], until_s: float, patience_s: float) -> str:
    """Draw one run: each request a dot at the moment it was asked, as high as it took; faults as bands behind."""
    scale = (LANE_WIDTH - LANE_LABEL - 8) / until_s
    ordered = sorted(faults)
    rows = rows_for(ordered, scale)
    top = FAULT_ROW * (max(rows, default=-1) + 1) + 6
    bottom = top + LANE_HEIGHT * len(lanes)

    def x(time_s: float) -> float:
        return LANE_LABEL + scale * min(max(time_s, 0.0), until_s)

    parts: list[str] = []
    for fault, row in zip(ordered, rows, strict=True):
        begin, end, y = x(fault.at_s), x(fault.until_s), FAULT_ROW * row
        told = title(f"{fault.what}, {fault.at_s:.1f} to {min(fault.until_s, until_s):.1f} s")
        parts.append(
            tag("rect", told, class_="fault", x=begin, y=y, width=max(1.5, end - begin), height=bottom - y)
        )  # fmt: skip
        parts.append(text(brief(fault.what), class_="fault-label", x=begin + 3, y=y + 11))
    parts += [_lane(lane, top + LANE_HEIGHT * place, x, patience_s) for place, lane in enumerate(lanes)]
    step_s = 5 if until_s <= 60 else 10 if until_s <= 150 else 60
    parts += [
        text(f"{time_s} s" if time_s == 0 else f"{time_s}", x=x(time_s), y=bottom + 15, anchor="middle")
        for time_s in range(0, int(until_s) + 1, step_s)
    ]
    return tag(
        "svg", *parts, class_="timeline", viewBox=f"0 0 {LANE_WIDTH} {bottom + 22}", role="img", aria_label="timeline"
    )  # fmt: skip


def _lane(lane: Lane, top: float, x: Callable[[float], float], patience_s: float) -> str:
    height, base, right = LANE_HEIGHT - 16, top + LANE_HEIGHT - 4, LANE_WIDTH - 8

    def y(took_s: float) -> float:
        # The root gives the many quick ones room and keeps the slow ones on the page.
        return base - 3 - height * math.sqrt(min(took_s, patience_s) / patience_s)

    good = sum(1 for outcome in lane.outcomes if not outcome.kind)
    middle = base - height / 2
    parts = [
        text(lane.label, class_=f"lane {lane.colour}", x=0, y=middle - 2),
        text(f"{good} of {len(lane.outcomes)}", x=0, y=middle + 12),
        tag("line", class_="grid", x1=LANE_LABEL, x2=right, y1=base, y2=base),
        tag("line", class_="grid faint", x1=LANE_LABEL, x2=right, y1=y(1), y2=y(1)),
        text("1 s", x=LANE_LABEL - 5, y=y(1) + 3, anchor="end"),
        text("10 s", x=LANE_LABEL - 5, y=y(10) + 3, anchor="end"),
    ]
    for outcome in lane.outcomes:
        at, high = x(outcome.at_s), y(outcome.took_s)
        told = title(f"asked at {outcome.at_s:.2f} s, {outcome.kind or 'right'} after {outcome.took_s:.2f} s")
        if outcome.kind:
            cross = f"M{at - 2.5:.1f} {high - 2.5:.1f}l5 5m0 -5l-5 5"
            parts.append(tag("path", told, class_="failed", d=cross))
        else:
            parts.append(tag("circle", told, class_=f"dot {lane.colour}", cx=at, cy=high, r=2.2))
    return "".join(parts)
