"""A real browser that runs the tests of a page and says how they went."""

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "browser"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PAGE_S = 45.0
"""A browser's first start on a busy machine, and the tests of a page."""

Ran = list[dict[str, str]]
Actions = Mapping[str, Callable[..., Any]]


class _Talk:
    """What a page may ask for, and what it said in the end."""

    def __init__(self) -> None:
        self.actions: Actions = {}
        self._said = threading.Event()
        self._ran: Ran = []

    def done(self, ran: Ran) -> None:
        self._ran = ran
        self._said.set()

    def wait(self) -> Ran:
        assert self._said.wait(PAGE_S), "the page said nothing"
        return self._ran


class _Pages(SimpleHTTPRequestHandler):
    """Gives the client's files and the vectors, carries out what pages ask for, takes the results."""

    def __init__(self, *args: Any, talk: _Talk, **more: Any) -> None:
        self._talk = talk
        super().__init__(*args, directory=str(CLIENT), **more)

    def translate_path(self, path: str) -> str:
        if path.startswith("/vectors/"):
            return str(ROOT / "tests" / "vectors" / Path(path).name)
        return super().translate_path(path)

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/results":
            self._talk.done(given)
            answer = None
        else:
            answer = self._talk.actions[self.path.removeprefix("/act/")](**given)
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


class Browser:
    """Opens pages of `clients/browser/test`.

    Attributes:
        origin: where its pages come from.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._talk = _Talk()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Pages, talk=self._talk))
        self._serving = threading.Thread(target=self._server.serve_forever)
        self._serving.start()
        self._process: subprocess.Popen[bytes] | None = None
        self.origin = f"http://127.0.0.1:{self._server.server_port}"

    def run(self, page: str, *flags: str, actions: Actions | None = None) -> Ran:
        """Open a page and give the results of its tests; blocks meanwhile.

        Args:
            page: its file.
            flags: further ones of the browser.
            actions: what the page's `act` may call, in another thread.
        """
        assert CHROMIUM is not None
        self._talk.actions = actions or {}
        with (self._folder / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--no-first-run", "--disable-background-networking", "--disable-component-update",
                 "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                 "--enable-logging=stderr", f"--user-data-dir={self._folder / 'profile'}", *flags,
                 f"{self.origin}/test/{page}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        return self._talk.wait()

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
        self._server.shutdown()
        self._serving.join()
        self._server.server_close()


@pytest.fixture(name="browser")
def _browser(tmp_path: Path) -> Iterator[Browser]:
    """Give a browser for one page; where there is none, skip."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    browser = Browser(tmp_path)
    yield browser
    browser.close()
