"""What a caller would not like to read in a log never gets into one, nor into errors, reprs, stories or reports.

The story: an app logs at INFO, and its journal fills with API keys: httpx prints whole URLs, and a scrubber that sits
in the app's own logger does not see the library's (encode/httpx #2760; jo20ow/Obsyd PR 97: 10,959 keys in three days;
mozilla-ai/clawbolt #1082). Here every place that can hold a secret holds a mark, requests fail in every phase, the root
logger stands at DEBUG, and no mark may be found.
"""

import asyncio
import base64
import contextlib
import importlib
import itertools
import logging
import ssl
import traceback

import h2.events as h2e
import msgspec
import pytest
from h2.errors import ErrorCodes

import stormline
from stormline.client.runtime import Runtime
from stormline.core.codes import Code
from stormline.core.values import Address, Secret
from stormline.testing.gateway import answering
from stormline.testing.http2 import Peer
from stormline.testing.origin import plain
from stormline.testing.world import BOTH, wait_until
from stormline.wire import events as e

pytestmark = pytest.mark.loopback

MARKS = {
    "user": "MARKUSER",
    "password": "MARKPASSWORD",
    "query": "MARKQUERY",
    "fragment": "MARKFRAGMENT",
    "authorization": "MARKAUTHORIZATION",
    "cookie": "MARKCOOKIE",
    "header": "MARKHEADER",
    "body": "MARKBODY",
    "token": "MARKTOKEN",
    "answer header": "MARKANSWERHEADER",
    "answer body": "MARKANSWERBODY",
    "push": "MARKPUSH",
    "parameters": "MARKPARAMETERS",
}
BASIC = base64.b64encode(f"{MARKS['user']}:{MARKS['password']}".encode()).decode()


def found(text):
    return sorted({name for name, mark in MARKS.items() if mark in text} | ({"basic"} if BASIC in text else set()))


def chain(error):
    """Everything a traceback would print of an error's own words, its causes' too."""
    while error is not None:
        yield f"{error!r} {error} {getattr(error, '__notes__', '')}"
        error = error.__cause__ or error.__context__


async def ask(client, base):
    url = base.replace("http://", f"http://{MARKS['user']}:{MARKS['password']}@")
    return await client.post(
        f"{url}?q={MARKS['query']}#{MARKS['fragment']}",
        content=MARKS["body"].encode(),
        headers={"X-Key": MARKS["header"], "Cookie": MARKS["cookie"]},
    )


def all_that_was_said(caplog):
    lines = caplog.records
    assert lines
    return "\n".join(f"{record.getMessage()} {record.exc_text or ''}" for record in lines)


async def test_success_tells_no_secret(world, all_logs, records):
    async def handle(end, call):
        if call.gate == "rpc":
            end.reply(call, b'"' + MARKS["answer body"].encode() + b'"', status=0)
            return
        end.machine.send_push("m1", MARKS["push"].encode())
        end.reply(call, MARKS["answer body"].encode(), headers=(("x-answer", MARKS["answer header"]),))

    here = await world(answering(handle))
    seen = []
    async with here.client(report=True, token=Secret(MARKS["token"])) as client, client.channel() as channel:
        await channel.wait_connected()
        response = await ask(client, f"http://{BOTH}/path")
        await channel.call("orders.create", MARKS["parameters"])
        seen.append(await anext(aiter(channel.pushes())))
        runtime = client._storm.runtime()
        trace = response.extensions["stormline"]
        objects = [
            seen, trace, trace.record, runtime, runtime.config, runtime.scheduling, runtime.scheduling.plan,
            runtime.longline, channel, client._storm, here.gateway.ends[0].hello, here.bundle,
        ]  # fmt: skip
        said = all_that_was_said(all_logs)
    assert response.status_code == 200
    assert f"http://***@{BOTH}/path?q=***" in said  # httpx2's own line
    assert found(said) == []
    assert found(" ".join(map(repr, objects))) == []
    assert found(msgspec.json.encode(records).decode()) == []
    assert found(str(trace.timeline.story)) == []
    assert records[0].path == "/path"


