"""The simulated network: TCP over lossy links, and the ways in which it fails."""

import asyncio
import ssl

import pytest

from stormline.core import limits_lab
from stormline.core import limits_platform as limits
from stormline.core.values import Address
from stormline.net.sessions import TlsSessions
from stormline.net.stream import TcpStream
from stormline.net.tls import start_tls
from stormline.netmodel.params import BlackoutMode, LinkParams
from stormline.testing.buggify import Buggify
from stormline.testing.simloop import SimRng, on_virtual_time
from stormline.testing.simnet import CORE_DELAY_S, Nat, SimNet
from stormline.testing.simplatform import open_tcp_of
from stormline.testing.simserver import HttpReply, HttpServer, serve
from stormline.testing.simtls import SimTlsContext

SERVER = Address("198.51.100.1", 443)
GOOD = LinkParams(delay_s=0.05)
ROUND_TRIP_S = 2 * 0.05 + CORE_DELAY_S


class Echo(asyncio.Protocol):
    """Sends back what comes; keeps what it saw."""

    def __init__(self, seen):
        self.seen = seen

    def connection_made(self, transport):
        self.transport = transport
        self.seen.append(transport)

    def data_received(self, data):
        self.transport.write(data)

    def connection_lost(self, exc):
        self.seen.append(exc)


class Net:
    def __init__(self, params=GOOD, *, seed=1, nat=None, tls=None, sites=None, factory=None):
        self.net = SimNet(asyncio.get_running_loop(), SimRng(seed), sites=sites)
        self.link = self.net.link("phone", params)
        self.phone = self.net.host("phone", "10.0.0.2", link=self.link, nat=nat)
        self.server = self.net.host("server", SERVER.host)
        self.seen = []
        serve(self.server, SERVER.port, factory or (lambda: Echo(self.seen)), context=tls)

    async def open(self) -> TcpStream:
        return await open_tcp_of(self.phone)(SERVER)


async def read_exactly(stream, size) -> bytes:
    gathered = b""
    while len(gathered) < size:
        data = await stream.receive()
        assert data, f"ended after {len(gathered)} of {size} bytes"
        gathered += data
    return gathered


def pattern(size: int) -> bytes:
    return bytes(number * 7 % 251 for number in range(size))


@on_virtual_time
async def test_handshake_takes_one_round_trip() -> None:
    net = Net()
    stream = await net.open()
    assert asyncio.get_running_loop().time() == pytest.approx(ROUND_TRIP_S, abs=1e-3)
    assert (stream.peer, stream.local.host) == (SERVER, "10.0.0.2")
    stream.close()


