"""What kind of request it is, from what its caller says: chooses the time-outs (`policy.timeouts`).

The caller may say it outright, by request extensions (`client.get(url, extensions={"stormline.pattern": "stream"})`):

| extension | type | meaning |
| --- | --- | --- |
| `stormline.pattern` | str | `call`, `long-poll`, `stream`, `upload` or `download` |
| `stormline.hold_s` | seconds | how long the server of a long poll may hold it; alone it makes the request one |
| `stormline.answer_bytes` | bytes | expected size of the answer; a large one makes the request a download |
| `stormline.server_cost_s` | seconds | how long the server works on it |
| `stormline.wait_for_network` | seconds or True | how long it may wait where there is no network |
| `stormline.priority` | str or int | `key`, `normal`, `background`, or an urgency of RFC 9218, 0 (first) to 7 |

Else the request itself tells: it accepts an event stream before anything else; its body is large or of unknown length.
What the request did not tell the head of its answer may.
"""

import functools
from collections.abc import AsyncIterable, Mapping
from typing import Any, Final

from stormline.core import errors, limits
from stormline.outbound.messages import Headers
from stormline.policy import shape
from stormline.policy.admission import BACKGROUND, NORMAL, URGENCIES
from stormline.policy.shape import Pattern, RequestShape

_PATTERNS: Final = {pattern.value: pattern for pattern in Pattern}
_STREAM_TYPES: Final = frozenset({b"text/event-stream", b"multipart/x-mixed-replace"})
_EXTENSIONS: Final = frozenset(
    {"stormline.pattern", "stormline.hold_s", "stormline.answer_bytes", "stormline.server_cost_s"}
)
_path_class: Final = functools.lru_cache(limits.PATH_CLASSES_CACHED)(shape.path_class)
"""An app asks for few paths, over and over."""


def request_shape(
    *,
    method: str,
    host: str,
    target: str,
    headers: Headers,
    body: bytes | AsyncIterable[bytes] | None,
    extensions: Mapping[str, Any],
) -> RequestShape:
    """Give the shape of a request.

    Args:
        method: as it is sent.
        host: of the origin.
        target: path, with or without its query.
        headers: of the request.
        body: all of it, where it comes from, or None.
        extensions: of the request; only those above are read.

    Raises:
        LocalProtocolError: an extension has a wrong type or value; the message names it and what is expected.
    """
    size = len(target)
    accept = length = b""
    for name, value in headers:
        name_bytes = len(name)
        size += name_bytes + len(value) + 4
        if name_bytes == 6:
            if not accept and name.lower() == b"accept":
                accept = value
        elif name_bytes == 14 and name.lower() == b"content-length":
            length = value
    body_bytes: int | None = 0
    if body is not None:
        body_bytes = len(body) if isinstance(body, bytes) else content_length(length)
        size += body_bytes or 0
    pattern = Pattern.CALL
    if b"event-stream" in accept.lower() and _media_type(accept.split(b",", 1)[0]) == b"text/event-stream":
        pattern = Pattern.STREAM
    elif body_bytes is None or body_bytes >= limits.UPLOAD_BYTES_MIN:
        pattern = Pattern.UPLOAD
    path_class = _path_class(method, target.split("?", 1)[0][: limits.RECORD_PATH_CHARS_MAX])
    if _EXTENSIONS.isdisjoint(extensions):
        return RequestShape(host=host, path_class=path_class, pattern=pattern, request_bytes=size)
    return _told(extensions, RequestShape(host=host, path_class=path_class, pattern=pattern, request_bytes=size))


def answer_pattern(pattern: Pattern, headers: Headers) -> Pattern:
    """Give the pattern of a call once the head of its answer is there.

    Args:
        pattern: the request's.
        headers: of the answer.
    """
    if pattern is Pattern.STREAM:
        return pattern
    for name, value in headers:
        name_bytes = len(name)
        if name_bytes == 12:
            if name.lower() == b"content-type" and _media_type(value) in _STREAM_TYPES:
                return Pattern.STREAM
        elif name_bytes == 14 and name.lower() == b"content-length":
            size = content_length(value)
            if size is not None and size >= limits.DOWNLOAD_BYTES_MIN:
                pattern = Pattern.DOWNLOAD
    return pattern


