"""The words of a diagnosis that every room shares: what is looked at, and how it was found."""

import enum


class CheckName(enum.StrEnum):
    """What a diagnosis looks at. Several checks may have one name: one for each address."""

    INTERFACES = "interfaces"
    ROUTES = "routes"
    GATEWAY = "gateway"
    DNS_SYSTEM = "dns_system"
    DNS_DOH = "dns_doh"
    DNS_DISPATCH = "dns_dispatch"
    TCP = "tcp"
    TLS = "tls"
    HTTP = "http"
    CLEAR_HTTP = "clear_http"
    QUIC = "quic"
    CAPTIVE = "captive"
    PROXY = "proxy"
    CLOCK = "clock"
    TRACE = "trace"
    MTU = "mtu"
    NAT = "nat"


class CheckState(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    BAD = "bad"
    UNKNOWN = "unknown"
    """It was tried, and says nothing either way."""
    SKIPPED = "skipped"
    """It was not tried; its detail says why."""


class Reason(enum.StrEnum):
    """Why a connection to an address did not come about."""

    REFUSED = "refused"
    """The machine itself said no."""
    SILENT = "silent"
    """Nothing came back."""
    UNREACHABLE = "unreachable"
    """The kernel has no way there, or a router on the way says so."""
    DENIED = "denied"
    """The system does not let us."""
    CUT = "cut"
    """It was broken off in the middle."""
    UNTRUSTED = "untrusted"
    """A certificate for the right name, from an issuer that is not trusted."""
    WRONG_NAME = "wrong_name"
    """A certificate for somebody else."""
    EXPIRED = "expired"
    """A certificate that is too old by our clock."""
    NOT_YET_VALID = "not_yet_valid"
    """A certificate that is too new by our clock."""
    FAILED = "failed"
    """TLS failed otherwise."""
