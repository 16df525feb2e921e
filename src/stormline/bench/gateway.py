"""What a gateway's connections cost: memory of idle ones, handshakes, echoes and pushes, in its process alone.

Peers in the same run: mosquitto (MQTT, quality of service 1, as our pushes are acknowledged too), servers of
`websockets`, and the floor, protocol objects that only read and write the same bytes (`gateway_bare`). Handshakes are
what a greeted connection over TLS costs more than one without. A push or publication goes out when the one before has
been handed to all. Each peer's turns stand between ours; a row is the pair whose ratio is the median.
"""

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stormline.assembly.authority import ensure_authority
from stormline.bench.client import median_pair
from stormline.bench.results import Row, row
from stormline.core import errors
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import TlsFiles

SESSIONS: Final = 10_000
"""Idle connections of a carrier at once."""
FANOUT_SESSIONS: Final = 500
"""Sessions that are pushed to."""
PUSHES: Final = 20
"""Pushes to each of them in a turn."""
HANDSHAKES: Final = 400
"""Connections opened in a turn."""
ECHOES: Final = 4000
"""Messages that come back in a turn."""
ROUNDS: Final = 5
"""Turns of each; odd, so that one is the median."""
GOALS_KIB: Final = {"plain": 4.0, "tls": 48.0, "ws": 12.0, "wss": 60.0}
"""Memory of an idle session by carrier."""
GOAL_HANDSHAKE_US: Final = 450.0
GOAL_ECHO_US: Final = 20.0
"""Where the gate answers at once. In a task, and in a WebSocket, it is twice as much."""
GOALS_FANOUT_US: Final = {"plain": 9.0, "tls": 12.0}
_CARRIER: Final = {"plain": "raw", "tls": "tls", "ws": "ws", "wss": "wss"}
_MOSQUITTO: Final = shutil.which("mosquitto", path=f"/usr/sbin:/usr/local/sbin:{os.environ.get('PATH', '')}")


_Measure = Callable[["_Server"], float]


