"""Schemas made into Python types: structs, aliases, and what stands where they are used."""

import dataclasses
import re
from collections import deque
from typing import Any, Final

from stormline.codegen import text
from stormline.codegen.document import Document, inside, list_of, text_of
from stormline.codegen.model import ANY, FREE, NONE, Alias, Field, Model, Type
from stormline.codegen.names import Names, class_name, member_name
from stormline.codegen.shapes import Node, Shape, Shapes
from stormline.codegen.tags import Tags, usable
from stormline.codegen.unions import literals, union
from stormline.core import limits_codegen as limits
from stormline.core.errors import DocumentError

FILE: Final = Type(text="typed.File", kinds=frozenset({"file"}), base="typed.File")
_FORMATS: Final = {
    "date-time": "datetime.datetime", "date": "datetime.date", "time": "datetime.time", "uuid": "uuid.UUID",
    "byte": "bytes", "decimal": "decimal.Decimal",
}  # fmt: skip
_INT_MAX: Final = 2**63 - 1


class Schemas:
    """Makes the types of one document; `models` and `aliases` are complete after `finish`."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._shapes = Shapes(document)
        self._tags = Tags(document, self._shapes)
        self.names = Names()
        self.models: dict[str, Model] = {}
        self.aliases: list[Alias] = []
        self._named: dict[str, Type] = {}
        self._open: set[str] = set()
        self._waiting: deque[tuple[Model, Shape, bool]] = deque()
        self._depth = 0
        components = document.root.get("components")
        schemas = components.get("schemas") if isinstance(components, dict) else None
        self._own_names = {
            inside("#/components/schemas", key): self.names.give(class_name(key))
            for key in (schemas if isinstance(schemas, dict) else ())
        }
        for at in self._own_names:
            self.type_of({"$ref": at}, at, "")

    def finish(self) -> None:
        """Make the members of all models met so far, and of those met in doing so."""
        while self._waiting:
            model, shape, files = self._waiting.popleft()
            scope = Names()
            for name, (node, at) in shape.properties.items():
                if name != model.tag_field:
                    model.fields.append(self._field(model, shape, scope.give(member_name(name)), name, node, at, files))

    def type_of(self, node: Any, at: str, hint: str, *, files: bool = False) -> Type:
        """Give the type of a schema.

        Args:
            node: the schema.
            at: its pointer.
            hint: name for a model that has none.
            files: binary texts in it are files, as in multipart bodies.

        Raises:
            DocumentError: it is malformed or too deep.
        """
        if isinstance(node, dict) and "$ref" in node:
            return self._reference(node, at)
        parts = list_of(node, "allOf", at) if isinstance(node, dict) else []
        if len(parts) == 1 and node.keys().isdisjoint({"properties", "oneOf", "anyOf", "required", "type"}):
            inner = self.type_of(parts[0], inside(at, "allOf", 0), hint, files=files)
            return inner.or_none() if node.get("nullable") is True else inner
        return self._typed(self._shapes.of(node, at), hint, files=files)

    def doc_of(self, node: Any, at: str) -> str:
        """Give what a schema, or the one it refers to, says of itself."""
        if isinstance(node, dict) and not text_of(node, "description") and "$ref" in node:
            node, at = self._document.follow(node, at)
        return text_of(node, "description") if isinstance(node, dict) else ""

    # -- named schemas ------------------------------------------------------------------------------------------------
    def _reference(self, node: dict[str, Any], at: str) -> Type:
        target, where = self._document.follow(node, at)
        if where in self._named:
            return self._named[where]
        if where in self._open:
            return dataclasses.replace(ANY, note="it contains itself")
        name = self._own_names.get(where) or self.names.give(class_name(where.rpartition("/")[2]))
        shape = self._shapes.of(target, where)
        if self._is_struct(shape) and where not in self._tags.children:
            model = self._model(shape, name, files=where in self._tags.files)
            self._named[where] = model.or_none() if shape.nullable else model
            return self._named[where]
        self._open.add(where)
        try:
            family = where in self._tags.children
            made = self._family(where, shape) if family else self._typed(shape, name, files=False)
        finally:
            self._open.discard(where)
        if made == NONE or (made.models and made.text in {name, f"{name} | None"}):
            self._named[where] = made
            return made
        self.aliases.append(Alias(name=name, type=made, doc=text_of(shape.words, "description")))
        self._named[where] = dataclasses.replace(made, text=name, note="")
        return self._named[where]

    def _family(self, where: str, shape: Shape) -> Type:
        """Give the type of a schema whose discriminator tells which of those extending it is meant."""
        types = [self.type_of({"$ref": child}, child, "") for child in self._tags.children[where]]
        made = union(types, self._tags)
        return made.or_none() if shape.nullable else made

    def _is_struct(self, shape: Shape) -> bool:
        """Whether it is an object with members of its own that Python can have."""
        if shape.kinds not in {(), ("object",)} or "enum" in shape.words or "const" in shape.words:
            return False
        if not (shape.properties or self._tags.of.get(shape.at)) or self._choices(shape):
            return False
        return all(usable(name) for name in shape.properties)

    def _model(self, shape: Shape, name: str, *, files: bool) -> Type:
        if len(self.models) >= limits.CODEGEN_MODELS_MAX:
            raise DocumentError(shape.at, f"a document has at most {limits.CODEGEN_MODELS_MAX} models")
        tag_field, tag = self._tags.of.get(shape.at) or ("", None)
        model = Model(name=name, doc=text_of(shape.words, "description"), tag_field=tag_field, tag=tag)
        if shape.words.get("additionalProperties") or shape.words.get("patternProperties"):
            model.doc += "\n\nFurther members are allowed; they are not kept."
        self.models[shape.at] = model
        self._waiting.append((model, shape, files))
        return Type(text=name, kinds=frozenset({"struct"}), models=(shape.at,))

    def _field(
        self, model: Model, shape: Shape, name: str, json: str, node: Any, at: str, files: bool
    ) -> Field:  # fmt: skip
        made = self.type_of(node, at, f"{model.name}{class_name(json)}", files=files)
        doc = self.doc_of(node, at)
        words = node if isinstance(node, dict) else {}
        required = json in shape.required
        if words.get("readOnly") is True:
            doc = f"{doc} Only in answers.".strip()
            required = required and not (shape.at in self._tags.asked or "/requestBody/" in shape.at)
        if words.get("writeOnly") is True:
            doc = f"{doc} Only in requests.".strip()
            required = required and not (shape.at in self._tags.answered or "/responses/" in shape.at)
        if words.get("deprecated") is True:
            doc = f"{doc} Deprecated.".strip()
        if required:
            return Field(name=name, json=json, type=made, default="", doc=doc)
        default = default_code(made, words["default"]) if "default" in words else ""
        if not default:
            default = "UNSET"
            made = dataclasses.replace(made, text=_or_unset(made.text))
        return Field(name=name, json=json, type=made, default=default, doc=doc)

    # -- types --------------------------------------------------------------------------------------------------------
    def _typed(self, shape: Shape, hint: str, *, files: bool) -> Type:
        if self._depth > limits.CODEGEN_DEPTH_MAX:
            raise DocumentError(shape.at[:1000], f"schemas are at most {limits.CODEGEN_DEPTH_MAX} deep")
        self._depth += 1
        try:
            made = self._plain(shape, hint, files=files)
        finally:
            self._depth -= 1
        return made.or_none() if shape.nullable else made

    def _plain(self, shape: Shape, hint: str, *, files: bool) -> Type:
        words = shape.words
        if "const" in words:
            return literals([words["const"]], shape.kinds)
        if isinstance(words.get("enum"), list):
            return literals(words["enum"], shape.kinds)
        if choices := self._choices(shape):
            return self._chosen(shape, choices, hint, files=files)
        if self._is_struct(shape):
            if shape.at in self._named:
                return self._named[shape.at]
            name = hint if hint in self._own_names.values() else self.names.give(hint or "Thing")
            files = files or shape.at in self._tags.files
            self._named[shape.at] = self._model(shape, name, files=files)
            return self._named[shape.at]
        kinds = shape.kinds or self._guessed(shape)
        if not kinds:
            return NONE if shape.nullable and not shape.variants else ANY
        return union([self._one(kind, shape, hint, files=files) for kind in kinds], self._tags)

    def _choices(self, shape: Shape) -> list[Node]:
        """Give the variants that say what it is, not only which members must be there."""
        if len(shape.variants) != 1 or len(shape.variants[0]) > limits.CODEGEN_UNION_MAX:
            return []
        return [
            each
            for each in shape.variants[0]
            if not isinstance(each[0], dict) or not each[0].keys() <= {"required", "description", "title", "not"}
        ]

    def _chosen(self, shape: Shape, choices: list[Node], hint: str, *, files: bool) -> Type:
        types = []
        for number, (node, at) in enumerate(choices):
            label = class_name(node["$ref"].rpartition("/")[2]) if _refers(node) else str(number + 1)
            if not shape.properties:
                types.append(self.type_of(node, at, f"{hint}{label}", files=files))
                continue
            inner = self._shapes.of(node, at)
            whole = self._shapes.joined(shape, inner, inside(shape.at, "variant", number))
            if inner.at in self._tags.of:
                self._tags.of[whole.at] = self._tags.of[inner.at]
            types.append(self._typed(whole, f"{hint}{label}", files=files))
        return union(types, self._tags)

    def _guessed(self, shape: Shape) -> tuple[str, ...]:
        """Guess a missing type from the other keywords."""
        if shape.properties or "additionalProperties" in shape.words:
            return ("object",)
        if "items" in shape.words:
            return ("array",)
        return ("string",) if isinstance(shape.words.get("format"), str) and not shape.variants else ()

    def _one(self, kind: str, shape: Shape, hint: str, *, files: bool) -> Type:
        words = shape.words
        if kind == "boolean":
            return Type(text="bool", kinds=frozenset({"bool"}), base="bool")
        if kind == "integer":
            return _constrained("int", "int", words, ("minimum", "maximum", "multipleOf"))
        if kind == "number":
            return _constrained("float", "float", words, ("minimum", "maximum"))
        if kind == "string":
            return _text(words, files=files)
        if kind == "array":
            item = ANY
            if isinstance(words.get("items"), dict):
                where = inside(shape.at, "items")
                item = self.type_of(words["items"], where, f"{hint}Item", files=files)
            made = _constrained(f"list[{item.text}]", "array", words, ("minItems", "maxItems"))
            return dataclasses.replace(made, note=item.note, base=f"list[{item.text}]")
        return self._map(shape, hint)

    def _map(self, shape: Shape, hint: str) -> Type:
        """Give the type of an object without known members, or with some that Python cannot have."""
        if shape.properties:
            return dataclasses.replace(FREE, note="a member has a name that no struct can have")
        rest = shape.words.get("additionalProperties")
        value = ANY
        if isinstance(rest, dict) and "patternProperties" not in shape.words:
            value = self.type_of(rest, inside(shape.at, "additionalProperties"), f"{hint}Value")
        made = f"dict[str, {value.text}]"
        return Type(text=made, kinds=frozenset({"map"}), base=made, note=value.note)


def _or_unset(shown: str) -> str:
    """Add UNSET to a type; None stays last."""
    if shown in {"Any", "None"}:
        return shown if shown == "Any" else "UnsetType | None"
    bare = shown.removesuffix(" | None")
    return f"{bare} | UnsetType" + shown[len(bare) :]


def _refers(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("$ref"), str)


def _text(words: dict[str, Any], *, files: bool) -> Type:
    form = words.get("format")
    if form == "binary" or words.get("contentMediaType") == "application/octet-stream":
        return FILE if files else Type(text="bytes", kinds=frozenset({"str"}), base="bytes")
    if words.get("contentEncoding") == "base64":
        form = "byte"
    if isinstance(form, str) and form in _FORMATS:
        return Type(text=_FORMATS[form], kinds=frozenset({"str"}), base=_FORMATS[form])
    return _constrained("str", "str", words, ("minLength", "maxLength", "pattern"))


def _constrained(base: str, kind: str, words: dict[str, Any], keys: tuple[str, ...]) -> Type:
    """Give a type with the bounds that Python can check."""
    meta = []
    for key in keys:
        value = words.get(key)
        if key == "pattern":
            if isinstance(value, str) and _compiles(value):
                meta.append(f"pattern={text.literal(value)}")
        elif key in {"minimum", "maximum"}:
            meta += _bound(key, value, words.get(f"exclusive{key.capitalize()}"), whole=kind == "int")
        elif key == "multipleOf":
            if type(value) is int and 0 < value <= _INT_MAX:
                meta.append(f"multiple_of={value}")
        elif type(value) is int and 0 <= value <= _INT_MAX:
            meta.append(f"{'min' if key.startswith('min') else 'max'}_length={value}")
    made = f"Annotated[{base}, msgspec.Meta({', '.join(meta)})]" if meta else base
    return Type(text=made, kinds=frozenset({kind}), base=base)


def _bound(key: str, value: Any, exclusive: Any, *, whole: bool) -> list[str]:
    """Give a bound; 3.0 says exclusive by true, 3.1 by the number itself."""
    word = {"minimum": "g", "maximum": "l"}[key]
    if type(exclusive) in {int, float}:
        value, strict = exclusive, True
    else:
        strict = exclusive is True
    fits = type(value) is int and abs(value) <= _INT_MAX
    if not fits and not (type(value) is float and not whole and abs(value) < 1e300):
        return []
    return [f"{word}{'t' if strict else 'e'}={value!r}"]


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return len(pattern) <= 500


def default_code(made: Type, value: Any) -> str:
    """Give the code of a default that the type takes, empty where it takes none such."""
    if value is None:
        return "None" if "null" in made.kinds else ""
    if made.values is not None:
        fits = any(type(each) is type(value) and each == value for each in made.values)
        return text.literal(value) if fits else ""
    if made.base == "str" and isinstance(value, str) and len(value) <= 200:
        return text.literal(value)
    if made.base == "float" and type(value) in {int, float} and abs(value) < 1e300:
        return repr(float(value))
    if (made.base == "int" and type(value) is int and abs(value) <= _INT_MAX) or (made.base, type(value)) == (
        "bool",
        bool,
    ):
        return repr(value)
    if value == [] and made.base.startswith("list["):
        return "[]"
    return "{}" if value == {} and made.base.startswith("dict[") else ""
