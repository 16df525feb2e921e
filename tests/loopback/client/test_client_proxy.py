"""Clients behind proxies: each environment that people and host tools make, and all means through real proxies."""

import asyncio
import contextlib
import importlib
import socket
import ssl

import httpx
import httpx2
import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.client.outside import Outside
from stormline.core import errors
from stormline.core.values import Address
from stormline.outbound import proxy_rules
from stormline.testing import proxies
from stormline.testing.gateway import answering
from stormline.testing.world import HOST

pytestmark = pytest.mark.loopback

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
MANY = ",".join([f"h{number}.example.test" for number in range(1800)] + [f"10.{n}.0.0/16" for n in range(256)])
NO_PROXY = {
    "v6-network": ("fd00:1:2::/64", False),
    "v6-brackets": ("[::1]", False),
    "v6": ("::1", False),
    "v4-network": ("10.0.0.0/8, localhost", False),
    "star": (".a.test, ,*", True),
    "dot": ("a.test.", False),
    "many": (MANY, False),
    "many-and-us": (MANY + ",127.0.0.0/8", True),
    "us": ("127.0.0.1", True),
    "us-by-port-of-another": ("127.0.0.1:1", False),
    "broken": ("[::1,127.0.0.1/,a/b,:,//,%", False),
    "empty": ("", False),
}
"""What stands in the variable, and whether 127.0.0.1 is exempt by it."""


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch):
    for name in (*VARIABLES, *map(str.upper, VARIABLES), "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    yield
    BACKGROUND.stop()


@pytest.fixture(name="refused")
def _refused():
    """Give an address where nobody listens: bound, so that nobody else takes it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield Address(*sock.getsockname())


@pytest.fixture(scope="module", name="started")
def _started(tmp_path_factory):
    """Run the real proxies; skip where one is wanted that is not installed."""
    runs = {"tinyproxy": proxies.running_tinyproxy, "microsocks": proxies.running_microsocks}
    with contextlib.ExitStack() as stack:
        running = {
            program: stack.enter_context(
                run(tmp_path_factory.mktemp(program), userinfo="someone:p%61ss@", password="pass")
            )
            for program, run in runs.items()
            if proxies.installed(program)
        }

        def get(program):
            if program not in running:
                pytest.skip(f"{program} is not installed")
            return running[program]

        yield get


@pytest.fixture(name="real", params=["tinyproxy", "microsocks"])
def _real(request, started):
    return started(request.param)


@pytest.fixture(name="tls_origin")
def _tls_origin(origin, pki):
    """Make HTTPS origins that are `localhost`; and what trusts them."""

    async def make(*arguments):
        files = pki.ca.issue("origin", names=["localhost"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        return await origin(*arguments, ssl=context), ssl.create_default_context(cadata=pki.ca.ca_pem)

    return make


class TestEnvironment:
    @pytest.mark.parametrize("request_method", [False, True], ids=["", "cgi"])
    @pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
    @pytest.mark.parametrize("no_proxy", NO_PROXY)
    async def test_client_works_in_every_environment(self, origin, monkeypatch, no_proxy, variable, request_method):
        """The proxy is one that answers by itself, so that who answers tells which way a request went."""
        proxy, there = await origin(_as_proxy), await origin()
        text, exempt = NO_PROXY[no_proxy]
        monkeypatch.setenv(variable, f"http://u:p%40ss@{proxy.address}")
        monkeypatch.setenv("NO_PROXY", text)
        if request_method:
            monkeypatch.setenv("REQUEST_METHOD", "GET")
        proxied = not exempt and not (request_method and variable == "HTTP_PROXY")
        for module in (httpx, httpx2):
            async with module.AsyncClient(transport=stormline.AsyncTransport()) as client:
                assert (await client.get(there.url("/x"))).text == ("proxy" if proxied else "ok")
        async with stormline.AsyncClient() as client:
            assert (await client.get(there.url("/x"))).text == ("proxy" if proxied else "ok")
        with stormline.Client() as client:
            answer = await asyncio.to_thread(client.get, there.url("/x"))
            assert answer.text == ("proxy" if proxied else "ok")
        for module in (httpx, httpx2):
            with module.Client(transport=stormline.Transport()) as client:
                answer = await asyncio.to_thread(client.get, there.url("/x"))
                assert answer.text == ("proxy" if proxied else "ok")
        for request in proxy.requests:
            assert request.target == there.url("/x")
            assert request.headers["proxy-authorization"] == "Basic dTpwQHNz"
            assert request.headers["host"] == str(there.address)
        assert all("proxy-authorization" not in request.headers for request in there.requests)
        assert len(proxy.requests) == (6 if proxied else 0)

    @pytest.mark.parametrize(
        "url",
        ["socks4://u:hush@127.0.0.1:1", "http3://u:hush@127.0.0.1:1", "http://u:hush@[::1", "hush://", "http://:x"],
    )
    async def test_unusable_proxy_is_skipped_with_one_warning_without_credentials(
        self, origin, monkeypatch, caplog, url
    ):
        proxy_rules._remembered.cache_clear()
        monkeypatch.setenv("ALL_PROXY", url)
        there = await origin()
        for _ in range(2):
            async with stormline.AsyncClient() as client:
                assert (await client.get(there.url())).text == "ok"
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert "ALL_PROXY" in warning
        assert "u:hush" not in caplog.text

    async def test_environment_is_ignored_where_the_app_says_so(self, origin, monkeypatch, refused):
        monkeypatch.setenv("ALL_PROXY", f"http://{refused}")
        there = await origin()
        for options in ({"config": stormline.Config(trust_env=False)}, {"trust_env": False}):
            async with stormline.AsyncClient(**options) as client:
                assert (await client.get(there.url())).text == "ok"
            with stormline.Client(**options) as client:
                assert (await asyncio.to_thread(client.get, there.url())).text == "ok"
        async with stormline.AsyncClient() as client:
            with pytest.raises(httpx2.ConnectError, match=f"proxy http://{refused}"):
                await client.get(there.url())

    async def test_explicit_proxy_goes_before_the_environment_and_no_proxy(self, origin, monkeypatch, refused):
        monkeypatch.setenv("ALL_PROXY", f"http://{refused}")
        monkeypatch.setenv("NO_PROXY", "*")
        proxy, there = await origin(_as_proxy), await origin()
        async with stormline.AsyncClient(proxy=f"http://{proxy.address}") as client:
            assert (await client.get(there.url())).text == "proxy"

    async def test_simulated_machine_has_an_environment_of_its_own(self, origin, monkeypatch, refused):
        monkeypatch.setenv("ALL_PROXY", f"http://{refused}")
        there = await origin()
        async with stormline.AsyncClient(outside=Outside(environ={})) as client:
            assert (await client.get(there.url())).text == "ok"


class TestHttpsProxy:
    async def test_client_trusts_it_as_the_system_does(self, started, tls_origin, pki, monkeypatch, tmp_path):
        real = started("tinyproxy")
        files = pki.ca.issue("proxy", names=["proxy.test"], ips=["127.0.0.1"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        roots = tmp_path / "roots.pem"
        roots.write_text(pki.ca.ca_pem)
        there, trusted = await tls_origin()
        url = f"https://localhost:{there.address.port}/x"
        async with proxies.relaying(real.address, context) as front:
            config = stormline.Config(proxy=f"https://{real.userinfo}{front}")
            async with stormline.AsyncClient(config=config, verify=trusted) as client:
                with pytest.raises(httpx2.ProxyError, match="certificate refused"):
                    await client.get(url)
            assert not there.requests
            monkeypatch.setenv("SSL_CERT_FILE", str(roots))
            async with stormline.AsyncClient(config=config, verify=trusted) as client:
                assert (await client.get(url)).text == "ok"


class TestOptions:
    async def test_proxy_option_may_be_what_httpx2_and_httpx_take(self, origin):
        proxy, there = await origin(_as_proxy), await origin()
        url = f"http://u:p%40ss@{proxy.address}"
        given = [url, httpx2.URL(url), httpx2.Proxy(url), httpx.Proxy(f"http://{proxy.address}", auth=("u", "p@ss"))]
        for each in given:
            async with stormline.AsyncClient(proxy=each) as client:
                assert (await client.get(there.url())).text == "proxy"
            with stormline.Client(proxy=each) as client:
                assert (await asyncio.to_thread(client.get, there.url())).text == "proxy"
        assert {request.headers["proxy-authorization"] for request in proxy.requests} == {"Basic dTpwQHNz"}

    def test_proxy_option_that_cannot_be_used_is_refused_without_its_credentials(self):
        for proxy in (
            "ftp://u:hush@a", "http://u:hush@[", "http3://u:hush@a", "", object(), 5,
            httpx2.Proxy("http://u:hush@a", headers={"a": "b"}),
            httpx2.Proxy("http://u:hush@a", ssl_context=ssl.create_default_context()),
        ):  # fmt: skip
            for kind in (stormline.AsyncClient, stormline.Client):
                with pytest.raises(errors.ConfigError, match="proxy") as caught:
                    kind(proxy=proxy)
                assert "hush" not in str(caught.value)
        with pytest.raises(errors.ConfigError, match="proxy"):
            stormline.Config(proxy=httpx2.URL("http://a"))

    def test_config_shows_no_credentials(self):
        config = stormline.Config(proxy="http://someone:hush@proxy.test")
        assert "hush" not in f"{config!r} {config.proxy} {config.proxy!r}"
        assert "someone" not in repr(config)


class TestRealProxies:
    @pytest.mark.parametrize("http2", [True, False])
    async def test_https_goes_through_a_tunnel_and_the_connection_is_kept(self, real, tls_origin, http2):
        there, trust = await tls_origin()
        config = stormline.Config(proxy=real.url, http2=http2)
        for module in (httpx, httpx2):
            transport = stormline.AsyncTransport(config=config, verify=trust)
            async with module.AsyncClient(transport=transport) as client:
                for _ in range(3):
                    answer = await client.post(f"https://localhost:{there.address.port}/x", content=bytes(100_000))
                    assert answer.text == "ok"
        assert there.connections == 2
        assert {request.target for request in there.requests} == {"/x"}
        assert all("proxy-authorization" not in request.headers for request in there.requests)
        story = [line for _, line in answer.extensions["stormline"].timeline.story]
        assert not any("pass" in line for line in story)

    async def test_story_tells_of_the_tunnel(self, real, tls_origin):
        there, trust = await tls_origin()
        async with stormline.AsyncClient(config=stormline.Config(proxy=real.url), verify=trust) as client:
            answer = await client.get(f"https://localhost:{there.address.port}/x")
        story = [line for _, line in answer.extensions["stormline"].timeline.story]
        assert any(f"tunnel through proxy {real.scheme}://{real.address} to localhost" in line for line in story)
        assert {"connect", "tls"} <= answer.extensions["stormline"].record.stages_ms.keys()

    async def test_http_goes_through(self, real, origin):
        there = await origin()
        async with stormline.AsyncClient(proxy=real.url) as client:
            for _ in range(3):
                assert (await client.post(there.url("/a?b=c", host="localhost"), content=b"abc")).text == "ok"
        assert [(request.target, request.body) for request in there.requests] == [("/a?b=c", b"abc")] * 3
        assert all("proxy-authorization" not in request.headers for request in there.requests)

    async def test_wrong_credentials_are_a_proxy_error_of_the_caller_s_module(self, real, tls_origin):
        there, trust = await tls_origin()
        config = stormline.Config(proxy=f"{real.scheme}://u:hush@{real.address}")
        for name in ("httpx", "httpx2"):
            module = importlib.import_module(name)
            transport = stormline.AsyncTransport(config=config, verify=trust)
            async with module.AsyncClient(transport=transport) as client:
                with pytest.raises(module.ProxyError) as caught:
                    await client.post(f"https://localhost:{there.address.port}/x")
            assert isinstance(caught.value, errors.ProxyError)
            assert caught.value.maybe_delivered is False
            assert "hush" not in str(caught.value)
        assert there.requests == []

    async def test_platform_is_reached_through_the_proxy(self, real, world):
        there = await world(answering())
        before = len(real.lines("127.0.0.1"))
        async with there.client(proxy=real.url) as client:
            answer = await client.get(f"https://{HOST}/")
        assert answer.extensions["stormline"].record.means == "long"
        assert answer.extensions["stormline"].record.address == str(real.address)
        assert real.lines(str(there.dispatch))
        assert real.lines(str(there.gateway.address))
        assert len(real.lines("127.0.0.1")) > before

    async def test_platform_that_no_proxy_exempts_is_reached_directly(self, world, monkeypatch, refused):
        monkeypatch.setenv("HTTPS_PROXY", f"http://{refused}")
        there = await world(answering())
        for no_proxy in ("stormline.test", "127.0.0.1/32", ""):
            monkeypatch.setenv("NO_PROXY", no_proxy)
            async with there.client() as client:
                answer = await client.get(f"https://{HOST}/")
            assert answer.extensions["stormline"].record.address == str(there.gateway.address)


async def _as_proxy(request, writer):
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nproxy")
