"""Who gets a session, who does not, and what the others learn: over real TLS."""

import asyncio
import ssl

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import errors
from stormline.core.codes import Code
from stormline.wire import events as e
from stormline.wire import messages as m

pytestmark = pytest.mark.loopback


async def refusal(device, **hello):
    with pytest.raises(errors.RefusedError) as raised:
        await device.hello(**hello)
    return raised.value.code


class TestGreeting:
    async def test_hello_good_token_is_welcomed(self, gateway, mint):
        await gateway.start(heartbeat_s=17.0)
        device = await gateway.open()
        welcome = await device.hello(app="demo", token=mint("d1", user="ann"))
        assert (welcome.device, welcome.user, welcome.unit, welcome.heartbeat_s) == ("d1", "ann", "u1", 17.0)
        assert welcome.session
        assert welcome.time_ms > 1_700_000_000_000

    async def test_hello_bad_tokens_each_get_their_code(self, gateway, mint):
        await gateway.start()
        cases = [
            ({"app": "demo"}, Code.TOKEN_MISSING),
            ({"app": "demo", "token": mint("d1", age_s=3600)}, Code.TOKEN_EXPIRED),
            ({"app": "demo", "token": mint("d1", key=Ed25519PrivateKey.generate())}, Code.TOKEN_INVALID),
            ({"app": "demo", "token": mint("d1", app="other")}, Code.TOKEN_INVALID),
            ({"app": "demo", "token": "x"}, Code.TOKEN_INVALID),
            ({"app": "other", "token": mint("d1", app="other")}, Code.APP_UNKNOWN),
        ]
        for hello, code in cases:
            assert await refusal(await gateway.open(), **hello) == code
        assert await gateway.sessions() == 0

    async def test_hello_wrong_version_is_refused(self, gateway, mint):
        await gateway.start()
        device = await gateway.open()
        device.writer.write(b"\x00\x00\x00\x09\x93\x00\x91\x63\xa4demo")
        assert (await device.wait_closed()).code == Code.VERSION_UNSUPPORTED

    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 300_000, Code.FRAME_TOO_LARGE),
            (b"\x00\x00\x00\x05\xff\xff\xff\xff\xff", Code.PROTOCOL_ERROR),
            (b"\x00\x00\x00\x00", Code.PROTOCOL_ERROR),
            (b"\xff\xff\xff\xff" + bytes(100_000), Code.FRAME_TOO_LARGE),
            (b"\x00\x00\x20\x01" + bytes(10), Code.FRAME_TOO_LARGE),
        ],
        ids=["http", "garbage", "empty", "oversized", "just too large"],
    )
    async def test_hello_garbage_gets_the_reason_and_the_end(self, gateway, data, code, eventually):
        await gateway.start()
        device = await gateway.open()
        device.writer.write(data)
        assert (await device.wait_closed()).code == code
        await eventually(device.reader.at_eof)

    async def test_hello_never_sent_ends_after_its_time(self, gateway):
        await gateway.start()
        device = await gateway.open()
        device.writer.write(b"\x00\x00\x00\x20\x93")  # begins, and never goes on
        assert (await device.wait_closed()).code == Code.HELLO_TIMEOUT

    @pytest.mark.parametrize("alpn", [None, "http/1.1"])
    async def test_connection_without_our_alpn_is_closed(self, gateway, alpn):
        await gateway.start()
        device = await gateway.open(alpn=alpn)
        device.machine.send_hello(m.Hello(versions=(1,), app="demo", token=""))
        device.flush()  # it is no HTTP request
        closed = await device.wait_closed()
        assert closed.lost
        assert (await gateway.admin.get("/v1/sessions")).json()["connections"] == 0

    async def test_tls_12_is_refused(self, gateway):
        await gateway.start()
        context = ssl.create_default_context(cadata=gateway.authority.pem)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*gateway.address, ssl=context, server_hostname="gateway.test")


class TestLife:
    async def test_device_second_session_replaces_the_first(self, gateway):
        await gateway.start()
        first = await gateway.connect("d1")
        second = await gateway.connect("d1")
        other = await gateway.connect("d2")
        assert (await first.wait_closed()).code == Code.REPLACED
        assert await gateway.sessions() == 2
        listed = (await gateway.admin.get("/v1/sessions")).json()["sessions"]
        assert [one["session"] for one in listed] == [second.welcome.session, other.welcome.session]

    async def test_client_close_ends_the_session(self, gateway, eventually):
        await gateway.start()
        device = await gateway.connect()
        await device.close()

        async def gone():
            return await gateway.sessions() == 0

        await eventually(gone)

    async def test_client_message_against_the_rules_closes_with_the_reason(self, gateway):
        await gateway.start()
        device = await gateway.connect()
        device.writer.write(b"\x00\x00\x00\x04\x92\x0a\x91\x07")  # ACK of a push that was never sent
        assert (await device.wait_closed()).code == Code.PROTOCOL_ERROR

    async def test_ping_is_answered(self, gateway):
        await gateway.start()
        device = await gateway.connect()
        device.machine.ping(device.now())
        device.flush()
        assert (await device.next(e.PongReceived)).rtt_s < 5

    async def test_gate_unknown_fails_that_call_alone(self, gateway):
        await gateway.start()
        device = await gateway.connect()
        with pytest.raises(errors.CallError) as raised:
            await device.call("teapot", "x")
        assert raised.value.code == Code.CALL_NOT_FOUND
        device.machine.ping(device.now())
        device.flush()
        await device.next(e.PongReceived)


class TestStop:
    async def test_stop_tells_clients_to_leave_and_ends_in_time(self, gateway):
        await gateway.start()
        devices = [await gateway.connect(f"d{number}") for number in range(5)]
        unknown = await gateway.open()
        await gateway.stop()
        assert gateway.seconds_to_stop < 3
        for device in devices:
            assert (await device.next(e.GoingAway)).code == Code.GOING_AWAY
            assert (await device.wait_closed()).code == Code.GOING_AWAY
        assert (await unknown.wait_closed()).code == Code.GOING_AWAY
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the kernel likes
            await gateway.open()

    async def test_stop_with_clients_that_do_not_answer_ends_in_time(self, gateway):
        await gateway.start()
        device = await gateway.connect()
        device.stop_reading()
        await gateway.stop()
        assert gateway.seconds_to_stop < 3

    async def test_port_taken_is_one_clear_error(self, gateway):
        await gateway.start()
        port = gateway.address.port
        other = type(gateway)(gateway.authority)
        with pytest.raises(errors.PlatformError, match=f"gateway: cannot listen on 127.0.0.1:{port}"):
            await other.start(port=port)
        with pytest.raises(errors.PlatformError, match="business API: cannot listen"):
            await other.start(port=0, admin_port=gateway.admin.base_url.port)
        await other.admin.aclose()
