"""The two-phase rule: when a request that failed may be sent again.

Source: the Taobao article's two-phase retry. Before the first byte of a request has been taken by the kernel nothing
can have come of it: any request may be sent again. From then on it may have been processed: only reads, or writes
that carry an idempotency key, may.
"""

from typing import Final

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY"})
"""Reads: RFC 9110 section 9.2.1, and QUERY. PUT and DELETE are idempotent, but a late second DELETE can hit what was
made since; they need a key like every other write."""


def may_resend(method: str, *, maybe_delivered: bool, has_key: bool) -> bool:
    """Say whether a failed request may be sent again.

    Args:
        method: HTTP method, upper case; an RPC counts as `POST`.
        maybe_delivered: False only where it is certain that the peer did not get the request whole.
        has_key: the request carries an idempotency key.
    """
    return not maybe_delivered or has_key or method in SAFE_METHODS
