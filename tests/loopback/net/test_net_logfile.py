"""Processes that write a network log: killed in the middle, forked in the middle, and several in one folder."""

import signal
import subprocess
import sys
import threading

import pytest

from stormline.net import logfile
from stormline.telemetry import netlog

pytestmark = pytest.mark.loopback

WRITER = """
import sys
from pathlib import Path
from stormline.net.logfile import LogStore
from stormline.telemetry import netlog
public = bytes.fromhex(sys.argv[2]) or None
store = LogStore(Path(sys.argv[1]), public=public)
store.start()
store.flush(20)
number = 0
while True:
    record = netlog.encode(netlog.Line(at_ms=number, level=20, text=f"{number} " + "x" * (number % 200)))
    if store.write(record):
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()
        number += 1
    else:
        store.flush(1)
"""
ENOUGH = 5000
"""Records told before the kill: several times the tail, so that halves are moved meanwhile."""


def numbers(folder, key):
    reading = netlog.read(logfile.read_folder(folder), key)
    return reading, [int(e.record.text.split()[0]) for e in reading.entries if isinstance(e.record, netlog.Line)]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("extra", [0, 371, 1009])
def test_killed_writer_loses_at_most_the_record_it_was_writing(tmp_path, sealed, extra):
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.from_private_bytes(bytes(range(32)))
    public = key.public_key().public_bytes_raw().hex() if sealed else ""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), public], stdout=subprocess.PIPE)
    guard = threading.Timer(50, process.kill)
    guard.start()
    try:
        for _ in range(ENOUGH + extra):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines()
        assert process.wait() == -signal.SIGKILL
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
    told = ENOUGH + extra + len([line for line in rest if line])
    before, found = numbers(tmp_path, key)
    # The last line told may have been cut on its way to us, and one more record may be written and not told.
    assert found in (list(range(told - 1)), list(range(told)), list(range(told + 1)))
    assert before.lost == 0
    store = logfile.LogStore(tmp_path)
    assert store.flush(20)
    store.close(20)
    after, again = numbers(tmp_path, key)
    assert again == found, "the next start has changed what is there"
    assert after.damaged_bytes == 0
    assert not list(tmp_path.glob("*.tail"))


FORKING = """
import logging, os, sys, threading
import stormline
handler = stormline.NetworkLogHandler(sys.argv[1])
logger = logging.Logger("shop")
logger.addHandler(handler)
going = threading.Event()
def chatter():
    for _ in range(500):  # all of it fits into the tail: nothing need be dropped
        logger.info("chatter")
        if going.wait(0.001):
            return
threads = [threading.Thread(target=chatter) for _ in range(2)]
for thread in threads:
    thread.start()
logger.info("parent")
handler.flush()
children = []
for number in range(4):
    child = os.fork()
    if not child:
        logger.info("child %d", number)
        handler.close()
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
going.set()
for thread in threads:
    thread.join()
handler.flush()
logger.info("parent again")
handler.flush()
handler.close()
"""


def test_children_forked_in_the_middle_of_writing_write_files_of_their_own(tmp_path):
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path)], check=True, timeout=50)
    reading = netlog.read(logfile.read_folder(tmp_path))
    lines = [entry for entry in reading.entries if isinstance(entry.record, netlog.Line)]
    said = [entry.record.text for entry in lines if entry.record.text != "chatter"]
    assert sorted(said) == ["child 0", "child 1", "child 2", "child 3", "parent", "parent again"]
    assert len({entry.instance for entry in lines}) == 5
    assert (reading.damaged_bytes, reading.lost) == (0, 0)


TWO = """
import sys
from pathlib import Path
from stormline.net.logfile import LogStore
from stormline.telemetry import netlog
store = LogStore(Path(sys.argv[1]))
store.start()
for number in range(2000):
    record = netlog.encode(netlog.Line(at_ms=number, level=20, text=f"{sys.argv[2]} {number}"))
    while not store.write(record):
        store.flush(5)
store.close(30)
"""


def test_processes_that_share_a_folder_lose_nothing_of_each_other(tmp_path):
    names = ["a", "b", "c"]
    running = [subprocess.Popen([sys.executable, "-c", TWO, str(tmp_path), name]) for name in names]
    assert [process.wait(50) for process in running] == [0, 0, 0]
    entries = netlog.read(logfile.read_folder(tmp_path)).entries
    texts = [entry.record.text for entry in entries if isinstance(entry.record, netlog.Line)]
    for name in names:
        assert [text for text in texts if text.startswith(name)] == [f"{name} {number}" for number in range(2000)]
