"""The gateway's keys and the files they are kept in.

A line of a file is a key: its id, 32 bytes in hex, and for one that is on its way out the moment until which requests
sealed with it are opened, in seconds since 1970. The newest stands first.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.core import errors, limits_relay
from stormline.net.files import write_atomic
from stormline.wire import ohttp

_FILE_BYTES_MAX: Final = limits_relay.RELAY_KEYS_MAX * 100
_ID_MAX: Final = 255


class Held(NamedTuple):
    """A key and how long it is one.

    Attributes:
        key: the key.
        until: seconds since 1970; None: for as long as nothing else is said.
    """

    key: ohttp.GatewayKey
    until: int | None = None


class Keys(NamedTuple):
    """The gateway's keys: the first is offered first, and every one is opened with, so that keys can change."""

    held: tuple[ohttp.GatewayKey, ...]

    @property
    def by_id(self) -> Mapping[int, ohttp.GatewayKey]:
        """Keys by their id."""
        return {key.key_id: key for key in self.held}

    @property
    def listed(self) -> bytes:
        """What clients fetch."""
        return ohttp.encode_keys(key.config for key in self.held)


def write_key(path: Path, key_id: int) -> ohttp.GatewayKey:
    """Make a gateway key and write it, readable by its owner alone.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    made = Held(ohttp.GatewayKey(key_id, X25519PrivateKey.generate()))
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(_line(made))
    except OSError as error:
        raise errors.ConfigError(f"relay: cannot write the key {path}: {error.strerror}") from error
    return made.key


def read_held(path: Path) -> tuple[Held, ...]:
    """Read a file of gateway keys.

    Raises:
        ConfigError: it cannot be read, is none, or others may read it. The message shows nothing of it.
    """
    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise errors.ConfigError(f"relay: the key {path} may be read by others; chmod 600 it")
            lines = file.read(_FILE_BYTES_MAX).splitlines()
        held = tuple(_read_line(line.split()) for line in lines if line.strip())
    except OSError as error:
        raise errors.ConfigError(f"relay: cannot read the key {path}: {error.strerror}") from error
    except ValueError:
        raise errors.ConfigError(f"relay: {path} holds no key of a gateway") from None
    if not held:
        raise errors.ConfigError(f"relay: {path} holds no key of a gateway")
    if not all(0 <= each.key.key_id <= _ID_MAX for each in held):
        raise errors.ConfigError(f"relay: {path}: a key's id is 0 to {_ID_MAX}")
    return held


def read_keys(paths: tuple[Path, ...], wall: float) -> Keys:
    """Read the gateway's keys, without those whose time is over.

    Args:
        paths: files, that of the newest key first.
        wall: seconds since 1970.

    Raises:
        ConfigError: one holds no key, none is left, or two have one id.
    """
    held = [each for path in paths for each in read_held(path)]
    keys = Keys(tuple(each.key for each in held if each.until is None or wall < each.until))
    if not keys.held or len(keys.by_id) < len(keys.held):
        raise errors.ConfigError("relay: a gateway has at least one key, and each an id of its own")
    return keys


def rotate(path: Path, wall: float) -> tuple[Held, ...]:
    """Put a new key before those of a file; the others stay as they are, but for those whose time is over.

    Where the file has keys beside the first whose end is not settled, a rotation is under way: nothing is made.

    Raises:
        ConfigError: the file cannot be read or written, or has `limits_relay.RELAY_KEYS_MAX` keys.
    """
    held = tuple(each for each in read_held(path) if each.until is None or wall < each.until)
    if sum(each.until is None for each in held) > 1:
        return held
    if len(held) >= limits_relay.RELAY_KEYS_MAX:
        raise errors.ConfigError(f"relay: {path} has {len(held)} keys that are still in use; wait until one is not")
    taken = {each.key.key_id for each in held}
    key_id = next(number for step in range(256) if (number := (max(taken) + 1 + step) % 256) not in taken)
    return _write(path, (Held(ohttp.GatewayKey(key_id, X25519PrivateKey.generate())), *held))


def settle(path: Path, until: float) -> tuple[Held, ...]:
    """End a rotation: all keys but the first are good until a moment, those with an end of their own until that.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    first, *others = read_held(path)
    return _write(path, (first, *(each if each.until is not None else Held(each.key, int(until)) for each in others)))


def _write(path: Path, held: tuple[Held, ...]) -> tuple[Held, ...]:
    try:
        write_atomic(path, "".join(map(_line, held)).encode("ascii"), mode=0o600)
    except OSError as error:
        raise errors.ConfigError(f"relay: cannot write the key {path}: {error.strerror}") from error
    return held


def _line(held: Held) -> str:
    end = "" if held.until is None else f" {held.until}"
    return f"{held.key.key_id} {held.key.private.private_bytes_raw().hex()}{end}\n"


def _read_line(parts: list[str]) -> Held:
    number, secret, *until = parts
    if len(until) > 1:
        raise ValueError
    private = X25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
    return Held(ohttp.GatewayKey(int(number), private), int(until[0]) if until else None)
