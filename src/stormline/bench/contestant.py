"""One client under measurement, in a process of its own: `python -P contestant.py CLIENT LOOP CA_FILE`.

Runs by itself in any environment that has the client's packages. It reads one order a line, `URL IN_FLIGHT REQUESTS`,
sends so many requests with so many in flight, and prints the CPU time of each (microseconds) and the memory that the
process then has resident (KiB). It ends with its standard input.
"""

import asyncio
import contextlib
import gc
import resource
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

Get = Callable[[str], Awaitable[tuple[int, bytes]]]
"""Sends a GET; gives status and body."""
EXPECTED: Final = (200, 27)
"""Status and size of the origin's answer."""
PAGE_KIB: Final = resource.getpagesize() // 1024


def _context(ca_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@contextlib.asynccontextmanager
async def _ours(ca_file: str) -> AsyncIterator[Get]:
    import httpx2

    import stormline

    async with httpx2.AsyncClient(transport=stormline.AsyncTransport(verify=_context(ca_file))) as client:
        yield _getter(client)


@contextlib.asynccontextmanager
async def _httpx2(ca_file: str) -> AsyncIterator[Get]:
    import httpx2

    async with httpx2.AsyncClient(verify=_context(ca_file), http2=True, trust_env=False) as client:
        yield _getter(client)


@contextlib.asynccontextmanager
async def _aiohttp(ca_file: str) -> AsyncIterator[Get]:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=_context(ca_file))) as client:

        async def get(url: str) -> tuple[int, bytes]:
            async with client.get(url) as response:
                return response.status, await response.read()

        yield get


def _getter(client: Any) -> Get:
    async def get(url: str) -> tuple[int, bytes]:
        response = await client.get(url)
        return response.status_code, response.content

    return get


@contextlib.contextmanager
def _ours_sync(ca_file: str) -> Iterator[Callable[[str], tuple[int, bytes]]]:
    import httpx2

    import stormline

    with httpx2.Client(transport=stormline.Transport(verify=_context(ca_file))) as client:

        def get(url: str) -> tuple[int, bytes]:
            response = client.get(url)
            return response.status_code, response.content

        yield get


CLIENTS: Final = {"ours": _ours, "httpx2": _httpx2, "aiohttp": _aiohttp}


def _check(answer: tuple[int, bytes]) -> None:
    if (answer[0], len(answer[1])) != EXPECTED:
        raise RuntimeError(f"the origin answered {answer[0]} with {len(answer[1])} bytes")


def _report(cpu_s: float, requests: int) -> None:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident_kib = int(file.read().split()[1]) * PAGE_KIB
    sys.stdout.write(f"{cpu_s / requests * 1e6} {resident_kib}\n")
    sys.stdout.flush()


def _orders(line: str) -> tuple[str, int, int]:
    url, in_flight, requests = line.split()
    return url, int(in_flight), int(requests) // int(in_flight)


async def _run(name: str, ca_file: str) -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as reader:
        async with CLIENTS[name](ca_file) as get:
            while line := await loop.run_in_executor(reader, sys.stdin.readline):
                url, in_flight, count = _orders(line)

                async def worker(url: str = url, count: int = count) -> None:
                    for _ in range(count):
                        _check(await get(url))

                gc.collect()
                began = time.process_time()
                await asyncio.gather(*(worker() for _ in range(in_flight)))
                _report(time.process_time() - began, in_flight * count)


def _run_sync(ca_file: str) -> None:
    with _ours_sync(ca_file) as get:
        while line := sys.stdin.readline():
            url, _, count = _orders(line)
            gc.collect()
            began = time.process_time()
            for _ in range(count):
                _check(get(url))
            _report(time.process_time() - began, count)


def main(name: str, loop: str, ca_file: str) -> None:
    """Measure one client until standard input ends."""
    if name == "ours-sync":
        _run_sync(ca_file)
    elif loop == "uvloop":
        import uvloop

        uvloop.run(_run(name, ca_file))
    else:
        asyncio.run(_run(name, ca_file))


if __name__ == "__main__":
    main(*sys.argv[1:])
