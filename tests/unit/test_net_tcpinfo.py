"""What is read out of the kernel's `struct tcp_info`, field by field."""

import socket
import struct
import sys

import pytest

from stormline.net import tcpinfo
from stormline.net.tcpinfo import TcpInfo, parse

ESTABLISHED, CLOSE = 1, 7
FULL = 232


def raw(size=FULL, state=ESTABLISHED, **fields):
    """Give a struct with some fields set: `name=value` by offset and format."""
    layout = {
        "backoff": ("B", 4), "limited": ("B", 7), "rto": ("I", 8), "mss": ("I", 16), "unacked": ("I", 24),
        "data_received": ("I", 52), "ack_received": ("I", 56), "rtt": ("I", 68), "rtt_var": ("I", 72),
        "retransmits": ("I", 100), "acked": ("Q", 120), "notsent": ("I", 144), "rtt_min": ("I", 148),
        "rate": ("Q", 160), "sent": ("Q", 200), "again": ("Q", 208),
    }  # fmt: skip
    buffer = bytearray(FULL)
    buffer[0] = state
    for name, value in fields.items():
        kind, offset = layout[name]
        struct.pack_into(f"={kind}", buffer, offset, value)
    return bytes(buffer[:size])


def test_parse_gives_seconds_and_bytes():
    info = parse(
        raw(
            backoff=3, limited=1 if sys.byteorder == "little" else 0x80, rto=1_600_000, mss=1400, unacked=2,
            data_received=2500, ack_received=700, rtt=50_000, rtt_var=20_000, retransmits=5, acked=10_001,
            notsent=4000, rtt_min=40_000, rate=125_000, sent=13_000, again=1500,
        )
    )  # fmt: skip
    assert info == TcpInfo(
        rtt_s=pytest.approx(0.05),
        rtt_var_s=pytest.approx(0.02),
        rto_s=pytest.approx(1.6),
        backoffs=3,
        unacked_bytes=1500,
        ack_age_s=pytest.approx(0.7),
        heard_age_s=pytest.approx(2.5),
        delivery_bytes_per_s=125_000,
        app_limited=True,
        notsent_bytes=4000,
        retransmits=5,
        min_rtt_s=pytest.approx(0.04),
    )


def test_parse_before_the_first_sample_gives_none():
    info = parse(raw(rto=1_000_000, rtt_var=250_000, rtt_min=0xFFFF_FFFF))
    assert (info.rtt_s, info.rtt_var_s, info.min_rtt_s, info.delivery_bytes_per_s) == (None,) * 4
    assert info.rto_s == pytest.approx(1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"unacked": 0, "mss": 1400, "sent": 900, "acked": 1}, 0),
        ({"unacked": 1, "mss": 1400, "sent": 900, "acked": 1}, 900),
        ({"unacked": 1, "mss": 1400, "sent": 900, "acked": 0}, 901),  # a server's end: no SYN of its own counted
        ({"unacked": 1, "mss": 1400, "sent": 5000, "acked": 1}, 1400),
        ({"unacked": 1, "mss": 1400, "sent": 0, "acked": 1}, 1),  # a FIN
    ],
)
def test_parse_unacked_is_what_the_counters_say_within_the_segments(fields, expected):
    assert parse(raw(**fields)).unacked_bytes == expected


@pytest.mark.parametrize("size", [104, 120, 160, 200])
def test_parse_short_struct_of_an_old_kernel_gives_what_is_there(size):
    info = parse(raw(size, rtt=50_000, mss=1400, unacked=2, retransmits=5, rate=1000, notsent=1, rtt_min=1))
    assert (info.rtt_s, info.unacked_bytes, info.retransmits) == (pytest.approx(0.05), 2800, 5)
    assert (info.notsent_bytes is not None, info.min_rtt_s is not None) == (size >= 148, size >= 152)
    assert (info.delivery_bytes_per_s is not None) == (size >= 168)


@pytest.mark.parametrize("nothing", [b"", raw(state=CLOSE, rtt=50_000), bytes([CLOSE])])
def test_parse_connection_that_is_over_gives_none(nothing):
    assert parse(nothing) is None


def test_read_socket_of_another_kind_gives_none():
    for family, kind in ((socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_STREAM)):
        with socket.socket(family, kind) as sock:
            assert tcpinfo.read(sock) is None


def test_read_where_the_system_has_none_gives_none(monkeypatch):
    monkeypatch.setattr(tcpinfo, "_TCP_INFO", None)
    assert not tcpinfo.available()
    with socket.socket() as sock:
        assert tcpinfo.read(sock) is None
