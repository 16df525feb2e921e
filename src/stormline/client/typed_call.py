"""What a generated client says of one operation, and how arguments become a request and an answer a value. No I/O."""

import base64
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec

from stormline.core import errors
from stormline.core.values import Secret

T = TypeVar("T")
EVENTS: Final = "text/event-stream"
_UNSAFE_FIELD: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class File:
    """A file in a multipart body.

    Attributes:
        content: its bytes, or an open file; only bytes can be sent again after a failure.
        name: as the server sees it.
        media: its content type.
    """

    __slots__ = ("content", "media", "name")

    def __init__(
        self, content: bytes | IO[bytes], *, name: str = "file", media: str = "application/octet-stream"
    ) -> None:
        self.content = content
        self.name = name
        self.media = media

    def __repr__(self) -> str:
        """Name the file; not what is in it."""
        return f"File(name={self.name!r}, media={self.media!r})"


@dataclass(frozen=True, slots=True)
class Param:
    """Where an argument goes (`path`, `query`, `header`, `cookie`) and in which style of OpenAPI, or as `json`."""

    name: str
    where: str
    style: str = ""
    explode: bool = False


@dataclass(frozen=True)
class Answer:
    """What comes back under a status (`200`, `4XX`, `default`): its content type, empty for no body, and its type."""

    status: str
    media: str = ""
    model: Any = None
    raised: type[errors.ApiError] = errors.ApiError

    @functools.cached_property
    def decoder(self) -> "msgspec.json.Decoder[Any]":
        """Reads the body where it is JSON."""
        return msgspec.json.Decoder(self.model)


@dataclass(frozen=True, kw_only=True)  # no slots: a subscripted class marks what it makes
class Operation(Generic[T]):
    """One operation, answered with a `T`.

    Attributes:
        name: as the document has it.
        method: of HTTP.
        path: with `{name}` where a path parameter goes.
        params: in the order in which values are given.
        body: content type of the request's body, empty for none.
        body_required: None is a value of the body, not its absence.
        answers: what may come back.
        security: names of credentials, in groups of which one is enough.
    """

    name: str
    method: str
    path: str
    params: tuple[Param, ...] = ()
    body: str = ""
    body_required: bool = False
    answers: tuple[Answer, ...] = ()
    security: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Credential:
    """How a caller shows who it is.

    Attributes:
        kind: `bearer`, `basic`, or where an API key goes: `header`, `query`, `cookie`.
        key: the key's name there.
        value: the token, key, or user name and password with a colon between; None where the caller has none.
    """

    kind: str
    key: str
    value: Secret | None


def credential(kind: str, key: str, value: str | tuple[str, str] | None) -> Credential:
    """Make a credential of what a constructor was given."""
    if isinstance(value, tuple):
        value = ":".join(value)
    plain = value.reveal() if isinstance(value, Secret) else value
    return Credential(kind, key, None if plain is None else Secret(plain))


# -- requests ---------------------------------------------------------------------------------------------------------
def prepare(
    operation: Operation[Any],
    values: tuple[Any, ...],
    body: Any,
    *,
    base_url: str,
    credentials: Mapping[str, Credential],
    deadline_s: float | None,
    business: str | None,
) -> dict[str, Any]:
    """Give the arguments of `httpx2.Client.request`. Values that are None or UNSET are left out.

    Raises:
        ConfigError: a value cannot stand where it belongs.
    """
    path, query, cookies = operation.path, [], []
    headers = {"Accept": ", ".join(dict.fromkeys(each.media for each in operation.answers if each.media)) or "*/*"}
    for param, value in zip(operation.params, values, strict=True):
        missing = value is None or value is msgspec.UNSET
        if missing and param.where != "path":
            continue
        if param.where == "path":
            value = None if missing else value
            path = path.replace("{" + param.name + "}", _in_path(param, value))
        elif param.where == "query":
            query += _pairs(param, value)
        elif param.where == "header":
            headers[param.name] = _simple(param, value, str)
        else:
            cookies += _pairs(param, value)
    for each in _chosen(operation, credentials):
        _show(each, headers, query, cookies)
    if cookies:
        headers["Cookie"] = "; ".join(cookies)
    for name, text in headers.items():
        if _UNSAFE_FIELD.search(text):
            raise errors.ConfigError(f"{operation.name}: {name}: a field has no control characters")
    extensions: dict[str, Any] = {}
    if deadline_s is not None:
        extensions["stormline.deadline_s"] = deadline_s
    if business is not None:
        extensions["stormline.business"] = business
    url = base_url.rstrip("/") + path + ("?" + "&".join(query) if query else "")
    sent = _content(operation, body, headers)
    return {"method": operation.method, "url": url, "headers": headers, "extensions": extensions, **sent}


