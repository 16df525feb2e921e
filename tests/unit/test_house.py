"""The house rules that a machine can check. A rule that is not here or in pyproject.toml is a wish."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "stormline"
FEATURES = ROOT / "docs" / "features.md"

FILE_LINES_MAX = 800
"""More no reader holds in mind; split by what changes together."""
FUNCTION_LINES_MAX = 70
"""One screen."""
FEATURE_IDS = [f"{part}{n}" for part, last in (("A", 22), ("B", 17), ("C", 9), ("D", 10)) for n in range(1, last + 1)]
FEATURE_STATES = {"works", "partly", "not yet"}
CHANGE_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*\.(?:added|changed|fixed|removed|security)\.md")

# Split where they stand, so that this file does not break its own rules.
LEFT_OPEN = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b")
MACHINE_PATH = re.compile(r"(?<![\w.~*}>-])/(?:wo" r"rk|fa" r"rm|ro" r"ot|home/[a-z]+|Users/[A-Za-z]+)/[\w.]")
INDEX_HOST = re.compile(
    r"\b(?:py" r"pi\.(?:org|python\.org)|pyt" r"honhosted\.org|registry\.n" r"pmjs\.org|proxy\.gol" r"ang\.org)\b"
)
INDEX_OPTION = re.compile(r"--(?:extra-)?index" r"-url[ =]|--find" r"-links[ =]|--trusted" r"-host[ =]", re.IGNORECASE)
PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE" r" KEY-----\s+[A-Za-z0-9+/]{20}")
REAL_WAIT = re.compile(r"\b(?:time|asyncio)\.sleep\((?!0\))")
VIRTUAL_TIME = "VirtualLoop"
"""A loop whose time is moved, not waited for; files that name it may sleep on it."""


def source_files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def project_files() -> list[Path]:
    """Every file that is, or could be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        return sorted(path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file())
    folders = (
        "src",
        "tests",
        "docs",
        "bench",
        "examples",
        "fuzz",
        "changes.d",
        "requirements",
        ".ci",
    )  # an unpacked archive
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(p for p in (*ROOT.glob("*"), *inside) if p.is_file() and "__pycache__" not in p.parts)


def texts() -> Iterator[tuple[str, str]]:
    """Yield name and text of every project file that is text."""
    for path in project_files():
        try:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def hits(pattern: re.Pattern[str], files: Iterator[tuple[str, str]]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in files
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def generator() -> ModuleType:
    """Load docs/generate.py, which is no package."""
    spec = importlib.util.spec_from_file_location("stormline_docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- sources ----------------------------------------------------------------------------------------------------------
def test_source_files_stay_within_their_line_limit() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in source_files()}
    assert sizes
    assert {name: lines for name, lines in sizes.items() if lines > FILE_LINES_MAX} == {}


def test_functions_stay_within_their_line_limit() -> None:
    long = {}
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines
    assert long == {}


def test_package_init_files_are_empty_but_the_top_one() -> None:
    inits = [path for path in source_files() if path.name == "__init__.py" and path.parent != SRC]
    assert inits
    assert [str(path.relative_to(ROOT)) for path in inits if path.read_bytes()] == []


def test_every_room_holds_code() -> None:
    rooms = [path for path in SRC.iterdir() if (path / "__init__.py").exists()]
    assert [room.name for room in rooms if len(list(room.rglob("*.py"))) < 2] == []


def test_sources_leave_nothing_open() -> None:
    assert hits(LEFT_OPEN, ((name, text) for name, text in texts() if name.startswith("src/"))) == []


def test_error_docstring_shows_the_tree_of_classes() -> None:
    from stormline.core import errors

    shown: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^ {4}([│ ├└─]*)([A-Z]\w+)(?: |$)", line):
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            shown[match[2]] = path[depth - 1] if depth else "Exception"
    classes = {
        name: cls.__bases__[0].__name__
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.StormlineError)
    }
    assert shown == classes


# -- tests ------------------------------------------------------------------------------------------------------------
def test_tests_below_loopback_do_not_wait_on_real_time() -> None:
    below = ((name, text) for name, text in texts() if name.startswith(("tests/unit/", "tests/property/")))
    real = ((name, text) for name, text in below if VIRTUAL_TIME not in text or Path(name).name == Path(__file__).name)
    assert hits(REAL_WAIT, real) == []


# -- what is committed ------------------------------------------------------------------------------------------------
def test_files_name_no_path_of_a_machine() -> None:
    assert hits(MACHINE_PATH, texts()) == []


def test_files_name_no_package_index() -> None:
    assert hits(INDEX_HOST, texts()) == []
    assert hits(INDEX_OPTION, ((name, text) for name, text in texts() if not name.endswith(".py"))) == []


