"""What a client knows of its network, and does when it changes. Pure parts: tests/unit/test_policy_network.py."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.client.outside import Outside
from stormline.core import errors, limits_network
from stormline.core.errors import ConfigError
from stormline.core.values import Address
from stormline.net import probes, system
from stormline.net.clock import SystemClock
from stormline.net.network import NoNetworkPort, open_port
from stormline.net.polling import PollingPort
from stormline.net.recorded import PushedNetwork
from stormline.policy.network import Change
from stormline.policy.verdict import Condition, Confidence
from stormline.testing.origin import plain
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback

HOME = {"kind": "wifi", "ssid": "Home", "interface": "wlan0", "addresses": ["192.0.2.20/24"]}
CELL = {"kind": "cell", "carrier": "Operator One", "interface": "rmnet0", "addresses": ["192.0.2.99"]}


class StepClock(SystemClock):
    """The machine's clock, whose wall clock is set and whose machine sleeps when a test says so."""

    def __init__(self) -> None:
        self.stepped_s = self.slept_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.stepped_s + self.slept_s

    def boottime(self) -> float | None:
        return super().monotonic() + self.slept_s


def make(port=None, **settings):
    port = PushedNetwork() if port is None else port
    return stormline.AsyncClient(config=stormline.Config(network_port=port, **settings)), port


@pytest.fixture(name="server")
async def _server(origin):
    async def answer(request, writer):
        writer.write(plain())

    return await origin(answer)


async def test_change_is_told_names_the_network_and_doubts_connections(server):
    client, port = make()
    port.push(HOME)
    told = []
    async with client:
        client.on_network(told.append)
        first = client.network
        assert (first.info.kind, first.verdict.condition) == ("wifi", Condition.OK)
        assert (await client.get(server.url())).text == "ok"
        assert (await client.get(server.url())).text == "ok"
        assert server.connections == 1
        assert client._storm.runtime().steering.network == (first.info.id, "wifi")
        port.push(CELL)
        await wait_until(lambda: told)
        assert told[0].change.change is Change.NEW
        assert told[0].info.id == client.network.info.id != first.info.id
        assert client._storm.runtime().steering.network == (told[0].info.id, "cell")
        assert (await client.get(server.url())).text == "ok"
        assert server.connections == 2  # the idle one was from the network before
        port.push(HOME)
        await wait_until(lambda: len(told) == 2)
        assert told[1].info.id == first.info.id


async def test_event_that_changes_nothing_keeps_connections_and_tells_nobody(server):
    client, port = make()
    port.push(HOME)
    told = []
    async with client:
        client.on_network(told.append)
        await client.get(server.url())
        for signal in (-60, -70, -80):
            port.push({**HOME, "signal_dbm": signal})
        await wait_until(lambda: client.network.info.signal_dbm == -80)
        await client.get(server.url())
        assert (server.connections, told) == (1, [])


async def test_loss_that_lasts_is_told_with_its_hint(server):
    client, port = make()
    port.push(HOME)
    told = []
    async with client:
        end = client.on_network(told.append)
        await client.get(server.url())
        port.push({"connected": False, "airplane": True})
        await wait_until(lambda: any(each.change for each in told))
        status = next(each for each in told if each.change)
        assert status.change.change is Change.LOST
        assert status.change.gone == {"192.0.2.20"}
        assert client.network.verdict[:2] == (Condition.AIRPLANE, Confidence.HIGH)
        assert "Flight mode" in client.network.verdict.hint
        end()
        told.clear()
        port.push(HOME)
        await wait_until(lambda: client.network.info.kind == "wifi")
        assert told == []


async def test_callback_that_fails_is_logged_and_hurts_nobody(caplog):
    client, port = make()

    def bad(status):
        raise RuntimeError("mine")

    told = []
    async with client:
        client.on_network(bad)
        client.on_network(told.append)
        port.push(HOME)
        await wait_until(lambda: told)
    assert "a callback for the network failed" in caplog.text


async def test_too_many_callbacks_are_refused():
    client, _ = make()
    async with client:
        for _ in range(limits_network.NETWORK_CALLBACKS_MAX):
            client.on_network(lambda status: None)
        with pytest.raises(errors.LocalProtocolError, match="callbacks"):
            client.on_network(lambda status: None)


