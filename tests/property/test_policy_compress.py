"""Which answers are compressed, how, by the device's network; and that what is coded is whole on the other side."""

import asyncio

import brotli
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from stormline.appgw import coding
from stormline.core import limits_api as limits
from stormline.policy import compress
from stormline.policy.compress import Coding, Quality

SHELF = coding.Shelf()
BOTH = "gzip, deflate, br, zstd"


def header(**fields):
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return lambda name: named.get(name, "")


def choose(network=Quality.MIDDLING, accept=BOTH, status=200, length=50_000, **fields):
    fields.setdefault("content_type", "application/json")
    return compress.choose(network, accept=accept, status=status, length=length, header=header(**fields))


class TestQuality:
    @pytest.mark.parametrize(
        ("network", "fields", "quality"),
        [
            ("cell", {}, Quality.MIDDLING),
            ("wifi", {}, Quality.GOOD),
            ("unknown", {}, Quality.GOOD),
            ("wifi", {"ect": "2g"}, Quality.WEAK),
            ("wifi", {"ect": "slow-2g"}, Quality.WEAK),
            ("wifi", {"ect": "3g"}, Quality.MIDDLING),
            ("cell", {"ect": "4g"}, Quality.GOOD),
            ("cell", {"ect": "4g", "save_data": "on"}, Quality.WEAK),
            ("cell", {"ect": "5g"}, Quality.MIDDLING),
        ],
    )
    def test_quality_is_what_the_request_says_else_the_kind_of_network(self, network, fields, quality):
        assert compress.quality(network, header(**fields)) is quality


class TestChoose:
    def test_coding_by_quality(self):
        assert [choose(quality) for quality in Quality] == [Coding("br", 5), Coding("zstd", 3), Coding("zstd", 1)]

    @pytest.mark.parametrize(
        ("accept", "name"),
        [
            ("br", "br"),
            ("zstd", "zstd"),
            ("br;q=0, zstd", "zstd"),
            ("BR ; q=0.5", "br"),
            ("br;q=x", None),
            ("gzip", None),
            ("*", None),
            ("", None),
            ("identity, br;q=0.0", None),
        ],
    )
    def test_only_what_the_client_takes(self, accept, name):
        chosen = choose(accept=accept)
        assert (chosen and chosen.name) == name

    @pytest.mark.parametrize(
        "fields",
        [
            {"content_encoding": "gzip"},
            {"content_range": "bytes 0-1/2"},
            {"content_type": "image/png"},
            {"content_type": ""},
            {"content_type": "text/event-stream"},
            {"content_type": "application/octet-stream"},
            {"cache_control": "public, No-Transform"},
            {"status": 206},
            {"status": 204},
            {"status": 304},
            {"length": limits.COMPRESS_BYTES_MIN - 1},
            {"length": limits.COMPRESS_BYTES_MAX + 1},
            {"length": limits.COMPRESS_GOOD_BYTES_MIN - 1, "network": Quality.GOOD},
        ],
    )
    def test_never_what_is_coded_cut_small_or_no_text(self, fields):
        assert choose(**fields) is None

    @pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "application/vnd.x+json", "image/svg+xml"])
    def test_texts_of_all_kinds(self, kind):
        assert choose(content_type=kind, length=None) is not None


@given(
    pieces=st.lists(st.binary(max_size=40_000), max_size=6),
    chosen=st.sampled_from([Coding("br", 5), Coding("br", 1), Coding("zstd", 1), Coding("zstd", 6)]),
    flush=st.booleans(),
)
def test_any_body_is_whole_on_the_other_side(pieces, chosen, flush):
    async def code():
        coder = coding.Coder(chosen, SHELF)
        out = [await coder.feed(piece, flush=flush) for piece in pieces]
        return b"".join([*out, coder.finish()])

    decode = brotli.decompress if chosen.name == "br" else zstd.decompress
    assert decode(asyncio.run(code())) == b"".join(pieces)


def test_flushed_pieces_can_be_read_before_the_end():
    async def first(chosen):
        return await coding.Coder(chosen, SHELF).feed(b"hello" * 100, flush=True)

    assert brotli.Decompressor().process(asyncio.run(first(Coding("br", 4)))) == b"hello" * 100
    assert zstd.ZstdDecompressor().decompress(asyncio.run(first(Coding("zstd", 3)))) == b"hello" * 100


def test_headers_of_a_coded_body():
    headers = (("Content-Length", "5"), ("ETag", '"a"'), ("Vary", "Accept"), ("Accept-Ranges", "bytes"), ("X", "1"))
    assert coding.relabelled(headers, Coding("br", 4)) == (
        ("ETag", 'W/"a"'), ("X", "1"), ("content-encoding", "br"), ("vary", "Accept, accept-encoding"),
    )  # fmt: skip
