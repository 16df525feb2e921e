"""HTTP/3 exchanges with a server of another make: no stream hurts another, and the two-phase boundary is exact."""

import asyncio

import pytest

from stormline.core import errors, limits_quic
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.quic import QuicTickets
from stormline.net.quictrust import QuicTrust, foreign_trust, roles_trust
from stormline.outbound import http3
from stormline.outbound.held import Held, Key, Origin
from stormline.testing.http2 import read, send
from stormline.testing.http3 import http3_server, lossy_path

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(120)]
PATIENCE_S = 20.0
DEADLINE_S = 100.0
"""The server shares the loop and a busy machine; what takes no time alone may take long here."""


@pytest.fixture(name="trust")
def _trust(authority):
    return roles_trust(authority.pem)


@pytest.fixture(name="server")
async def _server(authority):
    async with http3_server(authority.certificate, authority.key) as server:
        yield server


@pytest.fixture(name="dial")
async def _dial(server, trust):
    made = []

    async def dial(address=None, **more):
        more = {"timeout_s": PATIENCE_S, **more}
        connection = await http3.connect(address or server.address, "a.test", trust, **more)
        made.append(connection)
        return connection

    yield dial
    for connection in made:
        connection.close()


async def until(condition):
    """Wait for a condition; pytest's own time-out ends it."""
    while not condition():  # noqa: ASYNC110 - what is looked at tells nobody
        await asyncio.sleep(0.005)


async def get(connection, path=b"/hello", **more):
    return await read(await send(connection, path=path, **{"deadline_s": DEADLINE_S, **more}))


async def pieces(count, piece=b"x" * 5000):
    for _ in range(count):
        yield piece


async def failure(connection, path, method="GET", **more):
    with pytest.raises(errors.TransportError) as caught:
        await read(await send(connection, method, path, **more))
    return caught.value


# -- exchanges --------------------------------------------------------------------------------------------------------
async def test_answer_stages_and_reuse(dial, server):
    connection = await dial()
    stages, ended = [], []
    response = await send(connection, stages=stages, ended=ended, headers=[(b"X-A", b"b"), (b"Connection", b"x")])
    assert (response.status, response.http_version, response.reused) == (200, "HTTP/3", False)
    assert await read(response) == b"hello"
    assert (stages, ended, connection.open_streams) == (["send", "first_byte", "body"], [True], 0)
    assert connection.idle_since is not None
    assert (await send(connection, path=b"/hello")).reused
    assert server.requests == [("GET", "/"), ("GET", "/hello")]


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
async def test_bodies_of_requests_arrive_whole(dial, server, size):
    connection = await dial()
    assert await get(connection, b"/sum", method="POST", body=b"a" * size) == b"%d" % size
    assert server.bodies == [size]


async def test_body_that_comes_in_pieces_is_echoed(dial):
    assert await get(await dial(), b"/echo", method="POST", body=pieces(300)) == b"x" * 1_500_000


async def test_large_answer_is_read(dial):
    assert await get(await dial(), b"/size/3000064") == bytes(range(256)) * 11719


async def test_head_and_no_content_have_no_body(dial):
    connection = await dial()
    response = await send(connection, "HEAD", b"/size/1024")
    assert (response.headers, await read(response)) == ([(b"content-length", b"1024")], b"")
    assert (await send(connection, path=b"/none")).status == 204
    assert connection.open_streams == 0


async def test_hundred_at_once_and_more_than_the_stream_limit(dial, server):
    connection = await dial()
    bodies = await asyncio.gather(*[get(connection, b"/size/1024") for _ in range(300)])
    assert {len(body) for body in bodies} == {1024}
    assert (len(server.requests), connection.open_streams, connection.usable) == (300, 0, True)


async def test_too_many_that_wait_are_refused(dial, monkeypatch):
    monkeypatch.setattr(limits_quic, "H3_WAITING_MAX", 2)
    monkeypatch.setattr(limits_quic, "H3_STREAMS_MAX", 1)
    connection = await dial()
    tasks = [asyncio.create_task(send(connection, path=b"/hold")) for _ in range(3)]
    await until(lambda: connection.open_streams == 3)
    error = await failure(connection, b"/hello")
    assert (type(error), error.phase, error.maybe_delivered) == (errors.QueueFull, Phase.QUEUED, False)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert await get(connection) == b"hello"


