"""What the verifier of coded bodies takes for whole, and what it does not."""

import contextlib
import gzip
import subprocess
import sys
import tracemalloc
import zlib

import brotli
import pytest
from backports import zstd

from stormline.client.decoding import Verifier, codings_of, verifier_for
from stormline.core import errors, limits
from stormline.core.phase import Phase

TEXT = b"The quick brown fox jumps over the lazy dog. " * 20 + bytes(range(256))


def raw_deflate(data: bytes) -> bytes:
    machine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return machine.compress(data) + machine.flush()


CODERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "deflate raw": raw_deflate,
    "br": brotli.compress,
    "zstd": zstd.compress,
    "zstd with checksum": lambda data: zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}),
    "gzip, br": lambda data: brotli.compress(gzip.compress(data)),
    "br, gzip": lambda data: gzip.compress(brotli.compress(data)),
    "zstd, deflate, gzip": lambda data: gzip.compress(zlib.compress(zstd.compress(data))),
}
NAMES = list(CODERS)


def codings_named(name: str) -> tuple[str, ...]:
    return tuple(name.split(" ")[0].split(",")) if "," not in name else tuple(name.split(", "))


def verify(codings: tuple[str, ...], body: bytes, piece_bytes: int = 1 << 20) -> bytes:
    """Give the content of a body that comes in pieces."""
    verifier = Verifier(codings)
    content = b""
    for at in range(0, len(body), piece_bytes):
        content += b"".join(verifier.decode(body[at : at + piece_bytes]))
    verifier.finish()
    return content


class TestWhole:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
    def test_body_of_any_coding_and_cut_gives_its_content(self, name, piece_bytes):
        assert verify(codings_named(name), CODERS[name](TEXT), piece_bytes) == TEXT

    @pytest.mark.parametrize("name", NAMES)
    def test_coded_nothing_is_whole(self, name):
        assert verify(codings_named(name), CODERS[name](b"")) == b""

    @pytest.mark.parametrize("name", NAMES)
    def test_large_body_gives_its_content_in_small_pieces(self, name):
        content = TEXT * 2000
        verifier = Verifier(codings_named(name))
        pieces = list(verifier.decode(CODERS[name](content)))
        verifier.finish()
        assert b"".join(pieces) == content
        assert max(map(len, pieces)) <= 2 * limits.DECODE_PIECE_BYTES
        assert all(pieces)

    @pytest.mark.parametrize("piece_bytes", [1, 3, 1 << 20])
    def test_all_members_of_a_gzip_body_count(self, piece_bytes):
        body = gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two")
        assert verify(("gzip",), body, piece_bytes) == b"one two"

    @pytest.mark.parametrize("piece_bytes", [1, 3, 1 << 20])
    def test_zeros_after_and_between_gzip_members_are_padding(self, piece_bytes):
        body = gzip.compress(b"one ") + bytes(100) + gzip.compress(b"two") + bytes(1000)
        assert verify(("gzip",), body, piece_bytes) == b"one two"

    @pytest.mark.parametrize("piece_bytes", [1, 3, 1 << 20])
    def test_all_frames_of_a_zstd_body_count(self, piece_bytes):
        skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
        body = zstd.compress(b"one ") + skippable + zstd.compress(b"") + zstd.compress(b"two")
        assert verify(("zstd",), body, piece_bytes) == b"one two"

    @pytest.mark.parametrize("name", NAMES)
    def test_no_byte_at_all_is_whole_where_the_framing_says_so(self, name):
        Verifier(codings_named(name)).finish()

    def test_content_that_is_flushed_comes_before_the_end(self):
        machine = zlib.compressobj(wbits=31)
        verifier = Verifier(("gzip",))
        first = machine.compress(b"data: 1\n\n") + machine.flush(zlib.Z_SYNC_FLUSH)
        assert b"".join(verifier.decode(first)) == b"data: 1\n\n"
        assert b"".join(verifier.decode(machine.compress(b"data: 2\n\n") + machine.flush())) == b"data: 2\n\n"
        verifier.finish()


