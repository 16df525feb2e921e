"""Names of a document made into Python names: valid, unique in their scope, never one that the code needs itself."""

import keyword
import re
import unicodedata
from typing import Final

from stormline.core import limits_codegen as limits

NEEDED: Final = frozenset({
    "Annotated", "Any", "AsyncIterator", "Client", "Final", "Iterator", "Literal", "SyncClient", "TypeAlias", "UNSET",
    "UnsetType", "bool", "bytes", "datetime", "decimal", "dict", "float", "int", "list", "msgspec", "self", "str",
    "stormline", "super", "typed", "uuid",
})  # fmt: skip
"""Names that generated code uses; a member or method of that name would hide them in its class."""
_EDGES: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Names:
    """The names given out in one scope."""

    def __init__(self, taken: frozenset[str] = NEEDED) -> None:
        self._taken = set(taken)

    def give(self, wanted: str) -> str:
        """Give the name, or the first of `wanted_`, `wanted_2`, `wanted_3`... that is free."""
        name, number = wanted, 1
        while name in self._taken or keyword.iskeyword(name):
            number += 1
            name = f"{wanted}_" if number == 2 and not wanted.endswith("_") else f"{wanted}_{number}"
        self._taken.add(name)
        return name


def class_name(text: str) -> str:
    """Make `ThisForm`; it always begins with a capital letter."""
    name = "".join(word[0].upper() + word[1:] for word in _words(text))
    name = unicodedata.normalize("NFKC", name)[: limits.CODEGEN_NAME_CHARS_MAX]
    return name if name[:1].isupper() and name.isidentifier() else _checked(f"T{name}", "Thing")


def member_name(text: str) -> str:
    """Make `this_form`; it never begins with a capital letter or an underscore."""
    words = _EDGES.sub("_", "_".join(_words(text))).lower()
    name = unicodedata.normalize("NFKC", words).lower()[: limits.CODEGEN_NAME_CHARS_MAX].strip("_")
    return name if name.isidentifier() and name == name.lower() else _checked(f"n{name}", "nameless")


def _words(text: str) -> list[str]:
    """Cut a text into runs of what a name may hold."""
    plain = unicodedata.normalize("NFKC", text[: 4 * limits.CODEGEN_NAME_CHARS_MAX])
    kept = "".join(char if char.isalnum() and f"a{char}".isidentifier() else " " for char in plain)
    return kept.split()


def _checked(name: str, otherwise: str) -> str:
    """Give the name if Python takes it as it stands."""
    fit = name.isidentifier() and len(name) > 1 and unicodedata.normalize("NFKC", name) == name
    return name if fit else otherwise