@pytest.mark.timeout(240)
async def test_ten_thousand_cancelled_requests_leave_every_stream_free(dial, server):
    connection = await dial()
    on_asyncio = isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop)
    for opened in range(400, 40_400 if on_asyncio else 4_400, 400):  # the server takes 15 s for them all
        tasks = [asyncio.create_task(send(connection, path=b"/hold")) for _ in range(100)]
        await until(lambda last=opened: connection.stream.next_stream() == last)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert connection.open_streams == 0
    assert set(await asyncio.gather(*[get(connection) for _ in range(100)])) == {b"hello"}
    assert (connection.open_streams, connection.closed, connection._codec._streams) == (0, False, {})


async def test_cancelled_upload_and_unread_answer_free_their_streams(dial, server):
    connection = await dial()
    upload = asyncio.create_task(send(connection, "POST", b"/sum", body=pieces(100_000)))
    await until(lambda: server.requests)
    upload.cancel()
    await asyncio.wait([upload])
    response = await send(connection, path=b"/size/3000064")
    await response.aclose()
    await until(lambda: server.stops >= 2)
    assert (await get(connection), connection.open_streams, server.bodies) == (b"hello", 0, [0, 0])


async def test_refused_upload_gives_the_answer_and_stops(dial, server):
    connection = await dial()
    response = await send(connection, "POST", b"/refuse", body=pieces(100_000))
    assert (response.status, await read(response)) == (413, b"no")
    assert (await get(connection), connection.open_streams) == (b"hello", 0)


async def test_slow_reader_is_bounded_and_the_connection_lives(dial):
    connection = await dial()
    response = await send(connection, path=b"/size/12000000", deadline_s=DEADLINE_S)
    await until(lambda: connection.stream.paused)
    assert await connection.check(PATIENCE_S)
    came = -1
    while came != connection.stream._socket.received:  # until the server has used up its windows
        came = connection.stream._socket.received
        await asyncio.sleep(0.2)
    assert connection._unread <= limits_quic.H3_UNREAD_BYTES + limits_quic.QUIC_CONNECTION_WINDOW_BYTES
    assert len(await read(response)) == 12_000_000 // 256 * 256
    assert not connection.stream.paused
    assert await get(connection) == b"hello"


async def test_answer_that_nobody_reads_holds_up_no_other_after_its_deadline(dial, monkeypatch):
    monkeypatch.setattr(limits_quic, "H3_UNREAD_BYTES", 100_000)
    connection = await dial()
    response = await send(connection, path=b"/size/3000064", deadline_s=1.0)
    await until(lambda: connection.stream.paused)
    assert await get(connection) == b"hello"
    with pytest.raises(errors.DeadlineExceeded):
        await read(response)
    assert connection._unread == 0


async def test_body_source_that_is_too_short_fails_its_own_stream(dial):
    connection = await dial()
    with pytest.raises(errors.LocalProtocolError):
        await send(connection, "POST", b"/sum", body=pieces(1), headers=[(b"content-length", b"9000")])
    assert await get(connection) == b"hello"


async def test_deadline_frees_the_stream(dial):
    connection = await dial()
    error = await failure(connection, b"/hold", head_within_s=0.05)
    assert (type(error), error.phase, error.maybe_delivered) == (errors.DeadlineExceeded, Phase.FIRST_BYTE, True)
    assert (connection.open_streams, await get(connection)) == (0, b"hello")


# -- the two-phase rule -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "kind", "phase", "delivered"),
    [
        (b"/reject", errors.ReadError, Phase.FIRST_BYTE, False),
        (b"/reset", errors.ReadError, Phase.FIRST_BYTE, True),
        (b"/goaway", errors.ReadError, Phase.FIRST_BYTE, False),
        (b"/bye", errors.ReadError, Phase.FIRST_BYTE, True),
        (b"/short", errors.ProtocolViolation, Phase.BODY, True),
    ],
)
async def test_endings_say_whether_the_request_may_have_been_processed(dial, path, kind, phase, delivered):
    error = await failure(await dial(), path)
    assert (type(error), error.phase, error.maybe_delivered) == (kind, phase, delivered)


