"""One question in HTTP/1.1 over a stream of one's own, told as it goes: for probes, which want to know where it ends.

Nothing of the answer is decoded, and no more is read than is asked for.
"""

import asyncio
import re
from typing import Final

from stormline.core import limits_diagnosis as limits
from stormline.net.stream import Stream

_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_HEAD_BYTES_MAX: Final = 32 * 1024


class Asked:
    """One question and what came of it, as far as it has come.

    Args:
        host: the value of `Host`.
        target: path and query.
        method: GET or HEAD.
        keep: leave the connection open for another question.

    Attributes:
        status: of the answer, 0 before it came.
        first_byte_s: from the question's last byte to the answer's first; None before.
        head: what came of the head.
        body: what came of the body, `limits_diagnosis.DIAGNOSIS_BODY_BYTES_MAX` at most.
        whole: all that was to come has, or as much as was to be read.
    """

    def __init__(self, host: str, target: str = "/", method: str = "GET", *, keep: bool = False) -> None:
        self._text = (
            f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: stormline-diagnose\r\nAccept: */*\r\n"
            f"Cache-Control: no-cache\r\nConnection: {'keep-alive' if keep else 'close'}\r\n\r\n"
        ).encode("latin-1")
        self._bodyless = method == "HEAD"
        self.status = 0
        self.first_byte_s: float | None = None
        self.head = b""
        self.body = b""
        self.whole = False

    def field(self, name: str) -> str:
        """Give a header field's value, empty where it is absent."""
        wanted = name.lower().encode("ascii")
        for line in self.head.split(b"\r\n")[1:]:
            key, colon, value = line.partition(b":")
            if colon and key.strip().lower() == wanted:
                return value.strip().decode("latin-1")[: limits.DIAGNOSIS_TEXT_CHARS_MAX]
        return ""

    async def over(self, stream: Stream) -> None:
        """Ask over a stream, which is the caller's to close; the caller brings the deadline.

        Raises:
            OSError: the connection or TLS broke; what came before stands.
        """
        loop = asyncio.get_running_loop()
        await stream.send_all(self._text)
        asked_at = loop.time()
        data = b""
        while b"\r\n\r\n" not in data:
            piece = await stream.receive()
            if self.first_byte_s is None and piece:
                self.first_byte_s = loop.time() - asked_at
            data += piece
            if not piece or len(data) > _HEAD_BYTES_MAX:
                break
        head, end, self.body = data.partition(b"\r\n\r\n")
        match = _STATUS.match(head)
        if match is None or not end:
            return
        self.head, self.status = head, int(match[1])
        if 100 <= self.status < 200:
            return  # nobody asked for it
        length = self.field("content-length")
        wanted = int(length) if length.isdigit() and len(length) < 16 else limits.DIAGNOSIS_BODY_BYTES_MAX
        if self._bodyless or self.status in (204, 304):
            wanted = 0
        chunked = "chunked" in self.field("transfer-encoding").lower()
        wanted = min(wanted, limits.DIAGNOSIS_BODY_BYTES_MAX)
        while len(self.body) < wanted and not (chunked and self.body.endswith(b"0\r\n\r\n")):
            piece = await stream.receive()
            if not piece:
                break
            self.body += piece
        self.body = self.body[: limits.DIAGNOSIS_BODY_BYTES_MAX]
        self.whole = len(self.body) >= wanted or not length
