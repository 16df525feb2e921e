"""An address from dispatch changes where we connect, never whom we talk to.

The story: an app puts the IP into the URL to get round DNS. The server then sees the IP, or nothing, as SNI and shows
its default certificate; the name check fails, and apps "mend" it by switching the check off (apache/apisix #4482,
TencentCloud/httpdns-sdk-ios #4, aliyun/alicloud-ios-demo #115, square/okhttp PR 2478). Here one listener holds a
certificate per name and writes down what it was asked for: SNI, Host and `:authority` are the name's, always; what
shows another certificate gets no byte of a request.
"""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl

import h2.events as h2e
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

import stormline
from stormline.core.values import Address
from stormline.net.trust import foreign_context
from stormline.testing.http2 import Peer
from stormline.testing.origin import plain, read_request
from stormline.wire.plan import Carrier, Endpoint

pytestmark = pytest.mark.loopback

FOREVER = (datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2049, 1, 1, tzinfo=datetime.UTC))
LONG_AGO = (datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2021, 1, 1, tzinfo=datetime.UTC))
ALPN = {"h1": ["http/1.1"], "h2": ["h2"]}


class Issuer:
    """A CA that certifies whatever a test wants to be wrong."""

    def __init__(self, folder):
        self._folder, self._number = folder, 0
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        self._key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        usage = x509.KeyUsage(*[name in ("s", "c") for name in "sxxxxcxxx"])
        ca = (
            self._builder(self._name, self._key.public_key(), FOREVER)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._key_id, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = ca.public_bytes(serialization.Encoding.PEM).decode()

    def _builder(self, subject, public, life):
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(life[0])
            .not_valid_after(life[1])
        )

    def context(self, *names, life=FOREVER):
        """Give a server's context with a certificate for these names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = []
        for name in names:
            try:
                alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
            except ValueError:
                alternatives.append(x509.DNSName(name))
        leaf = (
            # The name stands in the subject too: clients that still look there would be fooled by an IP-only one.
            self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a.test")]), key.public_key(), life)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_id), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._number += 1
        certificate, key_file = self._folder / f"{self._number}.pem", self._folder / f"{self._number}.key"
        certificate.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8
        key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key_file)
        return context


class Listener:
    """One TLS server with a certificate per SNI.

    Attributes:
        asked: SNI of every handshake begun.
        hosts: Host or `:authority` of every request read.
        whole: the requests' header names, lower case.
        writers: its connections.
    """

    def __init__(self, default, by_name, protocol):
        self.asked, self.hosts, self.whole = [], [], []
        self._default, self._by_name, self._protocol = default, by_name, protocol
        for context in (default, *by_name.values()):
            context.set_alpn_protocols(ALPN[protocol])
        default.sni_callback = self._choose
        self._tasks, self.writers = set(), []

    def _choose(self, tls, name, _):
        self.asked.append(name)
        tls.context = self._by_name.get(name, self._default)

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._default)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _connected(self, reader, writer):
        self.writers.append(writer)
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader, writer):
        with contextlib.suppress(OSError, EOFError, ssl.SSLError):
            if self._protocol == "h2":
                await Peer(reader, writer).serve(self._answer_h2)
            while True:
                request = await read_request(reader)
                self.hosts.append(request.headers["host"])
                self.whole.append(set(request.headers))
                writer.write(plain())
        writer.close()

    async def _answer_h2(self, peer):
        number = 0
        while True:
            number += 1
            request = await peer.wait(h2e.RequestReceived, number)
            fields = {bytes(name).decode(): bytes(value).decode() for name, value in request.headers}
            self.hosts.append(fields[":authority"])
            self.whole.append(set(fields))
            await peer.answer(request.stream_id, b"ok")


@pytest.fixture(scope="module", name="issuer")
def _issuer(tmp_path_factory):
    return Issuer(tmp_path_factory.mktemp("issuer"))


@pytest.fixture(name="listen")
async def _listen():
    async with contextlib.AsyncExitStack() as stack:

        async def listen(default, by_name=None, protocol="h1"):
            return await stack.enter_async_context(Listener(default, by_name or {}, protocol))

        yield listen


@pytest.fixture(name="client")
async def _client(planned, names, issuer):
    """Make clients: `await client({"a.test": [listener, ...]}, dns={...})`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(places, *, dns=None, server_name="", **config):
            hosts = {
                host: tuple(
                    Endpoint(
                        host=each.address.host, port=each.address.port, carrier=Carrier.H1, server_name=server_name
                    )
                    for each in there
                )
                for host, there in places.items()
            }
            trust = foreign_context(("h2", "http/1.1"))  # our own, and not only with the system's roots
            trust.load_verify_locations(cadata=issuer.pem)
            made = stormline.AsyncClient(
                config=stormline.Config(bundle=await planned(hosts), report=False, **config),
                verify=trust,
                outside=names({host: each.address for host, each in (dns or {}).items()}),
            )
            return await stack.enter_async_context(made)

        yield make


