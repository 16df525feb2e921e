"""The gateway's keys and the files they are kept in."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.core import errors
from stormline.wire import ohttp


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
    private = X25519PrivateKey.generate()
    text = f"{key_id} {private.private_bytes_raw().hex()}\n"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise errors.ConfigError(f"relay: cannot write the key {path}: {error.strerror}") from error
    return ohttp.GatewayKey(key_id, private)


def read_key(path: Path) -> ohttp.GatewayKey:
    """Read a gateway key: its id, a space and 32 bytes in hex.

    Raises:
        ConfigError: it cannot be read, is no key, or others may read it. The message shows nothing of it.
    """
    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise errors.ConfigError(f"relay: the key {path} may be read by others; chmod 600 it")
            number, _, secret = file.read(200).strip().partition(" ")
        key_id = int(number)
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
    except OSError as error:
        raise errors.ConfigError(f"relay: cannot read the key {path}: {error.strerror}") from error
    except ValueError:
        raise errors.ConfigError(f"relay: {path} holds no key of a gateway") from None
    if not 0 <= key_id <= 255:
        raise errors.ConfigError(f"relay: {path}: a key's id is 0 to 255")
    return ohttp.GatewayKey(key_id, private)


def read_keys(paths: tuple[Path, ...]) -> Keys:
    """Read the gateway's keys.

    Raises:
        ConfigError: one is no key, or two have one id.
    """
    keys = Keys(tuple(read_key(path) for path in paths))
    if not keys.held or len(keys.by_id) < len(keys.held):
        raise errors.ConfigError("relay: a gateway has at least one key, and each an id of its own")
    return keys
