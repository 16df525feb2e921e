"""An OpenAPI document as it came: read within bounds, its references followed. Nothing outside it is ever read."""

import re
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from stormline.core import limits_codegen as limits
from stormline.core.errors import DocumentError

_VERSION: Final = re.compile(r"3\.[01](\.|$)")


class Document:
    """A document.

    Attributes:
        root: all of it.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root

    def follow(self, node: Any, at: str) -> tuple[dict[str, Any], str]:
        """Give the object that stands at a place, through references, and the pointer of where it really is.

        Raises:
            DocumentError: there is no object, or a reference leads outside, nowhere or in a circle.
        """
        seen: set[str] = set()
        start = at
        while True:
            if not isinstance(node, dict):
                raise DocumentError(at, f"expected an object, got {kind_of(node)}")
            if "$ref" not in node:
                return node, at
            target = node["$ref"]
            node = self._find(target, at)
            if target in seen or len(seen) > limits.CODEGEN_DEPTH_MAX:
                raise DocumentError(start, "a circle of references")
            seen.add(target)
            at = target

    def _find(self, target: Any, at: str) -> Any:
        """Give what a reference points to."""
        if not isinstance(target, str):
            raise DocumentError(f"{at}/$ref", "expected a text")
        if target != "#" and not target.startswith("#/"):
            raise DocumentError(f"{at}/$ref", f"{target[:200]!r} leads outside the document; that is never fetched")
        node: Any = self.root
        for part in target[2:].split("/") if target != "#" else ():
            token = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and token in node:
                node = node[token]
            elif isinstance(node, list) and token.isascii() and token.isdigit() and int(token) < len(node):
                node = node[int(token)]
            else:
                raise DocumentError(f"{at}/$ref", f"{target[:200]!r} is not in the document")
        return node


def parse(data: bytes) -> Document:
    """Read a document of OpenAPI 3.0 or 3.1, as JSON.

    Raises:
        DocumentError: it is too large, no JSON, or none of these.
    """
    if len(data) > limits.CODEGEN_DOCUMENT_BYTES_MAX:
        raise DocumentError("#", f"a document has at most {limits.CODEGEN_DOCUMENT_BYTES_MAX} bytes")
    try:
        root = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentError("#", f"expected JSON (YAML is not read: convert it): {error}") from None
    if not isinstance(root, dict):
        raise DocumentError("#", f"expected an object, got {kind_of(root)}")
    version = root.get("openapi")
    if not isinstance(version, str) or not _VERSION.match(version):
        raise DocumentError("#/openapi", "expected version 3.0 or 3.1")
    if not isinstance(root.get("paths", {}), dict):
        raise DocumentError("#/paths", "expected an object")
    return Document(root)


def inside(at: str, *parts: str | int) -> str:
    """Give the pointer of a place inside another."""
    return "/".join([at, *(str(part).replace("~", "~0").replace("/", "~1") for part in parts)])


def kind_of(value: Any) -> str:
    """Name a value's JSON kind."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")


def text_of(node: dict[str, Any], key: str) -> str:
    """Give a member that should be a text; empty where it is none."""
    value = node.get(key)
    return value if isinstance(value, str) else ""


def object_of(node: dict[str, Any], key: str, at: str) -> dict[str, Any]:
    """Give a member that is an object, an empty one where it is missing.

    Raises:
        DocumentError: it is something else.
    """
    value = node.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DocumentError(inside(at, key), f"expected an object, got {kind_of(value)}")
    return value


def list_of(node: dict[str, Any], key: str, at: str) -> list[Any]:
    """Give a member that is a list, an empty one where it is missing.

    Raises:
        DocumentError: it is something else.
    """
    value = node.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise DocumentError(inside(at, key), f"expected a list, got {kind_of(value)}")
    return value
