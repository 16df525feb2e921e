"""Racing connect against real sockets: who wins, what the error says, and that nothing stays open."""

import asyncio
import socket
import ssl

import pytest

from stormline.core import errors
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.resolve import Resolver
from stormline.net.trust import roles_context
from stormline.outbound.dial import Dialer, Pace

pytestmark = pytest.mark.loopback


async def _hold(reader, writer):
    await reader.read()


class Names:
    """A resolver that knows what it is told."""

    def __init__(self, **known):
        self.known = known

    def doubt(self, host):
        """Nothing to doubt."""

    async def resolve(self, host, port):
        answer = self.known.get(host, ())
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(name="dialer")
def _dialer(authority):
    return Dialer(Resolver(), roles_context(authority.pem, ["http/1.1"]), stagger_s=0.05)


async def _dial(dialer, *addresses, tls=False, timeout_s=10.0, host="a.test", **more):
    stream = await dialer.dial(host, 1, tls=tls, timeout_s=timeout_s, addresses=addresses, **more)
    stream.close()
    return stream.peer


async def test_dial_refused_and_silent_addresses_lose(dialer, serve, refused, silent):
    good = await serve(_hold)
    notes = []
    assert await _dial(dialer, silent, refused, good, on_note=notes.append) == good
    assert any(str(refused) in note and "refused" in note for note in notes)
    assert any(f"connected to {good}" in note for note in notes)


async def test_dial_by_name_resolves_and_tells_stages(dialer, serve):
    address = await serve(_hold)
    stages = []
    stream = await dialer.dial("localhost", address.port, tls=False, timeout_s=10, on_stage=stages.append)
    assert (stream.peer, stages) == (address, ["resolve", "connect"])
    stream.close()


async def test_dial_ip_direct_verifies_by_name(dialer, serve, authority):
    good = await serve(_hold, authority.server)
    stages = []
    assert await _dial(dialer, good, tls=True, on_stage=stages.append) == good
    assert stages == ["connect", "tls"]


async def test_dial_wrong_name_is_a_tls_error(dialer, serve, authority):
    good = await serve(_hold, authority.server)
    for options in ({"host": "b.test"}, {"host": "127.0.0.1"}, {"server_name": "b.test"}):
        with pytest.raises(errors.TlsError, match=f"{good}: certificate refused") as caught:
            await _dial(dialer, good, tls=True, **options)
        assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.TLS, False)


async def test_dial_server_name_wins_over_host(dialer, serve, authority):
    good = await serve(_hold, authority.server)
    assert await _dial(dialer, good, tls=True, host="b.test", server_name="a.test") == good


async def test_dial_tcp_winner_without_tls_loses(dialer, serve, authority):
    async def portal(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://portal/\r\n\r\n")

    portal_address, mute = await serve(portal), await serve(_hold)
    good = await serve(_hold, authority.server)
    assert await _dial(dialer, portal_address, mute, good, tls=True) == good


async def test_dial_untrusted_certificate_is_a_tls_error(serve, authority):
    dialer = Dialer(Resolver(), ssl.create_default_context())
    with pytest.raises(errors.TlsError):
        await _dial(dialer, await serve(_hold, authority.server), tls=True)


async def test_dial_all_refused_lists_every_address(dialer, refused):
    other = Address("127.0.0.2", refused.port)
    with pytest.raises(errors.ConnectError) as caught:
        await _dial(dialer, refused, other)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.CONNECT, False)
    assert all(f"{address}: connection refused" in str(caught.value) for address in (refused, other))


async def test_dial_one_refused_one_without_tls_is_a_tls_error_with_both(dialer, refused, serve):
    async def leave(reader, writer):
        await reader.read(1)

    closing = await serve(leave)
    with pytest.raises(errors.TlsError) as caught:
        await _dial(dialer, refused, closing, tls=True)
    assert str(refused) in str(caught.value)
    assert str(closing) in str(caught.value)


async def test_dial_silent_address_ends_at_the_deadline_in_connect(dialer, silent, refused):
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await _dial(dialer, refused, silent, timeout_s=0.2)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.CONNECT, False)
    assert f"{refused}: connection refused" in str(caught.value)
    assert f"{silent}: no answer yet" in str(caught.value)


async def test_dial_mute_tls_ends_at_the_deadline_in_tls(dialer, serve):
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await _dial(dialer, await serve(_hold), tls=True, timeout_s=0.2)
    assert caught.value.phase is Phase.TLS


async def test_dial_names_that_do_not_resolve_are_resolve_errors(authority):
    names = Names(slow=TimeoutError(), broken=OSError("resolver broken"))
    dialer = Dialer(names, roles_context(authority.pem, []))
    for host in ("slow", "broken", "unknown"):
        with pytest.raises(errors.ResolveError) as caught:
            await dialer.dial(host, 1, tls=False, timeout_s=5)
        assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.RESOLVE, False)


