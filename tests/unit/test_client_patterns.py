"""What kind of request it is, from its extensions, its headers, its body and the head of its answer."""

import pytest

from stormline.client.patterns import answer_pattern, request_shape
from stormline.core import errors, limits
from stormline.policy.shape import Pattern, RequestShape

MIB = 1024 * 1024


async def stream():
    yield b""


def shape(method="GET", target="/a/b?c=d", headers=(), body=b"", **extensions):
    told = {f"stormline.{name}": value for name, value in extensions.items()}
    fields = tuple((name.encode(), value.encode()) for name, value in headers)
    return request_shape(
        method=method, host="a.test", target=target, headers=fields, body=body, extensions={"timeout": {}, **told}
    )


class TestRequest:
    def test_plain_get_is_a_call_with_its_class_and_size(self):
        headers = [("host", "a.test"), ("accept", "*/*")]
        assert shape(headers=headers) == RequestShape(
            host="a.test", path_class="GET /a/b", pattern=Pattern.CALL, request_bytes=8 + 14 + 13
        )

    def test_class_has_no_identifiers(self):
        assert shape("POST", "/users/4711/orders?page=2").path_class == "POST /users/*/orders"

    @pytest.mark.parametrize(
        ("accept", "pattern"),
        [
            ("text/event-stream", Pattern.STREAM),
            ("Text/Event-Stream; charset=utf-8", Pattern.STREAM),
            ("text/event-stream, application/json", Pattern.STREAM),
            ("application/json, text/event-stream", Pattern.CALL),
            ("*/*", Pattern.CALL),
            ("", Pattern.CALL),
        ],
    )
    @pytest.mark.parametrize("name", ["accept", "Accept"])
    def test_first_type_that_is_accepted_tells_a_stream(self, name, accept, pattern):
        assert shape(headers=[(name, accept)]).pattern is pattern

    @pytest.mark.parametrize(("size", "pattern"), [(MIB - 1, Pattern.CALL), (MIB, Pattern.UPLOAD)])
    def test_large_body_is_an_upload(self, size, pattern):
        found = shape("POST", body=bytes(size))
        assert found.pattern is pattern
        assert found.request_bytes == 8 + size

    @pytest.mark.parametrize(
        ("length", "pattern", "size"),
        [
            (None, Pattern.UPLOAD, 0),
            ("", Pattern.UPLOAD, 0),
            ("-1", Pattern.UPLOAD, 0),
            ("1e3", Pattern.UPLOAD, 0),
            ("\u0661", Pattern.UPLOAD, 0),
            ("9" * 5000, Pattern.UPLOAD, 0),
            ("1000", Pattern.CALL, 1000),
            (str(MIB), Pattern.UPLOAD, MIB),
        ],
    )
    def test_streamed_body_is_an_upload_unless_a_small_length_is_announced(self, length, pattern, size):
        headers = [] if length is None else [("Content-Length", length)]
        found = shape("PUT", headers=headers, body=stream())
        head = 8 + sum(len(name) + len(value.encode()) + 4 for name, value in headers)
        assert (found.pattern, found.request_bytes) == (pattern, head + size)

    def test_no_body_is_a_call(self):
        assert shape("DELETE", body=None).pattern is Pattern.CALL

    def test_event_stream_with_a_large_body_is_a_stream(self):
        assert shape("POST", headers=[("accept", "text/event-stream")], body=bytes(MIB)).pattern is Pattern.STREAM


