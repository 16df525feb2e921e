"""The analytics store: ClickHouse SQL, embedded (chDB, in this process) or on a server; the same statements on both.

All work runs on the store's own threads, one for writing and a few for reading, each with a client handle of its own
(a handle must not be used by two threads at once). The event loop only awaits.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import clickhouse_connect
import pyarrow as pa
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError

from stormline.apm import schema
from stormline.apm.rows import Row
from stormline.core import errors, limits, limits_platform
from stormline.core.values import Secret

log = logging.getLogger("stormline.apm")

Answer = list[dict[str, Any]]
"""Rows of an answer, each by column name."""
_T = TypeVar("_T")

_READ_SETTINGS = {
    "max_execution_time": limits_platform.STORE_QUERY_S,
    "max_memory_usage": limits_platform.STORE_QUERY_BYTES_MAX,
}


class Store:
    """One open store. Use as `await store.open()` ... `await store.close()`.

    Cancelling a call gives up its answer, not its work: an insert that has begun is finished.

    Args:
        path: folder of the embedded store; None with a `url`.
        url: DSN of a ClickHouse server; None with a `path`.
    """

    def __init__(self, *, path: Path | None = None, url: Secret | None = None) -> None:
        self._connect: Callable[[dict[str, Any]], Client]
        if path is not None and url is None:
            self._connect = partial(_connect_embedded, path)
        elif url is not None and path is None:
            self._connect = partial(_connect_server, url)
        else:
            raise errors.ConfigError("apm store: give either a folder (store_path) or a server (store_url)")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="apm-write")
        self._readers = ThreadPoolExecutor(limits_platform.STORE_READERS, thread_name_prefix="apm-read")
        self._local = threading.local()
        self._clients: list[Client] = []
        self._reads = 0

    async def open(self) -> None:
        """Open the store and bring its tables to the newest form.

        Raises:
            StoreError: it cannot be opened (held by another process, unreachable), or a newer version wrote it.
        """
        await self._run(self._writer, _migrate)
        # The first Arrow table of a process costs a second of imports; take it here, not in the first report.
        await self._run(self._writer, lambda client: _table([]))

    async def insert(self, rows: Sequence[Row]) -> None:
        """Store calls. When this returns they survive a crash of the process and of the machine, and are visible.

        Raises:
            StoreError: none of them is known to be stored.
        """
        await self._run(self._writer, lambda client: client.insert_arrow("calls", _table(rows)))

    async def insert_diagnoses(self, rows: Sequence[Row]) -> None:
        """Store diagnoses, as `insert` does calls.

        Raises:
            StoreError: none of them is known to be stored.
        """
        await self.insert_table("diagnoses", _table(rows, schema.DIAGNOSIS_ARROW))

    async def insert_table(self, name: str, table: pa.Table) -> None:
        """Store the rows of one table; as `insert`.

        Raises:
            StoreError: none of them is known to be stored.
        """
        await self._run(self._writer, lambda client: client.insert_arrow(name, table))

    async def query(self, sql: str, parameters: Mapping[str, Any]) -> Answer:
        """Ask one question; values go in by `{name:Type}`, never into the text.

        Raises:
            StoreBusy: `limits_platform.STORE_READS_MAX` questions are running or waiting.
            StoreError: it failed, or needed more than `limits_platform.STORE_QUERY_S` or `STORE_QUERY_BYTES_MAX`.
        """
        if self._reads >= limits_platform.STORE_READS_MAX:
            raise errors.StoreBusy("too many questions to the store at once", retry_after_s=1.0)
        self._reads += 1
        try:
            return await self._run(self._readers, lambda client: _ask(client, sql, parameters))
        finally:
            self._reads -= 1

    async def close(self) -> None:
        """End the threads and close the handles; a question still running is left to the end of the process."""
        self._writer.shutdown(wait=False, cancel_futures=False)
        self._readers.shutdown(wait=False, cancel_futures=True)
        try:
            async with asyncio.timeout(limits_platform.STORE_CLOSE_S):
                await asyncio.to_thread(self._close_when_idle)
        except TimeoutError:
            log.warning("store: closed with a question still running")

    def _close_when_idle(self) -> None:
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        for client in self._clients:
            with contextlib.suppress(ClickHouseError, OSError):
                client.close()
        self._clients.clear()

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[Client], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, self._with_client, pool, work)
        except (ClickHouseError, OSError, pa.ArrowException) as error:
            raise errors.StoreError(f"store: {_reason(error)}") from error

    def _with_client(self, pool: ThreadPoolExecutor, work: Callable[[Client], _T]) -> _T:
        client: Client | None = getattr(self._local, "client", None)
        if client is None:
            client = self._connect(dict(_READ_SETTINGS) if pool is self._readers else {})
            self._local.client = client
            self._clients.append(client)
        return work(client)


def _connect_embedded(path: Path, settings: dict[str, Any]) -> Client:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        return clickhouse_connect.get_client(interface="chdb", path=str(path), settings=settings)
    except ClickHouseError as error:
        raise errors.StoreError(
            f"store: cannot open {path}; is another process using it? ({_reason(error)})"
        ) from error


def _connect_server(url: Secret, settings: dict[str, Any]) -> Client:
    # A session would tie a handle's statements together on the server; ours are independent.
    return clickhouse_connect.get_client(dsn=url.reveal(), settings=settings, autogenerate_session_id=False)


def _reason(error: Exception) -> str:
    """The first line of an error, without a password the driver may have quoted from the URL."""
    text = str(error).strip().partition("\n")[0]
    return text[: limits.REASON_CHARS_MAX] if "://" not in text else type(error).__name__


def _ask(client: Client, sql: str, parameters: Mapping[str, Any]) -> Answer:
    return list(client.query(sql, parameters=dict(parameters)).named_results())


def _table(rows: Sequence[Row], arrow: pa.Schema = schema.ARROW) -> pa.Table:
    return pa.Table.from_arrays([pa.array([row[each.name] for row in rows], each.type) for each in arrow], schema=arrow)


def _migrate(client: Client) -> None:
    client.command(schema.CREATE_VERSIONS)
    version = int(client.query(schema.READ_VERSION).result_rows[0][0])
    newest = len(schema.MIGRATIONS)
    if version > newest:
        raise errors.StoreError(f"store: a newer stormline wrote it (schema {version}, this one knows {newest})")
    for step, statements in enumerate(schema.MIGRATIONS[version:], start=version + 1):
        for statement in statements:
            client.command(statement)
        client.command(schema.RECORD_VERSION, parameters={"version": step})
        log.info("store: schema %d", step)
