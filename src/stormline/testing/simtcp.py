"""One end of a simulated TCP connection: segments, acknowledgements, retransmission, windows, FIN and RST.

It does what shapes an application's fate on a bad network: bytes come in order, so one lost segment holds up all that
follow it; a silent path is found out by time-outs that double; a closed or restarted peer answers with RST; a slow
path fills the send buffer. Congestion control is NewReno (RFC 6582). Left out: SACK, delayed acknowledgements, Nagle,
ECN, and sequence numbers that wrap.
"""

import asyncio
import errno
import math
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from stormline.core import limits_lab
from stormline.core.values import Address
from stormline.net.tcpinfo import TcpInfo

SYN: Final = 1
ACK: Final = 2
FIN: Final = 4
RST: Final = 8
_PERSIST_RETRIES_MAX: Final = 8
"""How far the pause between two probes of a shut window grows: to a minute."""
_NAMES: Final = {SYN: "S", ACK: "A", FIN: "F", RST: "R"}


class Segment(NamedTuple):
    """A TCP segment on its way. `seq` and `ack` count bytes of the stream from 0; a FIN takes one."""

    src: Address
    dst: Address
    flags: int
    seq: int
    ack: int
    window: int
    data: bytes = b""

    @property
    def size_bytes(self) -> int:
        """Its size as an IP packet."""
        return limits_lab.SIM_HEADER_BYTES + len(self.data)

    def __str__(self) -> str:
        """Show what matters of it."""
        flags = "".join(name for bit, name in _NAMES.items() if self.flags & bit)
        return f"{self.src}>{self.dst} {flags} {self.seq}+{len(self.data)} ack {self.ack}"


class TcpUser(Protocol):
    """Who uses a connection. Called from inside it: note what happened, do nothing long."""

    def tcp_changed(self) -> None:
        """It is connected, or there is something to read, or room to write, or it failed."""
        ...