def attempts(response):
    return [(each.means, each.failure) for each in response.extensions["stormline"].record.attempts]


@pytest.mark.parametrize("protocol", ["h1", "h2"])
async def test_one_address_serves_each_name_by_its_own_certificate(issuer, listen, client, protocol):
    certificates = {"a.test": issuer.context("a.test"), "b.test": issuer.context("b.test")}
    there = await listen(issuer.context("default.test"), certificates, protocol)
    asking = await client({"a.test": [there], "b.test": [there]})
    port = there.address.port
    for url in ("https://a.test/", f"https://a.test:{port}/", "https://b.test/", f"https://b.test:{port}/"):
        response = await asking.get(url)
        assert (response.text, attempts(response)) == ("ok", [("ip-direct", "")])
    assert there.hosts == ["a.test", f"a.test:{port}", "b.test", f"b.test:{port}"]
    assert set(there.asked) == {"a.test", "b.test"}
    assert None not in there.asked


@pytest.mark.parametrize("protocol", ["h1", "h2"])
async def test_connection_made_for_one_name_is_not_used_for_another_at_the_same_address(
    issuer, listen, client, protocol
):
    """Even where one certificate covers both: the two names may be two tenants."""
    there = await listen(issuer.context("a.test", "b.test"), protocol=protocol)
    asking = await client({"a.test": [there], "b.test": [there]})
    await asking.get("https://a.test/")
    await asking.get("https://b.test/")
    assert there.asked == ["a.test", "b.test"]


def wrong_certificates(issuer):
    return {
        "of another name": issuer.context("b.test"),
        "of a parent": issuer.context("test"),
        "of a child by wildcard": issuer.context("*.a.test"),
        "of the address alone": issuer.context("127.0.0.1"),
        "expired": issuer.context("a.test", life=LONG_AGO),
        "of an unknown authority": "stranger",
    }


WRONG = ["of another name", "of a parent", "of a child by wildcard", "of the address alone", "expired",
         "of an unknown authority"]  # fmt: skip


@pytest.fixture(name="wrong")
def _wrong(issuer, request, tmp_path):
    context = wrong_certificates(issuer)[request.param]
    return Issuer(tmp_path).context("a.test") if context == "stranger" else context


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
@pytest.mark.parametrize("protocol", ["h1", "h2"])
async def test_wrong_certificate_gets_no_byte_and_is_a_certificate_error(issuer, listen, client, wrong, protocol):
    there = await listen(wrong, protocol=protocol)
    asking = await client({"a.test": [there]}, disabled=frozenset({"direct"}))
    for url in ("https://a.test/", f"https://a.test:{there.address.port}/"):
        with pytest.raises(stormline.errors.TlsError, match="certificate") as caught:
            await asking.post(url, content=b"x", headers={"Authorization": "secret"})
        assert (caught.value.phase, caught.value.maybe_delivered) == ("tls", False)
    assert there.hosts == []
    assert there.asked == ["a.test"] * len(there.asked) != []


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
async def test_write_refused_by_certificate_is_made_at_the_next_address_once(issuer, listen, client, wrong):
    first, second = await listen(wrong), await listen(issuer.context("a.test"))
    asking = await client({"a.test": [first, second]})
    response = await asking.post("https://a.test/", content=b"x")
    assert attempts(response) == [("ip-direct", "")]  # the addresses race, and the right certificate wins
    assert any(f"{first.address} failed" in line for _, line in response.extensions["stormline"].timeline.story)
    assert (first.hosts, second.hosts) == ([], ["a.test"])


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
async def test_write_refused_by_certificate_at_every_address_goes_by_dns(issuer, listen, client, wrong):
    first, by_dns = await listen(wrong), await listen(issuer.context("a.test"))
    asking = await client({"a.test": [first]}, dns={"a.test": by_dns})
    response = await asking.post("https://a.test/", content=b"x")
    assert attempts(response) == [("ip-direct", "tls.failed"), ("direct", "")]
    assert (first.hosts, by_dns.hosts) == ([], ["a.test"])


