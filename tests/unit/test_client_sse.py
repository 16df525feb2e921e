"""The parser of server-sent events, against the WHATWG HTML standard, section 9.2.6."""

import pytest

from stormline.client.sse import Event, EventParser
from stormline.core import errors, limits
from stormline.core.phase import Phase


def parse(*chunks, **options):
    parser = EventParser(**options)
    return [event for chunk in chunks for event in parser.feed(chunk)]


def message(data, id=""):
    return Event("message", data, id)


class TestStandard:
    """The examples that the standard itself gives."""

    def test_lines_of_data_are_joined(self):
        assert parse(b"data: YHOO\ndata: +2\ndata: 10\n\n") == [message("YHOO\n+2\n10")]

    def test_comment_data_and_ids(self):
        stream = b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n"
        assert parse(stream) == [message("first event", "1"), message("second event"), message(" third event")]

    def test_data_without_a_value_and_data_that_does_not_end(self):
        assert parse(b"data\n\ndata\ndata\n\ndata:") == [message(""), message("\n")]

    def test_one_space_after_the_colon_is_dropped(self):
        assert parse(b"data:test\n\ndata: test\n\n") == [message("test")] * 2


class TestLines:
    @pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
    @pytest.mark.parametrize("cut", [1, 2, 1000])
    def test_every_line_end_is_one(self, end, cut):
        stream = end.join([b"event: a", b"data: 1", b"data: 2", b"", b"data: 3", b"", b""])
        chunks = [stream[at : at + cut] for at in range(0, len(stream), cut)]
        assert parse(*chunks) == [Event("a", "1\n2", ""), message("3")]

    def test_event_that_ends_with_cr_does_not_wait_for_more(self):
        assert parse(b"data: 1\r\r") == [message("1")]

    def test_lf_after_cr_in_the_next_chunk_is_no_line(self):
        assert parse(b"data: 1\r", b"\n", b"data: 2\r", b"", b"\n\r", b"\ndata: 3\n\n") == [
            message("1\n2"),
            message("3"),
        ]

    def test_other_line_separators_of_unicode_are_text(self):
        text = "a\u2028b\x0bc\x0cd\x85e\x1ef"
        assert parse(f"data: {text}\n\n".encode()) == [message(text)]

    def test_characters_cut_by_chunks_are_whole(self):
        stream = "data: grün \U0001f30d\n\n".encode()
        assert parse(*(stream[at : at + 1] for at in range(len(stream)))) == [message("grün \U0001f30d")]

    def test_bytes_that_are_no_utf8_are_replaced(self):
        assert parse(b"data: \xff\xfe\n\n") == [message("\ufffd\ufffd")]

    @pytest.mark.parametrize("cut", [1, 2, 3, 1000])
    def test_byte_order_mark_at_the_start_is_dropped_and_only_there(self, cut):
        stream = b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\n"
        chunks = [stream[at : at + cut] for at in range(0, len(stream), cut)]
        assert parse(*chunks) == [message("1")]


class TestFields:
    def test_type_holds_for_its_event_only(self):
        assert parse(b"event: a\ndata: 1\n\ndata: 2\n\n") == [Event("a", "1", ""), message("2")]

    def test_event_without_data_is_none_and_its_type_is_forgotten(self):
        assert parse(b"event: a\n\ndata: 1\n\n") == [message("1")]

    def test_last_type_counts(self):
        assert parse(b"event: a\nevent: b\ndata: 1\n\n") == [Event("b", "1", "")]

    def test_id_holds_until_another(self):
        stream = b"id: 7\ndata: 1\n\ndata: 2\n\nid: 8\n\ndata: 3\n\nid:\ndata: 4\n\n"
        assert [event.id for event in parse(stream)] == ["7", "7", "8", ""]

    def test_id_with_nul_is_ignored(self):
        assert parse(b"id: 7\nid: 8\x00\ndata: 1\n\n") == [message("1", "7")]

    def test_id_of_an_event_that_did_not_end_is_not_the_last(self):
        parser = EventParser()
        list(parser.feed(b"id: 7\ndata: 1\n\nid: 8\ndata: 2\n"))
        assert parser.last_event_id == "7"

    def test_id_of_an_event_without_data_is_the_last(self):
        parser = EventParser("6")
        assert parser.last_event_id == "6"
        list(parser.feed(b"id: 7\n\n"))
        assert parser.last_event_id == "7"

    def test_names_are_exact_and_unknown_ones_ignored(self):
        assert parse(b"Data: 1\n data: 2\ndata : 3\nfoo: 4\ndata: 5\n\n") == [message("5")]

    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            (b"3000", 3.0),
            (b"0", 0.0),
            (b"-1", None),
            (b" 5", 0.005),
            (b"  5", None),
            (b"5 ", None),
            (b"1.5", None),
            (b"1_0", None),
            ("\u0663".encode(), None),
            (b"", None),
            (b"9" * 5000, limits.RECONNECT_RETRY_AFTER_MAX_S),
        ],
    )
    def test_retry_is_digits_and_bounded(self, value, seconds):
        parser = EventParser()
        assert list(parser.feed(b"retry:" + value + b"\n")) == []
        assert parser.retry_s == seconds


class TestBounds:
    def test_event_up_to_the_limit_is_given(self):
        assert parse(b"data:123\ndata:4\n\ndata:12345\n\n", size_max=15) == [message("123\n4"), message("12345")]

    @pytest.mark.parametrize("stream", [b"data:123\ndata:4567\n", b"data:4567890123", b":45678901234567"])
    @pytest.mark.parametrize("cut", [1, 1000])
    def test_larger_event_or_line_is_an_error_after_those_before(self, stream, cut):
        parser, got = EventParser(size_max=14), []
        stream = b"data: 1\n\n" + stream
        with pytest.raises(errors.ProtocolViolation, match="more than 14 bytes") as caught:  # noqa: PT012
            for at in range(0, len(stream), cut):
                for event in parser.feed(stream[at : at + cut]):
                    got.append(event)  # noqa: PERF402  (what came before the error counts)
        assert got == [message("1")]
        assert caught.value.phase is Phase.PARSE

    def test_comments_without_end_cost_nothing(self):
        parser = EventParser(size_max=100)
        for _ in range(1000):
            assert list(parser.feed(b": still here\nevent: a\nid: 5\n")) == []
        assert list(parser.feed(b"data: 1\n\n")) == [Event("a", "1", "5")]