class TcpEnd:
    """One end.

    Args:
        local: our address.
        remote: the peer's.
        send: puts a segment on the network.
        forget: told once when this end is over and done with.
        passive: it was made by a peer's SYN.

    Attributes:
        connected: the handshake is done.
        failed: why it is broken, None where it is not.
        user: who is told of changes.
    """

    def __init__(
        self,
        local: Address,
        remote: Address,
        *,
        send: Callable[[Segment], None],
        forget: Callable[["TcpEnd"], None],
        passive: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.local = local
        self.remote = remote
        self._put = send
        self._forget = forget
        self._passive = passive
        self.user: TcpUser | None = None
        self.connected = False
        self.failed: OSError | None = None
        self._over = False
        self._app_closed = False
        # sending
        self._out = bytearray()  # taken and not acknowledged
        self._base = 0  # where in the stream it begins
        self._una = 0  # `_base`, one more once our FIN is acknowledged
        self._nxt = 0
        self._sent_max = 0
        self._fin = False
        self._peer_window = limits_lab.SIM_SEGMENT_BYTES
        self._cwnd = 10.0 * limits_lab.SIM_SEGMENT_BYTES  # RFC 6928
        self._ssthresh = float(limits_lab.SIM_RECEIVE_BUFFER_BYTES)
        self._dupacks = 0
        self._recover = -1
        # time
        self._srtt = 0.0
        self._rttvar = 0.0
        self._rtt_min = math.inf
        self._rto = limits_lab.SIM_RTO_FIRST_S
        self._timed: tuple[int, float] | None = None
        self._timed_una = 0  # what was acknowledged when that segment left
        self._timed_last = False  # nothing more was there to send
        self._rate = 0.0
        self._rate_limited = False
        self._retries = 0
        self._resent = 0  # segments, over its life
        self._ack_at = self._heard_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._orphan: asyncio.TimerHandle | None = None
        # receiving
        self._in = bytearray()
        self._rcv = 0
        self._early: dict[int, bytes] = {}
        self._fin_at: int | None = None
        self._eof = False
        self._window_said = limits_lab.SIM_RECEIVE_BUFFER_BYTES

    def __repr__(self) -> str:
        return f"<TcpEnd {self.local}>{self.remote}>"

    # -- for the user ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Send the SYN, or answer one."""
        self._handshake()

    @property
    def room(self) -> int:
        """Bytes `write` would take now."""
        return limits_lab.SIM_SEND_BUFFER_BYTES - len(self._out) if self.connected and not self._fin else 0

    @property
    def readable(self) -> bool:
        """True where `read` gives or raises something."""
        return bool(self._in) or self._eof or self.failed is not None

    @property
    def writable(self) -> bool:
        """True where `write` takes or raises something."""
        return self.failed is not None or self.room > 0

    @property
    def unsent_bytes(self) -> int:
        """Bytes taken and not acknowledged."""
        return len(self._out)

    def tcp_info(self) -> TcpInfo | None:
        """Say what a kernel says of a connection (`net.tcpinfo`), None where it is over."""
        if self._over or self.failed is not None:
            return None
        now = self._loop.time()
        return TcpInfo(
            rtt_s=self._srtt or None,
            rtt_var_s=self._rttvar if self._srtt else None,
            rto_s=min(limits_lab.SIM_RTO_MAX_S, self._rto * 2.0**self._retries),
            backoffs=self._retries,
            unacked_bytes=max(0, min(self._sent_max, self._data_end) - self._una),
            ack_age_s=now - self._ack_at,
            heard_age_s=now - self._heard_at,
            delivery_bytes_per_s=round(self._rate) or None,
            app_limited=self._rate_limited and round(self._rate) > 0,
            notsent_bytes=max(0, self._data_end - self._sent_max),
            retransmits=self._resent,
            min_rtt_s=self._rtt_min if self._srtt else None,
        )

    def write(self, data: bytes | memoryview) -> int:
        """Take bytes to send, as many as there is room for; 0 for none now."""
        if self.failed is not None:
            raise self.failed
        if self._fin:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        taken = min(len(data), self.room)
        if taken:
            self._out += data[:taken]
            self._push()
        return taken

    def read(self, size_max: int) -> bytes | None:
        """Give bytes that came, `b""` at the peer's FIN, None for nothing yet; raises OSError where it is broken."""
        if self._in:
            data = bytes(self._in[:size_max])
            del self._in[:size_max]
            if not self._eof and self._window_said < limits_lab.SIM_RECEIVE_BUFFER_BYTES // 4 and self.failed is None:
                self._say(ACK)  # the window was nearly shut: open it
            return data
        if self.failed is not None:
            raise self.failed
        return b"" if self._eof else None

    def close(self) -> None:
        """Send what was taken, then FIN. Unread bytes make it a reset, as in Linux."""
        if self._app_closed:
            return
        self._app_closed = True
        self.user = None
        if self.failed is not None or self._over:
            return
        if not self.connected or self._in:
            self.abort()
            return
        self._fin = True
        self._push()
        self._orphan = self._loop.call_later(limits_lab.SIM_ORPHAN_S, self._end)
        self._finish_if_done()

    def abort(self) -> None:
        """Reset: drop everything, tell the peer."""
        self._app_closed = True
        self.user = None
        if not self._over and self.failed is None and (self.connected or self._passive):
            self._put(self._segment(RST | ACK, self._nxt))
        self._end()

    def reset(self) -> None:
        """Break it as a middlebox does that resets both sides."""
        if not self._over:
            self._put(self._segment(RST | ACK, self._nxt))
            self.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def fail(self, error: OSError) -> None:
        """Break it from below: the kernel found out that it is gone."""
        if self.failed is None and not self._over:
            self.failed = error
            self._end()
            self._tell()

    # -- segments in -------------------------------------------------------------------------------------------------

    def receive(self, segment: Segment) -> None:
        """Take a segment addressed to this end."""
        if self._over:
            return
        if segment.flags & RST:
            refused = not self.connected and not self._passive
            self.fail(
                ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
                if refused
                else ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            )
            return
        if segment.flags & SYN:
            self._take_syn(segment)
            return
        if not self.connected:
            if not self._passive:
                return  # data before the SYN-ACK, which was lost: it comes again
            self._established()
        self._take_ack(segment)
        if segment.data or segment.flags & FIN:
            self._take_data(segment)
        if not self._over:
            self._push()
            self._finish_if_done()

    def _take_syn(self, segment: Segment) -> None:
        if self._passive:
            if not self.connected:
                self._put(self._segment(SYN | ACK, 0))  # the peer's SYN came again
            else:
                self._say(ACK)
            return
        if not self.connected:
            self._peer_window = segment.window
            self._measure(0)
            self._established()
        self._say(ACK)

    def _established(self) -> None:
        self.connected = True
        self._ack_at = self._heard_at = self._loop.time()
        self._retries = 0
        self._cancel_timer()
        self._tell()

    def _take_ack(self, segment: Segment) -> None:
        self._ack_at = self._loop.time()
        self._peer_window = segment.window
        acked = segment.ack
        if acked > self._una and acked <= self._sent_max:
            fresh = acked - self._una
            data = min(acked - self._base, len(self._out))
            del self._out[:data]
            self._base += data
            self._una = acked
            self._nxt = max(self._nxt, acked)
            if self._retries:
                # RFC 6298 section 5.7: backed off until a round trip is measured, else a path that has become slower
                # than the time-out is never measured, as all is sent twice. One step of it: a kernel has time stamps.
                self._rto = min(limits_lab.SIM_RTO_MAX_S, 2.0 * self._rto)
            self._retries = 0
            self._measure(acked)
            self._grow(fresh)
            self._arm()
            if data:
                self._tell()
        elif not segment.window:
            self._retries = min(self._retries, _PERSIST_RETRIES_MAX)  # alive and full: probed for ever
        elif acked == self._una and self._nxt > self._una and not segment.data and not segment.flags & FIN:
            self._dupacks += 1
            if self._dupacks == 3 and self._una >= self._recover:
                self._ssthresh = max((self._nxt - self._una) / 2, 2.0 * limits_lab.SIM_SEGMENT_BYTES)
                self._cwnd = self._ssthresh + 3 * limits_lab.SIM_SEGMENT_BYTES
                self._recover = self._nxt
                self._resend_first()

    def _grow(self, fresh: int) -> None:
        self._dupacks = 0
        if self._una < self._recover:
            self._resend_first()  # NewReno: a partial acknowledgement shows the next hole
            return
        if self._recover >= 0:
            self._recover = -1
            self._cwnd = self._ssthresh
        if self._cwnd < self._ssthresh:
            self._cwnd += min(fresh, 2 * limits_lab.SIM_SEGMENT_BYTES)
        else:
            self._cwnd += limits_lab.SIM_SEGMENT_BYTES * limits_lab.SIM_SEGMENT_BYTES / self._cwnd

    def _take_data(self, segment: Segment) -> None:
        end = segment.seq + len(segment.data)
        if self._app_closed and segment.data and end > self._rcv:
            self.abort()  # nobody will read it: Linux resets
            return
        if segment.flags & FIN:
            self._fin_at = end
        told = False
        room = limits_lab.SIM_RECEIVE_BUFFER_BYTES - len(self._in)
        if segment.data and end > self._rcv and end - self._rcv <= room:
            self._early[segment.seq] = segment.data
            told = self._join()
            if told:
                self._heard_at = self._loop.time()
        if self._fin_at is not None and self._rcv == self._fin_at and not self._eof:
            self._eof = True
            told = True
        self._say(ACK)
        if told:
            self._tell()

    def _join(self) -> bool:
        """Move what is in order from the early segments to the stream."""
        moved = False
        while self._early:
            start = min(self._early)
            if start > self._rcv:
                break
            data = self._early.pop(start)
            fresh = data[self._rcv - start :]
            if fresh:
                self._in += fresh
                self._rcv += len(fresh)
                moved = True
        return moved

    # -- segments out ------------------------------------------------------------------------------------------------

    def _segment(self, flags: int, seq: int, data: bytes = b"") -> Segment:
        self._window_said = max(0, limits_lab.SIM_RECEIVE_BUFFER_BYTES - len(self._in))
        ack = self._rcv + (1 if self._eof else 0)
        return Segment(self.local, self.remote, flags, seq, ack, self._window_said, data)

    def _say(self, flags: int) -> None:
        self._put(self._segment(flags, self._nxt))

    @property
    def _data_end(self) -> int:
        return self._base + len(self._out)

    def _push(self) -> None:
        """Send what the windows allow."""
        if not self.connected or self._over:
            return
        end = self._data_end
        allowed = min(self._cwnd, self._peer_window)
        while self._nxt < end and self._nxt - self._una + min(limits_lab.SIM_SEGMENT_BYTES, end - self._nxt) <= allowed:
            self._transmit(self._nxt)
        if self._fin and self._nxt == end:
            self._transmit(end)
        if self._timer is None:
            self._arm()

    def _transmit(self, at: int) -> None:
        offset = at - self._base
        data = bytes(self._out[offset : offset + limits_lab.SIM_SEGMENT_BYTES])
        end = at + len(data)
        flags = ACK
        if self._fin and end == self._data_end:
            flags |= FIN
            end += 1
        if at < self._sent_max:
            self._resent += 1
        if self._timed is None and at >= self._sent_max:
            self._timed = (end, self._loop.time())
            self._timed_una = self._una
            self._timed_last = end >= self._data_end
        self._nxt = max(self._nxt, end)
        self._sent_max = max(self._sent_max, end)
        self._put(self._segment(flags, at, data))

    def _resend_first(self) -> None:
        self._timed = None  # Karn: an acknowledgement now could be of either
        nxt = self._nxt
        self._transmit(self._una)
        self._nxt = max(nxt, self._nxt)

    # -- time --------------------------------------------------------------------------------------------------------

    def _measure(self, acked: int) -> None:
        """RFC 6298 section 2."""
        if self._timed is None or acked < self._timed[0]:
            return
        rtt = self._loop.time() - self._timed[1]
        self._timed = None
        if rtt and acked > self._timed_una:
            self._rate = (acked - self._timed_una) / rtt
            self._rate_limited = self._timed_last
        self._rtt_min = min(self._rtt_min, rtt)
        if not self._srtt:
            self._srtt, self._rttvar = rtt, rtt / 2
        else:
            self._rttvar = 0.75 * self._rttvar + 0.25 * abs(self._srtt - rtt)
            self._srtt = 0.875 * self._srtt + 0.125 * rtt
        self._rto = min(limits_lab.SIM_RTO_MAX_S, self._srtt + max(limits_lab.SIM_RTO_MIN_S, 4 * self._rttvar))

    def _handshake(self) -> None:
        if self._retries == 0 and not self._passive:
            self._timed = (0, self._loop.time())
        self._put(self._segment(SYN | ACK if self._passive else SYN, 0))
        delay = min(limits_lab.SIM_RTO_MAX_S, limits_lab.SIM_RTO_FIRST_S * 2.0**self._retries)
        self._timer = self._loop.call_later(delay, self._handshake_again)

    def _handshake_again(self) -> None:
        self._timer = None
        self._timed = None
        self._retries += 1
        if self._retries > limits_lab.SIM_SYN_RETRIES_MAX:
            self.fail(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
        else:
            self._handshake()

    def _arm(self) -> None:
        self._cancel_timer()
        if self._sent_max > self._una or self._out:
            delay = min(limits_lab.SIM_RTO_MAX_S, self._rto * 2.0**self._retries)
            self._timer = self._loop.call_later(delay, self._expired)

    def _expired(self) -> None:
        self._timer = None
        self._retries += 1
        if self._retries > limits_lab.SIM_RETRIES_MAX:
            self.fail(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
            return
        self._ssthresh = max((self._nxt - self._una) / 2, 2.0 * limits_lab.SIM_SEGMENT_BYTES)
        self._cwnd = float(limits_lab.SIM_SEGMENT_BYTES)
        self._recover = -1
        self._dupacks = 0
        self._timed = None
        self._nxt = self._una
        self._transmit(self._una)
        self._arm()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish_if_done(self) -> None:
        if self._app_closed and self._eof and self._fin and self._una > self._data_end:
            self._end()

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._cancel_timer()
        if self._orphan is not None:
            self._orphan.cancel()
            self._orphan = None
        self._forget(self)

    def _tell(self) -> None:
        if self.user is not None:
            self.user.tcp_changed()
