"""Asking scheduling centres one question: down the ladder of `policy.asking`, the next beside a silent one."""

import asyncio
import datetime
import email.utils
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from stormline.client import fetch
from stormline.core import errors, limits, limits_platform
from stormline.core.clock import Clock, Rng
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.messages import field_value
from stormline.outbound.pool import HttpPool
from stormline.policy.asking import Centres, Question, Rung, Way
from stormline.wire.bundle import Bundle
from stormline.wire.plan import CLEAR_CENTRE, Carrier, Plan

_log = logging.getLogger("stormline.client")
T = TypeVar("T")
Lookup = Callable[[str, int], Awaitable[tuple[Address, ...]]]
"""Finds the addresses of a name; raises OSError."""


class Asker:
    """Knows the ways to the centres of one bundle, and what became of them.

    Args:
        bundle: bootstrap addresses and names.
        pool: connections to roles.
        clock: time.
        rng: spreads pauses.
        doh: looks names up by DNS over HTTPS alone; None: there is none.
        names: looks names up as all names of the client are; None: names are left to the pool.
    """

    def __init__(
        self,
        bundle: Bundle,
        pool: HttpPool,
        clock: Clock,
        rng: Rng,
        *,
        doh: Lookup | None = None,
        names: Lookup | None = None,
    ) -> None:
        self._bundle = bundle
        self._pool = pool
        self._clock = clock
        self._rng = rng
        self._doh = doh
        self._names = names
        self._sniffing: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[object]] = set()
        self.centres = Centres()

    def ways(self, plan: Plan | None, unit: str, *, line: bool) -> list[Way]:
        """Give every way there is, in no order.

        Args:
            plan: the plan held: it may name centres.
            unit: the device's own unit, empty where it is not known.
            line: a long connection stands.
        """
        found = [Way(Rung.LINE)] if line else []
        for each in plan.centres if plan is not None else ():
            if each.carrier in (Carrier.H1, CLEAR_CENTRE):
                secure = each.carrier == Carrier.H1
                found += self._at(Address(each.host, each.port), each.unit, unit, secure=secure, told=True)
        for centre in self._bundle.centres:
            found += self._at(Address(centre.host, centre.port), centre.unit, unit)
            if centre.plain_port:
                found += self._at(Address(centre.host, centre.plain_port), centre.unit, unit, secure=False)
        for address in self._bundle.addresses():
            found += self._at(address, "", unit)
        return found

    def _at(self, address: Address, its: str, own: str, *, secure: bool = True, told: bool = False) -> list[Way]:
        if not address.is_ip:
            rungs = (Rung.DOH, Rung.DNS) if self._doh is not None else (Rung.DNS,)
        elif its or told:
            rungs = (Rung.OWN if its == own and own else Rung.OTHER,)
        else:
            rungs = (Rung.BOOTSTRAP,)
        return [Way(rung, address.host, address.port, secure) for rung in rungs]

    async def ask(self, ways: Iterable[Way], one: Callable[[Way], Awaitable[T]]) -> T:
        """Ask until one way gives an answer that `one` takes. Safe to cancel: nothing stays under way but a sniff.

        Args:
            ways: see `ways`.
            one: asks one way, and raises where its answer is not to be trusted.

        Raises:
            AnswerRejected: answers came, and none may be trusted.
            DispatchUnreachable: nobody answered.
        """
        ways = tuple(ways)
        question = Question(self.centres.plan(ways), self.centres.stagger_s, self._clock.monotonic())
        live: dict[asyncio.Task[T], tuple[Way, float]] = {}
        failures: list[str] = []
        rejected: errors.AnswerRejected | None = None
        try:
            while not question.over:
                now = self._clock.monotonic()
                for way in question.plan(now):
                    _log.debug("dispatch: asking %s", way)
                    live[asyncio.ensure_future(one(way))] = (way, now)
                due = question.next_timer()
                wait_s = None if due is None else max(0.0, due - self._clock.monotonic())
                done, _ = await asyncio.wait(live, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda each: live[each][1]):
                    way, began = live.pop(task)
                    error = task.exception()
                    now = self._clock.monotonic()
                    if error is None:
                        self._answered(way, began, now, live, ways, one)
                        return task.result()
                    if not isinstance(error, errors.StormlineError | OSError):
                        raise error
                    reason = str(error) or "no answer in time"
                    _log.debug("dispatch: %s: %s", way, reason)
                    if isinstance(error, errors.AnswerRejected):
                        rejected = error
                    failures.append(f"{way}: {reason}")
                    self.centres.observe_failure(way, now, self._rng.random())
                    question.observe(way, now)
        finally:
            for task in live:
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ended)
        if rejected is not None:
            raise rejected
        raise errors.DispatchUnreachable(f"dispatch cannot be reached: {'; '.join(failures)}")

    def _answered(
        self, way: Way, began: float, now: float, live: dict[asyncio.Task[T], tuple[Way, float]],
        ways: tuple[Way, ...], one: Callable[[Way], Awaitable[T]],
    ) -> None:  # fmt: skip
        _log.debug("dispatch: %s has answered", way)
        self.centres.observe_answer(way, now - began, now)
        for silent, since in live.values():
            if since < began:
                self.centres.observe_failure(silent, now, self._rng.random())
        sunk = self.centres.sniff(ways, way, now)
        if sunk is not None and (self._sniffing is None or self._sniffing.done()):
            self._sniffing = asyncio.create_task(self._sniff(sunk, one), name="stormline sniff dispatch")

    async def _sniff(self, way: Way, one: Callable[[Way], Awaitable[object]]) -> None:
        began = self._clock.monotonic()
        _log.debug("dispatch: asking %s once more", way)
        try:
            await one(way)
        except (errors.StormlineError, OSError):
            self.centres.observe_failure(way, self._clock.monotonic(), self._rng.random())
        else:
            now = self._clock.monotonic()
            _log.debug("dispatch: %s has answered", way)
            self.centres.observe_answer(way, now - began, now)

    def _ended(self, task: "asyncio.Task[object]") -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio would report that nobody looked

    async def post(self, way: Way, path: str, body: bytes) -> fetch.Answer:
        """POST to one centre.

        Raises:
            TransportError: no whole answer came.
            TimeoutError: none came in time.
            OSError: its name has no address.
        """
        address = Address(way.host, way.port)
        async with asyncio.timeout(limits_platform.DISPATCH_TRY_S):
            found = await self._look_up(way, address)
            return await fetch.post(
                self._pool,
                address=address,
                server_name=self._bundle.dispatch_name,
                path=path,
                headers=((b"content-type", b"application/json"),),
                body=body,
                timeout_s=limits_platform.DISPATCH_TRY_S,
                size_max=limits.PLAN_BYTES_MAX,
                secure=way.secure,
                addresses=found,
            )

    async def _look_up(self, way: Way, address: Address) -> tuple[Address, ...] | None:
        lookup = {Rung.DOH: self._doh, Rung.DNS: self._names}.get(way.rung)
        if lookup is None:
            return None
        found = await lookup(address.host, address.port)
        if not found:
            raise errors.ResolveError(f"{address.host} has no address", phase=Phase.RESOLVE, maybe_delivered=False)
        return found

    def cancel(self) -> list["asyncio.Task[object]"]:
        """End what is under way; give the tasks that are ending."""
        tasks = list(self._ending)
        if self._sniffing is not None:
            tasks.append(self._sniffing)
        for task in tasks:
            task.cancel()
        return tasks


def date_of(answer: fetch.Answer) -> float | None:
    """Give the `Date` of an answer (RFC 9110 section 6.6.1), seconds since 1970; None where it has no sound one."""
    raw = field_value(answer.headers, b"date")
    if raw is None:
        return None
    try:
        date = email.utils.parsedate_to_datetime(raw.decode("ascii"))
        return date.replace(tzinfo=date.tzinfo or datetime.UTC).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None
