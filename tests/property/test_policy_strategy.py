"""Whatever happened on a network: what is kept of it is bounded, survives its file, ages, and can be joined."""

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from stormline.client import memory
from stormline.core import limits_heartbeat, limits_memory
from stormline.policy import snapshot, strategy
from stormline.policy.addresses import AddressBook, AddressOutcome, Candidate, Verdict
from stormline.policy.shape import Network
from stormline.policy.snapshot import (
    FamilyRecord,
    HeartbeatRecord,
    HostRecord,
    NetworkRecord,
    PathRecord,
    ProtocolRecord,
    RateRecord,
)
from stormline.policy.strategy import Strategy
from stormline.policy.timeouts import Outcome, TimeoutPolicy

NET = Network("n", "wifi")
WALL_S = 1_800_000_000.0
HOSTS = [f"host-{number}.test" for number in range(300)]
PLACES = [Candidate(f"192.0.2.{number}", 443) for number in range(12)] + [Candidate("2001:db8::1", 443)]
wild = st.none() | st.floats() | st.integers() | st.text(max_size=2)


@dataclasses.dataclass
class Client:
    book: AddressBook
    times: TimeoutPolicy
    known: Strategy

    @classmethod
    def new(cls):
        book = AddressBook()
        return cls(book, TimeoutPolicy(), Strategy(book.worked_within))

    def collect(self, now):
        return strategy.collect(NET, self.book, self.times, self.known, now, WALL_S)

    def recall(self, kept, now):
        strategy.recall(kept, NET, self.book, self.times, self.known, now, WALL_S)


@dataclasses.dataclass
class Event:
    host: str
    place: Candidate
    verdict: Verdict
    protocol: str
    path: str
    number: object
    passed_s: float


events = st.builds(
    Event,
    st.sampled_from(HOSTS),
    st.sampled_from(PLACES),
    st.sampled_from(Verdict),
    st.text(max_size=3) | st.sampled_from(["h1", "h2"]),
    st.text(max_size=8),
    wild,
    st.floats(0, 5000),
)


def live(client, history, now=0.0):
    for each in history:
        now += each.passed_s
        worked = each.verdict is Verdict.WORKED
        client.book.observe(AddressOutcome("n", each.host, each.place, each.verdict, each.number, each.number), now)
        client.known.observe("n", each.host, each.protocol, now, worked=worked, pace_s=each.number, tried_s=each.number)
        client.known.heartbeats.observe("n", each.number, now, alive=worked)
        client.known.heartbeats.dialled("n", now, worked=True)
        client.times.observe_rtt(NET, each.host, each.number, now)
        client.times.observe_rate(NET, now, down_bytes_per_s=each.number)
        outcome = Outcome(network=NET, host=each.host, path_class=each.path, answered=worked, first_byte_s=each.number)
        client.times.observe(outcome, now)
    return now


@given(st.lists(events, max_size=80))
def test_what_is_kept_is_bounded_and_survives_its_file(history):
    client = Client.new()
    record = snapshot.bound(client.collect(live(client, history)))
    data = memory.encode(record)
    assert len(data) <= limits_memory.MEMORY_FILE_BYTES_MAX
    assert memory.decode(data) == record
    assert len(record.hosts) <= limits_memory.MEMORY_HOSTS_MAX
    assert all(len(host.addresses) <= limits_memory.MEMORY_ADDRESSES_MAX for host in record.hosts)
    assert all(len(host.paths) <= limits_memory.MEMORY_PATHS_MAX for host in record.hosts)
    assert not any(each.path in str(data) for each in history if len(each.path) > 6 and each.path.isalpha())


@given(st.lists(events, max_size=60))
def test_what_is_given_back_is_what_was_kept(history):
    one, two = Client.new(), Client.new()
    now = live(one, history)
    kept = one.collect(now)
    two.recall(memory.decode(memory.encode(kept)), now)
    again = two.collect(now)
    assert [each.host for each in again.hosts] == [each.host for each in kept.hosts]
    for was, became in zip(kept.hosts, again.hosts, strict=True):
        assert (became.at, became.uses, became.rtt, became.protocols) == (was.at, was.uses, was.rtt, was.protocols)
        assert {each[:3] for each in became.addresses} <= {each[:3] for each in was.addresses}
        assert {each.digest for each in became.paths} == {each.digest for each in was.paths}
    assert memory.decode(memory.encode(again)) == again


