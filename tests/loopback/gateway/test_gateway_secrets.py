"""The gateway sees every request in the clear; none of it gets into its log, whatever becomes of the request.

The story: a proxy's access log held what the app had taken care never to write down itself. The gateway has no access
log; what it says about calls, at every level, names host and outcome.
"""

import asyncio
import contextlib
import logging
import traceback

import pytest

from stormline.core.errors import CallError, RefusedError

pytestmark = pytest.mark.loopback

HOST = "api.shop.example"
TARGET = f"https://{HOST}/path?q=MARKQUERY"
HEADERS = (
    ("Authorization", "Bearer MARKAUTHORIZATION"),
    ("Proxy-Authorization", "Basic MARKPROXY"),
    ("Cookie", "sid=MARKCOOKIE"),
    ("X-Key", "MARKHEADER"),
)


def closes(reader, writer):
    return asyncio.sleep(0)


async def says_no_http(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"MARKANSWER is no HTTP\r\n\r\n")


async def says_a_bad_length(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: MARKANSWER\r\ncontent-length: MARKANSWER\r\n\r\n")


async def says_half(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: MARKANSWER\r\ncontent-length: 99\r\n\r\nMARKANSWER")
    await writer.drain()


async def answers(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: MARKANSWER\r\ncontent-length: 10\r\n\r\nMARKANSWER")
    await writer.drain()


UPSTREAMS = [closes, says_no_http, says_a_bad_length, says_half, answers]
CALLS = {
    "as it should be": {"target": TARGET, "headers": HEADERS, "body": b"MARKBODY"},
    "of a user": {"target": TARGET.replace("://", "://MARKUSER:MARKPASSWORD@"), "headers": HEADERS},
    "without host": {"target": "/path?q=MARKQUERY", "headers": HEADERS},
    "of no target": {"target": "MARKQUERY \r\n", "headers": HEADERS},
    "of a host nobody serves": {"target": "https://MARKHOST.example/?q=MARKQUERY", "headers": HEADERS},
    "with a header that breaks out": {"target": TARGET, "headers": (("X-Key", "MARKHEADER\r\nx: y"),)},
    "with a line for a name": {"target": TARGET, "headers": (("Authorization: Bearer MARKHEADER", ""),)},
    "with a name that breaks out": {"target": TARGET, "headers": (("X-Key\r\nCookie: MARKCOOKIE", "x"),)},
    "with a length that lies": {"target": TARGET, "headers": (("Content-Length", "MARKHEADER"),), "body": b"MARKBODY"},
}


@pytest.fixture(autouse=True)
def _debug(caplog):
    caplog.set_level(logging.DEBUG)


def said(caplog):
    lines = (f"{record.getMessage()} {record.exc_text or ''}" for record in caplog.records)
    # A host is no secret: it is in DNS, in SNI, and what an operator looks for.
    return "\n".join(lines).replace("MARKHOST", "host").replace("markhost", "host")


async def call(device, **fields):
    """Call; give every word of the error, if there is one."""
    try:
        await device.call("api", "POST", **fields)
    except CallError as error:
        return "".join(traceback.format_exception_only(error))
    return ""


@pytest.mark.parametrize("upstream", UPSTREAMS, ids=lambda upstream: upstream.__name__)
async def test_call_whatever_its_upstream_does_leaves_no_secret_in_the_log(gateway, raw_upstream, caplog, upstream):
    await gateway.start(api_upstreams={HOST: await raw_upstream(upstream)})
    device = await gateway.connect()
    told = await call(device, target=TARGET, headers=HEADERS, body=b"MARKBODY")
    assert "MARK" not in said(caplog) + told
    assert "opened from" in said(caplog)  # it does speak


@pytest.mark.parametrize("kind", CALLS)
async def test_call_that_is_refused_leaves_no_secret_in_the_log(gateway, raw_upstream, caplog, kind):
    await gateway.start(api_upstreams={HOST: await raw_upstream(answers)})
    device = await gateway.connect()
    told = await call(device, **CALLS[kind])
    assert "MARK" not in said(caplog) + told.replace("MARKHOST", "host").replace("markhost", "host")


async def test_upstream_that_is_down_leaves_no_secret_in_the_log(gateway, caplog):
    await gateway.start(api_upstreams={HOST: "http://127.0.0.1:1"})
    device = await gateway.connect()
    told = await call(device, **CALLS["as it should be"])
    assert "MARK" not in said(caplog) + told


async def test_device_that_breaks_the_protocol_leaves_no_secret_in_the_log(gateway, caplog):
    await gateway.start()
    device = await gateway.connect()
    with contextlib.suppress(ConnectionError):
        device.writer.write(b"\x00\x00\x00\x14\x93MARKBODYMARKBODYMARK")
        await device.writer.drain()
    for _ in range(500):
        if "broke the protocol" in said(caplog):
            break
        await asyncio.sleep(0.01)
    assert "broke the protocol" in said(caplog)
    assert "MARK" not in said(caplog)


@pytest.mark.parametrize("token", ["MARKTOKEN", "MARKTOKEN.MARKTOKEN.MARKTOKEN"])
async def test_token_that_is_refused_is_not_in_the_log(gateway, caplog, token):
    await gateway.start()
    device = await gateway.open()
    with pytest.raises(RefusedError) as caught:
        await device.hello(app="demo", token=token)
    assert "token" in said(caplog)
    assert "MARK" not in said(caplog) + "".join(traceback.format_exception_only(caught.value))
