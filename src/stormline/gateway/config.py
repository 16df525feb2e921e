"""What the gateway role is told at its start."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stormline.appgw.protocols import OwnProtocol
from stormline.core import errors, ids, limits, limits_carriers, limits_heartbeat, limits_platform
from stormline.core.values import Address, Secret
from stormline.engine.nats import EngineConfig
from stormline.web.server import TlsFiles
from stormline.wire import jws


@dataclass(frozen=True, slots=True)
class Quota:
    """What one app may take of a node; 0 for no bound but the node's own.

    Attributes:
        sessions: sessions at once.
        calls: calls in progress at once.
    """

    sessions: int = 0
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Settings of the gateway role.

    Attributes:
        host: address to listen on for long connections.
        port: TCP port, 0 for a free one.
        listen: further addresses for them.
        plain: addresses where long connections are taken without TLS too: for a front that ends it, and for benches.
        fronts: networks (`10.0.0.0/8`) of fronts: their connections begin with a PROXY protocol header, version 2, and
            need no TLS.
        origins: pages that browsers may connect from, as `https://app.example`, beside those of the gateway's own name.
        tls: certificate and key of the long connections; read anew when the files change.
        mptcp: listen for Multipath TCP where the kernel has it.
        reuse_port: other processes of this user may listen on the same ports: workers of one machine.
        unit: this unit, a DNS label.
        node: this node, a DNS label, unique in the unit.
        apps: public keys that sign device tokens, base64url by key id, by app; other apps are refused.
        api_upstreams: origin `http(s)://ip:port` by host, for the gate `api` (`appgw.upstreams.read_upstreams`).
        api_ca: file of an authority that vouches for them beside the system's: the platform's own, for its roles.
        heartbeat_s: longest silence a client is asked to keep before a PING, seconds.
        resume_window_s: how long a session waits for its client after a loss; 0: it ends with its connection.
        quotas: what each app may take of this node, by app.
        drain_s: how long a stopping node gives its clients to go elsewhere and their calls to end.
        engine: the distributed engine.
        admin_host: address to listen on for the business API; plain HTTP, so loopback or behind a TLS terminator.
        admin_port: TCP port, 0 for a free one.
        identity_key: signs the identities that upstreams are told; None: they are told unsigned.
        protocols: own protocols (`appgw.protocols`).
        operator_key: bearer key of what operators alone may do with that API; None: nobody may.
        admin_key: bearer key of the business API, at least `limits_platform.ADMIN_KEY_CHARS_MIN` characters.
        allow_plain_asyncio: serve TLS on asyncio's own loop too. For tests: it costs 268 KB a connection there.
    """

    host: str = "127.0.0.1"
    port: int = 0
    listen: tuple[Address, ...] = ()
    plain: tuple[Address, ...] = ()
    fronts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    tls: TlsFiles
    mptcp: bool = True
    reuse_port: bool = False
    unit: str = "u1"
    node: str = "n1"
    apps: Mapping[str, Mapping[str, str]]
    api_upstreams: Mapping[str, str] = field(default_factory=dict)
    api_ca: Path | None = None
    heartbeat_s: float = limits_heartbeat.HEARTBEAT_ASKED_S
    resume_window_s: float = limits.RESUME_WINDOW_S
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    drain_s: float = limits_platform.DRAIN_S
    engine: EngineConfig
    admin_host: str = "127.0.0.1"
    admin_port: int = 0
    admin_key: Secret
    identity_key: jws.SigningKey | None = None
    protocols: Sequence[OwnProtocol] = ()
    operator_key: Secret | None = None
    allow_plain_asyncio: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without starting.

        Raises:
            ConfigError: a name, a network, the heartbeat or the key is out of range.
        """
        if 1 + len(self.listen) + len(self.plain) > limits_carriers.LISTENERS_MAX:
            raise errors.ConfigError(f"listen: at most {limits_carriers.LISTENERS_MAX} addresses")
        for front in self.fronts:
            try:
                ipaddress.ip_network(front)
            except ValueError as error:
                raise errors.ConfigError(f"fronts: {error}") from error
        ids.check_label(self.unit, "unit")
        ids.check_label(self.node, "node")
        for app in self.apps:
            ids.check_label(app, "app")
        if not 1.0 <= self.heartbeat_s <= limits.CALL_DEADLINE_MAX_S:
            raise errors.ConfigError(f"heartbeat_s {self.heartbeat_s}: expected 1 to {limits.CALL_DEADLINE_MAX_S:.0f}")
        if not 0 <= self.resume_window_s <= limits.CALL_DEADLINE_MAX_S:
            raise errors.ConfigError(
                f"resume_window_s {self.resume_window_s}: expected 0 to {limits.CALL_DEADLINE_MAX_S:.0f}"
            )
        if not 0 <= self.drain_s <= limits_platform.DRAIN_S_MAX:
            raise errors.ConfigError(f"drain_s {self.drain_s}: expected 0 to {limits_platform.DRAIN_S_MAX:.0f}")
        for app, quota in self.quotas.items():
            if quota.sessions < 0 or quota.calls < 0:
                raise errors.ConfigError(f"quota of app {app!r}: expected numbers from 0 on")
        if len(self.admin_key) < limits_platform.ADMIN_KEY_CHARS_MIN:
            raise errors.ConfigError(f"admin_key: expected at least {limits_platform.ADMIN_KEY_CHARS_MIN} characters")
