"""What is known of one call while it runs: its timeline, its attempts, and in the end its record."""

from collections.abc import Callable

from stormline.core import errors, limits
from stormline.core.clock import Clock
from stormline.policy.means import Step
from stormline.telemetry import kinds
from stormline.telemetry.timeline import AttemptRecord, CallRecord, Timeline


class CallTrace:
    """Follows one call. `finish` makes the record, once; later calls do nothing.

    Attributes:
        held: the owner will call `finish` after its own stages (parse, callback); the end of the body does not.
    """

    def __init__(
        self, clock: Clock, call_id: str, *, method: str, host: str, path: str, business: str, network: str,
        sink: Callable[[CallRecord], None] | None,
    ) -> None:  # fmt: skip
        self._monotonic = clock.monotonic
        self._sink = sink
        self._start = clock.monotonic()
        self._attempt_start = self._start
        self._attempt: AttemptRecord | None = None
        self._finished = False
        self._paused_at: float | None = None
        self.held = False
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
        self.timeline.enter(stage, self._monotonic())

    def note(self, line: str) -> None:
        """A decision was taken."""
        if len(self.timeline.story) < limits.STORY_LINES_MAX:
            self.timeline.note(self._monotonic(), line)

    def attempt(self, step: Step) -> None:
        """A step begins."""
        self._attempt_start = self._monotonic()
        self._attempt = AttemptRecord(means=step.means.value, start_ms=(self._attempt_start - self._start) * 1000)
        self.record.attempts.append(self._attempt)
        self.record.means = step.means.value
        where = f" at {', '.join(map(str, step.addresses))}" if step.addresses else ""
        self.note(f"try {step.means}{where}")

    def connected(self, address: str, carrier: str, *, reused: bool) -> None:
        """The step runs over this connection."""
        if self._attempt is not None:
            self._attempt.address, self._attempt.carrier, self._attempt.reused = address, carrier, reused
        self.record.address = address
        self.record.family = _family(address)
        self.note(f"{'reuse' if reused else 'connected'} {carrier} {address}")

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
        self.enter("body")
        self.note(f"status {status}")

    def handed_down(self, size: int) -> None:
        """Bytes of the request go down, once per attempt."""
        self.record.bytes_up += size

    def handed_out(self, size: int) -> None:
        """A chunk of the body goes to the consumer; the time until `pulled` is decoding, not network."""
        self.record.bytes_down += size
        self._paused_at = self._monotonic()

    def pulled(self) -> None:
        """The consumer wants the next chunk."""
        if self._paused_at is not None:
            now = self._monotonic()
            self.timeline.enter("body", now)
            self.timeline.move("body", "decode", now - self._paused_at)
            self._paused_at = None

    def body_ended(self) -> None:
        """The body came whole, or its consumer wants no more of it."""
        if self.timeline.stage == "body":
            self.pulled()
            self.enter("callback")
        self._end_attempt()
        self.record.ok_network = True
        self.record.ok_http = self.record.status < 400
        self.record.failure = kinds.status_kind(self.record.status)
        if not self.held:
            self.finish()

    def failed(self, error: BaseException) -> None:
        """The call as a whole failed."""
        self._end_attempt()
        self.record.failure, self.record.phase = _kind(error), _phase(error, self.timeline.stage)
        self.record.ok_network = self.record.ok_http = False
        self.finish()

    def parsed(self, ok: bool, reason: str = "") -> None:
        """The business's own verdict on the body."""
        self.record.ok_parse = ok
        if not ok and not self.record.failure:
            self.record.failure = "parse"
        self.note(f"parse {'ok' if ok else 'failed'}{': ' + reason if reason else ''}")

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
        self.record.total_ms, self.record.stages_ms = self.timeline.finish(self._monotonic())
        if self._sink is not None:
            self._sink(self.record)

    def _end_attempt(self) -> None:
        if self._attempt is not None and not self._attempt.duration_ms:
            self._attempt.duration_ms = (self._monotonic() - self._attempt_start) * 1000


def _kind(error: BaseException) -> str:
    return "cancelled" if not isinstance(error, Exception) else kinds.failure_kind(error)


def _phase(error: BaseException, stage: str) -> str:
    return error.phase.value if isinstance(error, errors.TransportError) else stage


def _family(address: str) -> int:
    """Give the IP version of `ip:port`, 0 where there is none."""
    return 6 if address.startswith("[") else 4 if address else 0
