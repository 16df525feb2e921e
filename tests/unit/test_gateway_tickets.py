"""Keys of TLS tickets: shared, replaced in time, and what is made of them in real handshakes in memory."""

import contextlib
import ssl

import pytest

from stormline.assembly.authority import ensure_authority
from stormline.core import errors, limits_carriers
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.gateway import tickets
from stormline.gateway.tickets import BUCKET, TicketKey, TicketKeys, maker, new_key, rotated
from stormline.gateway.tls import LiveTls
from stormline.net.clock import SystemClock, SystemRng


class Clock:
    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(name="files", scope="module")
def _files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    return ensure_authority(folder, clock=SystemClock(), rng=SystemRng()).issue("gateway", names=["g.test"])


def shake(client, context_of, session):
    """Shake hands in memory; give the client's end."""
    to_client, to_server, hello = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = client.wrap_bio(to_client, hello, session=session)
    with contextlib.suppress(ssl.SSLWantReadError):
        theirs.do_handshake()
    said = hello.read()
    to_server.write(said)
    ours = context_of(said).wrap_bio(to_server, to_client, server_side=True)
    for end in (ours, theirs, ours):
        to_server.write(hello.read())
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    ours.write(b"!")
    theirs.read(1)
    return theirs


def test_context_with_the_same_keys_resumes_anothers_sessions_over_one_rotation_and_not_over_two(files):
    clock = Clock()
    one, two = TicketKeys(clock, SystemRng()), TicketKeys(clock, SystemRng())
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    def meet(keys, session=None):
        """Shake hands in memory; give the client's end."""
        return shake(client, LiveTls(files, keys).context, session)

    first = meet(one)
    assert not first.session_reused
    assert not meet(two, first.session).session_reused  # keys of its own
    two.keys = one.keys
    assert meet(two, first.session).session_reused
    two.keys = rotated(two.keys, new_key(SystemRng(), clock.now))
    assert meet(two, first.session).session_reused
    clock.now += 3 * limits_carriers.TICKET_LOOK_S  # the new key makes tickets from now on
    fresh = meet(two)
    assert meet(two, fresh.session).session_reused
    assert meet(two, first.session).session_reused
    two.keys = rotated(two.keys, new_key(SystemRng(), clock.now))
    assert not meet(two, first.session).session_reused
    assert meet(two, fresh.session).session_reused


async def test_processes_come_to_hold_the_same_keys_and_one_replaces_them_in_time():
    clock, broker = Clock(), MemoryBroker()
    one, two = TicketKeys(clock, SystemRng()), TicketKeys(clock, SystemRng())
    buckets = [await MemoryEngine(broker).kv(BUCKET, persistent=False) for _ in range(2)]
    await one.follow(buckets[0])
    first = one.keys
    await two.follow(buckets[1])
    assert two.keys == first
    clock.now += limits_carriers.TICKET_ROTATION_S + 1
    await two.follow(buckets[1])
    assert len(two.keys) == 2
    assert two.keys[1] == first[0]
    assert maker(two.keys, clock.now) == first[0]  # not everybody knows the new one yet
    await one.follow(buckets[0])
    assert one.keys == two.keys
    clock.now += 2 * limits_carriers.TICKET_LOOK_S
    assert maker(two.keys, clock.now) == two.keys[0]


async def test_two_that_replace_at_once_agree_at_the_next_look():
    clock, broker = Clock(), MemoryBroker()
    one, two = TicketKeys(clock, SystemRng()), TicketKeys(clock, SystemRng())
    kv = await MemoryEngine(broker).kv(BUCKET, persistent=False)

    class Late:
        """Another is quicker between our look and our write."""

        async def get(self, key):
            entry = await kv.get(key)
            await two.follow(kv)
            return entry

        create, update = kv.create, kv.update

    with pytest.raises(errors.EngineError):
        await one.follow(Late())
    await one.follow(kv)
    assert one.keys == two.keys


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x81\xa4keys\x90", b"x" * 5000])
async def test_damaged_record_is_replaced(damage):
    clock, broker = Clock(), MemoryBroker()
    kv = await MemoryEngine(broker).kv(BUCKET, persistent=False)
    await kv.put("tls", damage)
    keys, other = TicketKeys(clock, SystemRng()), TicketKeys(clock, SystemRng())
    await keys.follow(kv)
    await other.follow(kv)
    assert keys.keys == other.keys


def test_python_that_is_not_known_leaves_one_warning_and_serves(files, monkeypatch, caplog):
    monkeypatch.setattr(tickets.sys, "version_info", (4, 0, 0))
    keys = TicketKeys(Clock(), SystemRng())
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for _ in range(3):
        assert shake(client, LiveTls(files, keys).context, None).version() == "TLSv1.3"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_secret_is_not_shown_and_sizes_are_checked():
    key = new_key(SystemRng(), 1.0)
    assert key.cipher.hex() not in repr(key)
    assert repr(key) == f"TicketKey({key.name.hex()})"
    with pytest.raises(ValueError, match="wrong size"):
        TicketKey(b"short", key.cipher, key.mac, 1.0)
