"""Every driver against a real server: right answers count, wrong ones do not, and failures have their names."""

import asyncio
import contextlib
import os
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stormline.assembly.authority import ensure_authority
from stormline.core.errors import ConfigError, PlatformError
from stormline.lab import clients, workload
from stormline.lab.driving import Driver
from stormline.net.clock import SystemClock, SystemRng

pytestmark = pytest.mark.loopback

SIZES = {0: 1024, 1: 30720, 2: 131072, 3: 0, 4: 1024, 5: 1024, 6: 1024, 7: 1024, 8: 1024}
SCHEDULE = [workload.Ask(id, 0.01 * id, size) for id, size in SIZES.items()]
PATIENCE_S = 2.5
Answer = Callable[[int, int], bytes | None]
"""From id and size the whole answer, head and body; None: never."""


def whole(status: str, body: bytes, announced: int | None = None) -> bytes:
    length = len(body) if announced is None else announced
    return f"HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n".encode() + body


def right(id: int, size: int) -> bytes:
    return whole("200 OK", workload.body(id, size))


class Server:
    """An HTTP/1.1 server over TLS on a thread of its own."""

    def __init__(self, folder: Path) -> None:
        authority = ensure_authority(folder, clock=SystemClock(), rng=SystemRng())
        files = authority.issue("origin", names=["localhost"], ips=["127.0.0.1"])
        self.ca_file = authority.certificate
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(files.certificate, files.key)
        self.answer: Answer = right
        self.port = 0
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        assert started.wait(10)

    @property
    def base_url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._stop = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                _, _, id, size = head.split()[1].decode().split("/")
                answer = self.answer(int(id), int(size))
                if answer is None:
                    await asyncio.sleep(3600)
                    continue
                writer.write(answer)
                await writer.drain()
        except (OSError, EOFError, ssl.SSLError):
            pass
        finally:
            writer.transport.abort()


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("authority"))
    yield server
    server.close()


Lines = dict[int, Mapping[str, Any]]
Drive = Callable[..., dict[str, Lines]]


@pytest.fixture(name="drive")
def _drive(server: Server, tmp_path: Path) -> Drive:
    """Run every client there is, side by side; give what each told of its requests."""

    def drive(answer: Answer, **options: Any) -> dict[str, Lines]:
        server.answer = answer
        with contextlib.ExitStack() as stack:
            drivers = []
            for client in clients.CLIENTS.values():
                with contextlib.suppress(ConfigError):  # not installed here
                    folder = tmp_path / client.name
                    folder.mkdir()
                    made = Driver(
                        client, SCHEDULE, folder=folder, environ=os.environ, popen=popen, patience_s=PATIENCE_S,
                        **{"base_url": server.base_url, "ca_file": server.ca_file, **options},
                    )  # fmt: skip
                    drivers.append(stack.enter_context(made))
            for driver in drivers:
                driver.wait_ready()
            for driver in drivers:
                driver.go()
            until_s = SystemClock().monotonic() + PATIENCE_S + 20
            assert {driver.client.name: driver.wait_end(until_s, SystemClock()) for driver in drivers} == {
                driver.client.name: "" for driver in drivers
            }
            assert {"stormline", "httpx2"} <= {driver.client.name for driver in drivers}
            assert all(driver.end and driver.end["lag_max_ms"] >= driver.end["wait_max_ms"] for driver in drivers)
            return {driver.client.name: {line["id"]: line for line in driver.lines} for driver in drivers}

    return drive


def popen(words: Sequence[str], env: Mapping[str, str], more: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(words, env=env, **more)


def kinds(told: dict[str, Lines]) -> dict[str, dict[int, str]]:
    return {name: {id: line["kind"] for id, line in sorted(lines.items())} for name, lines in told.items()}


def mixed(id: int, size: int) -> bytes | None:
    """Answer right but for five requests: one wrong bit, a foreign page, an error, half a body, nothing."""
    body = workload.body(id, size)
    wrong: dict[int, bytes | None] = {
        4: whole("200 OK", bytes([body[0] ^ 1]) + body[1:]) if size else b"",
        5: whole("200 OK", b"<html>Welcome to our WiFi!</html>"),
        6: whole("503 Service Unavailable", b"busy"),
        7: whole("200 OK", body[:512], announced=size),
        8: None,
    }
    return wrong[id] if id in wrong else whole("200 OK", body)


def test_drivers_count_right_answers_and_name_failures(drive: Drive) -> None:
    told = drive(mixed)
    expected = {0: "", 1: "", 2: "", 3: "", 4: "body", 5: "body", 6: "status", 7: "timeout", 8: "timeout"}
    assert kinds(told) == dict.fromkeys(told, expected)
    assert all(line["ok"] == (line["kind"] == "") for lines in told.values() for line in lines.values())


def test_drivers_name_an_untrusted_server_tls(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = ensure_authority(tmp_path / "other", clock=SystemClock(), rng=SystemRng())
    told = drive(right, ca_file=other.certificate)
    assert kinds(told) == dict.fromkeys(told, dict.fromkeys(SIZES, "tls"))


def test_drivers_name_a_closed_port_connect(drive: Drive) -> None:
    told = drive(right, base_url="https://127.0.0.1:1")
    assert kinds(told) == dict.fromkeys(told, dict.fromkeys(SIZES, "connect"))


def test_driver_that_cannot_start_says_why(server: Server, tmp_path: Path) -> None:
    broken = clients.Client(name="nothing", about="a driver that is not there", packages=(), ours=True)
    with pytest.raises(PlatformError, match=r"nothing did not start: .*nothing\.py"), Driver(
        broken, SCHEDULE, base_url=server.base_url, ca_file=server.ca_file, folder=tmp_path, environ=os.environ,
        popen=popen,
    ) as driver:  # fmt: skip
        driver.wait_ready()


def test_driver_killed_in_a_run_says_so_and_keeps_what_it_told(server: Server, tmp_path: Path) -> None:
    server.answer = right
    with Driver(
        clients.get("httpx2"), [workload.Ask(0, 0.0, 10), workload.Ask(1, 60.0, 10)], base_url=server.base_url,
        ca_file=server.ca_file, folder=tmp_path, environ=os.environ,
        popen=popen,
    ) as driver:  # fmt: skip
        driver.wait_ready()
        driver.go()
        assert "did not end in time" in driver.wait_end(SystemClock().monotonic() + 2.0, SystemClock())
    assert [line["id"] for line in driver.lines] == [0]