async def test_goaway_lets_earlier_requests_end_and_refuses_later_ones(dial, server):
    connection = await dial()
    first = asyncio.create_task(get(connection, b"/late/200"))
    await until(lambda: server.requests)
    refused = await failure(connection, b"/goaway")
    assert not refused.maybe_delivered
    assert (connection.retired, connection.served) == (True, 1)
    with pytest.raises(errors.LocalProtocolError):
        await send(connection, path=b"/hello")
    assert await first == b"hello"
    await until(lambda: connection.closed)


async def test_request_the_kernel_has_nothing_of_is_not_delivered(dial, monkeypatch):
    connection = await dial()
    socket = connection.stream._socket
    monkeypatch.setattr(type(socket), "send", lambda self, datagrams: list(datagrams))  # the kernel takes none
    task = asyncio.create_task(send(connection, "POST", b"/sum", body=b"x"))
    await until(lambda: connection.open_streams)
    await asyncio.sleep(0)
    connection.close()
    with pytest.raises(errors.WriteError) as caught:
        await task
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.SEND, False)


@pytest.mark.parametrize("closed_at_once", [False, True])
async def test_head_the_kernel_takes_late_counts_as_delivered_from_then_on(dial, closed_at_once):
    connection, gate = await dial(), asyncio.Event()

    async def body():
        await gate.wait()
        yield b"x" * 500_000

    socket = connection.stream._socket
    socket._writing = True  # as if its buffer were full
    task = asyncio.create_task(send(connection, "POST", b"/sum", body=body(), deadline_s=DEADLINE_S))
    await until(lambda: socket.held)
    exchange = connection._open[0]
    gate.set()
    await until(lambda: exchange.handed > 16_000)
    assert not exchange.delivered
    socket._writable()
    if not closed_at_once:
        assert await read(await task) == b"500000"
        return
    connection.close()
    with pytest.raises(errors.ReadError) as caught:
        await task
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.SEND, True)


async def test_request_behind_a_full_window_waits_undelivered(server, dial, monkeypatch):
    monkeypatch.setattr(limits_quic, "H3_STREAMS_MAX", 1)
    connection = await dial()
    held = asyncio.create_task(send(connection, path=b"/hold"))
    await until(lambda: server.requests)
    waiting = asyncio.create_task(send(connection, "POST", b"/sum", body=b"x"))
    await until(lambda: connection.open_streams == 2)
    connection.close()
    ends = await asyncio.gather(held, waiting, return_exceptions=True)
    assert [(type(each), each.phase, each.maybe_delivered) for each in ends] == [
        (errors.ReadError, Phase.FIRST_BYTE, True),
        (errors.WriteError, Phase.QUEUED, False),
    ]


# -- connecting -------------------------------------------------------------------------------------------------------
async def test_wrong_name_and_unknown_authority_are_refused(server, trust):
    for name, believed in (("b.test", trust), ("a.test", foreign_trust())):
        with pytest.raises(errors.TlsError) as caught:
            await http3.connect(server.address, name, believed, timeout_s=PATIENCE_S)
        assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.TLS, False)
    assert server.requests == []


async def test_server_without_http3_is_refused(authority, trust):
    async with http3_server(authority.certificate, authority.key, alpn="other") as server:
        with pytest.raises(errors.TlsError):
            await http3.connect(server.address, "a.test", trust, timeout_s=PATIENCE_S)


@pytest.mark.parametrize(("host", "retry"), [("127.0.0.1", True), ("::1", False)])
async def test_server_that_asks_back_and_one_over_ipv6(authority, trust, host, retry):
    async with http3_server(authority.certificate, authority.key, host=host, retry=retry) as server:
        connection = await http3.connect(server.address, "a.test", trust, timeout_s=PATIENCE_S)
        assert (await get(connection), connection.stream.peer) == (b"hello", server.address)
        assert await connection.migrate(PATIENCE_S)
        connection.close()


