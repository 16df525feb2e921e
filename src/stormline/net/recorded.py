"""The network as somebody else tells it: an app whose host language watches it (Android, iOS), or a recorded story.

An app feeds what its system tells it:

    port = PushedNetwork()
    client = stormline.AsyncClient(config=stormline.Config(network_port=port))
    ...
    port.push({"kind": "cell", "carrier": "Example Mobile", "metered": True, "addresses": ["10.20.0.7"]})

A story is such events, one JSON object a line, each with `at_s`, seconds since its beginning; `load_story` reads it.
"""

import ipaddress
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from stormline.core import limits_network as limits
from stormline.core.errors import ConfigError
from stormline.core.values import Secret
from stormline.net.probes import Beside
from stormline.policy.network import KINDS, NOTHING_KNOWN, NetworkInfo, prefix_of

_FIELDS: Final = frozenset(
    {"kind", "interface", "addresses", "gateway", "ssid", "carrier", "signal_dbm", "metered", "airplane", "denied",
     "vpn", "connected"}
)  # fmt: skip


class StoryEvent(NamedTuple):
    """What the network is from `at_s` seconds after the story's beginning on; `note` says what happened."""

    at_s: float
    info: NetworkInfo
    note: str = ""


def read_event(event: Mapping[str, Any], where: str = "network event") -> NetworkInfo:
    """Read one event as an app pushes it.

    Args:
        event: all fields may be left out: `kind` (`wifi`, `cell`, `wired`, `unknown`), `interface`, `addresses` (with
            or without `/prefix`), `gateway`, `ssid` or `carrier`, `signal_dbm`, `metered`, `airplane`, `denied`
            (the app may not use the network), `vpn`, `connected` (default: there are addresses, and no flight mode
            that took them).
        where: begins the message of an error.

    Raises:
        ConfigError: a field is unknown or has a wrong type or value; the message names it.
    """
    if not isinstance(event, Mapping):
        raise ConfigError(f"{where}: expected an object")
    unknown = sorted(str(name) for name in event if name not in _FIELDS)
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; there are {', '.join(sorted(_FIELDS))}")
    addresses, prefixes = _addresses(event, where)
    kind = _text(event, "kind", where) or "unknown"
    if kind not in KINDS:
        raise ConfigError(f"{where}: kind {kind!r}: expected one of {', '.join(KINDS)}")
    if event.get("ssid") is not None and event.get("carrier") is not None:
        raise ConfigError(f"{where}: either ssid or carrier, not both")
    name = _text(event, "ssid", where) or _text(event, "carrier", where)
    gateway = _text(event, "gateway", where)
    if gateway:
        _literal(gateway, f"{where}: gateway")
    connected = _flag(event, "connected", where)
    return NetworkInfo(
        kind=kind,
        interface=_text(event, "interface", where),
        addresses=addresses,
        prefixes=prefixes,
        gateway=gateway,
        name=Secret(name) if name else None,
        signal_dbm=_signal(event, where),
        metered=_flag(event, "metered", where),
        airplane=_flag(event, "airplane", where),
        denied=_flag(event, "denied", where),
        vpn=bool(_flag(event, "vpn", where)),
        routed=bool(addresses) if connected is None else connected,
    )


def _text(event: Mapping[str, Any], name: str, where: str) -> str:
    value = event.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > limits.NETWORK_NAME_CHARS_MAX:
        raise ConfigError(f"{where}: {name}: expected a text of at most {limits.NETWORK_NAME_CHARS_MAX} characters")
    return value


def _flag(event: Mapping[str, Any], name: str, where: str) -> bool | None:
    value = event.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {name}: expected true or false")
    return value


def _signal(event: Mapping[str, Any], where: str) -> int | None:
    value = event.get("signal_dbm")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not -150 <= value <= 0:
        raise ConfigError(f"{where}: signal_dbm: expected a whole number from -150 to 0")
    return value


