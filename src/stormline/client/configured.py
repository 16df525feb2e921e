"""What a client's config comes to: TLS, rules, proxies, how the network is watched."""

import functools
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from stormline.client.config import Config, matches
from stormline.client.outside import Outside
from stormline.client.steering import Steering
from stormline.outbound import proxy_rules

if TYPE_CHECKING:
    from stormline.client.rules import Rules
    from stormline.core.values import Address

ForeignContext = ssl.SSLContext | Callable[[Sequence[str]], ssl.SSLContext]
"""TLS to origins: a context as it is, or what makes one that offers the given ALPN names."""


def tls_contexts(
    config: Config, given: ForeignContext | None, outside: Outside, alpn: tuple[str, ...]
) -> tuple[ssl.SSLContext, Callable[[], ssl.SSLContext] | None]:
    """Give TLS for origins, and what makes the same with HTTP/1.1 alone: None of a context that is as it is."""
    if isinstance(given, ssl.SSLContext):
        return given, None
    make = outside.trust.foreign_context if given is None else given
    return make(alpn), functools.cache(lambda: make(("http/1.1",))) if config.http2 else None


def rules_of(config: Config) -> "tuple[Rules | None, Mapping[str, tuple[Address, ...]]]":
    """Give the rules of a config and the addresses it names."""
    if not (config.rules or config.addresses or config.pinned or config.backup_addresses):
        return None, {}
    from stormline.client import rules  # only who has some pays for them

    addresses = rules.known_addresses(
        addresses=config.addresses, pinned=config.pinned, backup_addresses=config.backup_addresses
    )
    return rules.Rules(config.rules) if config.rules else None, addresses


class Offers:
    """Says what to offer a host in TLS: HTTP/2 first, or HTTP/1.1 alone where HTTP/2 does badly."""

    def __init__(self, steering: Steering, usual: ssl.SSLContext, h1: Callable[[], ssl.SSLContext]) -> None:
        self._steering = steering
        self._usual = usual
        self._h1 = h1

    def context_of(self, host: str) -> ssl.SSLContext:
        """Give the context for one dial."""
        return self._usual if self._steering.protocols(host, ("h2", "h1"))[0] == "h2" else self._h1()


def prefers_ipv4(config: Config, host: str) -> bool:
    """Say whether a host is tried over IPv4 first."""
    return matches(host, config.prefer_ipv4)


def network_watch(config: Config, environ: Mapping[str, str]) -> str:
    """Give the way to watch the network: the config's, else the environment's."""
    told = environ.get("STORMLINE_NETWORK_WATCH", "").strip() if config.network_watch == "auto" else ""
    return told or config.network_watch


def proxies_of(config: Config, outside: Outside) -> proxy_rules.ProxyRules:
    """Give the proxies: the config's, else the environment's where that is trusted."""
    if config.proxy is not None:
        return proxy_rules.explicit(config.proxy)
    return proxy_rules.from_environment(outside.environ) if config.trust_env else proxy_rules.DIRECT
