"""Calls that an app leaves here, and that are made when there is a way: kept on disk, in order, each done once.

What is left lies on disk before `Outbox.put` returns. Each entry travels with its id as idempotency key, as often as
it takes until the service has answered; so a service that knows the key does the work once, whatever was lost.
Entries of one lane are sent one after the other, in the order they were left; lanes go beside each other. An entry
belongs to the user who was logged in when it was left, and waits until that user is again.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar

from stormline.client.ledger import Entry, Ledger, Settled
from stormline.core import errors, ids
from stormline.core import limits_outbox as limits
from stormline.core.clock import Clock, Rng
from stormline.core.codes import Code

_log = logging.getLogger("stormline.client")
_T = TypeVar("_T")
_LATER: Final = frozenset(
    {Code.CALL_NOT_FOUND, Code.CALL_UNAVAILABLE, Code.CALL_DEADLINE, Code.CALL_CANCELLED, Code.CALL_TOO_MANY}
)
"""Refusals that say nothing of the call itself: no service answers to its name just now, or has no time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call that was left has ended.

    Attributes:
        id: its id.
        method: what was called.
        state: `answered`; `refused`: the service or the gateway said no for good; `expired`: it waited for too long.
        answer: what the service answered, None else.
        code: the code of a refusal (`core.codes`), 0 else.
        reason: of a refusal, for people.
    """

    id: str
    method: str
    state: Literal["answered", "refused", "expired"]
    answer: Any = None
    code: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call that was left and has not ended.

    Attributes:
        id: its id.
        method: what is to be called.
        lane: its lane.
        user: whose it is, empty for nobody's.
        tries: attempts that the service answered with a fault of its own.
    """

    id: str
    method: str
    lane: str
    user: str
    tries: int


Told = Callable[[Outcome], Awaitable[None] | None]


class Caller(Protocol):
    """What the outbox needs of its channel."""

    @property
    def user(self) -> str | None:
        """The user of the session that stands; None where none stands."""
        ...

    async def deliver(self, method: str, body: bytes, key: str, deadline_s: float, user: str) -> Any:
        """Make a call once, over that user's session, and give its answer; raises as `Channel.call`."""
        ...


