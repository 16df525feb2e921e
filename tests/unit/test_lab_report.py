"""The report: whole, valid and safe whatever the results are."""

import html.parser
from typing import Any

import pytest

from stormline.core.errors import ConfigError
from stormline.lab import charts, report, results
from stormline.lab.results import Fault, Outcome, Result, RunKey, Traffic, Trust


def made(
    profile: str = "elevator",
    client: str = "httpx2",
    *,
    seed: int = 1,
    ok: int = 7,
    without: tuple[str, ...] = (),
    trust: Trust | None = None,
) -> Result:
    key = RunKey(profile=profile, client=client, seed=seed, requests=10, duration_s=40.0, without=without)
    found = [Outcome(float(n), 0.1 * (n + 1), "") for n in range(ok)]
    found += [Outcome(20.0, 10.0, "timeout")] * (10 - ok)
    return results.summarise(
        key, found, Traffic(connections=3, bytes_up=10_000, bytes_down=40_000, duplicates=1), trust or Trust(),
        events=[Fault(10.0, "dark uplink=wifi0 mode=drop", 18.0)],
    )  # fmt: skip


class Reader(html.parser.HTMLParser):
    """Collects tags, and whether they close in order."""

    VOID = frozenset({"meta", "br", "line", "path", "circle", "rect", "i"})

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def page(*found: Result) -> str:
    return report.page(found, machine="a machine", when="2026-01-02")


def test_page_is_well_formed_and_loads_nothing() -> None:
    text = page(made(), made(client="stormline"), made(client="stormline", without=("long",)), made("wifi", ok=10))
    seen = read(text)
    assert {"table", "svg", "details", "style"} <= set(seen.seen)
    assert "script" not in seen.seen
    assert [value for name, value in seen.attributes if name in ("src", "href")] == []
    assert "url(" not in text


def test_page_shows_what_was_found() -> None:
    text = page(made(), made("wifi", ok=10))
    assert "70.0" in text
    assert "timeout 3" in text
    assert "a machine" in text
    assert "dark uplink=wifi0 mode=drop, 10.0 to 18.0 s" in text
    assert "No run was in doubt" in text


def test_page_names_runs_in_doubt() -> None:
    text = page(made(trust=Trust(problem="the client ended early")))
    assert "†" in text
    assert "the client ended early" in text


def test_page_escapes_what_it_is_given() -> None:
    text = page(made(profile="<script>x</script>"), made(client='"><img src=x>'))
    assert "<script>" not in text
    assert "<img" not in text


def test_page_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no results"):
        page()


def test_page_run_with_no_success_at_all_is_drawn() -> None:
    assert read(page(made(ok=0))).seen.count("svg") == 2


def test_table_orders_profiles_and_clients_as_they_are_known() -> None:
    table = report.Table([made("wifi", "pycurl"), made("elevator", "stormline"), made("other", "unknown")])
    assert table.profiles == ["wifi", "elevator", "other"]
    assert table.labels == ["stormline", "pycurl", "unknown"]


def test_table_pools_seeds_and_has_a_mean_only_over_all_profiles() -> None:
    table = report.Table([made(ok=10), made(seed=2, ok=5), made("wifi", ok=10), made("wifi", "pycurl", ok=10)])
    cell = table.cell("elevator", "httpx2")
    assert cell is not None
    assert cell.ok_pct == 75
    assert table.mean("httpx2") == (87.5, 87.5)
    assert table.mean("pycurl") is None


@pytest.mark.parametrize(("value", "shown"), [(100, "100"), (99.97, "99.9"), (99.94, "99.9"), (0, "0.0"), (50, "50.0")])
def test_percent_is_100_only_where_nothing_failed(value: float, shown: str) -> None:
    assert report.percent(value) == shown


def test_rows_keep_labels_apart() -> None:
    faults = [Fault(0.0, "a long name of a fault", 1.0), Fault(1.0, "b", 2.0), Fault(30.0, "c", 31.0)]
    assert charts.rows_for(faults, scale=20.0) == [0, 1, 0]
    assert charts.brief("dark uplink=wifi0 mode=drop") == "dark"
    assert charts.brief("a=b") == "a=b"
