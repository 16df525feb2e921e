"""What must be known of a document before its models are made: tags of unions, files, who reads and who writes."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from stormline.codegen.document import Document, inside
from stormline.codegen.shapes import Node, Shape, Shapes
from stormline.core import limits_codegen as limits
from stormline.core.errors import DocumentError

Tag = tuple[str, str | int]
"""The member that tells a model apart, and its value."""
_ASIDE: Final = frozenset({"example", "examples"})
MULTIPART: Final = "multipart/form-data"


class Tags:
    """Found in one pass over a document.

    Attributes:
        of: the tag of a schema by its pointer; None where two unions want different ones.
        children: pointers of the schemas that extend one with a discriminator of its own.
        files: schemas that are bodies of multipart requests.
        asked: schemas that are reached from requests.
        answered: schemas that are reached from answers.
    """

    def __init__(self, document: Document, shapes: Shapes) -> None:
        self._document = document
        self._shapes = shapes
        self.of: dict[str, Tag | None] = {}
        self.children: dict[str, list[str]] = {}
        self.files: set[str] = set()
        self.asked: set[str] = set()
        self.answered: set[str] = set()
        nodes = list(_walk(document.root, "#"))
        for node, at in nodes:
            self._look(node, at)
        for base, children in self.children.items():
            shape = shapes.of({"$ref": base}, base)
            self._tag(shape.words["discriminator"], [({"$ref": child}, child) for child in children])

    def _look(self, node: dict[str, Any], at: str) -> None:
        for key in ("oneOf", "anyOf"):
            if isinstance(node.get(key), list):
                members = [(each, inside(at, key, i)) for i, each in enumerate(node[key])]
                told = node.get("discriminator")
                if isinstance(told, dict):
                    self._tag(told, members)
                else:
                    self._infer(members)
        if isinstance(node.get("allOf"), list):
            self._extend(node["allOf"], at)
        if isinstance(node.get("requestBody"), dict):
            self._reach(node["requestBody"], inside(at, "requestBody"), self.asked)
            self._find_files(node["requestBody"], inside(at, "requestBody"))
        if isinstance(node.get("responses"), dict) and at.startswith("#/paths/"):
            self._reach(node["responses"], inside(at, "responses"), self.answered)

    def _extend(self, parts: list[Any], at: str) -> None:
        """Note a schema that extends one with a discriminator and no variants."""
        for i, part in enumerate(parts):
            found = self._follow(part, inside(at, "allOf", i))
            if found and isinstance(part, dict) and "$ref" in part:
                base, where = found
                told = base.get("discriminator")
                if isinstance(told, dict) and not ("oneOf" in base or "anyOf" in base) and at.count("/") == 3:
                    self.children.setdefault(where, []).append(at)

    def _find_files(self, body: Any, at: str) -> None:
        found = self._follow(body, at)
        content = found[0].get("content") if found else None
        if found and isinstance(content, dict) and isinstance(content.get(MULTIPART), dict):
            schema = content[MULTIPART].get("schema", {})
            if target := self._follow(schema, inside(found[1], "content", MULTIPART, "schema")):
                self.files.add(target[1])

    def _follow(self, node: Any, at: str) -> Node | None:
        """Follow references; None where that cannot be done: who really needs it will say so."""
        try:
            return self._document.follow(node, at)
        except DocumentError:
            return None

    def _shape(self, node: Any, at: str) -> Shape | None:
        try:
            return self._shapes.of(node, at)
        except DocumentError:
            return None

    def _tag(self, told: dict[str, Any], members: Iterable[Node]) -> None:
        """Give each variant the value that the discriminator has for it."""
        name = told.get("propertyName")
        mapping = told.get("mapping")
        if not isinstance(name, str) or not usable(name):
            return
        by_target: dict[str, list[str]] = {}
        for value, target in mapping.items() if isinstance(mapping, dict) else ():
            if isinstance(target, str):
                where = target if target.startswith("#") else f"#/components/schemas/{target}"
                by_target.setdefault(where, []).append(value)
        for node, at in members:
            found = self._follow(node, at)
            if found is None:
                continue
            values: list[Any] = by_target.get(found[1], [])
            if not values and (shape := self._shape(*found)) is not None:
                const = self._const(shape, name)
                values = [found[1].rpartition("/")[2] if const is None else const]
            self._give(found[1], (name, values[0]) if len(values) == 1 else None)

    def _infer(self, members: list[Node]) -> None:
        """Find a member that has one value of its own in each variant."""
        if not 2 <= len(members) <= limits.CODEGEN_UNION_MAX:
            return
        shapes = [shape for each in members if (shape := self._shape(*each)) and shape.properties]
        if len(shapes) < 2:
            return
        for name in shapes[0].properties:
            values = [self._const(shape, name) for shape in shapes]
            if usable(name) and None not in values and len({(type(v), v) for v in values}) == len(shapes):
                if len({type(v) for v in values}) == 1:
                    for shape, value in zip(shapes, values, strict=True):
                        self._give(shape.at, (name, value) if value is not None else None)
                return

    def _const(self, shape: Shape, name: str) -> str | int | None:
        """Give the one value that a member must have, if it has such."""
        if name not in shape.properties or name not in shape.required:
            return None
        own = self._shape(*shape.properties[name])
        if own is None:
            return None
        few = own.words.get("enum")
        value = own.words.get("const", few[0] if isinstance(few, list) and len(few) == 1 else None)
        fits = isinstance(value, str) or (type(value) is int and abs(value) < 2**63)
        return value if fits else None

    def _give(self, at: str, tag: Tag | None) -> None:
        self.of[at] = tag if self.of.get(at, tag) == tag else None

    def _reach(self, node: Any, at: str, found: set[str]) -> None:
        """Add what is referred to from here."""
        left = [(node, at)]
        while left:
            for inner, where in _walk(*left.pop()):
                if "$ref" in inner and (target := self._follow(inner, where)) and target[1] not in found:
                    found.add(target[1])
                    left.append(target)


def usable(name: str) -> bool:
    """Whether a JSON name can be that of a struct's member."""
    return name != "" and not any(char in '"\\' or char < " " for char in name)


def _walk(root: Any, at: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every object in a value, but for those in examples."""
    left = [(root, at, False)]
    while left:
        node, where, names = left.pop()
        if isinstance(node, dict):
            yield node, where
            left += [
                (each, inside(where, key), key == "properties" and not names)
                for key, each in reversed(node.items())
                if isinstance(each, dict | list) and (names or key not in _ASIDE)
            ]
        elif isinstance(node, list):
            left += [(each, inside(where, i), False) for i, each in reversed(list(enumerate(node)))]
