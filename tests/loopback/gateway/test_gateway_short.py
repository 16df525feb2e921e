"""Short HTTP at a real gateway: its bounds, what it refuses, and what becomes of channels that are left."""

import asyncio
import contextlib
import socket
import ssl
from typing import Any

import httpx2
import pytest

from stormline.core import limits, limits_carriers, limits_platform
from stormline.core.values import Address
from stormline.engine.memory import MemoryEngine
from stormline.engine.port import Reply
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire import short
from stormline.wire.connection import Connection
from stormline.wire.states import Role

pytestmark = pytest.mark.loopback

NAME = "gateway.test"


def free_address() -> Address:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return Address(*sock.getsockname()[:2])


async def ask(client: httpx2.AsyncClient, message: short.Ask) -> short.Tell:
    response = await client.post(short.PATH, content=short.encode(message))
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store, no-transform"
    return short.decode_tell(response.content)


class Raw:
    """A connection on which a test writes HTTP by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[bytes, dict[bytes, bytes], bytes]:
        """Give status line, fields and body of the next answer."""
        async with asyncio.timeout(20):
            head = await self.reader.readuntil(b"\r\n\r\n")
            line, *fields = head.strip().split(b"\r\n")
            named = {name.lower(): value.strip() for name, _, value in (each.partition(b":") for each in fields)}
            return line, named, await self.reader.readexactly(int(named[b"content-length"]))

    async def ended(self) -> bool:
        with contextlib.suppress(OSError):
            return await asyncio.wait_for(self.reader.read(), 20) == b""
        return True


@pytest.fixture(name="door")
async def _door(gateway):
    """Start a gateway with a plain door and an echo; give what opens raw connections to it, and HTTP clients."""
    at = free_address()
    async with contextlib.AsyncExitStack() as stack:

        async def echo(message: Any) -> Reply:
            return Reply(message.data)

        class Door:
            address = at

            async def start(self, **changes: Any) -> None:
                await gateway.start(plain=(at,), **changes)
                await MemoryEngine(gateway.broker).serve("rpc.big.echo", echo)

            async def raw(self) -> Raw:
                reader, writer = await asyncio.open_connection(*at)
                raw = Raw(reader, writer)
                stack.callback(lambda: raw.writer.transport.abort())
                return raw

            async def client(self, **more: Any) -> httpx2.AsyncClient:
                client = httpx2.AsyncClient(base_url=f"http://{at}", timeout=20, trust_env=False, **more)
                return await stack.enter_async_context(client)

        yield Door()


def posted(message: short.Ask, version: str = "1.1", *fields: str) -> bytes:
    body = short.encode(message)
    head = (f"POST {short.PATH} HTTP/{version}", f"Host: {NAME}", f"Content-Length: {len(body)}", *fields, "", "")
    return "\r\n".join(head).encode() + body


class Client:
    """A client's machine over exchanges that a test makes."""

    def __init__(self, http: httpx2.AsyncClient, channel: str) -> None:
        self.http, self.channel = http, channel
        self.machine = Connection(Role.CLIENT, 0.0)
        self.out, self.into = short.Outgoing(), short.Incoming()
        self.events: list[e.Event] = []
        self.ended = False

    async def exchange(self, wait_ms: int = 0, room: int = limits_carriers.SHORT_DOWN_BYTES) -> None:
        self.out.put(self.machine.data_to_send())
        begin, data = self.out.confirmed, self.out.take(limits_carriers.SHORT_UP_BYTES)
        tell = await ask(self.http, short.Ask(self.channel, self.into.received, begin, data, wait_ms, room))
        self.out.confirm(tell.received)
        self.machine.receive_data(self.into.take(tell.begin, tell.data), 0.0)
        self.events += iter(self.machine.next_event, None)
        self.ended = tell.ended

    async def greet(self, token: str) -> m.Welcome:
        self.machine.send_hello(m.Hello((1,), "demo", token, capabilities=(m.RESUME,)))
        await self.exchange(20_000)
        event = self.events.pop(0)
        assert isinstance(event, e.Welcomed), event
        return event.welcome


@pytest.fixture(name="opened")
async def _opened(door, mint):
    """Start all, and give a client with a session."""
    await door.start()
    http = await door.client()
    client = Client(http, (await ask(http, short.Ask(""))).channel)
    await client.greet(mint("d1"))
    return client


