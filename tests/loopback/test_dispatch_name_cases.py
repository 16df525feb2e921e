"""A name whose server fails for a while: a real zone by UDP, a real centre, and the client's own DNS over HTTPS.

The whole play, with absences and silence, is in `tests/regressions/test_one_failure_takes_a_name_away.py`.
"""

import asyncio
import contextlib

import dns.edns
import dns.rcode
import pytest

from stormline.client.config import Config
from stormline.client.names import NameService
from stormline.core import limits_platform
from stormline.lab.specs import DnsSpec
from stormline.net.clock import SystemClock
from stormline.net.resolve import SystemNames
from stormline.outbound.dial import Dialer
from stormline.outbound.doh import DohNames, NoNames
from stormline.wire import dns_server

from .test_dispatch_doh import Centre, _start, ask, name_server  # noqa: F401, TID252 - one centre for both

pytestmark = pytest.mark.loopback

NAME, OLD, NEW = "other.example", "192.0.2.7", "192.0.2.8"
GOOD, FAILING = DnsSpec(ttl_s=1), DnsSpec(ttl_s=1, servfail_pct=100)


@contextlib.asynccontextmanager
async def client(centre: Centre):
    """Give the names of a client whose system resolver knows nothing."""

    def out_of_order(host: str):
        raise OSError("the system's resolver is out of order")

    doh = DohNames([centre.server], Dialer(NoNames(), centre.trust), SystemClock())
    names = NameService(Config(), SystemNames(lookup=out_of_order), doh=doh, wall_s=SystemClock().wall)
    try:
        yield names
    finally:
        await names.aclose()


async def until(given, wanted: str) -> None:
    async with asyncio.timeout(10.0):
        while await given() != wanted:  # noqa: ASYNC110 - the other side keeps time of its own
            await asyncio.sleep(0.05)


def is_stale(found) -> bool:
    return any(isinstance(each, dns.edns.EDEOption) and each.code == dns_server.STALE for each in found.options)


async def test_name_whose_server_fails_keeps_its_address_and_gets_the_new_one(start, monkeypatch):
    monkeypatch.setattr(limits_platform, "FORWARD_FAILURE_S", 0.2)
    async with name_server({NAME: [OLD]}, GOOD) as (zone, address):
        centre = await start(upstream=(address,))
        async with client(centre) as names:

            async def told() -> str:
                found = await ask(centre, NAME, "A", use_edns=0)
                assert found.rcode() == dns.rcode.NOERROR
                return f"{found.answer[0][0]}{' stale' if is_stale(found) else ''}"

            async def dialled() -> str:
                return (await names.find(NAME, 443))[0].host

            assert await told() == await dialled() == OLD
            zone.spec = FAILING
            await until(told, f"{OLD} stale")
            assert await dialled() == OLD
            zone._names[dns.name.from_text(NAME)] = [NEW]
            zone.spec = GOOD
            await until(told, NEW)
            await until(dialled, NEW)
