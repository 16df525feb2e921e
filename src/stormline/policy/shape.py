"""What a request looks like to the time-outs: its pattern, its sizes, its class of path.

Pure helpers; nothing here is learned.
"""

import enum
import math
import re
from typing import Final, NamedTuple

from stormline.core import limits

ANSWER_BYTES_UNKNOWN: Final = 128 * 1024
"""Size of an answer nobody knows anything of: the largest a signalling request gets (the time-outs article)."""
_DURATION: Final = re.compile(r';\s*dur\s*=\s*"?(\d{1,9}(?:\.\d{1,9})?)"?\s*(?:;|$)', re.ASCII | re.IGNORECASE)


class Pattern(enum.StrEnum):
    """How question and answer follow each other; each has its own rules (`timeouts.TimeoutPolicy.plan`)."""

    CALL = "call"
    """One question, one answer of moderate size."""
    LONG_POLL = "long-poll"
    """The server holds the question until it has something to say."""
    STREAM = "stream"
    """An answer that goes on while there is something to tell (SSE), or a stream both ways. May be idle for hours."""
    UPLOAD = "upload"
    """A large request: its sending is watched, not its length in time."""
    DOWNLOAD = "download"
    """A large answer: the same."""


class Network(NamedTuple):
    """Where requests go out.

    Attributes:
        id: the same for the same network, another for another; the kind is part of its history.
        kind: `wifi`, `wired`, `cell` or `unknown`.
    """

    id: str
    kind: str = "unknown"


class Queue(NamedTuple):
    """What goes before this request on the same link.

    Attributes:
        requests: requests in flight.
        bytes_up: bytes of requests not yet sent.
        bytes_down: bytes of answers still to come; what is expected where the length is not known.
        waited_s: how long the one that waits longest for its first packet has waited (seconds).
    """

    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    waited_s: float = 0.0


NO_QUEUE: Final = Queue()
"""Nothing goes before."""


class RequestShape(NamedTuple):
    """One request, as far as its time-outs care.

    Attributes:
        host: its host.
        path_class: see `path_class`.
        pattern: how it behaves.
        request_bytes: its size, head included; 0 where nobody knows.
        answer_bytes: size of its answer where known; else what was learned, else `ANSWER_BYTES_UNKNOWN`.
        server_cost_s: what the server needs, where configured; else what was learned.
        hold_s: how long the server of a long poll may hold it; None: `limits.LONG_POLL_HOLD_S`.
    """

    host: str
    path_class: str = ""
    pattern: Pattern = Pattern.CALL
    request_bytes: int = 0
    answer_bytes: int | None = None
    server_cost_s: float | None = None
    hold_s: float | None = None


def path_class(method: str, path: str) -> str:
    """Give the class a request is learned under: method and first parts of the path, identifiers as `*`.

    `GET /users/4711/orders?page=2` is in the class `GET /users/*/orders`. At most
    `limits.PATH_CLASS_CHARS_MAX` characters.
    """
    parts = path.split("?", 1)[0].split("/", 4)[1:4]
    named = ("*" if len(part) > 20 or any("0" <= char <= "9" for char in part) else part for part in parts)
    return f"{method} /{'/'.join(named)}"[: limits.PATH_CLASS_CHARS_MAX]


def server_timing_s(value: str) -> float | None:
    """Read the server's own time from a `Server-Timing` header (W3C Server Timing, section 4).

    Returns:
        The metric `total` where there is one, else the longest; seconds; None where there is none that can be read.
    """
    longest = None
    for metric in value[:4096].split(","):
        found = _DURATION.search(metric)
        if found is None:
            continue
        seconds = float(found[1]) / 1000.0
        if metric.strip().lower().startswith("total;"):
            return seconds
        longest = seconds if longest is None else max(longest, seconds)
    return longest if longest is None or math.isfinite(longest) else None
