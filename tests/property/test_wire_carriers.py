"""What carries a session, for any input: PROXY protocol headers, and frames in messages of a WebSocket."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors, limits, limits_carriers
from stormline.core.values import Address
from stormline.wire import frames, proxyprotocol, websocket
from stormline.wire import messages as m

PORTS = st.integers(0, 65535)


@given(data=st.data(), version=st.sampled_from((4, 6)), values=st.binary(max_size=300))
def test_header_of_any_two_ends_tells_the_first_whatever_follows_in_it(data, version, values):
    ends = [Address(str(data.draw(st.ip_addresses(v=version))), data.draw(PORTS)) for _ in range(2)]
    header = proxyprotocol.encode(*ends)
    header = header[:14] + (len(header) - 16 + len(values)).to_bytes(2, "big") + header[16:] + values
    assert proxyprotocol.size_of(header[:16]) == len(header)
    source = proxyprotocol.parse(header)
    assert source is not None
    assert (ipaddress.ip_address(source.host), source.port) == (ipaddress.ip_address(ends[0].host), ends[0].port)


@given(
    start=st.sampled_from((b"", proxyprotocol.SIGNATURE, proxyprotocol.SIGNATURE + b"\x21\x11\x00\x0c")),
    data=st.binary(max_size=80),
)
def test_any_bytes_are_a_header_or_refused(start, data):
    header = start + data
    try:
        size = proxyprotocol.size_of(header[:16])
        source = proxyprotocol.parse(header[:size])
    except errors.RemoteProtocolError:
        return
    assert header.startswith(proxyprotocol.SIGNATURE)
    assert source is None or source.is_ip


@pytest.mark.parametrize("cut", range(28))
def test_header_cut_short_is_refused(cut):
    header = proxyprotocol.encode(Address("192.0.2.1", 1), Address("192.0.2.2", 2))
    with pytest.raises(errors.RemoteProtocolError):
        proxyprotocol.parse(header[:cut])


@given(sizes=st.lists(st.integers(0, limits.FRAME_BYTES_MAX - 100), max_size=20))
def test_messages_are_the_same_bytes_in_whole_frames_within_the_bound(sizes):
    whole = [frames.encode(m.Data(2 * n + 1, bytes(size))) for n, size in enumerate(sizes)]
    data = b"".join(whole)
    cut = list(websocket.messages(data))
    assert b"".join(cut) == data
    ends = {0}
    for frame in whole:
        ends.add(max(ends) + len(frame))
    at = 0
    for message in cut:
        assert len(message) <= limits_carriers.WS_MESSAGE_BYTES or message in whole
        at += len(message)
        assert at in ends
