"""Cookies belong to the name in the URL, whatever address or means the request took.

The story: the client looked its cookies up by the address it had dialled; the session that was set a moment before was
missing in the next call, which had gone to another address (qiniu/happy-dns-objc #28, ChenYilong/iOSBlog #14). The
other way round a cookie kept by address goes to the next tenant of that address.
"""

import contextlib
import importlib
import ssl

import pytest

import stormline
from stormline.core.codes import Code
from stormline.testing.gateway import answering, scripted_gateway
from stormline.testing.origin import running_origin
from stormline.testing.world import GATEWAY_NAME
from stormline.wire.plan import Carrier, Endpoint

pytestmark = pytest.mark.loopback

SET = ("sid=SECRET-1; Path=/; Secure; HttpOnly", "wide=2; Domain=.a.test; Path=/")
BOTH_COOKIES = {"sid=SECRET-1", "wide=2"}


def cookies_of(headers):
    lower = {name.lower(): value for name, value in (headers.items() if isinstance(headers, dict) else headers)}
    return set(filter(None, lower.get("cookie", "").split("; ")))


class Places:
    """Everything that serves a.test and b.test.

    Attributes:
        down: names of those that hang up.
        got: by name, the cookies of each request.
    """

    def __init__(self):
        self.down, self.got = set(), {}

    def origin(self, name):
        async def answer(request, writer):
            if name in self.down:
                writer.close()
                return
            self.got.setdefault(name, []).append(cookies_of(request.headers))
            lines = "".join(f"set-cookie: {each}\r\n" for each in SET) if request.target == "/login" else ""
            moved = request.target == "/move"
            status = "307 Temporary Redirect\r\nlocation: https://b.test/next" if moved else "200 OK"
            # No connection is kept: a kept one that dies is tried again at its own address first.
            writer.write(f"HTTP/1.1 {status}\r\n{lines}connection: close\r\ncontent-length: 2\r\n\r\nok".encode())
            writer.close()

        return answer

    async def gateway(self, end, call):
        if "long" in self.down:
            end.machine.send_fail(call.call_id, Code.CALL_UNAVAILABLE, "no upstream", maybe_delivered=False)
            end.flush()
            return
        self.got.setdefault("long", []).append(cookies_of(call.headers))
        headers = tuple(("set-cookie", each) for each in SET) if call.target.endswith("/login") else ()
        end.reply(call, b"ok", headers=headers)


@pytest.fixture(name="places")
def _places():
    return Places()


@pytest.fixture(name="client")
async def _client(pki, places, planned, trust, names):
    """Make clients of one platform: a.test is reached by the long connection, at two addresses, and by DNS."""
    async with contextlib.AsyncExitStack() as stack:
        files = pki.ca.issue("shop", names=["a.test", "b.test"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        first, second, by_dns = [
            await stack.enter_async_context(running_origin(places.origin(name), ssl=context))
            for name in ("first", "second", "dns")
        ]
        clear = await stack.enter_async_context(running_origin(places.origin("clear")))
        gateway = await stack.enter_async_context(scripted_gateway(pki.gateway, answering(places.gateway)))
        at = [Endpoint(host=each.address.host, port=each.address.port, carrier=Carrier.H1) for each in (first, second)]
        long = Endpoint(
            host=gateway.address.host, port=gateway.address.port, carrier=Carrier.LONG_TLS, server_name=GATEWAY_NAME
        )
        bundle = await planned({"a.test": (long, *at), "b.test": (at[0],)})
        places.clear_port = clear.address.port

        async def make(module="stormline"):
            options = {
                "config": stormline.Config(bundle=bundle, report=False),
                "verify": trust("http/1.1"),
                "outside": names({"a.test": by_dns.address, f"a.test:{clear.address.port}": clear.address}),
            }
            if module == "stormline":
                return await stack.enter_async_context(stormline.AsyncClient(**options))
            transport = stormline.AsyncTransport(**options)
            return await stack.enter_async_context(importlib.import_module(module).AsyncClient(transport=transport))

        yield make


WAYS = ("long", "first", "second", "dns")


@pytest.mark.parametrize("module", ["stormline", "httpx2", "httpx"])
@pytest.mark.parametrize("login", WAYS)
async def test_session_set_by_one_means_goes_by_every_other(client, places, login, module):
    asking = await client(module)

    async def ask_by(way, path):
        places.down = set(WAYS) - {way}
        assert (await asking.get(f"https://a.test{path}")).text == "ok"
        return places.got[way][-1]

    assert await ask_by(login, "/login") == set()
    for way in WAYS:
        assert await ask_by(way, "/next") == BOTH_COOKIES
    assert {cookie.domain for cookie in asking.cookies.jar} == {"a.test", ".a.test"}


async def test_session_does_not_go_to_another_name_at_the_same_address(client, places):
    asking = await client()
    places.down = {"long"}
    await asking.get("https://a.test/login")
    await asking.get("https://b.test/next")
    await asking.get("https://a.test/next")
    assert places.got["first"] == [set(), set(), BOTH_COOKIES]


async def test_session_does_not_go_in_clear_text(client, places):
    asking = await client()
    await asking.get("https://a.test/login")
    for way in ("long", "clear"):  # the gateway would go on to the origin in clear text
        await asking.get(f"http://a.test:{places.clear_port}/next")
        assert places.got[way][-1] == {"wide=2"}
        places.down = {"long"}


async def test_session_belongs_to_one_client(client, places):
    one, other = await client(), await client()
    places.down = {"long"}
    await one.get("https://a.test/login")
    await other.get("https://a.test/next")
    assert places.got["first"] == [set(), set()]


@pytest.mark.parametrize("module", ["stormline", "httpx2", "httpx"])
async def test_session_stays_behind_in_a_redirect_to_another_name_at_the_same_address(client, places, module):
    asking = await client(module)
    places.down = {"long"}
    await asking.get("https://a.test/login")
    response = await asking.get("https://a.test/move", follow_redirects=True)
    assert str(response.url) == "https://b.test/next"
    assert places.got["first"] == [set(), BOTH_COOKIES, set()]
