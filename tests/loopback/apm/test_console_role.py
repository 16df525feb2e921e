"""The console: a real process before a real APM, asked by HTTP and shown in a real browser."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytestmark = pytest.mark.loopback

ADMIN_KEY = "admin-key-of-the-tests"
ACCESS_KEY = "access-key-of-the-tests"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


@pytest.fixture(name="start_console")
def _start_console(start_role: Any) -> Callable[..., Any]:
    def start(apm_url: str, **more: Any) -> Any:
        return start_role(
            {"role": "console", "apm_url": apm_url, "admin_key": ADMIN_KEY, "access_key": ACCESS_KEY, **more}
        )

    return start


@pytest.fixture(name="browse")
def _browse() -> Iterator[Callable[[str], httpx2.Client]]:
    clients: list[httpx2.Client] = []

    def browse(url: str) -> httpx2.Client:
        clients.append(httpx2.Client(base_url=url, trust_env=False, timeout=20))
        return clients[-1]

    yield browse
    for client in clients:
        client.close()


def _signed_in(client: httpx2.Client) -> httpx2.Client:
    answer = client.get("/", params={"key": ACCESS_KEY})
    assert answer.status_code == 200
    assert "url=/" in answer.text
    return client


def test_console_without_the_cookie_shows_nothing(start_console: Any, shared_apm: Any, browse: Any) -> None:
    client = browse(start_console(shared_apm.url).url)
    for path in ("/", "/app.js", "/style.css", "/api/overview", "/api/calls", "/nothing", "/?key=wrong"):
        answer = client.get(path)
        assert answer.status_code == 401, path
        assert "set-cookie" not in answer.headers
        assert ADMIN_KEY not in answer.text


def test_console_opened_by_its_link_serves_the_page_strictly(start_console: Any, shared_apm: Any, browse: Any) -> None:
    client = browse(start_console(shared_apm.url).url)
    _signed_in(client)
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|https?://", page.text)
    for path in ("/app.js", "/style.css", "/icon.svg"):
        assert client.get(path).status_code == 200
    assert ADMIN_KEY not in page.text + client.get("/app.js").text
    assert client.get("/nothing").status_code == 404
    assert client.post("/api/overview").status_code == 405


def test_console_asked_by_another_name_is_refused(start_console: Any, shared_apm: Any, browse: Any) -> None:
    client = _signed_in(browse(start_console(shared_apm.url, host_names=["ops.example"]).url))
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/", params={"key": ACCESS_KEY}, headers={"host": "evil.example"}).status_code == 421
    assert client.get("/", headers={"host": "ops.example"}).status_code == 200


def test_overview_gives_what_the_apm_knows(
    start_console: Any, shared_apm: Any, browse: Any, make_api: Any, make_call: Any
) -> None:
    make_api(shared_apm.url).report(make_call("seen.example"), make_call("seen.example", ok=False))
    client = _signed_in(browse(start_console(shared_apm.url).url))
    answer = client.get("/api/overview", params={"window_s": 300}).json()
    assert answer["state"] == "up"
    [entry] = [entry for entry in answer["top"]["hosts"] if entry["host"] == "seen.example"]
    assert (entry["calls"], entry["success_pct"]) == (2, 50.0)
    assert sum(answer["series"]["hosts"]["seen.example"]["calls"]) == 2
    calls = client.get("/api/calls", params={"window_s": 300, "host": "seen.example"}).json()
    assert {call["kind"] for call in calls["latest"]["calls"]} == {"", "timeout"}
    assert client.get("/api/overview", params={"window_s": 7}).status_code == 400
    assert client.get("/api/calls", params={"host": "h" * 300}).status_code == 400


def test_overview_without_an_apm_says_away_and_why(
    start_console: Any, shared_apm: Any, start_role: Any, apm_spec: Any, browse: Any
) -> None:
    apm = start_role(apm_spec())
    client = _signed_in(browse(start_console(apm.url).url))
    assert client.get("/api/overview").json()["state"] == "up"
    apm.end()
    answer = {"state": "up"}
    while answer["state"] == "up":  # an answer may be reused for a second
        answer = client.get("/api/overview").json()
    assert answer == {"state": "away", "reason": "nobody answers at its address"}
    wrong = _signed_in(browse(start_console(shared_apm.url, admin_key="not the admin key").url))
    assert wrong.get("/api/overview").json() == {"state": "away", "reason": "it refuses this console's admin key"}
    assert wrong.get("/api/calls").json()["state"] == "away"


def test_stopped_console_ends_cleanly(start_console: Any, shared_apm: Any, browse: Any) -> None:
    console = start_console(shared_apm.url)
    _signed_in(browse(console.url)).get("/api/overview")
    assert console.end() == 0
    assert ACCESS_KEY not in console.log_text()
    assert "Traceback" not in console.log_text()


@pytest.mark.parametrize(
    ("more", "message"), [({"access_key": "short"}, "access_key"), ({"apm_ca": "/no/such/ca.pem"}, "apm_ca")]
)
def test_console_with_wrong_settings_says_which(start_console: Any, more: dict[str, str], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"ConfigError: console {message}"):
        start_console("http://127.0.0.1:1", **more)


def _page(url: str, profile: Path, view: str = "") -> tuple[str, str]:
    """The page's DOM after some of its seconds, and what the browser said about it."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update",
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={profile}",
         "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", f"{url}/?key={ACCESS_KEY}{view}"],
        capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def _state(dom: str) -> str:
    found = re.search(r'<body[^>]* data-state="(\w+)"', dom)
    assert found is not None, dom[:500]
    return found[1]