FAILURES = ["refused", "lost", "failed", "mute", "half"]


@pytest.mark.parametrize("failure", FAILURES)
async def test_failure_tells_no_secret(world, all_logs, records, failure):
    async def script(end):
        if failure == "refused":
            await end.refuse(Code.TOKEN_INVALID, "the token is not genuine")
            return
        await end.welcome()
        call = await end.next(e.CallReceived)
        if failure == "lost":
            end.abort()
        elif failure == "failed":
            end.machine.send_fail(call.call_id, Code.CALL_UPSTREAM, "no answer", maybe_delivered=True)
        elif failure == "half":
            end.machine.send_reply(call.call_id, 200, body=MARKS["answer body"].encode(), more=True)
            end.flush()
            end.abort()
        end.flush()
        await end.stay()

    here = await world(script)
    config = {"report": True, "token": Secret(MARKS["token"]), "disabled": frozenset({"direct"})}
    async with here.client(**config, read_timeout_s=0.2, deadline_s=2) as client:
        with pytest.raises(stormline.errors.TransportError) as caught:
            await ask(client, f"http://{BOTH}/path")
        await wait_until(lambda: records)
        said = all_that_was_said(all_logs)
    assert found(said) == []
    assert found(" ".join(chain(caught.value))) == []
    assert found(msgspec.json.encode(records).decode()) == []


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Bad", "a\r\nb: MARKHEADER"),
        ("X-Key: MARKHEADER\n", "x"),
        ("Authorization: Bearer MARKHEADER", ""),
        ("Content-Length", "MARKHEADER"),
        ("Host", "MARKHEADER\0"),
    ],
)
async def test_request_that_cannot_be_sent_tells_no_secret(origin, all_logs, header, value):
    there = await origin()
    async with stormline.AsyncClient() as client:
        with pytest.raises(stormline.errors.LocalProtocolError) as caught:
            await client.get(there.url("/?q=MARKQUERY"), headers={header: value})
    texts = itertools.chain(chain(caught.value), (record.getMessage() for record in all_logs.records))
    assert found(" ".join(texts)) == []


async def test_direct_failure_tells_no_secret(origin, all_logs):
    async def drop(request, writer):
        writer.close()

    there = await origin(drop)
    async with stormline.AsyncClient() as client:
        with pytest.raises(stormline.errors.ReadError) as caught:
            await ask(client, there.url("/path"))
    assert found(" ".join(chain(caught.value))) == []


def test_config_and_bundle_mask_their_tokens(pki):
    from stormline.testing.world import CLOSED_ADDRESS, bundle_for

    bundle = bundle_for(pki, CLOSED_ADDRESS, token=MARKS["token"])
    config = stormline.Config(bundle=bundle, token=Secret(MARKS["token"]))
    assert found(f"{config!r} {config} {bundle!r} {bundle}") == []


# -- the origin itself, in every phase --------------------------------------------------------------------------------
MARKS["proxy"] = "MARKPROXY"
HEADERS = {
    "Authorization": f"Bearer {MARKS['authorization']}",
    "Proxy-Authorization": f"Basic {MARKS['proxy']}",
    "Cookie": f"sid={MARKS['cookie']}",
    "X-Key": MARKS["header"],
}


