"""Proxies that were not written here, as real processes on 127.0.0.1: tinyproxy (HTTP) and microsocks (SOCKS5).

Neither speaks TLS itself: `relaying` stands before one that is to be an `https` proxy, as stunnel would.
"""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stormline.core import errors
from stormline.core.values import Address

START_TIMEOUT_S: Final = 10.0
_STEP_S: Final = 0.02
_STEPS: Final = int(START_TIMEOUT_S / _STEP_S)


@dataclass(frozen=True)
class RunningProxy:
    """A proxy process.

    Attributes:
        scheme: of its URL.
        address: where it listens.
        log: what it writes, a line for each connection it makes.
        userinfo: what its URL needs before the host, `@` included; empty where it wants no credentials.
    """

    scheme: str
    address: Address
    log: Path
    userinfo: str

    @property
    def url(self) -> str:
        """Its URL, with what credentials it wants."""
        return f"{self.scheme}://{self.userinfo}{self.address}"

    def lines(self, text: str) -> list[str]:
        """Give the lines of its log that hold `text`."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]


def installed(program: str) -> bool:
    """Say whether a program can be run here."""
    return shutil.which(program) is not None


@contextlib.contextmanager
def running_tinyproxy(folder: Path, *, userinfo: str = "", password: str = "") -> Iterator[RunningProxy]:
    """Run tinyproxy.

    Args:
        folder: for its settings and log.
        userinfo: of its URL, `user:password@`, percent-encoded.
        password: the same password in plain; the user is what stands before the `:`.
    """
    address = _free_address()
    log = folder / f"tinyproxy-{address.port}.log"
    settings = folder / f"tinyproxy-{address.port}.conf"
    lines = [
        f"Port {address.port}", f"Listen {address.host}", "Timeout 60", "MaxClients 100", "LogLevel Info",
        f'LogFile "{log}"',
    ]  # fmt: skip
    if userinfo:
        lines.append(f"BasicAuth {userinfo.partition(':')[0]} {password}")
    settings.write_text("\n".join(lines) + "\n")
    proxy = RunningProxy("http", address, log, userinfo)
    with _running(proxy, ["tinyproxy", "-d", "-c", str(settings)]):
        yield proxy


@contextlib.contextmanager
def running_microsocks(folder: Path, *, userinfo: str = "", password: str = "") -> Iterator[RunningProxy]:
    """Run microsocks; arguments as `running_tinyproxy`."""
    address = _free_address()
    command = ["microsocks", "-i", address.host, "-p", str(address.port)]
    if userinfo:
        command += ["-u", userinfo.partition(":")[0], "-P", password]
    proxy = RunningProxy("socks5h", address, folder / f"microsocks-{address.port}.log", userinfo)
    with _running(proxy, command):
        yield proxy


@contextlib.asynccontextmanager
async def relaying(target: Address, context: ssl.SSLContext) -> AsyncIterator[Address]:
    """Listen with TLS and pass on to `target` what comes; give the address. At the end all connections are cut."""
    tasks: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(*target)
        try:
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        finally:
            inner_writer.transport.abort()
            writer.transport.abort()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(relay(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    try:
        yield Address(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # for the sockets of what was cut


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # uvloop raises RuntimeError for a write after the end
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.contextmanager
def _running(proxy: RunningProxy, command: list[str]) -> Iterator[None]:
    with proxy.log.open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603 - a test's
    try:
        for _ in range(_STEPS):
            with socket.socket() as sock:
                if sock.connect_ex(proxy.address) == 0:
                    break
            if process.poll() is not None:
                raise errors.PlatformError(f"{command[0]} ended with {process.returncode}: {proxy.log.read_text()}")
            time.sleep(_STEP_S)
        else:
            raise errors.PlatformError(f"{command[0]} does not listen at {proxy.address}")
        yield
    finally:
        process.kill()
        process.wait()


def _free_address() -> Address:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return Address(*sock.getsockname())
