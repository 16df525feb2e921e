"""What goes into the network log, from calls and from the app's own log; `net.logfile` keeps it."""

import asyncio
import contextlib
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from stormline.client.masking import mask_text
from stormline.client.trace import CallTrace
from stormline.core import errors
from stormline.core import limits_netlog as limits
from stormline.core.clock import Clock
from stormline.net.logfile import LogStore, share, unshare
from stormline.telemetry import netlog
from stormline.telemetry.netlog import Failure, Finding, Line, Network, Summary
from stormline.telemetry.timeline import CallRecord

FOLDER: Final = "netlog"
"""Below a client's store, where the config names no folder of its own."""
CLIENT_NAME: Final = f"stormline/{metadata.version('stormline')}"
_SUMMARY_MS: Final = limits.NETLOG_SUMMARY_S * 1000
_tracebacks: Final = logging.Formatter()


def public_key(text: str | None) -> bytes | None:
    """Read `Config.network_log_key`; None for none.

    Raises:
        ConfigError: it is no key.
    """
    if text is None:
        return None
    from stormline.wire import jws  # only who seals pays for cryptography

    try:
        return netlog.check_public(jws.b64url_decode(text))
    except (errors.StormlineError, ValueError) as error:
        raise errors.ConfigError(f"network_log_key: {error}") from None


def open_store(folder: Path, *, bytes_max: int = limits.NETLOG_BYTES, key: str | None = None) -> LogStore:
    """Give the store of a folder, one for all of this process who name it with the same key; see `close_store`.

    Raises:
        ConfigError: the key or the size cannot be used.
    """
    if not limits.NETLOG_BYTES_MIN <= bytes_max <= limits.NETLOG_BYTES_MAX:
        raise errors.ConfigError(
            f"network_log_bytes={bytes_max!r}: expected {limits.NETLOG_BYTES_MIN} to {limits.NETLOG_BYTES_MAX}"
        )
    public = public_key(key)
    return share(
        folder,
        public=public,
        make=lambda: LogStore(folder, bytes_max=bytes_max, public=public, client=CLIENT_NAME),
    )


def close_store(store: LogStore, timeout_s: float = limits.NETLOG_CLOSE_S) -> None:
    """Give a store back; the last to do so has what is left written, and waits for so long at most."""
    if unshare(store):
        store.close(timeout_s)


