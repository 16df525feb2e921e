"""Unions and enumerations that can be told apart when they are read, and plainer types where they cannot."""

import dataclasses
from collections import Counter
from typing import Any, Final

from stormline.codegen import text
from stormline.codegen.model import ANY, FREE, NONE, Type
from stormline.codegen.tags import Tags
from stormline.core import limits_codegen as limits

_WIDER: Final = {
    "str": Type(text="str", kinds=frozenset({"str"}), base="str"),
    "int": Type(text="int", kinds=frozenset({"int"}), base="int"),
    "float": Type(text="float", kinds=frozenset({"float"}), base="float"),
    "bool": Type(text="bool", kinds=frozenset({"bool"}), base="bool"),
    "array": Type(text="list[Any]", kinds=frozenset({"array"}), base="list[Any]"),
    "map": FREE,
}
_JSON: Final = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}


def literals(values: list[Any], kinds: tuple[str, ...]) -> Type:
    """Give the type of an enumeration."""
    nullable = None in values
    some = [each for each in values if each is not None]
    if not some:
        return NONE
    fit = all(isinstance(each, str) or (type(each) is int and abs(each) < 2**63) for each in some)
    if not fit or len(some) > limits.CODEGEN_UNION_MAX:
        plain = [_WIDER[_JSON[kind]] for kind in kinds if kind in _JSON] if len(kinds) == 1 else []
        made = plain[0] if plain else ANY
        made = dataclasses.replace(made, note="an enumeration of values that no Literal can hold, or of too many")
        return made.or_none() if nullable else made
    unique = list(dict.fromkeys((type(each), each) for each in some))
    shown = ", ".join(text.literal(each) for _, each in unique)
    made = Type(
        text=f"Literal[{shown}]",
        kinds=frozenset("str" if isinstance(each, str) else "int" for each in some),
        values=tuple(each for _, each in unique),
    )
    return made.or_none() if nullable else made


def union(types: list[Type], tags: Tags) -> Type:
    """Give the type of one of several.

    Where values of two could not be told apart, the widest type that takes them stands for both.
    """
    unique = list({each.text: each for each in types}.values())
    if any("any" in each.kinds for each in unique):
        return next(each for each in unique if "any" in each.kinds)
    for _ in range(len(_WIDER) + 1):
        doubtful = _doubtful(unique, tags)
        if not doubtful or len(unique) < 2:
            break
        unique = _widened(unique, doubtful)
    if len(unique) == 1:
        return unique[0]
    if not unique or _doubtful(unique, tags):
        return dataclasses.replace(ANY, note="variants that nothing tells apart")
    null = [each for each in unique if each.kinds == {"null"}]
    rest = [each for each in unique if each.kinds != {"null"}]
    if len(rest) == 1:
        return rest[0].or_none()
    names = [part for each in (*rest, *null) for part in _parts(each.text)]
    ordered = [name for name in dict.fromkeys(names) if name != "None"]
    if any(each.nullable for each in unique):
        ordered.append("None")
    return Type(
        text=" | ".join(ordered),
        kinds=frozenset().union(*(each.kinds for each in unique)),
        models=tuple(dict.fromkeys(model for each in unique for model in each.models)),
        note=next((each.note for each in unique if each.note), ""),
    )


def _parts(shown: str) -> list[str]:
    """Cut `A | B` at its outermost level."""
    return text.split(shown, "|")


def _doubtful(types: list[Type], tags: Tags) -> str:
    """Name a kind of which two types are, so that a value would not tell which; empty where there is none."""
    counts = Counter(kind for each in types for kind in each.kinds - {"null", "struct", "file"})
    for kind in ("str", "int", "float", "bool", "array", "map"):
        if counts[kind] > 1:
            return kind
    structs = [each for each in types if "struct" in each.kinds]
    if structs and counts["map"]:
        return "map"
    models = dict.fromkeys(model for each in structs for model in each.models)
    if len(models) > 1:
        known = [tags.of.get(model) for model in models]
        fields = {tag[0] if tag else None for tag in known}
        kinds = {type(tag[1]) if tag else None for tag in known}
        if None in fields or len(fields) > 1 or len(kinds) > 1 or len(set(known)) < len(known):
            return "map"
    if any("file" in each.kinds for each in types) and len(types) > 1:
        return "any"
    return ""


def _widened(types: list[Type], kind: str) -> list[Type]:
    """Put the widest type of a kind in the place of all that are of it."""
    kinds = {"map", "struct"} if kind == "map" else {kind}
    simple = [each for each in types if each.kinds & kinds and each.kinds - {"null"} <= kinds]
    if kind not in _WIDER or len(simple) < sum(bool(each.kinds & kinds) for each in types):
        return [dataclasses.replace(ANY, note="variants that nothing tells apart")]
    wide = dataclasses.replace(_WIDER[kind], note="variants that nothing tells apart")
    if any("null" in each.kinds for each in simple):
        wide = wide.or_none()
    kept = [each for each in types if not each.kinds & kinds]
    return [wide, *kept]