class Failing:
    """An origin whose paths fail, each in its own way. Its answers hold marks too."""

    def __init__(self, context):
        self._context, self._writers, self._tasks = context, [], set()

    async def __aenter__(self):
        self._servers = {
            "tcp": await asyncio.start_server(self._connected, "127.0.0.1", 0),
            "tls": await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._context),
        }
        return self

    async def __aexit__(self, *exc):
        for server in self._servers.values():
            server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers.values():
            await server.wait_closed()

    def port(self, kind="tcp"):
        return self._servers[kind].sockets[0].getsockname()[1]

    def _connected(self, reader, writer):
        self._writers.append(writer)
        tls = writer.get_extra_info("ssl_object")
        serve = self._serve_h2 if tls is not None and tls.selected_alpn_protocol() == "h2" else self._serve_h1
        task = asyncio.ensure_future(serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_h1(self, reader, writer):
        with contextlib.suppress(OSError, EOFError, ssl.SSLError):
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].partition(b"?")[0]
            await self._answer_h1(path.decode(), reader, writer)
            await writer.drain()
        writer.close()

    async def _answer_h1(self, path, reader, writer):
        secret = MARKS["answer header"].encode()
        head = b"HTTP/1.1 200 OK\r\nset-cookie: s=" + secret + b"\r\n"
        if path == "/upload":
            await asyncio.sleep(60)
        elif path in ("/silence", "/silent-body"):
            if path == "/silent-body":
                writer.write(head + b"content-length: 99\r\n\r\n" + MARKS["answer body"].encode())
            await reader.read()
        elif path == "/no-http":
            writer.write(b"SSH-2.0 " + secret + b"\r\n\r\n")
        elif path == "/bad-header":
            writer.write(head + b"x: " + secret + b"\0\r\n\r\n")
        elif path == "/bad-length":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: " + secret + b"\r\n\r\n")
        elif path == "/bad-chunk":
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + secret + b"\r\n")
        elif path == "/half":
            writer.write(head + b"content-length: 99\r\n\r\n" + MARKS["answer body"].encode())
        elif path == "/not-gzip":
            writer.write(plain(MARKS["answer body"].encode(), content_encoding="gzip"))
        elif path == "/redirect":
            writer.write(
                plain(b"", status="302 Found", location=f"http://u:{MARKS['password']}@nowhere.test/?q=MARKQUERY")
            )

    async def _serve_h2(self, reader, writer):
        with contextlib.suppress(OSError, EOFError, ssl.SSLError):
            await Peer(reader, writer).serve(self._play_h2)
        writer.close()

    async def _play_h2(self, peer):
        number = 0
        while True:
            number += 1
            request = await peer.wait(h2e.RequestReceived, number)
            fields = {bytes(name): bytes(value) for name, value in request.headers}
            path, stream = fields[b":path"].partition(b"?")[0], request.stream_id
            if path == b"/reset":
                peer.h2.reset_stream(stream, ErrorCodes.INTERNAL_ERROR)
            elif path == b"/goaway":
                peer.h2.close_connection(1, additional_data=MARKS["answer body"].encode())
            elif path == b"/malformed":
                peer.h2.config.validate_outbound_headers = False
                peer.h2.send_headers(stream, [(b":status", MARKS["answer header"].encode())])
            elif path == b"/half":
                peer.h2.send_headers(stream, [(b":status", b"200"), (b"set-cookie", MARKS["answer header"].encode())])
                peer.h2.send_data(stream, MARKS["answer body"].encode())
                peer.h2.reset_stream(stream, ErrorCodes.CANCEL)
            elif path == b"/no-http":
                peer.writer.write(MARKS["answer body"].encode() * 10)
            await peer.flush()


