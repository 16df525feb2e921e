"""Paths made into operations: arguments, bodies, answers, and who may call them."""

import re
from typing import Any, Final
from urllib.parse import quote, urlsplit

from stormline.codegen import document as doc
from stormline.codegen.document import Document, inside, list_of, object_of, text_of
from stormline.codegen.model import ANY, NONE, Answer, Api, Body, Operation, Parameter, Scheme, Type
from stormline.codegen.names import NEEDED, Names, class_name, member_name
from stormline.codegen.schemas import Schemas
from stormline.codegen.tags import MULTIPART
from stormline.core import limits_codegen as limits
from stormline.core.errors import DocumentError

_METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_STYLES: Final = {
    "path": ("simple", "label", "matrix"),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
_OURS: Final = frozenset({"accept", "content-type", "authorization"})
"""Header parameters that a document may not describe (OpenAPI 3.1, parameter object)."""
_FORM: Final = "application/x-www-form-urlencoded"
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MEDIA: Final = re.compile(r"[\w.+*-]+/[\w.+*-]+( *;[ -~]*)?", re.ASCII)
_STATUS: Final = re.compile(r"[1-5][0-9][0-9]|[1-5]XX|default")
_TEXT: Final = Type(text="str", kinds=frozenset({"str"}), base="str")
_BYTES: Final = Type(text="bytes", kinds=frozenset({"str"}), base="bytes")


def read(document: Document) -> Api:
    """Give all that a document says of its API.

    Raises:
        DocumentError: it is malformed, too large, or refers to what is not in it.
    """
    reader = _Reader(document)
    operations = reader.operations()
    reader.schemas.finish()
    info = object_of(document.root, "info", "#")
    return Api(
        title=text_of(info, "title") or "API",
        version=text_of(info, "version"),
        doc=text_of(info, "description"),
        server=_server(document.root),
        models=tuple(reader.schemas.models.values()),
        aliases=tuple(reader.schemas.aliases),
        operations=tuple(operations),
        schemes=tuple(reader.schemes),
    )


class _Reader:
    """Reads the operations of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.schemas = Schemas(document)
        self.schemes = self._schemes()
        self._scopes: dict[str, Names] = {}
        self._default_security = list_of(document.root, "security", "#")

    def operations(self) -> list[Operation]:
        """Give all operations in the order of the document."""
        found = []
        for path, item in object_of(self._document.root, "paths", "#").items():
            if not path.startswith("/"):
                if path.startswith("x-"):
                    continue
                raise DocumentError(inside("#/paths", path), "a path begins with /")
            node, at = self._document.follow(item, inside("#/paths", path))
            for method in _METHODS:
                if isinstance(node.get(method), dict):
                    found.append((path, method, node, at))
                elif method in node:
                    raise DocumentError(inside(at, method), f"expected an object, got {doc.kind_of(node[method])}")
        if len(found) > limits.CODEGEN_OPERATIONS_MAX:
            raise DocumentError("#/paths", f"a document has at most {limits.CODEGEN_OPERATIONS_MAX} operations")
        grouped = len(found) >= limits.CODEGEN_GROUPED_FROM
        return [self._operation(path, method, item, at, grouped=grouped) for path, method, item, at in found]

    def _operation(self, path: str, method: str, item: dict[str, Any], at: str, *, grouped: bool) -> Operation:
        node, here = item[method], inside(at, method)
        said = text_of(node, "operationId") or f"{method} {path}"
        tags = [tag for tag in list_of(node, "tags", here) if isinstance(tag, str) and tag.strip()]
        group = member_name(tags[0]) if grouped and tags else ""
        scope = self._scopes.setdefault(group, Names(NEEDED | {"aclose", "close"}))
        hint = class_name(said)
        parameters = self._parameters(item, at, node, here, hint)
        self._check_path(path, parameters, here)
        texts = [text_of(node, "summary"), text_of(node, "description")]
        if node.get("deprecated") is True:
            texts.append("Deprecated.")
        return Operation(
            name=scope.give(member_name(said)),
            group=group,
            method=method.upper(),
            path=quote(path, safe="/{}:@!$&'()*+,;=-._~%"),
            doc="\n\n".join(text for text in dict.fromkeys(texts) if text) or f"Call {method.upper()} {path}.",
            parameters=parameters,
            body=self._body(node["requestBody"], inside(here, "requestBody"), hint)
            if node.get("requestBody")
            else None,
            answers=self._answers(object_of(node, "responses", here), inside(here, "responses"), hint),
            security=self._security(node, here),
        )

    # -- arguments ----------------------------------------------------------------------------------------------------
    def _parameters(
        self, item: dict[str, Any], at: str, node: dict[str, Any], here: str, hint: str
    ) -> tuple[Parameter, ...]:  # fmt: skip
        found: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}
        for owner, owner_at in ((item, at), (node, here)):
            for i, each in enumerate(list_of(owner, "parameters", owner_at)):
                said, where = self._document.follow(each, inside(owner_at, "parameters", i))
                place, name = text_of(said, "in"), text_of(said, "name")
                if place not in _STYLES or not name:
                    raise DocumentError(where, "a parameter has a name and is in path, query, header or cookie")
                if place == "header" and not _TOKEN.fullmatch(name):
                    raise DocumentError(inside(where, "name"), "no name of a header field")
                if not (place == "header" and name.lower() in _OURS):
                    found[place, name] = (said, where)
        scope = Names(NEEDED | {"body", "deadline_s", "business"})
        made = [self._parameter(said, where, scope, hint) for said, where in found.values()]
        return tuple(sorted(made, key=lambda each: not each.required))

    def _parameter(self, said: dict[str, Any], at: str, scope: Names, hint: str) -> Parameter:
        place, name = said["in"], said["name"]
        python = scope.give(member_name(name))
        style = text_of(said, "style") or _STYLES[place][0]
        if style not in _STYLES[place]:
            raise DocumentError(inside(at, "style"), f"none of a {place} parameter: {style[:60]!r}")
        explode = said.get("explode", style == "form") is True
        schema, where = said.get("schema", {}), inside(at, "schema")
        if content := object_of(said, "content", at):
            media, holder = next(iter(content.items()))
            schema = holder.get("schema", {}) if isinstance(holder, dict) else {}
            style, where = "json", inside(at, "content", media, "schema")
        made = self.schemas.type_of(schema, where, f"{hint}{class_name(name)}")
        text = text_of(said, "description") or self.schemas.doc_of(schema, where)
        if said.get("deprecated") is True:
            text = f"{text} Deprecated."
        return Parameter(
            name=python, json=name, where=place, style=style, explode=explode,
            required=place == "path" or said.get("required") is True, type=made, doc=text,
        )  # fmt: skip

    def _check_path(self, path: str, parameters: tuple[Parameter, ...], at: str) -> None:
        """Hold the template to the parameters.

        Raises:
            DocumentError: one of them has what the other has not.
        """
        named = re.findall(r"\{([^{}]*)\}", path)
        given = {each.json for each in parameters if each.where == "path"}
        if set(named) != given or len(named) != path.count("{") or len(named) != path.count("}"):
            odd = sorted(set(named) ^ given)
            raise DocumentError(at, f"the path and its parameters differ: {', '.join(odd)[:200] or 'braces'}")
        for name in named:
            if quote(name, safe=":@!$&'()*+,;=-._~%") != name:
                raise DocumentError(at, f"no name of a path parameter: {name[:60]!r}")

    def _body(self, said: Any, at: str, hint: str) -> Body | None:
        node, at = self._document.follow(said, at)
        content = object_of(node, "content", at)
        if not content:
            return None
        media = min(content, key=_preference)
        _check_media(media, inside(at, "content"))
        holder = object_of(content, media, inside(at, "content"))
        where = inside(at, "content", media, "schema")
        files = media.partition(";")[0].strip() == MULTIPART
        if _is_json(media) or files or media == _FORM:
            made = self.schemas.type_of(holder.get("schema", {}), where, f"{hint}Body", files=files)
        else:
            made = _TEXT if media.startswith("text/") else _BYTES
        if files or media == _FORM:
            made = made if made.kinds <= {"struct", "map"} else Type(text="dict[str, Any]", kinds=frozenset({"map"}))
        return Body(
            media=MULTIPART if files else media, type=made, required=node.get("required") is True,
            doc=text_of(node, "description"),
        )  # fmt: skip

    # -- answers ------------------------------------------------------------------------------------------------------
    def _answers(self, said: dict[str, Any], at: str, hint: str) -> tuple[Answer, ...]:
        answers: list[Answer] = []
        for status, each in said.items():
            key = status.upper() if status != "default" else status
            if status.startswith("x-"):
                continue
            if not _STATUS.fullmatch(key):
                raise DocumentError(inside(at, status), "no status: expected 200, 2XX or default")
            node, where = self._document.follow(each, inside(at, status))
            content = object_of(node, "content", where)
            if not content or status in {"204", "205", "304"}:
                answers.append(Answer(status=key, media="", type=NONE))
            for media, holder in content.items() if status not in {"204", "205", "304"} else ():
                _check_media(media, inside(where, "content"))
                schema = holder.get("schema") if isinstance(holder, dict) else None
                schema_at = inside(where, "content", media, "schema")
                suffix = "Answer" if key.startswith("2") else class_name(key).lstrip("T")
                answers.append(self._answer(key, media, schema, schema_at, f"{hint}{suffix}"))
        if not any(each.status[0] in "23" for each in answers):
            default = [each for each in answers if each.status == "default"]
            well = [Answer(status="2XX", media=each.media, type=each.type) for each in default]
            answers += well or [Answer(status="2XX", media="", type=NONE)]
        return tuple(answers)

    def _answer(self, status: str, media: str, schema: Any, at: str, hint: str) -> Answer:
        if _is_json(media) or (media == "*/*" and schema):
            made = ANY if schema is None else self.schemas.type_of(schema, at, hint)
        else:
            made = _TEXT if media.startswith("text/") else _BYTES
        return Answer(status=status, media=media, type=made)

    # -- who may call -------------------------------------------------------------------------------------------------
    def _schemes(self) -> list[Scheme]:
        at = "#/components"
        components = object_of(self._document.root, "components", "#")
        scope = Names(NEEDED | {"base_url", "client", "config", "owned"})
        schemes = []
        for name, each in object_of(components, "securitySchemes", at).items():
            said, where = self._document.follow(each, inside(at, "securitySchemes", name))
            kind, key = text_of(said, "type"), ""
            if kind == "apiKey":
                kind, key = text_of(said, "in"), text_of(said, "name")
                if kind not in {"header", "query", "cookie"} or not key:
                    raise DocumentError(where, "an API key has a name and is in header, query or cookie")
                if kind == "header" and not _TOKEN.fullmatch(key):
                    raise DocumentError(inside(where, "name"), "no name of a header field")
            elif kind == "http" and text_of(said, "scheme").lower() == "basic":
                kind = "basic"
            elif kind in {"http", "oauth2", "openIdConnect"}:
                kind = "bearer"
            else:
                continue  # mutualTLS: an affair of the transport
            schemes.append(
                Scheme(
                    name=scope.give(member_name(name)), json=name, kind=kind, key=key, doc=text_of(said, "description")
                )
            )
        return schemes

    def _security(self, node: dict[str, Any], at: str) -> tuple[tuple[str, ...], ...]:
        said = list_of(node, "security", at) if "security" in node else self._default_security
        known = {each.json for each in self.schemes}
        groups = (tuple(each) for each in said if isinstance(each, dict) and each)
        return tuple(group for group in groups if known.issuperset(group))


def _is_json(media: str) -> bool:
    plain = media.partition(";")[0].strip().lower()
    return plain in {"application/json", "text/json"} or plain.endswith("+json")


def _preference(media: str) -> int:
    if _is_json(media):
        return 0
    return [MULTIPART, _FORM].index(media) + 1 if media in {MULTIPART, _FORM} else 3


def _check_media(media: str, at: str) -> None:
    if not _MEDIA.fullmatch(media):
        raise DocumentError(inside(at, media[:60]), "no content type")


def _server(root: dict[str, Any]) -> str:
    """Give the first server that is a whole URL, with the defaults of its variables; empty where there is none."""
    for i, each in enumerate(list_of(root, "servers", "#")):
        if not isinstance(each, dict):
            raise DocumentError(f"#/servers/{i}", "expected an object")
        url = text_of(each, "url")
        for name, variable in object_of(each, "variables", f"#/servers/{i}").items():
            default = text_of(variable, "default") if isinstance(variable, dict) else ""
            url = url.replace("{" + name + "}", default)
        try:
            parts = urlsplit(url)
        except ValueError:
            continue
        if parts.scheme in {"http", "https"} and parts.hostname and not parts.query and not parts.fragment:
            return url.rstrip("/")
    return ""
