"""Drives one client under test through a schedule: `python -P _harness.py DRIVER.py CONFIG.json`.

Runs by itself in any environment that has the client's packages; the standard library is all it needs. `-P` keeps this
folder from the module path, because drivers are named like the libraries they import.

A driver is a module with one function, `client(config)`: an asynchronous context manager that gives `get(url)`, which
answers `(status, body)` or raises. It may have `kind(error)`, which names the kind of an error or says "",
`level()`, which says what its client takes the network for, and `costs()`, which gives counts for the last line.

The config: {"base_url", "ca_file", "schedule": [[id, at_s, size], ...], "patience_s", "options": {}, "workload": path
of workload.py}; "query" is appended to every URL. Standard output is JSON lines: {"ready": true} when the client is
made; after a line "go" on standard input one {"id", "start_s", "end_s", "ok", "kind", "detail"} for each request as it
ends, and {"level", "at_s"} whenever the level has changed; at last {"done": true, "lag_max_ms", "lag_p99_ms",
"wait_max_ms", "wait_p99_ms", "cpu_s"}. Times are seconds since "go". Kinds: "" where ok, else one of `KINDS`.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, Final, TypeAlias

Get: TypeAlias = Callable[[str], Awaitable[tuple[int, bytes]]]

KINDS: Final = ("timeout", "dns", "connect", "tls", "read", "status", "body", "other")
"""Why a request failed: time ran out (the client's own limits or the user's patience), no address, no connection, the
peer not trusted, the connection broke, a status other than 200, a body that is not the right one, anything else."""
CAUSES_MAX: Final = 12
"""Errors looked at behind one error."""
DETAIL_CHARS_MAX: Final = 160
WARM_S: Final = 3.0
WARM_PORT: Final = 9
"""Discard (RFC 863), where no device listens."""
TICK_S: Final = 0.01
"""How often the loop's lag is measured."""
LEVEL_S: Final = 0.1
"""How often a client is asked for its level."""
CLOSE_S: Final = 1.0
"""How long a client may take to close; it is over anyway."""

_TLS_BUT_NO_REFUSAL: Final = (
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
    ssl.SSLSyscallError,
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
)
"""The connection ended, or an engine asks for more bytes: seen behind errors that have nothing to do with trust."""
_BY_NAME: Final = (
    ("tls", ("SSL", "Tls", "Certificate")),
    ("dns", ("DNS", "NameResolution", "ResolveError", "gaierror")),
    ("timeout", ("Timeout", "DeadlineExceeded")),
    ("connect", ("ConnectError", "ConnectorError", "NewConnectionError", "ConnectionRefused")),
    (
        "read",
        ("ReadError", "WriteError", "ProtocolError", "ProtocolViolation", "Disconnected", "Payload", "ChunkedEncoding",
         "ConnectionReset", "BrokenPipe", "ConnectionError", "IncompleteRead", "DecodeError", "DecodingError",
         "ChannelLost", "StreamReset"),
    ),
)  # fmt: skip
"""What the names of error classes say; libraries agree on them better than on their trees. Earlier rows win."""


def load(path: str, name: str) -> ModuleType:
    """Load a module by its path."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def kind_of(error: BaseException) -> str:
    """Say why a request failed: by the error, and by what it was raised from."""
    own: set[str] = set()
    inherited: set[str] = set()
    at: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if at is None:
            break
        if isinstance(at, socket.gaierror):
            return "dns"
        if isinstance(at, ssl.SSLError):
            if not isinstance(at, _TLS_BUT_NO_REFUSAL):
                return "tls"
        else:
            own.add(type(at).__name__)
            inherited.update(each.__name__ for each in type(at).__mro__)
        at = at.__cause__ or at.__context__  # hidden ones too: `from None` hides what was refused in httpcore
    for names in (own, inherited):
        for kind, words in _BY_NAME:
            if any(word in name for name in names for word in words):
                return kind
    return "other"


class Lag:
    """How late the loop runs what is due, and how much of that was the machine's fault.

    A client may block its loop by itself; that is its own affair and part of what is measured. What the thread waited
    for a core, while it could have run, is the machine's: a run with much of it says nothing about the client.
    """

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self.waits_s: list[float] = []

    async def measure(self) -> None:
        """Measure until cancelled."""
        now_s = asyncio.get_running_loop().time
        waited_s = waited()
        while True:
            due_s = now_s() + TICK_S
            await asyncio.sleep(TICK_S)
            before_s, waited_s = waited_s, waited()
            self.note(max(0.0, now_s() - due_s), waited_s - before_s)

    def note(self, lag_s: float, waited_s: float) -> None:
        """Take one measurement."""
        self.lags_s.append(lag_s)
        self.waits_s.append(min(lag_s, waited_s))

    def data(self) -> dict[str, float]:
        """Give the figures, milliseconds."""
        shown = {}
        for name, values_s in (("lag", self.lags_s), ("wait", self.waits_s)):
            ordered = sorted(values_s) or [0.0]
            shown[f"{name}_max_ms"] = round(ordered[-1] * 1000, 2)
            shown[f"{name}_p99_ms"] = round(ordered[int(len(ordered) * 0.99)] * 1000, 2)
        return shown


def waited() -> float:
    """Give the seconds this thread has waited for a core since its start (Linux; growing without bound elsewhere)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return asyncio.get_running_loop().time()  # then all lag counts as the machine's


