"""What lets a session outlive its connection: the token that names it, and the place where it waits."""

import asyncio
import hashlib
import hmac
from typing import Final, Protocol

from stormline.appgw.port import Identity
from stormline.core import limits, limits_platform
from stormline.core.clock import Rng

_SECRET_BYTES: Final = 16
_KEY_BYTES: Final = 32
_LOGIN_CHARS_MAX: Final = 13
"""Hexadecimal digits of a time in milliseconds: some thousand years."""


class ResumeTokens:
    """Makes and checks resume tokens, `node.session.login-secret`.

    The secret is 128 bits of an HMAC-SHA256 under a key of this process, over session, app, device and user: it cannot
    be guessed, serves nobody else, and costs an idle session nothing. The time of the login is what every node orders
    two clients of one device by; who changes it in his own token outdoes himself.
    """

    def __init__(self, node: str, rng: Rng) -> None:
        self._node = node
        self._key = rng.token_bytes(_KEY_BYTES)

    def mint(self, identity: Identity) -> str:
        """Give the token of a session."""
        return f"{self._node}.{identity.session}.{identity.login_ms:x}-{self._secret(identity)}"

    def check(self, token: str, identity: Identity, *, earlier: str = "") -> bool:
        """Say whether a token is that of this session; takes the same time however much of it is right.

        Args:
            token: what the client has shown.
            identity: whose session it is.
            earlier: the token it had on the node it came from, empty where it began here.
        """
        shown = token.encode("utf-8", "replace")
        ours = hmac.compare_digest(shown, self.mint(identity).encode())
        return ours or (bool(earlier) and hmac.compare_digest(shown, earlier.encode("utf-8", "replace")))

    def _secret(self, identity: Identity) -> str:
        claims = "\0".join((identity.session, identity.app, identity.device, identity.user))
        return hmac.new(self._key, claims.encode("utf-8", "replace"), hashlib.sha256).digest()[:_SECRET_BYTES].hex()


def node_of(token: str) -> str:
    """Say which node made a token, as far as one can tell from it; empty where it is none."""
    parts = token.split(".")
    return parts[0] if len(parts) == 3 and len(token) <= limits.RESUME_TOKEN_CHARS_MAX else ""


def login_of(token: str) -> int:
    """Say when the client that shows a token first logged in, milliseconds since 1970; 0 where it does not say."""
    login, dash, _ = token.rpartition(".")[2].partition("-")
    if not dash or not 0 < len(login) <= _LOGIN_CHARS_MAX:
        return 0
    try:
        return max(0, int(login, 16))
    except ValueError:
        return 0


class Waits(Protocol):
    """A session that has no connection."""

    def end(self, why: str) -> None:
        """End it."""
        ...


class Waiting:
    """Sessions without a connection, the longest first. Each ends when its window is over, or is taken out before."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._until: dict[Waits, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._until)

    def add(self, session: Waits) -> None:
        """Let a session wait; beyond the bound the one that has waited longest ends."""
        loop = asyncio.get_running_loop()
        self._until[session] = loop.time() + self._window_s
        if self._timer is None:
            self._timer = loop.call_later(self._window_s, self._on_timer)
        if len(self._until) > limits_platform.SESSIONS_WAITING_MAX:
            next(iter(self._until)).end("too many sessions wait for their clients")

    def discard(self, session: Waits) -> None:
        """Take a session out, where it is in."""
        self._until.pop(session, None)

    def close(self) -> None:
        """End all."""
        for session in list(self._until):
            session.end("the node stops")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for session, until in list(self._until.items()):
            if until > loop.time():
                self._timer = loop.call_at(until, self._on_timer)
                return
            session.end("its client did not come back")
