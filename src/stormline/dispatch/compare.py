"""What differs between two rule sets, for people, and what follows when settings and an operator both changed. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec

from stormline.core import limits_platform as limits
from stormline.dispatch import rules as dispatch_rules
from stormline.dispatch.rules import RuleSet

_ASIDE = frozenset({"format", "version", "unit"})
_ABSENT: Any = object()


class Difference(msgspec.Struct, frozen=True, omit_defaults=True):
    """One value that differs.

    Attributes:
        path: where, with `/` between its parts (RFC 6901 without the first `/`).
        before: the value as JSON text, None where it was not there.
        after: the same for now.
    """

    path: str
    before: str | None = None
    after: str | None = None


class Differences(msgspec.Struct, frozen=True):
    """All that differs.

    Attributes:
        count: how many values.
        listed: the first `limits.RULES_DIFF_LINES_MAX` of them.
    """

    count: int
    listed: tuple[Difference, ...]


def content(rules: RuleSet) -> bytes:
    """Give a rule set's bytes without its version: equal rules have equal bytes."""
    return dispatch_rules.encode(msgspec.structs.replace(rules, version=1))


def diff(old: RuleSet, new: RuleSet) -> Differences:
    """Say what differs, versions aside."""
    count = 0
    listed: list[Difference] = []
    for name in RuleSet.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if name in _ASIDE or before == after:
            continue
        for each in _walk((name,), _plain(before), _plain(after)):
            count += 1
            if len(listed) < limits.RULES_DIFF_LINES_MAX:
                listed.append(each)
    return Differences(count, tuple(listed))


def changed_hosts(old: RuleSet, new: RuleSet) -> list[str]:
    """Give the hosts of the new rules that are new or other than before, sorted."""
    return sorted(host for host, plan in new.hosts.items() if old.hosts.get(host) != plan)


def merge(base: RuleSet, settings: RuleSet, ours: RuleSet) -> RuleSet:
    """Let an operator's rules follow changed settings where the operator left them as they were.

    Args:
        base: what the settings gave before.
        settings: what they give now.
        ours: the rules that hold.

    Returns:
        `ours` with each entry that says what `base` says set to what `settings` says; the operator's own entries stay.
        The version is that of `ours`. It is not checked: a host may have gone that an entry of the operator's names.
    """
    merged = {}
    for name in RuleSet.__struct_fields__:
        if name in _ASIDE:
            continue
        before, after, held = getattr(base, name), getattr(settings, name), getattr(ours, name)
        value = _merged(before, after, held)
        if value != held:
            merged[name] = value
    return msgspec.structs.replace(ours, **merged)


def _merged(before: Any, after: Any, held: Any) -> Any:
    if before == after:
        return held
    if held == before:
        return after
    if isinstance(held, frozenset) and isinstance(before, frozenset) and isinstance(after, frozenset):
        return (held | (after - before)) - (before - after)
    if isinstance(held, dict) and isinstance(before, dict) and isinstance(after, dict):
        result = {}
        for key in {**held, **after}:
            value = _merged(before.get(key, _ABSENT), after.get(key, _ABSENT), held.get(key, _ABSENT))
            if value is not _ABSENT:
                result[key] = value
        return result
    return held


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, order="deterministic")


def _walk(path: tuple[str, ...], before: Any, after: Any) -> Iterator[Difference]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({**before, **after}):
            yield from _walk((*path, key), before.get(key, _ABSENT), after.get(key, _ABSENT))
    elif _is_names(before) and _is_names(after):
        for name in sorted({*before, *after}):
            if (name in before) != (name in after):
                yield Difference("/".join((*path, "-")), _shown(name, name in before), _shown(name, name in after))
        if set(before) == set(after):
            yield Difference("/".join(path), _text(before), _text(after))
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _walk((*path, str(number)), one, other)
    else:
        yield Difference("/".join(path), _text(before), _text(after))


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _shown(name: str, there: bool) -> str | None:
    return _text(name) if there else None


def _text(value: Any) -> str | None:
    return None if value is _ABSENT else msgspec.json.encode(value).decode()
