"""What the kernel knows about a TCP connection: Linux' `TCP_INFO`.

The kernel sees what an application cannot: whether what was sent is being acknowledged, how often it was sent again,
how fast it is delivered. Later kernels tell more; the length they answer with says what is there (`struct tcp_info` in
`linux/tcp.h` only grows at its end).
"""

import socket
import struct
import sys
from typing import Final, NamedTuple

from stormline.net.system import LINUX

_SIZE_MAX: Final = 256
"""What is asked for: all that is read below, and some."""
_TCP_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None) if LINUX else None

# Offsets in `struct tcp_info`; numbers of the machine's byte order.
_STATE: Final = 0
_BACKOFF: Final = 4
_LIMITED: Final = 7
_LIMITED_BIT: Final = 1 if sys.byteorder == "little" else 0x80  # the first bit field of its byte
_RTO_US: Final = 8
_MSS: Final = 16
_UNACKED: Final = 24
_DATA_RECEIVED_MS: Final = 52
_ACK_RECEIVED_MS: Final = 56
_RTT_US: Final = 68
_RTT_VAR_US: Final = 72
_RETRANSMITS: Final = 100
_BYTES_ACKED: Final = 120
_NOTSENT: Final = 144
_RTT_MIN_US: Final = 148
_DELIVERY_RATE: Final = 160
_BYTES_SENT: Final = 200
_BYTES_RETRANSMITTED: Final = 208

_U32: Final = struct.Struct("=I")
_U64: Final = struct.Struct("=Q")
_NONE: Final = 0xFFFF_FFFF
_TCP_CLOSE: Final = 7


class TcpInfo(NamedTuple):
    """One look at a connection. None: the kernel does not tell, or has not measured yet.

    Attributes:
        rtt_s: smoothed round trip (RFC 6298).
        rtt_var_s: its mean deviation.
        rto_s: the retransmission time-out that is running or would be, back-off included.
        backoffs: times it has doubled since the peer last acknowledged something new, or probes of a shut window.
        unacked_bytes: bytes sent and not acknowledged; at least 1 where anything is, so 0 is exact.
        ack_age_s: time since the peer's last acknowledgement of any kind: since it last showed life.
        heard_age_s: time since data last came, or since the connection was made.
        delivery_bytes_per_s: rate of delivery, the latest sample.
        app_limited: that sample shows how much there was to send, not what the path can do.
        notsent_bytes: bytes the kernel holds and has not sent once.
        retransmits: segments sent again over the connection's life.
        min_rtt_s: the shortest round trip of the last minutes.
    """

    rtt_s: float | None = None
    rtt_var_s: float | None = None
    rto_s: float | None = None
    backoffs: int | None = None
    unacked_bytes: int | None = None
    ack_age_s: float | None = None
    heard_age_s: float | None = None
    delivery_bytes_per_s: int | None = None
    app_limited: bool = False
    notsent_bytes: int | None = None
    retransmits: int | None = None
    min_rtt_s: float | None = None


def available() -> bool:
    """Say whether this system has `TCP_INFO`."""
    return _TCP_INFO is not None


def read(sock: socket.socket) -> TcpInfo | None:
    """Look at a connection, without waiting: about five microseconds.

    An MPTCP connection shows its first path. None where nothing can be read: another system, a socket of another kind,
    a connection that is over.
    """
    if _TCP_INFO is None:
        return None
    try:
        return parse(sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _SIZE_MAX))
    except OSError:
        return None


def parse(raw: bytes) -> TcpInfo | None:
    """Read a `struct tcp_info` of any length; None where it is empty or the connection is over."""
    if not raw or raw[_STATE] == _TCP_CLOSE:
        return None
    rtt_us = _u32(raw, _RTT_US) or None  # 0: no sample yet, and the deviation is a start value
    rtt_var_us = _u32(raw, _RTT_VAR_US) if rtt_us is not None else None
    rtt_min_us = _u32(raw, _RTT_MIN_US)
    rate = _u64(raw, _DELIVERY_RATE) or None
    return TcpInfo(
        rtt_s=_scaled(rtt_us, 1e-6),
        rtt_var_s=_scaled(rtt_var_us, 1e-6),
        rto_s=_scaled(_u32(raw, _RTO_US) or None, 1e-6),
        backoffs=raw[_BACKOFF] if len(raw) > _BACKOFF else None,
        unacked_bytes=_unacked(raw),
        ack_age_s=_scaled(_u32(raw, _ACK_RECEIVED_MS), 1e-3),
        heard_age_s=_scaled(_u32(raw, _DATA_RECEIVED_MS), 1e-3),
        delivery_bytes_per_s=rate,
        app_limited=rate is not None and bool(raw[_LIMITED] & _LIMITED_BIT),
        notsent_bytes=_u32(raw, _NOTSENT),
        retransmits=_u32(raw, _RETRANSMITS),
        min_rtt_s=_scaled(None if rtt_min_us == _NONE else rtt_min_us, 1e-6),
    )


def _u32(raw: bytes, offset: int) -> int | None:
    return int(_U32.unpack_from(raw, offset)[0]) if len(raw) >= offset + 4 else None


def _u64(raw: bytes, offset: int) -> int | None:
    return int(_U64.unpack_from(raw, offset)[0]) if len(raw) >= offset + 8 else None


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _unacked(raw: bytes) -> int | None:
    """Bytes on their way. The kernel counts them in segments, which may be short: its byte counters say it better."""
    segments = _u32(raw, _UNACKED)
    mss = _u32(raw, _MSS)
    if segments is None or mss is None:
        return None
    most = segments * mss
    sent, again, acked = _u64(raw, _BYTES_SENT), _u64(raw, _BYTES_RETRANSMITTED), _u64(raw, _BYTES_ACKED)
    if not segments or sent is None or again is None or acked is None:
        return most
    # The SYN counts as an acknowledged byte where we opened the connection.
    return max(1, min(most, sent - again - acked + 1))
