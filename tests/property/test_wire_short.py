"""Exchanges of short HTTP, for any input and any loss: what one side puts out the other gets, once and in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stormline.core import errors, limits_carriers
from stormline.gateway import short_http
from stormline.wire import short

COUNTS = st.integers(0, 2**40)
NAMES = st.text(max_size=limits_carriers.SHORT_NAME_CHARS_MAX)


@given(channel=NAMES, received=COUNTS, begin=COUNTS, data=st.binary(max_size=200), wait=COUNTS, room=COUNTS)
def test_exchange_is_read_as_it_was_written_and_cut_short_it_is_none(channel, received, begin, data, wait, room):
    ask = short.Ask(channel, received, begin, data, wait, room)
    tell = short.Tell(channel or "c", received, begin, data, ended=bool(wait % 2))
    assert short.decode_ask(short.encode(ask)) == ask
    assert short.decode_tell(short.encode(tell)) == tell
    for decode, whole in ((short.decode_ask, short.encode(ask)), (short.decode_tell, short.encode(tell))):
        for cut in {0, 1, len(whole) // 2, len(whole) - 1}:
            with pytest.raises(errors.RemoteProtocolError):
                decode(whole[:cut])


@pytest.mark.parametrize(
    "fields",
    [("c", -1), ("c", 0, -1), ("c" * 161,), ("c", 0, 0, bytes(limits_carriers.SHORT_DOWN_BYTES + 1)), ("", 0), (7,)],
)
def test_answer_out_of_its_bounds_is_refused(fields):
    with pytest.raises(errors.RemoteProtocolError):
        short.decode_tell(short.encode(short.Tell(*fields)))


def test_credentials_are_not_shown():
    assert "secret" not in repr((short.Ask("n1.secret"), short.Tell("n1.secret")))


@given(
    version=st.sampled_from(("1.0", "1.1")),
    body=st.binary(max_size=300),
    fields=st.lists(st.sampled_from(("Origin: https://a.example", "X-Y: z", "Connection: close")), max_size=4),
    chunked=st.booleans(),
    cuts=st.lists(st.integers(0, 600), max_size=6),
)
def test_request_is_read_the_same_however_it_is_cut(version, body, fields, chunked, cuts):
    chunked = chunked and version == "1.1"
    if chunked:
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        fields = [*fields, "Transfer-Encoding: chunked"]
    else:
        framed = body
        fields = [*fields, f"Content-Length: {len(body)}"]
    data = "\r\n".join([f"POST {short.PATH}?a HTTP/{version}", *fields, "", ""]).encode() + framed
    reader, at = short_http.RequestReader(), 0
    for cut in [*sorted(cuts), len(data)]:
        if at < cut <= len(data):
            reader.feed(data[at:cut])
            at = cut
    assert (reader.fault, reader.done, reader.excess) == (None, True, False)
    assert (reader.method, reader.path, reader.version, bytes(reader.body)) == ("POST", short.PATH, version, body)
    assert reader.keep == (version == "1.1" and "Connection: close" not in fields)


class Exchanges(RuleBasedStateMachine):
    """Two ends; exchanges are made, arrive late, twice or never, and so do their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.put = {"up": bytearray(), "down": bytearray()}
        self.got = {"up": bytearray(), "down": bytearray()}
        self.client_out, self.client_in = short.Outgoing(), short.Incoming()
        self.server_out, self.server_in = short.Outgoing(), short.Incoming()
        self.asks: list[bytes] = []
        self.tells: list[bytes] = []

    @rule(data=st.binary(max_size=50))
    def put_up(self, data):
        self.put["up"] += data
        self.client_out.put(data)

    @rule(data=st.binary(max_size=50))
    def put_down(self, data):
        self.put["down"] += data
        self.server_out.put(data)

    @rule(size=st.integers(0, 40))
    def ask(self, size):
        data = self.client_out.take(size)
        self.asks.append(short.encode(short.Ask("c", self.client_in.received, self.client_out.confirmed, data)))

    @rule(which=st.integers(0, 10**6), size=st.integers(0, 40))
    def arrive(self, which, size):
        if not self.asks:
            return
        ask = short.decode_ask(self.asks[which % len(self.asks)])
        self.server_out.confirm(ask.received)
        self.got["up"] += self.server_in.take(ask.begin, ask.data)
        down = self.server_out.take(size)
        self.tells.append(short.encode(short.Tell("c", self.server_in.received, self.server_out.confirmed, down)))

    @rule(which=st.integers(0, 10**6))
    def answer(self, which):
        if not self.tells:
            return
        tell = short.decode_tell(self.tells[which % len(self.tells)])
        self.client_out.confirm(tell.received)
        self.got["down"] += self.client_in.take(tell.begin, tell.data)

    @invariant()
    def nothing_comes_twice_or_out_of_order(self):
        for way in ("up", "down"):
            assert self.put[way].startswith(self.got[way])
        assert self.client_out.end == len(self.put["up"])
        assert len(self.client_out) >= len(self.put["up"]) - len(self.got["up"])

    def teardown(self):
        """In the end exchanges pass, and all has come."""
        for _ in range(2):
            self.asks, self.tells = [], []
            self.ask(10**9)
            self.arrive(0, 10**9)
            self.answer(0)
        assert self.got == self.put


TestExchanges = Exchanges.TestCase


@given(confirmed=COUNTS, begin=COUNTS)
def test_count_of_what_never_was_is_refused(confirmed, begin):
    outgoing, incoming = short.Outgoing(), short.Incoming()
    outgoing.put(b"1234567")
    assert incoming.take(0, b"123") == b"123"
    if confirmed > 7:
        with pytest.raises(errors.RemoteProtocolError):
            outgoing.confirm(confirmed)
    if begin > 3:
        with pytest.raises(errors.RemoteProtocolError):
            incoming.take(begin, b"x")
