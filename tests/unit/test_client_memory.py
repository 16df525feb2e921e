"""Files of what was learned of networks: whole, private, bounded, joined, and never an error; on a `VirtualLoop`."""

import asyncio
import logging
import os
import stat
import threading

import pytest

from stormline.client.memory import NetworkFiles, NetworkMemory, decode, encode
from stormline.client.steering import Steering
from stormline.core import limits_memory
from stormline.core.values import Address
from stormline.policy.shape import Network
from stormline.policy.snapshot import AddressRecord, HostRecord, NetworkRecord
from stormline.testing.simloop import SimClock, SimRng, on_virtual_time

NOW = 1_800_000_000
WIFI = "wifi"


def record(*hosts, at=NOW):
    return NetworkRecord(at=at, hosts=tuple(HostRecord(host, at) for host in hosts))


def save(files, kept, network=WIFI, wall_s=NOW + 1.0):
    files.save(network, kept, wall_s=wall_s, epoch=files.epoch)


def hosts(kept):
    return [each.host for each in kept.hosts]


class TestFiles:
    def test_what_was_saved_is_loaded(self, tmp_path):
        save(NetworkFiles(tmp_path), record("a.test"))
        assert NetworkFiles(tmp_path).load(WIFI) == record("a.test")
        assert NetworkFiles(tmp_path).load("cell") is None

    def test_folder_and_file_are_for_their_owner_alone(self, tmp_path):
        files = NetworkFiles(tmp_path / "store")
        save(files, record("a.test"))
        path = files.path(WIFI)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    @pytest.mark.parametrize("network", ["../../etc/passwd", "a/b", "", "\0", "x" * 5000, "Café \ud800"])
    def test_network_of_any_name_has_a_file_in_the_folder(self, tmp_path, network):
        files = NetworkFiles(tmp_path)
        save(files, record("a.test"), network)
        assert hosts(files.load(network)) == ["a.test"]
        assert os.listdir(tmp_path) == ["networks"]

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"", "damaged"),
            (b"\xff\xfe", "damaged"),
            (b"[]", "damaged"),
            (b'{"version":2,"network":[0,null,[],null,null,null,[["a"]]]}', "damaged"),
            (b'{"version":3,"network":{"new":"shape"}}', "version 3"),
            (b'{"network":[]}', "damaged"),
            (b"[" * 5000, "damaged"),
            (b" " * (limits_memory.MEMORY_FILE_BYTES_MAX + 1), "more than"),
        ],
    )
    def test_file_that_cannot_be_used_counts_as_empty_with_one_line_and_is_replaced(self, tmp_path, caplog, data, said):
        files = NetworkFiles(tmp_path)
        save(files, record("a.test"))
        files.path(WIFI).write_bytes(data)
        caplog.set_level(logging.WARNING)
        assert files.load(WIFI) is None
        assert len(caplog.records) == 1
        assert said in caplog.text
        save(files, record("b.test"))
        assert hosts(files.load(WIFI)) == ["b.test"]

    def test_folder_that_cannot_be_used_is_told_once_and_raises_nothing(self, tmp_path, caplog):
        (tmp_path / "networks").write_text("in the way")
        files = NetworkFiles(tmp_path)
        assert files.load(WIFI) is None
        caplog.clear()
        save(files, record("a.test"))
        save(files, record("a.test"))
        files.forget()
        assert len([each for each in caplog.records if "cannot be kept" in each.getMessage()]) == 1

    def test_two_clients_take_in_what_the_other_has_written(self, tmp_path):
        one, two = NetworkFiles(tmp_path), NetworkFiles(tmp_path)
        save(one, record("a.test", "b.test", at=NOW - 10))
        save(two, record("b.test", "c.test", at=NOW))
        save(one, record("a.test", "b.test", at=NOW - 10))
        kept = {each.host: each.at for each in one.load(WIFI).hosts}
        assert kept == {"a.test": NOW - 10, "b.test": NOW, "c.test": NOW}

    def test_many_writers_at_once_leave_a_whole_file(self, tmp_path):
        stores = [NetworkFiles(tmp_path) for _ in range(4)]

        def write(number):
            for turn in range(10):
                save(stores[number], record(f"h{number}.test", at=NOW + turn), wall_s=NOW + 60.0)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = decode(stores[0].path(WIFI).read_bytes())
        assert {each.host: each.at for each in kept.hosts} == {f"h{number}.test": NOW + 9 for number in range(4)}
        assert len(os.listdir(tmp_path / "networks")) == 1

    def test_words_of_the_future_give_way_when_the_clock_was_set_back(self, tmp_path):
        files = NetworkFiles(tmp_path)
        save(files, record("a.test", at=NOW + 86_400), wall_s=NOW + 90_000.0)
        save(files, record("a.test", at=NOW), wall_s=NOW + 1.0)
        assert files.load(WIFI).hosts[0].at == NOW

    def test_hosts_unused_for_a_week_are_left_out(self, tmp_path):
        files = NetworkFiles(tmp_path)
        save(
            files,
            record("old.test", at=NOW - round(limits_memory.MEMORY_LIFE_S)),
            wall_s=NOW - limits_memory.MEMORY_LIFE_S + 5.0,
        )
        assert hosts(files.load(WIFI)) == ["old.test"]
        save(files, record("new.test"))
        assert hosts(files.load(WIFI)) == ["new.test"]

    def test_networks_written_longest_ago_go_and_what_a_crash_left(self, tmp_path):
        files = NetworkFiles(tmp_path)
        for number in range(limits_memory.MEMORY_NETWORKS_MAX + 3):
            save(files, record("a.test"), f"net-{number}")
            os.utime(files.path(f"net-{number}"), (1000 + number, 1000 + number))
        left = tmp_path / "networks" / ".0011.json.4711"
        left.write_text("half")
        os.utime(left, (1000, 1000))
        foreign = tmp_path / "networks" / "notes.txt"
        foreign.write_text("mine")
        save(files, record("a.test"), "last", wall_s=NOW + 4000.0)
        names = os.listdir(tmp_path / "networks")
        assert len(names) == limits_memory.MEMORY_NETWORKS_MAX + 1
        assert foreign.exists()
        assert not left.exists()
        assert files.load("net-0") is None
        assert files.load("last") is not None

    def test_forgotten_is_all_and_a_write_begun_before_comes_too_late(self, tmp_path):
        files = NetworkFiles(tmp_path)
        save(files, record("a.test"))
        epoch = files.epoch
        files.forget()
        files.save(WIFI, record("a.test"), wall_s=NOW + 1.0, epoch=epoch)
        assert os.listdir(tmp_path / "networks") == []


