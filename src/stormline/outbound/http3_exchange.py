"""One request and its answer on an HTTP/3 stream: as over HTTP/2, but for what QUIC makes different."""

from collections.abc import Callable
from typing import Final

from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.http2_exchange import Bounds, Carrier, Exchange
from stormline.outbound.http2_request import Encoded

_SAFE: Final = frozenset({b"GET", b"HEAD"})
"""Methods of requests that may be replayed without harm (RFC 8470 section 2): the only ones sent as early data."""


class Http3Exchange(Exchange):
    """`http2_exchange.Exchange` on a QUIC stream. `stream_id` counts requests from 1, as QUIC's first stream is 0.

    Attributes:
        early: it was sent as early data.
        handed: bytes of it that QUIC was given.
        gone: how many of them were in datagrams, when last looked.
        left: the kernel has a datagram with a part of it.
        unread: bytes of its body that count against `limits_quic.H3_UNREAD_BYTES`.
    """

    __slots__ = ("early", "gone", "handed", "left", "unread")

    http_version = "HTTP/3"

    def __init__(
        self,
        carrier: Carrier,
        request: Encoded,
        bounds: Bounds,
        *,
        peer: Address,
        done: Callable[[bool], None],
        on_stage: Callable[[Phase], None],
    ) -> None:
        super().__init__(carrier, request, bounds, peer=peer, done=done, on_stage=on_stage)
        self.early = self.left = False
        self.handed = self.gone = self.unread = 0

    @property
    def delivered(self) -> bool:
        """The peer may know of it."""
        return self.left

    @property
    def quic_id(self) -> int:
        """The number of its QUIC stream (RFC 9000 section 2.1)."""
        return 4 * (self.stream_id - 1)

    @property
    def uploading(self) -> bool:
        """It has a body of which the kernel does not have all."""
        return self.uploads and not self._sent_all

    @property
    def may_go_early(self) -> bool:
        """It is a read without a body."""
        return not self.uploads and self.request.fields[0][1] in _SAFE

    def again(self) -> None:
        """Forget that it was sent: the server has done nothing with it and wants it outside early data (RFC 8470)."""
        self.stream_id = 0
        self.early = self.left = False
        self._sent_all = False
        self._moved_at = self._time()

    def stop_upload(self) -> None:
        """Send no more of the body: the peer does not want it."""
        self._stop_upload()

    def sent_some(self, *, all_of_it: bool) -> None:
        """Note that the kernel has more of it, or all that was queued."""
        self._moved_at = self._time()
        if all_of_it:
            self.sent()
