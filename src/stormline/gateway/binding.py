"""Whose a session is, changed while it stands: the gate `session`, which every session serves itself."""

import dataclasses
from collections.abc import Mapping
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from stormline.appgw.port import Identity
from stormline.core import errors
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.wire import events as e
from stormline.wire import tokens

GATE: Final = "session"
BIND: Final = "bind"


def bind(
    event: e.CallReceived, identity: Identity, keys: Mapping[str, Ed25519PublicKey], wall: float
) -> tuple[Identity, tokens.DeviceToken]:
    """Give whose a session is after a call, and the token that says so.

    Args:
        event: the call.
        identity: whose it is.
        keys: public keys of its app, by id.
        wall: now, seconds since 1970.

    Raises:
        CallError: it stays whose it is.
    """
    if event.method != BIND:
        raise CallError(Code.CALL_NOT_FOUND, f"the gate {GATE} has no {event.method[:64]!r}")
    if event.more:
        raise CallError(Code.CALL_TOO_LARGE, "a token comes whole with its call")
    try:
        token = tokens.verify(event.body.decode("ascii", "replace"), keys=keys, wall=wall)
    except errors.SignatureError as error:
        raise CallError(Code.CALL_REFUSED, str(error)) from error
    if (token.app, token.device) != (identity.app, identity.device):
        raise CallError(Code.CALL_REFUSED, "the token is another device's")
    return dataclasses.replace(identity, user=token.user), token
