"""The protocol `auction`: a device sends bids as whole numbers, and everybody hears the highest one and whose it is."""

import asyncio
import contextlib

from stormline.appgw.protocols import Limits, Stream
from stormline.core.codes import Code
from stormline.core.errors import CallError


class Auction:
    """One auction, for as long as the gateway runs; its best bid is known to the devices of this gateway alone."""

    name = "auction"
    limits = Limits(message_bytes=64, messages_per_s=5, burst=10)

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._best = "0 nobody"
        self._telling: set[asyncio.Task[None]] = set()

    async def opened(self, stream: Stream) -> None:
        """Let in who is logged in, and say the best bid."""
        if not stream.identity.user:
            raise CallError(Code.CALL_REFUSED, "log in to bid")
        self._streams.add(stream)
        await stream.send(self._best.encode())

    async def message(self, stream: Stream, message: bytes) -> None:
        """Take a bid; 0 is a good-bye."""
        bid = int(message)  # what is no number ends this stream alone
        if bid == 0:
            stream.close()
        elif bid > int(self._best.split()[0]):
            self._best = f"{bid} {stream.identity.user}"
            for each in self._streams:  # in tasks of their own: a slow device holds nobody back but itself
                task = asyncio.create_task(self._tell(each, self._best))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    async def closed(self, stream: Stream) -> None:
        """Forget who has left."""
        self._streams.discard(stream)

    async def _tell(self, stream: Stream, text: str) -> None:
        with contextlib.suppress(CallError):  # it has left meanwhile
            await stream.send(text.encode())