async def test_wrong_certificate_by_dns_too_is_an_error_never_an_unverified_answer(issuer, listen, client):
    there = await listen(issuer.context("b.test"))
    asking = await client({"a.test": [there]}, dns={"a.test": there})
    with pytest.raises(stormline.errors.TlsError):
        await asking.get("https://a.test/")
    assert there.hosts == []


async def test_name_for_tls_from_the_signed_plan_changes_sni_and_check_not_the_host(issuer, listen, client):
    there = await listen(issuer.context("default.test"), {"edge.test": issuer.context("edge.test")})
    asking = await client({"a.test": [there]}, server_name="edge.test")
    assert (await asking.get("https://a.test/")).text == "ok"
    assert (there.asked, there.hosts) == (["edge.test"], ["a.test"])


async def test_address_from_dispatch_is_not_used_for_another_port(issuer, listen, client):
    """Dispatch names a place for the service on 443; what runs on another port is another service."""
    there, other = await listen(issuer.context("a.test")), await listen(issuer.context("a.test"))
    asking = await client({"a.test": [there]}, dns={"a.test": other})
    assert (await asking.get(f"https://a.test:{other.address.port}/")).text == "ok"
    assert (there.hosts, other.hosts) == ([], [f"a.test:{other.address.port}"])


async def test_address_from_dispatch_is_not_used_in_clear_text(issuer, listen, client, origin):
    there, clear = await listen(issuer.context("a.test")), await origin()
    asking = await client({"a.test": [there]}, dns={"a.test": clear})
    for port in (clear.address.port, there.address.port):
        assert (await asking.get(f"http://a.test:{port}/")).text == "ok"
    assert (there.hosts, there.asked) == ([], [])


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
async def test_address_with_a_wrong_certificate_is_asked_last_from_then_on(issuer, listen, client, wrong):
    first, second = await listen(wrong), await listen(issuer.context("a.test"))
    asking = await client({"a.test": [first, second]})
    for _ in range(4):
        assert (await asking.get("https://a.test/")).text == "ok"
        for writer in second.writers:
            writer.transport.abort()
    assert second.hosts == ["a.test"] * 4
    assert len(second.asked) == 4, "each request had a connection of its own"
    assert len(first.asked) == 1


@pytest.mark.parametrize("secret", ["", "authorization", "cookie", "jar"])
async def test_request_refused_by_certificate_takes_no_credential_into_clear_text(
    issuer, listen, client, origin, secret
):
    first, clear = await listen(issuer.context("b.test")), await origin()
    keys = {"k1": stormline.VerifyKey("hmac-sha256", b"a secret of thirty-two bytes, ok!")}
    rule = stormline.BusinessRule(host="a.test", clear=stormline.ClearHttp(keys=keys, port=clear.address.port))
    dns = {"a.test": first, f"a.test:{clear.address.port}": clear}
    asking = await client({"a.test": [first]}, dns=dns, rules=(rule,))
    headers = {"authorization": {"Authorization": "Bearer SECRET-1"}, "cookie": {"Cookie": "sid=SECRET-1"}}
    if secret == "jar":
        asking.cookies.set("sid", "SECRET-1", domain="a.test")
    error = stormline.errors.TlsError if secret else stormline.errors.UntrustedAnswer
    with pytest.raises(error):
        await asking.get("https://a.test/", headers=headers.get(secret, {}))
    assert (clear.connections, first.hosts) == (0 if secret else 1, [])
