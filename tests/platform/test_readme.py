"""The README's commands and snippets, and those of the page it sends to, run as they are written there."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stormline.net.clock import SystemClock
from stormline.testing.platform import RunningPlatform
from stormline.wire import bundle as wire_bundle

pytestmark = pytest.mark.platform
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PATIENCE_S = 30.0


USE_WITH_HTTPX = (ROOT / "docs" / "howto" / "use-with-httpx.md").read_text(encoding="utf-8")
RUN_SNIPPETS = """
import ast, asyncio, inspect, sys
import httpx2
names = {"__name__": "snippets"}
async def main():
    for number, source in enumerate(open("snippets").read().split("\\0")):
        if "client." in source and "as client" not in source:
            names["client"] = names["stormline"].AsyncClient(trust_env=False)
        code = compile(source, f"snippet {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = eval(code, names)
        if inspect.isawaitable(made):
            await made
        print(number, names.get("answer") and names["answer"].status_code)
        if hasattr(names.get("client"), "aclose"):
            await names["client"].aclose()
asyncio.run(main())
"""
"""Runs snippets in one namespace, one after the other, as a reader would type them."""


def _blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def _lines() -> dict[str, str]:
    """Give the lines to try in a terminal, by the first word after `stormline`."""
    (block,) = _blocks("sh")
    return {line.split()[1]: line for line in block.splitlines() if line.startswith("stormline ")}


@pytest.fixture(name="environ")
def _environ(platform: RunningPlatform) -> dict[str, str]:
    """As after `source .venv/bin/activate`, with the state folder of this platform."""
    return {**platform.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _run(line: str, environ: dict[str, str], folder: Path = ROOT) -> str:
    answer = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, ""), line
    return answer.stdout


@pytest.fixture(name="listener")
def _listener(environ: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """Run the line that holds a connection, until the test ends; give the file with what it has printed."""
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        process = subprocess.Popen(["bash", "-c", f"exec {_lines()['listen']}"], env=environ, stdout=output)
    try:
        _until(lambda: bool(printed.read_text()))
        yield printed
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)


def _until(condition: Callable[[], bool]) -> None:
    clock = SystemClock()
    end = clock.monotonic() + PATIENCE_S
    while not condition():
        assert clock.monotonic() < end
        time.sleep(0.1)


def test_readme_shows_the_commands_that_are_tried_here() -> None:
    assert set(_lines()) == {"get", "call", "listen", "push", "apm", "bundle"}
    assert len(_blocks("python")) == 1


def test_readme_request_and_call_are_answered_and_seen_in_the_apm(
    platform: RunningPlatform, environ: dict[str, str]
) -> None:
    assert _run(_lines()["get"], environ)
    assert "3" in _run(_lines()["call"], environ)
    _until(lambda: "shop.demo" in _run(_lines()["apm"], environ))


def test_readme_push_reaches_the_listener_and_says_so(environ: dict[str, str], listener: Path) -> None:
    assert "ack" in _run(_lines()["push"], environ)
    _until(lambda: "hi" in listener.read_text())


def test_readme_two_lines_reach_the_platform_that_the_exported_bundle_names(
    environ: dict[str, str], tmp_path: Path
) -> None:
    exported = tmp_path / "bundle.json"
    exported.write_text(_run(_lines()["bundle"], environ))
    assert wire_bundle.decode(exported.read_bytes()).app == "demo"
    (snippet,) = _blocks("python")
    script = tmp_path / "app.py"
    script.write_text(
        f"{snippet}\nimport asyncio\n"
        "async def main():\n"
        "    async with client:\n"
        "        answer = await client.get('https://shop.demo/feed')\n"
        "    print(answer.status_code, answer.extensions['stormline'].record.means)\n"
        "asyncio.run(main())\n"
    )
    del environ["STORMLINE_STATE"]
    assert _run("STORMLINE_BUNDLE=bundle.json python app.py", environ, tmp_path) == "200 long\n"


def test_use_with_httpx_snippets_run_one_after_the_other(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text(_run(_lines()["bundle"], environ))
    # Those that wait for pushes and events end only with their app.
    snippets = [block for block in _blocks("python", USE_WITH_HTTPX) if "async for" not in block]
    (tmp_path / "snippets").write_text("\0".join(snippets))
    (tmp_path / "run.py").write_text(RUN_SNIPPETS)
    del environ["STORMLINE_STATE"]
    printed = _run("STORMLINE_BUNDLE=bundle.json python run.py", environ, tmp_path)
    assert printed.splitlines() == [f"{number} 200" for number in range(len(snippets))]
    assert len(snippets) >= 5


def test_readme_make_targets_exist() -> None:
    targets = set(re.findall(r"^ {4}make (\w+)|`make (\w+)`", README, re.MULTILINE))
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"".join(pair) for pair in targets} >= {"up", "test"}
    assert {"".join(pair) for pair in targets} <= set(rules)
