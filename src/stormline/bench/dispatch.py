"""What dispatch costs: its answers in CPU time of its own process, large rule sets, and how soon a change arrives.

Questions and bare requests take turns; a row is the pair of neighbouring turns whose ratio is the median. All go over
kept connections of clear HTTP, as what TLS costs is the same for each, and some are always under way: a server that has
nothing to do between two requests goes to sleep, and waking it costs more than the answer. Bare is a small JSON, the
least that this server can answer at all. Plans are asked for by ever other devices, with the key they trust, so that
no two questions in a row are the same bytes; the answers have been signed before.
"""

import contextlib
import itertools
import math
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stormline.bench import centre, loading, push
from stormline.bench.client import median_pair
from stormline.bench.onecore import one_core
from stormline.bench.results import Row, row
from stormline.core import errors
from stormline.dispatch import rules
from stormline.wire import dns, dns_server
from stormline.wire.plan import PlanRequest

ROUNDS: Final = 45
"""Turns of each; odd, so that one is the median. Many short ones: the machine is more alike in neighbouring ones."""
REQUESTS: Final = 320
"""Requests of one turn."""
WARM_UP: Final = 544
"""Requests before the first turn, uncounted: each question once."""
IN_FLIGHT: Final = 16
"""Connections, each with one request: the server finds the next when it has answered one."""
GOAL_PLAN_US: Final = 60.0
"""A plan for ten hosts that has been signed before."""
GOAL_PLAN_RATIO: Final = 1.5
"""The same, as a multiple of the bare answer."""
GOAL_DOH_US: Final = 60.0
"""An answer of HTTPS records."""
GOAL_LOAD_S: Final = 5.0
"""CPU time from the file of 100,000 hosts to the first plan."""
GOAL_RULES_MB: Final = 300.0
"""The most memory a process holds meanwhile, all of it counted."""
GOAL_PUSH_S: Final = 2.0
"""From the operator's change to the plan in a client's hands, the jitter of the gateways included."""
DEVICES: Final = 500
"""Devices that ask in turn: some for each of the groups among which equal endpoints are shared out."""
_BARE: Final = "bare JSON answer of the same server"
_QUERY_BLOCK_BYTES: Final = 128
_TIMEOUT_S: Final = 30.0


class _Asked(NamedTuple):
    """One kind of request."""

    path: str
    bodies: tuple[bytes, ...]
    media: str

    def requests(self) -> list[bytes]:
        head = f"POST {self.path} HTTP/1.1\r\nhost: centre\r\naccept: {self.media}\r\ncontent-type: {self.media}\r\n"
        return [f"{head}content-length: {len(body)}\r\n\r\n".encode() + body for body in self.bodies]


class Centre:
    """The centre in its process, and connections to it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        where = ("127.0.0.1", self._number())
        self._sockets = [socket.create_connection(where, timeout=_TIMEOUT_S) for _ in range(IN_FLIGHT)]

    def _number(self) -> int:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise errors.PlatformError("bench: the centre failed; what it said stands above")
        return int(line)

    def _used_us(self) -> int:
        if self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._number()

    def turn(self, asked: _Asked, requests: int = REQUESTS) -> float:
        """Send requests; gives the CPU time of each, in microseconds.

        Raises:
            PlatformError: one was answered with an error.
        """
        each = itertools.cycle(asked.requests())
        before = self._used_us()
        rounds = requests // IN_FLIGHT
        for sock in self._sockets:
            sock.sendall(next(each))
        for number in range(rounds):
            for sock in self._sockets:
                self._read(sock, asked.path)
                if number < rounds - 1:
                    sock.sendall(next(each))
        return (self._used_us() - before) / (rounds * IN_FLIGHT)

    def _read(self, sock: socket.socket, path: str) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more(sock, path)
        head, _, body = data.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise errors.PlatformError(f"bench: {path} answered {head[:40]!r}")
        missing = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) - len(body)
        while missing > 0:
            missing -= len(self._more(sock, path))

    def _more(self, sock: socket.socket, path: str) -> bytes:
        data = sock.recv(65536)
        if not data:
            raise errors.PlatformError(f"bench: the centre ended the connection at {path}")
        return data

    def close(self) -> None:
        """Close the connections."""
        for sock in self._sockets:
            sock.close()


@contextlib.contextmanager
def _running() -> Iterator[Centre]:
    process = subprocess.Popen(
        [sys.executable, "-m", "stormline.bench.centre"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        made = Centre(process)
        try:
            yield made
        finally:
            made.close()
    finally:
        process.communicate()


def run() -> list[Row]:
    """Measure; takes a minute and a half on a quiet machine."""
    asked = dns.question(centre.HOSTS[0], dns.RecordType.HTTPS)[dns_server.HEADER_BYTES :]
    query = dns_server.forward_query(
        0, asked, dnssec_ok=False, checking_disabled=False, block_bytes=_QUERY_BLOCK_BYTES
    )  # padded, as browsers ask
    questions = tuple(
        msgspec.json.encode(
            PlanRequest(app=centre.APP, hosts=centre.HOSTS, device=f"bench-device-{number:06}", kids=(centre.PLAN_KID,))
        )
        for number in range(DEVICES)
    )
    plan = _Asked("/v1/plan", questions, "application/json")
    bare = _Asked("/bare", questions, "application/json")
    doh = _Asked("/dns-query", (query,), "application/dns-message")
    with one_core(), _running() as running:
        plan_us, bare_us = _pair(running, plan, bare)
        doh_us, bare_doh_us = _pair(running, doh, bare)
    return [
        row("plan_us", plan_us, "us", goal=GOAL_PLAN_US, peer=_BARE, peer_value=bare_us),
        row("plan_ratio", plan_us / bare_us, "x", goal=GOAL_PLAN_RATIO, peer=_BARE, peer_value=1.0),
        row("doh_us", doh_us, "us", goal=GOAL_DOH_US, peer=_BARE, peer_value=bare_doh_us),
        *_loading(),
        _pushing(),
    ]


def _pair(running: Centre, ours: _Asked, bare: _Asked) -> tuple[float, float]:
    for each in (ours, bare):
        running.turn(each, WARM_UP)
    figures: dict[str, list[float]] = {ours.path: [], bare.path: []}
    for index in range(ROUNDS):
        for each in (ours, bare) if index % 2 == 0 else (bare, ours):
            figures[each.path].append(running.turn(each))
    return median_pair(figures[ours.path], figures[bare.path])


def _loading() -> list[Row]:
    """Say what a large rule set costs that is read from its file, in a process that does nothing else."""
    rule_set = loading.rule_set()
    app = min(rule_set.apps)
    with tempfile.TemporaryDirectory(prefix="stormline-bench-") as folder:
        file = Path(folder) / "rules.json"
        file.write_bytes(rules.encode(rule_set))
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", loading.__name__, file, app, min(rule_set.apps[app])],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise errors.PlatformError("bench: the rules could not be loaded; what was said stands above")
    took_s, most_kib = map(float, done.stdout.split())
    return [
        row("rules_load_s", took_s, "s", goal=GOAL_LOAD_S),
        row("rules_mb", most_kib * 1024 / 1e6, "MB", goal=GOAL_RULES_MB),
    ]


def _pushing() -> Row:
    """Say how long a changed plan takes until a client holds it, at the 99th of a hundred."""
    waits = push.waits_s()
    return row("plan_push_p99_s", waits[math.ceil(0.99 * len(waits)) - 1], "s", goal=GOAL_PUSH_S)