@pytest.mark.parametrize(
    "params",
    [
        LinkParams(delay_s=0.05, loss_pct=10),
        LinkParams(delay_s=0.05, jitter_s=0.05, reorder_pct=20, reorder_gap_s=0.1, duplicate_pct=10),
        LinkParams(delay_s=0.02, rate_bps=500_000, queue_bytes=15_000),
        LinkParams(delay_s=0.3, loss_pct=3, rate_bps=200_000, queue_bytes=60_000),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_whole_and_in_order_whatever_the_link_does(params, seed) -> None:
    @on_virtual_time
    async def scene():
        net = Net(params, seed=seed, sites=Buggify(SimRng(seed), only=frozenset({"receive-short", "send-short"})))
        stream = await net.open()
        data = pattern(60_000)
        sending = asyncio.create_task(stream.send_all(data))
        assert await read_exactly(stream, len(data)) == data
        await sending
        assert stream.sent_bytes == len(data)
        stream.close()

    scene()


@on_virtual_time
async def test_slow_link_holds_the_sender_back() -> None:
    net = Net(LinkParams(delay_s=0.01, rate_bps=800_000, queue_bytes=30_000))
    stream = await net.open()
    size = limits_lab.SIM_SEND_BUFFER_BYTES + 100_000
    sending = asyncio.create_task(stream.send_all(bytes(size)))
    await asyncio.sleep(0.3)
    assert limits_lab.SIM_SEND_BUFFER_BYTES <= stream.sent_bytes < size
    await read_exactly(stream, size)
    await sending
    assert asyncio.get_running_loop().time() > size * 8 / 800_000
    stream.close()


@on_virtual_time
async def test_receiver_that_does_not_read_shuts_the_window() -> None:
    net = Net()
    stream = await net.open()
    await asyncio.sleep(1)
    net.seen[0].pause_reading()
    size = 3 * limits_lab.SIM_RECEIVE_BUFFER_BYTES
    sending = asyncio.create_task(stream.send_all(bytes(size)))
    await asyncio.sleep(30)
    assert not sending.done()
    assert stream.sent_bytes <= limits_lab.SIM_RECEIVE_BUFFER_BYTES + limits_lab.SIM_SEND_BUFFER_BYTES + 30_000
    net.seen[0].resume_reading()
    await read_exactly(stream, size)
    await sending
    stream.close()


@on_virtual_time
async def test_server_whose_client_does_not_read_is_told_to_pause() -> None:
    told = []

    class Talker(Echo):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(bytes(2_000_000))

        def pause_writing(self):
            told.append("pause")

        def resume_writing(self):
            told.append("resume")

    net = Net(factory=lambda: Talker([]))
    stream = await net.open()
    await asyncio.sleep(5)
    assert told == ["pause"]
    await read_exactly(stream, 2_000_000)
    assert told == ["pause", "resume"]
    stream.close()


@on_virtual_time
async def test_closed_port_refuses_and_absent_host_is_silent() -> None:
    net = Net()
    connect = open_tcp_of(net.phone)
    with pytest.raises(ConnectionRefusedError):
        await connect(Address(SERVER.host, 80))
    start_s = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await connect(Address("192.0.2.1", 443))
    assert asyncio.get_running_loop().time() - start_s == pytest.approx(1 + 2 + 4 + 8 + 16 + 32 + 60, abs=1)
    assert net.phone.connections == 0


@on_virtual_time
async def test_cancelled_connect_leaves_nothing() -> None:
    net = Net()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            await open_tcp_of(net.phone)(Address("192.0.2.1", 443))
    assert net.phone.connections == 0


@on_virtual_time
async def test_blackout_is_survived_by_time_outs_that_double() -> None:
    net = Net()
    stream = await net.open()
    net.link.blackout(BlackoutMode.DROP, 10.0)
    start_s = asyncio.get_running_loop().time()
    await stream.send_all(b"hello")
    assert await read_exactly(stream, 5) == b"hello"
    waited_s = asyncio.get_running_loop().time() - start_s
    assert 10.0 < waited_s < 22.0
    stream.close()


@on_virtual_time
async def test_held_packets_come_when_the_light_comes_back() -> None:
    net = Net()
    stream = await net.open()
    net.link.blackout(BlackoutMode.HOLD, 10.0)
    await stream.send_all(b"hello")
    assert await read_exactly(stream, 5) == b"hello"
    assert asyncio.get_running_loop().time() < 10.0 + 3 * ROUND_TRIP_S
    stream.close()


@on_virtual_time
async def test_connection_fails_after_all_retransmissions() -> None:
    net = Net()
    stream = await net.open()
    net.phone.leave_network(kill=False)
    await stream.send_all(b"into nothing")
    with pytest.raises(TimeoutError):
        await stream.receive()
    assert 300 < asyncio.get_running_loop().time() < 1200
    stream.close()


@on_virtual_time
async def test_address_switch_leaves_the_old_connection_half_open_and_lets_new_ones_be_made() -> None:
    net = Net()
    old = await net.open()
    net.phone.leave_network(kill=False)
    with pytest.raises(OSError, match="unreachable"):
        await net.open()
    net.phone.join_network("10.9.9.9", None)
    new = await net.open()
    await new.send_all(b"hi")
    assert await read_exactly(new, 2) == b"hi"
    assert not old.is_readable()
    old.close()
    new.close()


@on_virtual_time
async def test_system_that_kills_connections_at_a_switch_breaks_them_at_once() -> None:
    net = Net()
    stream = await net.open()
    net.phone.leave_network(kill=True)
    with pytest.raises(ConnectionAbortedError):
        await stream.receive()
    stream.close()


@on_virtual_time
async def test_nat_forgets_an_idle_connection_and_the_server_resets_it() -> None:
    net = Net(nat=Nat("100.64.0.1", idle_s=120.0))
    stream = await net.open()
    for _ in range(3):
        await asyncio.sleep(100)
        await stream.send_all(b"x")
        await read_exactly(stream, 1)
    await asyncio.sleep(130)
    net.seen[0].write(b"a push that is dropped")
    await asyncio.sleep(1)
    assert not stream.is_readable()
    await stream.send_all(b"x")
    with pytest.raises(ConnectionResetError):
        await stream.receive()
    stream.close()
    net.seen[0].abort()


@on_virtual_time
async def test_power_cut_is_silent_until_the_machine_is_back() -> None:
    net = Net()
    stream = await net.open()
    net.server.dark = True
    net.server.forget_connections()
    await stream.send_all(b"x")
    await asyncio.sleep(30)
    assert not stream.is_readable()
    net.server.dark = False
    with pytest.raises(ConnectionResetError):
        await stream.receive()
    stream.close()


@on_virtual_time
async def test_killed_process_resets_its_connections() -> None:
    net = Net()
    stream = await net.open()
    net.server.kill_connections()
    with pytest.raises(ConnectionResetError):
        await stream.receive()
    stream.close()


@on_virtual_time
async def test_end_of_stream_is_told_after_the_data() -> None:
    net = Net(LinkParams(delay_s=0.05, loss_pct=20))
    stream = await net.open()
    await stream.send_all(b"bye")
    assert await read_exactly(stream, 3) == b"bye"
    net.seen[0].close()
    assert await stream.receive() == b""
    stream.close()
    await asyncio.sleep(limits_lab.SIM_ORPHAN_S + 1)
    assert (net.phone.connections, net.server.connections) == (0, 0)


@on_virtual_time
async def test_tcp_info_shows_a_path_that_works_and_one_that_went_silent() -> None:
    net = Net()
    stream = await net.open()
    info = stream.tcp_info()
    assert (info.unacked_bytes, info.notsent_bytes, info.backoffs, info.retransmits) == (0, 0, 0, 0)
    assert info.rtt_s == info.min_rtt_s == pytest.approx(ROUND_TRIP_S, abs=1e-3)
    await stream.send_all(b"x")
    await stream.receive()
    heard_at = stream.heard_at
    await asyncio.sleep(1)
    assert stream.heard_at == heard_at
    assert stream.tcp_info().heard_age_s == pytest.approx(1, abs=0.2)
    net.link.blackout(BlackoutMode.DROP, 10)
    await stream.send_all(bytes(1000))
    await asyncio.sleep(3)
    info = stream.tcp_info()
    assert (info.unacked_bytes, info.notsent_bytes) == (1000, 0)
    assert info.backoffs == info.retransmits >= 2
    assert info.rto_s > 1
    assert info.ack_age_s == pytest.approx(4, abs=0.3)
    await asyncio.sleep(20)
    info = stream.tcp_info()
    assert (info.unacked_bytes, info.backoffs) == (0, 0)
    assert info.retransmits >= 2
    stream.close()
    assert stream.tcp_info() is None


@on_virtual_time
async def test_tcp_info_follows_a_path_that_becomes_slower_than_its_time_out() -> None:
    net = Net(LinkParams(delay_s=0.01))
    stream = await net.open()
    slow = LinkParams(delay_s=0.15)
    for way in (net.link.up, net.link.down):
        way.become(slow)
    for _ in range(20):
        await stream.send_all(b"question")
        assert await read_exactly(stream, 8) == b"question"
        await asyncio.sleep(1.0)
    info = stream.tcp_info()
    assert info is not None
    assert info.rtt_s == pytest.approx(0.3, abs=0.05)
    stream.close()


@on_virtual_time
async def test_tcp_info_of_a_full_path_shows_its_rate_and_what_waits() -> None:
    net = Net(LinkParams(delay_s=0.01, rate_bps=800_000, queue_bytes=30_000))
    stream = await net.open()
    sending = asyncio.create_task(stream.send_all(bytes(400_000)))
    await asyncio.sleep(2)
    info = stream.tcp_info()
    assert info.notsent_bytes > 0
    assert info.delivery_bytes_per_s == pytest.approx(100_000, rel=0.5)
    assert not info.app_limited
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


class TestTls:
    TLS = ("h", "sl/1")

    @on_virtual_time
    async def test_tls_adds_one_round_trip_and_agrees_on_a_protocol(self):
        net = Net(tls=SimTlsContext(("sl/1", "h2"), names=("a.sim", "b.sim")))
        stream = await start_tls(await net.open(), SimTlsContext(("h2", "sl/1")), "b.sim")
        assert asyncio.get_running_loop().time() == pytest.approx(2 * ROUND_TRIP_S, abs=2e-3)
        assert stream.alpn == "sl/1"
        data = pattern(40_000)
        await stream.send_all(data)
        assert await read_exactly(stream, len(data)) == data
        assert stream.sent_bytes == len(data)
        assert not stream.is_readable()
        stream.close()
        await asyncio.sleep(1)
        assert net.seen[-1] is None

    @on_virtual_time
    async def test_second_connection_resumes_in_fewer_bytes_and_other_names_do_not(self):
        net = Net(tls=SimTlsContext(("h2",), names=("a.sim", "b.sim")))
        client, sessions = SimTlsContext(("h2",)), TlsSessions()

        async def exchange(name):
            stream = await start_tls(await net.open(), client, name, sessions=sessions, port=443)
            await stream.send_all(b"x")
            assert await stream.receive() == b"x"
            stream.close()
            return stream.resumed, stream.alpn

        assert [await exchange(name) for name in ("a.sim", "b.sim", "a.sim", "a.sim")] == [
            (False, "h2"), (False, "h2"), (True, "h2"), (True, "h2"),
        ]  # fmt: skip

    @on_virtual_time
    async def test_server_that_forgot_makes_a_full_handshake(self):
        client, sessions = SimTlsContext(()), TlsSessions()
        resumed = []
        for _ in range(2):
            net = Net(tls=SimTlsContext((), names=("a.sim",)))
            for _ in range(2):
                stream = await start_tls(await net.open(), client, "a.sim", sessions=sessions, port=443)
                await stream.send_all(b"x")
                await stream.receive()
                stream.close()
                resumed.append(stream.resumed)
        assert resumed == [False, True, False, True]

    @on_virtual_time
    async def test_certificate_for_another_name_is_refused(self):
        net = Net(tls=SimTlsContext(("h2",), names=("a.sim",)))
        with pytest.raises(ssl.SSLCertVerificationError):
            await start_tls(await net.open(), SimTlsContext(("h2",)), "b.sim")
        await asyncio.sleep(1)
        assert not net.seen

    @on_virtual_time
    async def test_cut_is_told_from_an_end(self):
        net = Net(tls=SimTlsContext((), names=("a.sim",)))
        whole = await start_tls(await net.open(), SimTlsContext(()), "a.sim")
        cut = await start_tls(await net.open(), SimTlsContext(()), "a.sim")
        await asyncio.sleep(1)
        net.seen[0].close()
        assert await whole.receive() == b""
        net.seen[1]._sock.close()
        with pytest.raises(ssl.SSLEOFError):
            await cut.receive()
        whole.close()
        cut.close()

    @on_virtual_time
    async def test_client_that_never_shakes_hands_is_dropped(self):
        net = Net(tls=SimTlsContext((), names=("a.sim",)))
        stream = await net.open()
        with pytest.raises(ConnectionResetError):
            await stream.receive()
        assert asyncio.get_running_loop().time() == pytest.approx(limits.TLS_HANDSHAKE_TIMEOUT_S, abs=1)
        stream.close()


@on_virtual_time
async def test_http_server_answers_one_after_another_and_dies_at_once() -> None:
    async def answer(call):
        await asyncio.sleep(1)
        return HttpReply(200, call.method.encode() + call.body, {"x-target": call.target})

    net = Net()
    server = HttpServer(net.server, 80, answer)
    server.start()
    stream = await open_tcp_of(net.phone)(Address(SERVER.host, 80))
    await stream.send_all(b"GET /a HTTP/1.1\r\n\r\nPOST /b HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi")
    answers = b""
    while not answers.endswith(b"POSThi"):
        answers += await stream.receive()
    assert answers.index(b"x-target: /a") < answers.index(b"x-target: /b")
    await stream.send_all(b"GET /c HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0.2)
    await server.kill()
    with pytest.raises(ConnectionResetError):
        await stream.receive()
    stream.close()
