"""Every driver against a real server: right answers count, wrong ones do not, and failures have their names."""

import asyncio
import os
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stormline.assembly.authority import ensure_authority
from stormline.core.errors import ConfigError
from stormline.lab import clients, workload
from stormline.lab.driving import Driver
from stormline.net.clock import SystemClock, SystemRng

pytestmark = pytest.mark.loopback

SCHEDULE = [workload.Ask(number, 0.01 * number, size) for number, size in enumerate((1024, 30720, 131072, 0, 1024))]
PATIENCE_S = 6.0
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


Drive = Callable[..., tuple[dict[int, Mapping[str, Any]], Driver]]


@pytest.fixture(name="drive", params=sorted(clients.CLIENTS))
def _drive(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Drive:
    client = clients.get(request.param)
    try:
        clients.python_for(client, os.environ)
    except ConfigError as error:
        pytest.skip(str(error))

    def drive(
        answer: Answer, *, patience_s: float = PATIENCE_S, **options: Any
    ) -> tuple[dict[int, Mapping[str, Any]], Driver]:
        server.answer = answer
        with Driver(
            client,
            SCHEDULE,
            folder=tmp_path,
            environ=os.environ,
            popen=lambda words, env, more: subprocess.Popen(words, env=env, **more),
            patience_s=patience_s,
            **{"base_url": server.base_url, "ca_file": server.ca_file, **options},
        ) as driver:
            driver.wait_ready()
            driver.go()
            problem = driver.wait_end(SystemClock().monotonic() + patience_s + 15, SystemClock())
        assert problem == ""
        return {line["id"]: line for line in driver.lines}, driver

    return drive


def test_driver_right_answers_count_as_success(drive: Drive) -> None:
    lines, driver = drive(right)
    assert {id: (line["ok"], line["kind"]) for id, line in lines.items()} == {ask.id: (True, "") for ask in SCHEDULE}
    assert driver.end is not None
    assert driver.end["lag_max_ms"] >= driver.end["lag_p99_ms"] >= 0


def test_driver_corrupt_or_foreign_body_is_no_success(drive: Drive) -> None:
    def wrong(id: int, size: int) -> bytes:
        body = workload.body(id, size)
        return whole("200 OK", body if id == 0 else bytes(size) if id == 1 else b"<html>Welcome!</html>")

    lines, _ = drive(wrong)
    assert {id: line["kind"] for id, line in lines.items()} == {0: "", 1: "body", 2: "body", 3: "body", 4: "body"}


def test_driver_server_errors_have_the_kind_status(drive: Drive) -> None:
    lines, _ = drive(lambda id, size: whole("503 Service Unavailable", b"busy"))
    assert {line["kind"] for line in lines.values()} == {"status"}


def test_driver_body_that_ends_early_is_no_success(drive: Drive) -> None:
    seen: list[int] = []

    def short(id: int, size: int) -> bytes | None:
        seen.append(id)
        return whole("200 OK", b"x", announced=2) if id == 0 else right(id, size)

    lines, _ = drive(short, patience_s=2.0)
    assert not lines[0]["ok"]
    assert lines[0]["kind"] in ("timeout", "read", "body")


def test_driver_mute_server_ends_with_the_users_patience(drive: Drive) -> None:
    lines, _ = drive(lambda id, size: None, patience_s=1.0)
    assert {line["kind"] for line in lines.values()} == {"timeout"}
    assert len(lines) == len(SCHEDULE)


def test_driver_untrusted_server_has_the_kind_tls(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = ensure_authority(tmp_path / "other", clock=SystemClock(), rng=SystemRng())
    lines, _ = drive(right, ca_file=other.certificate)
    assert {line["kind"] for line in lines.values()} == {"tls"}


def test_driver_closed_port_has_the_kind_connect(drive: Drive, server: Server) -> None:
    lines, _ = drive(right, base_url="https://127.0.0.1:1", patience_s=3.0)
    assert {line["kind"] for line in lines.values()} == {"connect"}
