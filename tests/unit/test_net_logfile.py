"""The network log on disk: a ring, shared by processes; no broken folder and no full disk takes the app down."""

import errno
import logging
import os
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.core import limits_netlog as limits
from stormline.net import logfile
from stormline.net.clock import SystemRng
from stormline.net.logfile import LogStore
from stormline.telemetry import netlog
from stormline.telemetry.netlog import Began, Line

KEY = X25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
WAIT_S = 30.0


def line(number, size=0):
    return netlog.encode(Line(at_ms=number, level=20, text=f"{number} " + SystemRng().token_bytes(size).hex()))


def numbers(folder, key=None):
    return [int(each.record.text.split()[0]) for each in read(folder, key).entries if isinstance(each.record, Line)]


def read(folder, key=None):
    return netlog.read(logfile.read_folder(folder), key)


@pytest.fixture
def opened(tmp_path):
    """Open stores of one folder; those left at the end are closed."""
    stores = []

    def make(**options):
        store = LogStore(options.pop("folder", tmp_path / "log"), **options)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def leave(store):
    """Be a process that ended with no word: its files stay as they are, and its lock goes."""
    assert store.flush(WAIT_S)
    with store._lock:
        tail, store._tail, store._closed = store._tail, None, True
    path, data = tail.path, bytes(tail.map[:])
    store.close()
    tail.close()
    path.write_bytes(data)


def test_store_gives_what_was_written_before_and_after_the_flush(opened, tmp_path):
    store = opened(client="test/1")
    for number in range(10):
        assert store.write(line(number))
    assert store.flush(WAIT_S)
    assert store.write(line(10))
    first, *_ = read(tmp_path / "log").entries
    assert isinstance(first.record, Began)
    assert (first.record.client, first.record.pid) == ("test/1", os.getpid())
    assert numbers(tmp_path / "log") == list(range(11))
    assert [path.suffix for path in sorted((tmp_path / "log").iterdir())] == [".slog", ".tail"]


def test_closed_store_leaves_compressed_files_alone(opened, tmp_path):
    store = opened()
    for number in range(100):
        store.write(line(number))
    store.close(WAIT_S)
    (path,) = (tmp_path / "log").iterdir()
    assert path.suffix == ".slog"
    assert path.stat().st_size < 3000
    assert path.stat().st_mode & 0o077 == 0
    assert numbers(tmp_path / "log") == list(range(100))
    assert not store.write(line(1))
    assert store.lost == 1


def test_tail_of_a_dead_process_is_taken_over_in_order_and_once(opened, tmp_path):
    dead = opened()
    for number in range(5):
        dead.write(line(number))
    assert dead.flush(WAIT_S)
    dead.write(line(5))
    with dead._lock:
        half = dead._active
        half.records = []  # what is in the tail is not moved any more: the process is gone
    leave(dead)
    assert numbers(tmp_path / "log") == [0, 1, 2, 3, 4, 5]
    after = opened()
    assert after.flush(WAIT_S)
    assert numbers(tmp_path / "log") == [0, 1, 2, 3, 4, 5]
    assert len(list((tmp_path / "log").glob("*.tail"))) == 1


@pytest.mark.parametrize("public", [None, PUBLIC])
def test_recovered_tail_holds_every_whole_record(tmp_path, public):
    made = netlog.FileWriter(b"instance", 5, public=public, entropy=bytes(range(32)))
    blocks = [made.record(line(number), number) for number in range(6)]
    blocks[3] = blocks[3][:-1] + b"\xff"
    path = tmp_path / "0000000000005-dead.tail"
    path.write_bytes(made.header + bytes(100) + b"".join(blocks[:5]) + bytes(1000) + blocks[5][:20])
    store = LogStore(tmp_path)
    assert store.flush(WAIT_S)
    store.close(WAIT_S)
    assert not path.exists()
    assert numbers(tmp_path, KEY) == [0, 1, 2, 4]


def test_tail_of_a_live_process_is_left_alone(opened, tmp_path):
    first, second = opened(), opened()
    first.write(line(1))
    second.write(line(2))
    assert first.flush(WAIT_S)
    assert second.flush(WAIT_S)
    assert len(list((tmp_path / "log").glob("*.tail"))) == 2
    first.write(line(3))
    assert sorted(numbers(tmp_path / "log")) == [1, 2, 3]


def test_ring_drops_the_oldest_files_whole_and_stays_within_its_bytes(opened, tmp_path):
    store = opened(bytes_max=limits.NETLOG_BYTES_MIN)
    for number in range(300):
        store.write(line(number, size=7000))
        if number % 5 == 4:
            assert store.flush(WAIT_S)
    assert sum(path.stat().st_size for path in (tmp_path / "log").iterdir()) <= limits.NETLOG_BYTES_MIN + 200_000
    found = numbers(tmp_path / "log")
    assert found[0] > 0
    assert found == list(range(found[0], 300))
    assert store.lost == 0


def test_sealed_store_holds_no_word_in_the_clear_and_opens_with_the_key(opened, tmp_path):
    store = opened(public=PUBLIC)
    store.write(netlog.encode(Line(at_ms=1, level=20, text="7 plain words")))
    assert store.flush(WAIT_S)
    store.write(netlog.encode(Line(at_ms=1, level=20, text="8 plain words")))
    assert not any(b"plain words" in data for data in logfile.read_folder(tmp_path / "log"))
    assert numbers(tmp_path / "log") == []
    assert read(tmp_path / "log").sealed == 3
    assert numbers(tmp_path / "log", KEY) == [7, 8]


