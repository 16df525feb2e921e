"""Coded bodies: any content in any cut is given back whole; what is missing or more is never taken for whole."""

import gzip
import itertools
import zlib

import brotli
import pytest
from backports import zstd
from hypothesis import assume, given
from hypothesis import strategies as st

from stormline.client.decoding import Verifier
from stormline.core import errors, limits
from stormline.core.phase import Phase


def _raw(data: bytes) -> bytes:
    machine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return machine.compress(data) + machine.flush()


CODERS = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", _raw),
    ("br", brotli.compress),
    ("zstd", zstd.compress),
]
contents = st.one_of(
    st.binary(max_size=2000),
    st.builds(lambda unit, count: unit * count, st.binary(min_size=1, max_size=20), st.integers(0, 20_000)),
)
stacks = st.lists(st.sampled_from(CODERS), min_size=1, max_size=limits.CONTENT_CODINGS_MAX)
cuts = st.lists(st.integers(0, 10_000), max_size=20)


def coded(content, stack):
    for _, coder in stack:
        content = coder(content)
    return tuple(name for name, _ in stack), content


def decode(codings, body, at):
    """Give content and error of a body cut at these places."""
    verifier, content = Verifier(codings), b""
    places = [0, *sorted(place for place in at if place < len(body)), len(body)]
    try:
        for start, end in itertools.pairwise(places):
            for piece in verifier.decode(body[start:end]):
                assert 0 < len(piece) <= 2 * limits.DECODE_PIECE_BYTES
                content += piece
        verifier.finish()
    except errors.DecodeError as error:
        assert error.phase is Phase.DECODE
        return content, error
    return content, None


@given(contents, stacks, cuts)
def test_any_content_in_any_cut_is_given_back(content, stack, at):
    codings, body = coded(content, stack)
    assert decode(codings, body, at) == (content, None)


@given(contents, stacks, cuts, st.data())
def test_any_proper_prefix_is_an_error_and_gives_nothing_false(content, stack, at, data):
    codings, body = coded(content, stack)
    assume(len(body) > 1)
    length = data.draw(st.integers(1, len(body) - 1))
    given_out, error = decode(codings, body[:length], at)
    assert error is not None
    assert content.startswith(given_out)


@given(st.lists(contents, min_size=1, max_size=4), st.sampled_from(["gzip", "zstd"]), cuts)
def test_members_and_frames_are_joined(contents, coding, at):
    coder = gzip.compress if coding == "gzip" else zstd.compress
    assert decode((coding,), b"".join(map(coder, contents)), at) == (b"".join(contents), None)


@given(contents, st.binary(min_size=1, max_size=50), st.sampled_from(CODERS), cuts)
def test_what_follows_the_end_is_never_content(content, more, coder, at):
    # Of zstd and gzip what follows may by chance be a whole frame or member.
    assume(more[:1] not in (b"\x1f", b"\x28", *(bytes([0x50 + n]) for n in range(16))))
    name, compress = coder
    given_out, error = decode((name,), compress(content) + more, at)
    assert content.startswith(given_out)
    assert (error is None) == (name == "gzip")


@given(st.binary(max_size=300), st.lists(st.sampled_from(["gzip", "deflate", "br", "zstd"]), min_size=1), cuts)
def test_any_bytes_give_content_or_a_decode_error_however_cut(body, codings, at):
    whole, error = decode(tuple(codings), body, [])
    again, other = decode(tuple(codings), body, at)
    assert (error is None) == (other is None)
    assert whole == again or error is not None


@pytest.mark.parametrize(("name", "coder"), CODERS)
def test_cut_of_one_byte_each_changes_nothing(name, coder):
    body = coder(b"text " * 500)
    assert decode((name,), body, range(len(body))) == (b"text " * 500, None)