def _chosen(operation: Operation[Any], credentials: Mapping[str, Credential]) -> list[Credential]:
    """Give the first group of credentials of which all are there; the server judges their absence."""
    for group in operation.security:
        held = [credentials[name] for name in group if name in credentials]
        if len(held) == len(group) and all(each.value is not None for each in held):
            return held
    return []


def _show(shown: Credential, headers: dict[str, str], query: list[str], cookies: list[str]) -> None:
    value = shown.value.reveal() if shown.value is not None else ""
    if shown.kind == "bearer":
        headers["Authorization"] = f"Bearer {value}"
    elif shown.kind == "basic":
        headers["Authorization"] = "Basic " + base64.b64encode(value.encode()).decode()
    elif shown.kind == "header":
        headers[shown.key] = value
    else:
        (query if shown.kind == "query" else cookies).append(f"{_quoted(shown.key)}={_quoted(value)}")


def _content(operation: Operation[Any], body: Any, headers: dict[str, str]) -> dict[str, Any]:
    """Give the body as httpx2 takes it."""
    media = operation.body
    if not media or body is msgspec.UNSET or (body is None and not operation.body_required):
        return {}
    if media == "multipart/form-data":
        return {"files": list(_parts(body))}
    headers["Content-Type"] = media
    if media == "application/x-www-form-urlencoded":
        pairs = [pair for name, value in _members(body) for pair in _form(name, value)]
        return {"content": "&".join(pairs).encode()}
    if isinstance(body, bytes) and not is_json(media):
        return {"content": body}
    if isinstance(body, str) and not is_json(media):
        return {"content": body.encode()}
    return {"content": msgspec.json.encode(body)}


def _members(body: Any) -> Iterable[tuple[str, Any]]:
    """Yield name and value of each member that is there."""
    if isinstance(body, msgspec.Struct):
        config = body.__struct_config__
        if config.tag_field is not None:
            yield config.tag_field, config.tag
        names = zip(body.__struct_fields__, body.__struct_encode_fields__, strict=True)
        pairs: Iterable[tuple[str, Any]] = ((json, getattr(body, name)) for name, json in names)
    else:
        pairs = body.items()
    for name, value in pairs:
        if value is not msgspec.UNSET and value is not None:
            yield name, value


def _form(name: str, value: Any) -> list[str]:
    plain = msgspec.to_builtins(value, str_keys=True)
    many = plain if isinstance(plain, list) else [plain]
    return [f"{_quoted(name)}={_quoted(_nested(each))}" for each in many]


def _nested(plain: Any) -> str:
    """Give a text; what has members is JSON."""
    return msgspec.json.encode(plain).decode() if isinstance(plain, list | dict) else _text(plain)


def _parts(body: Any) -> Iterable[tuple[str, Any]]:
    """Yield the parts of a multipart body."""
    for name, value in _members(body):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, File):
                yield name, (each.name, each.content, each.media)
            elif isinstance(each, bytes):
                yield name, (None, each, "application/octet-stream")
            else:
                plain = msgspec.to_builtins(each, str_keys=True)
                media = "application/json" if isinstance(plain, list | dict) else "text/plain; charset=utf-8"
                yield name, (None, _nested(plain).encode(), media)


# -- parameters -------------------------------------------------------------------------------------------------------
def _text(plain: Any) -> str:
    if isinstance(plain, bool):
        return "true" if plain else "false"
    return "" if plain is None else str(plain)


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _in_path(param: Param, value: Any) -> str:
    """Give a path parameter.

    Raises:
        ConfigError: it would make another path of it.
    """
    prefix = {"label": ".", "matrix": f";{_quoted(param.name)}="}.get(param.style, "")
    shown = prefix + _simple(param, value, _quoted)
    if shown in {"", ".", ".."}:
        raise errors.ConfigError(f"{param.name}: {shown!r} cannot be part of a path")
    return shown


