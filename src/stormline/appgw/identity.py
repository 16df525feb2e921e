"""How business systems learn whose call they serve: as plain headers, and signed.

The signed form, `Stormline-Identity`, is a JWT (RFC 7519) in JWS compact form, Ed25519 (`EdDSA`), `typ`
`stormline-identity+jwt`:

| claim                   | meaning                                                   |
|-------------------------|-----------------------------------------------------------|
| `iss`                   | `stormline:` and the unit                                 |
| `aud`                   | name of the upstream it was made for                      |
| `app`, `device`, `user` | whose session it is; `user` empty where nobody is logged in |
| `sid`                   | id of the session                                         |
| `iat`, `exp`            | made at, ends at, seconds since 1970                      |

It says who asks, not what: whoever reads it can show it to the same upstream until it ends.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from stormline.appgw.port import Identity
from stormline.core import limits_api as limits
from stormline.core.clock import Clock
from stormline.policy.recent import RecentTable
from stormline.wire import jws

PREFIX: Final = "stormline-"
"""Headers that begin with it are ours alone: what a client sends under such a name is dropped."""
SIGNED_HEADER: Final = "Stormline-Identity"
TYP: Final = "stormline-identity+jwt"
"""The use that a signed identity names, so that no other signed text of ours can pass for one."""
_PLAIN: Final = "!#$&'()*+,/:;=?@[]"


def headers(identity: Identity) -> list[tuple[str, str]]:
    """Give the headers `Stormline-App`, `Stormline-Device` and, where somebody is logged in, `Stormline-User`.

    Ids are written in printable ASCII: any other byte of their UTF-8, blanks and `%` as `%XX` (RFC 3986 section 2.1),
    so distinct ids stay distinct and none can end its header.
    """
    named = [("Stormline-App", identity.app), ("Stormline-Device", identity.device), ("Stormline-User", identity.user)]
    return [(name, quote(value, safe=_PLAIN)) for name, value in named if value]


class _Claims(msgspec.Struct, frozen=True):
    iss: str
    aud: str
    app: str
    device: str
    user: str
    sid: str
    iat: int
    exp: int


class _Signed(NamedTuple):
    text: str
    renew_at: float


class _Slot:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: _Signed | None = None


class Signer:
    """Signs identities, each anew after a while: one signature serves many requests of a session.

    Args:
        key: signs them.
        unit: this unit.
        clock: time.
    """

    def __init__(self, key: jws.SigningKey, *, unit: str, clock: Clock) -> None:
        self._key = key
        self._issuer = f"stormline:{unit}"
        self._clock = clock
        self._held = RecentTable[tuple[Identity, str], _Slot](limits.IDENTITIES_KEPT, _Slot)

    def sign(self, identity: Identity, audience: str) -> str:
        """Give a signed identity for an upstream; it is good for at least half of `limits_api.IDENTITY_LIFE_S`."""
        slot = self._held.use((identity, audience))
        now = self._clock.wall()
        held = slot.held
        # The wall clock may be set back: then what is held seems to be from the future, and is made anew.
        if held is None or not held.renew_at - limits.IDENTITY_RENEW_S <= now < held.renew_at:
            iat = int(now)
            claims = _Claims(
                iss=self._issuer,
                aud=audience,
                app=identity.app,
                device=identity.device,
                user=identity.user,
                sid=identity.session,
                iat=iat,
                exp=iat + int(limits.IDENTITY_LIFE_S),
            )
            text = jws.sign(msgspec.json.encode(claims), key=self._key.key, kid=self._key.kid, typ=TYP)
            held = slot.held = _Signed(text, now + limits.IDENTITY_RENEW_S)
        return held.text

    @property
    def public_keys(self) -> Mapping[str, Any]:
        """The keys to check them with, as a JWK set (RFC 7517, RFC 8037)."""
        key = {"kty": "OKP", "crv": "Ed25519", "use": "sig", "alg": "EdDSA"}
        return {"keys": [{**key, "kid": self._key.kid, "x": self._key.public_text}]}
