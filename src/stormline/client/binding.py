"""Telling a gateway whose a session is from now on."""

import msgspec

from stormline.client.link import Link
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.wire import messages


class _Bound(msgspec.Struct, frozen=True):
    user: str
    resume: str


_decoder = msgspec.json.Decoder(_Bound)


async def bind(link: Link, token: str, deadline_s: float) -> messages.Welcome:
    """Have a link's session be whose a token says, and give its greeting as it would be now.

    Raises:
        CallError: the gateway says no.
        TransportError: the link went away, or the answer makes no sense.
    """
    if link.welcome is None or not token.isascii():
        raise errors.LocalProtocolError("no session stands, or the token is none")
    try:
        call = link.call("session", "bind", body=token.encode(), deadline_s=deadline_s)
    except errors.LocalProtocolError as error:  # it went away in this moment
        raise errors.WriteError(str(error), phase=Phase.SEND, maybe_delivered=False) from error
    gathered = bytearray()
    try:
        await call.reply()
        while chunk := await call.read():
            gathered += chunk
            if len(gathered) > limits.CHUNK_BYTES_MAX:
                break
        bound = _decoder.decode(gathered)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.DecodeError(f"whose the session is: {error}", phase=Phase.PARSE, maybe_delivered=True) from None
    finally:
        call.cancel()
    link.welcome = msgspec.structs.replace(link.welcome, user=bound.user, resume=bound.resume)
    return link.welcome
