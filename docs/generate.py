"""Write the reference pages that are made from the code, so that they cannot say anything else.

    .venv/bin/python docs/generate.py            write them
    .venv/bin/python docs/generate.py --check    name the stale ones; exit 1 where there are any

`tests/unit/test_house.py` holds the pages to what this script makes.
"""

import argparse
import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import typer
from rich.text import Text

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- Made by docs/generate.py from {source}; change that and run `make docs`. -->"


def _page(title: str, source: str, *parts: str) -> str:
    return "\n\n".join([NOTE.format(source=source), f"# {title}", *(part.strip("\n") for part in parts)]) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in lines
    )


def _first_paragraph(text: str) -> str:
    return inspect.cleandoc(text).partition("\n\n")[0]


def _attributes(cls: type) -> dict[str, str]:
    """Read the `Attributes:` section of a Google style docstring: text by name."""
    doc = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", doc, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


# -- errors -----------------------------------------------------------------------------------------------------------
def errors_page() -> str:
    """Give the tree of exceptions from its docstring, and what each class carries."""
    from stormline.core import errors

    doc = inspect.cleandoc(errors.__doc__ or "")
    lead, _, rest = doc.partition("\n\n")
    tree, _, closing = rest.partition("\n\n")
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.StormlineError)]
    carried = [
        (f"`{cls.__name__}`", f"`{name}`", text)
        for cls in sorted(classes, key=lambda each: inspect.getsourcelines(each)[1])
        for name, text in _attributes(cls).items()
    ]
    return _page(
        "Errors",
        "src/stormline/core/errors.py",
        lead,
        f"```text\n{inspect.cleandoc(tree)}\n```",
        closing,
        "## What they carry",
        _table(("class", "attribute", "meaning"), carried),
        "The numbers in `code` are listed in [codes](codes.md).",
    )


# -- codes ------------------------------------------------------------------------------------------------------------
def codes_page() -> str:
    """Give the ranges with their actions, and every code."""
    from stormline.core import codes

    rows = [(str(int(code)), f"`{codes.name(code)}`", codes.action(code).value) for code in codes.Code]
    return _page(
        "Codes",
        "src/stormline/core/codes.py",
        inspect.cleandoc(codes.__doc__ or ""),
        "## Codes of this version",
        _table(("code", "name", "action"), rows),
    )


# -- limits -----------------------------------------------------------------------------------------------------------
def _constants(source: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield line, name, source of the value and docstring of every constant.

    Raises:
        ValueError: a constant has no docstring: a bound without a reason.
    """
    body = ast.parse(source).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            match after:
                case ast.Expr(value=ast.Constant(value=str(doc))):
                    yield node.lineno, node.target.id, ast.unparse(node.value), doc
                case _:
                    raise ValueError(f"limits.{node.target.id} has no docstring with its reason")


def _bounds(module: ModuleType) -> list[str]:
    """Give every bound of a module with its value and its reason, by the section headings of its file."""
    source = inspect.getsource(module)
    headings = [
        (number, match[1])
        for number, line in enumerate(source.splitlines(), 1)
        if (match := re.fullmatch(r"# -- (.+?) -+", line))
    ]
    sections: dict[str, list[tuple[str, ...]]] = {title: [] for _, title in headings}
    for line, name, text, doc in _constants(source):
        title = next(title for number, title in reversed(headings) if number < line)
        value = getattr(module, name)
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.10g}" if isinstance(value, float) else text
        sections[title].append((f"`{name}`", shown, inspect.cleandoc(doc)))
    parts = []
    for title, rows in sections.items():
        parts += [f"## {title[:1].upper()}{title[1:]}", _table(("bound", "value", "what and why"), rows)]
    return parts


def limits_page() -> str:
    """Give every bound there is: those that all share, then those of each subject."""
    from stormline import core
    from stormline.core import limits

    about = inspect.cleandoc(limits.__doc__ or "")
    found = sorted(each.name for each in pkgutil.iter_modules(core.__path__) if each.name.startswith("limits"))
    modules = (importlib.import_module(f"stormline.core.{name}") for name in found)
    bounds = (line for each in modules for line in _bounds(each))
    return _page("Limits", "src/stormline/core/limits.py", about, *bounds)


# -- configuration ----------------------------------------------------------------------------------------------------
def _kind(annotation: Any) -> str:
    """Name a field's type for people."""
    if isinstance(annotation, type):
        return {str: "text", int: "number", bool: "true or false", float: "number"}.get(annotation, "table")
    for part in get_args(annotation):
        if isinstance(part, msgspec.Meta) and part.description:
            return part.description
    if any(isinstance(part, msgspec.Meta) for part in get_args(annotation)):
        return _kind(get_args(annotation)[0])
    if annotation == dict[str, str]:
        return "table of texts"
    if annotation == tuple[str, ...]:
        return "list of texts"
    return " or ".join(f"`{value}`" for value in get_args(annotation))


def _settings(section: type, prefix: str = "") -> Iterator[tuple[str, ...]]:
    from stormline.settings import model

    docs = _attributes(section)
    for field in msgspec.structs.fields(section):
        key = f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, model.Section):
            yield from _settings(field.type, f"{key}.")
        elif key != "state":
            shown = "" if field.default in ("", (), msgspec.NODEFAULT) else f"`{field.default}`"
            variable = f"STORMLINE_{key.upper().replace('.', '__')}"
            yield f"`{key}`", f"`{variable}`", _kind(field.type), shown, docs[field.name]