async def test_dial_no_or_named_addresses_are_refused(dialer):
    with pytest.raises(errors.ResolveError):
        await _dial(dialer)
    with pytest.raises(errors.LocalProtocolError):
        await _dial(dialer, Address("a.test", 1))


async def test_dial_failing_callback_reaches_the_caller(dialer, serve, authority):
    def explode(stage):
        raise ZeroDivisionError(stage)

    for tls in (False, True):
        with pytest.raises(ZeroDivisionError):
            await _dial(dialer, await serve(_hold, authority.server), tls=tls, on_stage=explode)

    def explode_in_tls(stage):
        if stage == "tls":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await _dial(dialer, await serve(_hold, authority.server), tls=True, on_stage=explode_in_tls)


async def test_dial_cancelled_at_every_turn_leaves_nothing(dialer, serve, authority, silent):
    good = await serve(_hold, authority.server)
    for turns in range(60):
        task = asyncio.create_task(_dial(dialer, silent, good, good._replace(host="127.0.0.1"), tls=True))
        for _ in range(turns):
            await asyncio.sleep(0 if turns % 2 else 0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    left = [task for task in asyncio.all_tasks() if task.get_name().startswith("connect ")]
    assert left == []


class Paced:
    """An advice that gives a pace and keeps what it is told."""

    def __init__(self, pace):
        self.given, self.told = pace, []

    def order(self, host, addresses, left):
        return addresses

    def pace(self, host):
        return self.given

    def connected(self, host, address, *, connect_s, tls_s):
        self.told.append(("connected", address, connect_s >= 0, tls_s is not None and tls_s >= 0))

    def failed(self, host, address, *, tried_s):
        self.told.append(("failed", address, tried_s >= 0))

    def outrun(self, host, address):
        self.told.append(("outrun", address))


def _paced(authority, **pace):
    advice = Paced(Pace(**pace))
    return Dialer(Resolver(), roles_context(authority.pem, ["http/1.1"]), advice=advice), advice.told


async def test_dial_silent_address_that_comes_back_is_reached_by_a_knock(authority):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        sock.setblocking(False)
        address = Address(*sock.getsockname())
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(sock.getsockname())
        dialer, told = _paced(authority, repeat_s=0.25)
        notes = []

        def drain(note):
            notes.append(note)
            if "knocking again" in note:
                sock.accept()[0].close()

        assert await _dial(dialer, address, on_note=drain) == address
        for filler in fillers:
            filler.close()
    assert notes[-1].startswith(f"connected to {address}, 0 failed before, ")
    assert [each[0] for each in told] == ["connected"]


async def test_dial_mute_tls_is_knocked_at_and_the_next_connection_wins(authority, serve):
    connections = 0

    async def carry(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    good = await serve(_hold, authority.server)

    async def first_mute(reader, writer):
        nonlocal connections
        connections += 1
        if connections == 1:
            await reader.read()
            return
        far_reader, far_writer = await asyncio.open_connection(*good)
        try:
            await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
        finally:
            far_writer.close()

    address = await serve(first_mute)
    dialer, told = _paced(authority, repeat_s=0.25)
    assert await _dial(dialer, address, tls=True) == address
    assert (connections, told) == (2, [("connected", address, True, True)])


async def test_dial_silence_beyond_the_pace_goes_on_until_the_deadline(authority, silent, refused):
    dialer, told = _paced(authority, connect_s=0.1)
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await _dial(dialer, silent, refused, timeout_s=0.3)
    assert f"{silent}: no connection within 0.1 s" in str(caught.value)
    assert f"{refused}: connection refused" in str(caught.value)
    assert told == [("failed", silent, True), ("failed", refused, True)]


async def test_dial_tls_beyond_the_pace_tries_the_next(authority, serve):
    mute, good = await serve(_hold), await serve(_hold, authority.server)
    dialer, told = _paced(authority, tls_s=0.1, stagger_s=60.0)
    assert await _dial(dialer, mute, good, tls=True) == good
    assert told == [("failed", mute, True), ("connected", good, True, True)]


async def test_dial_tls_to_both_at_once_with_cancellations_leaves_nothing(authority, serve):
    addresses = [await serve(_hold, authority.server) for _ in range(3)]
    dialer = Dialer(Resolver(), roles_context(authority.pem, ["http/1.1"]), stagger_s=0.0)
    for turns in range(60):
        tasks = [asyncio.create_task(_dial(dialer, *addresses, tls=True)) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[turns % 3].cancel()
        peers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(peer in addresses or isinstance(peer, asyncio.CancelledError) for peer in peers)
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("connect ")] == []