def _literal(text: str, where: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ConfigError(f"{where}: {text!r} is no IP address") from None


def _addresses(event: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    given = event.get("addresses", [])
    if not isinstance(given, list | tuple) or len(given) > limits.NETWORK_ADDRESSES_MAX:
        raise ConfigError(f"{where}: addresses: expected a list of at most {limits.NETWORK_ADDRESSES_MAX}")
    addresses, prefixes = set(), set()
    for each in given:
        if not isinstance(each, str):
            raise ConfigError(f"{where}: addresses: expected texts")
        host, slash, length = each.partition("/")
        addresses.add(_literal(host, f"{where}: addresses"))
        if slash:
            if not (length.isascii() and length.isdigit() and len(length) <= 3 and int(length) <= 128):
                raise ConfigError(f"{where}: addresses: {each[:80]!r}: the length of a prefix is 0 to 128")
            prefixes.add(prefix_of(host, int(length)))
    return tuple(sorted(addresses)), tuple(sorted(prefixes - {""}))


def parse_story(text: str, where: str = "story") -> list[StoryEvent]:
    """Read a story: JSON lines; empty lines and lines that begin with `#` are passed over.

    Raises:
        ConfigError: a line is wrong; the message has its number.
    """
    found: list[StoryEvent] = []
    lines = text.splitlines()
    if len(lines) > limits.NETWORK_STORY_LINES_MAX:
        raise ConfigError(f"{where}: more than {limits.NETWORK_STORY_LINES_MAX} lines")
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        place = f"{where}, line {number}"
        if len(line) > limits.NETWORK_STORY_BYTES_MAX:
            raise ConfigError(f"{place}: longer than {limits.NETWORK_STORY_BYTES_MAX} characters")
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: not JSON: {str(error)[:100]}") from None
        if not isinstance(event, dict):
            raise ConfigError(f"{place}: expected an object")
        at_s, note = event.pop("at_s", None), event.pop("note", "")
        if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not math.isfinite(at_s) or at_s < 0:
            raise ConfigError(f"{place}: at_s: expected seconds since the beginning")
        if found and at_s < found[-1].at_s:
            raise ConfigError(f"{place}: at_s: {at_s:g} is before the line above ({found[-1].at_s:g})")
        if not isinstance(note, str):
            raise ConfigError(f"{place}: note: expected a text")
        found.append(StoryEvent(float(at_s), read_event(event, place), note))
    if not found:
        raise ConfigError(f"{where}: no event")
    return found


def load_story(path: str | os.PathLike[str]) -> list[StoryEvent]:
    """Read a story from a file.

    Raises:
        ConfigError: it cannot be read or is wrong; the message names file and line.
    """
    most = limits.NETWORK_STORY_LINES_MAX * limits.NETWORK_STORY_BYTES_MAX
    try:
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8") from None
    return parse_story(text, str(path))


class PushedNetwork:
    """A `net.network.NetworkPort` fed by the app: `push` what the system tells, on the client's event loop.

    Args:
        first: what there is at the start.
    """

    def __init__(self, first: NetworkInfo = NOTHING_KNOWN) -> None:
        self._info = first
        self._changed: Callable[[], None] | None = None

    def push(self, event: Mapping[str, Any] | NetworkInfo) -> None:
        """Take what the network is now.

        Raises:
            ConfigError: see `read_event`.
        """
        self._info = event if isinstance(event, NetworkInfo) else read_event(event)
        if self._changed is not None:
            self._changed()

    def look(self) -> NetworkInfo:
        """See `NetworkPort.look`: what was pushed last."""
        return self._info

    def ways(self) -> tuple[NetworkInfo, ...]:
        """See `NetworkPort.ways`: not told."""
        return ()

    def watch(self, changed: Callable[[], None]) -> None:
        """See `NetworkPort.watch`."""
        self._changed = changed

    def touch(self) -> None:
        """See `NetworkPort.touch`: nothing to do."""

    def neighbour(self, index: int, address: str) -> Beside | None:
        """See `NetworkPort.neighbour`: not told."""
        return None

    def close(self) -> None:
        """See `NetworkPort.close`; what is pushed later is kept for the next client."""
        self._changed = None
