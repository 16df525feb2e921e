"""TLS sessions kept for later connections: a resumed handshake carries no certificates.

That is some kilobytes less to wait for and to lose on a slow network. It is no round trip less, and no CPU for a client
here (keeping a session copies it, 0.1 ms: as much as checking a short chain).

A resumed connection is as well authenticated as the one its session came from (RFC 8446 section 2.2), so a session is
only ever offered to the same name and port and under the same context: the context says whom to trust.
"""

import collections
import ssl
from typing import NamedTuple

from stormline.core import limits


class SessionKey(NamedTuple):
    """Where a session may be resumed.

    Attributes:
        server_name: the name the certificate was checked for, lower case.
        port: of the service.
        context: whom it was checked against; compared by identity.
    """

    server_name: str
    port: int
    context: ssl.SSLContext


class TlsSessions:
    """Sessions of finished handshakes, bounded. Belongs to one loop.

    Each session is given out once: with a ticket used twice, whoever watches the network could tell that both
    connections are of one client (RFC 8446 appendix C.4). A server that has forgotten a session makes a full handshake.

    They are kept in memory only: the stdlib's `SSLSession` cannot be serialised (it does not pickle and shows neither
    ticket nor secret), so nothing can be stored on disk for the next start.

    Args:
        places_max: keys kept; the one unused for longest goes first.
        per_place_max: sessions kept for one key; the oldest goes first.
    """

    def __init__(
        self,
        *,
        places_max: int = limits.TLS_SESSION_PLACES_MAX,
        per_place_max: int = limits.TLS_SESSIONS_PER_PLACE_MAX,
    ) -> None:
        self._places_max = places_max
        self._per_place_max = per_place_max
        self._places: collections.OrderedDict[SessionKey, collections.deque[ssl.SSLSession]] = collections.OrderedDict()
        self._shunned: collections.OrderedDict[SessionKey, None] = collections.OrderedDict()

    def __len__(self) -> int:
        """Sessions kept."""
        return sum(len(kept) for kept in self._places.values())

    def get(self, key: SessionKey) -> ssl.SSLSession | None:
        """Take the newest session of a place out, None where there is none."""
        kept = self._places.get(key)
        if kept is None:
            return None
        session = kept.pop()
        if kept:
            self._places.move_to_end(key)
        else:
            del self._places[key]
        return session

    def put(self, key: SessionKey, session: ssl.SSLSession) -> None:
        """Keep a session for one later connection to the same place, unless that is shunned."""
        if key in self._shunned:
            return
        kept = self._places.get(key)
        if kept is None:
            kept = self._places[key] = collections.deque(maxlen=self._per_place_max)
        kept.append(session)
        self._places.move_to_end(key)
        if len(self._places) > self._places_max:
            self._places.popitem(last=False)

    def shun(self, key: SessionKey) -> None:
        """Resume nothing more at a place, until `clear`.

        For a place where a resumed connection stood and then brought nothing: something on the path lets a short
        handshake pass and not what follows. A full handshake fails there at once, while connections still race.
        """
        self._places.pop(key, None)
        self._shunned[key] = None
        if len(self._shunned) > self._places_max:
            self._shunned.popitem(last=False)

    def clear(self) -> None:
        """Forget every session, and what is shunned: the network is another."""
        self._places.clear()
        self._shunned.clear()


def worth_keeping(session: ssl.SSLSession, version: str | None, offered: ssl.SSLSession | None) -> bool:
    """Say whether a connection's session can be resumed by another one.

    Args:
        session: what the connection has now.
        version: its version of TLS, as `ssl.SSLObject.version` names it.
        offered: the session it was begun with.
    """
    if version == "TLSv1.3":
        # Before a ticket comes it has the one that was offered, which is used up, or none.
        return session.has_ticket and session != offered
    return session.has_ticket or bool(session.id)