@needs_browser
def test_page_with_calls_shows_hosts_rates_and_times(
    start_console: Any, start_role: Any, apm_spec: Any, make_api: Any, make_call: Any, tmp_path: Path
) -> None:
    apm = start_role(apm_spec())
    evil = "<img src=x onerror=alert(1)>"
    api = make_api(apm.url)
    api.report(*[make_call("shop.example") for _ in range(500)])
    api.report(*[make_call("shop.example") for _ in range(499)], make_call("shop.example", ok=False))
    api.report(make_call(evil, ok=False, failure="<b>tls</b>"))
    dom, said = _page(start_console(apm.url).url, tmp_path)
    assert _state(dom) == "live"
    assert "2 hosts, busiest first" in dom
    assert "99.90 %" in dom  # the host; all hosts together are 99.8
    assert "shop.example" in dom
    assert "43 ms" in dom
    assert evil not in dom
    assert "&lt;img src=x" in dom
    assert re.search(r'<path class="line \w*" d="M', dom)
    assert said == ""


@needs_browser
def test_page_with_a_host_open_shows_the_stages_of_its_calls(
    start_console: Any, start_role: Any, apm_spec: Any, make_api: Any, make_call: Any, tmp_path: Path
) -> None:
    apm = start_role(apm_spec())
    make_api(apm.url).report(make_call("open.example", path="/cart"), make_call("other.example", path="/hidden"))
    dom, said = _page(start_console(apm.url).url, tmp_path, "&window_s=3600&host=open.example")
    assert _state(dom) == "live"
    assert "GET /cart" in dom
    assert "/hidden" not in dom
    assert "connect 20 ms" in dom
    assert re.search(r'data-window="3600" aria-pressed="true"', dom)
    assert said == ""


@needs_browser
def test_page_without_calls_says_that_all_is_well_and_nothing_came(
    start_console: Any, start_role: Any, apm_spec: Any, tmp_path: Path
) -> None:
    dom, said = _page(start_console(start_role(apm_spec()).url).url, tmp_path)
    assert _state(dom) == "empty"
    assert "No calls in the last 5 minutes" in dom
    assert said == ""


@needs_browser
def test_page_without_an_apm_says_away(start_console: Any, tmp_path: Path) -> None:
    dom, _ = _page(start_console("http://127.0.0.1:1").url, tmp_path)
    assert _state(dom) == "away"
    assert "The APM does not answer." in dom
    assert "nobody answers at its address" in dom