class TestTold:
    @pytest.mark.parametrize("pattern", list(Pattern))
    def test_pattern_told_rules(self, pattern):
        found = shape("POST", headers=[("accept", "text/event-stream")], body=bytes(MIB), pattern=pattern.value)
        assert found.pattern is pattern

    def test_pattern_may_be_the_enum_itself(self):
        assert shape(pattern=Pattern.DOWNLOAD).pattern is Pattern.DOWNLOAD

    @pytest.mark.parametrize("value", ["", "Stream", "sse", b"stream", 1, ["stream"], {}, True])
    def test_unknown_pattern_is_refused_with_those_that_are_known(self, value):
        with pytest.raises(errors.LocalProtocolError, match=r"stormline.pattern=.*call, long-poll, stream, upload"):
            shape(pattern=value)

    def test_numbers_are_taken(self):
        found = shape(pattern="long-poll", hold_s=30, answer_bytes=2048, server_cost_s=0.5)
        assert (found.hold_s, found.answer_bytes, found.server_cost_s) == (30, 2048, 0.5)

    def test_extensions_of_none_say_nothing(self):
        assert shape(pattern=None, hold_s=None, answer_bytes=None, server_cost_s=None) == shape()

    def test_hold_alone_makes_a_long_poll(self):
        assert shape(hold_s=25.0).pattern is Pattern.LONG_POLL

    @pytest.mark.parametrize("pattern", ["call", "stream", "upload", "download"])
    def test_hold_of_another_pattern_is_refused(self, pattern):
        with pytest.raises(errors.LocalProtocolError, match="only a long poll"):
            shape(pattern=pattern, hold_s=1)

    @pytest.mark.parametrize(("size", "pattern"), [(MIB - 1, Pattern.CALL), (MIB, Pattern.DOWNLOAD)])
    def test_large_answer_makes_a_download(self, size, pattern):
        assert shape(answer_bytes=size).pattern is pattern

    @pytest.mark.parametrize(
        ("name", "most"),
        [
            ("hold_s", limits.CALL_DEADLINE_MAX_S),
            ("answer_bytes", limits.ANSWER_BYTES_TOLD_MAX),
            ("server_cost_s", limits.SERVER_COST_S_MAX),
        ],
    )
    def test_numbers_out_of_bounds_or_of_no_sense_are_refused_by_name(self, name, most):
        kind = int if name == "answer_bytes" else float
        assert getattr(shape(**{name: kind(most)}), name) == most
        assert getattr(shape(**{name: 0}), name) == 0
        for value in (-1, most * 2, float("nan"), float("inf"), -float("inf"), "5", b"5", True, [5]):
            with pytest.raises(
                errors.LocalProtocolError, match=rf"stormline.{name}=.*expected .* from 0 to {most:.0f}"
            ):
                shape(**{name: value})

    def test_half_a_byte_is_refused(self):
        with pytest.raises(errors.LocalProtocolError, match="whole bytes"):
            shape(answer_bytes=10.5)


class TestAnswer:
    @staticmethod
    def found(pattern, **headers):
        fields = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())
        return answer_pattern(pattern, ((b"date", b"now"), *fields))

    @pytest.mark.parametrize("pattern", list(Pattern))
    @pytest.mark.parametrize(
        "kind", ["text/event-stream", "Text/Event-Stream;charset=utf-8", "multipart/x-mixed-replace; boundary=x"]
    )
    def test_stream_type_makes_any_request_a_stream(self, pattern, kind):
        assert self.found(pattern, Content_Type=kind, content_length=str(MIB)) is Pattern.STREAM
        assert self.found(pattern, content_length=str(MIB), content_type=kind) is Pattern.STREAM

    @pytest.mark.parametrize("pattern", [each for each in Pattern if each is not Pattern.STREAM])
    def test_large_answer_makes_a_download(self, pattern):
        assert self.found(pattern, content_type="image/png", Content_Length=str(MIB)) is Pattern.DOWNLOAD

    @pytest.mark.parametrize("pattern", list(Pattern))
    @pytest.mark.parametrize("length", ["0", str(MIB - 1), "x", "", "-9999999", "9" * 5000])
    def test_small_or_unreadable_length_changes_nothing(self, pattern, length):
        assert self.found(pattern, content_length=length) is pattern

    @pytest.mark.parametrize("pattern", list(Pattern))
    def test_head_that_says_nothing_changes_nothing(self, pattern):
        assert self.found(pattern, content_type="application/json") is pattern

    def test_stream_of_known_length_stays_a_stream(self):
        assert self.found(Pattern.STREAM, content_length=str(9 * MIB)) is Pattern.STREAM