def test_file_that_would_be_too_large_keeps_the_hosts_used_last():
    address = AddressRecord(
        "2001:0db8:0000:0000:0000:0000:0000:0001%" + "z" * 20, 65535, "c" * 60, NOW, 255, True, NOW, 1
    )
    each = HostRecord(
        "", NOW, addresses=tuple(address._replace(port=port) for port in range(limits_memory.MEMORY_ADDRESSES_MAX))
    )
    many = tuple(
        each._replace(host=f"{number:03}" + "x" * 250, at=NOW + number)
        for number in range(limits_memory.MEMORY_HOSTS_MAX)
    )
    kept = decode(encode(NetworkRecord(at=NOW, hosts=many)))
    assert 0 < len(kept.hosts) < len(many)
    assert kept.hosts[-1].host == many[-1].host


class Client:
    """A client's memory on virtual time; notes each write."""

    def __init__(self, folder):
        self.loop = asyncio.get_running_loop()
        clock = SimClock(self.loop)
        self.steering = Steering(Network(WIFI, WIFI), rng=SimRng(1), wall_s=clock.wall)
        self.files = NetworkFiles(folder)
        self.written = []
        self.memory = NetworkMemory(self.steering, self.files, clock, self.aside)

    async def aside(self, work):
        self.written.append(self.loop.time())
        work()

    def learn(self, host="a.test", address="192.0.2.1"):
        self.steering.enter_network()
        self.steering.connected(host, Address(address, 443), connect_s=0.02, tls_s=0.03)


class TestMemory:
    @on_virtual_time
    async def test_writes_are_few_however_much_is_learned(self, tmp_path):
        client = Client(tmp_path)
        for _ in range(3000):
            client.learn()
            await asyncio.sleep(0.1)
        await client.memory.aclose()
        first, *later = client.written
        assert first == pytest.approx(limits_memory.MEMORY_SAVE_FIRST_S, abs=0.2)
        assert len(later) <= 300 / limits_memory.MEMORY_SAVE_S + 1
        assert client.steering.timeouts.dropped == 0

    @on_virtual_time
    async def test_nothing_is_written_where_nothing_was_learned(self, tmp_path):
        client = Client(tmp_path)
        client.steering.enter_network()
        await asyncio.sleep(1000.0)
        await client.memory.aclose()
        assert client.written == []
        assert os.listdir(tmp_path) == []

    @on_virtual_time
    async def test_what_was_learned_last_is_written_at_the_end_and_known_at_the_next_start(self, tmp_path):
        one = Client(tmp_path)
        one.learn(address="192.0.2.9")
        await one.memory.aclose()
        await asyncio.sleep(3600.0)
        two = Client(tmp_path)
        places = [Address("192.0.2.1", 443), Address("192.0.2.9", 443)]
        assert two.steering.order("a.test", places, ()) == places[::-1]
        await two.memory.aclose()

    @on_virtual_time
    async def test_each_network_has_its_own_and_the_one_left_is_written(self, tmp_path):
        client = Client(tmp_path)
        client.learn("home.test")
        client.steering.network = Network("cell", "cell")
        client.learn("street.test")
        await client.memory.aclose()
        assert hosts(client.files.load(WIFI)) == ["home.test"]
        assert hosts(client.files.load("cell")) == ["street.test"]

    @on_virtual_time
    async def test_forgotten_is_here_and_on_disk_and_learning_goes_on(self, tmp_path):
        client = Client(tmp_path)
        client.learn(address="192.0.2.9")
        await asyncio.sleep(limits_memory.MEMORY_SAVE_FIRST_S + 1.0)
        assert client.files.load(WIFI) is not None
        client.memory.forget()
        assert client.files.load(WIFI) is None
        places = [Address("192.0.2.1", 443), Address("192.0.2.9", 443)]
        assert client.steering.order("a.test", places, ()) == places
        client.learn("b.test")
        await client.memory.aclose()
        assert hosts(client.files.load(WIFI)) == ["b.test"]

    @on_virtual_time
    async def test_disk_that_hangs_does_not_hold_up_the_end(self, tmp_path):
        client = Client(tmp_path)
        client.memory._aside = lambda work: asyncio.sleep(3600.0)
        client.learn()
        began = client.loop.time()
        await client.memory.aclose()
        assert client.loop.time() - began <= limits_memory.MEMORY_CLOSE_S + 0.1
