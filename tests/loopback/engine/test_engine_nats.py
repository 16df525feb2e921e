"""What is particular to NATS: first connections, servers that hang, and take nothing."""

import asyncio
import json
import logging
import os
import signal

import nats
import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.values import Secret
from stormline.engine.nats import EngineConfig, connect
from stormline.engine.port import Message, Reply
from stormline.engine.server import start_server
from stormline.net.clock import SystemRng

pytestmark = pytest.mark.loopback


async def echo(message: Message) -> Reply:
    return Reply(message.data)


async def test_first_connection_to_nobody_names_the_address(free_port):
    port = free_port()
    config = EngineConfig(url=f"nats://127.0.0.1:{port}", user="u", password=Secret("p4ssw0rd"))
    with pytest.raises(errors.EngineUnavailable, match=f"engine at nats://127.0.0.1:{port} unavailable: ") as caught:
        await connect(config, rng=SystemRng(), wait_s=0.0)
    assert "p4ssw0rd" not in str(caught.value)
    assert "p4ssw0rd" not in repr(config)


async def test_first_connection_to_something_else_fails_clearly(free_port):
    async def not_nats(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(not_nats, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = EngineConfig(url=f"nats://127.0.0.1:{port}", user="u", password=Secret("p"))
    with pytest.raises(errors.EngineUnavailable, match=f"127.0.0.1:{port} unavailable"):
        await connect(config, rng=SystemRng(), wait_s=0.1)
    server.close()
    await server.wait_closed()


async def test_first_connection_to_a_silent_server_fails_after_its_bound(monkeypatch):
    monkeypatch.setattr(limits, "ENGINE_CONNECT_TIMEOUT_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = EngineConfig(url=f"nats://127.0.0.1:{port}", user="u", password=Secret("p"))
    with pytest.raises(errors.EngineUnavailable, match=f"127.0.0.1:{port} unavailable"):
        await connect(config, rng=SystemRng(), wait_s=0.0)
    server.close()
    await server.wait_closed()


async def test_first_connection_waits_for_a_server_that_is_starting(tmp_path, free_port, eventually):
    port = free_port()
    first = await start_server(tmp_path, rng=SystemRng(), port=port)
    config = first.core
    await first.stop()
    connecting = asyncio.create_task(connect(config, rng=SystemRng(), wait_s=50.0))
    await asyncio.sleep(0.1)
    assert not connecting.done()
    second = await start_server(tmp_path, rng=SystemRng(), port=port)
    engine = await connecting
    assert engine.connected
    await engine.close()
    await second.stop()


async def test_connect_cancelled_leaves_nothing(free_port):
    config = EngineConfig(url=f"nats://127.0.0.1:{free_port()}", user="u", password=Secret("p"))
    task = asyncio.create_task(connect(config, rng=SystemRng(), wait_s=600.0))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_connect_cancelled_at_any_moment_ends(free_port):
    config = EngineConfig(url=f"nats://127.0.0.1:{free_port()}", user="u", password=Secret("p"))
    for turns in range(150):
        task = asyncio.create_task(connect(config, rng=SystemRng(), wait_s=600.0))
        for _ in range(turns % 30):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([task])
        assert task.cancelled()


async def test_engine_closed_at_any_moment_of_its_reconnecting_ends(tmp_path, free_port, eventually):
    server = await start_server(tmp_path, rng=SystemRng(), port=free_port())
    engines = [await connect(server.core, rng=SystemRng()) for _ in range(60)]
    await server.child.stop(0.0)
    await eventually(lambda: not any(engine.connected for engine in engines))
    for turns, engine in enumerate(engines):
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await engine.close()


def test_url_with_credentials_is_refused_and_not_shown():
    with pytest.raises(errors.ConfigError) as caught:
        EngineConfig(url="nats://u:geheim@127.0.0.1:1", user="u", password=Secret("p"))
    assert "geheim" not in str(caught.value)


def freeze(server):
    """Stop a server's process; its threads stop one after another, and until then they answer."""
    server.child.send_signal(signal.SIGSTOP)
    os.waitpid(server.child.pid, os.WUNTRACED)


async def test_frozen_server_counts_as_lost_after_its_pings_and_is_found_again(server, monkeypatch, eventually):
    monkeypatch.setattr(limits, "ENGINE_PING_S", 0.1)
    engine = await connect(server.core, rng=SystemRng())
    await engine.serve("t.echo", echo)
    waiting = None
    freeze(server)
    try:
        waiting = asyncio.create_task(engine.request("t.echo", b"", timeout_s=600.0))
        with pytest.raises(errors.EngineUnavailable) as caught:
            await waiting
        assert caught.value.maybe_delivered is True
    finally:
        server.child.send_signal(signal.SIGCONT)
    await eventually(lambda: engine.connected)
    assert (await engine.request("t.echo", b"x", timeout_s=10.0)).data == b"x"
    await engine.close()


async def test_close_towards_a_frozen_server_is_bounded(server, monkeypatch):
    monkeypatch.setattr(limits, "ENGINE_OUT_WAIT_S", 0.2)
    engine = await connect(server.core, rng=SystemRng())
    freeze(server)
    try:
        for _ in range(20):
            await engine.publish("t.x", bytes(1024 * 1024))
        async with asyncio.timeout(20):
            await engine.close()
    finally:
        server.child.send_signal(signal.SIGCONT)


async def test_sending_to_a_server_that_takes_nothing_is_bounded_and_fails(server, monkeypatch):
    monkeypatch.setattr(limits, "ENGINE_OUT_WAIT_S", 0.1)
    monkeypatch.setattr(limits, "ENGINE_OUT_BYTES_MAX", 1024 * 1024)
    engine = await connect(server.core, rng=SystemRng())
    freeze(server)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while sent < 200:
            await engine.publish("t.x", bytes(1024 * 1024))
            sent += 1

    try:
        with pytest.raises(errors.EngineUnavailable, match="does not take"):
            await flood()
        assert sent < 64
    finally:
        server.child.send_signal(signal.SIGCONT)
    await engine.close()


async def test_loss_and_return_are_one_log_line_each(tmp_path, free_port, eventually, caplog):
    caplog.set_level(logging.INFO, "stormline.engine")
    port = free_port()
    server = await start_server(tmp_path, rng=SystemRng(), port=port)
    engine = await connect(server.core, rng=SystemRng())
    caplog.clear()
    await server.child.stop(0.0)
    await eventually(lambda: not engine.connected)
    await asyncio.sleep(0.5)
    server = await start_server(tmp_path, rng=SystemRng(), port=port)
    await eventually(lambda: engine.connected)
    lines = [record.getMessage() for record in caplog.records if record.name == "stormline.engine"]
    mine = [line for line in lines if line.startswith(("engine lost", "engine connected again"))]
    assert mine == [f"engine lost: {server.core.url}", f"engine connected again: {server.core.url}"]
    assert len(lines) <= 6
    assert all(server.core.password.reveal() not in line for line in lines)
    await engine.close()
    await server.stop()


async def test_bucket_is_an_ordinary_nats_bucket_to_other_clients(server):
    engine = await connect(server.core, rng=SystemRng())
    kv = await engine.kv("rules", persistent=True)
    revision = await kv.put("a.b", b"1")
    other = await nats.connect(server.core.url, user="core", password=server.core.password.reveal())
    theirs = await other.jetstream().key_value("rules")
    entry = await theirs.get("a.b")
    assert (entry.value, entry.revision) == (b"1", revision)
    await theirs.put("a.c", b"2")
    mine = await kv.get("a.c")
    assert mine is not None
    assert mine.value == b"2"
    await theirs.purge("a.c")
    assert await kv.get("a.c") is None
    await kv.create("a.c", b"3")
    await other.close()
    await engine.close()


async def test_watch_survives_the_loss_of_its_consumer(server, monkeypatch):
    monkeypatch.setattr(limits, "ENGINE_WATCH_HEARTBEAT_S", 1)
    engine = await connect(server.core, rng=SystemRng())
    kv = await engine.kv("b", persistent=True)
    await kv.put("k", b"1")
    changes = kv.watch()
    assert (await anext(changes)).value == b"1"
    info = await engine.request("$JS.API.CONSUMER.NAMES.KV_b", b"{}", timeout_s=5.0)
    [name] = json.loads(info.data)["consumers"]
    await engine.request(f"$JS.API.CONSUMER.DELETE.KV_b.{name}", b"", timeout_s=5.0)
    await kv.put("k", b"2")
    async with asyncio.timeout(30):
        while (await anext(changes)).value != b"2":
            pass
    await changes.aclose()
    await engine.close()


async def test_watches_that_end_leave_no_consumer_on_the_server(server, eventually):
    engine = await connect(server.core, rng=SystemRng())
    kv = await engine.kv("b", persistent=True)
    await kv.put("k", b"1")
    for _ in range(3):
        changes = kv.watch()
        await anext(changes)
        await changes.aclose()
    async with asyncio.timeout(20):  # far below `limits.ENGINE_WATCH_IDLE_S`, when the server would do it itself
        while True:
            info = await engine.request("$JS.API.CONSUMER.NAMES.KV_b", b"{}", timeout_s=5.0)
            if not json.loads(info.data)["consumers"]:
                break
            await asyncio.sleep(0.01)
    await engine.close()


async def test_deleted_keys_are_forgotten_by_the_bucket(server, monkeypatch, eventually):
    monkeypatch.setattr(limits, "ENGINE_DELETED_KEY_LIFE_S", 1)
    engine = await connect(server.core, rng=SystemRng())
    kv = await engine.kv("b", persistent=True)
    for number in range(5):
        await kv.put(f"k{number}", b"1")
        await kv.delete(f"k{number}")
    async with asyncio.timeout(20):
        while True:
            info = await engine.request("$JS.API.STREAM.INFO.KV_b", b"", timeout_s=5.0)
            if json.loads(info.data)["state"]["messages"] == 0:
                break
            await asyncio.sleep(0.05)
    await kv.create("k1", b"2")
    await engine.close()
