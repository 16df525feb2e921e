"""The live sessions of a node: one for each device, the newest, and nobody's calls lost by it."""

from stormline.appgw.port import Delivery, Identity, Push, Told
from stormline.core.codes import Code
from stormline.gateway.registry import Registry


class Session:
    """A session that writes down how it was closed."""

    def __init__(self, session: str, device: str = "d1", *, leaving: bool = False) -> None:
        self.identity = Identity("demo", device, "", session)
        self.leaving = leaving
        self.closed: list[Code] = []

    def push(self, push: Push, told: Told) -> None:
        told(Delivery.ACKED)

    def close(self, code: Code, reason: str) -> None:
        self.closed.append(code)


def test_newer_session_of_a_device_replaces_the_older() -> None:
    registry, first, second, other = Registry(), Session("s1"), Session("s2"), Session("s3", "d2")
    for session in (first, other, second):
        registry.add(session)
    assert (first.closed, second.closed, other.closed) == ([Code.REPLACED], [], [])
    assert (registry.session_of("demo", "d1"), len(registry)) == ("s2", 2)


def test_session_that_was_asked_to_leave_keeps_its_open_calls_when_its_client_is_back() -> None:
    """A client that obeys a GOAWAY opens its next connection while calls on the old one still run."""
    registry, leaving, back = Registry(), Session("s1", leaving=True), Session("s2")
    registry.add(leaving)
    registry.add(back)
    assert leaving.closed == []
    assert registry.session_of("demo", "d1") == "s2"


def test_late_end_of_a_replaced_session_leaves_the_newer_one() -> None:
    registry, first, second = Registry(), Session("s1"), Session("s2")
    registry.add(first)
    registry.add(second)
    assert registry.remove(first) is False
    assert registry.get("demo", "d1") is second
    assert registry.remove(second) is True
    assert registry.session_of("demo", "d1") is None
