"""Protocols of businesses: an installed plug-in, a real gateway that was not changed, and real clients."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from stormline.appgw import protocols
from stormline.appgw.protocols import Limits
from stormline.core import errors, limits, limits_api, limits_platform
from stormline.core.codes import Code
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback

EXAMPLE = Path(__file__).parents[3] / "examples" / "own-protocol"


@pytest.fixture(name="platform")
def _platform(gated):
    return lambda *plugins: gated(protocols=plugins)


class Echo:
    """Sends back what comes, and notes what happens."""

    name = "echo"

    def __init__(self, **given):
        self.limits = Limits(**given)
        self.streams, self.closed_streams = [], []

    async def opened(self, stream):
        self.streams.append(stream)

    async def message(self, stream, message):
        if message == b"break":
            raise RuntimeError("a plug-in's bug")
        if message == b"close":
            stream.close()
            return
        await stream.send(message)

    async def closed(self, stream):
        self.closed_streams.append(stream)


@pytest.fixture(name="installed")
def _installed(tmp_path, monkeypatch):
    """Install the example as anybody would, into a folder of its own."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
               "--disable-pip-version-check", "--target", str(tmp_path / "site"), str(EXAMPLE)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in [name for name in sys.modules if name.startswith("stormline_auction")]:
        del sys.modules[name]


async def test_installed_plug_in_is_found_by_its_entry_point_and_serves(installed, platform):
    plugins = protocols.load()
    assert [plugin.name for plugin in plugins] == ["auction"]
    here = await platform(*plugins)
    async with (
        here.channel("d1", "ann") as one,
        here.channel("d2", "bob") as two,
        one.protocol("auction") as ann,
        two.protocol("auction") as bob,
    ):
        assert await ann.receive() == await bob.receive() == b"0 nobody"
        await ann.send(b"10")
        assert await ann.receive() == await bob.receive() == b"10 ann"
        await bob.send(b"15")
        assert await ann.receive() == await bob.receive() == b"15 bob"
        await bob.send(b"no number")  # ends this stream alone
        with pytest.raises(errors.CallError) as raised:
            await bob.receive()
        assert (raised.value.code, raised.value.maybe_delivered) == (Code.CALL_FAILED, True)
        await ann.send(b"20")
        assert await ann.receive() == b"20 ann"
        await ann.send(b"0")
        assert [message async for message in ann] == []
    async with here.channel("d3", "") as three:
        with pytest.raises(errors.CallError) as raised:
            async with three.protocol("auction"):
                pass
        assert raised.value.code == Code.CALL_REFUSED


def test_plug_in_that_cannot_be_loaded_is_left_out(tmp_path, monkeypatch, caplog):
    info = tmp_path / "bad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[stormline.protocols]\nnowhere = nowhere_to_be_found:X\napi = badly_named:Api\nother = badly_named:Api\n"
    )
    (tmp_path / "badly_named.py").write_text(
        "from stormline.appgw.protocols import Limits\nclass Api:\n    name = 'api'\n    limits = Limits()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert protocols.load() == ()
    assert len([record for record in caplog.records if "cannot be loaded" in record.message]) == 3


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("rpc", {}),
        ("No Label", {}),
        ("x", {"message_bytes": 0}),
        ("x", {"message_bytes": limits_api.OWN_MESSAGE_BYTES_MAX + 1}),
        ("x", {"messages_per_s": 0.0}),
        ("x", {"streams": 0}),
    ],
)
def test_plug_in_out_of_range_is_a_config_error(name, given):
    plugin = Echo(**given)
    plugin.name = name
    with pytest.raises(errors.ConfigError):
        protocols.check(plugin)


async def test_messages_of_all_sizes_come_back_whole_and_in_order(platform):
    here = await platform(Echo(message_bytes=1024 * 1024, messages_per_s=1e6, burst=1000))
    sent = [bytes([n % 256]) * size for n, size in enumerate([0, 1, 100, 20_000, 600_000, 3] * 3)]
    async with here.channel() as channel, channel.protocol("echo") as stream:
        sending = asyncio.create_task(_send_all(stream, sent))
        assert [await stream.receive() for _ in sent] == sent
        await sending


async def _send_all(stream, messages):
    for message in messages:
        await stream.send(message)


async def test_headers_and_identity_reach_the_plug_in_and_its_end_is_told_once(platform):
    echo = Echo()
    here = await platform(echo)
    async with here.channel("d7", "ann") as channel:
        async with channel.protocol("echo", headers=(("room", "7"),)) as stream:
            assert echo.streams[0].headers == (("room", "7"),)
            assert (echo.streams[0].identity.device, echo.streams[0].identity.user) == ("d7", "ann")
            await stream.send(b"x")
            assert await stream.receive() == b"x"
            await stream.send(b"last words")
        await wait_until(lambda: echo.closed_streams == echo.streams)
        assert not echo.streams[0].is_open
        with pytest.raises(errors.LocalProtocolError):
            await stream.send(b"late")
        with pytest.raises(errors.CallError):
            await echo.streams[0].send(b"late")
    assert len(echo.closed_streams) == 1