def test_burst_beyond_the_tail_is_dropped_and_counted_and_nobody_waits(opened, monkeypatch):
    going = threading.Event()
    original = LogStore._append
    monkeypatch.setattr(LogStore, "_append", lambda *args: going.wait(WAIT_S) and original(*args))
    going.set()
    store = opened()
    store.start()
    assert store.flush(WAIT_S)
    going.clear()
    count = 4 * limits.NETLOG_HALF_BYTES // 1000
    taken = sum(store.write(line(number, size=500)) for number in range(count))
    assert 0 < taken < count
    assert store.lost == count - taken
    going.set()
    assert store.flush(WAIT_S)
    found = numbers(store.folder)
    assert len(found) == taken
    assert found == sorted(found)
    assert store.write(line(count))


def test_too_large_record_is_counted(opened):
    store = opened()
    assert not store.write(bytes(limits.NETLOG_RECORD_BYTES_MAX + 1))
    assert store.lost == 1


@pytest.mark.parametrize("kind", ["file", "below-file"])
def test_folder_that_cannot_be_used_costs_one_warning(opened, tmp_path, caplog, kind):
    blocker = tmp_path / "file"
    blocker.write_text("x")
    store = opened(folder=blocker if kind == "file" else blocker / "log")
    for number in range(5):
        store.write(line(number))
    store._worker.join(WAIT_S)
    assert store.problem
    assert not store.write(line(6))
    assert not store.flush(WAIT_S)
    assert store.lost == 6
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 1


def test_disk_that_fills_costs_what_did_not_fit_and_goes_on(opened, monkeypatch, caplog):
    store = opened()
    store.write(line(1))
    assert store.flush(WAIT_S)
    full, real = [True], os.pwrite

    def pwrite(file, data, at):
        if full[0]:
            real(file, data[:7], at)  # a part of it still fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, at)

    monkeypatch.setattr(logfile.os, "pwrite", pwrite)
    store.write(line(2))
    assert store.flush(WAIT_S)
    full[0] = False
    store.write(line(3))
    assert store.flush(WAIT_S)
    reading = read(store.folder)
    assert numbers(store.folder) == [1, 3]
    assert (reading.damaged_bytes, reading.lost, store.lost) == (0, 1, 1)
    assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 1


def test_full_disk_makes_room_by_dropping_the_oldest(opened, monkeypatch):
    dead = opened()
    dead.write(line(1))
    dead.close(WAIT_S)
    store = opened()
    store.write(line(2))
    assert store.flush(WAIT_S)
    real = os.pwrite

    def pwrite(file, data, at):
        if len(list(store.folder.glob("*.slog"))) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, at)

    monkeypatch.setattr(logfile.os, "pwrite", pwrite)
    store.write(line(3))
    assert store.flush(WAIT_S)
    assert numbers(store.folder) == [2, 3]
    assert store.lost == 0


@pytest.mark.parametrize("garbage", [b"", b"\0" * 5000, b"garbage" * 100, b"\x8bSLNLOG\n" + b"\xff" * 100])
def test_broken_files_at_the_start_are_no_obstacle(opened, tmp_path, garbage):
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / "0000000000001-broken.tail").write_bytes(garbage)
    (folder / "0000000000001-broken-000001.slog").write_bytes(garbage)
    (folder / "0000000000001-half.new").write_bytes(garbage)
    os.utime(folder / "0000000000001-half.new", (1, 1))
    (folder / "notes.txt").write_text("mine")
    store = opened()
    store.write(line(1))
    assert store.flush(WAIT_S)
    assert numbers(folder) == [1]
    names = {path.name for path in folder.iterdir()}
    assert "notes.txt" in names
    assert not any(name.endswith((".new", "broken.tail")) for name in names)


def test_many_threads_write_at_once_and_each_keeps_its_order(opened):
    store = opened()
    store.start()
    assert store.flush(WAIT_S)

    def work(first):
        for number in range(first, first + 200):
            while not store.write(line(number)):
                store.flush(WAIT_S)

    threads = [threading.Thread(target=work, args=(1000 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.flush(WAIT_S)
    found = numbers(store.folder)
    assert len(found) == len(set(found)) == 800
    for each in range(4):
        own = [number for number in found if number // 1000 == each]
        assert own == sorted(own)


def test_line_from_within_a_writing_is_dropped_and_does_no_harm(opened, monkeypatch):
    store = opened()
    store.write(line(1))
    assert store.flush(WAIT_S)
    real = netlog.FileWriter.record

    def record(self, data, number):
        assert not store.write(line(99))  # as a finalizer that logs would
        return real(self, data, number)

    monkeypatch.setattr(netlog.FileWriter, "record", record)
    assert store.write(line(2))
    assert numbers(store.folder) == [1, 2]
    assert store.lost == 1


def test_shared_store_is_one_until_the_last_gives_it_back(tmp_path):
    made = []

    def make():
        made.append(LogStore(tmp_path / "log"))
        return made[-1]

    first = logfile.share(tmp_path / "log", public=None, make=make)
    assert logfile.share(tmp_path / "x" / ".." / "log", public=None, make=make) is first
    assert not logfile.unshare(first)
    assert logfile.unshare(first)
    assert not logfile.unshare(first)
    again = logfile.share(tmp_path / "log", public=None, make=make)
    assert again is not first
    assert logfile.unshare(again)
