"""The two-phase rule as a contract: what the server may have got is not sent again unless that is safe.

The story: a server reads a request and closes without a word; the library sends it again by itself, and the order is
placed twice (square/okhttp #2394; aiohttp repeats GET and PUT on a kept connection without telling, and offers no way
out, aio-libs/aiohttp #10790). Here every method meets every way of dying, on every carrier and means, and the server
keeps the books. What must come out:

- before the first byte was handed to the kernel, or where the peer says that it touched nothing (GOAWAY below the
  request, REFUSED_STREAM): any method is sent again;
- afterwards only reads are, and writes that carry an `Idempotency-Key`, with the same key. All other writes arrive once
  over all means together, and the error says that they may have been processed.
"""

import asyncio
import contextlib
import ctypes
import importlib
import socket
import ssl
import struct
from collections import Counter, defaultdict

import h2.events as h2e
import pytest
from h2.errors import ErrorCodes

import stormline
from stormline.client.lanes import Lane
from stormline.core import limits
from stormline.core.values import Address
from stormline.testing.gateway import answering, scripted_gateway
from stormline.testing.http2 import Peer
from stormline.testing.world import GATEWAY_NAME
from stormline.wire import events as e
from stormline.wire.plan import Carrier, Endpoint

pytestmark = pytest.mark.loopback

METHODS = ("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE")
READS = ("GET", "HEAD")
CARRIERS = ("h1", "h1-tls", "h2-tls")
BODY = bytes(1_000_000)
"""Too large for one window of HTTP/2 and for the socket buffers between two ends: half of it can be read."""
KEY = {"Idempotency-Key": "order-1"}
IN_DOUBT = ("read whole", "half read", "reset unread")
UNTOUCHED = ("goaway", "refused stream")


class Books:
    """What servers saw. Shared by all servers of a test, so that it counts over all means.

    Attributes:
        arrived: by method, requests that reached a server at all.
        acted: by method, requests a server had whole, did not turn away, and so could act on.
        keys: by method, the idempotency key of each that arrived.
        means: by method, names of the servers it arrived at.
    """

    def __init__(self):
        self.arrived, self.acted = Counter(), Counter()
        self.keys, self.means = defaultdict(list), defaultdict(list)

    def arrive(self, method, key, means):
        self.arrived[method] += 1
        self.keys[method].append(key)
        self.means[method].append(means)


