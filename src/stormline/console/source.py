"""Where the console's numbers come from: the APM's HTTP API, nothing else.

Every open page asks every two seconds; one answer serves all of them for a moment, so many viewers cost the APM as
much as one.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import NamedTuple, Self

import httpx2
import msgspec

from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.values import Secret

log = logging.getLogger("stormline.console")


class Away(NamedTuple):
    """The APM gave no usable answer; `reason` is for people."""

    reason: str


Answer = msgspec.Raw | Away
"""The APM's JSON as it came, or why there is none."""


class _Cached(NamedTuple):
    born: float
    task: asyncio.Task[Answer]


class ApmSource:
    """Asks the APM. Use as `async with ApmSource(...) as source`.

    Args:
        url: base URL of the APM.
        ca: CA file to trust, None for the system's.
        admin_key: bearer key.
        clock: for the age of answers.
    """

    def __init__(self, *, url: str, ca: Path | None, admin_key: Secret, clock: Clock) -> None:
        self._clock = clock
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {admin_key.reveal()}"},
            verify=ssl.create_default_context(cafile=str(ca)) if ca else True,
            timeout=limits.CONSOLE_APM_TIMEOUT_S,
            follow_redirects=False,
            trust_env=False,
        )
        self._cached: dict[tuple[str, tuple[tuple[str, str], ...]], _Cached] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [entry.task for entry in self._cached.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def ask(self, path: str, **query: str) -> Answer:
        """Ask one question; an answer is at most `limits.CONSOLE_CACHE_S` old. Never raises for a sick APM.

        Cancelling gives up this wait only: others may wait for the same answer.
        """
        key = path, tuple(sorted(query.items()))
        now = self._clock.monotonic()
        entry = self._cached.get(key)
        if entry is None or (entry.task.done() and now - entry.born > limits.CONSOLE_CACHE_S):
            self._forget_old(now)
            if len(self._cached) >= limits.CONSOLE_CACHED_MAX:
                return Away("too many questions to it at once")
            entry = _Cached(now, asyncio.create_task(self._fetch(path, query), name=f"console {path}"))
            self._cached[key] = entry
        return await asyncio.shield(entry.task)

    def _forget_old(self, now: float) -> None:
        for key, entry in list(self._cached.items()):
            if entry.task.done() and now - entry.born > limits.CONSOLE_CACHE_S:
                del self._cached[key]

    async def _fetch(self, path: str, query: dict[str, str]) -> Answer:
        try:
            async with asyncio.timeout(limits.CONSOLE_APM_TIMEOUT_S):
                response = await self._client.get(path, params=query)
            if response.status_code == 200:
                msgspec.json.decode(response.content)
                return msgspec.Raw(response.content)
        except TimeoutError:
            return Away(f"no answer within {limits.CONSOLE_APM_TIMEOUT_S:.0f} s")
        except (httpx2.HTTPError, OSError) as error:
            log.debug("apm %s: %r", path, error)
            return Away(_in_words(error))
        except msgspec.MsgspecError:
            return Away("its answer is not JSON")
        if response.status_code == 401:
            return Away("it refuses this console's admin key")
        if response.status_code == 503:
            return Away("its store is busy or does not answer")
        return Away(f"it answered with status {response.status_code}")


def _in_words(error: Exception) -> str:
    if isinstance(error, httpx2.TimeoutException):
        return f"no answer within {limits.CONSOLE_APM_TIMEOUT_S:.0f} s"
    if isinstance(error, httpx2.ConnectError):
        text = str(error)
        return "its certificate is not trusted" if "CERTIFICATE" in text.upper() else "nobody answers at its address"
    return "the connection broke"