def _media_type(value: bytes) -> bytes:
    return value.split(b";", 1)[0].strip().lower()


def content_length(value: bytes) -> int | None:
    """Read a Content-Length, None where there is none or it cannot be read."""
    value = value.strip()
    return int(value) if len(value) <= 18 and value.isdigit() else None


def _told(extensions: Mapping[str, Any], found: RequestShape) -> RequestShape:
    """Give the shape with what the extensions say."""
    hold_s = _number(extensions, "stormline.hold_s", "seconds", limits.CALL_DEADLINE_MAX_S)
    answer_bytes = _number(extensions, "stormline.answer_bytes", "bytes", limits.ANSWER_BYTES_TOLD_MAX)
    server_cost_s = _number(extensions, "stormline.server_cost_s", "seconds", limits.SERVER_COST_S_MAX)
    pattern = found.pattern
    if extensions.get("stormline.pattern") is not None:
        pattern = _pattern(extensions["stormline.pattern"])
        if hold_s is not None and pattern is not Pattern.LONG_POLL:
            raise errors.LocalProtocolError(
                f"stormline.hold_s={hold_s!r} with stormline.pattern={pattern.value!r}: only a long poll is held"
            )
    elif hold_s is not None:
        pattern = Pattern.LONG_POLL
    elif pattern is Pattern.CALL and answer_bytes is not None and answer_bytes >= limits.DOWNLOAD_BYTES_MIN:
        pattern = Pattern.DOWNLOAD
    return RequestShape(
        host=found.host,
        path_class=found.path_class,
        pattern=pattern,
        request_bytes=found.request_bytes,
        answer_bytes=None if answer_bytes is None else int(answer_bytes),
        server_cost_s=server_cost_s,
        hold_s=hold_s,
    )


def urgency(value: object) -> int:
    """Give the urgency that a priority stands for: 0, the most urgent, to 7 (RFC 9218 section 4.1); None: as usual.

    Raises:
        LocalProtocolError: the extension has a wrong value; the message names it and what is expected.
    """
    if value is None:
        return NORMAL
    known = URGENCIES.get(value) if isinstance(value, str) else None
    if known is not None:
        return known
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= BACKGROUND:
        raise errors.LocalProtocolError(
            f"stormline.priority={value!r}: expected one of {', '.join(URGENCIES)}, or a number from 0 to {BACKGROUND}"
        )
    return value


def wait_for_network_s(extensions: Mapping[str, Any]) -> float:
    """Give how long a request waits where there is no network; 0 where it does not.

    Raises:
        LocalProtocolError: the extension has a wrong value.
    """
    value = extensions.get("stormline.wait_for_network")
    if value is None or value is False:
        return 0.0
    if value is True:
        return limits.PARK_S
    return _number(extensions, "stormline.wait_for_network", "seconds", limits.CALL_DEADLINE_MAX_S) or 0.0


def _pattern(value: object) -> Pattern:
    pattern = _PATTERNS.get(value) if isinstance(value, str) else None
    if pattern is None:
        raise errors.LocalProtocolError(f"stormline.pattern={value!r}: expected one of {', '.join(_PATTERNS)}")
    return pattern


def _number(extensions: Mapping[str, Any], name: str, unit: str, most: float) -> float | None:
    """Read one extension: None where it is absent or None."""
    value = extensions.get(name)
    if value is None:
        return None
    whole = unit == "bytes"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 <= value <= most:
        raise errors.LocalProtocolError(
            f"{name}={value!r}: expected {'whole ' if whole else ''}{unit} from 0 to {most:.0f}"
        )
    return value