def _simple(param: Param, value: Any, coded: Any) -> str:
    plain = msgspec.to_builtins(value, str_keys=True)
    if param.style == "json":
        shown: str = coded(msgspec.json.encode(plain).decode())
        return shown
    if isinstance(plain, dict):
        join = "=" if param.explode else ","
        return ",".join(f"{coded(key)}{join}{coded(_text(each))}" for key, each in plain.items())
    if isinstance(plain, list):
        return ",".join(coded(_text(each)) for each in plain)
    shown = coded(_text(plain))
    return shown


def _pairs(param: Param, value: Any) -> list[str]:
    """Give the `name=value` pairs of a query or cookie parameter."""
    plain = msgspec.to_builtins(value, str_keys=True)
    name = _quoted(param.name)
    if param.style == "json":
        return [f"{name}={_quoted(msgspec.json.encode(plain).decode())}"]
    if isinstance(plain, dict):
        if param.style == "deepObject":
            return [f"{name}%5B{_quoted(key)}%5D={_quoted(_nested(each))}" for key, each in plain.items()]
        if param.explode:
            return [f"{_quoted(key)}={_quoted(_nested(each))}" for key, each in plain.items()]
        return [f"{name}=" + ",".join(f"{_quoted(key)},{_quoted(_nested(each))}" for key, each in plain.items())]
    if isinstance(plain, list):
        if param.explode:
            return [f"{name}={_quoted(_nested(each))}" for each in plain]
        join = {"spaceDelimited": "%20", "pipeDelimited": "%7C"}.get(param.style, ",")
        return [f"{name}=" + join.join(_quoted(_nested(each)) for each in plain)]
    return [f"{name}={_quoted(_text(plain))}"]


# -- answers ----------------------------------------------------------------------------------------------------------
def is_json(media: str) -> bool:
    """Whether a content type is JSON's, or of a format on top of it."""
    plain = media.partition(";")[0].strip().lower()
    return plain in {"application/json", "text/json"} or plain.endswith("+json")


def judge(operation: Operation[T], response: Any) -> T:
    """Give the value of an answer that was read whole.

    Raises:
        ApiError: its status stands for an error; of the class that the document's model has.
        UnexpectedAnswer: its status, content type or body is not what the document says.
    """
    status, body = response.status_code, response.content
    told = {"status": status, "body": body, "headers": {k.lower(): v for k, v in response.headers.items()}}
    media = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    known = _under(operation, status)
    failed = status >= 400
    fitting = next((each for each in known if _fits(each.media, media, body)), None)
    if failed and (fitting is None or not fitting.media):
        raise errors.ApiError(f"{operation.name}: answered with status {status}", **told)
    if fitting is None:
        what = f"content type {media[:100]!r}" if known else f"status {status}"
        raise errors.UnexpectedAnswer(f"{operation.name}: {what} is not in the document", **told)
    try:
        value = _value(fitting, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        message = f"{operation.name}: status {status}: {error}"
        raise errors.UnexpectedAnswer(message, **told) from None
    if failed:
        raise fitting.raised(f"{operation.name}: answered with status {status}", error=value, **told)
    result: T = value
    return result


def _under(operation: Operation[Any], status: int) -> list[Answer]:
    """Give what the document has for a status: by itself, by its class, or for errors by default."""
    for key in (str(status), f"{status // 100}XX", "default" if status >= 400 else ""):
        if known := [each for each in operation.answers if each.status == key]:
            return known
    return []


def _fits(said: str, media: str, body: bytes) -> bool:
    """Whether an answer of this content type is the one meant."""
    if not said:
        return True
    if not body and not media:
        return False
    plain = said.partition(";")[0].strip().lower()
    if plain == media or plain == "*/*" or (is_json(plain) and is_json(media)):
        return True
    return plain.endswith("/*") and media.startswith(plain[:-1])


def _value(answer: Answer, body: bytes) -> Any:
    if not answer.media:
        return None
    if is_json(answer.media) or (answer.media == "*/*" and answer.model not in {str, bytes}):
        return answer.decoder.decode(body)
    return body.decode() if answer.model is str else body
