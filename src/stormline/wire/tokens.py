"""Device tokens: who a session belongs to, signed by the app's backend or by dispatch.

A token is a JWT (RFC 7519) in the form of `wire.jws`, so a backend in any language can mint one.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from stormline.core import errors, limits
from stormline.core.codes import Code
from stormline.wire import jws, strictjson

TYP: Final = "stormline-device+jwt"

_Seconds = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]  # integers that every JSON reader keeps exact


class DeviceToken(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"app": "aud", "device": "sub"}
):
    """The claims of a device token.

    Attributes:
        app: application id (claim `aud`).
        device: device id (claim `sub`).
        user: user id, empty where nobody is logged in.
        iat: issued at, seconds since 1970.
        exp: not valid from this second on.
        nbf: not valid before this second, 0 for no such bound (RFC 7519 section 4.1.5).
    """

    app: str
    device: str
    user: str = ""
    iat: _Seconds
    exp: _Seconds
    nbf: _Seconds = 0


_decoder = msgspec.json.Decoder(DeviceToken)
_NOBODY: Final = DeviceToken(app="", device="", iat=0, exp=0)


def mint(token: DeviceToken, *, key: Ed25519PrivateKey, kid: str) -> str:
    """Sign a device token."""
    return jws.sign(msgspec.json.encode(token), key=key, kid=kid, typ=TYP)


def device_of(text: str) -> str:
    """Say whose device a token names, to its own holder; empty where it names none. Nothing is checked by this."""
    return _claims_of(text).device


def user_of(text: str) -> str:
    """Say which user a token names, likewise; empty where nobody is logged in."""
    return _claims_of(text).user


def _claims_of(text: str) -> DeviceToken:
    try:
        return strictjson.decode(jws.b64url_decode(text.split(".")[1].encode("ascii")), _decoder)
    except (ValueError, IndexError):
        return _NOBODY


def verify(text: str, *, keys: Mapping[str, Ed25519PublicKey], wall: float) -> DeviceToken:
    """Check a device token.

    Args:
        text: the token as it came in the HELLO or an `Authorization: Bearer` header.
        keys: the app's public keys by id.
        wall: now, seconds since 1970.

    Raises:
        ExpiredError: genuine, but expired.
        NotYetValidError: genuine, but from the future (beyond `limits.CLOCK_SKEW_S`).
        UnknownKeyError: signed with a key that is not in `keys`.
        SignatureError: not genuine, or its claims are malformed.
    """
    payload = jws.verify(text, keys=keys, typ=TYP, size_max=limits.TOKEN_BYTES_MAX)
    try:
        token = strictjson.decode(payload, _decoder)
    except ValueError as error:
        raise errors.SignatureError(f"malformed device token: {error}") from error
    for what, name in (("app", token.app), ("device", token.device)):
        if not name or len(name.encode("utf-8", "replace")) > limits.NAME_BYTES_MAX:
            raise errors.SignatureError(f"device token: {what} must have 1 to {limits.NAME_BYTES_MAX} bytes")
    if len(token.user.encode("utf-8", "replace")) > limits.NAME_BYTES_MAX:
        raise errors.SignatureError(f"device token: user must have at most {limits.NAME_BYTES_MAX} bytes")
    if wall >= token.exp:
        raise errors.ExpiredError(f"device token expired {wall - token.exp:.0f} s ago")
    begin = max(token.iat, token.nbf)
    if begin > wall + limits.CLOCK_SKEW_S:
        raise errors.NotYetValidError(f"device token is from {begin - wall:.0f} s in the future")
    return token


def refusal_code(error: errors.SignatureError) -> Code:
    """Say with which code a token is refused; an unknown key may have been rotated away, so a new token helps."""
    match error:
        case errors.ExpiredError():
            return Code.TOKEN_EXPIRED
        case errors.NotYetValidError():
            return Code.TOKEN_NOT_YET_VALID
        case errors.UnknownKeyError():
            return Code.TOKEN_KEY_UNKNOWN
        case _:
            return Code.TOKEN_INVALID
