"""What the APM tells dispatch: how calls fare in a roll-out, and which addresses are bad.

It asks and tells through dispatch's public admin API, every `limits.VERDICT_INTERVAL_S`. Whatever goes wrong costs one
look: the next one begins anew, and an APM that was restarted finds what it needs in dispatch's log of changes.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from typing import TypeVar

import httpx2
import msgspec

from stormline.apm import judging, questions
from stormline.apm.config import DispatchAdmin
from stormline.apm.judging import LogLine, Order
from stormline.apm.store import Store
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.values import Address, parse_address

log = logging.getLogger("stormline.apm")

T = TypeVar("T")


class _Rollout(msgspec.Struct, frozen=True):
    version: int
    stepped_at: int


class _Status(msgspec.Struct, frozen=True):
    version: int
    rollout: _Rollout | None = None
    drains: tuple[str, ...] = ()


class _Endpoint(msgspec.Struct, frozen=True):
    host: str
    port: int


class _Host(msgspec.Struct, frozen=True):
    endpoints: tuple[_Endpoint, ...] = ()


class _Rules(msgspec.Struct, frozen=True):
    hosts: dict[str, _Host] = {}
    gateways: dict[str, tuple[_Endpoint, ...]] = {}


class _History(msgspec.Struct, frozen=True):
    log: tuple[LogLine, ...] = ()


class _Away(Exception):
    """Dispatch gave no usable answer; the text is for people."""


class Teller:
    """Looks, judges and tells, over an open client.

    Args:
        http: client of dispatch's admin API, with its key.
        store: what the devices reported.
        clock: wall time, in which windows and the log of changes count.
        server_name: name in dispatch's certificate, empty for the host of the URL.
    """

    def __init__(self, http: httpx2.AsyncClient, store: Store, clock: Clock, *, server_name: str = "") -> None:
        self._http = http
        self._store = store
        self._clock = clock
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        self._groups: tuple[int, list[frozenset[str]]] = (-1, [])
        self._problem = ""

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await asyncio.sleep(limits.VERDICT_INTERVAL_S)
            problem = ""
            try:
                await self.look()
            except (_Away, errors.StoreError) as error:
                problem = str(error)
            except Exception:
                log.exception("a look at what to tell dispatch failed")
            if problem and problem != self._problem:
                log.warning("dispatch is told nothing: %s", problem)
            self._problem = problem

    async def look(self) -> None:
        """Look once, and tell what there is to tell."""
        status = await self._get("/v1/admin/status", _Status)
        if status.rollout is not None:
            await self._tell_outcomes(status.rollout, status.version)
        counts = await questions.addresses(self._store, since_ms=self._ms(self._clock.wall() - limits.BAD_WINDOW_S))
        if judging.suspects(counts) or status.drains:
            await self._tell_addresses(counts, status)

    async def _tell_outcomes(self, rollout: _Rollout, current: int) -> None:
        counts = await questions.arms(self._store, since_ms=rollout.stepped_at * 1000, new=rollout.version, old=current)
        arms = {
            name: dict(zip(("calls", "successes"), counts.get(version, (0, 0)), strict=True))
            for name, version in (("new", rollout.version), ("old", current))
        }
        answer = await self._tell("PUT", "/v1/admin/rollout/outcomes", {"version": rollout.version, **arms})
        if answer is not None and answer.get("halted"):
            log.warning("the roll-out of version %d was halted: %s", rollout.version, arms)

    async def _tell_addresses(self, counts: list[judging.AddressCounts], status: _Status) -> None:
        groups = await self._read_groups(status.version)
        drains = frozenset(status.drains)
        drained = frozenset(
            address for group in groups for address in group if {address, parse_address(address).host} & drains
        )
        history = await self._get("/v1/admin/rules/history", _History)
        found = judging.bad(counts, groups, drained)
        for order in judging.orders(found, status.drains, history.log, self._clock.wall()):
            await self._drain(order)

    async def _drain(self, order: Order) -> None:
        host, port = parse_address(order.address, default_port=0)
        body = {"who": judging.APM, "why": order.why, "host": host, "port": port}
        path = "/v1/admin/drains/end" if order.end else "/v1/admin/drains"
        if await self._tell("POST", path, body) is not None:
            log.warning("%s %s: %s", order.address, "is back in service" if order.end else "is drained", order.why)

    async def _read_groups(self, version: int) -> list[frozenset[str]]:
        """Give the addresses that stand for each other in the rules that hold."""
        held, groups = self._groups
        if held != version:
            rules = await self._get("/v1/admin/rules", _Rules)
            several = (*(host.endpoints for host in rules.hosts.values()), *rules.gateways.values())
            groups = [frozenset(str(Address(each.host, each.port)) for each in endpoints) for endpoints in several]
            self._groups = version, groups
        return groups

    async def _get(self, path: str, form: type[T]) -> T:
        content, status = await self._ask("GET", path, None)
        if status != 200:
            raise _Away(f"{path}: HTTP {status}")
        try:
            return msgspec.json.decode(content, type=form)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _Away(f"{path}: {error}") from error

    async def _tell(self, method: str, path: str, body: dict[str, object]) -> dict[str, object] | None:
        """Give dispatch's answer; None where it sees things otherwise by now: ended, drained or halted meanwhile."""
        content, status = await self._ask(method, path, body)
        if status in (404, 409):
            return None
        if status != 200:
            raise _Away(f"{path}: HTTP {status}")
        try:
            return msgspec.json.decode(content, type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _Away(f"{path}: {error}") from error

    async def _ask(self, method: str, path: str, body: dict[str, object] | None) -> tuple[bytes, int]:
        content = bytearray()
        try:
            async with (
                asyncio.timeout(limits.VERDICT_TIMEOUT_S),
                self._http.stream(method, path, json=body, extensions=self._extensions) as answer,
            ):
                async for chunk in answer.aiter_bytes():
                    content += chunk
                    if len(content) > limits.VERDICT_ANSWER_BYTES_MAX:
                        raise _Away(f"{path}: an answer of more than {limits.VERDICT_ANSWER_BYTES_MAX} bytes")
                return bytes(content), answer.status_code
        except (httpx2.HTTPError, OSError) as error:  # TimeoutError is an OSError
            raise _Away(f"{path}: {str(error) or type(error).__name__}") from error

    def _ms(self, wall: float) -> int:
        return int(wall * 1000)


@contextlib.asynccontextmanager
async def telling(dispatch: DispatchAdmin, store: Store, clock: Clock) -> AsyncIterator[None]:
    """Tell dispatch while the block runs.

    Raises:
        ConfigError: the CA file cannot be read.
    """
    try:
        verify = True if dispatch.ca is None else ssl.create_default_context(cafile=str(dispatch.ca))
    except OSError as error:
        raise errors.ConfigError(f"apm: dispatch's CA {dispatch.ca}: {error}") from error
    async with httpx2.AsyncClient(
        base_url=dispatch.url,
        headers={"authorization": f"Bearer {dispatch.admin_key.reveal()}"},
        verify=verify,
        timeout=limits.VERDICT_TIMEOUT_S,
        follow_redirects=False,
        trust_env=False,
    ) as http:
        teller = Teller(http, store, clock, server_name=dispatch.server_name)
        task = asyncio.create_task(teller.run(), name="apm tells dispatch")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
