"""The store of TLS sessions: each once, the newest first, bounded, and never under another key."""

import ssl

import pytest

from stormline.net.sessions import SessionKey, TlsSessions, worth_keeping

CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
KEY = SessionKey("a.test", 443, CONTEXT)


class Session:
    """As much of an `ssl.SSLSession` as is looked at; one cannot be made without a handshake."""

    def __init__(self, ident=b"1", has_ticket=True):
        self.id = ident
        self.has_ticket = has_ticket

    def __eq__(self, other):
        return isinstance(other, Session) and self.id == other.id

    __hash__ = None


def test_get_gives_each_session_once_and_the_newest_first():
    sessions = TlsSessions()
    first, second = Session(), Session()
    sessions.put(KEY, first)
    sessions.put(KEY, second)
    assert len(sessions) == 2
    assert (sessions.get(KEY), sessions.get(KEY), sessions.get(KEY)) == (second, first, None)
    assert len(sessions) == 0


@pytest.mark.parametrize(
    "other",
    [
        KEY._replace(server_name="b.test"),
        KEY._replace(port=8443),
        KEY._replace(context=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)),
    ],
)
def test_get_another_name_port_or_context_gives_none(other):
    sessions = TlsSessions()
    sessions.put(KEY, Session())
    assert sessions.get(other) is None


def test_put_is_bounded_per_place_and_over_all():
    sessions = TlsSessions(places_max=2, per_place_max=3)
    kept = [Session() for _ in range(5)]
    for session in kept:
        sessions.put(KEY, session)
    assert [sessions.get(KEY) is session for session in kept[:1:-1]] == [True] * 3
    assert sessions.get(KEY) is None
    for name in ("b.test", "c.test", "b.test", "d.test"):
        sessions.put(KEY._replace(server_name=name), Session())
    assert sessions.get(KEY._replace(server_name="c.test")) is None, "the one unused for longest"
    assert len(sessions) == 3
    sessions.clear()
    assert len(sessions) == 0


@pytest.mark.parametrize(
    ("version", "session", "offered", "kept"),
    [
        ("TLSv1.3", Session(b"new"), None, True),
        ("TLSv1.3", Session(b"new"), Session(b"old"), True),
        ("TLSv1.3", Session(b"old"), Session(b"old"), False),  # no new ticket came: this one is used
        ("TLSv1.3", Session(b"", has_ticket=False), None, False),
        ("TLSv1.2", Session(b"old"), Session(b"old"), True),  # resumes again and again
        ("TLSv1.2", Session(b"id", has_ticket=False), None, True),
        ("TLSv1.2", Session(b"", has_ticket=False), None, False),
    ],
)
def test_worth_keeping_takes_what_can_be_resumed_and_was_not_used(version, session, offered, kept):
    assert worth_keeping(session, version, offered) is kept
