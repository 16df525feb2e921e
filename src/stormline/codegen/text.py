"""Python text: literals, docstrings, and lines that fit. Whatever a document says stays inside its quotes."""

import textwrap
from collections.abc import Iterable
from typing import Final

from stormline.core import limits_codegen as limits

WIDTH: Final = 120
_OPEN: Final = {"(": ")", "[": "]", "{": "}"}


def literal(value: str | float | bool | None) -> str:
    """Give a value as code, texts in double quotes where they can be."""
    shown = repr(value)
    if isinstance(value, str) and shown[0] == "'" and '"' not in value:
        return f'"{shown[1:-1]}"'
    return shown


def prose(text: str) -> str:
    """Give a text with nothing in it that could not stand in a docstring or comment."""
    cut = text[: limits.CODEGEN_TEXT_CHARS_MAX]
    lines = cut.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    clean = ("".join(char if char.isprintable() else " " for char in line).rstrip() for line in lines)
    return "\n".join(clean).strip()


def line_of(text: str) -> str:
    """Give a text as one line."""
    return " ".join(prose(text).split())


def docstring(parts: Iterable[str], indent: str) -> str:
    """Give a docstring; parts are separated by empty lines, and their own indentation is kept."""
    paragraphs = [_wrapped(part, indent) for part in parts if part.strip()]
    raw = f"\n\n{indent}".join(paragraphs)
    bare = raw.rstrip('"')
    body = bare.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') + '\\"' * (len(raw) - len(bare))
    if "\n" not in body and len(indent) + len(body) + 6 <= WIDTH:
        return f'{indent}"""{body}"""\n'
    return f'{indent}"""{body}\n{indent}"""\n'


def _wrapped(part: str, indent: str) -> str:
    """Wrap each line of a part; its continuation stands four further in under `name: ...` lines."""
    lines = []
    for line in prose(part).split("\n") if not part.startswith("\0") else part[1:].split("\n"):
        own = line[: len(line) - len(line.lstrip())]
        hang = own + "    " if own else ""
        wrapped = textwrap.wrap(
            line.strip(), WIDTH - 4 - len(indent) - len(hang), break_long_words=False, break_on_hyphens=False
        )
        lines += [(own if i == 0 else hang) + each for i, each in enumerate(wrapped)] or [""]
    return "\n".join(indent + line if line and i else line for i, line in enumerate(lines))


def section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Give a section of a docstring, `Args:` for one, empty where it has no rows."""
    shown = [f"    {name}: {line_of(text)}" for name, text in rows]
    return "\0" + "\n".join([f"{title}:", *shown]) if shown else ""


def fit(line: str, indent: str = "", *, tail: int = 0) -> str:
    """Give a statement on as many lines as it needs, as a formatter would leave it; `line` has no newline.

    The last bracket of its outermost level that can be opened is opened, and so on inside it.
    """
    if len(indent) + len(line) + tail <= WIDTH:
        return indent + line
    span = _last_bracket(line)
    if span is None:
        return indent + line
    start, end = span
    head, inner, rest = line[: start + 1], line[start + 1 : end], line[end:]
    items = split(inner)
    deeper = indent + "    "
    comma = "" if line[start] == "[" and len(items) == 1 else ","
    lines = [fit(item, deeper, tail=len(comma)) + comma for item in items]
    return "\n".join([indent + head, *lines, indent + rest])


def split(inner: str, at_every: str = ",") -> list[str]:
    """Cut at the commas, or another character, of the outermost level."""
    items, depth, start = [], 0, 0
    for at, char in _code(inner):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == at_every and not depth:
            items.append(inner[start:at].strip())
            start = at + 1
    items.append(inner[start:].strip())
    return [item for item in items if item]


def _last_bracket(line: str) -> tuple[int, int] | None:
    """Find the outermost pair to open: that of a call or signature before those of types behind it."""
    pairs, stack = [], []
    for at, char in _code(line):
        if char in _OPEN:
            stack.append(at)
        elif char in ")]}":
            start = stack.pop()
            if not stack and at > start + 1:
                pairs.append((start, at))
    round_ones = [pair for pair in pairs if line[pair[0]] == "("]
    return next(reversed(round_ones or pairs), None)


def _code(line: str) -> Iterable[tuple[int, str]]:
    """Yield the characters outside texts."""
    quote, skip = "", False
    for at, char in enumerate(line):
        if skip:
            skip = False
        elif quote:
            skip = char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            yield at, char
