"""Schemas with their `allOf` merged: what an object has, seen from outside."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

from stormline.codegen.document import Document, inside, kind_of, list_of, object_of
from stormline.core import limits_codegen as limits
from stormline.core.errors import DocumentError

Node = tuple[Any, str]
"""A schema and its pointer."""
_KINDS: Final = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_MERGED: Final = frozenset({"$ref", "allOf", "oneOf", "anyOf", "type", "properties", "required", "nullable"})


@dataclass(kw_only=True, slots=True)
class Shape:
    """A schema.

    Attributes:
        at: its pointer.
        kinds: the JSON types it names, without null.
        nullable: whether null is among them.
        properties: by name.
        required: names that must be there.
        variants: its `oneOf` and `anyOf`.
        words: all other keywords.
    """

    at: str
    kinds: tuple[str, ...] = ()
    nullable: bool = False
    properties: dict[str, Node] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    variants: list[list[Node]] = field(default_factory=list)
    words: dict[str, Any] = field(default_factory=dict)


class Shapes:
    """The shapes of a document, each made once."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._made: dict[str, Shape] = {}
        self._open: set[str] = set()
        self._joined = 0

    def of(self, node: Any, at: str) -> Shape:
        """Give the shape of a schema.

        Raises:
            DocumentError: it is none, or contains itself.
        """
        if isinstance(node, bool):
            return Shape(at=at)
        node, at = self._document.follow(node, at)
        if at in self._made:
            return self._made[at]
        if at in self._open:
            raise DocumentError(at, "contains itself by allOf")
        if len(self._open) > limits.CODEGEN_DEPTH_MAX:
            raise DocumentError(at, f"schemas are at most {limits.CODEGEN_DEPTH_MAX} deep")
        self._open.add(at)
        try:
            shape = self._own(node, at)
            parts = [self.of(part, inside(at, "allOf", i)) for i, part in enumerate(list_of(node, "allOf", at))]
        finally:
            self._open.discard(at)
        if parts:
            whole = Shape(at=at)
            for part in (*parts, shape):
                _merge(whole, part)
            whole.nullable = shape.nullable or all(part.nullable for part in parts)
            whole.words["discriminator"] = shape.words.get("discriminator")  # of a part: the part's own affair
            shape = whole
        self._made[at] = shape
        return shape

    def joined(self, base: Shape, variant: Shape, at: str) -> Shape:
        """Give the shape of one variant of an object with members of its own."""
        if at not in self._made:
            self._joined += 1
            if self._joined > limits.CODEGEN_MODELS_MAX:
                raise DocumentError(
                    base.at[:1000], f"at most {limits.CODEGEN_MODELS_MAX} variants have members in common"
                )
            whole = dataclasses.replace(
                base,
                at=at, properties=dict(base.properties), required=set(base.required), variants=[],
                words=dict(base.words),
            )  # fmt: skip
            _merge(whole, variant)
            whole.nullable = False
            whole.words.pop("discriminator", None)
            self._made[at] = whole
        return self._made[at]

    def _own(self, node: dict[str, Any], at: str) -> Shape:
        """Give the shape without `allOf`."""
        named = node.get("type")
        kinds = tuple(named) if isinstance(named, list) else () if named is None else (named,)
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _KINDS:
                raise DocumentError(inside(at, "type"), f"no JSON type: {str(kind)[:60]!r}")
        properties = object_of(node, "properties", at)
        required = [name for name in list_of(node, "required", at) if isinstance(name, str)]
        variants = [
            [(member, inside(at, key, i)) for i, member in enumerate(members)]
            for key in ("oneOf", "anyOf")
            if (members := list_of(node, key, at))
        ]
        return Shape(
            at=at,
            kinds=tuple(dict.fromkeys(kind for kind in kinds if kind != "null")),
            nullable=node.get("nullable") is True or "null" in kinds,
            properties={name: _checked(each, inside(at, "properties", name)) for name, each in properties.items()},
            required=set(required),
            variants=variants,
            words={key: value for key, value in node.items() if key not in _MERGED},
        )


def _checked(node: Any, at: str) -> Node:
    if not isinstance(node, dict | bool):
        raise DocumentError(at, f"expected a schema, got {kind_of(node)}")
    return node, at


def _merge(whole: Shape, part: Shape) -> None:
    """Add what a part says; what says more about a member goes before what only narrows it."""
    if part.kinds:
        both = tuple(kind for kind in whole.kinds if kind in part.kinds)
        whole.kinds = both or part.kinds
    for name, (node, at) in part.properties.items():
        known = whole.properties.get(name)
        if known is None or (isinstance(node, dict) and not node.keys().isdisjoint(_MERGED - {"required", "nullable"})):
            whole.properties[name] = (node, at)
    whole.required |= part.required
    whole.variants += part.variants
    whole.words.update(part.words)