async def test_id_is_the_same_after_a_restart_with_a_store_and_another_without(tmp_path):
    ids = []
    for store in (tmp_path, tmp_path, None, None):
        client, port = make(store=store)
        port.push(HOME)
        async with client:
            ids.append(client.network.info.id)
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    key = tmp_path / "network.key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.write_bytes(b"cut")  # by a crash
    client, port = make(store=tmp_path)
    port.push(HOME)
    async with client:
        assert client.network.info.id not in ids
    assert len(key.read_bytes()) == 32


async def test_clear_names_reach_neither_log_nor_repr(caplog):
    caplog.set_level("DEBUG")
    client, port = make()
    port.push(HOME)
    async with client:
        shown = repr(client.network)
        port.push({**HOME, "ssid": "Other WiFi"})
        await wait_until(lambda: "new" in caplog.text)
    assert "Home" not in shown + caplog.text
    assert "Other" not in caplog.text


# -- clocks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0 * 365])
async def test_wall_clock_that_is_set_changes_nothing(server, step_s):
    clock = StepClock()
    outside = Outside(clock=clock, network=lambda how: NoNetworkPort())
    told = []
    async with stormline.AsyncClient(outside=outside) as client:
        client.on_network(told.append)
        await client.get(server.url())
        clock.stepped_s = step_s
        for _ in range(3):
            assert (await client.get(server.url())).status_code == 200
        assert (server.connections, told) == (1, [])


async def test_after_a_sleep_idle_connections_are_not_believed(server):
    clock = StepClock()
    told = []
    outside = Outside(clock=clock, network=lambda how: NoNetworkPort())
    async with stormline.AsyncClient(outside=outside) as client:
        client.on_network(told.append)
        await client.get(server.url())
        clock.slept_s = 600.0
        assert (await client.get(server.url())).status_code == 200
        assert [each.change.change for each in told] == [Change.WOKEN]
        await client.get(server.url())
        assert server.connections == 2


# -- verdicts ---------------------------------------------------------------------------------------------------------
async def test_captive_portal_is_found_out_when_requests_fail_and_not_before(server, origin, names, monkeypatch):
    monkeypatch.setattr(probes, "name_servers", lambda: ())  # the machine's own are none of a test's business

    async def portal(request, writer):
        writer.write(plain(b"<title>Sign in</title>" * 20))

    page = await origin(portal)
    outside = replace(
        names({"shop.test": server.address, "down.test": Address("127.0.0.1", 1)}), network=lambda how: NoNetworkPort()
    )
    config = stormline.Config(captive_url=page.url("/generate_204"), network_probes=True, deadline_s=3.0)
    told = []
    async with stormline.AsyncClient(config=config, outside=outside) as client:
        client.on_network(told.append)
        assert (await client.get(f"http://shop.test:{server.address.port}/")).status_code == 200
        assert page.requests == []
        with pytest.raises(httpx2.ConnectError):
            await client.get("http://down.test/")
        await wait_until(lambda: client.network.verdict.condition is Condition.CAPTIVE_PORTAL)
        assert client.network.verdict.confidence is Confidence.HIGH
        assert "log in" in client.network.verdict.hint
        assert told[-1].verdict.condition is Condition.CAPTIVE_PORTAL
        assert [request.target for request in page.requests] == ["/generate_204"]


async def test_probes_that_are_switched_off_are_not_made(origin, names):
    async def portal(request, writer):
        writer.write(plain())

    page = await origin(portal)
    config = stormline.Config(captive_url=page.url(), network_probes=False, deadline_s=2.0)
    outside = replace(names({"down.test": Address("127.0.0.1", 1)}), network=lambda how: NoNetworkPort())
    async with stormline.AsyncClient(config=config, outside=outside) as client:
        for _ in range(2):
            with pytest.raises(httpx2.ConnectError):
                await client.get("http://down.test/")
        assert client.network.verdict.confidence is Confidence.LOW
    assert page.requests == []


# -- ports ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["polling", "off", "auto"])
async def test_every_way_to_watch_carries_requests_and_leaves_nothing(server, how):
    async with stormline.AsyncClient(config=stormline.Config(network_watch=how)) as client:
        assert (await client.get(server.url())).status_code == 200
        assert client.network.verdict.condition in (Condition.OK, Condition.NO_NETWORK)
        client.network_changed()
        assert (await client.get(server.url())).status_code == 200


