"""Classes of paths, and what a server says of its own time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.policy.shape import path_class, server_timing_s


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "GET /"),
        ("", "GET /"),
        ("/users/4711/orders?page=2", "GET /users/*/orders"),
        ("/users/4712/orders", "GET /users/*/orders"),
        ("/a/b/c/d/e", "GET /a/b/c"),
        ("/files/a-very-long-name-of-something.txt", "GET /files/*"),
        ("/v2/items", "GET /*/items"),
    ],
)
def test_path_class_keeps_names_and_hides_identifiers(path, expected):
    assert path_class("GET", path) == expected


@given(st.text(), st.text())
def test_path_class_of_anything_is_short(method, path):
    assert len(path_class(method, path)) <= limits.PATH_CLASS_CHARS_MAX


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("db;dur=53, app;dur=47.2", 0.053),
        ("cache;desc=hit, total;dur=123.4", 0.1234),
        ('app;desc="x";dur="20"', 0.02),
        ("total;dur=5, app;dur=900", 0.005),
        ("miss", None),
        ("app;dur=-3", None),
        ("app;dur=nan", None),
        ("app;dur=1e999", None),
        ("", None),
    ],
)
def test_server_timing_gives_the_total_or_the_longest(value, expected):
    assert server_timing_s(value) == (pytest.approx(expected) if expected is not None else None)


@given(st.text(alphabet='dur=;, 0123456789.totalx"', max_size=60))
def test_server_timing_of_anything_is_a_duration_or_none(value):
    seconds = server_timing_s(value)
    assert seconds is None or 0.0 <= seconds < 1e7
