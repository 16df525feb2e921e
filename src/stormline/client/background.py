"""One event loop in one background thread, behind every synchronous client of the process."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

from stormline.core import errors, limits

T = TypeVar("T")


class PulledBody:
    """A synchronous request body for the background loop; read in its owner's thread, as its objects may demand.

    The loop asks for a chunk, and the thread that waits for the answer (`Background.run`) fetches it. Asked while no
    thread waits, the chunk comes when the next one does.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self._iterator: Any = None
        self.wanted: queue.SimpleQueue[concurrent.futures.Future[bytes | None] | None] = queue.SimpleQueue()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Give the chunks, on the loop."""
        while True:
            asked: concurrent.futures.Future[bytes | None] = concurrent.futures.Future()
            self.wanted.put(asked)
            chunk = await asyncio.wrap_future(asked)
            if chunk is None:
                return
            yield chunk

    def serve(self, asked: concurrent.futures.Future[bytes | None]) -> None:
        """Fetch one chunk, in the owner's thread. What its source raises is raised on the loop, interrupts here too."""
        if not asked.set_running_or_notify_cancel():
            return
        try:
            if self._iterator is None:
                self._iterator = iter(self._chunks)
            asked.set_result(next(self._iterator, None))
        except Exception as error:
            asked.set_exception(error)
        except BaseException:
            asked.set_exception(errors.LocalProtocolError("the reading of the request's body was interrupted"))
            raise


class Background:
    """Starts its thread on first use. A child after `fork` starts a new one; the parent's is not touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inherited: list[object] = []

    def loop(self) -> asyncio.AbstractEventLoop:
        """Give the running loop, starting it where needed."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), daemon=True, name="stormline")
                self._thread.start()
            return self._loop

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=limits.CLOSE_FLUSH_S / 2))
        finally:
            loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], body: PulledBody | None = None) -> T:
        """Run a coroutine there and wait for it; an interrupt of the waiting thread cancels it.

        Args:
            coroutine: what to run.
            body: request body to be read in this thread meanwhile.

        Raises:
            LocalProtocolError: called from the background loop itself, which would wait for itself.
        """
        loop = self.loop()
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise errors.LocalProtocolError("a synchronous client cannot be used inside its own event loop")
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            if body is not None:
                future.add_done_callback(lambda _: body.wanted.put(None))
                while (asked := body.wanted.get()) is not None:
                    body.serve(asked)
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                self._settle(loop)
            raise

    def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let what was cancelled clean up, within a bound."""
        turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            turn.result(limits.CLOSE_FLUSH_S)

    def stop(self) -> None:
        """End the thread; the next use starts a new one."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(loop.stop)
            thread.join(limits.CLOSE_FLUSH_S)

    def forget(self) -> None:
        """Child after fork: the thread is not here, nor may its loop be used.

        The loop is kept, not closed: its poller is shared with the parent, and closing would take the parent's sockets
        out of it.
        """
        self._lock = threading.Lock()
        self._inherited.append(self._loop)
        self._loop = self._thread = None


BACKGROUND = Background()
atexit.register(BACKGROUND.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BACKGROUND.forget)
