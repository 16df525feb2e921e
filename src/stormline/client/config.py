"""What a client is set to."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stormline.core import errors, limits, limits_names, limits_netlog
from stormline.core.values import Secret
from stormline.net.network import WATCHES, NetworkPort
from stormline.net.probes import CaptiveUrl
from stormline.outbound import proxy_rules
from stormline.outbound.doh_server import DohServer
from stormline.policy.means import SWITCHES
from stormline.wire import hostname

if TYPE_CHECKING:
    from stormline.client.rules import BusinessRule
    from stormline.wire.bundle import Bundle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a client; every field has a working default.

    Attributes:
        bundle: the client bundle of a platform, None to work stand-alone: plain DNS and the origin itself.
        token: device token; default the bundle's, else the client enrols itself with dispatch.
        deadline_s: seconds a call may take until the head of its answer, over all attempts. None: 15 s, or the
            request's read timeout where that is longer; large uploads and event streams are bounded by silence alone.
            This and the next two hold where neither the request, nor a rule, nor a platform's plan says it; see
            `client.allowance`.
        read_timeout_s: longest silence while waiting for an answer or between two packets of it.
        connect_timeout_s: one connection, TCP and TLS together.
        business: tag of the business, for statistics; a request's `stormline.business` extension overrides it.
        rules: what is done for which requests, by host, path and method: the first that fits; see `BusinessRule`.
        addresses: IP addresses by host name, with or without a port, at which its origin may be asked over TLS where
            its name has failed; the certificate is checked by the name.
        disabled: what never to use, by name: a means (`long`, `ip-direct`, `direct`, `relay`, `clear`, `original`),
            `h1` (HTTP/1.1 where HTTP/2 has stalled), `hedge` (a second request beside a late one).
        retry_statuses: answers to reads, and to writes with an `Idempotency-Key`, that are asked again after a pause,
            that of their `Retry-After` where they have one: what a server says that is too busy or failed for a moment.
            The last such answer is given to the caller. Empty: every answer is final.
        mptcp: ask for Multipath TCP (RFC 8684) where the kernel has it; plain TCP where it or the server has not.
        second_path: where the network is dark and the machine has another way out (Linux), ask over that one too, and
            stay there until the first is back. Never around a VPN or a proxy.
        second_path_bytes: what a metered second way may carry at once; that room comes back in a day. None:
            `limits.PATH_METERED_BYTES`; 0: nothing.
        http2: offer HTTP/2 to origins that are asked directly.
        admission: bound what is in flight to a host that shows trouble, and to all where the link is weak; the rest
            waits in order of urgency. False: everything goes at once.
        join_reads: identical reads under way at once are sent once, and each caller gets the answer; see
            `client.joining` for what is identical. A request's `stormline.join_reads` extension overrides it.
        report: send each call's timeline to the platform's APM. It holds host, path, times and outcome; no query
            values, headers, bodies or credentials.
        store: folder where the device token, the last plan and what is learned of networks are kept between starts,
            None to keep nothing.
        network_log_dir: folder of the network log: calls that failed in full, and counts of those that did not. None:
            `netlog` below `store`, and no log where that is None too. Several clients and processes may use one.
        network_log_bytes: size of all its files, the oldest go first; 0: no log.
        network_log_key: public X25519 key (base64url) that the files are sealed to, as `stormline netlog key` makes it:
            this device cannot read them then. None: they are clear, for whoever may read the folder (0700, 0600).
        proxy: URL of the proxy for everything: `http://`, `https://`, `socks5://` or `socks5h://`, with
            `user:password@` where it wants them. The environment then says nothing about proxies. No `repr` shows it.
        trust_env: take proxies from the environment (`HTTPS_PROXY`, `NO_PROXY` and so on) where `proxy` is None.
        network: kind of network, where the app knows it: `wifi`, `cell`, `wired`.
        app_version: version of the app, where a business wants to count and find its devices by it.
        tags: words by which a business finds this device (`kiosk`, `beta`), at most 8.
        prefer_ipv4: hosts that are worse over IPv6, which is tried there after IPv4: names, or `*.example.com` for all
            below a name.
        preconnect: URLs of origins to connect to when the client begins, at most `limits_memory.PRECONNECTS_MAX`; `*`
            stands for those used most on this network, as far as the store knows it. Nothing is asked of them.
        doh: servers for DNS over HTTPS (RFC 8484), the best first: asked where the system's resolver is slow, fails or
            lies. Each a `stormline.DohServer`, or the URL of one whose host is an IP address. They are reached
            directly, never through a proxy.
        pinned: names and their IP addresses: these are used, and nobody is asked. Certificates are checked by name, as
            ever.
        backup_addresses: names and IP addresses that are tried last, where nobody has an answer or none of it works.
        private_hosts: names, with all below them, that may have addresses of private networks. Of any other public name
            such an answer is doubtful: DNS over HTTPS is asked as well, and what it says goes first.
        network_watch: how the client learns of its network: `auto` (the best there is, or what the variable
            `STORMLINE_NETWORK_WATCH` says), `netlink`, `polling` or `off`.
        network_port: who tells of the network instead, such as a `stormline.net.recorded.PushedNetwork` that the app
            feeds; for one client at a time.
        network_probes: when requests fail, find out why by a few packets to the router, the name servers and servers
            that were talked to before. None: yes, unless the variable `STORMLINE_NETWORK_PROBES` is `off`.
        diagnose: when a request of the preset `key` fails, find out why, rarely, and report it where there is a
            platform (`report`); see `AsyncClient.diagnose`. Never where `network_probes` are off.
        captive_url: URL in clear HTTP that answers 204 or `success` where no login page is in the way; asked only
            when requests fail. None: nobody is asked.
    """

    bundle: "Bundle | None" = None
    token: Secret | None = None
    deadline_s: float | None = None
    read_timeout_s: float = limits.READ_TIMEOUT_S
    connect_timeout_s: float = limits.LINK_CONNECT_TIMEOUT_S
    business: str = ""
    rules: "tuple[BusinessRule, ...]" = ()
    addresses: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    disabled: frozenset[str] = frozenset()
    retry_statuses: frozenset[int] = frozenset({429, 500, 502, 503, 504})
    mptcp: bool = False
    second_path: bool = True
    second_path_bytes: int | None = None
    http2: bool = True
    admission: bool = True
    join_reads: bool = False
    report: bool = True
    store: Path | None = None
    network_log_dir: Path | None = None
    network_log_bytes: int = limits_netlog.NETLOG_BYTES
    network_log_key: str | None = None
    network: str = "unknown"
    app_version: str = ""
    tags: tuple[str, ...] = ()
    network_watch: str = "auto"
    network_port: NetworkPort | None = None
    network_probes: bool | None = None
    diagnose: bool = True
    captive_url: str | None = None
    proxy: str | None = None
    trust_env: bool = True
    prefer_ipv4: tuple[str, ...] = ()
    preconnect: tuple[str, ...] = ()
    doh: tuple[DohServer | str, ...] = ()
    pinned: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    backup_addresses: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    private_hosts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is out of its range; the message names it.
        """
        for name in ("deadline_s", "read_timeout_s", "connect_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= limits.CALL_DEADLINE_MAX_S:
                raise errors.ConfigError(f"{name}={value!r}: expected seconds in (0, {limits.CALL_DEADLINE_MAX_S:.0f}]")
        unknown = sorted(set(self.disabled) - set(SWITCHES))
        if unknown:
            raise errors.ConfigError(f"disabled: no such means: {unknown[0]!r}; there are {', '.join(SWITCHES)}")
        if self.rules or self.addresses:
            from stormline.client import rules  # only who has some pays for what checks them

            object.__setattr__(self, "rules", rules.check_rules(self.rules))
            rules.check_addresses(self.addresses, what="addresses")
        for name in ("prefer_ipv4", "preconnect", "tags"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(each, str) for each in value):
                raise errors.ConfigError(f"{name}={value!r}: expected a tuple of texts")
        words = (self.app_version, *self.tags)
        if len(self.tags) > limits.HELLO_TAGS_MAX or any(len(word) > limits.HELLO_WORD_CHARS_MAX for word in words):
            raise errors.ConfigError(
                f"app_version, tags: at most {limits.HELLO_TAGS_MAX} tags of {limits.HELLO_WORD_CHARS_MAX} characters"
            )
        if self.second_path_bytes is not None and not 0 <= self.second_path_bytes <= limits.PATH_BYTES_MAX:
            raise errors.ConfigError(
                f"second_path_bytes={self.second_path_bytes!r}: expected 0 to {limits.PATH_BYTES_MAX}"
            )
        if self.network_watch not in WATCHES:
            raise errors.ConfigError(f"network_watch={self.network_watch!r}: expected one of {', '.join(WATCHES)}")
        if self.captive_url is not None:
            CaptiveUrl(self.captive_url)
        if self.proxy is not None:
            if not isinstance(self.proxy, str):
                raise errors.ConfigError(f"proxy: expected a URL as text, not {type(self.proxy).__name__}")
            try:
                proxy_rules.explicit(self.proxy)
            except errors.ConfigError as error:
                raise errors.ConfigError(f"proxy: {error}") from None
            if not isinstance(self.proxy, Secret):  # of a Secret it would take the mask
                object.__setattr__(self, "proxy", Secret(self.proxy))
        self._check_names()
        if self.network_log_bytes and not (
            limits_netlog.NETLOG_BYTES_MIN <= self.network_log_bytes <= limits_netlog.NETLOG_BYTES_MAX
        ):
            raise errors.ConfigError(
                f"network_log_bytes={self.network_log_bytes!r}: expected 0, or "
                f"{limits_netlog.NETLOG_BYTES_MIN} to {limits_netlog.NETLOG_BYTES_MAX}"
            )
        if self.network_log_key is not None:
            from stormline.client import netlog  # only who seals pays for cryptography

            netlog.public_key(self.network_log_key)

    def _check_names(self) -> None:
        """Check what is said of names, and bring it into one form."""
        if len(self.doh) > limits_names.DOH_SERVERS_MAX:  # also a text where a tuple was meant
            raise errors.ConfigError(f"doh: expected at most {limits_names.DOH_SERVERS_MAX} servers")
        servers = tuple(each if isinstance(each, DohServer) else DohServer(each) for each in self.doh)
        object.__setattr__(self, "doh", servers)
        for name in ("pinned", "backup_addresses"):
            object.__setattr__(self, name, {host: _ips(name, host, ips) for host, ips in getattr(self, name).items()})
        try:
            private = frozenset(hostname.normalise(host) for host in self.private_hosts)
        except errors.ConfigError as error:
            raise errors.ConfigError(f"private_hosts: {error}") from None
        object.__setattr__(self, "private_hosts", private)


def _ips(name: str, host: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """Check the addresses that a setting gives a host."""
    try:
        hostname.normalise(host)
        ips = tuple(dict.fromkeys(hostname.normalise(each) for each in given))
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{name}: {error}") from None
    if not 0 < len(ips) <= limits_names.NAMES_CONFIGURED_MAX or not all(map(hostname.is_address, ips)):
        raise errors.ConfigError(f"{name}: {host}: expected 1 to {limits_names.NAMES_CONFIGURED_MAX} IP addresses")
    return ips


def matches(host: str, patterns: tuple[str, ...]) -> bool:
    """Say whether one of `Config.prefer_ipv4` means a host, whatever the case of its letters."""
    host = host.lower()
    return any(
        host.endswith(pattern[1:].lower()) if pattern.startswith("*.") else host == pattern.lower()
        for pattern in patterns
    )


def load_bundle(source: "Bundle | str | os.PathLike[str] | None") -> "Bundle | None":
    """Give the bundle meant by `source`: itself, a file's, or that of `STORMLINE_BUNDLE` where it is None.

    Returns:
        None where nothing names a bundle: the client then works stand-alone.

    Raises:
        BundleError: the file is missing, unreadable or not a bundle; the message names it.
    """
    if source is not None and not isinstance(source, str | os.PathLike):
        return source
    named = source if source is not None else os.environ.get("STORMLINE_BUNDLE")
    if not named:
        return None
    from stormline.wire import bundle as bundles  # only who has a bundle pays for what reads and checks it

    path = Path(named)
    try:
        with path.open("rb") as file:
            data = file.read(limits.BUNDLE_BYTES_MAX + 1)
    except OSError as error:
        raise errors.BundleError(f"{path}: {error.strerror or error}") from error
    return bundles.decode(data, where=str(path))
