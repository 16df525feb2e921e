"""Rules of a business: what is done for which requests, by host, path and method. The first that fits counts.

Config(rules=(
    BusinessRule(host="id.shop.test", plan="login"),
    BusinessRule(host="api.shop.test", path="/home/**", plan="key", business="home", parse=has_items),
))
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from stormline.client import patterns
from stormline.core import errors, limits, limits_means, limits_platform
from stormline.core.values import Address, parse_address
from stormline.policy import presets
from stormline.policy.presets import Preset, is_whole
from stormline.wire import pathpattern
from stormline.wire.httpsig import VerifyKey

_METHOD_CHARS: Final = frozenset("!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_HOST_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._:")

Parse = Callable[[Any], bool | None]
"""The business's own verdict on a whole answer: True good, False bad, None no opinion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearHttp:
    """Consent to clear HTTP where nothing else has worked, and what makes its answers credible.

    A digest alone proves nothing: whoever can change the body can change the digest. An answer counts where it is
    signed (RFC 9421) by one of these keys, over status, digest of the content (RFC 9530) and what was asked, and fresh.

    Attributes:
        keys: by key id (`keyid`), whose signature is trusted.
        port: of the origin's service without TLS.
        give_untrusted: where nothing else answers, give an answer that nobody vouches for to the caller, marked
            (`response.extensions["stormline.untrusted"]` is True) and counted as a failure. False: the call fails.
    """

    keys: Mapping[str, VerifyKey] = field(default_factory=dict)
    port: int = 80
    give_untrusted: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is out of its range; the message names it.
        """
        if len(self.keys) > limits_means.CLEAR_KEYS_MAX:
            raise errors.ConfigError(f"clear: {len(self.keys)} keys: at most {limits_means.CLEAR_KEYS_MAX}")
        keys: Iterable[tuple[object, object]] = self.keys.items()
        for name, key in keys:
            if not isinstance(name, str) or not isinstance(key, VerifyKey):
                raise errors.ConfigError(f"clear: keys: expected VerifyKey by key id, not {type(key).__name__}")
        if not self.keys and not self.give_untrusted:
            raise errors.ConfigError("clear: without keys no answer can be trusted; give keys, or give_untrusted=True")
        if not is_whole(self.port, 1, 65535):
            raise errors.ConfigError(f"clear: port={self.port!r}: expected 1 to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class BusinessRule:
    """What is done for the requests of one business.

    Attributes:
        host: name of the host; `*.shop.test` for every name below `shop.test`, `*` for every host.
        path: pattern of the path as it stands in the URL, without the query: literal text, in each part between two
            slashes at most one `*` for any text without a slash; `**` as the last part for all that follows, nothing
            included.
        methods: HTTP methods; empty for all.
        plan: a preset by its name, or one of your own; None: what dispatch says for the request, else `ordinary`.
        tries: other numbers of tries, by means; see `Preset.with_tries`.
        clear: consent to clear HTTP; `clear` in `tries` says how often (1 where it is not named).
        deadline_s: as `Config.deadline_s`, for these requests; a request's own counts before it.
        priority: who goes first where not all can go: `key`, `normal`, `background`, or 0 (first) to 7 (RFC 9218's
            urgency); None: as usual. A request's own `stormline.priority` counts before it.
        ipv4_first: these requests are worse over IPv6. What is dialled for them begins with IPv4, and a repetition uses
            no connection over IPv6 as long as there is an IPv4 address on which the request has not failed. A first
            attempt goes over the connection there is.
        business: tag for statistics.
        parse: asked for its verdict on each whole answer, before the client's own; see `AsyncClient`.
        parse_wait_s: seconds that the record of a call without a verdict waits for `mark_parsed` after its end.
    """

    host: str = "*"
    path: str = "/**"
    methods: tuple[str, ...] = ()
    plan: str | Preset | None = None
    tries: Mapping[str, int] = field(default_factory=dict)
    clear: ClearHttp | None = None
    deadline_s: float | None = None
    priority: int | str | None = None
    ipv4_first: bool = False
    business: str = ""
    parse: Parse | None = None
    parse_wait_s: float = 0.0
    preset: Preset = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the values, and make the preset.

        Raises:
            ConfigError: one is out of its range; the message names the rule and the field.
        """
        object.__setattr__(self, "preset", presets.ORDINARY)
        try:
            self._check()
        except errors.ConfigError as error:
            raise errors.ConfigError(f"rule for {self.host!r} {self.path!r}: {error}") from None

    def _check(self) -> None:
        host: object = self.host
        if not isinstance(host, str) or host != host.lower() or not _is_host_pattern(host):
            raise errors.ConfigError("host: expected a name in lower case, *.name or *")
        pathpattern.check(self.path)
        methods: object = self.methods
        if not isinstance(methods, tuple | list | frozenset | set):
            raise errors.ConfigError(f"methods={self.methods!r}: expected a tuple of names")
        for method in methods:
            if not isinstance(method, str) or not method or not _METHOD_CHARS.issuperset(method):
                raise errors.ConfigError(f"methods: {method!r} is no method")
        for name, value, most in (
            ("deadline_s", self.deadline_s, limits.CALL_DEADLINE_MAX_S),
            ("parse_wait_s", self.parse_wait_s or None, limits_means.PARSE_WAIT_S_MAX),
        ):
            if value is not None and (not _is_number(value) or not 0 < value <= most):
                raise errors.ConfigError(f"{name}={value!r}: expected seconds in (0, {most:.0f}]")
        try:
            patterns.urgency(self.priority)
        except errors.LocalProtocolError as error:
            raise errors.ConfigError(str(error).removeprefix("stormline.")) from None
        ipv4_first: object = self.ipv4_first
        if not isinstance(ipv4_first, bool):
            raise errors.ConfigError(f"ipv4_first={ipv4_first!r}: expected True or False")
        parse: object = self.parse
        if parse is not None and not callable(parse):
            raise errors.ConfigError(f"parse: expected a function, not {type(parse).__name__}")
        object.__setattr__(self, "preset", self._preset())

    def _preset(self) -> Preset:
        named = presets.ORDINARY if self.plan is None else self.plan
        plan = self._laid_over(named if isinstance(named, Preset) else presets.preset(named))
        if plan.clear and self.clear is None:
            raise errors.ConfigError("clear HTTP needs consent: give clear=ClearHttp(keys=...) with it")
        return plan

    def _laid_over(self, plan: Preset) -> Preset:
        tries = dict(self.tries)
        if self.clear is not None and plan.clear == 0:
            tries.setdefault("clear", 1)
        return plan.with_tries(tries) if tries else plan

    def over(self, told: Preset) -> Preset:
        """Give the preset where dispatch says one: the rule's own where it names one, else that with the rule's tries.

        What dispatch wants over TLS only is not asked in clear, whatever the rule says.
        """
        if self.plan is not None:
            return self.preset
        laid = self._laid_over(replace(told, tls_only=False))
        return replace(laid, clear=0, tls_only=True) if told.tls_only else laid

    def fits(self, method: str, host: str, path: str) -> bool:
        """Say whether a request is meant.

        Args:
            method: as it is sent.
            host: in lower case.
            path: without the query.
        """
        if self.host != "*" and self.host != host and not (self.host[0] == "*" and host.endswith(self.host[1:])):
            return False
        return (not self.methods or method in self.methods) and pathpattern.fits(self.path, path)


