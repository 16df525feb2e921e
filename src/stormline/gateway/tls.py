"""The gateway's TLS: version 1.3 only (RFC 8446), certificates that are read anew while it runs."""

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path

from stormline.core import errors, limits_carriers
from stormline.gateway.tickets import TicketKeys
from stormline.web.server import TlsFiles
from stormline.wire import messages, websocket

_log = logging.getLogger("stormline.gateway")


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Make a server's context: ALPN `sl/1` or `http/1.1` (RFC 7301), no early data.

    Raises:
        PlatformError: certificate or key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([messages.ALPN, websocket.ALPN])
    try:
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        raise errors.PlatformError(f"gateway: cannot use {files.certificate} with {files.key}: {error}") from error
    return context


class LiveTls:
    """The contexts for new connections, made anew when the certificate's files or the ticket keys change.

    Files that cannot be used leave the old certificate in use, with one line in the log for each change.

    Args:
        files: certificate and key.
        tickets: the keys of tickets.

    Raises:
        PlatformError: certificate or key cannot be used.
    """

    def __init__(self, files: TlsFiles, tickets: TicketKeys) -> None:
        self._files = files
        self._tickets = tickets
        self._seen = self._look()
        self._wake = asyncio.Event()
        self._contexts = self._make()
        tickets.changed = self.reload

    def context(self, hello: bytes) -> ssl.SSLContext:
        """Give the context for a connection that comes now; those that stand keep theirs.

        Args:
            hello: what has come of the ClientHello. A ticket in it names its key in clear, with 16 random bytes.
        """
        contexts = self._contexts
        for name in contexts:
            if name in hello:
                return contexts[name]
        return contexts.get(self._tickets.maker().name) or next(iter(contexts.values()))

    def reload(self) -> None:
        """Make the contexts anew at once."""
        self._wake.set()

    async def run(self) -> None:
        """Follow the files and keys until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits_carriers.CERTIFICATE_LOOK_S):
                    await self._wake.wait()
            asked = self._wake.is_set()
            self._wake.clear()
            seen = self._look()
            if not asked and seen == self._seen:
                continue
            self._seen = seen
            try:
                self._contexts = self._make()
            except errors.PlatformError as error:
                _log.error("%s; the certificate read before stays in use", error)
            else:
                _log.info("gateway: %s is read anew", self._files.certificate)

    def _make(self) -> dict[bytes, ssl.SSLContext]:
        contexts = {}
        for key in self._tickets.keys:
            contexts[key.name] = tls_context(self._files)
            self._tickets.install(contexts[key.name], key)
        return contexts

    def _look(self) -> tuple[object, ...]:
        """Give what changes with the files: also where a new one was put in the place of the old."""
        return tuple(map(_mark, (self._files.certificate, self._files.key)))


def _mark(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