class TestCutShort:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("fed", ["at once", "byte by byte"])
    def test_every_proper_prefix_is_an_error(self, name, fed):
        body = CODERS[name](TEXT[-300:])
        for length in range(1, len(body)):
            with pytest.raises(errors.DecodeError) as caught:
                verify(codings_named(name), body[:length], 1 << 20 if fed == "at once" else 1)
            assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.DECODE, True), length

    @pytest.mark.parametrize("name", NAMES)
    def test_no_byte_at_all_is_an_error_where_only_the_connection_ended(self, name):
        with pytest.raises(errors.DecodeError, match="no byte"):
            Verifier(codings_named(name), empty_ok=False).finish()

    def test_second_gzip_member_cut_anywhere_is_an_error(self):
        first, second = gzip.compress(b"one"), gzip.compress(b"two")
        verify(("gzip",), first)
        for length in range(1, len(second)):
            with pytest.raises(errors.DecodeError, match="cut short"):
                verify(("gzip",), first + second[:length])

    def test_second_zstd_frame_cut_anywhere_is_an_error(self):
        first, second = zstd.compress(b"one"), zstd.compress(b"two")
        for length in range(1, len(second)):
            with pytest.raises(errors.DecodeError, match="cut short"):
                verify(("zstd",), first + second[:length])

    def test_error_names_coding_and_size(self):
        with pytest.raises(errors.DecodeError, match="gzip data is cut short after 30 bytes"):
            verify(("gzip",), gzip.compress(TEXT)[:30])

    def test_inner_coding_that_ends_too_early_is_an_error(self):
        body = brotli.compress(gzip.compress(TEXT)[:-1])
        with pytest.raises(errors.DecodeError, match="gzip data is cut short"):
            verify(("gzip", "br"), body)


class TestDamaged:
    @pytest.mark.parametrize("name", ["gzip", "deflate", "zstd with checksum"])
    def test_wrong_byte_anywhere_is_an_error_or_changes_nothing(self, name):
        body = CODERS[name](TEXT[:200])
        for at in range(len(body)):
            wrong = body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :]
            with contextlib.suppress(errors.DecodeError):  # gzip's header has fields without meaning: time, system
                assert verify(codings_named(name), wrong) == TEXT[:200]

    def test_wrong_checksum_is_an_error(self):
        body = bytearray(gzip.compress(TEXT))
        body[-8] ^= 1
        with pytest.raises(errors.DecodeError, match="incorrect data check"):
            verify(("gzip",), bytes(body))

    def test_wrong_size_is_an_error(self):
        body = bytearray(gzip.compress(TEXT))
        body[-4] ^= 1
        with pytest.raises(errors.DecodeError, match="incorrect length check"):
            verify(("gzip",), bytes(body))

    @pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
    def test_body_that_is_not_coded_is_an_error(self, coding):
        with pytest.raises(errors.DecodeError):
            verify((coding,), b'{"plain": "json", "and": "not coded at all"}')

    @pytest.mark.parametrize("name", ["deflate", "deflate raw", "br", "zstd", "zstd with checksum"])
    @pytest.mark.parametrize("more", [b"\0", b"x", b"<script>" * 10])
    @pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
    def test_data_after_the_end_is_an_error(self, name, more, piece_bytes):
        with pytest.raises(errors.DecodeError):
            verify(codings_named(name), CODERS[name](TEXT) + more, piece_bytes)

    @pytest.mark.parametrize("more", [b"x", b"\x1fx", b"\r\n", b"<script>" * 10, bytes(9) + b"x"])
    @pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
    def test_bytes_after_gzip_that_begin_no_member_are_left_out_and_counted(self, more, piece_bytes):
        verifier, body = Verifier(("gzip",)), gzip.compress(TEXT) + more
        content = b"".join(
            piece for at in range(0, len(body), piece_bytes) for piece in verifier.decode(body[at : at + piece_bytes])
        )
        verifier.finish()
        assert content == TEXT
        assert verifier.surplus_bytes == len(more.lstrip(b"\0"))

    def test_second_gzip_member_that_is_damaged_is_an_error(self):
        with pytest.raises(errors.DecodeError):
            verify(("gzip",), gzip.compress(TEXT) + b"\x1f\x8bthis is no member")


