"""Notices: only where both sides named the capability, within their bounds, in order with everything else."""

import msgspec
import pytest

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.testing.pair import HELLO, WELCOME, Pair, open_pair, told
from stormline.wire import events as e
from stormline.wire import messages as m

PLAIN_HELLO = msgspec.structs.replace(HELLO, capabilities=("compress",))
PLAIN_WELCOME = msgspec.structs.replace(WELCOME, capabilities=("compress",))


def test_notice_arrives_as_it_was_sent_also_while_draining():
    pair = open_pair()
    pair.server.send_notice(7, ("a.example", "b.example"))
    assert pair.pump().client == [e.NoticeReceived(7, ("a.example", "b.example"))]
    pair.server.send_goaway(Code.GOING_AWAY)
    pair.server.send_notice(2**53 - 1)
    assert pair.pump().client[-1] == e.NoticeReceived(2**53 - 1, ())


def test_notice_right_behind_the_welcome_is_heard_after_it():
    pair = Pair()
    pair.client.send_hello(HELLO)
    pair.pump()
    pair.server.send_welcome(WELCOME)
    pair.server.send_notice(3)
    assert pair.pump().client == [e.Welcomed(WELCOME), e.NoticeReceived(3, ())]


@pytest.mark.parametrize(("hello", "welcome"), [(PLAIN_HELLO, WELCOME), (HELLO, PLAIN_WELCOME)])
def test_notice_without_the_capability_on_one_side_is_refused_on_both(hello: m.Hello, welcome: m.Welcome):
    pair = Pair()
    pair.open(hello, welcome)
    assert m.PLAN not in pair.server.capabilities
    assert m.PLAN not in pair.client.capabilities
    with pytest.raises(LocalProtocolError):
        pair.server.send_notice(7)
    with pytest.raises(RemoteProtocolError) as caught:
        told(pair.client, m.Notice(7))
    assert caught.value.code is Code.PROTOCOL_ERROR


def test_capabilities_of_the_peer_are_kept_only_where_known():
    pair = Pair()
    hello = msgspec.structs.replace(HELLO, capabilities=("x" * 1000, m.PLAN, "y", m.PLAN))
    pair.open(hello, msgspec.structs.replace(WELCOME, capabilities=("y", m.PLAN)))
    assert pair.server.capabilities == pair.client.capabilities == (m.PLAN,)


@pytest.mark.parametrize(
    ("version", "hosts"),
    [
        (-1, ()),
        (limits.PLAN_VERSION_MAX + 1, ()),
        (1, ("a.example",) * (limits.PLAN_HOSTS_MAX + 1)),
        (1, ("x" * (limits.NOTICE_HOST_CHARS_MAX + 1),)),
    ],
)
def test_notice_out_of_bounds_is_refused_on_both_sides(version: int, hosts: tuple[str, ...]):
    pair = open_pair()
    with pytest.raises(LocalProtocolError):
        pair.server.send_notice(version, hosts)
    assert pair.pump().client == []
    with pytest.raises(RemoteProtocolError):
        told(pair.client, m.Notice(version, hosts))


def test_largest_notice_goes_through():
    pair = open_pair()
    hosts = tuple(f"{number:03}".rjust(limits.NOTICE_HOST_CHARS_MAX, "x") for number in range(limits.PLAN_HOSTS_MAX))
    pair.server.send_notice(1, hosts)
    assert pair.pump().client == [e.NoticeReceived(1, hosts)]
