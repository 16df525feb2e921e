"""Clear HTTP: who may be asked that way, how, and which of its answers are believed.

Loaded only where a rule gives its consent (`client.rules.ClearHttp`).
"""

import re
from typing import Final

from stormline.client.following import MemoryBody
from stormline.client.lanes import Failed, Reply
from stormline.client.rules import ClearHttp
from stormline.core import errors, limits_means
from stormline.core.phase import Phase
from stormline.outbound.messages import HttpRequest, field_value
from stormline.wire import httpsig

_SECRET: Final = re.compile(
    r"auth|cookie|token|secret|passw|pwd|credential|session|api[-_]?key|(?:^|[-_])(?:key|sid|sig|jwt)(?:$|[-_])|signature"
)
"""Names of fields and of query parameters that may carry a credential."""
_CREDENTIAL: Final = re.compile(rb"^\s*(?:basic|bearer|digest|negotiate|dpop|hmac|apikey)\s", re.IGNORECASE)
"""Values that are one by their form (RFC 9110 section 11.4), whatever their field is called."""
_FRAMING: Final = frozenset({"content-length", "transfer-encoding", "connection", "date"})
_UNVOUCHED: Final = frozenset({b"content-type", b"content-encoding", b"content-length"})
"""All that is given of an answer nobody vouches for: no cookies, no redirect, no challenge."""
_METHODS: Final = frozenset({"GET"})


def may_ask(request: HttpRequest) -> str:
    """Say why a request may not go in clear; empty where it may: a read, with no body and nothing secret in it."""
    if request.method not in _METHODS:
        return "only GET goes in clear"
    if request.body is not None and request.body != b"":
        return "a request with a body does not go in clear"
    for name, value in request.headers:
        if _SECRET.search(name.decode("latin-1").lower()) or _CREDENTIAL.match(value):
            return f"a request with {name.decode('latin-1')} does not go in clear"
    query = request.target.partition(b"?")[2].decode("latin-1").lower()
    for field in query.split("&"):
        if _SECRET.search(_unescaped(field.partition("=")[0])):
            return "a request with a credential in its query does not go in clear"
    return ""


def _unescaped(name: str) -> str:
    return re.sub(r"%([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), name.replace("+", " ")).lower()


def in_clear(request: HttpRequest, clear: ClearHttp, nonce: str) -> HttpRequest:
    """Give the request as it goes over clear HTTP: to the same host, and asking for a signed answer.

    Args:
        request: as the caller made it; one that is for `http` keeps its port.
        clear: the consent.
        nonce: to be signed with the answer.
    """
    port = request.port if request.scheme == "http" else clear.port
    headers = request.headers
    if port != request.port:  # the host field names a port where that is not the scheme's own
        headers = tuple((name, value) for name, value in headers if name.lower() != b"host")
    return request._replace(
        scheme="http",
        port=port,
        headers=(*headers, (b"accept-signature", httpsig.accept_signature(nonce))),
    )


async def judged(reply: Reply, sent: HttpRequest, clear: ClearHttp, *, nonce: str, now_s: float) -> Reply:
    """Give an answer that came in clear, whole, once it has shown that it is the origin's.

    Only the field lines that its signature covers are left on it.

    Args:
        reply: the answer; its body is read here.
        sent: what went on the wire.
        clear: whose signature counts.
        nonce: sent with the request.
        now_s: wall clock.

    Raises:
        Failed: with `UntrustedAnswer`, and the answer as `untrusted` where the consent lets it be given.
        TransportError: the body broke off.
    """
    body = await _whole(reply)
    if body is None:
        raise _untrusted(reply, sent, f"more than {limits_means.CLEAR_BODY_BYTES_MAX} bytes: not checked", None)
    host = f"[{sent.host}]" if ":" in sent.host else sent.host.lower()
    asked = httpsig.Asked(
        sent.method,
        "http",
        host if sent.port == 80 else f"{host}:{sent.port}",
        sent.target.decode("latin-1"),
        sent.headers,
    )
    verdict = httpsig.check_answer(asked, reply.status, reply.headers, body, keys=clear.keys, nonce=nonce, now_s=now_s)
    if verdict.trusted and "content-encoding" not in verdict.covered:
        coding = field_value(reply.headers, b"content-encoding")
        if coding is not None:
            verdict = httpsig.Verdict(False, "the signature does not cover the content coding")
    if not verdict.trusted:
        given = None
        if clear.give_untrusted and not (300 <= reply.status < 400 or reply.status in (401, 407)):
            kept = tuple((name, value) for name, value in reply.headers if name.lower() in _UNVOUCHED)
            given = reply._replace(headers=kept, source=MemoryBody(body), untrusted=True)
        raise _untrusted(reply, sent, verdict.why, given)
    believed = verdict.covered | _FRAMING
    headers = tuple((name, value) for name, value in reply.headers if name.decode("latin-1").lower() in believed)
    return reply._replace(headers=headers, source=MemoryBody(body))


async def _whole(reply: Reply) -> bytes | None:
    pieces: list[bytes] = []
    size = 0
    try:
        while piece := await reply.source.read():
            size += len(piece)
            if size > limits_means.CLEAR_BODY_BYTES_MAX:
                return None
            pieces.append(piece)
    finally:
        await reply.source.aclose()
    return b"".join(pieces)


def _untrusted(reply: Reply, sent: HttpRequest, why: str, given: Reply | None) -> Failed:
    error = errors.UntrustedAnswer(
        f"{sent.host}: answer {reply.status} over clear HTTP: {why}", phase=Phase.BODY, maybe_delivered=True
    )
    return Failed(error, reused=False, untrusted=given)