class Run:
    """One run of a schedule."""

    def __init__(self, config: dict[str, Any], driver: ModuleType, workload: ModuleType) -> None:
        self._config = config
        self._driver = driver
        self._workload = workload
        self._patience_s = float(config["patience_s"])

    async def ask(self, get: Get, begin_s: float, id: int, at_s: float, size: int) -> None:
        """Make one request when it is due, and tell how it went."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(begin_s + at_s - loop.time())
        start_s = loop.time()
        url = self._config["base_url"] + self._workload.target(id, size) + self._config.get("query", "")
        # From the moment it was due: a client that is late to begin has no more time for it.
        patience = asyncio.timeout_at(begin_s + at_s + self._patience_s)
        try:
            async with patience:
                status, body = await get(url)
            kind, detail = self._judge(id, size, status, body)
        except Exception as error:
            kind = (self._driver.kind(error) if hasattr(self._driver, "kind") else "") or kind_of(error)
            detail = f"{type(error).__name__}: {error}"
            if patience.expired():
                kind, detail = "timeout", "the user's patience is over"
        emit(
            {
                "id": id,
                "start_s": round(start_s - begin_s, 4),
                "end_s": round(loop.time() - begin_s, 4),
                "ok": kind == "",
                "kind": kind,
                "detail": detail[:DETAIL_CHARS_MAX],
            }
        )

    async def _warm(self, get: Get) -> None:
        """Let the client import what it imports at its first request, which takes tenths of a second when many start.

        Nobody listens there, so no connection and no name comes of it.
        """
        with contextlib.suppress(Exception):
            async with asyncio.timeout(WARM_S):
                await get(f"https://127.0.0.1:{WARM_PORT}/")

    async def _tell_levels(self, begin_s: float) -> None:
        """Tell the client's level whenever it has changed, until cancelled."""
        loop, before = asyncio.get_running_loop(), ""
        while True:
            level = str(self._driver.level())
            if level != before:
                before = level
                emit({"level": level, "at_s": round(loop.time() - begin_s, 2)})
            await asyncio.sleep(LEVEL_S)

    def _judge(self, id: int, size: int, status: int, body: bytes) -> tuple[str, str]:
        if status != 200:
            return "status", f"HTTP {status}"
        if body != self._workload.body(id, size):
            return "body", f"{len(body)} bytes of {size}" if len(body) != size else f"{size} wrong bytes"
        return "", ""

    async def run(self) -> None:
        """Make the client, wait for "go", make all requests."""
        loop = asyncio.get_running_loop()
        stack = contextlib.AsyncExitStack()
        get: Get = await stack.enter_async_context(self._driver.client(self._config))
        await self._warm(get)
        emit({"ready": True})
        if (await asyncio.to_thread(sys.stdin.readline)).strip() != "go":
            return  # whoever started this is gone
        begin_s = loop.time()
        cpu_s = time.process_time()
        lag = Lag()
        tickers = [asyncio.create_task(lag.measure())]
        if hasattr(self._driver, "level"):
            tickers.append(asyncio.create_task(self._tell_levels(begin_s)))
        async with asyncio.TaskGroup() as group:
            for id, at_s, size in self._config["schedule"]:
                group.create_task(self.ask(get, begin_s, id, at_s, size))
        for ticker in tickers:
            ticker.cancel()
        costs = self._driver.costs() if hasattr(self._driver, "costs") else {}
        emit({"done": True, **lag.data(), **costs, "cpu_s": round(time.process_time() - cpu_s, 3)})
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await stack.aclose()


def emit(line: dict[str, Any]) -> None:
    """Write one line, at once."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(driver_path: str, config_path: str) -> None:
    """Run a driver with a config and end the process."""
    with open(config_path, encoding="utf-8") as file:
        config = json.load(file)
    workload = load(config["workload"], "lab_workload")
    driver = load(driver_path, "lab_driver")
    asyncio.run(Run(config, driver, workload).run())


if __name__ == "__main__":
    code = 1
    try:
        main(*sys.argv[1:])
        code = 0
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads that still wait for a name server would keep the process for half a minute