@given(st.lists(events, max_size=60), st.floats(0, 1e9))
def test_nothing_is_taken_over_that_is_older_than_its_life(history, away_s):
    one, two = Client.new(), Client.new()
    now = live(one, history)
    kept = one.collect(now)
    later = now + limits_memory.MEMORY_LIFE_S + 1.0 + away_s
    two.recall(kept, later)
    assert two.collect(later).hosts == ()
    assert two.collect(later).heartbeat is None
    for host in {each.host for each in history}:
        assert [each.candidate for each in two.book.plan("n", host, PLACES[:12], later)] == PLACES[:12]
        assert two.times.rtt_s(NET, host, 0.5) is None


numbers = st.integers(-(2**53), 2**53)
buckets = st.lists(st.integers(-2, 60), max_size=3).map(tuple)
families = st.none() | st.builds(FamilyRecord, numbers, numbers)
protocols = st.builds(ProtocolRecord, st.text(max_size=70), st.floats(), st.floats(), st.none() | numbers, numbers)
hosts = st.builds(
    HostRecord,
    st.sampled_from(HOSTS) | st.text(max_size=300),
    numbers | st.integers(),
    st.floats(),
    numbers,
    families,
    st.lists(
        st.builds(
            snapshot.AddressRecord, st.text(max_size=80), numbers, st.text(max_size=2), numbers, numbers,
            st.booleans(), numbers, st.none() | numbers,
        ),
        max_size=3,
    ).map(tuple),
    buckets,
    st.lists(st.builds(PathRecord, st.text(max_size=70), buckets, st.none() | numbers), max_size=3).map(tuple),
    st.lists(protocols, max_size=3).map(tuple),
)  # fmt: skip
beats = st.none() | st.builds(
    HeartbeatRecord, numbers, numbers, numbers, numbers, numbers, st.booleans(), numbers
)  # fmt: skip
rates = st.none() | st.builds(RateRecord, st.floats(), numbers)
records = st.builds(
    NetworkRecord, numbers | st.integers(), families, buckets, rates, rates, beats,
    st.lists(hosts, max_size=2).map(tuple),
)  # fmt: skip


@given(records, st.floats(-1e6, 1e6))
def test_any_record_can_be_taken_over_and_leaves_the_policies_working(record, now):
    client = Client.new()
    client.recall(snapshot.bound(record), now)
    assert len(memory.encode(client.collect(now))) <= limits_memory.MEMORY_FILE_BYTES_MAX
    for host in record.hosts:
        assert client.book.plan("n", host.host, PLACES, now)
        assert sorted(client.known.choose("n", host.host, ("h2", "h1"), now).protocols) == ["h1", "h2"]
        assert client.known.most_used("n", now, 3) is not None
    assert (
        limits_heartbeat.HEARTBEAT_MIN_S <= client.known.heartbeats.plan("n", now) <= limits_heartbeat.HEARTBEAT_MAX_S
    )


few = st.builds(HostRecord, st.sampled_from(HOSTS[:5]), st.integers(0, 9) | st.integers(), st.floats(), st.just(0))
plain = st.builds(
    NetworkRecord, st.integers(0, 9), families, st.just(()), rates, rates,
    st.none() | st.builds(HeartbeatRecord, st.integers(0, 9), numbers),
    st.lists(few, max_size=5).map(tuple),
)  # fmt: skip


@given(plain, plain, plain)
def test_joining_is_bounded_keeps_the_newest_of_each_host_and_is_at_rest_when_done(one, other, third):
    joined = snapshot.merge(one, other)
    sound = {}
    for record in (snapshot.bound(one), snapshot.bound(other)):
        for host in record.hosts:
            sound[host.host] = max(sound.get(host.host, host.at), host.at)
    assert {host.host: host.at for host in joined.hosts} == sound
    assert snapshot.bound(joined) == joined
    assert snapshot.merge(joined, joined) == joined
    assert len(snapshot.merge(joined, third).hosts) <= limits_memory.MEMORY_HOSTS_MAX


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1, exclude_max=True)), max_size=200))
def test_trials_are_rare_whatever_chance_says(asks):
    known, now, tried = Strategy(lambda *_: True), 0.0, []
    known.enter("n", now)
    for passed_s, chance in asks:
        now += passed_s
        if known.explore("n", now, chance):
            tried.append(now)
            assert chance < limits_memory.EXPLORE_SHARE
    assert all(at >= limits_memory.EXPLORE_QUIET_S for at in tried)
    assert all(later - earlier >= limits_memory.EXPLORE_PAUSE_S for earlier, later in itertools.pairwise(tried))
