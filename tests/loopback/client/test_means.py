"""Means beyond the first: configured addresses, HTTP/1.1 after a stalled HTTP/2, clear HTTP that must prove itself."""

import asyncio
import contextlib
import importlib
import socket
import ssl
import threading

import h2.events
import httpx2
import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.policy import timeouts
from stormline.testing.http2 import Peer
from stormline.testing.origin import plain, read_request
from stormline.wire import httpsig

pytestmark = pytest.mark.loopback

NAME = "site.test"
SECRET = b"a secret of the origin and the app"
KEYS = {"origin-1": stormline.VerifyKey("hmac-sha256", SECRET)}


@pytest.fixture(name="module", params=["httpx2", "httpx"])
def _module(request):
    return importlib.import_module(request.param)


@pytest.fixture(name="closed")
def _closed():
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield Address(*taken.getsockname())


@pytest.fixture(name="tls")
def _tls(pki):
    """Make a server's context with a certificate for a name."""

    def make(name=NAME, *alpn):
        files = pki.ca.issue(name.replace(".", "-"), names=[name])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols(list(alpn or ("http/1.1",)))
        return context

    return make


@pytest.fixture(name="client")
async def _client(trust, names):
    """Make clients: `client(module, {name: address}, **settings)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(module, places, **settings):
            config = stormline.Config(trust_env=False, **({"deadline_s": 20.0} | settings))
            transport = stormline.AsyncTransport(config=config, verify=lambda alpn: trust(*alpn), outside=names(places))
            return await stack.enter_async_context(module.AsyncClient(transport=transport, timeout=20.0))

        yield make


def record(response):
    return response.extensions["stormline"].record


def means_of(call):
    return [attempt.means for attempt in call.attempts]


class TestConfiguredAddresses:
    async def test_name_that_does_not_resolve_is_reached_at_its_configured_address(self, module, origin, tls, client):
        server = await origin(ssl=tls())
        http = await client(module, {}, addresses={NAME: (f"127.0.0.1:{server.address.port}",)})
        response = await http.get(f"https://{NAME}/a")
        assert response.status_code == 200
        assert means_of(record(response)) == ["direct", "ip-direct"]
        assert server.requests[0].headers["host"] == NAME

    async def test_lying_dns_is_survived_by_a_write_too_and_the_liar_sees_no_request(self, origin, tls, client):
        liar, server = await origin(ssl=tls("liar.test")), await origin(ssl=tls())
        http = await client(httpx2, {NAME: liar.address}, addresses={NAME: (str(server.address),)})
        response = await http.post(f"https://{NAME}/a", content=b"x")
        assert response.status_code == 200
        assert (liar.requests, len(server.requests)) == ([], 1)

    async def test_configured_address_with_another_certificate_is_refused(self, origin, tls, client):
        liar = await origin(ssl=tls("liar.test"))
        http = await client(httpx2, {}, addresses={NAME: (str(liar.address),)})
        with pytest.raises((errors.TlsError, errors.ResolveError)):
            await http.get(f"https://{NAME}/")
        assert liar.requests == []

    async def test_ip_direct_that_is_switched_off_is_not_tried(self, origin, tls, client):
        server = await origin(ssl=tls())
        settings = {"addresses": {NAME: (str(server.address),)}}
        http = await client(httpx2, {}, disabled=frozenset({"ip-direct"}), **settings)
        with pytest.raises(errors.ResolveError):
            await http.get(f"https://{NAME}/")
        assert server.requests == []


class TestPlans:
    async def test_login_is_never_asked_without_tls(self, module, origin, client):
        server = await origin()
        rule = stormline.BusinessRule(host=NAME, path="/login", plan="login")
        http = await client(module, {NAME: server.address}, rules=(rule,))
        with pytest.raises(errors.LocalProtocolError, match="over TLS only"):
            await http.get(f"http://{NAME}/login")
        assert (await http.get(f"http://{NAME}/other")).status_code == 200
        assert [request.target for request in server.requests] == ["/other"]

    async def test_plan_of_one_request_takes_the_place_of_the_rules(self, module, origin, client):
        server = await origin()
        http = await client(module, {NAME: server.address}, rules=(stormline.BusinessRule(plan="login"),))
        response = await http.get(f"http://{NAME}/", extensions={"stormline.plan": "ordinary"})
        assert response.status_code == 200
        with pytest.raises(errors.LocalProtocolError, match="login, key, ordinary"):
            await http.get(f"http://{NAME}/", extensions={"stormline.plan": "fast"})

    async def test_rule_tags_its_business_and_bounds_its_time_and_its_tries(self, origin, client, closed):
        rules = (stormline.BusinessRule(path="/home/**", business="home", tries={"direct": 1}),)
        http = await client(httpx2, {NAME: closed}, rules=rules, business="app")
        with pytest.raises(errors.ConnectError) as caught:
            await http.get(f"http://{NAME}/home/x")
        assert (caught.value.trace.record.business, len(caught.value.trace.record.attempts)) == ("home", 1)
        with pytest.raises(errors.ConnectError) as caught:
            await http.get(f"http://{NAME}/other")
        assert (caught.value.trace.record.business, len(caught.value.trace.record.attempts)) == ("app", 4)

    async def test_original_url_is_tried_last_and_only_where_a_rule_wants_it(self, client, closed):
        rules = (stormline.BusinessRule(tries={"direct": 1, "original": 2}),)
        http = await client(httpx2, {NAME: closed}, rules=rules)
        with pytest.raises(errors.ConnectError) as caught:
            await http.get(f"http://{NAME}/")
        assert means_of(caught.value.trace.record) == ["direct", "original", "original"]


class TestStalledHttp2:
    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch):
        """Lose patience soon: how long it lasts is policy's, and its own tests hold it."""
        monkeypatch.setattr(limits, "LOOK_FIRST_S", 0.05)
        monkeypatch.setattr(limits, "TIMEOUT_FLOOR_FAST_S", 0.1)
        monkeypatch.setattr(timeouts, "RTO_MIN_S", 0.02)
        monkeypatch.setattr(timeouts, "RTO_VARIANCE_S", 0.02)

    @pytest.fixture(name="server")
    async def _server(self, tls):
        """One address that takes requests over HTTP/2 and answers PINGs only, and answers over HTTP/1.1."""
        asked, tasks = [], set()

        async def mute(peer):
            for number in range(1, 100):
                await peer.wait(h2.events.RequestReceived, number)
                asked.append("h2")

        async def connected(reader, writer):
            tasks.add(asyncio.current_task())
            with contextlib.suppress(OSError, EOFError):
                if writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2":
                    await Peer(reader, writer).serve(mute)
                while True:
                    await read_request(reader)
                    asked.append("h1")
                    writer.write(plain(b"one"))
            writer.close()

        listening = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls(NAME, "h2", "http/1.1"))
        yield Address(*listening.sockets[0].getsockname()[:2]), asked
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def test_read_goes_by_http1_where_there_is_no_other_address(self, module, server, client):
        address, asked = server
        http = await client(module, {NAME: address})
        response = await http.get(f"https://{NAME}/")
        assert (response.content, response.http_version) == (b"one", "HTTP/1.1")
        assert asked[0] == "h2"
        assert asked[-1] == "h1"
        assert any("HTTP/1.1 from here" in line for _, line in response.extensions["stormline"].timeline.story)

    async def test_write_is_not_sent_again(self, server, client):
        address, asked = server
        http = await client(httpx2, {NAME: address}, deadline_s=1.0)
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await http.post(f"https://{NAME}/", content=b"x")
        assert caught.value.maybe_delivered
        assert asked == ["h2"]

    @pytest.mark.parametrize("off", ["h1", None])
    async def test_it_does_not_where_that_is_switched_off_or_the_context_is_given(self, server, trust, names, off):
        address, asked = server
        config = stormline.Config(trust_env=False, deadline_s=1.5, disabled=frozenset({off} if off else ()))
        verify = (lambda alpn: trust(*alpn)) if off else trust()
        transport = stormline.AsyncTransport(config=config, verify=verify, outside=names({NAME: address}))
        async with httpx2.AsyncClient(transport=transport) as http:
            with pytest.raises(errors.DeadlineExceeded):
                await http.get(f"https://{NAME}/")
        assert set(asked) == {"h2"}