CONFIGURATION_LEAD = """
Everything has a default that works on one machine, so no file is needed. What wins: command line, then environment,
then file, then default. A key nobody knows is an error wherever it stands.

The file is `stormline.toml` in the state folder, or the one named by `--config`. A dotted key is a table in it:

```toml
host = "127.0.0.1"

[ports]
gateway = 9443

[api.upstreams]
"shop.demo" = "http://127.0.0.1:8707"
```

In the environment `.` becomes `__`; a table of texts is written as JSON, a list with commas.
"""
CONFIGURATION_OTHERS = """
## Variables that are not settings

| variable | meaning |
| --- | --- |
| `STORMLINE_STATE` | the state folder; else `$XDG_STATE_HOME/stormline`, else `~/.local/state/stormline` |
| `STORMLINE_BUNDLE` | the client bundle the client commands use; else the one a platform left in the state folder |
| `STORMLINE_CONFIG` | the configuration file; else `stormline.toml` in the state folder |
| `STORMLINE_LAB_PEERS` | environment (folder) of the laboratory's other clients; else `.venv-peers` beside our own |
| `STORMLINE_TRACES` | the folder of capacity recordings for the laboratory |
| `STORMLINE_NETWORK_WATCH`, `STORMLINE_NETWORK_PROBES` | see [Networks](../explanation/networks.md) |
| `STORMLINE_PORTABLE` | `1`: do without what only Linux has: [Networks](../explanation/networks.md#on-other-systems) |
| `STORMLINE_DEBUG` | `1` shows tracebacks of errors that are otherwise one line |
"""


def configuration_page() -> str:
    """Give every setting with its variable, type, default and meaning."""
    from stormline.settings import model

    rows = list(_settings(model.Settings))
    return _page(
        "Configuration",
        "src/stormline/settings/model.py",
        CONFIGURATION_LEAD,
        "## Settings",
        _table(("key", "variable", "type", "default", "meaning"), rows),
        CONFIGURATION_OTHERS,
    )


