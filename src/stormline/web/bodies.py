"""Bodies taken whole before an ASGI application sees its request."""

from starlette.types import Message, Receive


class Gone(Exception):
    """The client left before its request was whole."""


class TooLarge(Exception):
    """The body has more bytes than it may."""


async def read_whole(receive: Receive, size_max: int) -> bytes:
    """Give the body of a request, at most `size_max` bytes. Its time is the caller's to bound; safe to cancel.

    Raises:
        Gone: the client left.
        TooLarge: it is longer.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        body += message.get("body", b"")
        if len(body) > size_max:
            raise TooLarge
        if not message.get("more_body", False):
            return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """Give a `receive` that tells a body that was read, and then what comes after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
