"""The timeline of one request: every stage from the call to the result in the caller's hand.

Pure: the caller passes `now`. A timeline belongs to one call and is not shared between tasks.
"""

from __future__ import annotations

from typing import Final

import msgspec

from stormline.core import limits

STAGES: Final = (
    "queued", "plan", "resolve", "connect", "tls", "send", "first_byte", "body", "decode", "parse", "callback",
)  # fmt: skip
"""The stages in their order; also the columns of the store."""


class AttemptRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One attempt of a call, by one means over one connection.

    Attributes:
        means: `long`, `direct`, ...
        address: `ip:port` of the peer, empty where none was reached.
        carrier: `sl-tls`, `h1`, ...
        reused: the connection existed before.
        failure: kind of failure, empty for none.
        phase: where it failed.
        maybe_delivered: the request may have been processed.
        start_ms: offset from the call's start.
        duration_ms: how long the attempt took.
    """

    means: str
    address: str = ""
    carrier: str = ""
    reused: bool = False
    failure: str = ""
    phase: str = ""
    maybe_delivered: bool = False
    start_ms: float = 0.0
    duration_ms: float = 0.0


class CallRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One call after all its means, as it is reported. Holds no query values, headers, bodies or credentials.

    Attributes:
        call_id: unique per call; the part before the dash is random and common to one client.
        started_at_ms: wall time of the call, milliseconds since 1970.
        method: HTTP method, or `CALL` for an RPC.
        host: the request's host, or the RPC service.
        path: path without query, or the RPC method.
        business: the caller's tag for the business it belongs to.
        status: HTTP status, 0 where no answer came.
        ok_network: an answer came whole.
        ok_http: its status is below 400.
        ok_parse: the business's own verdict on the body; None where it gave none.
        failure: kind of the last failure, empty for none.
        phase: where the last failure happened.
        plan_version: version of the plan it was made by, 0 where there was none.
        network: kind of network, `wifi`, `cell`, `wired` or `unknown`.
        family: 4 or 6, 0 where no connection was made.
        means: the means that succeeded, or the last one tried.
        address: peer that answered.
        bytes_up: request bytes handed down, headers included.
        bytes_down: answer body bytes as they came.
        total_ms: call to callback.
        stages_ms: duration by stage name; a stage that did not happen is absent.
        attempts: every attempt in order.
    """

    call_id: str
    started_at_ms: int
    method: str
    host: str
    path: str
    business: str = ""
    status: int = 0
    ok_network: bool = False
    ok_http: bool = False
    ok_parse: bool | None = None
    failure: str = ""
    phase: str = ""
    plan_version: int = 0
    network: str = "unknown"
    family: int = 0
    means: str = ""
    address: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    total_ms: float = 0.0
    stages_ms: dict[str, float] = {}
    attempts: list[AttemptRecord] = []

    @property
    def ok(self) -> bool:
        """Business success: network, HTTP and, where there is a verdict, parse."""
        return self.ok_network and self.ok_http and self.ok_parse is not False


_KNOWN: Final = frozenset(STAGES)


def _check(stage: str) -> None:
    if stage not in _KNOWN:
        raise ValueError(f"no such stage: {stage!r}")


class Timeline:
    """Collects how long each stage took. Re-entering a stage (a second attempt) adds to it.

    At any moment one stage is open; entering the next closes it, so the stages add up to the whole.

    Attributes:
        stage: the open one.
        story: decisions in words, at most `limits.STORY_LINES_MAX`: (seconds since the start, line).
    """

    __slots__ = ("_now", "_stages", "_start", "stage", "story")

    def __init__(self, now: float) -> None:
        self._start = self._now = now
        self.stage = "queued"
        self._stages: dict[str, float] = {}  # milliseconds
        self.story: list[tuple[float, str]] = []

    def enter(self, stage: str, now: float) -> None:
        """Close the open stage and open `stage`.

        Args:
            stage: one of `STAGES`.
            now: monotonic seconds; a step back counts as no time.
        """
        if stage not in _KNOWN:
            _check(stage)
        spent = (now - self._now) * 1000.0
        if spent > 0.0:
            self._now = now
        else:
            spent = 0.0
        stages, ended = self._stages, self.stage
        stages[ended] = stages[ended] + spent if ended in stages else spent
        self.stage = stage

    def move(self, source: str, target: str, seconds: float) -> None:
        """Book `seconds` of what was counted under `source` on `target` instead (body read v decoding).

        The open stage has counted nothing since it was entered: enter the next one first.
        """
        if target not in _KNOWN:
            _check(target)
        stages = self._stages
        counted = stages.get(source, 0.0)
        taken = min(counted, seconds * 1000.0)
        if taken > 0.0:
            stages[source] = counted - taken
            stages[target] = stages[target] + taken if target in stages else taken

    def note(self, now: float, line: str) -> None:
        """Add one decision to the story."""
        if len(self.story) < limits.STORY_LINES_MAX:
            self.story.append((now - self._start, line))

    def finish(self, now: float) -> tuple[float, dict[str, float]]:
        """Close the open stage; give total and stages, as they were first entered, in milliseconds."""
        self.enter(self.stage, now)
        return (self._now - self._start) * 1000.0, self._stages.copy()