# -- commands ---------------------------------------------------------------------------------------------------------
def walk_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every visible command below `command` with its path, groups before their members."""
    for name, child in sorted(getattr(command, "commands", {}).items()):
        if not child.hidden:
            yield (*path, name), child
            yield from walk_commands(child, (*path, name))


def root_command() -> Any:
    """Give the command line as one tree."""
    from stormline.cli.main import app

    return typer.main.get_command(app)


def _plain(text: str | None) -> str:
    """Give a help text without its markup."""
    return Text.from_markup(inspect.cleandoc(text or "")).plain


def _parameters(command: Any) -> list[tuple[str, ...]]:
    rows = []
    for parameter in command.params:
        if parameter.hidden or parameter.name == "help":
            continue
        names = parameter.opts + parameter.secondary_opts
        if parameter.param_type_name == "argument":
            names = [parameter.metavar or parameter.name.upper()]
        default = parameter.default
        shown = "required" if parameter.required else "" if default in (None, False, "", ()) else f"`{default}`"
        rows.append((", ".join(f"`{name}`" for name in names), shown, _plain(parameter.help)))
    return rows


def commands_page() -> str:
    """Give every command with its help, arguments and options."""
    root = root_command()
    parts = [_plain(root.help)]
    if rows := _parameters(root):
        parts += [_table(("option", "default", "meaning"), rows)]
    for path, command in walk_commands(root):
        parts += [f"## stormline {' '.join(path)}", _plain(command.help)]
        if not getattr(command, "commands", {}) and (rows := _parameters(command)):
            parts.append(_table(("argument or option", "default", "meaning"), rows))
    return _page("Commands", "src/stormline/cli", *parts)


# -- laboratory profiles ----------------------------------------------------------------------------------------------
def _lab_events(profile: Any) -> str:
    """Give the events of a run with seed 1, as the page shows them; a rhythm is cut short."""
    shown = [
        f"{event.what} from {event.at_s:.0f} s" + ("" if event.until_s is None else f" to {event.until_s:.0f} s")
        for event in profile.expand(1)
    ]
    return "; ".join([*shown[:4], *(["and so on"] if len(shown) > 4 else [])])


def lab_profiles_page() -> str:
    """Give every profile with its numbers, and every fault."""
    from stormline.lab import faults, profiles

    parts = []
    for title, group in profiles.GROUPS.items():
        rows = []
        for profile in group:
            links = [profile.wifi.numbers()] + ([f"beside it {profile.cell.numbers()}"] if profile.cell else [])
            load = f"{profile.requests} in {profile.duration_s:g} s"
            rows.append((f"`{profile.name}`", profile.about, "; ".join(links), _lab_events(profile), load))
        parts += [f"## {title}", _table(("profile", "what it is", "link", "events (seed 1)", "requests"), rows)]
    kinds = [
        (f"`{faults.kebab(kind.__name__)}`", f"{kind.about[:1].upper()}{kind.about[1:]}.")
        for _, kind in sorted(inspect.getmembers(faults, inspect.isclass), key=lambda found: found[0])
        if issubclass(kind, faults.Fault) and hasattr(kind, "about")
    ]
    sets = [
        ("standard", ", ".join(f"`{name}`" for name in profiles.STANDARD)),
        ("quick", ", ".join(f"`{name}`" for name in profiles.QUICK)),
    ]
    return _page(
        "Laboratory profiles",
        "src/stormline/lab/profiles.py",
        inspect.cleandoc(profiles.__doc__ or ""),
        "The recordings of `tr-` profiles are looked for in the folder that `STORMLINE_TRACES` names.",
        *parts,
        "## Sets",
        _table(("set", "profiles"), sets),
        "## Faults",
        _table(("fault", "what it does"), kinds),
    )


# -- rules and plans ---------------------------------------------------------------------------------------------------
_RULES = """
A *rule set* is what the operator writes: one JSON file, replaced whole, under a version that only grows. Before it is
used it is checked: names and types, references (an app's hosts, regions, means by their names), at least one endpoint
with a weight for each host, and sizes. The message of a refusal names what is wrong and where.

A *plan* is what dispatch says to one client: the hosts it asked for and those of its app's preload list, endpoints in
the order that is best for it, signed with Ed25519.
"""
_ORDER = """
Where a client is comes from the longest of the rule set's `networks` that holds its address; for what that leaves
open, from a MaxMind database where there is one (package `stormline[geo]`). Only a truncated address is kept: /24 of
IPv4, /56 of IPv6. An endpoint comes before another by the first of these in which they differ:

1. it has a weight above 0;
2. it is of the unit of the client's region; one of no unit comes before one of another;
3. its region: the client's, then those `near` it in their order, then none, then others;
4. the client's operator, then none, then others;
5. measured quality, in tenths; what was not measured counts as good;
6. it is not full (load below 0.9);
7. by weight, among what is still equal: each device keeps its place as long as the endpoint is there.

Gateways of role `push` are given to clients that say they are push-only or in the background, and to no others, unless
there are no others.
"""
_REQUEST = """
For one request the host's `policy` holds, and over it that of the first of its `paths` that fits: value by value,
`tries` by each means. What the host has in `disabled` stays off. Paths are compared in the order in which they stand,
so the special ones come first.

How dispatch is asked, and what its answers are:

- The answer is one line: a JWS in compact form whose `typ` says what it is. With a user's `token` in the question a
  second line holds the user's `home`.
- `held` is the `digest` of the plan that the client holds. Where its content is still true the answer is `unchanged`:
  some 300 bytes, signed, bound to the question and to what is held, with the new version and expiry.
- With `changes` true the answer may hold only the hosts that differ from what is held.
- A client refuses another app's answer, an older version than it holds, one that expired or is from the future (by its
  own clock and by the server's), one that is altered, cut or too long.
- A plan's `keys` tell the keys of a rotation. The order: announce the next key (`plan_keys_more`), wait until clients
  have asked, sign with it and keep the old one in `plan_keys_more`, take the old one away. A client that names the
  keys it trusts (`kids`) is answered under one of them.
- Fields are only ever added. Who reads a plan ignores what it does not know, and skips endpoints whose carrier it does
  not know.
"""
_OBEYED = """
The client acts on a policy from its next request on; requests under way keep what they began with. Where several speak
of one request, the first of these that says something has the word:

1. the request: its extensions (`stormline.plan`, `stormline.deadline_s`, `stormline.priority`), and a time-out given to
   httpx that is neither its default of 5 s nor the config's;
2. the first `BusinessRule` of the app that fits it, in what it sets;
3. the plan;
4. the client's config and defaults.

What a plan switches off is off, whoever says what: `disabled`, `clear: false`, `dns_only`.

- `preset`, `tries`: a request or rule that names a preset has said all numbers of tries; a rule's `tries` lie over
  the plan's. Numbers beyond a client's own largest count as that one.
- `order`: the means it names come first, the others follow in their order. Clear HTTP and the original URL stay last,
  and so does a long connection that has just failed.
- `connect_timeout_s`: one connection to an origin, TCP and TLS. The long connection, which all requests share, has
  the config's.
- `read_timeout_s`: not for event streams; what a long poll may be held comes on top.
- `deadline_s`: not for large uploads and event streams; what a long poll may be held comes on top. A request that was
  told to bear a longer silence has that time.
- `clear`: `false` keeps requests made over TLS from being repeated without it. A URL without TLS is the app's own;
  the preset `login` refuses those. `true` opens nothing by itself.
- `sample`: drawn for each call; the records of the others are not sent.
- `urgency`: who goes first at the gate of a host. The first request to a host that dispatch was not asked of yet goes
  as usual.
- `relay`: `false` keeps requests from going through a relay. `relays`: tried after the origin's own addresses and its
  name, as often as the preset says; one whose keys cannot be read is passed over.
- `disabled`: a means is not tried; an endpoint of a carrier is not used. `h2` also: origins are offered HTTP/1.1
  alone, unless the app gave an SSL context of its own or a proxy is in the way. `h1` also: HTTP/1.1 does not take the
  place of a stalled HTTP/2.
- `dns_only`: hosts and gateways of the plan count for nothing; requests go to the origin by its name.

Names that a client does not know (a preset, a means, a carrier of a later version) are left out, each with one line in
its log. What a plan says for a request stands in the call's story.
"""


def plans_page() -> str:
    """Give the members of rule sets, plans and questions from their docstrings."""
    from stormline.dispatch import rules
    from stormline.wire import plan

    def members(kind: Any, title: str) -> str:
        told = _attributes(kind)
        rows = [(f"`{field.encode_name}`", told[field.name]) for field in msgspec.structs.fields(kind)]
        lead = _first_paragraph(kind.__doc__ or "")
        return f"### {title}\n\n{lead}\n\n{_table(('member', 'meaning'), rows)}"

    carriers = [(f"`{each.value}`", text) for each, text in _carriers(plan.Carrier)]
    return _page(
        "Rules and plans",
        "src/stormline/wire/plan.py and src/stormline/dispatch/rules.py",
        _RULES,
        "## What an operator writes",
        members(rules.RuleSet, "Rule set"),
        members(plan.HostPlan, "Host"),
        members(plan.Endpoint, "Endpoint"),
        _table(("carrier", "what it is"), carriers),
        members(plan.Policy, "Policy"),
        members(plan.PathPlan, "Path"),
        members(rules.Region, "Region"),
        members(rules.Network, "Network"),
        members(rules.Homes, "Homes"),
        "## In which order endpoints are given",
        _ORDER,
        "## What holds for a request, and what is answered",
        _REQUEST,
        "### What a client does with it",
        _OBEYED,
        members(plan.PlanRequest, "Question"),
        members(plan.Plan, "Plan"),
        members(plan.Unchanged, "Unchanged"),
        members(plan.Home, "Home"),
    )


def _carriers(kind: Any) -> Iterator[tuple[Any, str]]:
    """Yield the members of an enumeration with the docstring below each."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)  # noqa: S101  it is the source of a class
    for statement, below in itertools.pairwise(body.body):
        if isinstance(statement, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(statement.targets[0], ast.Name)  # noqa: S101  members are plain names
            yield kind[statement.targets[0].id], str(below.value.value)


PAGES: dict[str, Callable[[], str]] = {
    "errors.md": errors_page,
    "codes.md": codes_page,
    "limits.md": limits_page,
    "configuration.md": configuration_page,
    "commands.md": commands_page,
    "lab-profiles.md": lab_profiles_page,
    "plans.md": plans_page,
}


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description="Write the reference pages that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing, name the stale pages")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        file = REFERENCE / name
        text = make()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                file.write_text(text, encoding="utf-8")
    for name in stale:
        sys.stdout.write(f"{'stale' if check else 'written'}: docs/reference/{name}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