async def test_blocked_path_ends_in_time_and_undelivered(server, dial):
    async with lossy_path(server.address) as path:
        path.blocked = True
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await dial(path.address, timeout_s=0.3)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.CONNECT, False)


async def test_closed_port_fails_at_once(dial):
    async with lossy_path(Address("127.0.0.1", 9)) as path:
        address = path.address
    with pytest.raises(errors.ConnectError) as caught:
        await dial(address)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.CONNECT, False)


async def test_name_in_the_place_of_an_address_is_refused(trust):
    with pytest.raises(errors.LocalProtocolError):
        await http3.connect(Address("a.test", 443), "a.test", trust, timeout_s=1.0)


async def test_cancelled_handshake_leaves_nothing(server, dial):
    async with lossy_path(server.address) as path:
        path.blocked = True
        task = asyncio.create_task(dial(path.address))
        await until(lambda: path.lost)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# -- early data -------------------------------------------------------------------------------------------------------
async def test_second_connection_sends_reads_with_the_first_flight(dial, server):
    tickets = QuicTickets()
    assert await get(await dial(tickets=tickets)) == b"hello"
    assert len(tickets) == 1
    second = await dial(tickets=tickets, early=True)
    assert (second.stream.early, second.stream.ready, len(tickets)) == (True, False, 0)  # each is used once
    read_, write = await asyncio.gather(get(second), get(second, b"/sum", method="POST", body=b"xyz"))
    assert (read_, write) == (b"hello", b"3")
    assert (server.early, second.stream.early_accepted, second.stream.resumed) == (1, True, True)


async def test_request_that_came_too_early_is_sent_again(dial, server):
    tickets = QuicTickets()
    await get(await dial(tickets=tickets))
    second = await dial(tickets=tickets, early=True)
    assert await get(second, b"/425") == b"hello"
    assert server.requests[1:] == [("GET", "/425")] * 2
    assert (server.early, second.open_streams) == (1, 0)


async def test_early_data_that_is_refused_goes_out_again(authority, trust):
    async with http3_server(authority.certificate, authority.key, early_data=False) as server:
        tickets = QuicTickets()
        for early in (False, True):
            connection = await http3.connect(
                server.address, "a.test", trust, timeout_s=PATIENCE_S, tickets=tickets, early=early
            )
            assert await get(connection) == b"hello"
            connection.close()
        assert (connection.stream.early_accepted, server.early, len(server.requests)) == (False, 0, 2)


async def test_early_data_into_a_blocked_path_ends_with_the_handshakes_bound(dial, server, monkeypatch):
    monkeypatch.setattr(limits_quic, "H3_HANDSHAKE_S", 0.3)
    tickets = QuicTickets()
    async with lossy_path(server.address) as path:
        await get(await dial(path.address, tickets=tickets))
        path.blocked = True
        second = await dial(path.address, tickets=tickets, early=True)
        ends = await asyncio.gather(get(second), get(second, b"/sum", method="POST", body=b"x"), return_exceptions=True)
    assert [(type(each), each.maybe_delivered) for each in ends] == [
        (errors.ReadError, True),
        (errors.WriteError, False),
    ]


def test_tickets_are_bounded_and_forget_what_is_old(monkeypatch):
    monkeypatch.setattr(limits_quic, "QUIC_TICKET_PLACES_MAX", 2)
    trust, tickets = QuicTrust(b""), QuicTickets()

    class Ticket:
        is_valid = True

    for place in ("a", "b", "c"):
        for _ in range(limits_quic.QUIC_TICKETS_PER_PLACE_MAX + 1):
            tickets.put((place, 443, trust), Ticket())
    assert len(tickets) == 2 * limits_quic.QUIC_TICKETS_PER_PLACE_MAX
    assert tickets.get(("a", 443, trust)) is None
    Ticket.is_valid = False
    assert (tickets.get(("b", 443, trust)), tickets.get(("c", 443, QuicTrust(b"")))) == (None, None)
    tickets.clear()
    assert (len(tickets), "secret" in repr(tickets)) == (0, False)


