"""JSON in which nothing can be read two ways: what every signed text, question and bundle goes through."""

import json
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


_LARGE_BYTES: Final = 1024 * 1024
"""Above it memory counts: the text that is looked at goes before the values come."""


def _unique(pairs: list[tuple[str, object]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a member name appears twice in one object")


def _check(data: bytes) -> None:
    json.loads(data.decode(), object_pairs_hook=_unique)


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode UTF-8 JSON, refusing a name that appears twice in one object.

    Two readers may choose different ones of two equal names, and so understand one signed text in two ways
    (RFC 7515 section 4, RFC 7519 section 4, RFC 8259 section 4).

    Args:
        data: the text; the caller has bounded its size.
        decoder: what it must be; without `msgspec.Raw`, whose text is not looked at.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, a name twice, or not what `decoder` expects.
    """
    try:
        if len(data) > _LARGE_BYTES:
            _check(data)
            return decoder.decode(data)
        value = decoder.decode(data)
        # What we would write ourselves, byte for byte, holds no name twice; our own clients and centres write so.
        if _encode(value) != data:
            _check(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value