async def test_way_to_watch_may_come_from_the_environment(server):
    outside = Outside(environ={"STORMLINE_NETWORK_WATCH": "nonsense"})
    with pytest.raises(ConfigError, match="nonsense"):
        async with stormline.AsyncClient(outside=outside) as client:
            await client.get(server.url())


def test_config_refuses_a_watch_and_a_check_that_are_none():
    with pytest.raises(ConfigError, match="network_watch"):
        stormline.Config(network_watch="sniffing")
    with pytest.raises(ConfigError, match="captive_url"):
        stormline.Config(captive_url="https://check.test/")


async def test_polling_looks_while_requests_come_and_stops_when_nobody_asks(monkeypatch):
    monkeypatch.setattr(limits_network, "NETWORK_POLL_S", 0.01)
    monkeypatch.setattr(limits_network, "NETWORK_POLL_IDLE_S", 0.05)
    port, told = PollingPort(), []
    port.watch(lambda: told.append(1))
    try:
        await wait_until(lambda: len(told) > 2)
        await wait_until(lambda: port._timer is None)
        before = len(told)
        await asyncio.sleep(0.05)
        assert len(told) == before
        port.touch()
        assert len(told) == before + 1
    finally:
        port.close()
    port.touch()
    assert len(told) == before + 1


@pytest.mark.skipif(not system.LINUX, reason="the routing socket is Linux' own, or switched off")
async def test_netlink_and_polling_agree_on_this_machine():
    netlink, polling = open_port("netlink"), open_port("polling")
    try:
        one, other = netlink.look(), polling.look()
        assert one.routed == other.routed
        if one.routed:
            assert set(other.addresses) & set(one.addresses)
    finally:
        netlink.close()
        netlink.close()
        polling.close()


def test_synchronous_client_tells_in_its_own_thread():
    port, told = PushedNetwork(), []
    try:
        with stormline.Client(config=stormline.Config(network_port=port)) as client:
            assert client.network.info.kind == "unknown"
            end = client.on_network(lambda status: told.append((threading.current_thread().name, status.info.kind)))
            BACKGROUND.loop().call_soon_threadsafe(port.push, HOME)
            deadline = threading.Event()
            for _ in range(500):
                if told or deadline.wait(0.01):
                    break
            assert told == [("stormline", "wifi")]
            assert client.network.info.kind == "wifi"
            end()
    finally:
        BACKGROUND.stop()


def test_radio_switch_is_read_from_its_files(tmp_path: Path):
    from stormline.net import radio

    assert radio.airplane(root=tmp_path) is None
    for name, kind, soft in (("rfkill0", "wlan", "1"), ("rfkill1", "wwan", "0"), ("rfkill2", "gps", "0")):
        folder = tmp_path / "sys/class/rfkill" / name
        folder.mkdir(parents=True)
        for file, text in (("type", kind), ("soft", soft), ("hard", "0")):
            (folder / file).write_text(text + "\n")
    assert radio.airplane(root=tmp_path) is False
    (tmp_path / "sys/class/rfkill/rfkill1/soft").write_text("1\n")
    assert radio.airplane(root=tmp_path) is True
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/wireless").write_text(
        "Inter-| sta-|   Quality        |\n face | tus | link level noise |\n wlan0: 0000   54.  -56.  -256        0\n"
    )
    assert radio.signal_dbm("wlan0", root=tmp_path) == -56
    assert radio.signal_dbm("wlan1", root=tmp_path) is None
    (tmp_path / "sys/class/net/wlan0/phy80211").mkdir(parents=True)
    assert radio.kind_of("wlan0", ethernet=True, root=tmp_path) == "wifi"
    assert radio.kind_of("rmnet_data0", ethernet=False, root=tmp_path) == "cell"
    assert radio.kind_of("eth0", ethernet=True, root=tmp_path) == "wired"
    assert radio.kind_of("tun0", ethernet=False, what="tun", root=tmp_path) == "unknown"
    assert radio.kind_of("../x", ethernet=False, root=tmp_path) == "unknown"
    assert radio.ssid("lo") is None
