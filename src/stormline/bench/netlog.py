"""What the network log costs a client, in CPU time of its own thread: a call that succeeds, one that fails, a line.

In one process, the client's own parts around a call that goes nowhere: with the log and without it, in turns of ABBA;
a row is the median of the differences. The thread that compresses is counted apart: its CPU time is not the caller's.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stormline.bench.results import Row, row
from stormline.client import netlog
from stormline.client.config import Config
from stormline.client.runtime import Runtime
from stormline.core import errors
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.policy.means import Means, Step

ROUNDS: Final = 41
"""Pairs of turns."""
CALLS: Final = 100
"""Calls in one turn: what they write fits into the tail, so that no turn drops any."""
GOAL_SUCCESS_US: Final = 5.0
GOAL_FAILURE_US: Final = 100.0
GOAL_LINE_US: Final = 50.0
"""Beside a handler that formats and writes to nowhere: what encoding and masking may add."""
GOAL_BYTES: Final = 400.0
"""A failure of three attempts on disk: four megabytes hold ten thousand."""
_ATTEMPTS: Final = 3


def run() -> list[Row]:
    """Measure; takes some seconds."""
    return asyncio.run(_run())


async def _run() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="stormline-bench-") as name:
        clear = Path(name) / "clear"
        plain, logging_ = Runtime(_config(None)), Runtime(_config(clear))
        key = _public_key()
        sealing = Runtime(_config(Path(name) / "sealed", key))
        try:
            rows = [
                _row("netlog_success_us", succeed, plain, logging_, GOAL_SUCCESS_US),
                _row("netlog_failure_us", fail, plain, logging_, GOAL_FAILURE_US),
                _row("netlog_failure_sealed_us", fail, plain, sealing, GOAL_FAILURE_US),
                _line(clear),
            ]
        finally:
            for each in (plain, logging_, sealing):
                await each.aclose()
        return [*rows, _bytes(Path(name) / "bytes")]


def _config(folder: Path | None, key: str | None = None) -> Config:
    return Config(network_log_dir=folder, network_log_key=key, network_watch="off", network_probes=False)


def _public_key() -> str:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from stormline.wire import jws

    return jws.b64url(X25519PrivateKey.generate().public_key().public_bytes_raw())


def succeed(runtime: Runtime) -> None:
    """Be a call that is answered."""
    trace = runtime.trace(method="GET", host="api.example", path="/v1/orders/1234")
    trace.attempt(Step(Means.DIRECT))
    trace.connected("192.0.2.1:443", "h2", reused=True)
    trace.enter(Phase.SEND)
    trace.enter(Phase.FIRST_BYTE)
    trace.answered(200)
    trace.body_ended()


def fail(runtime: Runtime, number: int = 1234) -> None:
    """Be a call whose three attempts fail; each number is another one."""
    trace = runtime.trace(method="GET", host=f"api{number % 5}.example", path=f"/v1/orders/{number}")
    first = f"192.0.2.{number % 250}"
    addresses = (Address(first, 443), Address(f"2001:db8::{number % 250}", 443))
    error: errors.TransportError | None = None
    for _ in range(_ATTEMPTS):
        trace.attempt(Step(Means.DIRECT, addresses))
        trace.enter(Phase.CONNECT)
        trace.note(f"{first}:443 failed: no answer for {number % 37 / 10} s")
        error = errors.ConnectError(
            f"no connection: {first}:443: no answer for 1.5 s; [2001:db8::1]:443: network is unreachable",
            phase=Phase.CONNECT,
            maybe_delivered=False,
        )
        error.__cause__ = TimeoutError()
        trace.attempt_failed(error)
        trace.note("pause 0.28 s")
    if error is not None:
        trace.failed(error)


def _turn(work: Callable[[Runtime], None], runtime: Runtime) -> float:
    begin = time.thread_time()
    for _ in range(CALLS):
        work(runtime)
    used = time.thread_time() - begin
    if runtime.netlog is not None:
        runtime.netlog.store.flush()
    return used / CALLS * 1e6


def _row(name: str, work: Callable[[Runtime], None], without: Runtime, with_log: Runtime, goal: float) -> Row:
    for each in (without, with_log):
        _turn(work, each)
    pairs = []
    for index in range(ROUNDS):
        order = (without, with_log) if index % 2 == 0 else (with_log, without)
        used = {each: _turn(work, each) for each in order}
        pairs.append((used[with_log] - used[without], used[without]))
    added, before = sorted(pairs)[len(pairs) // 2]
    log = with_log.netlog
    if log is None or log.store.lost or log.store.problem:
        raise errors.PlatformError("bench: the network log has lost records: this measures nothing")
    return row(name, added, "us", goal=goal, peer="the same without a log", peer_value=before)


def _line(folder: Path) -> Row:
    """Say what a line of the app's log costs beyond one that is formatted and thrown away."""
    ours, nowhere = netlog.NetworkLogHandler(folder), _Nowhere()
    record = logging.LogRecord(
        "shop.cart", logging.INFO, __file__, 1, "order %d of %s taken: %s", (7, "ann", "ok"), None
    )
    differences = []
    for _ in range(ROUNDS):
        used = []
        for handler in (nowhere, ours):
            begin = time.thread_time()
            for _ in range(CALLS):
                handler.handle(record)
            used.append((time.thread_time() - begin) / CALLS * 1e6)
        ours.flush()
        differences.append((used[1] - used[0], used[0]))
    ours.close()
    added, before = sorted(differences)[ROUNDS // 2]
    return row("netlog_line_us", added, "us", goal=GOAL_LINE_US, peer="a handler that only formats", peer_value=before)


class _Nowhere(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)


def _bytes(folder: Path) -> Row:
    """Say what a failure takes on disk, in blocks as they are written."""
    runtime = Runtime(_config(folder))
    log = runtime.netlog
    for number in range(CALLS):
        fail(runtime, number * 7919 % 10007)
    runtime.abandon()
    if log is not None:
        log.store.close()
    size = sum(path.stat().st_size for path in folder.iterdir())
    return row("netlog_failure_bytes", size / CALLS, "bytes", goal=GOAL_BYTES)