async def signing(request, writer, *, body=b'{"items": []}', secret=SECRET, spoil=None):
    """Answer as an origin that signs."""
    headers = ((b"content-type", b"application/json"), (b"set-cookie", b"session=1"))
    asked = httpsig.Asked(
        request.method,
        "http",
        request.headers["host"],
        request.target,
        tuple((name.encode(), value.encode()) for name, value in request.headers.items()),
    )
    lines = httpsig.sign_answer(
        asked,
        200,
        headers,
        body,
        keyid="origin-1",
        sign=httpsig.Signer("hmac-sha256", secret),
        created=int(SystemClock().wall()),
        nonce=httpsig.nonce_of(request.headers["accept-signature"].encode()),
        cover=("content-type",),
    )
    sent = spoil if spoil is not None else body
    fields = {name.decode(): value.decode() for name, value in (*headers, *lines)}
    writer.write(plain(sent, **fields))


async def hijacking(request, writer):
    """Answer as a box on the way."""
    digest = httpsig.content_digest(b"<html>pay here</html>")
    writer.write(plain(b"<html>pay here</html>", set_cookie="session=evil", content_digest=digest))


class TestClearHttp:
    @pytest.fixture(name="asked_clear")
    async def _asked_clear(self, origin, client, closed):
        """Make a client whose origin refuses TLS, and speaks HTTP as told; and that origin."""

        async def make(module, answer, **consent):
            server = await origin(answer)
            consent = {"keys": KEYS, "port": server.address.port} | consent
            rule = stormline.BusinessRule(host=NAME, clear=stormline.ClearHttp(**consent), tries={"direct": 1})
            places = {f"{NAME}:443": closed, f"{NAME}:{server.address.port}": server.address}
            return await client(module, places, rules=(rule,)), server

        return make

    async def test_signed_answer_counts_with_the_fields_that_are_signed(self, module, asked_clear):
        http, _ = await asked_clear(module, signing)
        response = await http.get(f"https://{NAME}/items?page=2")
        assert response.json() == {"items": []}
        assert response.headers["content-type"] == "application/json"
        assert "set-cookie" not in response.headers
        assert "stormline.untrusted" not in response.extensions
        call = record(response)
        assert (means_of(call), call.ok) == (["direct", "clear"], True)

    @pytest.mark.parametrize("kind", ["unsigned", "other-key", "other-body"])
    async def test_injected_answer_is_never_success(self, module, asked_clear, kind):
        async def answer(request, writer):
            if kind == "unsigned":
                await hijacking(request, writer)
            elif kind == "other-key":
                await signing(request, writer, secret=b"some other secret than ours")
            else:
                await signing(request, writer, spoil=b'{"items":[1]}')

        http, server = await asked_clear(module, answer)
        with pytest.raises(errors.UntrustedAnswer) as caught:
            await http.get(f"https://{NAME}/")
        assert len(server.requests) == 1
        call = caught.value.trace.record
        assert (call.ok, call.ok_network, call.failure) == (False, False, "http.untrusted")

    async def test_untrusted_answer_is_given_marked_and_not_counted_where_the_rule_says_so(self, module, asked_clear):
        http, _ = await asked_clear(module, hijacking, give_untrusted=True)
        response = await http.get(f"https://{NAME}/")
        assert response.extensions["stormline.untrusted"] is True
        assert "set-cookie" not in response.headers
        assert not http.cookies
        call = record(response)
        assert (call.ok, call.ok_network, call.ok_http, call.failure) == (False, False, False, "http.untrusted")

    @pytest.mark.parametrize("status", ["302 Found", "401 Unauthorized"])
    async def test_untrusted_answer_that_would_lead_elsewhere_is_not_given(self, asked_clear, status):
        async def answer(request, writer):
            writer.write(plain(b"", status, location="http://evil.test/", www_authenticate="Basic"))

        http, _ = await asked_clear(httpx2, answer, give_untrusted=True)
        with pytest.raises(errors.UntrustedAnswer):
            await http.get(f"https://{NAME}/", follow_redirects=True)

    @pytest.mark.parametrize(
        "ask",
        [
            {"method": "POST", "content": b"x"},
            {"method": "DELETE"},
            {"method": "GET", "headers": {"Authorization": "Bearer abc"}},
            {"method": "GET", "headers": {"Cookie": "a=b"}},
            {"method": "GET", "headers": {"X-Api-Key": "abc"}},
            {"method": "GET", "params": {"access_token": "abc"}},
        ],
    )
    async def test_write_or_credential_never_goes_in_clear(self, asked_clear, ask):
        http, server = await asked_clear(httpx2, signing)
        with pytest.raises(errors.ConnectError):
            await http.request(url=f"https://{NAME}/", **ask)
        assert server.connections == 0

    async def test_url_without_tls_is_held_to_the_keys_of_its_rule(self, module, asked_clear):
        http, server = await asked_clear(module, hijacking)
        with pytest.raises(errors.UntrustedAnswer):
            await http.get(f"http://{NAME}:{server.address.port}/")

    async def test_no_rule_means_no_clear_http(self, origin, client, closed):
        server = await origin(signing)
        http = await client(httpx2, {f"{NAME}:443": closed, f"{NAME}:80": server.address}, deadline_s=2.0)
        with pytest.raises(errors.ConnectError):
            await http.get(f"https://{NAME}/")
        assert server.connections == 0


