"""libcurl's multi interface by pycurl: HTTP/2 on one connection, no retry, no limits but the user's patience."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pycurl

HTTP2_STREAM = 92
"""CURLE_HTTP2_STREAM, which pycurl does not name."""
KINDS = {
    "timeout": (pycurl.E_OPERATION_TIMEDOUT,),
    "dns": (pycurl.E_COULDNT_RESOLVE_HOST,),
    "connect": (pycurl.E_COULDNT_CONNECT,),
    "tls": (pycurl.E_SSL_CONNECT_ERROR, pycurl.E_PEER_FAILED_VERIFICATION),
    "read": (pycurl.E_RECV_ERROR, pycurl.E_SEND_ERROR, pycurl.E_GOT_NOTHING, pycurl.E_PARTIAL_FILE, pycurl.E_HTTP2,
             HTTP2_STREAM, pycurl.E_BAD_CONTENT_ENCODING),
}  # fmt: skip


def kind(error: Exception) -> str:
    """Name libcurl's error."""
    code = error.args[0] if isinstance(error, pycurl.error) and error.args else None
    return next((kind for kind, codes in KINDS.items() if code in codes), "")


class Multi:
    """libcurl's transfers on an asyncio loop: sockets and the one timer are watched for it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[pycurl.Curl, asyncio.Future[None]] = {}

    async def perform(self, curl: pycurl.Curl) -> None:
        """Run one transfer to its end; cancelled, it is taken back."""
        done = self._waiting[curl] = self._loop.create_future()
        self._multi.add_handle(curl)
        try:
            await done
        finally:
            del self._waiting[curl]
            self._multi.remove_handle(curl)

    def close(self) -> None:
        """End all."""
        if self._timer is not None:
            self._timer.cancel()
        self._multi.close()

    def _watch(self, what: int, descriptor: int, _multi: object, _data: object) -> None:
        # libcurl gives a descriptor again as soon as it is closed: watch it anew at every word.
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        if what in (pycurl.POLL_IN, pycurl.POLL_INOUT):
            self._loop.add_reader(descriptor, self._act, descriptor, pycurl.CSELECT_IN)
        if what in (pycurl.POLL_OUT, pycurl.POLL_INOUT):
            self._loop.add_writer(descriptor, self._act, descriptor, pycurl.CSELECT_OUT)

    def _set_timer(self, timeout_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if timeout_ms >= 0:
            self._timer = self._loop.call_later(timeout_ms / 1000, self._act, pycurl.SOCKET_TIMEOUT, 0)

    def _act(self, descriptor: int, events: int) -> None:
        self._multi.socket_action(descriptor, events)
        more = 1
        while more:
            more, ended, failed = self._multi.info_read()
            for curl in ended:
                self._end(curl, None)
            for curl, code, message in failed:
                self._end(curl, pycurl.error(code, message))

    def _end(self, curl: pycurl.Curl, error: Exception | None) -> None:
        done = self._waiting.get(curl)
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


@contextlib.asynccontextmanager
async def client(config: dict[str, Any]) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, bytes]]]]:
    """Give a function that makes one request."""
    multi = Multi()

    async def get(url: str) -> tuple[int, bytes]:
        return await transfer(multi, url, config["ca_file"], {})

    try:
        yield get
    finally:
        multi.close()


async def transfer(multi: Multi, url: str, ca_file: str, options: dict[int, Any]) -> tuple[int, bytes]:
    """Make one request, with further options of libcurl."""
    chunks: list[bytes] = []
    curl = pycurl.Curl()
    try:
        curl.setopt(pycurl.URL, url)
        curl.setopt(pycurl.CAINFO, ca_file)
        curl.setopt(pycurl.NOSIGNAL, 1)
        curl.setopt(pycurl.ACCEPT_ENCODING, "")
        curl.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_2TLS)
        curl.setopt(pycurl.WRITEFUNCTION, chunks.append)
        for option, value in options.items():
            curl.setopt(option, value)
        await multi.perform(curl)
        return curl.getinfo(pycurl.RESPONSE_CODE), b"".join(chunks)
    finally:
        curl.close()
