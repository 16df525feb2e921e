"""A client as Python text: the same document gives the same text, formatted, without help of a formatter."""

import ast
from collections.abc import Iterable
from typing import Final

from stormline.codegen import text
from stormline.codegen.model import Alias, Answer, Api, Field, Model, Operation, Parameter, Type
from stormline.codegen.names import NEEDED, Names, class_name, member_name

_MODULES: Final = ("datetime", "decimal", "uuid")
_TYPING: Final = ("Annotated", "Any", "Final", "Literal", "TypeAlias")
_CREDENTIALS: Final = {"basic": "tuple[str, str]"}
_DEADLINE: Final = "seconds until the head of the answer; None for the client's own."
_BUSINESS: Final = "tag for statistics."


class Writer:
    """Writes one client.

    Args:
        api: what to write.
        command: how it was made, for the head of the file.
    """

    def __init__(self, api: Api, command: str) -> None:
        self._api = api
        self._command = command
        taken = NEEDED | {each.name for each in api.models} | {each.name for each in api.aliases}
        self._names = Names(frozenset(taken))
        self._constants = Names(frozenset())
        self._raised: dict[str, str] = {}
        self._exceptions: list[str] = []
        self._groups: dict[str, tuple[str, str]] = {}
        for each in api.operations:
            if each.group and each.group not in self._groups:
                stem = class_name(each.group)
                pair = self._names.give(f"{stem}Calls"), self._names.give(f"{stem}SyncCalls")
                self._groups[each.group] = pair

    def write(self) -> str:
        """Give the module."""
        models = [_model(each) for each in self._api.models]
        aliases = [_alias(each) for each in self._api.aliases]
        constants = {id(each): self._constants.give(_constant_name(each)) for each in self._api.operations}
        operations = [self._constant(each, constants[id(each)]) for each in self._api.operations]
        classes = []
        for kind in (True, False):
            for group, pair in self._groups.items():
                classes.append(self._group(group, pair, constants, asynchronous=kind))
            classes.append(self._client(constants, asynchronous=kind))
        body = [*models, *self._exceptions]
        blocks = [*body, *(["\n".join(aliases)] if aliases else []), "".join(operations), *classes]
        code = "\n\n".join(block for block in blocks if block)
        head = self._head(code)
        return head + code

    def _head(self, code: str) -> str:
        used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
        lines = [f"import {name}" for name in _MODULES if name in used]
        if typing := [name for name in _TYPING if name in used]:
            lines.append(f"from typing import {', '.join(typing)}")
        lines += ["", *(["import msgspec"] if "msgspec" in used else []), "import stormline"]
        if unset := [name for name in ("UNSET", "UnsetType") if name in used]:
            lines.append(f"from msgspec import {', '.join(unset)}")
        lines.append("from stormline.client import typed")
        title = text.line_of(
            f"{self._api.title}, version {self._api.version}" if self._api.version else self._api.title
        )
        doc = text.docstring([f"Client of {title}.", self._api.doc], "")
        about = f"# Made by `{text.line_of(self._command)}`; changes are lost when it is made again.\n"
        return f"{about}{doc}\nfrom __future__ import annotations\n\n" + "\n".join(lines).lstrip("\n") + "\n\n\n"

    # -- operations ---------------------------------------------------------------------------------------------------
    def _result(self, operation: Operation) -> str:
        """Give the type of what a method returns."""
        well = [each for each in operation.answers if each.status[0] in "23"]
        parts = [part for each in well for part in text.split(each.type.text, "|")]
        unique = [part for part in dict.fromkeys(parts) if part != "None"]
        if "Any" in unique:
            return "Any"
        return " | ".join([*unique, "None"] if "None" in parts or not unique else unique)

    def _constant(self, operation: Operation, name: str) -> str:
        params = [_param(each) for each in operation.parameters]
        answers = [self._answer(each) for each in operation.answers]
        parts = [
            f"name={text.literal(operation.name)}",
            f"method={text.literal(operation.method)}",
            f"path={text.literal(operation.path)}",
        ]
        if params:
            parts.append(f"params={_tuple(params)}")
        if operation.body is not None:
            parts.append(f"body={text.literal(operation.body.media)}")
            parts += ["body_required=True"] if operation.body.required else []
        parts.append(f"answers={_tuple(answers)}")
        if operation.security:
            groups = (_tuple(text.literal(name) for name in group) for group in operation.security)
            parts.append(f"security={_tuple(groups)}")
        lines = [text.fit(part, "    ", tail=1) + "," for part in parts]
        result = self._result(operation)
        opened = f"{name}: Final = typed.Operation[{result}]("
        if len(opened) > text.WIDTH:
            opened = f"{name}: Final[typed.Operation[Any]] = typed.Operation("
        return "\n".join([opened, *lines, ")", ""])

    def _answer(self, answer: Answer) -> str:
        if not answer.media:
            return f"typed.Answer({text.literal(answer.status)})"
        said = f"{text.literal(answer.status)}, {text.literal(answer.media)}, {answer.type.text}"
        if answer.status[0] in "123" or not answer.type.text.isidentifier() or answer.type.text == "Any":
            return f"typed.Answer({said})"
        if answer.type.text in {"str", "bytes", "int", "float", "bool", "None"}:
            return f"typed.Answer({said})"
        return f"typed.Answer({said}, {self._exception(answer.type.text)})"

    def _exception(self, model: str) -> str:
        """Give the class that is raised with a model, and write it at its first use."""
        if model not in self._raised:
            name = self._names.give(f"{model}Raised")
            self._raised[model] = name
            doc = f'    """An error answer that holds `{model}`."""'
            self._exceptions.append(f"class {name}(typed.ApiError):\n{doc}\n\n    error: {model}\n")
        return self._raised[model]

    def _method(self, operation: Operation, constant: str, *, asynchronous: bool) -> str:
        required = [each for each in operation.parameters if each.required]
        optional = [each for each in operation.parameters if not each.required]
        body = operation.body
        signature = ["self", *(f"{each.name}: {_bare(each.type)}" for each in required)]
        if body is not None and body.required:
            signature.append(f"body: {body.type.text}")
        signature.append("*")
        if body is not None and not body.required:
            signature.append(f"body: {body.type.or_none().text} = None")
        signature += [f"{each.name}: {_bare(each.type.or_none())} = None" for each in optional]
        signature += ["deadline_s: float | None = None", "business: str | None = None"]
        values = _tuple(each.name for each in operation.parameters)
        given = [constant, values, "body" if body else "None", "deadline_s=deadline_s", "business=business"]
        events = _streams(operation)
        if events:
            result, lead, verb = f"typed.{'Async' if asynchronous else ''}Events", "", "events"
        else:
            result, lead, verb = self._result(operation), "await " if asynchronous else "", "send"
        start = "async def" if lead else "def"
        head = text.fit(f"{start} {operation.name}({', '.join(signature)}) -> {result}:", "    ")
        call = text.fit(f"return {lead}self._sender.{verb}({', '.join(given)})", "        ")
        return "\n".join([head, self._method_doc(operation, events=events) + call, ""])

    def _method_doc(self, operation: Operation, *, events: bool) -> str:
        rows = [(each.name, _said(each.doc, each.json, each.name)) for each in operation.parameters if each.required]
        body = operation.body
        if body is not None:
            row = ("body", body.doc or f"sent as {body.media}.")
            rows.append(row)
        rows += [
            (each.name, _said(each.doc, each.json, each.name)) for each in operation.parameters if not each.required
        ]
        rows += [("deadline_s", _DEADLINE), ("business", _BUSINESS)]
        raised: dict[str, list[str]] = {}
        for each in operation.answers:
            if each.status[0] in "45d":
                name = self._raised.get(each.type.text, "typed.ApiError") if each.media else "typed.ApiError"
                raised.setdefault(name, []).append(
                    "other statuses" if each.status == "default" else f"status {each.status}"
                )
        errors = [(name, f"{', '.join(dict.fromkeys(statuses))}.") for name, statuses in raised.items()]
        first, _, rest = text.prose(operation.doc).partition("\n")
        parts = [first, rest.strip("\n"), text.section("Args", rows), text.section("Raises", errors)]
        if events:
            parts.insert(2, "The answer is a stream of events; it is asked for when the first is.")
        return text.docstring(parts, "        ")

    # -- classes ------------------------------------------------------------------------------------------------------
    def _group(self, group: str, pair: tuple[str, str], constants: dict[int, str], *, asynchronous: bool) -> str:
        name, base = (pair[0], "AsyncCalls") if asynchronous else (pair[1], "SyncCalls")
        methods = [
            self._method(each, constants[id(each)], asynchronous=asynchronous)
            for each in self._api.operations
            if each.group == group
        ]
        return f'class {name}(typed.{base}):\n    """Operations of `{group}`."""\n\n' + "\n".join(methods)

    def _client(self, constants: dict[int, str], *, asynchronous: bool) -> str:
        name, base, ours = (
            ("Client", "AsyncApi", "AsyncClient") if asynchronous else ("SyncClient", "SyncApi", "Client")
        )
        server = f" = {text.literal(self._api.server)}" if self._api.server else ""
        signature = ["self", f"base_url: str{server}", "*"]
        signature += [f"client: stormline.{ours} | None = None", "config: stormline.Config | None = None"]
        rows = [
            ("base_url", "what all paths begin with."),
            ("client", "whose transport is used, and which stays open; else one is made."),
            ("config", "settings of the one that is made."),
        ]
        held = []
        for each in self._api.schemes:
            signature.append(f"{each.name}: {_CREDENTIALS.get(each.kind, 'str')} | None = None")
            what = {"bearer": "a bearer token.", "basic": "user name and password."}.get(each.kind, "an API key.")
            rows.append((each.name, text.line_of(each.doc) or what))
            key = f"typed.credential({text.literal(each.kind)}, {text.literal(each.key)}, {each.name})"
            held.append(f"{text.literal(each.json)}: {key}")
        mode = "async with" if asynchronous else "with"
        end = "aclose" if asynchronous else "close"
        title = text.line_of(self._api.title)
        doc = text.docstring(
            [f"{title}; to be used with `{mode}`, or closed with `{end}`.", text.section("Args", rows)], "    "
        )
        given = f"owned=client is None, credentials={{{', '.join(held)}}}"
        opened = f"super().__init__(base_url, client or stormline.{ours}(config=config), {given})"
        lines = [
            f"class {name}(typed.{base}):",
            doc,
            text.fit(f"def __init__({', '.join(signature)}) -> None:", "    "),
            text.fit(opened, "        "),
        ]
        for group, pair in self._attributes():
            lines.append(f"        self.{group} = {pair[0 if asynchronous else 1]}(self._sender)")
        methods = [
            self._method(each, constants[id(each)], asynchronous=asynchronous)
            for each in self._api.operations
            if not each.group
        ]
        return "\n".join([*lines, "", *methods])

    def _attributes(self) -> Iterable[tuple[str, tuple[str, str]]]:
        """Give the groups by the name that they have on the client."""
        own = {each.name for each in self._api.operations if not each.group}
        scope = Names(NEEDED | own | {"aclose", "close"})
        return [(scope.give(group), pair) for group, pair in self._groups.items()]


