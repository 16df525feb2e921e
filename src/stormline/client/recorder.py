"""Takes the record of every finished call and sends it to the APM, off the path of the calls.

Reports make no records of their own, are bounded in number and time, back off while the APM is away, and are dropped,
counted, rather than let to grow.
"""

import asyncio
import contextlib
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable

from stormline.client import fetch
from stormline.core import errors, limits
from stormline.core.clock import Rng
from stormline.core.values import Address
from stormline.outbound.pool import HttpPool
from stormline.telemetry import report
from stormline.telemetry.timeline import CallRecord
from stormline.wire.plan import Endpoint

_log = logging.getLogger("stormline.client")


class Recorder:
    """Queue and sender of call records.

    Args:
        pool: connections to the APM.
        endpoint: gives where to report now, None for nowhere.
        token: gives the device token the report is sent with.
        rng: jitter of the back-off.
        client_name: name and version of this library.
    """

    def __init__(
        self,
        pool: HttpPool,
        endpoint: Callable[[], Endpoint | None],
        token: Callable[[], Awaitable[str]],
        rng: Rng,
        client_name: str,
    ) -> None:
        self._pool = pool
        self._endpoint = endpoint
        self._token = token
        self._rng = rng
        self._client_name = client_name
        self._queue: deque[CallRecord] = deque()
        self._dropped = 0
        self._refused = 0
        self._sender: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def add(self, record: CallRecord) -> None:
        """Take a record; never blocks, never raises."""
        if len(self._queue) >= limits.REPORT_QUEUE_RECORDS_MAX:
            self._queue.popleft()
            self._dropped += 1
        self._queue.append(record)
        if len(self._queue) >= report.BATCH_RECORDS_MAX:
            self._hurry.set()
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all(), name="stormline report")

    async def _send_all(self) -> None:
        failures = 0
        while self._queue:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.REPORT_INTERVAL_S):
                    await self._hurry.wait()
            self._hurry.clear()
            if await self._send_one():
                failures = 0
                continue
            pause = limits.REPORT_RETRY_S * min(10.0, 2.0**failures) * (0.5 + 0.5 * self._rng.random())
            failures += 1
            await asyncio.sleep(pause)

    async def _send_one(self) -> bool:
        """Send the oldest batch; True where it is off our hands (taken, or refused for good)."""
        endpoint = self._endpoint()
        if endpoint is None:
            self._queue.clear()
            return True
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), report.BATCH_RECORDS_MAX))]
        dropped, self._dropped = self._dropped, 0
        body = report.encode(
            report.Report(platform=sys.platform, client=self._client_name, dropped=dropped, calls=batch)
        )
        try:
            token = await self._token()
            answer = await fetch.post(
                self._pool,
                address=Address(endpoint.host, endpoint.port),
                server_name=endpoint.server_name,
                path="/v1/report",
                headers=(
                    (b"content-type", report.MEDIA_TYPE.encode("ascii")),
                    (b"authorization", b"Bearer " + token.encode("ascii", "replace")),
                ),
                body=body,
                timeout_s=limits.REPORT_TIMEOUT_S,
                size_max=limits.REPORT_ANSWER_BYTES_MAX,
            )
            retry = answer.status in (408, 429) or answer.status >= 500
            if answer.status >= 400:
                _log.info("the APM answered %d to a report", answer.status)
                self._refused += 0 if retry else len(batch)
        except (errors.TransportError, errors.DispatchError) as error:
            _log.info("a report was not delivered: %s", error)
            retry = True
        except asyncio.CancelledError:
            self._put_back(batch, dropped)
            raise
        if retry:
            self._put_back(batch, dropped)
        return not retry

    def _put_back(self, batch: list[CallRecord], dropped: int) -> None:
        room = limits.REPORT_QUEUE_RECORDS_MAX - len(self._queue)
        kept = batch[max(0, len(batch) - room) :] if room > 0 else []
        self._dropped += dropped + len(batch) - len(kept)
        self._queue.extendleft(reversed(kept))

    async def aclose(self) -> None:
        """Send what is queued, within `limits.REPORT_FLUSH_S`; drop the rest."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.REPORT_FLUSH_S):
                while self._queue and await self._send_one():
                    pass
