"""What the laboratory's servers do, as plain data: given by profiles, changed by faults, carried out by the origin.

Percentages run from 0 to 100. The defaults are servers that work.
"""

from typing import TypeAlias

import msgspec

from stormline.core import errors, limits_lab

SHOP: str = "shop.lab.test"
"""The name clients ask for; `.test` exists nowhere else (RFC 6761 section 6.2)."""
DOH: str = "doh.lab.test"
"""The name of the DNS-over-HTTPS server."""


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What one address of the origin does, right and wrong.

    At most one of the chances of the first group befalls a connection, and one of the second a request.
    """

    accept_only_pct: float = 0.0
    """Connections that are accepted by TCP and then never get a byte: no TLS handshake."""
    reset_pct: float = 0.0
    """Connections reset when the first bytes of the handshake (or request) arrive."""
    cut_pct: float = 0.0
    """Connections of which all bytes to the client after `cut_after_bytes` vanish."""
    cut_after_bytes: int = 400
    """Less than a server's first flight: the handshake gets stuck."""
    mute_pct: float = 0.0
    """Connections on which requests are read and never answered."""
    mute_http2: bool = False
    """All that speak HTTP/2 are such, as behind a box that swallows it."""

    error_pct: float = 0.0
    """Requests answered with `error_status`."""
    error_status: int = 503
    stall_pct: float = 0.0
    """Requests whose answer stops in mid-body and never goes on."""
    truncate_pct: float = 0.0
    """Requests answered with a gzip body that lacks its second half, with the length of what is sent."""
    slow_pct: float = 0.0
    """Requests whose body comes at `slow_bps`."""
    slow_bps: float = 8000.0

    in_flight_free: int | None = None
    """Requests that the server handles side by side without harm; None: any number."""
    in_flight_pct: float = 0.0
    """For each request in flight beyond these: more chance that a new one fails."""
    in_flight_stall_s: float = 2.0
    """How long one that fails keeps its place before it is answered with 503."""
    in_flight_hold_s: float = 0.0
    """How long the server works on a request; makes requests meet each other."""
    body_bytes_max: int | None = None
    """Bodies longer than this stop there and never go on."""

    http2: bool = True
    """Offer HTTP/2 by ALPN."""
    http10: bool = False
    """Speak HTTP/1.0 only: one request a connection, whose end is the end of the body."""
    requests_max: int | None = None
    """Requests of one connection; the last answer says `Connection: close`, HTTP/2 sends GOAWAY."""
    page: bool = False
    """Answer everything with a page of its own, as captive portals and injecting proxies do."""
    date_skew_s: float | None = None
    """Answers have a Date that is so far from the true one; None: they have none."""
    quic: bool = False
    """Answers name QUIC on UDP port 443 by Alt-Svc, and that port tells versions (RFC 9000 section 6). From the start
    or never."""

    def __post_init__(self) -> None:
        groups = (
            ("accept_only_pct", "reset_pct", "cut_pct", "mute_pct"),
            ("error_pct", "stall_pct", "truncate_pct", "slow_pct"),
            ("in_flight_pct",),
        )
        for group in groups:
            _check_chances("behaviour", {name: getattr(self, name) for name in group})
        if self.slow_bps < limits_lab.LAB_SLOW_BPS_MIN:
            raise errors.ConfigError(f"behaviour: slow_bps must be {limits_lab.LAB_SLOW_BPS_MIN:g} or more")
        for name in ("in_flight_hold_s", "in_flight_stall_s"):
            if not 0 <= getattr(self, name) <= limits_lab.LAB_HOLD_S_MAX:
                raise errors.ConfigError(f"behaviour: {name} must be 0 to {limits_lab.LAB_HOLD_S_MAX:g}")
        for name in ("requests_max", "body_bytes_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise errors.ConfigError(f"behaviour: {name} must be 1 or more")


class DnsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How the device's DNS server answers. At most one of the chances befalls a question."""

    ttl_s: int = 60
    lie_pct: float = 0.0
    """Answers that give the captive server's address."""
    drop_pct: float = 0.0
    """Questions without an answer."""
    empty_pct: float = 0.0
    """Answers without an address."""
    nxdomain_pct: float = 0.0
    servfail_pct: float = 0.0
    delay_s: float = 0.0
    """How long every answer takes."""
    doh_honest: bool = True
    """DNS over HTTPS answers truly and at once whatever plain DNS does."""

    def __post_init__(self) -> None:
        names = ("lie_pct", "drop_pct", "empty_pct", "nxdomain_pct", "servfail_pct")
        _check_chances("dns", {name: getattr(self, name) for name in names})
        if not 0 <= self.delay_s <= limits_lab.LAB_HOLD_S_MAX:
            raise errors.ConfigError(f"dns: delay_s must be 0 to {limits_lab.LAB_HOLD_S_MAX:g}")
        if not 0 <= self.ttl_s < 2**31:
            raise errors.ConfigError("dns: ttl_s must be 0 or more (RFC 2181 section 8)")


def _check_chances(what: str, chances: dict[str, float]) -> None:
    if any(not 0 <= chance <= 100 for chance in chances.values()) or sum(chances.values()) > 100:
        raise errors.ConfigError(f"{what}: {', '.join(chances)} must be 0 to 100, and so must be their sum")


# -- between stage and origin -----------------------------------------------------------------------------------------
class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of PEM files."""

    certificate: str
    key: str


class Listener(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One address of the servers' side: HTTPS on port 443, HTTP on port 80."""

    address: str
    certificate: str
    """A name in `OriginSetup.certificates`."""
    behaviour: Behaviour
    counted: bool = True
    """Its connections and requests are the origin's; False for captive servers and DNS over HTTPS."""


class OriginSetup(msgspec.Struct, frozen=True, tag="setup", forbid_unknown_fields=True, kw_only=True):
    """The first command."""

    seed: int
    certificates: dict[str, Certificate]
    listeners: list[Listener]
    zone: dict[str, list[str]]
    """Names and their true addresses."""
    lies: list[str]
    """Addresses that a lying DNS server gives."""
    dns: DnsSpec
    dns_addresses: list[str]


class Behave(msgspec.Struct, frozen=True, tag="behave", forbid_unknown_fields=True):
    """Let addresses behave otherwise from now on: new connections, and new requests on old ones."""

    behaviours: dict[str, Behaviour]


class SetDns(msgspec.Struct, frozen=True, tag="set-dns", forbid_unknown_fields=True):
    """Answer DNS otherwise from now on."""

    dns: DnsSpec


class AskReport(msgspec.Struct, frozen=True, tag="report", forbid_unknown_fields=True):
    """Ask for the counters."""

    reset_lag: bool = False
    """Begin the lag figures anew after this answer."""


OriginCommand: TypeAlias = OriginSetup | Behave | SetDns | AskReport


class OriginDone(msgspec.Struct, frozen=True, tag="done"):
    """The command holds."""


class OriginFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The command was not carried out."""

    message: str
    machine: bool = False
    """True where the machine refused; False where the command makes no sense."""


class OriginReport(msgspec.Struct, frozen=True, tag="report"):
    """What the servers saw since the start."""

    requests_by_id: dict[str, int]
    """How often each item was asked for, at the origin's true addresses."""
    connections: int
    """TCP connections accepted there."""
    captive_requests: int
    """Requests that reached a captive server."""
    dns_questions: int
    doh_questions: int
    lag_ms: float
    """The longest time the servers' own loop was late since the start or the last reset: how far they can be
    trusted."""


OriginAnswer: TypeAlias = OriginDone | OriginFailed | OriginReport