class _Process:
    """A process that answers lines."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(  # noqa: S603 - modules of our own
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str = "") -> str:
        """Send a line and give the answer.

        Raises:
            PlatformError: it ended.
        """
        if line and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
        answer = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not answer:
            raise errors.PlatformError("bench: a process failed; what it said stands above")
        return answer

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


class _Server:
    """A server under measure.

    Attributes:
        speaks: what its crowd speaks.
        ports: by `plain` and `tls`.
    """

    def __init__(self, speaks: str, ports: dict[str, int], host: _Process | None, pid: int) -> None:
        self.speaks = speaks
        self.ports = ports
        self._host = host
        self._pid = pid

    def cpu_us(self) -> float:
        """CPU time used so far."""
        if self._host is not None:
            return float(self._host.ask("cpu"))
        return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[0]) / 1e3  # of one thread; exact

    def resident_kib(self) -> float:
        """Memory held now."""
        if self._host is not None:
            return float(self._host.ask("rss"))
        return float(Path(f"/proc/{self._pid}/status").read_text().partition("VmRSS:")[2].split()[0])

    def push(self, crowd: _Process, rounds: int) -> None:
        """Send so many messages to all of a crowd."""
        if self._host is not None:
            self._host.ask(f"push {rounds}")
        else:
            crowd.ask(f"publish {rounds}")

    @contextlib.contextmanager
    def crowd(self, carrier: str, standing: int, speaks: str = "") -> Iterator[_Process]:
        """Have connections of one carrier."""
        port = self.ports["tls" if carrier in ("tls", "wss") else "plain"]
        process = _Process("stormline.bench.gateway_crowd", speaks or self.speaks, _CARRIER[carrier], str(port), "0")
        try:
            if standing:
                process.ask(f"stand {standing}")
            yield process
        finally:
            process.close()


@contextlib.contextmanager
def _host(what: str, files: TlsFiles) -> Iterator[_Server]:
    process = _Process("stormline.bench.gateway_host", what, str(files.certificate), str(files.key))
    try:
        plain, tls = map(int, process.ask().split())
        yield _Server("ours" if what == "bare" else what, {"plain": plain, "tls": tls}, process, process.process.pid)
    finally:
        process.close()


@contextlib.contextmanager
def _mosquitto(files: TlsFiles, folder: Path) -> Iterator[_Server | None]:
    """Run the broker where this machine has it."""
    if _MOSQUITTO is None:
        yield None
        return
    ports = {}
    for carrier in ("plain", "tls"):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            ports[carrier] = sock.getsockname()[1]
    config = folder / "mosquitto.conf"
    config.write_text(
        "user root\nallow_anonymous true\npersistence false\nlog_type error\nmax_queued_messages 0\n"
        f"max_inflight_messages 0\nset_tcp_nodelay true\nlistener {ports['plain']} 127.0.0.1\n"
        f"listener {ports['tls']} 127.0.0.1\ncertfile {files.certificate}\nkeyfile {files.key}\ntls_version tlsv1.3\n"
    )
    process = subprocess.Popen([_MOSQUITTO, "-c", str(config)], stderr=subprocess.DEVNULL)  # noqa: S603 - the broker
    try:
        for _ in range(100):
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", ports["tls"])) == 0:
                    break
            process.poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield _Server("mqtt", ports, None, process.pid)
    finally:
        process.terminate()
        process.wait()


def _memory_kib(server: _Server, carrier: str) -> float:
    """Give the memory of one idle connection. The first few make what all of them share."""
    with server.crowd(carrier, 50) as crowd:
        before = server.resident_kib()
        crowd.ask(f"stand {SESSIONS}")
        return (server.resident_kib() - before) / SESSIONS


def _handshake_us(server: _Server) -> float:
    """Give what TLS adds to a greeted connection."""
    costs = []
    for carrier in ("tls", "plain"):
        with server.crowd(carrier, 0) as crowd:
            crowd.ask("connect 20")
            costs.append(_per(server, HANDSHAKES, functools.partial(crowd.ask, f"connect {HANDSHAKES}")))
    return costs[0] - costs[1]


def _echo_us(server: _Server, carrier: str, speaks: str = "") -> float:
    with server.crowd(carrier, 20, speaks) as crowd:
        crowd.ask("echo 200")
        return _per(server, ECHOES, lambda: crowd.ask(f"echo {ECHOES}"))


def _fanout_us(server: _Server, carrier: str) -> float:
    with server.crowd(carrier, FANOUT_SESSIONS) as crowd:
        server.push(crowd, 1)
        return _per(server, PUSHES * FANOUT_SESSIONS, lambda: server.push(crowd, PUSHES))


def _per(server: _Server, times: int, work: Callable[[], object]) -> float:
    before = server.cpu_us()
    work()
    return (server.cpu_us() - before) / times


def _beside(ours: Callable[[], float], theirs: Callable[[], float] | None) -> tuple[float, float | None]:
    """Give our figure and a peer's, of turns taken side by side."""
    turns: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        turns[0].append(ours())
        if theirs is not None:
            turns[1].append(theirs())
    if theirs is None:
        return sorted(turns[0])[ROUNDS // 2], None
    return median_pair(*turns)


def run() -> list[Row]:
    """Measure.

    Raises:
        PlatformError: a process of the bench failed.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="stormline-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        files = ensure_authority(folder / "pki", clock=SystemClock(), rng=SystemRng()).issue(
            "gateway", names=["bench.test"]
        )
        broker = stack.enter_context(_mosquitto(files, folder))
        ours = stack.enter_context(_host("ours", files))
        sockets, bare = stack.enter_context(_host("ws", files)), stack.enter_context(_host("bare", files))
        for carrier, goal in GOALS_KIB.items():
            value: float | None = None
            with _host("ours", files) as fresh:  # memory that was given back would hide what is taken
                figure = _memory_kib(fresh, carrier)
            if carrier in ("ws", "wss"):
                with _host("ws", files) as fresh:
                    peer, value = "websockets", _memory_kib(fresh, carrier)
            else:
                with _mosquitto(files, folder) as its:
                    peer, value = ("", None) if its is None else ("mosquitto", _memory_kib(its, carrier))
            rows.append(row(f"mem_{carrier}_kib", figure, "KiB", goal=goal, peer=peer, peer_value=value))

        def add(name: str, goal: float, measure: _Measure, theirs: _Measure, peer: str, server: _Server | None) -> None:
            beside = None if server is None else functools.partial(theirs, server)
            figure, value = _beside(functools.partial(measure, ours), beside)
            rows.append(row(name, figure, "us", goal=goal, peer="" if server is None else peer, peer_value=value))

        add("handshake_us", GOAL_HANDSHAKE_US, _handshake_us, _handshake_us, "mosquitto", broker)
        of_ws, plain = functools.partial(_echo_us, carrier="ws"), functools.partial(_echo_us, carrier="plain")
        tasked = functools.partial(plain, speaks="task")
        add("echo_us", GOAL_ECHO_US, plain, of_ws, "websockets", sockets)
        add("echo_bare_us", GOAL_ECHO_US, plain, plain, "bare protocol", bare)
        add("echo_task_us", 2 * GOAL_ECHO_US, tasked, plain, "bare protocol", bare)
        add("echo_ws_us", 2 * GOAL_ECHO_US, of_ws, of_ws, "websockets", sockets)
        for carrier, goal in GOALS_FANOUT_US.items():
            spread = functools.partial(_fanout_us, carrier=carrier)
            add(f"fanout_{carrier}_us", goal, spread, spread, "mosquitto", broker)
            add(f"fanout_bare_{carrier}_us", goal, spread, spread, "bare protocol", bare)
    return rows