class TestSession:
    async def test_call_and_answer_in_one_exchange(self, opened, gateway):
        call = opened.machine.send_call("rpc", "big.echo", body=b"hello")
        await opened.exchange(20_000)
        assert [(each.call_id, each.body) for each in opened.events] == [(call, b"hello")]
        assert await gateway.sessions() == 1

    async def test_question_is_held_until_there_is_news_and_a_newer_one_ends_it(self, opened, gateway):
        held = asyncio.create_task(ask(opened.http, short.Ask(opened.channel, opened.into.received, 0, b"", 60_000)))
        news = asyncio.create_task(gateway.admin.post("/v1/push", json={"device": "d1", "body": 7}))
        tell = await held
        assert tell.data
        older = asyncio.create_task(
            ask(opened.http, short.Ask(opened.channel, opened.into.received + len(tell.data), 0, b"", 60_000))
        )
        newer: asyncio.Task[short.Tell] | None = None
        async with asyncio.timeout(20):
            while not older.done():  # as soon as it is there the older one ends
                newer = newer or asyncio.create_task(
                    ask(opened.http, short.Ask(opened.channel, opened.into.received + len(tell.data), 0, b"", 60_000))
                )
                await asyncio.sleep(0.01)
                if newer.done():  # it was there first: the other one has ended it
                    older, newer = newer, older
        assert (await older).data == b""
        news.cancel()
        assert newer is not None
        newer.cancel()
        await asyncio.wait([news, newer])

    async def test_wait_that_is_over_brings_nothing(self, opened):
        tell = await ask(opened.http, short.Ask(opened.channel, opened.into.received, opened.out.confirmed, b"", 20))
        assert (tell.data, tell.ended) == (b"", False)

    async def test_answer_that_was_lost_comes_again(self, opened):
        opened.machine.send_call("rpc", "big.echo", body=b"hello")
        opened.out.put(opened.machine.data_to_send())
        data = opened.out.take(1000)
        asked = short.Ask(opened.channel, opened.into.received, opened.out.confirmed, data, 20_000)
        lost = await ask(opened.http, asked)
        again = await ask(opened.http, asked)  # the same bytes once more, and the call is made once
        assert again.data[: len(lost.data)] == lost.data
        await opened.exchange(20_000)
        assert [each.body for each in opened.events if isinstance(each, e.ReplyReceived)] == [b"hello"]

    async def test_answer_is_no_larger_than_the_room_there_is(self, opened):
        opened.machine.send_call("rpc", "big.echo", body=bytes(10_000))
        before = opened.into.received
        await opened.exchange(20_000, room=100)
        assert opened.into.received - before <= 100
        while not opened.events:
            await opened.exchange(20_000, room=4096)
        assert opened.events[0].body == bytes(10_000)

    async def test_violation_is_told_and_ends_the_channel(self, opened):
        opened.out.put(b"\xff\xff\xff\xff")
        before = opened.into.received
        await opened.exchange(20_000)
        assert opened.ended
        assert isinstance(opened.events[-1], e.Closed)
        tell = await ask(opened.http, short.Ask(opened.channel, before, 0, b"", 20_000))
        assert tell.ended  # an answer that was lost can be asked for once more

    async def test_gap_is_refused_and_the_channel_gone(self, opened):
        for status in (400, 410):
            asked = short.encode(short.Ask(opened.channel, 0, 10_000, b"x"))
            assert (await opened.http.post(short.PATH, content=asked)).status_code == status

    async def test_channel_that_nobody_asks_for_is_gone_and_its_session_waits(
        self, door, mint, gateway, monkeypatch, eventually
    ):
        await door.start()
        http = await door.client()
        client = Client(http, (await ask(http, short.Ask(""))).channel)
        welcome = await client.greet(mint("d1"))
        monkeypatch.setattr(limits_carriers, "SHORT_GONE_S", 0.1)
        asked = short.encode(short.Ask(client.channel))

        async def gone() -> bool:
            await asyncio.sleep(0.3)
            return (await http.post(short.PATH, content=asked)).status_code == 410

        await eventually(gone)
        monkeypatch.undo()
        again = Client(http, (await ask(http, short.Ask(f"{welcome.resume.partition('.')[0]}."))).channel)
        again.machine.send_hello(m.Hello((1,), "demo", mint("d1"), resume=welcome.resume, capabilities=(m.RESUME,)))
        await again.exchange(20_000)
        assert again.events[0].welcome.resumed
        assert await gateway.sessions() == 1

    async def test_channel_without_a_greeting_ends_in_time(self, door, monkeypatch):
        monkeypatch.setattr(limits, "HELLO_TIMEOUT_S", 0.1)
        await door.start()
        http = await door.client()
        client = Client(http, (await ask(http, short.Ask(""))).channel)
        await client.exchange(20_000)
        assert client.ended
        assert isinstance(client.events[-1], e.Closed)

    async def test_channels_without_a_greeting_make_room_for_others(self, door, mint, monkeypatch):
        monkeypatch.setattr(limits_carriers, "SHORT_OPENINGS_MAX", 3)
        await door.start()
        http = await door.client()
        client = Client(http, (await ask(http, short.Ask(""))).channel)
        await client.greet(mint("d1"))
        silent = [(await ask(http, short.Ask(""))).channel for _ in range(4)]
        asked = [await http.post(short.PATH, content=short.encode(short.Ask(each))) for each in silent]
        assert [each.status_code for each in asked] == [410, 200, 200, 200]
        await client.exchange()  # a session is none of them

    async def test_node_that_is_not_there_has_no_channel(self, door):
        await door.start()
        http = await door.client()
        for channel in ("n77.", "n77.0123", "n1.0123", ".", "x" * 160, "n\x00."):
            response = await http.post(short.PATH, content=short.encode(short.Ask(channel)))
            assert response.status_code in (410, 503), channel

    async def test_inside_tls_on_the_one_port(self, gateway, authority, mint):
        await gateway.start()
        context = ssl.create_default_context(cadata=authority.pem)
        mounts = {"all://": httpx2.AsyncHTTPTransport(verify=context)}
        async with httpx2.AsyncClient(base_url=f"https://{gateway.address}", mounts=mounts, trust_env=False) as http:
            extensions = {"sni_hostname": NAME}
            opened = await http.post(short.PATH, content=short.encode(short.Ask("")), extensions=extensions)
            assert short.decode_tell(opened.content).channel.startswith("n1.")