def test_files_name_no_package_index_of_this_machine() -> None:
    config = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    hosts = {host.rpartition("@")[2].partition(":")[0] for host in re.findall(r"https?://([^/\s'\"]+)", config)}
    remote = {host for host in hosts if host != "localhost" and not host.startswith("127.")}
    named = [name for name, text in texts() if any(host in text for host in remote)]
    assert named == []


def test_files_hold_no_private_key() -> None:
    assert [name for name, text in texts() if PRIVATE_KEY.search(text)] == []


def test_change_fragments_follow_the_naming_rule() -> None:
    names = [path.name for path in (ROOT / "changes.d").iterdir() if path.name != "README.md"]
    assert [name for name in names if not CHANGE_NAME.fullmatch(name)] == []


def test_locked_requirements_carry_hashes() -> None:
    for name in ("dev.txt", "tools.txt", "peers.txt"):
        lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if line.strip()]
        pins = [line for line in lines if not line.startswith(" ")]
        assert pins, name
        assert [pin for pin in pins if "==" not in pin or not pin.endswith("\\")] == [], name


# -- documents --------------------------------------------------------------------------------------------------------
def feature_rows() -> list[list[str]]:
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in FEATURES.read_text().splitlines()
        if re.match(r"\|\s*[A-D]\d+\s*\|", line)
    ]
    assert all(len(row) == 4 for row in rows), "a row of docs/features.md has: id, what, state, proof"
    return rows


def test_features_has_every_row_once_and_in_order() -> None:
    assert [row[0] for row in feature_rows()] == FEATURE_IDS


def test_features_states_are_known_words() -> None:
    assert {row[0]: row[2] for row in feature_rows() if row[2] not in FEATURE_STATES} == {}


def test_features_that_work_name_an_existing_proof() -> None:
    unproven = {}
    for ident, _, state, proof in feature_rows():
        named = re.findall(r"\b((?:tests|bench)/[\w/.-]+\.\w+)(?:::(\w+))?", proof)
        missing = [path for path, _ in named if not (ROOT / path).is_file()]
        missing += [
            f"{path}::{name}"
            for path, name in named
            if name and (ROOT / path).is_file() and not re.search(rf"\b{name}\b", (ROOT / path).read_text())
        ]
        if missing or (state != "not yet" and not named):
            unproven[ident] = missing or "no test or bench file named"
    assert unproven == {}


def documents() -> list[Path]:
    return [path for path in project_files() if path.suffix == ".md"]


def anchors(markdown: str) -> set[str]:
    """Give the anchors of a page's headings, as the usual renderers make them."""
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_of_a_page_resolve(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert broken == []


MADE_PAGES = ["errors.md", "codes.md", "limits.md", "configuration.md", "commands.md", "lab-profiles.md", "plans.md"]


@pytest.mark.parametrize("name", MADE_PAGES)
def test_reference_page_says_what_the_code_says(name: str) -> None:
    made = generator().PAGES[name]()
    written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert written == made, "stale: run `make docs`"


def test_generated_pages_are_all_held_to_the_code() -> None:
    assert set(generator().PAGES) == set(MADE_PAGES)


def quoted_commands(markdown: str) -> list[list[str]]:
    """Give the words after `stormline` of every command line in code spans and blocks."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", prose)
    matches = (re.match(r"(?:\$ )?(?:\S*/)?stormline ([a-z].*)", line) for line in lines)
    return [match[1].split() for match in matches if match]


def unknown_command(root: Any, words: list[str]) -> str | None:
    """Say what of a command line the tree of commands does not know; None where all is known."""
    command: Any = root
    for at, word in enumerate(words):
        children = getattr(command, "commands", None)
        if not children:
            options = {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            used = [each.partition("=")[0] for each in words[at:] if re.match(r"--[a-z]", each)]
            return next((f"{' '.join(words[:at])} {each}" for each in used if each not in options), None)
        if word not in children:
            return " ".join(words[: at + 1])
        command = children[word]
    return None


@pytest.mark.parametrize(
    "page",
    [page for page in documents() if "adr" not in page.parts and page.name != "features.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_commands_quoted_on_a_page_exist(page: Path) -> None:
    root = generator().root_command()
    quoted = quoted_commands(page.read_text(encoding="utf-8"))
    assert [unknown for words in quoted if (unknown := unknown_command(root, words))] == []


def test_readme_quotes_the_commands_to_try() -> None:
    assert {words[0] for words in quoted_commands((ROOT / "README.md").read_text())} >= {
        "get", "call", "listen", "push", "apm", "bundle",
    }  # fmt: skip


def test_every_command_prints_json_on_request() -> None:
    module = generator()
    leaves = [(path, command) for path, command in module.walk_commands(module.root_command())]
    without = [
        " ".join(path)
        for path, command in leaves
        if not getattr(command, "commands", {}) and not any("--json" in each.opts for each in command.params)
    ]
    assert leaves
    assert without == []
