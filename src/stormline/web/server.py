"""HTTP for the server roles: an ASGI application under uvicorn inside the role's own event loop.

We bind the socket ourselves: a busy port is one clear error before anything starts, and port 0 gives a free one.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import uvicorn
from uvicorn._types import ASGIApplication

from stormline.core import errors, limits
from stormline.core.values import Address


class TlsFiles(NamedTuple):
    """Certificate chain and private key, PEM."""

    certificate: Path
    key: Path


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the role; uvicorn would take SIGINT and SIGTERM for itself."""
        yield


def bind(host: str, port: int, what: str) -> socket.socket:
    """Bind a listening TCP socket.

    Raises:
        PlatformError: the address is taken or not ours; the message names `what` and the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise errors.PlatformError(f"{what}: cannot listen on {Address(host, port)}: {reason}") from error
    return sock


class HttpServer:
    """One ASGI application on one address.

    Use as `await server.start()` ... `await server.stop()`; both may be called once.
    """

    def __init__(self, app: ASGIApplication, *, host: str, port: int, what: str, tls: TlsFiles | None = None) -> None:
        self._what = what
        self._socket = bind(host, port, what)
        name = self._socket.getsockname()
        self.address = Address(name[0], name[1])
        """Where it listens; the port is the real one also where 0 was asked for."""
        config = uvicorn.Config(
            app,
            ssl_certfile=str(tls.certificate) if tls else None,
            ssl_keyfile=str(tls.key) if tls else None,
            http="httptools",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            timeout_keep_alive=int(limits.HTTP_KEEP_ALIVE_S),
            timeout_graceful_shutdown=int(limits.HTTP_DRAIN_S),
            limit_concurrency=limits.HTTP_CONNECTIONS_MAX,
        )
        config.load()
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve.

        Raises:
            PlatformError: it stopped before it had started (a bad certificate, say).
        """
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name=f"http {self._what}")
        while not self._server.started:
            if self._task.done():
                error = self._task.exception()
                raise errors.PlatformError(f"{self._what}: HTTP server did not start: {error}") from error
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop accepting, let requests in flight end for at most `limits.HTTP_DRAIN_S`, close."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