@pytest.fixture(name="failing")
async def _failing(pki):
    files = pki.ca.issue("local", names=["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with Failing(context) as there:
        yield there


PHASES = {
    "dns": "http://nowhere.test/path",
    "connect": "http://127.0.0.1:1/path",
    "tls": "https://127.0.0.1:{tls}/path",
    "no tls": "https://localhost:{tcp}/silence",
    **{each: f"http://localhost:{{tcp}}/{each}" for each in (
        "upload", "drop", "silence", "no-http", "bad-header", "bad-length", "bad-chunk", "half", "silent-body",
        "not-gzip", "redirect",
    )},
    **{f"h2 {each}": f"https://localhost:{{tls}}/{each}" for each in (
        "silence", "reset", "goaway", "malformed", "half", "no-http",
    )},
}  # fmt: skip


@pytest.fixture(name="module", params=["stormline", "httpx"])
def _module(request):
    """Name the client; with the filter on its log that ours brings along, and others are told to add."""
    if request.param == "stormline":
        yield request.param
        return
    mask = stormline.MaskUrls()
    logging.getLogger(request.param).addFilter(mask)
    yield request.param
    logging.getLogger(request.param).removeFilter(mask)


@pytest.mark.parametrize("phase", PHASES)
async def test_request_that_fails_in_any_phase_tells_no_secret(
    failing, names, trust, world, records, traces, all_logs, module, phase
):
    asyncio.get_running_loop().set_debug(True)  # asyncio's own lines too
    here = await world(lambda end: asyncio.sleep(0))
    options = {
        "config": stormline.Config(bundle=here.bundle, token=Secret(MARKS["token"]), disabled=frozenset({"long"})),
        "verify": trust(),
        "outside": names({"localhost": Address("127.0.0.1", failing.port("tls" if "h2" in phase else "tcp"))}),
    }
    if module == "stormline":
        client = stormline.AsyncClient(**options)
    else:
        client = importlib.import_module(module).AsyncClient(transport=stormline.AsyncTransport(**options))
    url = PHASES[phase].format(tcp=failing.port(), tls=failing.port("tls"))
    content = MARKS["body"].encode() * (1_000_000 if phase == "upload" else 1)
    errors_of = importlib.import_module("httpx2" if module == "stormline" else module).HTTPError
    async with client:
        client.timeout = 0.2
        for credentials in ("", f"{MARKS['user']}:{MARKS['password']}@"):
            with pytest.raises(errors_of) as caught:
                await client.post(
                    f"{url.replace('://', f'://{credentials}')}?q={MARKS['query']}#{MARKS['fragment']}",
                    content=content,
                    headers=HEADERS,
                    follow_redirects=True,
                )
            error = caught.value
            told = "".join([*chain(error), *traceback.format_exception(error)])
            assert found(told) == [], told
        await wait_until(lambda: records)
        objects = [transport_of(client), transport_of(client).runtime(), transport_of(client).runtime().config]
    said = all_that_was_said(all_logs)
    assert found(said) == [], [line for line in said.splitlines() if found(line)]
    assert found(" ".join(map(repr, [*objects, *traces]))) == []
    assert found(str([trace.timeline.story for trace in traces])) == []
    assert found(msgspec.json.encode(records).decode()) == []
    assert len(records) == len(traces) >= 2


@pytest.fixture(name="traces")
def _traces(monkeypatch):
    """Catch the trace of every call, also of those that fail."""
    caught, make = [], Runtime.trace

    def make_and_keep(self, **fields):
        caught.append(make(self, **fields))
        return caught[-1]

    monkeypatch.setattr(Runtime, "trace", make_and_keep)
    return caught


def transport_of(client):
    return getattr(client, "_storm", None) or client._transport


@pytest.mark.parametrize("module", ["httpx2", "httpx"])
async def test_answer_s_line_of_httpx_keeps_host_and_path_only(origin, all_logs, module):
    there = await origin()
    logger = logging.getLogger(module)
    mask = stormline.MaskUrls()
    logger.addFilter(mask)
    try:
        async with importlib.import_module(module).AsyncClient(transport=stormline.AsyncTransport()) as client:
            await client.get(there.url("/path?q=MARKQUERY").replace("://", "://u:MARKPASSWORD@"), headers=HEADERS)
    finally:
        logger.removeFilter(mask)
    lines = [record.getMessage() for record in all_logs.records if record.name == module]
    address = f"127.0.0.1:{there.address.port}"
    assert lines == [f'HTTP Request: GET http://***@{address}/path?q=*** "HTTP/1.1 200 OK"']
