"""Where neither names nor TLS to the origin work, a request goes through the relay that a real plan names."""

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import SimpleNamespace

import httpx2
import msgspec
import pytest

import stormline
from stormline.client.relaying import by_host
from stormline.core import errors, limits_relay
from stormline.core.values import Address
from stormline.dispatch.rules import RuleSet, check
from stormline.dispatch.unit import HeldRules
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.trust import roles_context
from stormline.relay import keys, service
from stormline.testing.origin import plain
from stormline.testing.world import APP, bundle_for, running_dispatch, wait_until
from stormline.wire import bundle as bundles
from stormline.wire import jws, ohttp
from stormline.wire.bundle import Relay
from stormline.wire.plan import SEALED, Endpoint, HostPlan, Policy

pytestmark = pytest.mark.loopback
NAME = "site.test"


async def told(request, writer):
    body = b"%s %s %s" % (request.method.encode(), request.target.encode(), request.body)
    writer.write(plain(body, etag='"1"', set_cookie="a=b"))


@dataclass
class Platform:
    """What a test has in its hand.

    Attributes:
        source: the rules of the centre.
        http: a client that asks it.
        transport: what is under it.
        relay: as plans name it.
        origin: whom the relay fetches.
    """

    source: HeldRules
    http: httpx2.AsyncClient
    transport: stormline.AsyncTransport
    relay: Endpoint
    origin: object

    def url(self, path="/", host=NAME):
        return f"https://{host}{path}"

    async def command(self, **policy):
        old = self.source.current()
        hosts = {NAME: HostPlan(dns=True, policy=Policy(**({"relays": (self.relay,)} | policy)))}
        self.source.put(check(msgspec.structs.replace(old, version=old.version + 1, hosts=hosts)))
        await self.transport.runtime().scheduling.refresh()


def endpoint(address, key):
    listed = jws.b64url(ohttp.encode_keys([key.config]))
    return Endpoint(host=address.host, port=address.port, carrier=SEALED, keys=listed)


def record(response):
    return response.extensions["stormline"].record


def means_of(response):
    return [attempt.means for attempt in record(response).attempts]


@contextlib.asynccontextmanager
async def running(config):
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        service.run(config, clock=SystemClock(), rng=SystemRng(), started=started.set_result, stop=stop)
    )
    try:
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        yield started.result()
    finally:
        stop.set()
        await task


