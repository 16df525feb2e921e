"""What differs between two rule sets, app by app. Pure."""

from collections.abc import Iterable
from typing import Any

from stormline.core import limits
from stormline.dispatch.rules import RuleSet

_ASIDE = frozenset({"format", "version", "apps"})


def differences(old: RuleSet, new: RuleSet) -> dict[str, tuple[str, ...]]:
    """Say for which apps the answers differ, and for which hosts.

    Never says too little. It may say too much: what it cannot ascribe to an app or a host counts for all.

    Args:
        old: checked rules.
        new: checked rules.

    Returns:
        By app id the hosts whose plan differs, sorted; empty where any may (a gateway, a switch, more hosts than
        `limits.PLAN_HOSTS_MAX`). Apps without a difference are absent; an app that is only in one of the two is there.
    """
    hosts, apps, everyone = _changed_parts(old, new)
    found: dict[str, tuple[str, ...]] = {}
    for app in sorted(old.apps.keys() | new.apps.keys()):
        before, after = old.apps.get(app), new.apps.get(app)
        if everyone or app in apps or before is None or after is None:
            found[app] = ()
            continue
        names = (before ^ after) | (after & hosts)
        if names:
            found[app] = tuple(sorted(names)) if len(names) <= limits.PLAN_HOSTS_MAX else ()
    return found


def _changed_parts(old: RuleSet, new: RuleSet) -> tuple[set[str], set[str], bool]:
    """Give the hosts and the apps with a part of their own that differs, and whether a part for everyone does."""
    hosts: set[str] = set()
    apps: set[str] = set()
    everyone = False
    for field in RuleSet.__struct_fields__:
        before, after = getattr(old, field), getattr(new, field)
        if field in _ASIDE or before == after:
            continue
        if not (isinstance(before, dict) and isinstance(after, dict)):
            everyone = True
            continue
        for key in _changed_keys(before, after):
            of_host = field == "hosts" or (field != "gateways" and (key in old.hosts or key in new.hosts))
            of_app = field != "hosts" and (key in old.apps or key in new.apps)
            if of_host:
                hosts.add(key)
            if of_app:
                apps.add(key)
            everyone = everyone or not (of_host or of_app)
    return hosts, apps, everyone


def _changed_keys(before: dict[Any, Any], after: dict[Any, Any]) -> Iterable[Any]:
    absent = object()
    return (key for key in before.keys() | after.keys() if before.get(key, absent) != after.get(key, absent))
