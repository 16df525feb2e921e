"""Whether a page in clear HTTP is what it should be.

Nobody signs such a page, so what can be told is this: that it has not the content it is known to have; that it leads to
another host while the same page over TLS does not; that the network itself says that it answered (status 511); and that
it is another than over TLS, twice, while the one over TLS stays the same. The last may also be a server that gives two
answers, which is why it is never said with confidence, unless the page is the one over TLS with something put in.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from stormline.client.findings import Open, reason_in_words
from stormline.client.reaching import Origin
from stormline.core import errors
from stormline.core import limits_diagnosis as limits
from stormline.core.checks import CheckState
from stormline.net.stream import Stream
from stormline.net.webask import Asked

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_FAILED: Final = (OSError, ValueError, errors.TransportError)
_INSERTED_SHARE: Final = 0.9
"""Share of the true page that is still there, at both ends, where something was put in."""


def parse(url: str, what: str) -> Origin:
    """Take a URL apart; user and fragment are left out.

    Raises:
        ConfigError: it is no URL of http or https.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        host = (
            (parts.hostname or "").encode("idna" if not (parts.hostname or "").isascii() else "ascii").decode("ascii")
        )
    except (ValueError, UnicodeError):
        raise errors.ConfigError(f"{what}: {url[:80]!r} is no URL") from None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not port or not host or not target.isascii() or any(char <= " " or char == "\x7f" for char in target + host):
        raise errors.ConfigError(f"{what}: {url[:80]!r}: expected http://host/path or https://host/path")
    return Origin(parts.scheme, host, port, target)


def related(host: str, other: str) -> bool:
    """Say whether two hosts are the same, or one is below the other."""
    host, other = (each.lower().rstrip(".").removeprefix("www.") for each in (host, other))
    return host == other or host.endswith(f".{other}") or other.endswith(f".{host}")


def leads_to(asked: Asked, host: str) -> str:
    """Give the host that an answer redirects to where that is a stranger's; empty elsewhere."""
    if asked.status not in _REDIRECTS:
        return ""
    try:
        there = urlsplit(asked.field("location")).hostname or ""
    except ValueError:
        return ""
    return "" if not there or related(there, host) else there[: limits.DIAGNOSIS_TEXT_CHARS_MAX]


def is_inserted(page: bytes, true: bytes) -> bool:
    """Say whether a page is the true one with something put in."""
    if len(page) <= len(true) or not true:
        return False
    ahead = next((at for at, (one, two) in enumerate(zip(page, true, strict=False)) if one != two), len(true))
    pairs = zip(reversed(page), reversed(true), strict=False)
    behind = next((at for at, (one, two) in enumerate(pairs) if one != two), len(true))
    return min(len(true), ahead + behind) >= _INSERTED_SHARE * len(true)


@dataclass(frozen=True, slots=True)
class ClearPage:
    """A page in clear HTTP, and what it is held against.

    Attributes:
        origin: the page.
        digest: SHA-256 of its content where that is known, hexadecimal; empty for unknown.
        secure: the same page over TLS; None where there is none.
    """

    origin: Origin
    digest: str = ""
    secure: Origin | None = None


async def look(
    check: Open,
    page: ClearPage,
    dial: Callable[[Origin], Awaitable[Stream]],
    dated: Callable[[str, float], None],
) -> None:
    """Look at a page, and end the check.

    Args:
        check: it.
        page: what to look at.
        dial: connects to an origin, with TLS where it has it.
        dated: told the `Date` of an answer, and how long that took.
    """
    origin = page.origin

    async def fetch(what: Origin) -> Asked:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(limits.DIAGNOSIS_HTTP_S):
            asked = Asked(what.field, what.target)
            stream = await dial(what)
            began = loop.time()
            try:
                await asked.over(stream)
            finally:
                stream.close()
        if what is origin:
            dated(asked.field("date"), loop.time() - began)
        return asked

    async def quietly(what: Origin | None) -> Asked | None:
        try:
            return None if what is None else await fetch(what)
        except _FAILED:
            return None

    try:
        first = await fetch(origin)
    except _FAILED as error:
        check.end(CheckState.UNKNOWN, f"no page in clear HTTP: {reason_in_words(error)}")
        return
    if not first.status:
        check.end(CheckState.UNKNOWN, "no answer of HTTP")
        return
    elsewhere = leads_to(first, origin.host)
    check.data.update(status=first.status, redirects_to=elsewhere, injected=False)
    if first.status == 511:
        check.end(CheckState.BAD, "status 511: the network itself wants a login")
        return
    if page.digest and first.status == 200 and hashlib.sha256(first.body).hexdigest() != page.digest.lower():
        check.end(CheckState.BAD, "the content is not what it is known to be", injected=True, proof="digest")
        return
    if page.digest and first.status == 200:
        check.end(CheckState.OK, "the content is what it is known to be")
        return
    again, secure, secure_again = await asyncio.gather(
        quietly(origin if page.secure else None), quietly(page.secure), quietly(page.secure)
    )
    _compare(check, origin, (first, again), (secure, secure_again))


def _compare(
    check: Open,
    origin: Origin,
    clear: tuple[Asked, Asked | None],
    secure: tuple[Asked | None, Asked | None],
) -> None:
    first, again = clear
    true, true_again = secure
    elsewhere = check.data["redirects_to"]
    if true is None or true_again is None or not true.status:
        if elsewhere:
            check.end(CheckState.UNKNOWN, f"it leads to {elsewhere}, and there is nothing to hold it against")
            return
        check.end(CheckState.OK, f"status {first.status}; there is nothing to hold it against")
        return
    if elsewhere and leads_to(true, origin.host) != elsewhere:
        check.end(CheckState.BAD, f"it leads to {elsewhere}, over TLS it does not", injected=True, proof="redirect")
        return
    same = true.status == true_again.status == 200 and true.body == true_again.body
    strange = first.status == 200 and first.body != true.body
    strange = strange and again is not None and again.status == 200 and again.body != true.body
    if same and strange:
        proof = "inserted" if is_inserted(first.body, true.body) else "content"
        check.end(CheckState.BAD, "the page is another than the one over TLS", injected=True, proof=proof)
        return
    check.end(CheckState.OK, f"status {first.status}; nothing that speaks against it")
