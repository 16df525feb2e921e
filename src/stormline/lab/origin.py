"""The servers' process: the origin's addresses, captive servers, DNS and DNS over HTTPS.

Run as `python -m stormline.lab.origin` inside the servers' namespace: one command a line on the input, one answer a
line on the output (`lab.specs`). It ends when its input does, so it never outlives who started it.
"""

import asyncio
import contextlib
import functools
import ssl
import sys
from collections import Counter
from typing import Final

import msgspec

from stormline.core import errors, limits_lab
from stormline.lab import dns, origin_quic, specs
from stormline.lab.chance import SeededRng
from stormline.lab.origin_answers import Counters, Site
from stormline.lab.origin_http import Connection

HTTPS_PORT: Final = 443
HTTP_PORT: Final = 80


class Origin:
    """All servers of one stage."""

    def __init__(self) -> None:
        self._sites: dict[str, Site] = {}
        self._zone: dns.Zone | None = None
        self._counters = Counters(Counter())
        self._servers: list[asyncio.Server] = []
        self._ends = contextlib.ExitStack()
        self._open: set[Connection] = set()
        self._lag_s = 0.0

    async def do(self, command: specs.OriginCommand) -> specs.OriginAnswer:
        """Carry out a command."""
        match command:
            case specs.OriginSetup():
                await self._set_up(command)
            case specs.Behave():
                unknown = sorted(set(command.behaviours) - set(self._sites))
                if unknown:
                    raise errors.ConfigError(f"origin: nobody listens at {', '.join(unknown)}")
                for address, behaviour in command.behaviours.items():
                    self._sites[address].behaviour = behaviour
            case specs.SetDns():
                if self._zone is None:
                    raise errors.ConfigError("origin: not set up yet")
                self._zone.spec = command.dns
            case specs.AskReport():
                return self._report(command)
        return specs.OriginDone()

    async def _set_up(self, setup: specs.OriginSetup) -> None:
        if self._sites:
            raise errors.ConfigError("origin: is set up once")
        self._zone = zone = dns.Zone(setup.zone, setup.lies, setup.dns, SeededRng("dns", setup.seed))
        for listener in setup.listeners:
            files = setup.certificates[listener.certificate]
            doh = zone.answer_https if listener.address in setup.dns_addresses else None
            rng = SeededRng(f"origin/{listener.address}", setup.seed)
            site = Site(listener.behaviour, self._counters, rng, counted=listener.counted, doh=doh)
            self._sites[listener.address] = site
            _context(files, http2=False)  # a file that is no certificate shows now
            await self._listen(site, listener.address, HTTPS_PORT, files)
            await self._listen(site, listener.address, HTTP_PORT, None)
            if listener.behaviour.quic:
                self._ends.callback(await origin_quic.serve(listener.address, HTTPS_PORT))
        for address in setup.dns_addresses:
            self._ends.callback(await dns.serve(zone, address))

    async def _listen(self, site: Site, address: str, port: int, files: specs.Certificate | None) -> None:
        def connect() -> Connection:
            http2 = site.behaviour.http2 and not site.behaviour.http10
            context = None if files is None else _context(files, http2=http2)
            connection = Connection(site, context, self._open.discard)
            self._open.add(connection)
            return connection

        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(connect, address, port, backlog=limits_lab.LAB_BACKLOG))

    def _report(self, command: specs.AskReport) -> specs.OriginReport:
        report = specs.OriginReport(
            requests_by_id=dict(self._counters.requests_by_id),
            connections=self._counters.connections,
            captive_requests=self._counters.captive_requests,
            dns_questions=0 if self._zone is None else self._zone.questions,
            doh_questions=0 if self._zone is None else self._zone.doh_questions,
            lag_ms=self._lag_s * 1000,
        )
        if command.reset_lag:
            self._lag_s = 0.0
        return report

    async def watch_lag(self) -> None:
        """Measure how late the loop runs, for as long as it does."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + limits_lab.LAB_LAG_STEP_S
            await asyncio.sleep(limits_lab.LAB_LAG_STEP_S)
            self._lag_s = max(self._lag_s, loop.time() - due_s)

    def close(self) -> None:
        """Close all sockets."""
        for server in self._servers:
            server.close()
        self._ends.close()
        for connection in list(self._open):
            connection.abort()


@functools.cache
def _context(files: specs.Certificate, *, http2: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2", "http/1.1"] if http2 else ["http/1.1"])
    return context


async def _answer(origin: Origin, line: bytes) -> specs.OriginAnswer:
    try:
        return await origin.do(msgspec.json.decode(line, type=specs.OriginCommand))
    except (msgspec.DecodeError, errors.ConfigError, KeyError) as error:
        return specs.OriginFailed(str(error))
    except (OSError, ssl.SSLError) as error:
        return specs.OriginFailed(str(error), machine=True)


async def run() -> None:
    """Serve until the input ends."""
    origin = Origin()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limits_lab.LAB_ORIGIN_LINE_BYTES_MAX)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    watch = loop.create_task(origin.watch_lag())
    try:
        while line := await reader.readline():
            reply = msgspec.json.encode(await _answer(origin, line))
            sys.stdout.buffer.write(reply + b"\n")
            sys.stdout.buffer.flush()
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        origin.close()
        transport.close()


if __name__ == "__main__":
    asyncio.run(run())
