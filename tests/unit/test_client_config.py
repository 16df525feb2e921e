"""What a client can be set to, and what it refuses."""

import pytest

from stormline.client.config import Config, matches
from stormline.core import errors


@pytest.mark.parametrize(
    ("host", "means"),
    [
        ("a.test", True),
        ("A.Test", True),
        ("x.a.test", False),
        ("x.b.test", True),
        ("y.x.B.test", True),
        ("b.test", False),
        ("xb.test", False),
    ],
)
def test_pattern_means_a_name_or_all_below_one(host, means):
    assert matches(host, ("a.test", "*.b.test")) is means


@pytest.mark.parametrize("name", ["prefer_ipv4", "preconnect"])
@pytest.mark.parametrize("value", ["a.test", (1,)])
def test_tuple_of_texts_is_nothing_else(name, value):
    with pytest.raises(errors.ConfigError, match=f"{name}="):
        Config(**{name: value})
