"""One event loop in one background thread, behind every synchronous client of the process."""

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from stormline.core import errors, limits

T = TypeVar("T")


class Background:
    """Starts its thread on first use. A child after `fork` starts a new one; the parent's is not touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

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
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; an interrupt of the waiting thread cancels it.

        Raises:
            LocalProtocolError: called from the background loop itself, which would wait for itself.
        """
        loop = self.loop()
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise errors.LocalProtocolError("a synchronous client cannot be used inside its own event loop")
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=limits.CLOSE_FLUSH_S)
            raise

    def stop(self) -> None:
        """End the thread; the next use starts a new one."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(limits.CLOSE_FLUSH_S)

    def forget(self) -> None:
        """Child after fork: the thread is not here, nor may its loop be used."""
        self._lock = threading.Lock()
        self._loop = self._thread = None


BACKGROUND = Background()
atexit.register(BACKGROUND.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BACKGROUND.forget)