# -- models -----------------------------------------------------------------------------------------------------------
def _model(model: Model) -> str:
    options = ["msgspec.Struct", "kw_only=True", "omit_defaults=True"]
    if model.tag_field:
        options += [f"tag_field={text.literal(model.tag_field)}", f"tag={text.literal(model.tag)}"]
    rows = [(each.name, each.doc) for each in model.fields if each.doc.strip()]
    tag = f"In JSON `{text.line_of(model.tag_field)}` is {model.tag!r}." if model.tag_field else ""
    doc = text.docstring([model.doc or f"{model.name}.", tag, text.section("Attributes", rows)], "    ")
    lines = [text.fit(f"class {model.name}({', '.join(options)}):"), doc]
    lines += [_field(each) for each in model.fields]
    return "\n".join(lines).rstrip("\n") + "\n"


def _field(field: Field) -> str:
    default = field.default
    mutable = default in {"[]", "{}"}
    if field.json != field.name or mutable:
        parts = [f"name={text.literal(field.json)}"] if field.json != field.name else []
        if mutable:
            parts.append(f"default_factory={'list' if default == '[]' else 'dict'}")
        elif default:
            parts.append(f"default={default}")
        default = f"msgspec.field({', '.join(parts)})"
    line = text.fit(f"{field.name}: {field.type.text}{f' = {default}' if default else ''}", "    ")
    return f"    # Not exact: {field.type.note}.\n{line}" if field.type.note else line


