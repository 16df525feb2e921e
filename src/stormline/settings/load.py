"""From a TOML file and `STORMLINE_*` variables to one `Settings`.

What wins: command line, then environment, then file, then default. A key nobody knows is an error in each of them: a
misspelt setting that is silently ignored costs more than a start that fails.
"""

import difflib
import ipaddress
import os
import re
import tomllib
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.core.values import Address, parse_address
from stormline.settings.model import Ports, Section, Settings

PREFIX: Final = "STORMLINE_"
NOT_SETTINGS: Final = frozenset(
    {
        "STATE",
        "CONFIG",
        "BUNDLE",
        "DEBUG",
        "TRACES",
        "LAB_PEERS",
        "SIM_SEED",
        "NETWORK_WATCH",
        "NETWORK_PROBES",
        "PORTABLE",
    }
)
"""Variables with our prefix that are no setting: they say where settings are, or are read elsewhere."""

FILE_NAME: Final = "stormline.toml"

_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def state_folder(environ: Mapping[str, str], state: Path | None = None) -> Path:
    """Say where the platform keeps everything it must find again.

    Args:
        environ: the process environment.
        state: the folder asked for on the command line; wins.

    Returns:
        An absolute path: `state`, else `$STORMLINE_STATE`, else `$XDG_STATE_HOME/stormline`, else
        `~/.local/state/stormline`. It need not exist.

    Raises:
        ConfigError: none of them is given and there is no home folder.
    """
    if state is not None:
        return state.expanduser().absolute()
    if named := environ.get("STORMLINE_STATE"):
        return Path(named).expanduser().absolute()
    xdg = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification: a relative path is to be ignored
        return Path(xdg) / "stormline"
    home = environ.get("HOME", "")
    if not os.path.isabs(home):
        raise errors.ConfigError("no state folder: set --state, STORMLINE_STATE or HOME")
    return Path(home) / ".local" / "state" / "stormline"


