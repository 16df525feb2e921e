"""Names for failures, stable over versions: what the APM groups by.

The first part tells the layer (`dns`, `tcp`, `tls`, `timeout`, `http`, `gateway`, ...), as in W3C Network Error
Logging, so that browsers' reports and ours stand in one table.
"""

from typing import Final

from stormline.core import codes, errors

UNTRUSTED: Final = "http.untrusted"
"""An answer that nobody vouches for: no success, whatever its status."""

_KINDS: tuple[tuple[type[errors.StormlineError], str], ...] = (
    (errors.QueueFull, "client.queue"),
    (errors.ResolveError, "dns.failed"),
    (errors.ProxyError, "proxy.failed"),  # before the class it is one of
    (errors.ConnectError, "tcp.failed"),
    (errors.TlsError, "tls.failed"),
    (errors.WriteError, "tcp.write"),
    (errors.ReadError, "tcp.read"),
    (errors.UntrustedAnswer, UNTRUSTED),  # before the class it is one of
    (errors.ProtocolViolation, "http.response.invalid"),
    (errors.DecodeError, "http.body.decode"),
    (errors.ChannelLost, "long.lost"),
    (errors.LocalProtocolError, "client.invalid"),
)


def failure_kind(error: BaseException) -> str:
    """Give the kind of a failure, `unknown` for what is none of ours."""
    if isinstance(error, errors.DeadlineExceeded):
        return f"timeout.{error.phase}"
    if isinstance(error, errors.GatewayError | errors.CallError | errors.RefusedError):
        return f"gateway.{codes.name(error.code)}"
    for kind, name in _KINDS:
        if isinstance(error, kind):
            return name
    return "unknown"


def status_kind(status: int) -> str:
    """Give the kind of a whole HTTP answer: empty below 400, else `http.` and the status."""
    return f"http.{status}" if status >= 400 else ""