@pytest.fixture(name="foreign_tls")
async def _foreign_tls(pki):
    """Give the address of somebody else's server."""
    files = pki.ca.issue("stranger", names=["bank.test"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        yield Address(*server.sockets[0].getsockname())


@pytest.fixture(name="platform")
async def _platform(pki, trust, names, origin, tmp_path):
    """Make a platform whose clients cannot reach the origin themselves: connections to it are refused, or as told."""
    files = pki.ca.issue("site-test", names=[NAME])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    async with contextlib.AsyncExitStack() as stack:

        async def make(direct=None, bundled=(), **config):
            real = await origin(told, ssl=context)
            key = keys.write_key(tmp_path / "relay.key", 1)
            settings = service.RelayConfig(
                keys=(tmp_path / "relay.key",),
                origins={NAME: (str(real.address),)},
                trust=roles_context(pki.ca.ca_pem.encode(), []),
            )
            (address,) = await stack.enter_async_context(running(settings))
            relay = endpoint(address, key)
            hosts = {NAME: HostPlan(dns=True, policy=Policy(relays=(relay,)))}
            source = HeldRules(check(RuleSet(version=1, hosts=hosts, apps={APP: frozenset({NAME})})))
            dispatch, _ = await stack.enter_async_context(running_dispatch(pki, source.current(), source=source))
            bundle = bundle_for(pki, dispatch)
            if bundled:  # all that the client has: no scheduling centre answers
                place = Relay(host=relay.host, port=relay.port, keys=relay.keys, hosts=bundled)
                bundle = bundle_for(pki, dispatch, dispatch=("127.0.0.1:1",), centres=(), relays=(place,))
                bundle = bundles.decode(bundles.encode(bundle))
            given = {"bundle": bundle, "trust_env": False, "report": False} | config
            if direct is None:
                with socket.create_server(("127.0.0.1", 0)) as gone:
                    direct = Address(*gone.getsockname())
            transport = stormline.AsyncTransport(
                config=stormline.Config(**given), verify=lambda alpn: trust(*alpn), outside=names({NAME: direct})
            )
            http = await stack.enter_async_context(httpx2.AsyncClient(transport=transport, timeout=10))
            return Platform(source, http, transport, relay, real)

        yield make


async def test_what_cannot_go_direct_goes_through_the_relay(platform):
    here = await platform()
    response = await here.http.get(here.url("/a?b=c"), headers={"accept-encoding": "identity"})
    assert (response.status_code, response.content) == (200, b"GET /a?b=c ")
    assert means_of(response)[-1] == "relay"
    assert record(response).attempts[-1].failure == ""
    assert response.headers["etag"] == '"1"'
    assert here.http.cookies["a"] == "b"


async def test_first_read_of_a_client_that_has_its_bundle_alone_goes_through_the_bundles_relay(platform, foreign_tls):
    """No scheduling centre answers, and the name leads to a stranger."""
    here = await platform(direct=foreign_tls, bundled=(NAME,))
    response = await here.http.get(here.url("/first"))
    assert (response.status_code, response.content) == (200, b"GET /first ")
    assert means_of(response)[-1] == "relay"
    assert here.transport.runtime().scheduling.plan is None


async def test_bundles_relay_is_for_the_hosts_it_is_named_for_and_for_tls_alone(platform, foreign_tls):
    here = await platform(direct=foreign_tls, bundled=("other.test",))
    with pytest.raises(httpx2.TransportError):
        await here.http.get(here.url("/first"))
    assert here.origin.requests == []
    relaying = here.transport.runtime()._executor.relaying
    for scheme, host, number in (("https", "other.test", 1), ("http", "other.test", 0), ("https", NAME, 0)):
        assert len(relaying.steps(run_of(host, scheme))) == number


def run_of(host, scheme="https"):
    return SimpleNamespace(request=SimpleNamespace(scheme=scheme, host=host), limits=SimpleNamespace(command=None))


async def test_plan_that_knows_a_host_overrules_the_bundles_relay(platform):
    here = await platform()
    relaying = here.transport.runtime()._executor.relaying
    place = Relay(host="192.0.2.9", port=80, keys=here.relay.keys, hosts=(NAME, "unheard.test"))
    relaying._bundled = by_host([place])
    await here.command(relays=())
    with pytest.raises(httpx2.TransportError):
        await here.http.get(here.url("/"))
    assert here.origin.requests == []
    assert [step.addresses[0].host for step in relaying.steps(run_of("unheard.test"))] == ["192.0.2.9"]


async def test_a_write_goes_once_and_says_when_it_was_made(platform):
    here = await platform()
    response = await here.http.post(here.url("/pay"), content=b"100")
    assert response.content == b"POST /pay 100"
    (request,) = here.origin.requests
    assert abs(parsedate_to_datetime(request.headers["date"]).timestamp() - SystemClock().wall()) < 60


async def test_a_body_that_comes_as_it_is_read_goes_through_too(platform):
    here = await platform()

    async def pieces():
        for _ in range(20):
            yield b"x" * 4000

    with contextlib.suppress(errors.TransportError):
        response = await here.http.put(here.url("/up"), content=pieces())
        assert response.content == b"PUT /up " + b"x" * 80_000
        assert means_of(response)[-1] == "relay"


async def test_an_answer_with_the_wrong_certificate_is_left_for_the_relay(platform, origin, pki):
    """As a box on the way that answers for every name has it."""
    liar = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = pki.ca.issue("liar-test", names=["liar.test"])
    liar.load_cert_chain(files.certificate, files.key)
    box = await origin(told, ssl=liar)
    here = await platform(direct=box.address)
    response = await here.http.get(here.url())
    assert response.status_code == 200
    assert means_of(response)[-1] == "relay"
    assert box.requests == []


@pytest.mark.parametrize("policy", [{"relay": False}, {"disabled": ("relay",)}, {"tries": {"relay": 0}}, {"relays": ()},
                                    {"preset": "login"}])  # fmt: skip
async def test_the_plan_says_whether_a_relay_may_be_used(platform, policy):
    here = await platform()
    await here.command(**policy)
    with pytest.raises(errors.ConnectError):
        await here.http.get(here.url())
    assert here.origin.requests == []


async def test_each_try_goes_through_the_next_relay(platform):
    here = await platform()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = msgspec.structs.replace(here.relay, port=gone.getsockname()[1])
    await here.command(relays=(dead, here.relay), preset="key")
    response = await here.http.get(here.url())
    assert response.status_code == 200
    assert means_of(response)[-2:] == ["relay", "relay"]


@contextlib.contextmanager
def silence():
    """An address where connections are neither taken nor refused: its queue is full."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                knocking.connect(full.getsockname())
        yield Address(*full.getsockname())


async def test_a_read_without_a_connection_is_asked_through_a_relay_beside(platform):
    """The first attempt alone would take all the time there is."""
    with silence() as gone:
        here = await platform(direct=gone, connect_timeout_s=60.0)
        async with asyncio.timeout(10):
            response = await here.http.get(here.url("/a"))
    assert response.content == b"GET /a "
    assert record(response).means == "relay"
    assert len(here.origin.requests) == 1


@pytest.mark.parametrize("disabled", [frozenset({"relay"}), frozenset({"hedge"})])
async def test_nothing_is_asked_beside_where_that_is_switched_off(platform, disabled):
    with silence() as gone:
        here = await platform(direct=gone, disabled=disabled, connect_timeout_s=60.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(limits_relay.RELAY_BESIDE_S + 1.0):
                await here.http.get(here.url())
    assert here.origin.requests == []


async def test_a_write_waits_its_turn(platform):
    """The connection that is being made would have it too."""
    with silence() as gone:
        here = await platform(direct=gone, connect_timeout_s=60.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(limits_relay.RELAY_BESIDE_S + 1.0):
                await here.http.post(here.url("/pay"), content=b"1")
        assert here.origin.requests == []
        response = await here.http.post(here.url("/pay"), content=b"1", headers={"idempotency-key": '"a"'})
    assert response.content == b"POST /pay 1"
    assert len(here.origin.requests) == 1


async def _hold_an_old_key(here):
    """Have the client hold a plan of before the relay's key was changed, and the centre the one of after it."""
    assert (await here.http.get(here.url())).status_code == 200
    here.origin.requests.clear()
    other = ohttp.GatewayKey(1, keys.X25519PrivateKey.generate())
    tries = {"ip-direct": 0, "direct": 1}
    await here.command(relays=(endpoint(Address(here.relay.host, here.relay.port), other),), tries=tries)
    old = here.source.current()
    hosts = {NAME: HostPlan(dns=True, policy=Policy(relays=(here.relay,), tries=tries))}
    here.source.put(check(msgspec.structs.replace(old, version=old.version + 1, hosts=hosts)))
    assert here.transport.runtime().scheduling.plan.version == old.version
    return old.version


@pytest.mark.parametrize("body", [None, b"100"])
async def test_a_relay_with_another_key_has_the_plan_asked_for_and_the_request_sealed_anew(platform, body):
    here = await platform()
    held = await _hold_an_old_key(here)
    response = await here.http.request("POST" if body else "GET", here.url("/pay"), content=body)
    assert response.status_code == 200
    assert means_of(response).count("relay") == 1, "it is one try of the call's"
    assert here.transport.runtime().scheduling.plan.version > held
    assert len(here.origin.requests) == 1


async def test_several_requests_with_an_old_key_cost_one_question_for_the_plan(platform):
    here = await platform()
    await _hold_an_old_key(here)
    asked = []
    scheduling = here.transport.runtime().scheduling
    refresh = scheduling.refresh
    scheduling.refresh = lambda: asked.append(1) or refresh()
    answers = await asyncio.gather(*(here.http.get(here.url(f"/{number}")) for number in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(asked) <= 2
    assert len(here.origin.requests) == 3


async def test_a_relay_costs_no_token_of_the_budget_where_nobody_has_the_request(platform):
    """Repetitions are bounded for the origin's sake; here each request would have none left after a while."""
    here = await platform()
    for number in range(15):
        method = "POST" if number % 2 else "GET"
        response = await here.http.request(method, here.url(f"/{number}"))
        assert response.status_code == 200
        assert means_of(response)[-1] == "relay"
    assert len(here.origin.requests) == 15


async def test_a_body_that_was_read_is_not_sealed_again(platform):
    here = await platform()
    held = await _hold_an_old_key(here)

    async def pieces():
        yield b"1"
        yield b"00"

    with pytest.raises(errors.TransportError):
        await here.http.post(here.url("/pay"), content=pieces())
    assert here.origin.requests == []
    await wait_until(lambda: here.transport.runtime().scheduling.plan.version > held)


async def test_without_a_newer_plan_an_old_key_fails_the_request_and_nobody_has_it(platform):
    here = await platform()
    other = ohttp.GatewayKey(1, keys.X25519PrivateKey.generate())
    await here.command(relays=(endpoint(Address(here.relay.host, here.relay.port), other),))
    with pytest.raises(errors.TransportError) as caught:
        await here.http.post(here.url("/pay"), content=b"100")
    assert not caught.value.maybe_delivered
    assert here.origin.requests == []


async def test_clear_text_urls_do_not_go_through_a_relay(platform):
    here = await platform()
    with pytest.raises(errors.TransportError):
        await here.http.get(f"http://{NAME}/")
    assert here.origin.requests == []


async def test_what_is_recorded_shows_no_secret(platform, all_logs):
    here = await platform()
    await here.http.get(here.url("/?token=secret"), headers={"authorization": "Bearer secret"})
    lines = [line.getMessage() for line in all_logs.records if line.name.startswith("stormline")]
    assert lines
    assert not any("secret" in line for line in lines)