class NetworkLog:
    """Writes one client's calls: those that fail in full, those that succeed as counts.

    Args:
        store: where to; given back by `close`.
        network: gives what is known of the network; asked on the loop only.
        clock: the wall clock's time.
    """

    def __init__(self, store: LogStore, network: Callable[[], Network], clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.store = store
        self._network = network
        self._clock = clock
        self._lock = threading.Lock()
        self._last: deque[bytes] = deque()
        self._last_bytes = 0
        self._lost = 0
        self._over = False
        self._tally = Summary(at_ms=0, since_ms=self._now_ms())
        store.start()

    def _now_ms(self) -> int:
        return int(self._clock.wall() * 1000)

    def finished(self, trace: CallTrace, record: CallRecord) -> None:
        """Take a finished call; any thread, never raises."""
        if record.ok:
            with self._lock:
                tally = self._tally
                tally.calls += 1
                tally.total_ms += record.total_ms
                tally.bytes_up += record.bytes_up
                tally.bytes_down += record.bytes_down
                if record.total_ms > tally.slowest_ms:
                    tally.slowest_ms = record.total_ms
                if record.started_at_ms - tally.since_ms < _SUMMARY_MS:
                    return
            self._summarise()
        elif threading.get_ident() == self._thread:
            self._failed(trace, record)
        else:  # a synchronous client's own thread; what is known of the network belongs to the loop
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._failed, trace, record)

    def _failed(self, trace: CallTrace, record: CallRecord) -> None:
        if self._tally.calls:
            self._summarise()
        failure = Failure(
            at_ms=record.started_at_ms + round(record.total_ms),
            call=record,
            story=trace.timeline.story,
            causes=trace.causes,
            network=self._network(),
        )
        try:
            data = netlog.encode(masked(failure))
        except UnicodeEncodeError:  # a path that is no text
            self.store.lost += 1
            return
        self._keep(data)

    def record_diagnosis(self, found: bytes | msgspec.Struct, *, call_id: str = "") -> None:
        """Keep what a diagnosis found.

        Args:
            found: a struct, or its bytes in MessagePack; without secrets.
            call_id: of the call that it was made for.
        """
        content = found if isinstance(found, bytes) else msgspec.msgpack.encode(found)
        self._keep(netlog.encode(Finding(at_ms=self._now_ms(), call_id=call_id, content=content)))

    def _keep(self, record: bytes) -> None:
        self.store.write(record)
        if len(record) <= limits.NETLOG_RECORD_BYTES_MAX:
            with self._lock:
                self._last.append(record)
                self._last_bytes += len(record)
                while self._last_bytes > limits.NETLOG_LAST_BYTES:
                    self._last_bytes -= len(self._last.popleft())

    def last(self) -> list[bytes]:
        """Give the last failures and findings of this process, encoded, the newest at the end."""
        with self._lock:
            return list(self._last)

    def _summarise(self) -> None:
        now_ms = self._now_ms()
        with self._lock:
            tally, self._tally = self._tally, Summary(at_ms=0, since_ms=now_ms)
            lost = self.store.lost
            tally.lost, self._lost = lost - self._lost, lost
        tally.at_ms = now_ms
        if tally.calls or tally.lost:
            self.store.write(netlog.encode(tally))

    def _end(self) -> bool:
        over, self._over = self._over, True
        if not over:
            self._summarise()
        return not over

    def abandon(self) -> None:
        """Give the store back without waiting; what is left is written behind."""
        if self._end():
            close_store(self.store, 0.0)

    async def aclose(self, aside: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """Give the store back, and wait for what is left at most `limits_netlog.NETLOG_CLOSE_S`."""
        if self._end():
            await aside(lambda: close_store(self.store))


def masked(failure: Failure) -> Failure:
    """Give a failure without what looks like a credential, and within its bounds."""
    story = failure.story
    cut = limits.NETLOG_STORY_CHARS_MAX
    parts = [failure.call.path, *(line[:cut] for _, line in story), *(each[:cut] for each in failure.causes)]
    path, *lines = mask_text("\n".join(" ".join(part.split("\n")) for part in parts)).split("\n")
    return Failure(
        at_ms=failure.at_ms,
        call=failure.call if path == failure.call.path else msgspec.structs.replace(failure.call, path=path),
        story=[(round(at * 1000, 1), line) for (at, _), line in zip(story, lines, strict=False)],
        causes=lines[len(story) :],
        network=failure.network,
    )


class NetworkLogHandler(logging.Handler):
    """Keeps an app's own log in the network log's files: crash-safe, compressed, bounded, masked.

        logging.getLogger().addHandler(stormline.NetworkLogHandler("app/state/netlog", level=logging.INFO))

    Given the folder of a client (`netlog` below `Config.store`, or `Config.network_log_dir`), the app's lines stand
    between its calls. `emit` never raises, never waits for the disk, and formats nothing that is below the level or
    that cannot be kept. Any thread may log, and a child after `fork` writes files of its own. Without a formatter the
    message and the traceback are kept apart; with one, what it makes is one text. What looks like a credential is
    masked, and what is longer than `limits_netlog.NETLOG_TEXT_CHARS_MAX` is cut.

    Args:
        folder: made where it is not there.
        level: as of any handler.
        bytes_max: of all files of the folder.
        key: public key (base64url) that they are sealed to; see `stormline netlog key`. The same as the client's.

    Raises:
        ConfigError: the key or the size cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        level: int | str = logging.NOTSET,
        bytes_max: int = limits.NETLOG_BYTES,
        key: str | None = None,
    ) -> None:
        super().__init__(level)
        self.store: LogStore | None = open_store(Path(folder), bytes_max=bytes_max, key=key)
        self._end = weakref.finalize(self, close_store, self.store, 0.0)
        self._end.atexit = False  # logging closes its handlers itself

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line; see `logging.Handler.emit`."""
        store = self.store
        if store is None or store.problem:
            return
        try:
            store.write(netlog.encode(self._line(record)))
        except Exception:
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> Line:
        trace = ""
        if self.formatter is not None:
            text = self.formatter.format(record)
        else:
            text = record.getMessage()
            if record.exc_info and not record.exc_text:
                record.exc_text = _tracebacks.formatException(record.exc_info)
            trace = "\n".join(filter(None, (record.exc_text, record.stack_info)))
        return Line(
            at_ms=int(record.created * 1000),
            level=record.levelno or 0,  # a record that was made by hand may lack all three
            name=record.levelname or "",
            logger=record.name or "",
            text=_safe(text),
            trace=_safe(trace),
        )

    def flush(self) -> None:
        """Have what was logged compressed and on disk; waits for that at most `limits_netlog.NETLOG_CLOSE_S`."""
        if self.store is not None and not sys.is_finalizing():
            self.store.flush()

    def close(self) -> None:
        """Write what is left, and end."""
        store, self.store = self.store, None
        if store is not None and self._end.detach() is not None:
            close_store(store)
        super().close()


def _safe(text: str) -> str:
    if not text:
        return ""
    return mask_text(text[: limits.NETLOG_TEXT_CHARS_MAX]).encode("utf-8", "replace").decode()


def snapshot(of: "weakref.ref[Any]") -> Network:
    """Give what a client knows of its network; nothing where the client is gone."""
    client = of()
    if client is None:
        return Network()
    status, quality = client.network.status, client.quality
    info, verdict = status.info, status.verdict
    return Network(
        kind=info.kind,
        id=info.id,
        interface=info.interface,
        metered=info.metered,
        routed=info.routed,
        signal_dbm=info.signal_dbm,
        vpn=info.vpn,
        condition=str(verdict.condition),
        confidence=str(verdict.confidence),
        why=verdict.why,
        level=str(quality.level),
        evidence=quality.evidence,
    )
