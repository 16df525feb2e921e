"""The APM's HTTP side when its store is full, failing or away: real HTTP in this process, rows to a gate of ours."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.apm.ingest import Ingest
from stormline.apm.rows import Row
from stormline.apm.service import ApmService
from stormline.apm.store import Store
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.values import Secret
from stormline.net.clock import SystemClock
from stormline.telemetry import report
from stormline.web.server import HttpServer
from stormline.wire import tokens

pytestmark = pytest.mark.loopback

KEY = Ed25519PrivateKey.generate()


@contextlib.asynccontextmanager
async def _serving(insert: Any, store_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    clock = SystemClock()
    store = Store(path=store_path)
    ingest = Ingest(insert, insert, clock)
    service = ApmService(
        store=store, ingest=ingest, token_keys={"k": KEY.public_key()}, admin_key=Secret("k" * 16), clock=clock
    )
    server = HttpServer(service.app, host="127.0.0.1", port=0, what="apm")
    await server.start()
    writer = asyncio.create_task(ingest.run())
    now = int(clock.wall())
    token = tokens.mint(tokens.DeviceToken(app="demo", device="d", iat=now, exp=now + 60), key=KEY, kid="k")
    headers = {"authorization": f"Bearer {token}", "content-type": report.MEDIA_TYPE}
    async with httpx2.AsyncClient(base_url=f"http://{server.address}", headers=headers, trust_env=False) as client:
        yield client
    ingest.close()
    await writer
    await server.stop()
    await store.close()


def _body(make_call: Callable[..., Any], calls: int) -> bytes:
    return report.encode(report.Report(calls=[make_call() for _ in range(calls)]))


async def test_report_to_a_full_queue_gets_503_with_retry_after(
    make_call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INGEST_ROWS_MAX", 10)
    begun, gate = asyncio.Event(), asyncio.Event()

    async def insert(rows: Sequence[Row]) -> None:
        begun.set()
        await gate.wait()

    async with _serving(insert, tmp_path) as client:
        first = asyncio.create_task(client.post("/v1/report", content=_body(make_call, 8)))
        await begun.wait()
        refused = await client.post("/v1/report", content=_body(make_call, 3))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        assert (await first).json() == {"stored": 8, "dropped": 0}
        assert (await client.post("/v1/report", content=_body(make_call, 3))).status_code == 200


async def test_report_bodies_beyond_the_memory_bound_get_503(
    make_call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def insert(rows: Sequence[Row]) -> None: ...

    async with _serving(insert, tmp_path) as client:
        monkeypatch.setattr(limits, "REPORT_BODIES_BYTES_MAX", 100)
        refused = await client.post("/v1/report", content=_body(make_call, 50))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        monkeypatch.undo()
        assert (await client.post("/v1/report", content=_body(make_call, 50))).status_code == 200


async def test_report_while_the_store_fails_gets_503_without_its_reason(make_call: Any, tmp_path: Path) -> None:
    async def insert(rows: Sequence[Row]) -> None:
        raise errors.StoreError("disk /secret/place is full")

    async with _serving(insert, tmp_path) as client:
        refused = await client.post("/v1/report", content=_body(make_call, 1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "internal")
        assert "retry-after" in refused.headers
        assert "secret" not in refused.text


async def test_body_that_stops_coming_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPORT_BODY_TIMEOUT_S", 0.05)

    async def insert(rows: Sequence[Row]) -> None: ...

    async with _serving(insert, tmp_path) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = f"POST /v1/report HTTP/1.1\r\nhost: x\r\nauthorization: {client.headers['authorization']}\r\n"
        head += f"content-type: {report.MEDIA_TYPE}\r\ncontent-length: 1000\r\n\r\nhalf"
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        await reader.read()  # and it closes
        writer.close()
        await writer.wait_closed()


async def test_health_of_an_unopenable_store_is_503(make_call: Any) -> None:
    async def insert(rows: Sequence[Row]) -> None: ...

    async with _serving(insert, Path("/proc/no/such/place")) as client:
        answer = await client.get("/healthz")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "internal")