# -- held by a pool ---------------------------------------------------------------------------------------------------
async def test_pool_can_hold_it_as_it_holds_http2(dial, server):
    connection = await dial()
    held = Held(Key(Origin("https", "a.test", 443), None, None), None)
    held.shared = connection
    assert (held.live, held.answered, held.peer, held.tcp_info()) == (True, False, server.address, None)
    assert (held.room(None), held.room(5), held.resting_since) == (100, 100, connection.idle_since)
    assert connection.streams_max == 100
    held.fit(lambda host, window: window // 2)
    held.doubt()
    assert not held.live
    held.probe()
    await until(lambda: not held.silent)
    held.distrust()
    assert (held.mute, await get(connection), held.mute, held.live) == (True, b"hello", False, True)
    assert (held.answered, connection.begun, connection.laden) == (True, 1, False)
    task = asyncio.create_task(get(connection, b"/late/400"))
    await until(lambda: connection.quiet_since is not None)
    assert (held.room(3), held.resting_since) == (1, None)
    assert await task == b"hello"


# -- paths ------------------------------------------------------------------------------------------------------------
async def test_losses_on_the_way_are_mended(dial, server):
    async with lossy_path(server.address, seed=3) as path:
        connection = await dial(path.address)
        path.loss = 0.05
        bodies = await asyncio.gather(
            get(connection, b"/size/200192"), get(connection, b"/sum", method="POST", body=b"y" * 200_000)
        )
        assert (len(bodies[0]), bodies[1], path.lost > 0) == (200_192, b"200000", True)


async def test_check_tells_a_living_path_from_a_dead_one(dial, server):
    async with lossy_path(server.address) as path:
        connection = await dial(path.address)
        assert (await connection.check(PATIENCE_S), await connection.fence(PATIENCE_S)) == (True, True)
        await asyncio.sleep(0.05)
        path.blocked = True
        assert (await connection.check(0.2), await connection.fence(0.1)) == (False, False)
        path.blocked = False
        assert await connection.check(PATIENCE_S)


async def test_migration_goes_on_from_another_address(dial, server):
    connection = await dial()
    under_way = asyncio.create_task(get(connection, b"/late/300"))
    await until(lambda: server.requests)
    before = connection.stream.local
    assert await connection.migrate(PATIENCE_S)
    assert connection.stream.local != before
    assert (await under_way, await get(connection), len(server.peers)) == (b"hello", b"hello", 2)


async def test_migration_that_is_not_answered_closes_the_connection(dial, server):
    async with lossy_path(server.address) as path:
        connection = await dial(path.address)
        task = asyncio.create_task(send(connection, path=b"/hold"))
        await until(lambda: server.requests)
        path.blocked = True
        assert not await connection.migrate(0.2)
        with pytest.raises(errors.ReadError):
            await task
    assert (connection.closed, await connection.migrate(0.1)) == (True, False)


async def test_silence_ends_an_idle_connection(dial, monkeypatch):
    monkeypatch.setattr(limits_quic, "QUIC_IDLE_S", 0.3)
    connection, news = await dial(), []
    connection.on_news = lambda: news.append(connection.closed)
    await until(lambda: connection.closed)
    assert isinstance(connection.stream.cause, TimeoutError)
    assert news[-1]


async def test_peers_end_is_told(dial, server):
    connection = await dial()
    await get(connection)
    server.connections[0].close(error_code=0x100)
    await until(lambda: connection.closed)
    assert "H3_NO_ERROR" in http3._why(connection.stream.cause)


async def test_retired_connection_closes_after_its_last_request(dial, server):
    connection = await dial()
    task = asyncio.create_task(get(connection, b"/late/50"))
    await until(lambda: server.requests)
    connection.retire()
    assert (connection.closed, await task) == (False, b"hello")
    await until(lambda: server.closed)
    assert (connection.closed, server.closed) == (True, [0x100])
