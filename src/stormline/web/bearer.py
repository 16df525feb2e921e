"""The one way in which an `Authorization` header proves a key (RFC 6750 section 2.1)."""

import hmac


def proves(header: bytes, key: bytes) -> bool:
    """Say whether it is `Bearer KEY`; takes the same time wherever they differ."""
    scheme, _, given = header.partition(b" ")
    return hmac.compare_digest(given.strip(), key) and scheme.lower() == b"bearer"
