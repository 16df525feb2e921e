"""Shapes: whatever a caller hands over gives a sound shape or one error that names the extension."""

import math

from hypothesis import given
from hypothesis import strategies as st

from stormline.client.patterns import answer_pattern, request_shape
from stormline.core import errors, limits
from stormline.policy.shape import Pattern

NAMES = ["stormline.pattern", "stormline.hold_s", "stormline.answer_bytes", "stormline.server_cost_s"]
values = st.one_of(
    st.none(),
    st.sampled_from([each.value for each in Pattern]),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=10),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=2),
)
names = st.sampled_from([b"accept", b"Content-Length", b"content-type", b"x", b"Accept", b"content-length"])
headers = st.lists(
    st.tuples(names, st.one_of(st.binary(max_size=30), st.sampled_from([b"text/event-stream", b"12", b"99999999"]))),
    max_size=8,
).map(tuple)


@given(
    st.sampled_from(["GET", "POST", "REPORT"]),
    st.text(max_size=60),
    headers,
    st.one_of(st.none(), st.binary(max_size=100), st.just(object())),
    st.dictionaries(st.sampled_from([*NAMES, "timeout"]), values),
)
def test_any_request_gives_a_sound_shape_or_an_error_that_names_the_extension(method, target, fields, body, told):
    try:
        shape = request_shape(method=method, host="a.test", target=target, headers=fields, body=body, extensions=told)
    except errors.LocalProtocolError as error:
        assert any(name in str(error) for name in NAMES if name in told)
        return
    assert shape.pattern in Pattern
    assert shape.request_bytes >= len(target)
    assert len(shape.path_class) <= limits.PATH_CLASS_CHARS_MAX
    for number, most in (
        (shape.hold_s, limits.CALL_DEADLINE_MAX_S),
        (shape.answer_bytes, limits.ANSWER_BYTES_TOLD_MAX),
        (shape.server_cost_s, limits.SERVER_COST_S_MAX),
    ):
        assert number is None or (math.isfinite(number) and 0 <= number <= most)
    assert shape.hold_s is None or shape.pattern is Pattern.LONG_POLL
    if told.get("stormline.pattern") is not None:
        assert shape.pattern == told["stormline.pattern"]


@given(st.sampled_from(Pattern), headers)
def test_any_answer_gives_a_pattern_and_asked_again_the_same(pattern, fields):
    found = answer_pattern(pattern, fields)
    assert found in Pattern
    assert answer_pattern(found, fields) is found
    assert found in (pattern, Pattern.STREAM, Pattern.DOWNLOAD)
