"""How far a request came."""

import enum


class Phase(enum.StrEnum):
    """How far a request had come when something happened to it, in order.

    The boundary of the two-phase rule lies inside `SEND`: until the kernel has taken the first byte the request
    is certainly undelivered; from then on it may have been processed.
    """

    QUEUED = "queued"
    PLAN = "plan"
    RESOLVE = "resolve"
    CONNECT = "connect"
    TLS = "tls"
    SEND = "send"
    FIRST_BYTE = "first_byte"
    BODY = "body"
    DECODE = "decode"
    PARSE = "parse"
    CALLBACK = "callback"

    def reached(self, other: "Phase") -> bool:
        """True where this phase is `other` or comes after it."""
        order = list(Phase)
        return order.index(self) >= order.index(other)
