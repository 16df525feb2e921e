"""Takes the record of every finished call, and diagnoses, and sends them to the APM, off the path of the calls.

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
from stormline.core import errors, limits, limits_diagnosis, limits_platform
from stormline.core.clock import Rng
from stormline.core.values import Address
from stormline.outbound.pool import HttpPool
from stormline.telemetry import report
from stormline.telemetry.diagnosis import Diagnosis
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
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._endpoint = endpoint
        self._token = token
        self._rng = rng
        self._client_name = client_name
        self._queue: deque[CallRecord] = deque()
        self._diagnoses: deque[Diagnosis] = deque(maxlen=limits_diagnosis.REPORT_DIAGNOSES_MAX)
        self._dropped = 0
        self._batch_max = report.BATCH_RECORDS_MAX
        self._retry_after_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def add(self, record: CallRecord) -> None:
        """Take a record; never blocks, never raises."""
        if self._closing.is_set():
            return
        if len(self._queue) >= limits.REPORT_QUEUE_RECORDS_MAX:
            self._queue.popleft()
            self._dropped += 1
        self._queue.append(record)
        if self._sender is None and (self._timer is None or len(self._queue) == report.BATCH_RECORDS_MAX):
            self._send_soon()

    def add_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Take a diagnosis: it goes with the next report, the oldest of too many goes nowhere. Never raises."""
        if self._closing.is_set():
            return
        self._diagnoses.append(diagnosis)
        if self._sender is None and self._timer is None:
            self._send_soon()

    def _send_soon(self) -> None:
        # A timer, not a task: a loop that ends before it fires has nothing to complain of.
        delay_s = limits.REPORT_INTERVAL_S if len(self._queue) < report.BATCH_RECORDS_MAX else 0.0
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._start)

    def _start(self) -> None:
        self._timer = None
        if self._sender is None:
            self._sender = self._loop.create_task(self._send_all(), name="stormline report")
            self._sender.add_done_callback(self._sent)

    def _sent(self, sender: asyncio.Task[None]) -> None:
        self._sender = None
        if not sender.cancelled() and (error := sender.exception()) is not None:
            _log.error("reporting failed", exc_info=error)

    async def _send_all(self) -> None:
        """Send until the queue is empty; what comes meanwhile is gathered for as long as one sending takes."""
        failures = 0
        while self._queue or self._diagnoses:
            if await self._send_one():
                failures = 0
                continue
            if self._closing.is_set():
                return
            pause = limits.REPORT_RETRY_S * min(10.0, 2.0**failures) * (0.5 + 0.5 * self._rng.random())
            failures += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause, self._retry_after_s)):
                    await self._closing.wait()

    async def _send_one(self) -> bool:
        """Send the oldest batch; True where it is off our hands (taken, refused for good, or nobody wants any)."""
        endpoint = self._endpoint()
        if endpoint is None:
            self._queue.clear()
            self._diagnoses.clear()
            return True
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._batch_max))]
        dropped, self._dropped = self._dropped, 0
        told = list(self._diagnoses)
        self._diagnoses.clear()
        body = report.encode(
            report.Report(platform=sys.platform, client=self._client_name, dropped=dropped, calls=batch, diagnoses=told)
        )
        try:
            answer = await self._post(endpoint, body)
        except (errors.TransportError, errors.DispatchError) as error:
            _log.info("a report was not delivered: %s", error)
            self._put_back(batch, dropped, told)
            return False
        except asyncio.CancelledError:
            self._put_back(batch, dropped, told)
            raise
        if answer.status < 400:
            self._batch_max = report.BATCH_RECORDS_MAX
            return True
        _log.info("the APM answered %d to a report of %d calls", answer.status, len(batch))
        if answer.status == 413 and len(batch) > 1:
            self._batch_max = len(batch) // 2
            self._put_back(batch, dropped, told)
            return True  # the next, smaller one goes at once
        if answer.status in (408, 429) or answer.status >= 500:
            self._retry_after_s = fetch.retry_after_s(answer.headers)
            self._put_back(batch, dropped, told)
            return False
        self._dropped += dropped + len(batch)
        return True

    async def _post(self, endpoint: Endpoint, body: bytes) -> fetch.Answer:
        token = await self._token()
        return await fetch.post(
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
            size_max=limits_platform.REPORT_ANSWER_BYTES_MAX,
        )

    def _put_back(self, batch: list[CallRecord], dropped: int, told: list[Diagnosis]) -> None:
        self._diagnoses.extendleft(reversed(told[: limits_diagnosis.REPORT_DIAGNOSES_MAX - len(self._diagnoses)]))
        room = limits.REPORT_QUEUE_RECORDS_MAX - len(self._queue)
        kept = batch[max(0, len(batch) - room) :] if room > 0 else []
        self._dropped += dropped + len(batch) - len(kept)
        self._queue.extendleft(reversed(kept))

    def abandon(self) -> None:
        """Stop without sending what is left; also where the event loop is closed."""
        self._closing.set()
        with contextlib.suppress(RuntimeError):  # a closed loop cannot cancel any more
            if self._timer is not None:
                self._timer.cancel()
            if self._sender is not None:
                self._sender.cancel()

    async def aclose(self) -> None:
        """Send what is queued, within `limits.REPORT_FLUSH_S`; drop the rest."""
        self._closing.set()
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.REPORT_FLUSH_S):
                if (sender := self._sender) is not None:
                    await asyncio.wait({sender})  # what is on its way is not sent a second time
                while (self._queue or self._diagnoses) and await self._send_one():
                    pass
        if (sender := self._sender) is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
