"""What is known of one call while it runs: its timeline, its attempts, and in the end its record."""

import copy
import re
from collections.abc import Callable
from typing import Any, Final

from stormline.client.masking import mask_url
from stormline.core import errors, limits, limits_means, limits_netlog
from stormline.core.clock import Clock
from stormline.policy.means import Step
from stormline.telemetry import kinds
from stormline.telemetry.timeline import AttemptRecord, CallRecord, Timeline

_URL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,15}://\S+|\S+\?\S+|\S*@\S+")
_LONG: Final = re.compile(r"[A-Za-z0-9+/_=.-]{24,}")
"""What may be a token: no word is that long."""


class CallTrace:
    """Follows one call. `finish` makes the record, once; later calls do nothing.

    Attributes:
        monotonic: gives the time of its timeline.
        held: the owner will call `finish` after its own stages (parse, callback); the end of the body does not.
        untrusted: nobody vouches for the answer: it is no success, whatever its status.
        log: told of the call when its record is made, with the record; None: nobody is.
        causes: the error that ended the call and what caused it, in words, where `log` wants to know; the last first.
        parse: the business's own hook for this call; None for the client's.
        wait: keeps the record back until a verdict has come; False where it does not. None: nothing is waited for.
    """

    __slots__ = ("_attempt", "_attempt_start", "_finished", "_paused_at", "_sink", "_start", "causes", "held", "log",
                 "monotonic", "parse", "record", "timeline", "untrusted", "wait")  # fmt: skip

    def __init__(
        self, clock: Clock, call_id: str, *, method: str, host: str, path: str, business: str, network: str,
        sink: Callable[[CallRecord], None] | None,
    ) -> None:  # fmt: skip
        self.monotonic = clock.monotonic
        self._sink = sink
        self._start = self._attempt_start = clock.monotonic()
        self._attempt: AttemptRecord | None = None
        self._finished = False
        self._paused_at: float | None = None
        self.held = False
        self.untrusted = False
        self.parse: Callable[[Any], bool | None] | None = None
        self.wait: Callable[[CallTrace], bool] | None = None
        self.log: Callable[[CallTrace, CallRecord], None] | None = None
        self.causes: list[str] = []
        self.timeline = Timeline(self._start)
        self.record = CallRecord(
            call_id=call_id,
            started_at_ms=round(clock.wall() * 1000),
            method=method,
            host=host,
            path=path[: limits.RECORD_PATH_CHARS_MAX],
            business=business,
            network=network,
        )

    def enter(self, stage: str) -> None:
        """A stage begins."""
        self.timeline.enter(stage, self.monotonic())

    def note(self, line: str) -> None:
        """A decision was taken."""
        self.timeline.note(self.monotonic(), line)

    def attempt(self, step: Step) -> None:
        """A step begins."""
        now = self._attempt_start = self.monotonic()
        means = str(step.means)
        self._attempt = AttemptRecord(means=means, start_ms=(now - self._start) * 1000)
        self.record.attempts.append(self._attempt)
        self.record.means = means
        where = f" at {', '.join(map(str, step.addresses))}" if step.addresses else ""
        self.timeline.note(now, f"try {means}{where}")

    def connected(self, address: str, carrier: str, *, reused: bool) -> None:
        """The step runs over this connection."""
        attempt, record = self._attempt, self.record
        if attempt is not None:
            attempt.address, attempt.carrier, attempt.reused = address, carrier, reused
        record.address = address
        record.family = 6 if address.startswith("[") else 4 if address else 0
        self.timeline.note(self.monotonic(), f"{'reuse' if reused else 'connected'} {carrier} {address}")

    def failed_on(self, address: str, carrier: str, *, reused: bool) -> None:
        """The step that is about to fail was on this connection."""
        if self._attempt is not None:
            self._attempt.address, self._attempt.carrier, self._attempt.reused = address, carrier, reused

    def attempt_refused(self, status: int) -> None:
        """The step's answer was one that says "try again"."""
        self._end_attempt()
        if self._attempt is not None:
            self._attempt.failure = kinds.status_kind(status)

    def attempt_failed(self, error: BaseException) -> None:
        """The step failed, or the caller gave up in it."""
        self._end_attempt()
        phase = _phase(error, self.timeline.stage)
        if self._attempt is not None and not self._attempt.failure:  # what failed it first is what counts
            self._attempt.failure = _kind(error)
            self._attempt.phase = phase
            self._attempt.maybe_delivered = getattr(error, "maybe_delivered", False)
        # An exception that is not ours may quote the caller's data; its kind is enough.
        self.note(f"failed in {phase}: {error if isinstance(error, errors.StormlineError) else type(error).__name__}")

    def answered(self, status: int) -> None:
        """The head of the answer came."""
        self.record.status = status
        now = self.monotonic()
        if self.timeline.stage != "body":
            self.timeline.enter("body", now)
        self.timeline.note(now, f"status {status}")

    def handed_down(self, size: int) -> None:
        """Bytes of the request go down, once per attempt."""
        self.record.bytes_up += size

    def handed_out(self, size: int) -> None:
        """A chunk of the body goes to the consumer; the time until `pulled` is decoding, not network."""
        self.record.bytes_down += size
        self._paused_at = self.monotonic()

    def pulled(self) -> None:
        """The consumer wants the next chunk."""
        if self._paused_at is not None:
            now = self.monotonic()
            self.timeline.enter("body", now)
            self.timeline.move("body", "decode", now - self._paused_at)
            self._paused_at = None

    def body_ended(self) -> None:
        """The body came whole, or its consumer wants no more of it."""
        if self.timeline.stage == "body":
            if self._paused_at is not None:
                self.pulled()
            self.timeline.enter("callback", self.monotonic())
        self._end_attempt()
        record = self.record
        record.ok_network = not self.untrusted
        record.ok_http = record.ok_network and record.status < 400
        if record.ok_http and record.ok_parse is not False:
            record.failure = ""
        else:
            record.failure = kinds.UNTRUSTED if self.untrusted else kinds.status_kind(record.status)
            if record.ok_parse is False:
                record.failure = record.failure or "parse"
        if not self.held:
            self.finish()

    def failed(self, error: BaseException) -> None:
        """The call as a whole failed."""
        self._end_attempt()
        self.record.failure, self.record.phase = _kind(error), _phase(error, self.timeline.stage)
        self.record.ok_network = self.record.ok_http = False
        if self.log is not None:
            self.causes = causes_of(error)
        self.finish()

    def part(self, error: BaseException) -> None:
        """The caller gives up, and what it began goes on for others: the record of its call is made now."""
        sink, self._sink = self._sink, None
        if sink is not None and not self._finished:
            gone = copy.deepcopy(self.record)
            gone.failure, gone.phase = _kind(error), _phase(error, self.timeline.stage)
            gone.total_ms = (self.monotonic() - self._start) * 1000
            sink(gone)
            if self.log is not None:
                self.log(self, gone)

    def parsed(self, ok: bool, reason: str = "") -> None:
        """The business's own verdict on the body; the last one counts, until the record has been sent.

        Args:
            ok: the body is what it should be.
            reason: in a few words. What looks like a URL or a token in it is masked.
        """
        record = self.record
        record.ok_parse = ok
        if not ok and not record.failure:
            record.failure = "parse"
        elif ok and record.failure == "parse":
            record.failure = ""
        self.note(f"parse {'ok' if ok else 'failed'}{': ' + _shown(reason) if reason else ''}")

    def mark(self, ok: bool, reason: str = "") -> bool:
        """Take a verdict at any time; see `api.mark_parsed`. False where the record may have gone without it."""
        self.parsed(ok, reason)
        return self._sink is not None

    def distrust(self) -> None:
        """Nobody vouches for the answer."""
        self.untrusted = True
        self.note("nobody vouches for this answer")

    def release(self) -> None:
        """Hold no longer: the record is made now where the body has ended, else when it does."""
        self.held = False
        if self.record.ok_network or self.record.failure:
            self.finish()

    def finish(self) -> None:
        """Close the timeline and give the record to the sink."""
        if self._finished:
            return
        self._finished = True
        self.record.total_ms, self.record.stages_ms = self.timeline.finish(self.monotonic())
        if self.wait is None or self.record.ok_parse is not None or not self.record.ok_network or not self.wait(self):
            self.send()

    def divert(self, sink: Callable[[CallRecord], None]) -> None:
        """Give the record to another sink, where it has not gone yet."""
        if self._sink is not None:
            self._sink = sink

    def send(self) -> None:
        """Give the record to the sink, once."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink(self.record)
            if self.log is not None:
                self.log(self, self.record)

    def _end_attempt(self) -> None:
        attempt = self._attempt
        if attempt is not None and not attempt.duration_ms:
            attempt.duration_ms = (self.monotonic() - self._attempt_start) * 1000


def causes_of(error: BaseException) -> list[str]:
    """Give an error and what caused it in words, itself first.

    Of those that are not ours only the kind, and what the system says: the rest may quote the caller's data.
    """
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(found) < limits_netlog.NETLOG_CAUSES_MAX:
        name = type(cause).__name__
        if isinstance(cause, errors.StormlineError):
            name = f"{name}: {cause}"
        elif isinstance(cause, OSError) and cause.errno is not None:
            name = f"{name}: [{cause.errno}] {cause.strerror}"
        found.append(name)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found


def _shown(reason: str) -> str:
    """Give a reason as it may stand in a log: one line, no query, no token, no address of a person."""
    text = " ".join(str(reason)[: 4 * limits_means.PARSE_REASON_CHARS_MAX].split())
    text = "".join(char if char.isprintable() else "?" for char in text)
    text = _LONG.sub("***", _URL.sub(lambda found: mask_url(found[0]), text))
    return text[: limits_means.PARSE_REASON_CHARS_MAX]


def _kind(error: BaseException) -> str:
    return "cancelled" if not isinstance(error, Exception) else kinds.failure_kind(error)


def _phase(error: BaseException, stage: str) -> str:
    return error.phase.value if isinstance(error, errors.TransportError) else stage
