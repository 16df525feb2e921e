"""Who may see the console: a link with a key, then a cookie. Pure.

The key is exchanged for a cookie that scripts and other sites cannot use, so it leaves the address bar at once. The
link works as long as the console runs (a second browser, a cleared cookie) and ends with it.
"""

import hashlib
import hmac
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlencode

from stormline.core import errors
from stormline.core.values import Address, Secret, parse_address

KEY_CHARS_MIN: Final = 16


def link(address: Address, access_key: Secret, *, tls: bool) -> str:
    """The link that opens the console. Holds the key: show it to the operator, log it nowhere."""
    return f"{'https' if tls else 'http'}://{address}/?{urlencode({'key': access_key.reveal()})}"


def host_allowed(header: str, names: Collection[str]) -> bool:
    """Say whether a `Host` header names us.

    A site that points its own name at our address (DNS rebinding) sends its own name. An IP literal or `localhost`
    cannot be rebound, and `names` are the operator's.
    """
    try:
        address = parse_address(header, default_port=80)
    except errors.ConfigError:
        return False
    return address.is_ip or address.host.lower() in {"localhost", *(name.lower() for name in names)}


class Access:
    """Checks keys and cookies.

    Args:
        key: the access key of the link.
        tls: the console is served over TLS, so the cookie is too.

    Raises:
        ConfigError: the key is short enough to guess.
    """

    def __init__(self, key: Secret, *, tls: bool) -> None:
        raw = key.reveal().encode()
        if len(raw) < KEY_CHARS_MIN:
            raise errors.ConfigError(f"console access_key: at least {KEY_CHARS_MIN} characters")
        self._key = raw
        self._tls = tls
        self._session = hmac.digest(raw, b"stormline console session", hashlib.sha256).hex()
        # Cookies do not tell ports apart: two consoles on one machine must not overwrite each other's.
        self._cookie = "stormline-" + hmac.digest(raw, b"stormline console cookie", hashlib.sha256).hex()[:8]

    def key_matches(self, key: str) -> bool:
        """Compare a link's key, in constant time."""
        return hmac.compare_digest(key.encode("utf-8", "replace"), self._key)

    def signed_in(self, cookies: Mapping[str, str]) -> bool:
        """Say whether a request's cookies hold our session, in constant time."""
        sent = cookies.get(self._cookie, "").encode("utf-8", "replace")
        return hmac.compare_digest(sent, self._session.encode())

    def set_cookie(self) -> str:
        """The `Set-Cookie` value that signs a browser in until it is closed or the console restarts."""
        secure = "; Secure" if self._tls else ""
        return f"{self._cookie}={self._session}; Path=/; HttpOnly; SameSite=Strict{secure}"
