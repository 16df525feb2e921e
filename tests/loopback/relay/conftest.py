"""A real relay and gateway on loopback, together and apart, before a real origin over TLS."""

import asyncio
import contextlib
import ssl
from dataclasses import dataclass, field

import httpx2
import pytest

from stormline.assembly.authority import ensure_authority
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.trust import roles_context
from stormline.relay import keys, service
from stormline.relay.forward import GatewayUrl
from stormline.testing.world import wait_until
from stormline.web.server import HttpServer
from stormline.wire import bhttp, ohttp

RNG = SystemRng()
CLOCK = SystemClock()


@dataclass
class Origin:
    """An origin over TLS that remembers what it was asked."""

    seen: list = field(default_factory=list)
    bodies: list = field(default_factory=list)
    aborted: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope, receive, send):
        self.seen.append(scope)
        body = b""
        if scope["path"] != "/early":
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.aborted += 1
                    return
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
        self.bodies.append(body)
        headers = [(b"content-type", b"text/plain"), (b"X-Mixed", b"Case"), (b"connection", b"x-hop"), (b"x-hop", b"1"),
                   (b"proxy-status", b"a-liar; error=dns_error")]  # fmt: skip
        status = 302 if scope["path"] == "/moved" else 404 if scope["path"] == "/none" else 200
        if status == 302:
            headers.append((b"location", b"https://127.0.0.1/secret"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if scope["path"] == "/stream":
            for number in range(3):
                await send({"type": "http.response.body", "body": b"piece %d;" % number, "more_body": True})
                await self.go_on.wait()
        if scope["path"] == "/large":
            for _ in range(40):
                await send({"type": "http.response.body", "body": bytes(50_000), "more_body": True})
        if scope["path"] == "/breaks":
            await send({"type": "http.response.body", "body": b"only half", "more_body": True})
            await self.go_on.wait()
            raise ConnectionResetError
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else b"hello " + body})


@dataclass
class Stage:
    """Everything that runs."""

    origin: Origin
    origin_port: int
    relay: str
    tls: str
    config: ohttp.KeyConfig
    trust: ssl.SSLContext
    http: httpx2.AsyncClient

    def head(self, method=b"GET", path=b"/", headers=(), host=b"a.test"):
        return bhttp.RequestHead(method, b"https", host + b":%d" % self.origin_port, path, tuple(headers))

    async def ask(self, head, content=b"", *, at=None):
        """Send a whole sealed request; give the answer inside."""
        sealed, key = self.seal(head, content)
        answer = await self.http.post(at or self.relay, content=sealed, headers={"content-type": ohttp.REQUEST_TYPE})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == ohttp.RESPONSE_TYPE
        return bhttp.decode_response(ohttp.open_response(key, answer.content))

    def seal(self, head, content=b""):
        inner = bhttp.encode_request(bhttp.Request(*head, content))
        return ohttp.seal_request(self.config, inner, entropy=RNG.token_bytes(32))

    async def ask_chunked(self, head, pieces=(), *, at=None, breaks_off=None):
        """Send a request in chunks; give the events inside the answer."""
        sealer = ohttp.RequestSealer(self.config, entropy=RNG.token_bytes(32))

        async def content():
            yield sealer.chunk(bhttp.request_head(head))
            for piece in pieces:
                yield sealer.chunk(bhttp.chunk(piece))
            if breaks_off is None:
                yield sealer.chunk(bhttp.end(), last=True)
            else:
                await wait_until(breaks_off)

        headers = {"content-type": ohttp.CHUNKED_REQUEST_TYPE, "incremental": "?1"}
        events, decoder, opener = [], bhttp.Decoder(), None
        async with self.http.stream("POST", at or self.relay, content=content(), headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            opener = ohttp.ResponseOpener(sealer.response)
            async for data in answer.aiter_raw():
                events += decoder.feed(b"".join(opener.feed(data)))
                yield events
            events += decoder.feed(b"".join(opener.feed(b"", last=True)), last=True)
        yield events

    async def told(self, head, pieces=()):
        async for events in self.ask_chunked(head, pieces):
            found = events
        content = b"".join(event.content for event in found if isinstance(event, bhttp.Data))
        return bhttp.Response(*found[0], content)


@contextlib.asynccontextmanager
async def running(config):
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(service.run(config, clock=CLOCK, rng=RNG, started=started.set_result, stop=stop))
    try:
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        yield started.result()
    finally:
        stop.set()
        await task


@pytest.fixture(name="relaying")
def _relaying():
    """Runs a relay while a block runs; gives its addresses."""
    return running


@pytest.fixture(name="stage")
async def _stage(request, tmp_path):
    authority = ensure_authority(tmp_path, clock=CLOCK, rng=RNG)
    leaf = authority.issue("origin", names=("a.test", "relay.test"), ips=("127.0.0.1",))
    trust = roles_context(authority.certificate.read_bytes(), [])
    origin = Origin()
    server = HttpServer(origin, host="127.0.0.1", port=0, what="origin", tls=leaf)
    await server.start()
    key = keys.write_key(tmp_path / "relay.key", 7)
    port = server.address.port
    origins = {f"a.test:{port}": (f"127.0.0.1:{port}",), "b.test": ("127.0.0.1:1",), f"localhost:{port}": (),
               f"wrong.test:{port}": (f"127.0.0.1:{port}",)}  # fmt: skip
    gateway = service.RelayConfig(
        ports=(0,), tls_port=0, tls=leaf, keys=(tmp_path / "relay.key",), origins=origins, trust=trust
    )
    async with contextlib.AsyncExitStack() as stack:
        clear, tls = await stack.enter_async_context(running(gateway))
        at = f"http://{clear}/"
        if getattr(request, "param", "together") == "apart":
            url = GatewayUrl("relay.test", tls.port, service.GATEWAY_PATH, (tls,))
            (front,) = await stack.enter_async_context(running(service.RelayConfig(gateway=url, trust=trust)))
            at = f"http://{front}/"
        http = await stack.enter_async_context(httpx2.AsyncClient(verify=trust, timeout=20))
        yield Stage(origin, port, at, f"https://127.0.0.1:{tls.port}", key.config, trust, http)
        origin.go_on.set()
    await server.stop()