async def test_plug_in_sends_by_itself_and_ends_streams_from_outside(platform):
    echo = Echo()
    here = await platform(echo)
    async with here.channel() as channel, channel.protocol("echo") as stream:
        await asyncio.gather(*(echo.streams[0].send(b"%d" % number) for number in range(50)))
        assert [await stream.receive() for _ in range(50)] == [b"%d" % number for number in range(50)]
        echo.streams[0].close()
        assert await stream.receive() is None
        with pytest.raises(errors.ChannelLost):
            await _send_for_ever(stream)


async def _send_for_ever(stream):
    while True:
        await stream.send(b"x")
        await asyncio.sleep(0)


async def test_limits_are_held_by_the_house(platform):
    echo = Echo(message_bytes=100, streams_per_device=2, streams=3)
    here = await platform(echo)
    async with here.channel("d1") as one, here.channel("d2") as two:
        async with one.protocol("echo"), one.protocol("echo") as stream:
            with pytest.raises(errors.CallError) as raised:
                async with one.protocol("echo"):
                    pass
            assert raised.value.code == Code.CALL_TOO_MANY
            async with two.protocol("echo"):
                with pytest.raises(errors.CallError) as raised:
                    async with two.protocol("echo"):
                        pass
                assert raised.value.code == Code.CALL_UNAVAILABLE
            await stream.send(bytes(101))
            with pytest.raises(errors.CallError) as raised:
                await stream.receive()
            assert raised.value.code == Code.CALL_TOO_LARGE
        with pytest.raises(errors.CallError):
            await echo.streams[0].send(bytes(101))
        async with one.protocol("echo") as again:
            await again.send(b"there is room again")
            assert await again.receive() == b"there is room again"
        with pytest.raises(errors.CallError) as raised:
            async with one.protocol("unknown"):
                pass
        assert raised.value.code == Code.CALL_NOT_FOUND


async def test_messages_beyond_the_rate_wait_and_none_is_lost(platform):
    here = await platform(Echo(messages_per_s=50.0, burst=5))
    async with here.channel() as channel, channel.protocol("echo") as stream:
        begin = asyncio.get_running_loop().time()
        sending = asyncio.create_task(_send_all(stream, [b"%d" % number for number in range(30)]))
        assert [await stream.receive() for _ in range(30)] == [b"%d" % number for number in range(30)]
        assert asyncio.get_running_loop().time() - begin >= 25 / 50.0 * 0.9
        await sending


async def test_fault_of_a_plug_in_leaves_calls_and_other_streams_alone(platform):
    echo = Echo()
    here = await platform(echo)
    async with here.channel() as channel:
        async with channel.protocol("echo") as good, channel.protocol("echo") as bad:
            await bad.send(b"break")
            with pytest.raises(errors.CallError) as raised:
                await bad.receive()
            assert raised.value.code == Code.CALL_FAILED
            await good.send(b"well")
            assert await good.receive() == b"well"
            await good.send(b"close")
            assert await good.receive() is None
        await wait_until(lambda: len(echo.closed_streams) == 2)
        assert channel.session is not None


async def test_device_that_does_not_read_holds_its_sender_back_alone(platform):
    echo = Echo(message_bytes=100_000)
    here = await platform(echo)
    async with (
        here.channel("d1") as one,
        here.channel("d2") as two,
        one.protocol("echo") as slow,
        two.protocol("echo") as quick,
    ):
        sent = 0

        async def flood():
            nonlocal sent
            while True:
                await echo.streams[0].send(bytes(50_000))
                sent += 50_000

        flooding = asyncio.create_task(flood())
        await wait_until(lambda: sent >= limits.CREDIT_BYTES // 2)
        for number in range(20):
            await quick.send(b"%d" % number)
            assert await quick.receive() == b"%d" % number
        assert sent <= 2 * limits.CREDIT_BYTES + 100_000
        assert await slow.receive() == bytes(50_000)
        flooding.cancel()


async def test_stream_outlives_the_deadline_of_its_opening(platform):
    here = await platform(Echo())
    async with here.channel(deadline_s=1.0) as channel, channel.protocol("echo") as stream:
        begin = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - begin < 2.0 + limits_platform.CALL_DEADLINE_GRACE_S:
            await stream.send(b"x")
            assert await stream.receive() == b"x"
            await asyncio.sleep(0.1)
