"""Names of failures."""

import inspect

import pytest

from stormline.core import errors
from stormline.core.codes import Code
from stormline.core.phase import Phase
from stormline.telemetry.kinds import failure_kind, status_kind

AT = {"phase": Phase.CONNECT, "maybe_delivered": False}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.QueueFull("x", **AT), "client.queue"),
        (errors.ResolveError("x", **AT), "dns.failed"),
        (errors.ConnectError("x", **AT), "tcp.failed"),
        (errors.ProxyError("x", **AT), "proxy.failed"),
        (errors.TlsError("x", **AT), "tls.failed"),
        (errors.WriteError("x", **AT), "tcp.write"),
        (errors.ReadError("x", **AT), "tcp.read"),
        (errors.ProtocolViolation("x", **AT), "http.response.invalid"),
        (errors.DecodeError("x", **AT), "http.body.decode"),
        (errors.ChannelLost("x", **AT), "long.lost"),
        (errors.DeadlineExceeded("x", phase=Phase.FIRST_BYTE, maybe_delivered=True), "timeout.first_byte"),
        (errors.GatewayError("x", code=Code.CALL_UPSTREAM, **AT), "gateway.call-upstream"),
        (errors.GatewayError("x", code=599, **AT), "gateway.code-599"),
        (errors.CallError(Code.CALL_REFUSED, "x"), "gateway.call-refused"),
        (errors.RefusedError(Code.REPLACED, "x"), "gateway.replaced"),
        (errors.LocalProtocolError("x"), "client.invalid"),
        (ValueError("x"), "unknown"),
    ],
)
def test_failure_has_its_name(error, kind):
    assert failure_kind(error) == kind


def test_every_transport_error_has_a_name_of_its_own():
    kinds = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.TransportError)]
    names = [failure_kind(cls("x", **AT)) for cls in kinds if cls is not errors.TransportError]
    assert "unknown" not in names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("status", "kind"), [(200, ""), (304, ""), (399, ""), (400, "http.400"), (503, "http.503")])
def test_status_has_a_name_from_400_on(status, kind):
    assert status_kind(status) == kind
