"""Asking the scheduling centre: by address, verified, cached; and getting this device its token."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from typing import Any

import msgspec

from stormline.client import fetch
from stormline.client.config import Config
from stormline.client.store import Store
from stormline.core import errors, limits, limits_platform
from stormline.core.clock import Clock
from stormline.core.values import Address
from stormline.outbound.pool import HttpPool
from stormline.wire import hostname, jws, plan
from stormline.wire.bundle import Bundle
from stormline.wire.plan import HostPlan, Plan

_log = logging.getLogger("stormline.client")


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
    """The client's side of dispatch for one bundle.

    Identical questions in flight are joined; an answer serves until it expires, measured on the monotonic clock, so
    a step of the wall clock neither ages nor refreshes it. After an outage dispatch is left alone for
    `limits.PLAN_RETRY_S`; a plan that has expired meanwhile still serves (`stale`).
    """

    def __init__(self, config: Config, bundle: Bundle, pool: HttpPool, clock: Clock, store: Store | None) -> None:
        self._config = config
        self._bundle = bundle
        self._pool = pool
        self._clock = clock
        self._store = store
        self._keys = jws.load_public_keys(bundle.dispatch_keys)
        self._hosts: OrderedDict[str, None] = OrderedDict.fromkeys(bundle.preload)
        self._plan: Plan | None = None
        self._fresh_until = 0.0
        self._refresh_at = 0.0
        self._not_before = 0.0
        self._last_error: errors.DispatchError | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asking_next: asyncio.Task[None] | None = None
        self._token = config.token.reveal() if config.token is not None else bundle.token
        self._token_given = bool(self._token)
        self._enrolling: asyncio.Task[str] | None = None
        if store is not None:
            self._restore(store)

    def _restore(self, store: Store) -> None:
        if not self._token:
            self._token = store.load_token()
        signed = store.load_plan()
        if signed:
            try:
                restored = self._accept(signed, hosts=())
            except errors.AnswerRejected as error:
                _log.info("stored plan not used: %s", error)
            else:
                # Part of its life was spent while we did not run, by the only clock that ran meanwhile.
                left = max(0.0, restored.expires_at - self._clock.wall())
                self._fresh_until = min(self._fresh_until, self._clock.monotonic() + left)
                self._hosts.update(dict.fromkeys(list(restored.hosts)[: limits.PLAN_HOSTS_MAX]))

    @property
    def plan(self) -> Plan | None:
        """The plan held, fresh or stale."""
        return self._plan

    @property
    def stale(self) -> bool:
        """True where the plan held has expired."""
        return self._clock.monotonic() >= self._fresh_until

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
        known = self._plan is not None and (host in self._plan.hosts or host in self._plan.unknown)
        if known and now < self._fresh_until:
            if now >= self._refresh_at and now >= self._not_before:
                self._ask(host)
        elif now >= self._not_before or (not known and self._last_error is None):
            task = self._ask(host)
            if not known or self._last_error is None:  # else: there is an outage, and the stale word serves meanwhile
                await asyncio.wait({task}, timeout=min(wait_s, limits.PLAN_WAIT_S))
        return self._plan.hosts.get(host) if self._plan is not None else None

    def _ask(self, host: str) -> asyncio.Task[None]:
        """Give the question that will answer for `host`: the one in flight, or one that follows it."""
        fresh_host = host not in self._hosts
        self._hosts[host] = None
        self._hosts.move_to_end(host)
        while len(self._hosts) > limits.PLAN_HOSTS_MAX:
            self._hosts.popitem(last=False)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_once(), name="stormline ask dispatch")
        elif self._asking_next is not None:
            return self._asking_next
        elif fresh_host:
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
            self._last_error = error
            self._not_before = self._clock.monotonic() + limits.PLAN_RETRY_S
            _log.warning("%s", error)

    async def refresh(self) -> Plan:
        """Ask dispatch now, at each of its addresses in turn until one gives an answer that may be trusted.

        Raises:
            AnswerRejected: an answer came, and none may be trusted.
            DispatchUnreachable: no address answered.
        """
        hosts = tuple(self._hosts)
        version = self._plan.version if self._plan is not None else 0
        body = msgspec.json.encode(plan.PlanRequest(app=self._bundle.app, hosts=hosts, version=version))
        rejected: errors.AnswerRejected | None = None
        failures = []
        for address in self._bundle.addresses():
            try:
                answer = await self._post(address, "/v1/plan", body, limits.PLAN_BYTES_MAX)
                if answer.status != 200:
                    raise errors.AnswerRejected("refused", _refusal(answer))
                accepted = self._accept(answer.body, hosts)
            except errors.AnswerRejected as error:
                rejected = error
                failures.append(f"{address}: {error}")
            except errors.TransportError as error:
                failures.append(f"{address}: {error}")
            else:
                self._last_error = None
                if self._store is not None:
                    self._store.save_plan(answer.body.decode("ascii", "replace"))
                return accepted
        if rejected is not None:
            raise rejected
        raise errors.DispatchUnreachable(f"dispatch cannot be reached: {'; '.join(failures)}")

    def _accept(self, signed: str | bytes, hosts: tuple[str, ...]) -> Plan:
        accepted = plan.verify(
            signed,
            keys=self._keys,
            app=self._bundle.app,
            hosts=hosts,
            version_min=self._plan.version if self._plan is not None else 0,
            wall=self._clock.wall(),
        )
        # Life by the centre's own clock, spent on our monotonic one: a wrong wall clock here does not matter.
        life = min(limits.PLAN_LIFE_S, max(0.0, accepted.expires_at - accepted.issued_at))
        now = self._clock.monotonic()
        self._plan, self._fresh_until, self._refresh_at = accepted, now + life, now + 0.75 * life
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
        """The gateway did not take the token; True where a new one can be got by itself."""
        if self._token_given:
            return False
        if self._enrolling is None or self._enrolling.done():
            self._token = ""
        return True

    async def _enrol(self) -> str:
        body = msgspec.json.encode({"app": self._bundle.app})
        failures = []
        for address in self._bundle.addresses():
            try:
                answer = await self._post(address, "/v1/devices", body, limits.PLAN_BYTES_MAX)
                if answer.status not in (200, 201):
                    raise errors.AnswerRejected("refused", _refusal(answer))
                token = msgspec.json.decode(answer.body, type=_Enrolled).token
            except (errors.TransportError, errors.AnswerRejected) as error:
                failures.append(f"{address}: {error}")
            except (msgspec.MsgspecError, UnicodeDecodeError):  # its text may quote the answer, which holds the token
                failures.append(f"{address}: its answer is malformed")
            else:
                self._token = token
                if self._store is not None:
                    self._store.save_token(token)
                return token
        raise errors.DispatchUnreachable(f"this device cannot be enrolled: {'; '.join(failures)}")

    async def _post(self, address: Address, path: str, body: bytes, size_max: int) -> fetch.Answer:
        return await fetch.post(
            self._pool,
            address=address,
            server_name=self._bundle.dispatch_name,
            path=path,
            headers=((b"content-type", b"application/json"),),
            body=body,
            timeout_s=limits_platform.DISPATCH_TRY_S,
            size_max=size_max,
        )

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
        return tasks


def _retrieve(task: asyncio.Task[str]) -> None:
    if not task.cancelled():
        task.exception()  # who waited has it, and they may all have gone


def _refusal(answer: fetch.Answer) -> str:
    try:
        refusal = msgspec.json.decode(answer.body, type=_RefusalBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"HTTP {answer.status}"
    return f"HTTP {answer.status}, {refusal.code[:40]}: {refusal.message[: limits.REASON_CHARS_MAX]}"