class Server:
    """An origin that plays its script on the first request of each method to `/act`, and answers everything else.

    Attributes:
        script: how it dies; None: it answers.
        always: it dies in every request to `/act`, not only in the first of each method.
    """

    def __init__(self, books, carrier, name, context=None):
        self.books, self.script, self.always = books, None, False
        self._carrier, self._name, self._context = carrier, name, context
        self._died, self._writers, self._tasks = set(), [], set()

    async def __aenter__(self):
        context = self._context if self._carrier.endswith("tls") else None
        if context is not None:
            context.set_alpn_protocols(["h2"] if self._carrier == "h2-tls" else ["http/1.1"])
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=context)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def url(self, path="/act"):
        scheme = "http" if self._carrier == "h1" else "https"
        return f"{scheme}://a.test:{self.address.port}{path}"

    def _connected(self, reader, writer):
        self._writers.append(writer)
        serve = self._serve_h2 if self._carrier == "h2-tls" else self._serve_h1
        task = asyncio.ensure_future(serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _script_for(self, method, path):
        if path != "/act" or self.script is None or (method in self._died and not self.always):
            return None
        self._died.add(method)
        return self.script

    # -- the connection that dies as a request leaves ---------------------------------------------------------------
    def cut(self, how):
        """End the newest connection at once, in the caller's own step: with FIN, or with RST (`disconnect`, tcp(7))."""
        sock = self._writers[-1].get_extra_info("socket")
        if how == "fin":
            sock.shutdown(socket.SHUT_RDWR)
        else:
            unspecified = ctypes.create_string_buffer(struct.pack("H14x", socket.AF_UNSPEC))
            assert ctypes.CDLL(None).connect(sock.fileno(), unspecified, 16) == 0

    # -- HTTP/1.1 -----------------------------------------------------------------------------------------------------
    async def _serve_h1(self, reader, writer):
        with contextlib.suppress(OSError, EOFError, ssl.SSLError):
            while not writer.is_closing():
                await self._one_h1(reader, writer)
        writer.close()

    async def _one_h1(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
        length = int(fields.get("content-length", "0"))
        if path == "/act":
            self.books.arrive(method, fields.get("idempotency-key"), self._name)
        script = self._script_for(method, path)
        if script == "reset unread":
            reset(writer)
            return
        if script == "half read":
            await reader.readexactly(length // 2)
            writer.close()
            return
        await reader.readexactly(length)
        if path == "/act":
            self.books.acted[method] += 1
        if script == "read whole":
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    # -- HTTP/2 -------------------------------------------------------------------------------------------------------
    async def _serve_h2(self, reader, writer):
        peer = Peer(reader, writer)
        with contextlib.suppress(OSError, EOFError, ssl.SSLError):
            await peer.serve(self._play_h2)
        writer.close()

    async def _play_h2(self, peer):
        number = 0
        while not peer.writer.is_closing():
            number += 1
            await self._one_h2(peer, await peer.wait(h2e.RequestReceived, number))

    async def _one_h2(self, peer, request):
        fields = {bytes(name).decode(): bytes(value).decode() for name, value in request.headers}
        method, path, stream_id = fields[":method"], fields[":path"], request.stream_id
        if path == "/act":
            self.books.arrive(method, fields.get("idempotency-key"), self._name)
        script = self._script_for(method, path)
        if script == "reset unread":
            reset(peer.writer)
        elif script == "goaway":
            peer.h2.close_connection(last_stream_id=max(0, stream_id - 2))
            await peer.flush()
        elif script == "refused stream":
            peer.h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            await peer.flush()
        elif script == "half read":
            peer.credits = False
            while stream_id not in peer.bodies:
                await peer.wait(h2e.DataReceived, len(peer.all(h2e.DataReceived)) + 1)
            peer.writer.close()
        else:
            while all(each.stream_id != stream_id for each in peer.all(h2e.StreamEnded)):
                await peer.wait(h2e.StreamEnded, len(peer.all(h2e.StreamEnded)) + 1)
            if path == "/act":
                self.books.acted[method] += 1
            if script == "read whole":
                peer.writer.close()
            else:
                await peer.answer(stream_id)


def reset(writer):
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.fixture(name="books")
def _books():
    return Books()


@pytest.fixture(name="server")
async def _server(pki, books):
    """Make servers for a.test: `await server(carrier, name)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(carrier, name="origin"):
            files = pki.ca.issue("origin", names=["a.test"])
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.certificate, files.key)
            return await stack.enter_async_context(Server(books, carrier, name, context))

        yield make


@pytest.fixture(name="client")
async def _client(trust, names):
    """Make clients: `await client(server, module)`; closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(there, module="stormline", **config):
            options = {"verify": trust(), "outside": names({"a.test": there.address})}
            config = stormline.Config(report=False, **config)
            if module == "stormline":
                made = stormline.AsyncClient(config=config, **options)
            else:
                transport = stormline.AsyncTransport(config=config, **options)
                made = importlib.import_module(module).AsyncClient(transport=transport)
            return await stack.enter_async_context(made)

        yield make


async def outcome(client, method, url, *, keyed=False, content=b"order", **options):
    """Ask; give `ok`, or what the error says of the request: `in doubt` or `not sent`."""
    try:
        response = await client.request(method, url, content=content, headers=KEY if keyed else None, **options)
    except stormline.errors.TransportError as error:
        if error.maybe_delivered and error.phase not in ("send", "first_byte"):
            return f"in doubt although in {error.phase}"
        return "in doubt" if error.maybe_delivered else "not sent"
    assert response.status_code == 200
    return "ok"


def may_go_again(method, keyed):
    return keyed or method in READS


# -- a kept connection dies in the request: the origin itself ---------------------------------------------------------
@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
@pytest.mark.parametrize("script", IN_DOUBT)
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_request_the_server_may_have_got_arrives_once_unless_it_is_safe(
    server, client, books, carrier, script, keyed
):
    there = await server(carrier)
    asking = await client(there)
    content = BODY if script == "half read" else b"order"
    got = {}
    for method in METHODS:
        there.script = None
        await asking.get(there.url("/warm"))
        there.script = script
        got[method] = await outcome(asking, method, there.url(), keyed=keyed, content=content)
    assert got == {method: "ok" if may_go_again(method, keyed) else "in doubt" for method in METHODS}
    assert books.arrived == {method: 2 if may_go_again(method, keyed) else 1 for method in METHODS}
    assert all(books.acted[method] <= 1 for method in METHODS if not may_go_again(method, keyed))
    if keyed:
        assert books.keys == {method: ["order-1"] * 2 for method in METHODS}


@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
@pytest.mark.parametrize("script", UNTOUCHED)
async def test_request_the_server_says_it_has_not_touched_goes_again_whatever_it_is(
    server, client, books, script, keyed
):
    there = await server("h2-tls")
    asking = await client(there)
    got = {}
    for method in METHODS:
        there.script = None
        await asking.get(there.url("/warm"))
        there.script = script
        got[method] = await outcome(asking, method, there.url(), keyed=keyed)
    assert got == dict.fromkeys(METHODS, "ok")
    assert books.acted == dict.fromkeys(METHODS, 1)
    assert books.arrived == dict.fromkeys(METHODS, 2)


@pytest.mark.parametrize("script", UNTOUCHED)
async def test_streamed_body_that_was_read_from_is_not_sent_again_and_the_error_says_it_was_not_processed(
    server, client, books, script
):
    async def pieces():
        yield b"order"
        await asyncio.sleep(60)

    there = await server("h2-tls")
    asking = await client(there)
    await asking.get(there.url("/warm"))
    there.script = script
    assert await outcome(asking, "POST", there.url(), content=pieces()) == "not sent"
    assert (books.arrived["POST"], books.acted["POST"]) == (1, 0)


@pytest.mark.parametrize("script", UNTOUCHED)
async def test_request_turned_away_on_a_fresh_connection_goes_again_too(server, client, books, script):
    """A server that restarts says GOAWAY to whoever comes, also to the first request; nothing of it was processed."""
    there = await server("h2-tls")
    there.script = script
    got = {}
    for method in METHODS:
        got[method] = await outcome(await client(there), method, there.url())
    assert got == dict.fromkeys(METHODS, "ok")
    assert books.acted == dict.fromkeys(METHODS, 1)


# -- the connection ends just as the request leaves -------------------------------------------------------------------
@pytest.fixture(name="as_it_leaves")
def _as_it_leaves(monkeypatch):
    """Have something done between the choice of the connection and the first byte, once per arming."""
    armed = []
    stage = Lane.stage

    def stage_and_act(self, name):
        stage(self, name)
        if name == "send" and armed:
            armed.pop()()

    monkeypatch.setattr(Lane, "stage", stage_and_act)
    return armed.append


@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_connection_that_ends_as_the_request_leaves_puts_it_in_doubt(
    server, client, books, as_it_leaves, carrier, keyed
):
    """The kernel takes the bytes, as it does after a FIN; whether the server read them nobody can say."""
    there = await server(carrier)
    asking = await client(there)
    got = {}
    for method in METHODS:
        await asking.get(there.url("/warm"))
        as_it_leaves(lambda: there.cut("fin"))
        got[method] = await outcome(asking, method, there.url(), keyed=keyed)
    assert got == {method: "ok" if may_go_again(method, keyed) else "in doubt" for method in METHODS}
    assert books.arrived == {method: 1 for method in METHODS if may_go_again(method, keyed)}


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_connection_reset_as_the_request_leaves_takes_no_byte_so_it_goes_again_whatever_it_is(
    server, client, books, as_it_leaves, carrier
):
    there = await server(carrier)
    asking = await client(there)
    got = {}
    for method in METHODS:
        await asking.get(there.url("/warm"))
        as_it_leaves(lambda: there.cut("rst"))
        got[method] = await outcome(asking, method, there.url())
    assert got == dict.fromkeys(METHODS, "ok")
    assert books.acted == books.arrived == dict.fromkeys(METHODS, 1)


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_connections_closed_at_any_moment_never_double_a_write_nor_lie_about_it(server, client, books, carrier):
    """The race itself, many times: the server ends its kept connection in about the moment in which a POST leaves."""
    there = await server(carrier)
    asking = await client(there)
    told = Counter()
    for number in range(120):
        await asking.get(there.url("/warm"))
        before = books.arrived["POST"]
        cutting = asyncio.get_running_loop().call_later(number % 12 * 0.0001, there.cut, "fin")
        result = await outcome(asking, "POST", there.url())
        cutting.cancel()
        arrived = books.arrived["POST"] - before
        assert arrived <= 1
        assert arrived == {"ok": 1, "not sent": 0}.get(result, arrived)
        told[result] += 1
    assert told["ok"] > 0


# -- over all means ---------------------------------------------------------------------------------------------------
def numbered(there):
    return Endpoint(host=there.address.host, port=there.address.port, carrier=Carrier.H1)


def by_gateway(gateway):
    return Endpoint(
        host=gateway.address.host, port=gateway.address.port, carrier=Carrier.LONG_TLS, server_name=GATEWAY_NAME
    )


def booking(books, script):
    """Give a gateway's script that enters each call in the books, and dies in the first of each method."""

    async def handle(end, call):
        headers = {name.lower(): value for name, value in call.headers}
        first = call.method not in books.means
        books.arrive(call.method, headers.get("idempotency-key"), "long")
        if script == "closed" and first:
            books.acted[call.method] += 1
            end.abort()
        elif script == "certainly not" and first:
            end.machine.send_fail(call.call_id, stormline.core.codes.Code.CALL_UNAVAILABLE, "", maybe_delivered=False)
            end.flush()
        else:
            books.acted[call.method] += 1
            end.reply(call)

    return answering(handle)


@pytest.fixture(name="everywhere")
async def _everywhere(pki, server, trust, names, planned):
    """Set up all means: `await everywhere(carrier, gateway script or None)`; gives what makes a new client that knows
    them all, and the two origins. (A client remembers that its long connection failed; a new one does not.)"""
    async with contextlib.AsyncExitStack() as stack:

        async def make(carrier, gateway_script=None):
            first, second = await server(carrier, "ip-direct"), await server(carrier, "direct")
            places = (numbered(first),)
            if gateway_script is not None:
                gateway = await stack.enter_async_context(scripted_gateway(pki.gateway, gateway_script))
                places = (by_gateway(gateway), *places)
            options = {
                "config": stormline.Config(bundle=await planned({"a.test": places}), report=False),
                "verify": trust(),
                "outside": names({"a.test": second.address}),
            }
            return lambda: stormline.AsyncClient(**options), first, second

        yield make


async def outcomes(new_client, *, keyed=False, content=b"order"):
    """Ask with each method, each with a client of its own."""
    got = {}
    for method in METHODS:
        async with new_client() as client:
            got[method] = await outcome(client, method, "https://a.test/act", keyed=keyed, content=content)
    return got


@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
@pytest.mark.parametrize("script", IN_DOUBT)
@pytest.mark.parametrize("carrier", ["h1-tls", "h2-tls"])
async def test_write_lost_at_an_address_from_dispatch_is_not_tried_at_one_from_dns(
    everywhere, books, carrier, script, keyed
):
    new_client, first, _ = await everywhere(carrier)
    first.script = script
    content = BODY if script == "half read" else b"order"
    got = await outcomes(new_client, keyed=keyed, content=content)
    assert got == {method: "ok" if may_go_again(method, keyed) else "in doubt" for method in METHODS}
    for method in METHODS:
        if may_go_again(method, keyed):
            assert set(books.means[method]) <= {"ip-direct", "direct"}
            assert books.arrived[method] == 2
        else:
            assert books.means[method] == ["ip-direct"]


@pytest.mark.parametrize("script", UNTOUCHED)
async def test_write_turned_away_at_an_address_from_dispatch_is_made_elsewhere_once(everywhere, books, script):
    new_client, first, _ = await everywhere("h2-tls")
    first.script = script
    got = await outcomes(new_client)
    assert got == dict.fromkeys(METHODS, "ok")
    assert books.acted == dict.fromkeys(METHODS, 1)


@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
@pytest.mark.parametrize("carrier", ["h1-tls", "h2-tls"])
async def test_write_lost_on_the_long_connection_is_tried_by_no_other_means(everywhere, books, carrier, keyed):
    new_client, _, _ = await everywhere(carrier, booking(books, "closed"))
    got = await outcomes(new_client, keyed=keyed)
    assert got == {method: "ok" if may_go_again(method, keyed) else "in doubt" for method in METHODS}
    for method in METHODS:
        assert books.means[method][0] == "long"
        assert books.arrived[method] == (2 if may_go_again(method, keyed) else 1)
        assert set(books.keys[method]) == ({"order-1"} if keyed else {None})


async def test_write_the_gateway_certainly_did_not_pass_on_is_made_elsewhere_once(everywhere, books):
    new_client, _, _ = await everywhere("h1-tls", booking(books, "certainly not"))
    got = await outcomes(new_client)
    assert got == dict.fromkeys(METHODS, "ok")
    assert books.acted == dict.fromkeys(METHODS, 1)


@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
@pytest.mark.parametrize("carrier", ["h1-tls", "h2-tls"])
async def test_all_means_dying_end_in_one_error_that_keeps_the_doubt(everywhere, books, carrier, keyed):
    async def dies(end):
        await end.welcome()
        call = await end.next(e.CallReceived)
        headers = {name.lower(): value for name, value in call.headers}
        books.arrive(call.method, headers.get("idempotency-key"), "long")
        end.abort()

    new_client, first, second = await everywhere(carrier, dies)
    for there in (first, second):
        there.script, there.always = "read whole", True
    got = await outcomes(new_client, keyed=keyed)
    assert got == dict.fromkeys(METHODS, "in doubt")
    for method in METHODS:
        if may_go_again(method, keyed):
            assert (
                2 <= books.arrived[method] <= 2 * limits.ATTEMPTS_MAX
            )  # each once more where its connection was only stale
        else:
            assert books.arrived[method] == 1
        assert set(books.keys[method]) == ({"order-1"} if keyed else {None})


async def test_read_reaches_the_last_means_although_kept_connections_died_at_all_others(
    server, planned, names, trust, books
):
    """After a change of network every kept connection is dead, and the addresses behind them; DNS knows a good one."""
    first, second, by_dns = [await server("h1-tls", name) for name in ("first", "second", "direct")]
    bundle = await planned({"a.test": (numbered(first), numbered(second))})
    config = stormline.Config(bundle=bundle, report=False)
    outside = names({"a.test": by_dns.address})
    async with stormline.AsyncClient(config=config, verify=trust(), outside=outside) as client:
        first.script, first.always = "read whole", True
        assert await outcome(client, "GET", "https://a.test/act") == "ok"
        await client.get("https://a.test/warm")  # now one connection is kept at each address
        second.script, second.always = "read whole", True
        assert await outcome(client, "GET", "https://a.test/act") == "ok"
    assert books.means["GET"][-1] == "direct"


# -- every client, and the caller's own word --------------------------------------------------------------------------
@pytest.mark.parametrize("module", ["httpx2", "httpx"])
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_error_under_httpx_says_how_far_the_write_came(server, client, books, module, carrier):
    there = await server(carrier)
    asking = await client(there, module)
    await asking.get(there.url("/warm"))
    there.script = "read whole"
    with pytest.raises(importlib.import_module(module).ReadError) as caught:
        await asking.post(there.url(), content=b"order")
    assert (caught.value.phase, caught.value.maybe_delivered) == ("first_byte", True)
    assert isinstance(caught.value, stormline.errors.ReadError)
    there.script = None
    assert (await asking.get(there.url())).status_code == 200
    assert books.arrived == {"POST": 1, "GET": 1}


@pytest.mark.parametrize("module", ["stormline", "httpx2", "httpx"])
async def test_synchronous_clients_keep_the_rule(server, books, module, trust):
    from stormline.client.background import BACKGROUND

    there = await server("h1")
    url = there.url().replace("a.test", "127.0.0.1")

    def use():
        if module == "stormline":
            client = stormline.Client(config=stormline.Config(report=False))
        else:
            client = importlib.import_module(module).Client(transport=stormline.Transport())
        with client:
            client.get(url.replace("/act", "/warm"))
            there.script = "read whole"
            for method in METHODS:
                try:
                    client.request(method, url, content=b"order")
                    got[method] = "ok"
                except stormline.errors.ReadError as error:
                    got[method] = "in doubt" if error.maybe_delivered else "not sent"
                client.get(url.replace("/act", "/warm"))

    got = {}
    await asyncio.to_thread(use)
    BACKGROUND.stop()
    assert got == {method: "ok" if method in READS else "in doubt" for method in METHODS}
    assert books.arrived == {method: 2 if method in READS else 1 for method in METHODS}


@pytest.mark.parametrize("script", IN_DOUBT)
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_caller_can_forbid_that_reads_go_again(server, client, books, carrier, script):
    """A second read on a metered network may be dearer than a failure; `stormline.retries` false sends it once."""
    there = await server(carrier)
    asking = await client(there)
    got = {}
    for method in READS:
        there.script = None
        await asking.get(there.url("/warm"))
        there.script = script
        content = BODY if script == "half read" else None
        extensions = {"stormline.retries": False}
        got[method] = await outcome(asking, method, there.url(), content=content, extensions=extensions)
    assert got == dict.fromkeys(READS, "in doubt")
    assert books.arrived == dict.fromkeys(READS, 1)
