"""Which answers a shared cache may keep, and when it may give them again: RFC 9111, and `stale-if-error` of RFC 5861.

The cache stands before services that know who asks from fields the platform adds, so every request counts as one with
credentials: an answer is kept only where it says `public` or `s-maxage` (section 3.5; `must-revalidate`, which would
be allowed too, is not taken for a yes). How long it is fresh must be said, too: nothing is guessed from
`Last-Modified` (section 4.2.2).

Field lines are pairs of text with names in lower case.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from stormline.core import limits_api as limits
from stormline.policy.budget import http_date_s

Fields = tuple[tuple[str, str], ...]

_KEPT_STATUS: Final = frozenset({200, 203, 204, 300, 301, 308, 404, 405, 410, 414, 501})
"""Final and understood here; 206 is not, as parts are never kept."""
_CONNECTION: Final = frozenset({"content-length", "content-encoding", "content-range", "transfer-encoding"})
"""What a 304 cannot change of a kept answer (section 3.2)."""
_CONDITIONS: Final = frozenset({"if-none-match", "if-modified-since", "if-match", "if-unmodified-since", "if-range"})
_ERRORS: Final = frozenset({500, 502, 503, 504})
"""Answers that count as an error for `stale-if-error` (RFC 5861 section 4)."""


class Kept(NamedTuple):
    """What is known of a kept answer beside its body.

    Attributes:
        status: its status.
        headers: its fields.
        selecting: the fields of its request that Vary names, with their values.
        born_at: monotonic time at which its age was zero.
        fresh_s: age up to which it is fresh.
        error_s: how much longer it serves where the origin fails.
        asks: it must be validated before each use (`no-cache`).
    """

    status: int
    headers: Fields
    selecting: Fields
    born_at: float
    fresh_s: float
    error_s: float
    asks: bool

    def age_s(self, now: float) -> float:
        """Give its age."""
        return max(0.0, now - self.born_at)

    def fits(self, request: Fields) -> bool:
        """Say whether it answers a request to its URL, by Vary (section 4.1)."""
        return all(value(request, name) == held for name, held in self.selecting)


class Use(NamedTuple):
    """What a kept answer is good for now.

    Attributes:
        fresh: it may be given as it is.
        in_error: it may be given where the origin fails.
    """

    fresh: bool
    in_error: bool


def value(fields: Fields, name: str) -> str:
    """Give a field's value, of repeated lines joined by commas; empty where there is none."""
    return ", ".join(text.strip() for each, text in fields if each == name)


def directives(text: str) -> dict[str, str]:
    """Read `Cache-Control` (section 5.2): values by name, empty where there is none; the first of a name counts."""
    found: dict[str, str] = {}
    for part in _split(text):
        name, _, given = part.partition("=")
        if name := name.strip().lower():
            found.setdefault(name, given.strip().strip('"'))
    return found


def _split(text: str) -> Iterable[str]:
    """Split at commas outside of quotes."""
    part, quoted = "", False
    for each in text:
        if each == '"':
            quoted = not quoted
        if each == "," and not quoted:
            yield part
            part = ""
        else:
            part += each
    yield part


def _seconds(given: str | None) -> float | None:
    """Read delta-seconds (section 1.2.2); what cannot be read counts as none of them left."""
    if given is None:
        return None
    if not (given.isascii() and given.isdigit()):
        return 0.0
    return min(float(given[:12]), limits.CACHE_LIFE_MAX_S)


def may_use(method: str, request: Fields) -> bool:
    """Say whether a request may be answered from the cache, or its answer kept.

    Parts are asked of the origin, as are conditions on what is to be changed.
    """
    if method != "GET":
        return False
    return not any(name in ("range", "if-match", "if-unmodified-since", "if-range") for name, _ in request)