class TestBounds:
    @pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
    def test_bomb_costs_no_memory(self, coding):
        zeros = 64 * 1024 * 1024
        bomb = CODERS[coding](bytes(zeros))
        verifier = Verifier((coding,))
        tracemalloc.start()
        try:
            size = sum(map(len, verifier.decode(bomb)))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        verifier.finish()
        assert size == zeros
        assert peak < 16 * limits.DECODE_PIECE_BYTES

    def test_bomb_in_a_bomb_costs_no_memory(self):
        zeros = 256 * 1024 * 1024
        machine = zlib.compressobj(wbits=31)
        inner = b"".join(machine.compress(bytes(1 << 20)) for _ in range(zeros >> 20)) + machine.flush()
        bomb = brotli.compress(inner)
        assert len(bomb) < 2000
        verifier = Verifier(("gzip", "br"))
        tracemalloc.start()
        try:
            size = sum(map(len, verifier.decode(bomb)))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        verifier.finish()
        assert size == zeros
        assert peak < 16 * limits.DECODE_PIECE_BYTES

    def test_zstd_window_beyond_8_mib_is_an_error(self):
        options = {zstd.CompressionParameter.window_log: limits.DECODE_WINDOW_LOG_MAX + 1}
        machine = zstd.ZstdCompressor(options=options)
        with pytest.raises(errors.DecodeError, match="memory"):
            verify(("zstd",), machine.compress(TEXT) + machine.flush())

    def test_zstd_window_of_8_mib_is_taken(self):
        machine = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: limits.DECODE_WINDOW_LOG_MAX})
        assert verify(("zstd",), machine.compress(TEXT) + machine.flush()) == TEXT

    def test_more_codings_than_the_limit_are_an_error(self):
        with pytest.raises(errors.DecodeError, match="6 content codings"):
            Verifier(("gzip",) * (limits.CONTENT_CODINGS_MAX + 1)).feed(b"x")

    def test_feed_gives_nothing_and_finds_the_same(self):
        verifier = Verifier(("gzip",))
        verifier.feed(gzip.compress(TEXT)[:-1])
        with pytest.raises(errors.DecodeError):
            verifier.finish()


class TestVerifierFor:
    @staticmethod
    def made(method="GET", status=200, framed=True, **headers):
        fields = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())
        return verifier_for(method, status, fields, codings_of(fields), framed=framed)

    @pytest.mark.parametrize(
        "value", ["gzip", "GZIP", "x-gzip", " br ", "zstd", "identity, gzip", "gzip, br", "gzip,,"]
    )
    def test_known_codings_are_verified(self, value):
        assert self.made(content_encoding=value) is not None

    @pytest.mark.parametrize("value", ["", "identity", "identity, identity", "dcb", "gzip, snappy", "aws-chunked"])
    def test_no_coding_and_unknown_codings_are_not_verified(self, value):
        assert self.made(content_encoding=value) is None

    def test_answer_without_the_header_is_not_verified(self):
        assert self.made(content_type="text/html") is None

    @pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304), ("GET", 206)])
    def test_answer_without_content_or_with_a_part_of_it_is_not_verified(self, method, status):
        assert self.made(method, status, content_encoding="zstd") is None

    @pytest.mark.parametrize("status", [200, 201, 404, 500])
    def test_answers_of_every_other_status_are_verified(self, status):
        assert self.made("POST", status, Content_Encoding="br") is not None

    def test_codings_of_several_lines_are_one_list(self):
        fields = ((b"content-encoding", b"gzip"), (b"Content-Encoding", b"br"))
        verifier = verifier_for("GET", 200, fields, codings_of(fields), framed=True)
        verifier.feed(brotli.compress(gzip.compress(TEXT)))
        verifier.finish()

    @pytest.mark.parametrize(
        ("headers", "framed", "whole"),
        [
            ({}, False, False),
            ({}, True, True),
            ({"Content_Length": "0"}, False, True),
            ({"transfer_encoding": "chunked"}, False, True),
        ],
    )
    def test_empty_body_is_whole_only_where_something_says_that_it_ended(self, headers, framed, whole):
        verifier = self.made(framed=framed, content_encoding="gzip", **headers)
        if whole:
            verifier.finish()
        else:
            with pytest.raises(errors.DecodeError):
                verifier.finish()


def test_decoders_are_not_imported_before_a_body_needs_them():
    code = "import sys, stormline.client.transport; print(sorted({'brotli', 'backports.zstd'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("[]\n", "")
