"""One call of ours to a device, from its CALL to the end of its answer."""

import asyncio

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.wire import events as e
from stormline.wire.connection import Connection


class Asked:
    """Gathers the answer; `answer` is its body, or a CallError."""

    __slots__ = ("_body", "answer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._body = bytearray()
        self.answer: asyncio.Future[bytes] = loop.create_future()

    def take(self, event: e.ReplyReceived | e.DataReceived | e.CallFailed, connection: Connection) -> None:
        """Take what the machine tells of the call."""
        if self.answer.done():
            return
        if isinstance(event, e.CallFailed):
            self.fail(event.code, event.reason, maybe_delivered=event.maybe_delivered)
            return
        self._body += event.body
        if len(self._body) > limits.CALL_BODY_BYTES_MAX:
            self.fail(Code.CALL_TOO_LARGE, "the device's answer is too large", maybe_delivered=True)
            return
        connection.consume(event.call_id, len(event.body))
        ended = not event.more if isinstance(event, e.ReplyReceived) else event.end
        if ended:
            self.answer.set_result(bytes(self._body))

    def fail(self, code: int, reason: str, *, maybe_delivered: bool) -> None:
        """End it without an answer."""
        if not self.answer.done():
            self.answer.set_exception(CallError(code, reason, maybe_delivered=maybe_delivered))