def load(
    environ: Mapping[str, str],
    *,
    state: Path | None = None,
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Read the settings.

    Args:
        environ: the process environment.
        state: state folder from the command line.
        file: TOML file from the command line, else the one `STORMLINE_CONFIG` names; it must exist. With neither,
            `stormline.toml` in the state folder is read where there is one.
        overrides: values from the command line by dotted key (`{"nats.url": ...}`).

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value is of the wrong type or range. The message
            names the file or variable, the key and what is expected; never the value of a password.
    """
    folder = state_folder(environ, state)
    if file is None and (named := environ.get("STORMLINE_CONFIG")):
        file = Path(named)
    where, table = _read_file(folder / FILE_NAME if file is None else file.expanduser(), required=file is not None)
    values: dict[str, Any] = {}
    if "state" in table:
        raise errors.ConfigError(f"{where}: state: not settable in a file; use --state or STORMLINE_STATE")
    _take_table(Settings, table, values, where=where, prefix="")
    _take_environment(environ, values)
    for key, value in (overrides or {}).items():
        _put(values, key, _leaf(Settings, key, value, where="command line", text=False))
    values["state"] = str(folder)
    settings = msgspec.convert(values, Settings)
    if ipaddress.ip_address(settings.advertised).is_unspecified:
        raise errors.ConfigError(f"advertise: expected the IP address that clients use, as host is {settings.host}")
    return settings


def encode(settings: Settings) -> bytes:
    """Give the settings as JSON, passwords and all: for a file that only its owner can read."""
    return msgspec.json.encode(settings)


def decode(data: bytes, *, where: str) -> Settings:
    """Undo `encode`.

    Raises:
        ConfigError: it is not what `encode` made.
    """
    try:
        return msgspec.json.decode(data, type=Settings)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"{where}: not a settings file of this version: {error}") from error


def _read_file(path: Path, *, required: bool) -> tuple[str, dict[str, Any]]:
    where = f"config file {path}"
    try:
        with path.open("rb") as file:
            data = file.read(limits.CONFIG_FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise errors.ConfigError(f"{where}: no such file") from None
        return where, {}
    except OSError as error:
        raise errors.ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    if len(data) > limits.CONFIG_FILE_BYTES_MAX:
        raise errors.ConfigError(f"{where}: larger than {limits.CONFIG_FILE_BYTES_MAX} bytes")
    try:
        return where, tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.ConfigError(f"{where}: not TOML: {error}") from error


def _take_table(
    section: type[Section], table: Mapping[str, Any], values: dict[str, Any], *, where: str, prefix: str
) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(section)}
    for key, value in table.items():
        path = f"{prefix}{key}"
        field = fields.get(key)
        if field is None:
            raise errors.ConfigError(f"{where}: unknown key {path!r}{_hint(key, fields)}")
        if _is_section(field.type):
            if not isinstance(value, dict):
                raise errors.ConfigError(f"{where}: {path}: expected a table [{path}], got {_kind(value)}")
            _take_table(field.type, value, values.setdefault(key, {}), where=where, prefix=f"{path}.")
        else:
            values[key] = _convert(path, value, field.type, where=where, text=False)


def _take_environment(environ: Mapping[str, str], values: dict[str, Any]) -> None:
    for variable, value in environ.items():
        name = variable.removeprefix(PREFIX)
        if name == variable or name in NOT_SETTINGS:
            continue
        key = name.lower().replace("__", ".")
        _put(values, key, _leaf(Settings, key, value, where=f"environment variable {variable}", text=True))


def _leaf(section: type[Section], key: str, value: object, *, where: str, text: bool) -> object:
    """Find the field a dotted key means and convert the value to its type."""
    rest = key
    while True:
        fields = {field.name: field for field in msgspec.structs.fields(section)}
        name, _, rest = rest.partition(".")
        field = fields.get(name)
        if field is None or name == "state":
            raise errors.ConfigError(f"{where}: unknown setting {key!r}{_hint(name, fields)}")
        if _is_section(field.type):
            if not rest:
                inner = ", ".join(f"{key}.{each.name}" for each in msgspec.structs.fields(field.type))
                raise errors.ConfigError(f"{where}: {key} is a section; expected one of: {inner}")
            section = field.type
            continue
        if rest:
            raise errors.ConfigError(f"{where}: unknown setting {key!r}: {key[: -len(rest) - 1]} has no parts")
        return _convert(key, value, field.type, where=where, text=text)


def _put(values: dict[str, Any], key: str, value: object) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value


def _convert(key: str, value: object, kind: Any, *, where: str, text: bool) -> object:
    expected = _EXPECTED.get(key, "a text")
    try:
        if text and isinstance(value, str) and kind == dict[str, str]:  # a map in one variable is JSON
            converted: Any = msgspec.json.decode(value, type=kind)
        elif text and isinstance(value, str) and kind == tuple[str, ...]:
            converted = tuple(each.strip() for each in value.split(",") if each.strip())
        else:
            converted = msgspec.convert(value, kind, strict=not text)
        if (check := _CHECKS.get(key)) is not None:
            check(converted)
    except (msgspec.MsgspecError, ValueError, errors.ConfigError) as error:
        got = f", got {_show(value)}" if key not in _SECRET else ""
        raise errors.ConfigError(f"{where}: {key}: expected {expected}{got}") from error
    return converted


def _check_host(value: str) -> None:
    ipaddress.ip_address(value)


def _check_advertise(value: str) -> None:
    if value and ipaddress.ip_address(value).is_unspecified:
        raise ValueError(value)


def _check_url(value: str, schemes: frozenset[str]) -> None:
    """Refuse all but `scheme://ip:port`."""
    parts = urllib.parse.urlsplit(value)
    if parts.scheme not in schemes or not parts.port or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(value)
    ipaddress.ip_address(parts.hostname or "")
    if parts.username is not None:
        raise ValueError(value)


def _check_nats_url(value: str) -> None:
    for url in value.split(",") if value else ():
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"nats", "tls"} or not parts.hostname or not parts.port or "@" in url:
            raise ValueError(url)


def _check_upstreams(value: dict[str, str]) -> None:
    for host, url in value.items():
        if not _HOST.fullmatch(host):
            raise ValueError(host)
        _check_url(url, frozenset({"http", "https"}))


def dns_servers(value: str) -> tuple[Address, ...]:
    """Read `dns.upstream`.

    Raises:
        ValueError: one of them is neither an IP address nor one with a port.
    """
    return tuple(_dns_server(each.strip()) for each in value.split(",") if each.strip())


def _dns_server(text: str) -> Address:
    try:
        return Address(str(ipaddress.ip_address(text)), 53)
    except ValueError:
        address = parse_address(text)
    if not (address.is_ip and address.port):
        raise ValueError(text)
    return address


def _check_dns_upstream(value: str) -> None:
    if len(dns_servers(value)) > limits.FORWARD_SERVERS_MAX:
        raise ValueError(value)


def relay_origins(value: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Read `relay.origins`: addresses by host, as they are written."""
    return {host: tuple(each.strip() for each in text.split(",") if each.strip()) for host, text in value.items()}


def _check_relay_origins(value: dict[str, str]) -> None:
    for host, addresses in relay_origins(value).items():
        if not _HOST.fullmatch(host.partition(":")[0]):
            raise ValueError(host)
        for text in addresses:
            if not parse_address(text.removeprefix("http://"), default_port=443).is_ip:
                raise ValueError(text)


def _check_addresses(value: tuple[str, ...]) -> None:
    for text in value:
        if not parse_address(text).is_ip:
            raise ValueError(text)


def _check_networks(value: tuple[str, ...]) -> None:
    for text in value:
        ipaddress.ip_network(text)


def _check_origins(value: tuple[str, ...]) -> None:
    for text in value:
        parts = urllib.parse.urlsplit(text)
        if parts.scheme not in {"http", "https"} or not parts.hostname or text != f"{parts.scheme}://{parts.netloc}":
            raise ValueError(text)


def _check_unit(value: str) -> None:
    ids.check_label(value, "unit")


_CHECKS: Final[dict[str, Callable[[Any], None]]] = {
    "host": _check_host,
    "advertise": _check_advertise,
    "unit": _check_unit,
    "app": _check_unit,
    "nats.url": _check_nats_url,
    "api.upstreams": _check_upstreams,
    "dns.upstream": _check_dns_upstream,
    "relay.origins": _check_relay_origins,
    "gateway.listen": _check_addresses,
    "gateway.plain": _check_addresses,
    "gateway.fronts": _check_networks,
    "gateway.origins": _check_origins,
}
_LABEL = "1 to 32 of a-z, 0-9 and inner '-'"
_ADDRESSES = "addresses such as 127.0.0.1:8712"
_EXPECTED: Final[dict[str, str]] = {
    "host": "an IP address such as 127.0.0.1",
    "advertise": "an IP address that clients can connect to",
    "unit": _LABEL,
    "app": _LABEL,
    "log_level": "debug, info, warning or error",
    "nats.replicas": "a number of copies, 1 to 5",
    "nats.url": "nats://host:port (several with commas), without user and password, which have their own keys",
    "api.upstreams": 'host names with http(s)://ip:port, such as {"shop.demo" = "http://127.0.0.1:8707"}',
    "gateway.listen": _ADDRESSES,
    "gateway.plain": _ADDRESSES,
    "gateway.fronts": "networks such as 10.0.0.0/8",
    "gateway.origins": "origins as browsers write them, such as https://app.example",
    "gateway.workers": f"1 to {limits.GATEWAY_WORKERS_MAX}",
    "relay.origins": "host names with ip, ip:port or http://ip:port (several with commas) or nothing",
    "gateway.sessions_per_app": "a number from 0 on (0: no bound but the node's)",
    "gateway.calls_per_app": "a number from 0 on (0: no bound but the node's)",
    "dns.upstream": f"1 to {limits.FORWARD_SERVERS_MAX} of ip or ip:port, with commas",
    **{f"ports.{field.name}": "a port, 0 to 65535 (0: a free one)" for field in msgspec.structs.fields(Ports)},
}
_SECRET: Final = frozenset({"nats.core_password", "nats.biz_password", "nats.url"})


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _kind(value: object) -> str:
    return {bool: "true or false", int: "a number", str: "a text", list: "a list"}.get(type(value), "another type")


def _show(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _hint(key: str, known: Mapping[str, object]) -> str:
    names = [name for name in known if name != "state"]
    near = difflib.get_close_matches(key, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else f"; expected one of: {', '.join(names)}"
