"""Keys of TLS tickets (RFC 8446 section 4.6.1), shared by the processes of a unit and replaced in time.

A client that comes back resumes its TLS session at whichever process it meets. All hold the same two keys: the current
one makes tickets, the one before it is still taken. They are kept in the engine's memory, in the account of our own
roles, never on a disk; while the engine is away each process goes on with what it has.

Python's `ssl` has no call for such keys, its OpenSSL has one, for one key in a context: so there is a context for each
key, and the first bytes of a connection name the key of the ticket in them (`gateway.tls`). Where the call cannot be
made, one warning says so and each process has tickets of its own.
"""

import asyncio
import ctypes
import logging
import ssl
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from stormline.core import errors, limits_carriers
from stormline.core.clock import Clock, Rng
from stormline.engine.port import KeyValue

_log = logging.getLogger("stormline.gateway")

BUCKET: Final = "gateway-tickets"
_KEY: Final = "tls"
_NAME_BYTES: Final = 16
_SECRET_BYTES: Final = 32


class TicketKey(msgspec.Struct, frozen=True, gc=False):
    """One key.

    Attributes:
        name: 16 bytes, in clear in each ticket.
        cipher: AES-256 key.
        mac: HMAC-SHA-256 key.
        made_at: seconds since 1970.
    """

    name: bytes
    cipher: bytes
    mac: bytes
    made_at: float

    def __repr__(self) -> str:
        """Show no secret."""
        return f"TicketKey({self.name.hex()})"

    def __post_init__(self) -> None:
        """Refuse what OpenSSL would read past.

        Raises:
            ValueError: a part has the wrong size.
        """
        if (len(self.name), len(self.cipher), len(self.mac)) != (_NAME_BYTES, _SECRET_BYTES, _SECRET_BYTES):
            raise ValueError("ticket key of the wrong size")


class _KeySet(msgspec.Struct, frozen=True):
    keys: tuple[TicketKey, ...]


def new_key(rng: Rng, wall: float) -> TicketKey:
    """Draw a key."""
    return TicketKey(rng.token_bytes(_NAME_BYTES), rng.token_bytes(_SECRET_BYTES), rng.token_bytes(_SECRET_BYTES), wall)


def rotated(keys: tuple[TicketKey, ...], fresh: TicketKey) -> tuple[TicketKey, ...]:
    """Put a fresh key before the current one; the one before that is forgotten."""
    return (fresh, *keys[:1])


def maker(keys: tuple[TicketKey, ...], wall: float) -> TicketKey:
    """Give the key that makes tickets now: the newest that everybody has had the time to learn of."""
    settled = wall - 2 * limits_carriers.TICKET_LOOK_S
    return next((key for key in keys if key.made_at <= settled), keys[-1])


class TicketKeys:
    """The keys of this process, kept the same as those of the others.

    Args:
        clock: time.
        rng: draws keys.

    Attributes:
        keys: the newest first.
        changed: called when they have changed.
    """

    def __init__(self, clock: Clock, rng: Rng) -> None:
        self._clock = clock
        self._rng = rng
        self.keys: tuple[TicketKey, ...] = (new_key(rng, clock.wall()),)
        self.changed: Callable[[], None] = lambda: None
        self._failed = False

    def install(self, context: ssl.SSLContext, key: TicketKey) -> None:
        """Have a server's context make and read tickets with a key."""
        context.num_tickets = 1  # who resumes twice at once uses it twice
        if self._failed:
            return
        try:
            _install(context, key)
        except (OSError, AttributeError) as error:
            self._failed = True
            _log.warning("gateway: TLS tickets of this process are read by no other: %s", error)

    def maker(self) -> TicketKey:
        """Give the key that makes tickets now."""
        return maker(self.keys, self._clock.wall())

    # -- with the others -----------------------------------------------------------------------------------------------

    async def run(self, bucket: Callable[[], Awaitable[KeyValue]]) -> None:
        """Follow the keys of the unit until cancelled; whoever first finds them old replaces them.

        Args:
            bucket: gives the engine's bucket; raises EngineError where the engine is away.
        """
        while True:
            wait_s = limits_carriers.TICKET_LOOK_S
            try:
                await self.follow(await bucket())
            except errors.EngineError as error:
                _log.debug("ticket keys: %s", error)
                wait_s = min(wait_s, limits_carriers.TICKET_RETRY_S)
            await asyncio.sleep(wait_s)

    async def follow(self, bucket: KeyValue) -> None:
        """Take over the unit's keys, and replace them where they are due or nobody has put any.

        Raises:
            EngineError: the engine is away, or others were quicker; those are met at the next look.
        """
        entry = await bucket.get(_KEY)
        found = None if entry is None else _decode(entry.value)
        keys = self.keys if found is None else found
        now = self._clock.wall()
        if found is None or not now - limits_carriers.TICKET_ROTATION_S < keys[0].made_at <= now + _AHEAD_S:
            keys = rotated(keys, new_key(self._rng, now)) if found is not None else keys
            data = msgspec.msgpack.encode(_KeySet(keys))
            await (bucket.create(_KEY, data) if entry is None else bucket.update(_KEY, data, entry.revision))
        if keys != self.keys:
            self.keys = keys
            self.changed()


_AHEAD_S: Final = 3600.0
"""A key of later than this was made under a clock that was wrong, and would never be replaced."""


def _decode(data: bytes) -> tuple[TicketKey, ...] | None:
    """Read the unit's keys; None where it is not what we write."""
    try:
        if len(data) > limits_carriers.TICKET_RECORD_BYTES_MAX:
            return None
        return msgspec.msgpack.decode(data, type=_KeySet).keys[:2] or None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


# -- OpenSSL ----------------------------------------------------------------------------------------------------------
_GET_KEYS, _SET_KEYS = 58, 59
"""SSL_CTRL_GET_TLSEXT_TICKET_KEYS and SSL_CTRL_SET_TLSEXT_TICKET_KEYS."""


def _install(context: ssl.SSLContext, key: TicketKey) -> None:
    """Set a context's ticket key and read it back.

    Raises:
        OSError: this is not a Python whose insides are known, or the key does not stay.
        AttributeError: its OpenSSL lacks the call.
    """
    if sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info[:2] <= (3, 14):
        raise OSError("not a Python whose ssl is known")
    import _ssl

    lib = ctypes.CDLL(_ssl.__file__)  # finds what that module is linked with
    lib.SSL_CTX_get_options.argtypes, lib.SSL_CTX_get_options.restype = (ctypes.c_void_p,), ctypes.c_uint64
    lib.SSL_CTX_ctrl.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_char_p)
    lib.SSL_CTX_ctrl.restype = ctypes.c_long
    # A PySSLContext begins with the object's head, then SSL_CTX *ctx.
    at = ctypes.c_void_p.from_address(id(context) + object.__basicsize__).value
    if not at or (lib.SSL_CTX_get_options(at) ^ context.options) & 0xFFFFFFFF:
        raise OSError("the context is not what it should be")
    blob = key.name + key.mac + key.cipher
    back = ctypes.create_string_buffer(len(blob))
    if (
        lib.SSL_CTX_ctrl(at, _SET_KEYS, len(blob), blob) != 1
        or lib.SSL_CTX_ctrl(at, _GET_KEYS, len(blob), back) != 1
        or back.raw != blob
    ):
        raise OSError(f"{ssl.OPENSSL_VERSION} does not keep the key")