class TestVerdicts:
    async def test_hook_of_the_rule_comes_before_the_clients_own(self, origin, names):
        server = await origin()
        seen = []
        rules = (stormline.BusinessRule(path="/a", parse=lambda response: response.text == "other"),)
        config = stormline.Config(trust_env=False, rules=rules)
        async with stormline.AsyncClient(
            config=config, parse=lambda response: seen.append(response) or True, outside=names({NAME: server.address})
        ) as http:
            first, second = await http.get(f"http://{NAME}/a"), await http.get(f"http://{NAME}/b")
        assert (record(first).ok_parse, record(first).failure, record(first).ok) == (False, "parse", False)
        assert record(first).ok_network
        assert record(first).ok_http
        assert (record(second).ok_parse, seen) == (True, [second])

    async def test_last_word_on_a_streamed_answer_counts(self, module, origin, client):
        server = await origin()
        http = await client(module, {NAME: server.address})
        async with http.stream("GET", f"http://{NAME}/") as response:
            await response.aread()
        stormline.mark_parsed(response, False, "empty")
        assert (record(response).ok_parse, record(response).failure) == (False, "parse")
        for _ in range(2):
            stormline.mark_parsed(response, True)
        assert (record(response).ok_parse, record(response).failure, record(response).ok) == (True, "", True)

    async def test_verdict_before_the_body_has_ended_stays(self, origin, client):
        server = await origin()
        http = await client(httpx2, {NAME: server.address})
        async with http.stream("GET", f"http://{NAME}/") as response:
            stormline.mark_parsed(response, False)
            await response.aread()
        assert (record(response).ok_parse, record(response).failure) == (False, "parse")

    async def test_reason_is_cut_and_masked(self, origin, client):
        server = await origin()
        http = await client(httpx2, {NAME: server.address})
        response = await http.get(f"http://{NAME}/")
        reason = (
            "bad https://u:pw@a.test/x?token=topsecret of me@mail.test eyJhbGciOiJFZERTQSJ9abcdef\n" + "word " * 200
        )
        stormline.mark_parsed(response, False, reason)
        line = next(line for _, line in response.extensions["stormline"].timeline.story if line.startswith("parse"))
        assert len(line) < 250
        assert "\n" not in line
        assert not [word for word in ("topsecret", "u:pw", "eyJ", "me@mail") if word in line]

    async def test_record_waits_for_its_verdict_and_goes_at_the_clients_end_without(self, origin, names):
        server = await origin()
        rules = (stormline.BusinessRule(parse_wait_s=60.0),)
        transport = stormline.AsyncTransport(
            config=stormline.Config(trust_env=False, rules=rules), outside=names({NAME: server.address})
        )
        records = []
        async with httpx2.AsyncClient(transport=transport) as http:
            transport.runtime().on_record = records.append
            first, second = await http.get(f"http://{NAME}/1"), await http.get(f"http://{NAME}/2")
            assert records == []
            assert stormline.mark_parsed(first, False, "empty")
        assert [(each.path, each.ok_parse) for each in records] == [("/1", False), ("/2", None)]
        assert not stormline.mark_parsed(second, True)

    def test_response_of_another_client_is_refused(self):
        with pytest.raises(errors.LocalProtocolError):
            stormline.mark_parsed(httpx2.Response(200), True)

    def test_synchronous_clients_records_wait_too(self, pki, tmp_path):
        rules = (stormline.BusinessRule(parse_wait_s=60.0),)
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def serve():
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65_536)
                    connection.sendall(plain())

            thread = threading.Thread(target=serve)
            thread.start()
            config = stormline.Config(trust_env=False, rules=rules)
            with stormline.Client(config=config) as http:
                response = http.get(f"http://127.0.0.1:{listening.getsockname()[1]}/")
                assert stormline.mark_parsed(response, True)
            thread.join()
        BACKGROUND.stop()
        assert not stormline.mark_parsed(response, True)
