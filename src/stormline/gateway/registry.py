"""The live sessions of this node, and the way down to them."""

from collections.abc import Iterator
from typing import Protocol

from stormline.appgw.port import Delivery, Identity, Push, Told
from stormline.core.codes import Code
from stormline.core.errors import CallError


class LiveSession(Protocol):
    """A session that has been welcomed."""

    @property
    def identity(self) -> Identity:
        """Whose it is."""
        ...

    @property
    def leaving(self) -> bool:
        """The client was asked to leave and came back on another connection; this one ends with its last call."""
        ...

    def push(self, push: Push, told: Told) -> None:
        """See `appgw.port.Downlink.push`."""
        ...

    async def call(self, method: str, body: bytes, *, key: str, deadline_s: float) -> bytes:
        """Call the app on the device and give its answer."""
        ...

    def close(self, code: Code, reason: str) -> None:
        """End it with a CLOSE."""
        ...


class Registry:
    """Sessions by app and device: one each, the newest. `Downlink` of `appgw.port` and `appgw.calls` for this node."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], LiveSession] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        """How many devices have a session here."""
        return len(self._sessions)

    def __iter__(self) -> Iterator[LiveSession]:
        """Give the sessions, oldest first; do not add or remove meanwhile."""
        return iter(self._sessions.values())

    def add(self, session: LiveSession) -> None:
        """Take a session in. An earlier one of the same device is closed with REPLACED, unless it is leaving."""
        key = (session.identity.app, session.identity.device)
        earlier = self._sessions.pop(key, None)
        self._sessions[key] = session
        if earlier is None:
            self._counts[key[0]] = self._counts.get(key[0], 0) + 1
        if earlier is not None and not earlier.leaving:
            earlier.close(Code.REPLACED, "the device has a newer session")

    def remove(self, session: LiveSession) -> bool:
        """Take a session out; give False where it had been replaced before."""
        key = (session.identity.app, session.identity.device)
        if self._sessions.get(key) is not session:
            return False
        del self._sessions[key]
        self._counts[key[0]] -= 1
        return True

    def count(self, app: str) -> int:
        """How many devices of an app have a session here."""
        return self._counts.get(app, 0)

    def get(self, app: str, device: str) -> LiveSession | None:
        """Give the device's session, None where it has none here."""
        return self._sessions.get((app, device))

    def session_of(self, app: str, device: str) -> str | None:
        """See `appgw.port.Downlink.session_of`."""
        session = self._sessions.get((app, device))
        return None if session is None else session.identity.session

    def push(self, app: str, device: str, push: Push, told: Told) -> None:
        """See `appgw.port.Downlink.push`."""
        session = self._sessions.get((app, device))
        if session is None:
            told(Delivery.OFFLINE)
        else:
            session.push(push, told)

    async def call(self, app: str, device: str, method: str, body: bytes, *, key: str, deadline_s: float) -> bytes:
        """See `appgw.calls.Downlink.call`."""
        session = self._sessions.get((app, device))
        if session is None:
            raise CallError(Code.CALL_UNAVAILABLE, "the device has no session")
        return await session.call(method, body, key=key, deadline_s=deadline_s)
