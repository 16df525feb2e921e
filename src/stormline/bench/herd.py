"""What a gateway's sudden end costs it when it is back: 2,000 clients over TLS that all lost it in the same moment.

The gateway has one core, and the check of a token costs it 2 ms. It is killed, and starts again 2 s later. The clients
are plain sessions that decide when to come back as every client of ours does (`policy.reconnect`), in this process.
"""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final, cast

import httpx2
import uvloop

from stormline.assembly.authority import ensure_authority
from stormline.bench.gateway_host import APP, KEY, KID
from stormline.bench.herd_host import ADMIN_KEY
from stormline.bench.results import Row, row
from stormline.core import codes, errors, limits
from stormline.net.clock import SystemClock, SystemRng
from stormline.policy.reconnect import Reconnect
from stormline.web.server import TlsFiles
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire import tokens
from stormline.wire.connection import Connection
from stormline.wire.states import Role

CLIENTS: Final = 2000
COMING_S: Final = 15.0
"""Over how long the clients come at first."""
AWAY_S: Final = 2.0
"""How long the gateway is away."""
BIN_S: Final = 0.1
PATIENCE_S: Final = 120.0
"""How long the bench waits for the last client."""


class _Client(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        now = int(SystemClock().wall())
        claims = tokens.DeviceToken(app=APP, device=f"d{number}", iat=now, exp=now + 3600)
        self._token = tokens.mint(claims, key=KEY, kid=KID)
        self._loop = loop
        self.transport: asyncio.Transport | None = None
        self.machine = Connection(Role.CLIENT, loop.time())
        self.welcome: asyncio.Future[m.Welcome] = loop.create_future()
        self.over: asyncio.Future[e.Closed] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say HELLO."""
        self.transport = cast("asyncio.Transport", transport)
        self.machine.send_hello(m.Hello(versions=(1,), app=APP, token=self._token))
        self.transport.write(self.machine.data_to_send())

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self.machine.receive_data(data, self._loop.time())
        while (event := self.machine.next_event()) is not None:
            if isinstance(event, e.Welcomed):
                self.welcome.set_result(event.welcome)
            elif isinstance(event, e.Closed) and not self.over.done():
                self.over.set_result(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        if not self.over.done():
            self.over.set_result(e.Closed(codes.Code.OK, "lost", lost=True))


class _Herd:
    """All clients, and what they did since the gateway was killed.

    Attributes:
        firsts: moments of their first tries.
        tries: how many tries there were.
        back: moments at which they were welcomed again.
        terminal: clients that gave up for good.
        outcomes: how tries ended.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._rng = SystemRng()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE  # the bench measures the server
        self._context.set_alpn_protocols([m.ALPN])
        self._stand = 0
        self.all_stand = asyncio.Event()
        self.killed_at = 0.0
        self.firsts: list[float] = []
        self.tries = 0
        self.back: list[float] = []
        self.terminal = 0
        self.outcomes: Counter[str] = Counter()

    async def live(self, number: int) -> None:
        """Be a client: one session, reopened after each loss."""
        line, first = Reconnect(), False
        await asyncio.sleep(COMING_S * number / CLIENTS)
        while (due := line.keep_timer()) is not None:
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if self.killed_at:
                self.tries += 1
                if first:
                    self.firsts.append(self._loop.time() - self.killed_at)
                first = False
            client = await self._try(number, line)
            if client is None:
                continue
            self._stand += 1
            if self._stand == CLIENTS:
                self.all_stand.set()
            if self.killed_at:
                self.back.append(self._loop.time() - self.killed_at)
            await client.over
            self._stand -= 1
            self.all_stand.clear()
            first = True
            line.observe_loss(self._loop.time(), self._rng.random())
        self.terminal += 1

    async def _try(self, number: int, line: Reconnect) -> _Client | None:
        client = _Client(number, self._loop)
        try:
            async with asyncio.timeout(limits.LINK_CONNECT_TIMEOUT_S):
                source = (f"127.1.{number // 250}.{1 + number % 250}", 0)  # each from a line of its own
                await self._loop.create_connection(
                    lambda: client, "127.0.0.1", self._port, ssl=self._context, local_addr=source
                )
            async with asyncio.timeout(limits.HELLO_TIMEOUT_S):
                ends: list[asyncio.Future[Any]] = [client.welcome, client.over]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except OSError as error:  # TimeoutError is one
            self.outcomes[type(error).__name__] += 1
        if client.welcome.done():
            self.outcomes["welcome"] += 1
            line.observe_success(self._loop.time(), spread_s=client.welcome.result().return_spread_s)
            return client
        if client.transport is not None:
            client.transport.abort()
        closed = client.over.result() if client.over.done() else e.Closed(codes.Code.OK, "", lost=True)
        if not closed.lost:
            self.outcomes[codes.name(closed.code)] += 1
        if codes.action(closed.code) in (codes.Action.STOP, codes.Action.RENEW):
            line.observe_stop()
        else:
            line.observe_failure(self._loop.time(), self._rng.random(), retry_after_s=closed.retry_after_s)
        return None


class _Gateway:
    """The gateway's process, on a port that stays."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        self._serving: subprocess.Popen[str] | None = None
        self._standby = self._launch()
        self.lag_s = 0.0

    def _launch(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(  # noqa: S603 - a module of our own
            [
                sys.executable, "-m", "stormline.bench.herd_host", str(self._files.certificate), str(self._files.key),
                str(self.port),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    async def start(self) -> None:
        """Let the one that stands by serve, and have another stand by: what Python takes to start is not measured."""
        process, self._standby = self._standby, self._launch()
        self._serving = process
        await asyncio.to_thread(self._read, process)
        assert process.stdin is not None  # noqa: S101 - a pipe was asked for
        process.stdin.write("go\n")
        process.stdin.flush()
        self._admin = await asyncio.to_thread(self._read, process)

    def _read(self, process: "subprocess.Popen[str]") -> str:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise errors.PlatformError("bench: a process failed; what it said stands above")
        return line.strip()

    async def watch(self) -> None:
        """Look at the loop's lag, for as long as this is not cancelled."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx2.AsyncClient(headers=headers, timeout=30, trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    found = (await http.get(f"http://{self._admin}/v1/load")).json()
                    self.lag_s = max(self.lag_s, found["lag_s"])
                await asyncio.sleep(0.1)

    def kill(self) -> None:
        """End it as a crash does."""
        if self._serving is not None:
            self._serving.send_signal(signal.SIGKILL)
            self._serving.communicate()

    def close(self) -> None:
        """End it, and the one that stands by."""
        self.kill()
        self._standby.kill()
        self._standby.communicate()


async def _measure(files: TlsFiles) -> tuple[_Herd, float]:
    gateway = _Gateway(files)
    await gateway.start()
    herd = _Herd(gateway.port)
    living = [asyncio.create_task(herd.live(number)) for number in range(CLIENTS)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await herd.all_stand.wait()
        await asyncio.sleep(limits.RECONNECT_STABLE_S + 1.0)
        gateway.kill()
        herd.killed_at = asyncio.get_running_loop().time()
        herd.all_stand.clear()
        herd.outcomes.clear()
        await asyncio.sleep(AWAY_S)
        await gateway.start()
        living.append(asyncio.create_task(gateway.watch()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await herd.all_stand.wait()
        await asyncio.sleep(1.0)
    finally:
        for task in living:
            task.cancel()
        await asyncio.gather(*living, return_exceptions=True)
        gateway.close()
    return herd, gateway.lag_s


def run() -> list[Row]:
    """Measure; takes some 40 s.

    Raises:
        PlatformError: the gateway did not start.
    """
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        authority = ensure_authority(Path(folder), clock=SystemClock(), rng=SystemRng())
        issued = authority.issue("gateway", names=["bench.test"])
        files = TlsFiles(issued.certificate, issued.key)
        try:
            if len(cores) > 1:
                os.sched_setaffinity(0, cores - {min(cores)})
            herd, lag_s = uvloop.run(_measure(files))
        finally:
            os.sched_setaffinity(0, cores)
    bins = Counter(int(moment / BIN_S) for moment in herd.firsts)
    crowded_pct = 100.0 * max(bins.values()) / max(1, len(herd.firsts))
    return [
        row("herd_bin_pct", crowded_pct, "% of first tries in any 0.1 s", goal=5.0),
        row("herd_tries_ratio", herd.tries / CLIENTS, "tries per client", goal=2.0),
        row("herd_back_pct", 100.0 * len(herd.back) / CLIENTS, "% of clients back", goal=100.0, better="higher"),
        row("herd_last_back_s", max(herd.back, default=PATIENCE_S), "s", goal=60.0),
        row("herd_lag_ms", 1000 * lag_s, "ms", goal=500.0),
        row("herd_given_up", herd.terminal, "clients", goal=0.0),
    ]
