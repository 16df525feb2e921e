"""Whether endpoints answer, tried from here before rules that name them are published."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from stormline.core import limits_platform as limits
from stormline.wire.plan import Carrier, Endpoint

Live = Callable[[Sequence[Endpoint]], Awaitable[frozenset[Endpoint]]]
"""Gives those of the endpoints that answer, or that it cannot judge."""

TCP: Final = frozenset({Carrier.LONG_TLS.value, Carrier.H1.value, "h2", "sl-ws", "sl-wss"})
"""Carriers whose endpoints take a TCP connection; others are not judged here."""


async def takes_connection(endpoints: Sequence[Endpoint]) -> frozenset[Endpoint]:
    """Give those endpoints that take a TCP connection within `limits.RULES_LIVE_TIMEOUT_S`; see `Live`.

    Each address is tried once, `limits.RULES_LIVE_AT_ONCE` side by side; beyond `limits.RULES_LIVE_TARGETS_MAX`
    addresses an endpoint counts as live. Nothing is sent. Safe to cancel.
    """
    targets = list(dict.fromkeys((each.host, each.port) for each in endpoints if each.carrier in TCP))
    tried = targets[: limits.RULES_LIVE_TARGETS_MAX]
    room = asyncio.Semaphore(limits.RULES_LIVE_AT_ONCE)
    answers = await asyncio.gather(*(_connects(host, port, room) for host, port in tried))
    dead = {target for target, answer in zip(tried, answers, strict=True) if not answer}
    return frozenset(each for each in endpoints if (each.host, each.port) not in dead or each.carrier not in TCP)


def hosts_without(hosts: Iterable[tuple[str, Sequence[Endpoint]]], live: frozenset[Endpoint]) -> list[str]:
    """Give the names of those that have endpoints, and none of them live."""
    return [name for name, endpoints in hosts if endpoints and not any(each in live for each in endpoints)]


async def _connects(host: str, port: int, room: asyncio.Semaphore) -> bool:
    async with room:
        try:
            async with asyncio.timeout(limits.RULES_LIVE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, UnicodeError):  # TimeoutError is an OSError
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True
