"""The client bundle: the one file an app ships so that its client can trust the platform from the first byte.

It holds addresses and public keys only. A bundle for one device may also carry that device's token, and is then as
secret as the token.
"""

from typing import Annotated, Final

import msgspec

from stormline.core import errors, ids, limits, limits_network, limits_relay
from stormline.core.values import Address, parse_address
from stormline.wire import hostname, jws, strictjson

FORMAT: Final = "stormline-bundle/1"


_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_PortOrNone = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Centre(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One scheduling centre.

    Attributes:
        host: IP literal; or a name, which is looked up where no address answers.
        port: HTTPS.
        unit: unit it belongs to; a client asks those of its own unit first.
        plain_port: the same plans in clear HTTP, 0 for no such port.
    """

    host: str
    port: _Port
    unit: str = ""
    plain_port: _PortOrNone = 0


class Relay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A relay that may be used before any plan is there.

    Attributes:
        host: IP literal.
        port: clear HTTP; what goes there is sealed.
        keys: the keys to seal for, `application/ohttp-keys` as base64url; good until the relay's key is changed.
        hosts: hosts that it fetches. Where a plan is held that knows a host, its word alone counts for that one.
    """

    host: str
    port: _Port
    keys: str
    hosts: tuple[str, ...]


class Bundle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client knows before it has asked anybody.

    Attributes:
        format: always `FORMAT`.
        app: application id.
        dispatch: addresses of scheduling centres, `ip:port`, first asked first.
        dispatch_name: name their TLS certificate is checked against.
        dispatch_keys: Ed25519 public keys that sign plans, base64url by key id.
        ca_pem: certificate authority of the platform's own roles; empty for the system's trust store.
        token: device token, empty where the client enrols itself or the app sets one.
        preload: hosts to ask for at start.
        centres: scheduling centres with what else is known of them; those of `dispatch` need not be among them.
        relays: relays for where no scheduling centre answers, best first.
    """

    format: str = FORMAT
    app: str
    dispatch: tuple[str, ...]
    dispatch_name: str
    dispatch_keys: dict[str, str]
    ca_pem: str = ""
    token: str = ""
    preload: tuple[str, ...] = ()
    centres: tuple[Centre, ...] = ()
    relays: tuple[Relay, ...] = ()

    def addresses(self) -> tuple[Address, ...]:
        """Give the scheduling centres' addresses.

        Raises:
            BundleError: one of them is not an address.
        """
        try:
            return tuple(parse_address(text) for text in self.dispatch)
        except (errors.ConfigError, ValueError) as error:  # ValueError: a port of thousands of digits
            raise errors.BundleError(f"bundle: dispatch {str(error)[:200]}") from error

    def __repr__(self) -> str:
        """Show what it is for, never the token."""
        return f"Bundle(app={self.app!r}, dispatch={self.dispatch!r}, token={'***' if self.token else ''!r})"


_decoder = msgspec.json.Decoder(Bundle)


def encode(bundle: Bundle) -> bytes:
    """Give the bundle as indented JSON, the form of the file."""
    return msgspec.json.format(msgspec.json.encode(bundle), indent=2) + b"\n"


def decode(data: bytes, *, where: str = "bundle") -> Bundle:
    """Read a bundle file.

    Args:
        data: the file's bytes.
        where: named in errors, usually the path.

    Raises:
        BundleError: too large, not JSON, not a bundle, of a newer format, or with a useless address or key.
    """
    if len(data) > limits.BUNDLE_BYTES_MAX:
        raise errors.BundleError(f"{where}: {len(data)} bytes, a bundle has at most {limits.BUNDLE_BYTES_MAX}")
    try:
        bundle = strictjson.decode(data, _decoder)
    except ValueError as error:
        raise errors.BundleError(f"{where}: not a client bundle: {error}") from error
    if bundle.format != FORMAT:
        raise errors.BundleError(f"{where}: format {bundle.format[:40]!r}, this version reads {FORMAT!r}")
    if not bundle.dispatch and not bundle.centres:
        raise errors.BundleError(f"{where}: it names no dispatch address")
    try:
        bundle.addresses()
        ids.check_label(bundle.app, "app")
        for centre in bundle.centres[: limits_network.CENTRES_MAX]:
            hostname.normalise(centre.host)
        jws.load_public_keys(bundle.dispatch_keys)
    except (errors.ConfigError, errors.SignatureError) as error:
        raise errors.BundleError(f"{where}: {error}") from error
    if len(bundle.centres) > limits_network.CENTRES_MAX:
        raise errors.BundleError(f"{where}: {len(bundle.centres)} centres, at most {limits_network.CENTRES_MAX}")
    _check_relays(bundle, where)
    if not bundle.dispatch_keys:
        raise errors.BundleError(f"{where}: it holds no dispatch key, no answer could be trusted")
    return bundle


def _check_relays(bundle: Bundle, where: str) -> None:
    if len(bundle.relays) > limits_relay.BUNDLE_RELAYS_MAX:
        raise errors.BundleError(f"{where}: {len(bundle.relays)} relays, at most {limits_relay.BUNDLE_RELAYS_MAX}")
    for relay in bundle.relays:
        place = f"{where}: relay {relay.host[:40]}"
        if not Address(relay.host, relay.port).is_ip:
            raise errors.BundleError(f"{place}: expected an IP address")
        if len(relay.hosts) > limits_relay.BUNDLE_RELAY_HOSTS_MAX:
            raise errors.BundleError(
                f"{place}: {len(relay.hosts)} hosts, at most {limits_relay.BUNDLE_RELAY_HOSTS_MAX}"
            )
        try:
            keys = jws.b64url_decode(relay.keys)
            for host in relay.hosts:
                if hostname.normalise(host) != host:
                    raise errors.BundleError(f"{place}: host {host[:80]!r}: expected it as DNS has it, in lower case")
        except (errors.ConfigError, ValueError) as error:
            raise errors.BundleError(f"{place}: {error}") from error
        if not 0 < len(keys) <= limits_relay.RELAY_KEYS_BYTES_MAX:
            raise errors.BundleError(f"{place}: {len(keys)} bytes of keys")
