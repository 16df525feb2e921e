"""Identifiers: how names of users, devices and topics become tokens that are safe in a subject or a path."""

import base64
import re

from stormline.core import errors, limits
from stormline.core.clock import Rng

_METHOD = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)+")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")

_SIGNS = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = [first + second for first in _SIGNS for second in _SIGNS]
"""Base32 ten bits at a time: a third of what the library takes, for each device that connects."""


def subject_token(text: str) -> str:
    """Turn any user, device or topic name into one subject token: lower-case base32 without padding.

    The engine gives `.`, `*`, `>` and spaces a meaning; a user named `>` must not read everybody's inbox. This is
    the only way a name from outside enters a subject. Distinct names give distinct tokens.

    Raises:
        ConfigError: the name is empty, longer than `limits.NAME_BYTES_MAX` bytes, or not encodable as UTF-8.
    """
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise errors.ConfigError(f"name {text!r} is not valid Unicode") from error
    if not raw or len(raw) > limits.NAME_BYTES_MAX:
        raise errors.ConfigError(f"a name must have 1 to {limits.NAME_BYTES_MAX} bytes, this one has {len(raw)}")
    chars = (8 * len(raw) + 4) // 5
    bits = 10 * ((chars + 1) // 2)
    number = int.from_bytes(raw, "big") << (bits - 8 * len(raw))
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(bits - 10, -1, -10)])[:chars]


def from_subject_token(token: str) -> str:
    """Undo `subject_token`.

    Raises:
        ConfigError: the token was not made by `subject_token`.
    """
    padded = token.upper() + "=" * (-len(token) % 8)
    try:
        text = base64.b32decode(padded).decode()
    except ValueError as error:
        raise errors.ConfigError(f"{token!r} is not a subject token") from error
    if subject_token(text) != token:
        raise errors.ConfigError(f"{token!r} is not a canonical subject token")
    return text


def check_method(method: str) -> str:
    """Give back `method` where it is an RPC method name: two or more dotted labels of `a-z 0-9 _ -`.

    Raises:
        ConfigError: it is not.
    """
    if len(method) > limits.METHOD_CHARS_MAX or not _METHOD.fullmatch(method):
        raise errors.ConfigError(
            f"method {method[:80]!r}: expected dotted lower-case labels such as 'orders.create', "
            f"at most {limits.METHOD_CHARS_MAX} characters"
        )
    return method


def check_label(text: str, what: str) -> str:
    """Give back `text` where it can name a unit, node or app: a lower-case DNS label of at most 32 characters.

    Raises:
        ConfigError: it cannot; the message names `what`.
    """
    if not _LABEL.fullmatch(text):
        raise errors.ConfigError(f"{what} {text[:80]!r}: expected 1 to 32 of a-z, 0-9 and inner '-'")
    return text


def new_id(rng: Rng, size_bytes: int = 16) -> str:
    """Draw an unguessable id: lower-case base32, 26 characters for 16 bytes."""
    return base64.b32encode(rng.token_bytes(size_bytes)).decode("ascii").rstrip("=").lower()