def keep(request: Fields, status: int, response: Fields, *, asked_at: float, now: float, wall_s: float) -> Kept | None:
    """Say whether, and how, the answer to a GET may be kept (section 3); None: it may not.

    Args:
        request: the request's fields.
        status: the answer's.
        response: the answer's fields.
        asked_at: monotonic time at which the request left.
        now: monotonic time at which the answer came.
        wall_s: that time by the wall clock, seconds since 1970.
    """
    said = directives(value(response, "cache-control"))
    asked = directives(value(request, "cache-control"))
    if status not in _KEPT_STATUS or "no-store" in said or "private" in said or "no-store" in asked:
        return None
    if not ("public" in said or "s-maxage" in said) or value(response, "set-cookie"):
        return None
    names = [name.strip().lower() for name in value(response, "vary").split(",") if name.strip()]
    if "*" in names:
        return None
    if value(response, "content-encoding") and "accept-encoding" not in names:
        names.append("accept-encoding")  # whoever coded it forgot to say so
    date_s = http_date_s(value(response, "date"))
    fresh_s = _lifetime_s(said, response, wall_s if date_s is None else date_s)
    validator = value(response, "etag") or value(response, "last-modified")
    asks = "no-cache" in said
    if (fresh_s <= 0.0 or asks) and not validator:
        return None
    # Section 4.2.3: what the answer says of its age, and what the clocks say.
    apparent_s = 0.0 if date_s is None else max(0.0, wall_s - date_s)
    age_s = max(apparent_s, (_seconds(value(response, "age") or None) or 0.0) + (now - asked_at))
    strict = asks or "must-revalidate" in said or "proxy-revalidate" in said or "s-maxage" in said
    error_s = 0.0 if strict else _seconds(said.get("stale-if-error")) or 0.0
    selecting = tuple((name, value(request, name)) for name in dict.fromkeys(names))
    return Kept(status, response, selecting, now - age_s, fresh_s, error_s, asks)


def _lifetime_s(said: dict[str, str], response: Fields, date_s: float) -> float:
    """Give the freshness lifetime (section 4.2.1) for a shared cache."""
    for name in ("s-maxage", "max-age"):
        if (given := _seconds(said.get(name))) is not None:
            return given
    expires = value(response, "expires")
    if not expires:
        return 0.0
    expires_s = http_date_s(expires)  # "0" and the like stand for the past
    return 0.0 if expires_s is None else min(max(0.0, expires_s - date_s), limits.CACHE_LIFE_MAX_S)


def use(kept: Kept, request: Fields, now: float) -> Use:
    """Say what a kept answer is good for (section 4), also by what the request says (section 5.2.1)."""
    asked = directives(value(request, "cache-control"))
    if not asked and "no-cache" in directives(value(request, "pragma")):
        asked = {"no-cache": ""}
    age_s = kept.age_s(now)
    left_s = kept.fresh_s - age_s
    fresh = not kept.asks and left_s > 0.0 and "no-cache" not in asked
    most = _seconds(asked.get("max-age"))
    if most is not None and age_s > most:
        fresh = False
    least = _seconds(asked.get("min-fresh"))
    if least is not None and left_s < least:
        fresh = False
    return Use(fresh, left_s > -kept.error_s and kept.error_s > 0.0)


def conditions(kept: Kept) -> Fields:
    """Give the fields that ask whether a kept answer still holds (section 4.3.1); none where it has no validator."""
    tag, modified = value(kept.headers, "etag"), value(kept.headers, "last-modified")
    found: list[tuple[str, str]] = []
    if tag:
        found.append(("if-none-match", tag))
    if modified:
        found.append(("if-modified-since", modified))
    return tuple(found)


def unconditional(request: Fields) -> Fields:
    """Give a request's fields without its own conditions: the cache asks for itself, and answers them."""
    return tuple(field for field in request if field[0] not in _CONDITIONS)


def freshened(
    kept: Kept, request: Fields, response: Fields, *, asked_at: float, now: float, wall_s: float
) -> Kept | None:
    """Take in a 304 (section 4.3.4): the kept answer with its fields; None where it may be kept no longer."""
    changed = {name for name, _ in response} - _CONNECTION
    # What is not said again is gone with its time: an Age or a Date from before would make it old at once.
    stays = tuple(field for field in kept.headers if field[0] not in changed and field[0] not in ("age", "date"))
    headers = (*stays, *(field for field in response if field[0] in changed))
    return keep(request, kept.status, headers, asked_at=asked_at, now=now, wall_s=wall_s)


def is_unchanged(kept: Kept, request: Fields) -> bool:
    """Say whether the request's own condition makes a kept answer a 304 (RFC 9110 section 13.2.2)."""
    if kept.status != 200:
        return False
    asked = value(request, "if-none-match")
    if asked:
        tag = _weak(value(kept.headers, "etag"))
        return asked.strip() == "*" or (bool(tag) and tag in (_weak(each.strip()) for each in asked.split(",")))
    since, modified = value(request, "if-modified-since"), value(kept.headers, "last-modified")
    if not since or not modified:
        return False
    since_s, modified_s = http_date_s(since), http_date_s(modified)
    return since_s is not None and modified_s is not None and modified_s <= since_s


def _weak(tag: str) -> str:
    return tag.removeprefix("W/")


def is_error(status: int) -> bool:
    """Say whether an answer counts as an error in whose place an older one may be given."""
    return status in _ERRORS


def invalidates(method: str, status: int) -> bool:
    """Say whether an answer makes what is kept for its URL worthless (section 4.4)."""
    return method not in ("GET", "HEAD", "OPTIONS", "TRACE", "QUERY") and 200 <= status < 400