class Outbox:
    """The calls left by one app on one device.

    Args:
        path: its file, None: in memory, and gone with the process.
        caller: makes the calls.
        told: called with every outcome.
        clock: for their lives.
        rng: draws ids and spreads pauses.
        alone: no living process has the device's lock but this.
    """

    def __init__(
        self, path: Path | None, caller: Caller, told: Sequence[Told], clock: Clock, rng: Rng, *, alone: bool
    ) -> None:
        self._path = path
        self._caller = caller
        self._clock = clock
        self._rng = rng
        self._alone = alone
        self._told = told
        self._ledger: Ledger | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stormline outbox")
        self._wake = asyncio.Event()
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by lane
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._closed = False
        self._worker = asyncio.create_task(self._work(), name="stormline outbox")

    def welcomed(self) -> None:
        """A session stands: what failed for want of one is tried at once."""
        self._not_before.clear()
        self._wake.set()

    async def close(self) -> None:
        """Stop to send; what is under way goes again the next time."""
        self._closed = True
        tasks = [*self._under_way.values(), self._worker]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, ledger.close)
        self._thread.shutdown(wait=False)

    async def put(self, method: str, body: bytes, *, user: str, id_: str, lane: str, life_s: float) -> str:
        """Keep a call; see `Channel.enqueue`."""
        if not 0 < life_s <= limits.OUTBOX_LIFE_MAX_S:
            raise errors.ConfigError(f"life_s={life_s!r}: above 0, at most {limits.OUTBOX_LIFE_MAX_S:.0f}")
        if len(lane) > limits.OUTBOX_LANE_CHARS_MAX:
            raise errors.ConfigError(f"lane: at most {limits.OUTBOX_LANE_CHARS_MAX} characters")
        if len(id_) > limits.OUTBOX_KEY_CHARS_MAX or not (id_.isascii() and id_.isprintable()) or " " in id_:
            raise errors.ConfigError(f"id: expected 1 to {limits.OUTBOX_KEY_CHARS_MAX} printable ASCII characters")
        id_ = id_ or ids.new_id(self._rng)
        entry = Entry(0, id_, user, lane, method, body, self._now_ms() + int(life_s * 1000), 0)
        await self._ask(lambda ledger: ledger.put(entry))
        self._wake.set()
        return id_

    async def waiting(self) -> list[Waiting]:
        """Give what waits or is under way."""
        entries = await self._ask(Ledger.waiting)
        return [Waiting(entry.id, entry.method, entry.lane, entry.user, entry.tries) for entry in entries]

    async def withdraw(self, id_: str) -> bool:
        """Take a call back that is not under way; True where it will not be made."""
        now_ms = self._now_ms()
        return await self._ask(lambda ledger: ledger.withdraw(id_, now_ms))

    async def _ask(self, question: Callable[[Ledger], _T]) -> _T:
        def ask() -> _T:
            if self._ledger is None:
                self._ledger = Ledger(self._path, ids.new_id(self._rng), alone=self._alone)
                if self._ledger.set_aside:
                    _log.warning("outbox %s was damaged: it was put aside, and a new one begun", self._path)
            return question(self._ledger)

        if self._closed:
            raise errors.LocalProtocolError("the channel is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, ask)

    def _now_ms(self) -> int:
        return int(self._clock.wall() * 1000)

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Send whenever something can be sent."""
        while True:
            self._wake.clear()
            try:
                await self._look()
            except errors.OutboxError as error:
                _log.warning("%s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._next_look_s()):
                    await self._wake.wait()

    async def _look(self) -> None:
        now_ms = self._now_ms()
        for settled in await self._ask(lambda ledger: [*ledger.untold(now_ms), *ledger.expire(now_ms)]):
            await self._tell(settled)
        user = self._caller.user
        room = limits.OUTBOX_AT_ONCE - len(self._under_way)
        if user is None or room <= 0:
            return
        now = self._clock.monotonic()
        pausing = {lane for lane, at in self._not_before.items() if at > now}
        busy = {*self._under_way, *pausing}
        for entry in await self._ask(lambda ledger: ledger.claim(user, busy, room, now_ms)):
            task = asyncio.create_task(self._send(entry), name=f"stormline outbox {entry.method}")
            self._under_way[entry.lane] = task
            task.add_done_callback(functools.partial(self._sent, entry.lane))

    def _sent(self, lane: str, task: asyncio.Task[None]) -> None:
        self._under_way.pop(lane, None)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("%s", error)

    def _next_look_s(self) -> float:
        now = self._clock.monotonic()
        return max(0.0, min([at - now for at in self._not_before.values() if at > now] + [limits.OUTBOX_LOOK_S]))

    async def _send(self, entry: Entry) -> None:
        try:
            answer = await self._caller.deliver(entry.method, entry.body, entry.id, limits.OUTBOX_CALL_S, entry.user)
        except errors.CallError as error:
            fault = (error.code == Code.CALL_FAILED and error.maybe_delivered) or error.code == Code.CALL_UPSTREAM
            if error.code in _LATER or (fault and entry.tries + 1 < limits.OUTBOX_ANSWERED_TRIES_MAX):
                await self._later(entry, error.retry_after_s, answered=fault)
            else:
                await self._settle(entry, "refused", error.reason.encode(), error.code)
        except errors.DecodeError as error:  # it was answered, by something that is no JSON
            await self._settle(entry, "refused", str(error).encode(), Code.CALL_FAILED)
        except (errors.TransportError, errors.RefusedError, errors.LocalProtocolError):
            await self._later(entry, None, answered=False)
        else:
            await self._settle(entry, "answered", json.dumps(answer, separators=(",", ":")).encode(), 0)

    async def _later(self, entry: Entry, after_s: float | None, *, answered: bool) -> None:
        failures = self._failures[entry.lane] = min(self._failures.get(entry.lane, 0) + 1, 32)
        pause_s = min(limits.OUTBOX_PAUSE_MAX_S, limits.OUTBOX_PAUSE_FIRST_S * 2.0 ** (failures - 1))
        pause_s = max(min(after_s or 0.0, limits.OUTBOX_PAUSE_MAX_S), pause_s * (0.5 + self._rng.random() / 2))
        self._not_before[entry.lane] = self._clock.monotonic() + pause_s
        await self._ask(lambda ledger: ledger.free(entry, answered=answered))

    async def _settle(self, entry: Entry, state: Literal["answered", "refused"], outcome: bytes, code: int) -> None:
        now_ms = self._now_ms()
        await self._tell(await self._ask(lambda ledger: ledger.settle(entry, state, outcome, code, now_ms)))

    async def _tell(self, settled: Settled) -> None:
        """Tell the app, then forget: killed in between, it is told again."""
        entry, answer, reason = settled.entry, None, ""
        self._failures.pop(entry.lane, None)  # also of what has expired: lanes may have a new name for each order
        self._not_before.pop(entry.lane, None)
        if settled.state == "answered":
            answer = json.loads(settled.outcome)
        else:
            reason = settled.outcome.decode("utf-8", "replace")
        outcome = Outcome(entry.id, entry.method, settled.state, answer, settled.code, reason)
        for told in self._told:
            try:
                done = told(outcome)
                if inspect.isawaitable(done):
                    await done
            except Exception:
                _log.exception("a listener of the outbox failed")
        await self._ask(lambda ledger: ledger.forget(entry))