class TestHttp:
    @pytest.mark.parametrize(
        ("version", "field", "kept"),
        [
            ("1.1", "X: y", True),
            ("1.1", "Connection: close", False),
            ("1.0", "X: y", False),
            ("1.0", "Connection: keep-alive", True),
        ],
    )
    async def test_answer_has_the_version_and_the_manners_of_its_request(self, door, version, field, kept):
        await door.start()
        raw = await door.raw()
        for _ in range(2 if kept else 1):
            raw.writer.write(posted(short.Ask(""), version, field))
            line, fields, body = await raw.answer()
            assert line == f"HTTP/{version} 200 OK".encode()
            assert fields[b"connection"] == (b"keep-alive" if kept else b"close")
            assert short.decode_tell(body).channel
        if not kept:
            assert await raw.ended()

    @pytest.mark.parametrize(
        ("data", "status"),
        [
            (b"POST /else HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 404),
            (b"PUT /stormline/short HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
            (b"POST /stormline/short HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 400),
            (b"POST /stormline/short HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 400),
            (b"POST /stormline/short HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
            (b"POST /stormline/short HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 0\r\n\r\n", 400),
            (b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n", 400),
            (b"POST /stormline/short HTTP/1.1\r\nA: " + b"a" * 40_000, 431),
            (b"POST /stormline/short HTTP/1.1\r\nContent-Length: 99999\r\n\r\n" + bytes(99_999), 413),
            (b"POST /stormline/short HTTP/1.1\r\nOrigin: https://evil.example\r\nContent-Length: 1\r\n\r\n\x90", 403),
        ],
    )
    async def test_what_is_no_exchange_is_refused_and_the_connection_closed(self, door, data, status):
        await door.start()
        raw = await door.raw()
        raw.writer.write(data)
        line, _, _ = await raw.answer()
        assert line.split(b" ")[1] == str(status).encode()
        assert await raw.ended()

    async def test_pages_of_the_own_name_may_ask(self, door):
        await door.start()
        for origin in (f"http://{NAME}", f"https://{NAME}"):
            raw = await door.raw()
            raw.writer.write(posted(short.Ask(""), "1.1", f"Origin: {origin}"))
            assert (await raw.answer())[0].endswith(b"200 OK"), origin

    async def test_second_request_before_the_answer_to_the_first_is_not_served(self, door, opened_channel):
        raw = await door.raw()
        raw.writer.write(posted(short.Ask(opened_channel, wait_ms=100)) + posted(short.Ask("")))
        _, fields, _ = await raw.answer()
        assert fields[b"connection"] == b"close"
        assert await raw.ended()

    async def test_request_that_does_not_end_and_connection_at_rest_are_closed_in_time(self, door, monkeypatch):
        monkeypatch.setattr(limits_carriers, "SHORT_REQUEST_S", 0.2)
        monkeypatch.setattr(limits_carriers, "SHORT_IDLE_S", 0.2)
        await door.start()
        late = await door.raw()
        late.writer.write(posted(short.Ask(""))[:-1])
        resting = await door.raw()
        resting.writer.write(posted(short.Ask("")))
        await resting.answer()
        assert await late.ended()
        assert await resting.ended()

    async def test_connection_beyond_the_bound_is_refused(self, door, monkeypatch, eventually):
        await door.start()
        monkeypatch.setattr(limits_platform, "SESSIONS_MAX", 1)
        first = await door.raw()
        first.writer.write(b"POST ")

        async def refused() -> bool:
            later = await door.raw()
            later.writer.write(posted(short.Ask(""), "1.1", "Connection: close"))
            return await later.ended()

        await eventually(refused)

    @pytest.fixture(name="opened_channel")
    async def _opened_channel(self, door):
        await door.start()
        http = await door.client()
        return (await ask(http, short.Ask(""))).channel
