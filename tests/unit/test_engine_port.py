"""The port's own rules: what may be sent, which subject matches which pattern, replies that say no."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors, ids, limits, limits_platform
from stormline.engine.port import (
    ERROR_CODE_HEADER,
    ERROR_HEADER,
    Message,
    Reply,
    check_bucket,
    check_key,
    check_message,
    check_subscription,
    error_reply,
    reply_error,
    subject_matches,
)


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a", "a.b", False),
        ("a.b", "a", False),
        ("*", "a", True),
        ("*", "a.b", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        (">", "a", True),
        (">", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "a.b", True),
        ("a.>", "b.b", False),
        ("*.>", "a.b.c", True),
        ("*.>", "a", False),
    ],
)
def test_subject_matches_as_nats_does(pattern, subject, matches):
    assert subject_matches(pattern, subject) is matches


@given(st.text(min_size=1, max_size=30))
def test_names_made_tokens_are_always_sendable_and_never_wild(name):
    try:
        token = ids.subject_token(name)
    except errors.ConfigError:
        return
    check_message(f"u.u1.{token}", b"", None)
    check_subscription(f"u.u1.{token}.>", "")
    check_key(token)
    assert not subject_matches(f"u.{token}", "u.x.y")


@given(st.text(max_size=40))
def test_what_passes_as_subject_holds_no_character_with_a_meaning(text):
    try:
        check_message(text, b"", None)
    except errors.ConfigError:
        return
    assert text.isascii()
    assert text.isprintable()
    assert not set(text) & set(" *>")
    assert all(text.split("."))


@given(st.text(max_size=40))
def test_what_passes_as_header_value_survives_a_line_protocol(text):
    try:
        check_message("a", b"", {"X": text})
    except errors.ConfigError:
        return
    assert text.encode().decode() == text
    assert text.strip() == text
    assert len(text.splitlines()) <= 1


def test_size_counts_headers_and_data():
    check_message("a", bytes(limits_platform.ENGINE_MESSAGE_BYTES_MAX), None)
    with pytest.raises(errors.ConfigError, match="at most"):
        check_message("a", bytes(limits_platform.ENGINE_MESSAGE_BYTES_MAX), {"X": ""})


@pytest.mark.parametrize("queue", ["a b", "*", ">", "a.>", "x" * 2000])
def test_malformed_queue_is_refused(queue):
    with pytest.raises(errors.ConfigError, match="queue"):
        check_subscription("a", queue)


def test_bucket_rules_name_what_is_wrong():
    check_bucket("rules_1-x", None)
    check_bucket("b", limits_platform.ENGINE_KV_TTL_MIN_S)
    with pytest.raises(errors.ConfigError, match=r"bucket 'a\.b'"):
        check_bucket("a.b", None)
    with pytest.raises(errors.ConfigError, match="ttl_s"):
        check_bucket("b", 0.0)


@given(st.integers(min_value=400, max_value=599), st.text(max_size=600))
def test_error_reply_can_always_be_sent_and_read(code, text):
    text = text.encode("utf-8", "replace").decode()
    reply = error_reply(code, text)
    try:
        check_message("a", reply.data, reply.headers)
    except errors.ConfigError:
        pytest.fail(f"not sendable: {reply.headers!r}")
    found = reply_error(Message("a", b"", reply.headers))
    assert found is not None
    assert found[0] == code
    assert len(found[1]) <= limits.REASON_CHARS_MAX


@pytest.mark.parametrize(
    ("code", "read"), [("404", 404), ("", 500), ("-1", 500), ("٤٠٤", 500), ("99999", 500), ("x", 500)]
)
def test_reply_error_reads_any_code(code, read):
    assert reply_error(Message("a", b"", {ERROR_CODE_HEADER: code, ERROR_HEADER: "t" * 999})) == (
        read,
        "t" * limits.REASON_CHARS_MAX,
    )


def test_reply_without_error_header_is_no_error():
    assert reply_error(Message("a", b"", Reply().headers)) is None