class Rules:
    """The rules of a client; what was found for a method, host and path is remembered."""

    def __init__(self, rules: tuple[BusinessRule, ...]) -> None:
        self._rules = rules
        self.find = functools.lru_cache(limits_means.RULE_MATCHES_CACHED)(self._find)
        """Give the first rule that fits a method, host and path (without the query), None where none does."""

    def _find(self, method: str, host: str, path: str) -> BusinessRule | None:
        host = host.lower()
        return next((rule for rule in self._rules if rule.fits(method, host, path)), None)


def check_rules(rules: object) -> tuple[BusinessRule, ...]:
    """Check a config's rules.

    Raises:
        ConfigError: it is no tuple of rules, or too long a one.
    """
    if not isinstance(rules, tuple | list) or not all(isinstance(rule, BusinessRule) for rule in rules):
        raise errors.ConfigError("rules: expected a tuple of BusinessRule")
    if len(rules) > limits_means.RULES_MAX:
        raise errors.ConfigError(f"rules: {len(rules)} of them: at most {limits_means.RULES_MAX}")
    return tuple(rules)


def check_addresses(given: object, *, what: str) -> dict[str, tuple[Address, ...]]:
    """Check addresses by host and give them; where an entry names no port it is 0, for the request's own.

    Args:
        given: texts by host name: `192.0.2.1`, `192.0.2.1:8443`, `2001:db8::1`, `[2001:db8::1]:8443`.
        what: the setting's name, for the message.

    Raises:
        ConfigError: something else, or too much.
    """
    if not isinstance(given, Mapping):
        raise errors.ConfigError(f"{what}: expected addresses by host name")
    if len(given) > limits_means.MEANS_HOSTS_MAX:
        raise errors.ConfigError(f"{what}: {len(given)} hosts: at most {limits_means.MEANS_HOSTS_MAX}")
    found: dict[str, tuple[Address, ...]] = {}
    for host, texts in given.items():
        if isinstance(texts, str) or not isinstance(host, str) or not host:
            raise errors.ConfigError(f"{what}: {host!r}: expected a tuple of addresses")
        if len(texts) > limits_means.MEANS_ADDRESSES_MAX:
            raise errors.ConfigError(f"{what}: {host}: at most {limits_means.MEANS_ADDRESSES_MAX} addresses")
        places = []
        for text in texts:
            try:
                place = text if isinstance(text, Address) else parse_address(text, default_port=0)
            except (errors.ConfigError, TypeError) as error:
                raise errors.ConfigError(f"{what}: {host}: {error}") from None
            if not place.is_ip:
                raise errors.ConfigError(f"{what}: {host}: {place.host!r} is no IP address")
            places.append(Address(*place))
        found[host.lower()] = tuple(dict.fromkeys(places))
    return found


def known_addresses(**settings: object) -> dict[str, tuple[Address, ...]]:
    """Join the settings that name addresses of origins, by their names and in the order in which they count."""
    found: dict[str, tuple[Address, ...]] = {}
    for what, given in settings.items():
        for host, addresses in check_addresses(given, what=what).items():
            found[host] = tuple(dict.fromkeys((*found.get(host, ()), *addresses)))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_host_pattern(host: str) -> bool:
    name = host.removeprefix("*.")
    return host == "*" or (bool(name) and len(host) <= limits_platform.HOST_CHARS_MAX and _HOST_CHARS.issuperset(name))
