"""The diagnoses of one client: those that are asked for, and those that come by themselves after a key request failed.

One that comes by itself is rare (`policy.pace`), begins only while no call is under way, sends less than one that a
person waits for, and is never made in the background, nor where the config says no.
"""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from stormline.client import diagnosing
from stormline.client.clearpages import ClearPage, parse
from stormline.client.diagnosing import Wishes
from stormline.client.reaching import Origin
from stormline.client.surroundings import Around
from stormline.core import errors
from stormline.core import limits as general
from stormline.core import limits_diagnosis as limits
from stormline.policy.pace import DiagnosisPace
from stormline.telemetry.diagnosis import Diagnosis, NatProgress

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

_log = logging.getLogger("stormline.client")


async def _have_plan(around: Around) -> None:
    """Ask for a plan where none is held yet, as it says where reports go; who cannot have one reports nothing."""
    scheduling = around.scheduling
    if scheduling is None or scheduling.plan is not None or scheduling.last_error is not None:
        return
    with contextlib.suppress(errors.DispatchError, TimeoutError):
        async with asyncio.timeout(general.PLAN_WAIT_S):
            await scheduling.refresh()


class Diagnostics:
    """Makes diagnoses. Belongs to one event loop.

    Args:
        around: gives what surrounds a host, None once the client is gone: it is held weakly.

    Attributes:
        latest: the last one that was done; None before the first.
        failed_url: of the last call that failed for good, without its query; empty for none.
    """

    def __init__(self, around: "weakref.WeakMethod[Callable[[str], Around]]") -> None:
        self._loop = asyncio.get_running_loop()
        self._around = around
        self._pace = DiagnosisPace()
        self._task: asyncio.Task[None] | None = None
        self.latest: Diagnosis | None = None
        self.failed_url = ""

    async def diagnose(
        self,
        url: str | None = None,
        *,
        trace: bool = True,
        nat: bool = False,
        nat_limit_s: float = limits.DIAGNOSIS_NAT_LIMIT_S,
        nat_told: "Callable[[NatProgress], None] | None" = None,
        plain_url: str | None = None,
        plain_sha256: str = "",
    ) -> Diagnosis:
        """See `AsyncClient.diagnose`."""
        if url is None:
            url = self.failed_url or None
        origin = None if url is None else parse(url, "url")
        plain = None
        if plain_url is not None:
            page = parse(plain_url, "plain_url")
            if page.scheme != "http":
                raise errors.ConfigError(f"plain_url: {plain_url[:80]!r}: expected http://host/path")
            secure = page._replace(scheme="https", port=443)
            if origin is not None and origin.scheme == "https" and origin.host == page.host:
                secure = secure._replace(port=origin.port)
            plain = ClearPage(page, plain_sha256, secure)
        if not limits.DIAGNOSIS_NAT_LIMIT_S_MIN <= nat_limit_s <= limits.DIAGNOSIS_NAT_LIMIT_S_MAX:
            raise errors.ConfigError(
                f"nat_limit_s: {nat_limit_s:g}: expected {limits.DIAGNOSIS_NAT_LIMIT_S_MIN:g} to"
                f" {limits.DIAGNOSIS_NAT_LIMIT_S_MAX:g} seconds"
            )
        wishes = Wishes(trace=trace, nat=nat, nat_limit_s=nat_limit_s, nat_told=nat_told, plain=plain)
        return await self._run(origin, wishes)

    def _surroundings(self, host: str) -> Around | None:
        around = self._around()
        return None if around is None else around(host)

    async def _run(self, origin: Origin | None, wishes: Wishes) -> Diagnosis:
        around = self._surroundings("" if origin is None else origin.host)
        if around is None:
            raise errors.LocalProtocolError("the client is gone")
        made = self.latest = await diagnosing.diagnose(origin, around, wishes)
        if around.report is not None:
            await _have_plan(around)
            around.report(made)
        return made

    # -- by itself ----------------------------------------------------------------------------------------------------
    def failed(self) -> None:
        """A key request to `failed_url` has failed for good; never raises."""
        around = self._surroundings("")
        if self._task is not None or around is None or not around.foreground:
            return
        if not (around.probes and self._pace.allows(around.info.id, self._loop.time())):
            return
        self._task = self._loop.create_task(self._by_itself(self.failed_url), name="diagnosis by itself")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a diagnosis failed", exc_info=error)

    async def _by_itself(self, url: str) -> None:
        for _ in range(limits.DIAGNOSIS_QUIET_LOOKS):
            if self._is_quiet():
                break
            await asyncio.sleep(limits.DIAGNOSIS_QUIET_LOOK_S)
        else:
            return
        try:
            origin = parse(url, "url")
        except errors.ConfigError:
            return
        made = await self._run(origin, Wishes(trace=False, automatic=True))
        _log.info("a key request to %s failed: %s (%s): %s", made.host, made.verdict, made.confidence, made.why)

    def _is_quiet(self) -> bool:
        """Say whether no call is under way, and take what the pace grants."""
        around = self._surroundings("")
        quiet = around is not None and around.foreground and not around.is_busy()
        return around is not None and quiet and self._pace.take(around.info.id, self._loop.time())

    def abandon(self) -> None:
        """Stop; also where the event loop is closed."""
        if self._task is not None:
            with contextlib.suppress(RuntimeError):
                self._task.cancel()

    async def aclose(self) -> None:
        """Stop, and wait until it has."""
        task = self._task
        self.abandon()
        if task is not None:
            await asyncio.wait({task})
