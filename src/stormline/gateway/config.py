"""What the gateway role is told at its start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stormline.core import errors, ids, limits, limits_platform
from stormline.core.values import Secret
from stormline.engine.nats import EngineConfig
from stormline.web.server import TlsFiles


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Settings of the gateway role.

    Attributes:
        host: address to listen on for long connections.
        port: TCP port, 0 for a free one.
        tls: certificate and key of the long connections; there is no plain form.
        unit: this unit, a DNS label.
        node: this node, a DNS label, unique in the unit.
        apps: public keys that sign device tokens, base64url by key id, by app; other apps are refused.
        api_upstreams: origin `http(s)://ip:port` by host, for the gate `api` (`appgw.api.read_upstreams`).
        api_ca: file of an authority that vouches for them beside the system's: the platform's own, for its roles.
        heartbeat_s: longest silence a client is asked to keep before a PING, seconds.
        engine: the distributed engine.
        admin_host: address to listen on for the business API; plain HTTP, so loopback or behind a TLS terminator.
        admin_port: TCP port, 0 for a free one.
        admin_key: bearer key of the business API, at least `limits_platform.ADMIN_KEY_CHARS_MIN` characters.
        allow_plain_asyncio: serve TLS on asyncio's own loop too. For tests: it costs 268 KB a connection there.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles
    unit: str = "u1"
    node: str = "n1"
    apps: Mapping[str, Mapping[str, str]]
    api_upstreams: Mapping[str, str] = field(default_factory=dict)
    api_ca: Path | None = None
    heartbeat_s: float = limits.HEARTBEAT_S
    engine: EngineConfig
    admin_host: str = "127.0.0.1"
    admin_port: int = 0
    admin_key: Secret
    allow_plain_asyncio: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without starting.

        Raises:
            ConfigError: a name, the heartbeat or the key is out of range.
        """
        ids.check_label(self.unit, "unit")
        ids.check_label(self.node, "node")
        for app in self.apps:
            ids.check_label(app, "app")
        if not 1.0 <= self.heartbeat_s <= limits.CALL_DEADLINE_MAX_S:
            raise errors.ConfigError(f"heartbeat_s {self.heartbeat_s}: expected 1 to {limits.CALL_DEADLINE_MAX_S:.0f}")
        if len(self.admin_key) < limits_platform.ADMIN_KEY_CHARS_MIN:
            raise errors.ConfigError(f"admin_key: expected at least {limits_platform.ADMIN_KEY_CHARS_MIN} characters")
