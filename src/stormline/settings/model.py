"""What can be set: one frozen object, a section per room. `settings.load` fills it from file and environment.

Every field has a default that works on one machine, so an empty file is a whole configuration.
"""

from typing import Annotated, Literal

import msgspec

from stormline.core import limits_platform

Replicas = Annotated[int, msgspec.Meta(ge=1, le=5, description="a number of copies, 1 to 5")]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535, description="a port, 0 to 65535 (0: a free one)")]
"""A TCP port; 0 asks for a free one."""

LogLevel = Literal["debug", "info", "warning", "error"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: frozen, and an unknown key is an error, never ignored."""


class Ports(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where each part listens.

    Attributes:
        dispatch: the scheduling centre, HTTPS.
        gateway: long connections, TLS.
        admin: the gateway's business API (pushes, calls into devices), HTTP.
        apm: telemetry reports and queries, HTTPS.
        console: the operator's pages, HTTP.
        nats: the embedded engine; unused where `nats.url` names an external one.
        shop: the demo's upstream, HTTP.
        relay: sealed requests, HTTP.
    """

    dispatch: Port = 8701
    gateway: Port = 8702
    admin: Port = 8703
    apm: Port = 8704
    console: Port = 8705
    nats: Port = 8706
    shop: Port = 8707
    relay: Port = 8708


class Nats(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An external engine.

    Attributes:
        url: `nats://host:port`, several with commas; empty for the embedded server.
        core_user: user of the CORE account (rules, directory, sync, push).
        core_password: its password.
        biz_user: user of the BIZ account (business RPC only).
        biz_password: its password.
        replicas: copies of each key and record that a cluster keeps: 3, or 5, for one that loses a server and nothing
            else; 1 for a single server.
    """

    url: str = ""
    core_user: str = ""
    core_password: str = ""
    biz_user: str = ""
    biz_password: str = ""
    replicas: Replicas = 1

    def __repr__(self) -> str:
        """Show where, never the passwords; a URL could hold one too."""
        return f"Nats(url={'***' if '@' in self.url else self.url!r}, core_user={self.core_user!r})"


class Api(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API application gateway.

    Attributes:
        upstreams: origin by host name, `http(s)://ip:port`. An address, so that the name a client asked for never
            decides where the gateway connects.
    """

    upstreams: dict[str, str] = {}


class Gateway(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how long connections are taken, and what one app may take; the first address is `host` with
    `ports.gateway`.

    Attributes:
        listen: further addresses, `ip:port`.
        plain: addresses where they are taken without TLS too: for a front that ends it, and for benches. Not for a
            network.
        fronts: networks of fronts, such as `10.0.0.0/8`: connections from there begin with a PROXY protocol header of
            version 2, and may have no TLS.
        origins: pages that may connect by WebSocket, such as `https://app.example`, beside those of the gateway's own
            name.
        workers: processes that share these ports, each a node of its own; one for each core that is to serve them. The
            business API of the first has the port of the settings.
        sessions_per_app: sessions at once of one node; 0: as many as the node can have.
        calls_per_app: calls in progress at once of one node; 0: as many as the node can have.
        drain_s: how long a stopping process gives its clients to go elsewhere and their calls to end.
    """

    listen: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    fronts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    workers: Annotated[int, msgspec.Meta(ge=1, le=limits_platform.GATEWAY_WORKERS_MAX)] = 1
    sessions_per_app: Annotated[int, msgspec.Meta(ge=0)] = 0
    calls_per_app: Annotated[int, msgspec.Meta(ge=0)] = 0
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=limits_platform.DRAIN_S_MAX)] = limits_platform.DRAIN_S


class Dns(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names answered by the scheduling centre over HTTPS.

    Attributes:
        upstream: DNS servers asked about names that the rules do not know, `ip` or `ip:port`, several with commas;
            empty: such names are refused.
    """

    upstream: str = ""


class Relay(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests that come sealed, where nothing else gets through.

    Attributes:
        origins: where each host is fetched from that may be asked for, by `host` or `host:port`: addresses as `ip`,
            `ip:port` or `http://ip:port` with commas, or nothing for those of its name that are public.
    """

    origins: dict[str, str] = {}


class Settings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything, resolved.

    Attributes:
        state: the state folder, absolute; chosen by `--state` or `STORMLINE_STATE`, not in the file, which lies in it.
        host: IP address every part listens on. Loopback by default: nothing of a new platform is open to a network.
        advertise: IP address under which clients reach this machine; empty: the same as `host`. Needed where `host` is
            0.0.0.0 or ::, which nobody can connect to.
        unit: name of this unit (a deployment that can serve alone).
        app: application id that tokens and plans are for.
        log_level: least severe level that reaches the logs.
        ports: where each part listens.
        nats: an external engine.
        api: the API application gateway.
        gateway: where and how long connections are taken, and what one app may take.
        dns: names answered by the scheduling centre.
        relay: requests that come sealed.
    """

    state: str
    host: str = "127.0.0.1"
    advertise: str = ""
    unit: str = "u1"
    app: str = "demo"
    log_level: LogLevel = "info"
    ports: Ports = Ports()
    nats: Nats = Nats()
    api: Api = Api()
    gateway: Gateway = Gateway()
    dns: Dns = Dns()
    relay: Relay = Relay()

    @property
    def advertised(self) -> str:
        """IP address that plans and the bundle name."""
        return self.advertise or self.host