def _alias(alias: Alias) -> str:
    note = f"# Not exact: {alias.type.note}.\n" if alias.type.note else ""
    doc = text.docstring([alias.doc], "") if alias.doc.strip() else ""
    return f"{note}{text.fit(f'{alias.name}: TypeAlias = {alias.type.text}')}\n{doc}".rstrip("\n")


# -- parts ------------------------------------------------------------------------------------------------------------
def _constant_name(operation: Operation) -> str:
    return "_" + "_".join(part for part in (operation.group, operation.name) if part).upper().strip("_")


def _param(param: Parameter) -> str:
    parts = [text.literal(param.json), text.literal(param.where), text.literal(param.style)]
    return f"typed.Param({', '.join([*parts, 'explode=True'] if param.explode else parts)})"


def _bare(made: Type) -> str:
    """Give a type for an argument, without the bounds that only the server checks."""
    if not made.base or not made.text.startswith("Annotated["):
        return made.text
    return f"{made.base} | None" if "null" in made.kinds else made.base


def _tuple(items: Iterable[str]) -> str:
    shown = list(items)
    return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"


def _said(doc: str, json: str, name: str) -> str:
    return text.line_of(doc) or (
        f"`{text.line_of(json)}`." if member_name(json) != json or json != name else f"{name}."
    )


def _streams(operation: Operation) -> bool:
    """Whether the answer is a stream of events and nothing else."""
    well = [each for each in operation.answers if each.status[0] in "23"]
    return len(well) == 1 and well[0].media.partition(";")[0].strip().lower() == "text/event-stream"
