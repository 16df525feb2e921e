"""Finding out how long the network keeps a silent connection: several to one server, each silent for a different time.

They are opened side by side, asked once for `HEAD /` over HTTP/1.1, left in silence without the kernel's signs of life,
and asked once more. What that means is `policy.natlife`'s.
"""

import asyncio
import ssl
from collections.abc import Callable

from stormline.client.reaching import Origin
from stormline.client.surroundings import Around
from stormline.core import limits_diagnosis as limits
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.net.tls import start_tls
from stormline.net.webask import Asked
from stormline.policy import natlife
from stormline.policy.natlife import Fate, Tried
from stormline.telemetry.diagnosis import NatProgress

Told = Callable[[NatProgress], None]


class Measuring:
    """One measurement. Belongs to one event loop; its connections are its own.

    Args:
        origin: who is asked.
        address: where; it is known to answer.
        around: the client's own.
        limit_s: the longest silence.
        told: told how far it is, once a second and at each outcome; None: nobody wants to know.

    Attributes:
        tried: what is known so far, in the order in which it came.
    """

    def __init__(
        self, origin: Origin, address: Address, around: Around, *, limit_s: float, told: Told | None = None
    ) -> None:
        self._origin = origin
        self._address = address
        self._around = around
        self._limit_s = limit_s
        self._told = told
        self._time = asyncio.get_running_loop().time
        self._network = around.network.info.id
        self.tried: list[Tried] = []

    async def run(self) -> None:
        """Measure, for `limit_s` and some seconds at most; less where enough is known. Safe to cancel."""
        began = self._time()
        tasks = {asyncio.create_task(self._try(each), name="silent") for each in natlife.ladder_s(self._limit_s)}
        waiting = set(tasks)
        try:
            while waiting and not natlife.decided(self.tried):
                done, waiting = await asyncio.wait(
                    waiting, timeout=limits.DIAGNOSIS_NAT_TOLD_S, return_when=asyncio.FIRST_COMPLETED
                )
                self.tried += [each.result() for each in done]
                if self._told is not None:
                    found = natlife.judge(self.tried)
                    waited_s = self._time() - began
                    self._told(NatProgress(waited_s, self._limit_s, len(waiting), found.answered_s, found.lost_s))
        finally:
            for task in waiting:
                task.cancel()
            if waiting:
                await asyncio.wait(waiting)

    async def _try(self, silence_s: float) -> Tried:
        try:
            stream = await self._open()
        except (OSError, ValueError):
            return Tried(0.0, Fate.UNKNOWN)
        try:
            if await self._ask(stream) is not Fate.ANSWERED:
                return Tried(0.0, Fate.UNKNOWN)
            fate, silent_s = await self._wait(stream, silence_s)
            if fate is None:
                info = stream.tcp_info()
                if info is not None and info.ack_age_s is not None:
                    silent_s = min(silent_s, info.ack_age_s)  # the server's kernel may have asked for a sign of life
                fate = await self._ask(stream)
            if fate in (Fate.LOST, Fate.RESET) and not await self._stands():
                fate = Fate.UNKNOWN
            return Tried(round(silent_s, 3), fate)
        finally:
            stream.close()

    async def _open(self) -> Stream:
        async with asyncio.timeout(limits.DIAGNOSIS_TCP_S):
            raw: Stream = await self._around.open_tcp(self._address)
        try:
            raw.leave_quiet()
            if self._origin.scheme == "http":
                return raw
            async with asyncio.timeout(limits.DIAGNOSIS_TLS_S):
                stream = await start_tls(raw, self._around.h1_context(), self._origin.host)
            if stream.alpn == "h2":
                raise ValueError("it speaks HTTP/2 alone")
            return stream
        except BaseException:
            raw.close()
            raise

    async def _ask(self, stream: Stream) -> Fate:
        """Use a connection; say what comes of it."""
        asked = Asked(self._origin.field, method="HEAD", keep=True)
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_NAT_ANSWER_S):
                await asked.over(stream)
        except TimeoutError:
            return Fate.LOST
        except OSError as error:
            return _fate_of(error)
        return Fate.ANSWERED if asked.status else Fate.CLOSED

    async def _wait(self, stream: Stream, silence_s: float) -> tuple[Fate | None, float]:
        """Be silent; give what ended that, None where nothing did, and how long it was silent.

        The rest of the answer may still come; what comes later is unasked, and announces the end (RFC 9110 15.5.9).
        """
        asked_at = began = self._time()
        fate: Fate | None = None
        while fate is None and self._time() - began < silence_s:
            try:
                async with asyncio.timeout_at(began + silence_s):
                    data = await stream.receive()
            except TimeoutError:
                break
            except OSError as error:
                fate = _fate_of(error)
            else:
                if data and self._time() - asked_at < limits.DIAGNOSIS_NAT_REST_S:
                    began = self._time()
                else:
                    fate = Fate.CLOSED
        return fate, self._time() - began

    async def _stands(self) -> bool:
        """Say whether the network lives, and is the one it was: else a loss says nothing of silence."""
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_TCP_S):
                (await self._around.open_tcp(self._address)).close()
        except OSError:
            return False
        return self._around.network.info.id == self._network


def _fate_of(error: OSError) -> Fate:
    if isinstance(error, ssl.SSLEOFError):  # the end, without a word of TLS
        return Fate.CLOSED
    return Fate.RESET if isinstance(error, ConnectionResetError | BrokenPipeError) else Fate.UNKNOWN
