"""Asking the scheduling centre: by address, verified, cached; getting this device its token, and its user's home."""

import asyncio
import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from stormline.client import fetch
from stormline.client.acceptance import Acceptance
from stormline.client.asking import Asker, Lookup, date_of
from stormline.client.config import Config
from stormline.client.residence import Residence
from stormline.client.store import Store
from stormline.core import errors, limits, limits_network, limits_platform
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.outbound.pool import HttpPool
from stormline.policy.asking import Rung, Way
from stormline.wire import hostname, messages, plan, tokens
from stormline.wire.bundle import Bundle
from stormline.wire.plan import Home, HostPlan, Plan, PlanRequest

_log = logging.getLogger("stormline.client")
Through = Callable[[bytes], Awaitable[bytes]]
"""Asks a question through the long connection: JSON of a `PlanRequest` -> signed plan. Raises StormlineError."""


class _Enrolled(msgspec.Struct):
    device: str
    token: str
    expires_at: int


class _Refusal(msgspec.Struct):
    code: str = ""
    message: str = ""


class _RefusalBody(msgspec.Struct):
    error: _Refusal


class Scheduling:
    """The client's side of dispatch for one bundle: whom to ask is `asking`'s, what to believe `acceptance`'s.

    Identical questions in flight are joined; an answer serves until it expires, measured on the monotonic clock, so
    a step of the wall clock neither ages nor refreshes it. After an outage dispatch is left alone for
    `limits.PLAN_RETRY_S` and longer from failure to failure; a plan that has expired meanwhile still serves (`stale`).
    One that expired lately serves without a wait, while a newer one is asked for; the next request goes by that.

    Attributes:
        network: gives the kind of network for the next question; empty where it is not known.
        rejects: answers that were not believed, by reason.
        through: asks through the long connection; None: there is none.
        line_stands: says whether it stands.
    """

    def __init__(
        self,
        config: Config,
        bundle: Bundle,
        pool: HttpPool,
        clock: Clock,
        store: Store | None,
        *,
        rng: Rng,
        doh: Lookup | None = None,
        names: Lookup | None = None,
    ) -> None:
        self._bundle = bundle
        self._clock = clock
        self._rng = rng
        self._store = store
        self._asker = Asker(bundle, pool, clock, rng, doh=doh, names=names)
        self._acceptance = Acceptance(bundle, clock, store)
        self._hosts: OrderedDict[str, None] = OrderedDict.fromkeys(bundle.preload)
        self._not_before = 0.0
        self._failures = 0
        self._last_error: errors.DispatchError | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asking_next: asyncio.Task[None] | None = None
        self._notice_timer: asyncio.TimerHandle | None = None
        self._noticed: asyncio.Future[None]
        self._notice_at = 0.0
        self._residence = Residence(bundle.app, clock, store)
        self._hold_token(config.token.reveal() if config.token is not None else bundle.token)
        self._token_given = bool(self._token)
        self._own: str | None = None  # the device's own token, while a user's is in its place
        self._enrolling: asyncio.Task[str] | None = None
        self._unit_told = ""
        self._role = ""
        self.network: Callable[[], str] = str
        self.rejects: dict[str, int] = {}
        self.through: Through | None = None
        self.line_stands: Callable[[], bool] = lambda: False
        if store is not None:
            self._restore(store)

    def _restore(self, store: Store) -> None:
        if not self._token:
            self._hold_token(store.load_token())
        self._residence.restore(self._acceptance.keys)
        restored = self._acceptance.restore()
        if restored is not None:
            self._unit_told = restored.unit
            self._hosts.update(dict.fromkeys(list(restored.hosts)[: limits.PLAN_HOSTS_MAX]))

    def bind(self, token: str | None) -> None:
        """Be who a token names from the next greeting on; None: who the device was before."""
        if token is None:
            token, self._own = self.own_token, None
        elif self._own is None:
            self._own = self._token
        self._hold_token(token)

    @property
    def own_token(self) -> str:
        """The token that the device had before any user's was put in its place."""
        return self._token if self._own is None else self._own

    def _hold_token(self, token: str) -> None:
        self._token = token
        self._residence.belong_to(tokens.user_of(token) if token else "")

    @property
    def user(self) -> str:
        """The user whom the device token names, empty where nobody is logged in or there is no token yet."""
        return tokens.user_of(self._token)

    @property
    def home(self) -> Home | None:
        """Where the user belongs whom the token names; None where nobody is logged in or dispatch has not said it."""
        return self._residence.home

    @property
    def unit(self) -> str:
        """The device's own unit: the user's home, else the one it was told by a gateway or a plan; empty for none."""
        home = self._residence.home
        return self._unit_told if home is None else home.unit

    @unit.setter
    def unit(self, told: str) -> None:
        self._unit_told = told

    def act_as(self, *, push: bool) -> None:
        """Ask from now on as a device that only receives pushes or is in the background, or as any other.

        At once where there is a plan that was asked for as the other.
        """
        role = plan.PUSH if push else ""
        if role == self._role:
            return
        self._role = role
        if self._acceptance.plan is not None:
            self._acceptance.make_due()
            if self._clock.monotonic() >= self._not_before:
                self._start(again=True)

    @property
    def plan(self) -> Plan | None:
        """The plan held, fresh or stale."""
        return self._acceptance.plan

    @property
    def stale(self) -> bool:
        """True where the plan held has expired."""
        return not self._acceptance.fresh

    @property
    def last_error(self) -> errors.DispatchError | None:
        """Why the last question failed, None where it did not."""
        return self._last_error

    async def host_plan(self, host: str, *, wait_s: float = limits.PLAN_WAIT_S) -> HostPlan | None:
        """Give dispatch's word on `host`; None where it has none, or could not be asked within the bound.

        Never raises for an outage of dispatch: see `last_error`. Safe to cancel; a question in flight goes on.

        Args:
            host: name as in the URL.
            wait_s: the most that asking may take here.
        """
        try:
            host = hostname.normalise(host)
        except errors.ConfigError:
            return None
        if Address(host, 0).is_ip:
            return None
        now = self._clock.monotonic()
        held = self._acceptance.plan
        known = held is not None and (host in held.hosts or host in held.unknown)
        if known and self._acceptance.fresh:
            if self._acceptance.due and now >= self._not_before:
                self._ask(host)
        elif now >= self._not_before or (not known and self._last_error is None):
            task = self._ask(host)
            # A known word that stands serves meanwhile, and in an outage also one that has long expired.
            if not known or (self._last_error is None and not self._acceptance.stands):
                longest_s = limits_network.PLAN_STALE_WAIT_S if known else limits.PLAN_WAIT_S
                await asyncio.wait({task}, timeout=min(wait_s, longest_s))
        held = self._acceptance.plan
        return held.hosts.get(host) if held is not None and not held.dns_only else None

    def notice(self, version: int, hosts: tuple[str, ...] = ()) -> None:
        """The plan has changed, says the long connection: ask, through it first. A hint only; it proves nothing.

        At most one question in `limits_network.NOTICE_PAUSE_S` comes of notices, and none before the pause after a
        failed one is over.

        Args:
            version: newest version that there is.
            hosts: hosts whose plan changed, and `messages.GATEWAYS` where the gateways did; empty where any may have.
        """
        held = self._acceptance.plan
        concerned = any(host in self._hosts or host == messages.GATEWAYS for host in hosts)
        if not concerned and (hosts or (held and held.version >= version)):
            return
        self.ask_soon()

    def ask_soon(self) -> "asyncio.Future[None]":
        """Something newer than the plan held is wanted: ask, within the bounds of `notice`.

        Returns:
            What is done once that question was answered, or has failed; whoever waits for it bounds that.
        """
        self._acceptance.make_due()
        loop = asyncio.get_running_loop()
        if self._notice_timer is None:
            now = self._clock.monotonic()
            at = max(now, self._notice_at, self._not_before)
            self._notice_at = at + limits_network.NOTICE_PAUSE_S
            self._notice_timer = loop.call_later(at - now, self._ask_noticed)
            self._noticed = loop.create_future()
        return self._noticed

    def _ask_noticed(self) -> None:
        self._notice_timer = None
        self._start(again=True).add_done_callback(functools.partial(_done, self._noticed))

    def network_changed(self) -> None:
        """What failed on another network may work on this one."""
        self._asker.centres.reset()
        self._not_before, self._failures = 0.0, 0

    def _ask(self, host: str) -> asyncio.Task[None]:
        """Give the question that will answer for `host`: the one in flight, or one that follows it."""
        fresh_host = host not in self._hosts
        self._hosts[host] = None
        self._hosts.move_to_end(host)
        while len(self._hosts) > limits.PLAN_HOSTS_MAX:
            self._hosts.popitem(last=False)
        return self._start(again=fresh_host)

    def _start(self, *, again: bool) -> asyncio.Task[None]:
        """Give the question under way; or where `again`, one that begins after this moment."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_once(), name="stormline ask dispatch")
        elif self._asking_next is not None:
            return self._asking_next
        elif again:
            self._asking_next = asyncio.create_task(self._ask_after(self._asking), name="stormline ask dispatch next")
            return self._asking_next
        return self._asking

    async def _ask_after(self, earlier: asyncio.Task[None]) -> None:
        await asyncio.wait({earlier})
        self._asking, self._asking_next = self._asking_next, None
        await self._ask_once()

    async def _ask_once(self) -> None:
        try:
            await self.refresh()
        except errors.DispatchError as error:
            _log.warning("%s", error)
            self._failed(error)
        except Exception as error:  # a fault of ours: without the pause it would cost a question with every call
            _log.exception("the answer of dispatch could not be read")
            self._failed(errors.DispatchUnreachable(f"its answer could not be read: {error!r}"))

    def _failed(self, error: errors.DispatchError) -> None:
        self._last_error = error
        pause_s = min(limits.PLAN_RETRY_S * 2.0 ** min(self._failures, 16), limits_network.PLAN_RETRY_S_MAX)
        self._failures += 1
        self._not_before = self._clock.monotonic() + pause_s * (0.75 + 0.25 * self._rng.random())

    async def refresh(self) -> Plan:
        """Ask dispatch now, down the ladder until one way gives an answer that may be trusted.

        Raises:
            AnswerRejected: answers came, and none may be trusted.
            DispatchUnreachable: nobody answered.
        """
        hosts, held = tuple(self._hosts), self._acceptance.held
        question = self._question(hosts, held)
        body = secret = msgspec.json.encode(question)
        if self._residence.user:
            secret = msgspec.json.encode(msgspec.structs.replace(question, token=self._token))

        async def one(way: Way) -> Plan:
            try:
                return await self._ask_way(way, secret if way.secure else body, hosts, held)
            except errors.AnswerRejected as error:
                self.rejects[error.reason] = self.rejects.get(error.reason, 0) + 1
                raise

        accepted = await self._asker.ask(self._ways(), one)
        self._last_error = None
        self._not_before, self._failures = 0.0, 0
        self._unit_told = self._unit_told or accepted.unit
        for host in accepted.hosts:  # what dispatch says unasked is asked for from now on: the same content every time
            if host not in self._hosts and len(self._hosts) < limits.PLAN_HOSTS_MAX:
                self._hosts[host] = None
                self._hosts.move_to_end(host, last=False)
        return accepted

    def _question(self, hosts: tuple[str, ...], held: Plan | None) -> PlanRequest:
        newest = self._acceptance.plan
        return PlanRequest(
            app=self._bundle.app,
            hosts=hosts,
            version=max(self._acceptance.floor, newest.version if newest is not None else 0),
            device=tokens.device_of(self._token) if self._token else "",
            network=self.network(),
            role=self._role,
            held=held.digest if held is not None else "",
            changes=held is not None and self._acceptance.may_change,
            kids=self._acceptance.kids,
        )

    def _ways(self) -> list[Way]:
        return self._asker.ways(self._acceptance.plan, self.unit, line=self.through is not None and self.line_stands())

    async def _ask_way(self, way: Way, body: bytes, hosts: tuple[str, ...], held: Plan | None) -> Plan:
        source, server_wall = "", None
        if way.rung is Rung.LINE:
            if self.through is None:
                raise errors.DispatchUnreachable("there is no long connection")
            async with asyncio.timeout(limits_platform.DISPATCH_TRY_S):
                told = await self.through(body)
        else:
            answer = await self._asker.post(way, "/v1/plan", body)
            if answer.status != 200:
                raise errors.AnswerRejected("refused", _refusal(answer))
            told = answer.body
            source, server_wall = ("", date_of(answer)) if way.secure else (way.host, None)
        signed, home = plan.split(told)
        accepted = self._acceptance.take(signed, hosts, held=held, source=source, server_wall=server_wall)
        if home:
            try:
                self._residence.take(home, self._acceptance.keys, self._acceptance.walls)
            except errors.AnswerRejected as error:  # the plan is as good without it
                _log.warning("home not used: %s", error)
        return accepted

    async def token(self) -> str:
        """Give the device token, enrolling this device first where it has none.

        Raises:
            DispatchError: dispatch did not enrol it.
        """
        if self._token:
            return self._token
        if self._enrolling is None or self._enrolling.done():
            self._enrolling = asyncio.create_task(self._enrol(), name="stormline enrol")
            self._enrolling.add_done_callback(_retrieve)
        return await asyncio.shield(self._enrolling)

    def token_rejected(self) -> bool:
        """The gateway did not take the token; True where another can be tried: the device's own, or a new one."""
        if self._own is not None:
            self.bind(None)
            return True
        if self._token_given:
            return False
        if self._enrolling is None or self._enrolling.done():
            self._hold_token("")
        return True

    async def _enrol(self) -> str:
        body = msgspec.json.encode({"app": self._bundle.app})
        failures = []
        # One after the other, over TLS alone: the answer holds a secret, and two at once would be two devices.
        for way in self._asker.centres.plan(way for way in self._ways() if way.host and way.secure):
            try:
                answer = await self._asker.post(way, "/v1/devices", body)
                if answer.status not in (200, 201):
                    raise errors.AnswerRejected("refused", _refusal(answer))
                token = msgspec.json.decode(answer.body, type=_Enrolled).token
            except (errors.TransportError, errors.AnswerRejected, OSError) as error:
                failures.append(f"{way}: {error}")
            except (msgspec.MsgspecError, UnicodeDecodeError):  # its text may quote the answer, which holds the token
                failures.append(f"{way}: its answer is malformed")
            else:
                self._hold_token(token)
                if self._store is not None:
                    self._store.save_token(token)
                return token
        raise errors.DispatchUnreachable(f"this device cannot be enrolled: {'; '.join(failures)}")

    async def aclose(self) -> None:
        """End what is in flight."""
        await asyncio.gather(*self._cancel(), return_exceptions=True)

    def abandon(self) -> None:
        """End what is in flight without waiting; also where the event loop is closed."""
        with contextlib.suppress(RuntimeError):  # a closed loop cannot cancel any more
            self._cancel()

    def _cancel(self) -> list[asyncio.Task[Any]]:
        tasks = [task for task in (self._asking, self._asking_next, self._enrolling) if task is not None]
        for task in tasks:
            task.cancel()
        if self._notice_timer is not None:
            self._notice_timer.cancel()
            self._notice_timer = None
        return [*tasks, *self._asker.cancel()]


def _retrieve(task: asyncio.Task[str]) -> None:
    if not task.cancelled():
        task.exception()  # who waited has it, and they may all have gone


def _refusal(answer: fetch.Answer) -> str:
    try:
        refusal = msgspec.json.decode(answer.body, type=_RefusalBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"HTTP {answer.status}"
    return f"HTTP {answer.status}, {refusal.code[:40]}: {refusal.message[: limits.REASON_CHARS_MAX]}"


def _done(waited: "asyncio.Future[None]", _: "asyncio.Task[None]") -> None:
    if not waited.done():
        waited.set_result(None)
