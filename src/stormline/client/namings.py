"""What every source of names says of one host, asked past all that is remembered."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

from stormline.client.findings import Findings, reason_in_words
from stormline.client.name_sources import is_public
from stormline.client.reaching import Origin
from stormline.client.surroundings import Around
from stormline.core import limits_diagnosis as limits
from stormline.core.checks import CheckName, CheckState
from stormline.core.values import Address
from stormline.net import icmp, probes
from stormline.net.resolve import says_absent
from stormline.policy.verdict import Finding
from stormline.wire.plan import Carrier, Endpoint

_DIRECT_CARRIERS: Final = frozenset({Carrier.H1, Carrier.H2, Carrier.H3})
QUIC_CARRIERS: Final = frozenset({Carrier.H3, Carrier.LONG_QUIC})
_ANY_NAME: Final = "example.com"
"""Asked for where no name is asked about (RFC 6761 section 6.5); "there is no such name" will do."""

Found = Callable[[str, Sequence[str], int], None]
"""Takes the addresses that a source gave, and the port they are to be asked at."""


def error_of(error: BaseException) -> str:
    """Say how names failed: `absent`, `silent`, `failed`."""
    if isinstance(error, TimeoutError):
        return "silent"
    return "absent" if isinstance(error, OSError) and says_absent(error) else "failed"


async def ask_system(origin: Origin, around: Around, findings: Findings, found: Found) -> None:
    """Ask the system, and each configured name server for itself."""
    check = findings.begin(CheckName.DNS_SYSTEM)
    loop = asyncio.get_running_loop()
    asked = loop.create_task(_ask_servers(origin.host, around), name="ask name servers")
    try:
        try:
            addresses = [each.host for each in await around.resolve(origin.host, origin.port)]
        except OSError as error:
            check.data.update(addresses=[], error=error_of(error))
            words, state = reason_in_words(error), CheckState.BAD
        else:
            found("system", addresses, origin.port)
            check.data["addresses"] = addresses[: limits.DIAGNOSIS_ADDRESSES_TOLD]
            words, state = ", ".join(addresses[:4]), CheckState.OK
        check.end(state, words, servers=await asked)
    finally:
        asked.cancel()
        await asyncio.wait({asked})


async def ask_servers_alone(around: Around, findings: Findings) -> None:
    """Ask the name servers, where no name is asked about."""
    check = findings.begin(CheckName.DNS_SYSTEM)
    servers = await _ask_servers(_ANY_NAME, around)
    if not servers:
        check.end(CheckState.SKIPPED, "no name server is known")
        return
    well = any(each["finding"] == Finding.ANSWERED for each in servers)
    state = CheckState.OK if well else CheckState.UNKNOWN
    check.end(state, "a name server answers" if well else "no name server answers", servers=servers)


async def _ask_servers(host: str, around: Around) -> list[dict[str, Any]]:
    async def one(server: Address) -> dict[str, Any]:
        number = int.from_bytes(around.rng.token_bytes(2), "big")
        finding = await probes.dns(server, host, number)
        near = server.host in (around.info.gateway, "::1") or server.host.startswith("127.")
        told: dict[str, Any] = {"server": server.host, "finding": finding, "near": near}
        if finding is Finding.SILENT:
            echo = await icmp.echo(server.host, around.rng, count=2)
            told["echo"] = None if echo.why_not else bool(echo.answered)
        return told

    servers = probes.name_servers() if around.probes else ()
    return list(await asyncio.gather(*map(one, servers)))


async def ask_doh(origin: Origin, around: Around, findings: Findings, found: Found) -> None:
    """Ask DNS over HTTPS."""
    source = around.doh() if is_public(origin.host) else None
    if source is None:
        why = "no server is set" if is_public(origin.host) else "the name is not for DNS at large"
        findings.skip(CheckName.DNS_DOH, why)
        return
    check = findings.begin(CheckName.DNS_DOH)
    with ExitStack() as stack:
        stack.callback(source.close)
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_NAMES_S):
                told = await source.ask(origin.host)
        except OSError as error:
            absent = error_of(error) == "absent"
            state = CheckState.OK if absent else CheckState.BAD
            check.end(state, reason_in_words(error), addresses=[], error=error_of(error))
            return
    found("doh", told.addresses, origin.port)
    addresses = list(told.addresses[: limits.DIAGNOSIS_ADDRESSES_TOLD])
    check.end(CheckState.OK, f"{', '.join(addresses[:4])}, says {told.source}", addresses=addresses)


async def ask_dispatch(origin: Origin, around: Around, findings: Findings, found: Found) -> tuple[Endpoint, ...]:
    """Ask the scheduling centres; give the endpoints they name."""
    scheduling = around.scheduling
    if scheduling is None:
        findings.skip(CheckName.DNS_DISPATCH, "the client has no platform")
        return ()
    check = findings.begin(CheckName.DNS_DISPATCH)
    plan = await scheduling.host_plan(origin.host)
    fresh = scheduling.plan is not None and not scheduling.stale and scheduling.last_error is None
    endpoints = () if plan is None else plan.endpoints
    direct = [each for each in endpoints if is_direct(each, origin.host)]
    for each in direct:
        if each.carrier != Carrier.H3:
            found("dispatch", (each.host,), each.port)
    shown = list(dict.fromkeys(each.host for each in direct if Address(each.host, 0).is_ip))
    shown = shown[: limits.DIAGNOSIS_ADDRESSES_TOLD]
    check.data["by_gateway"] = bool(endpoints) and not direct
    if not fresh:
        check.end(CheckState.BAD, "no scheduling centre answers", addresses=shown, fresh=False)
    elif plan is None:
        check.end(CheckState.OK, "the platform says nothing of this host", addresses=[], fresh=True)
    else:
        words = ", ".join(shown[:4]) or f"{len(endpoints)} endpoints, none of the origin itself"
        check.end(CheckState.OK, words, addresses=shown, fresh=True)
    return endpoints


def is_direct(endpoint: Endpoint, host: str) -> bool:
    """Say whether an endpoint is the origin itself."""
    return endpoint.carrier in _DIRECT_CARRIERS and endpoint.server_name in ("", host)
