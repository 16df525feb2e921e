"""Oblivious HTTP byte for byte as RFC 9458 and its chunked form have it in their appendices; and what is refused."""

import dataclasses
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.core import errors, limits_relay
from stormline.wire import bhttp, ohttp

unhex = bytes.fromhex
CONTENT = unhex("00034745540568747470730b6578616d706c652e636f6d012f")
ANSWER = unhex("0140c8")
BOTH = (ohttp.AES_128_GCM, ohttp.CHACHA20)


class Example:
    """RFC 9458 Appendix A."""

    key = ohttp.GatewayKey(
        1,
        X25519PrivateKey.from_private_bytes(unhex("3c168975674b2fa8e465970b79c8dcf09f1c741626480bd4c6162fc5b6a98e1a")),
    )
    config = unhex("01002031e1f05a740102115220e9af918f738674aec95f54db6e04eb705aae8e79815500080001000100010003")
    entropy = unhex("bc51d5e930bda26589890ac7032f70ad12e4ecb37abb1b65b1256c9c48999c73")
    sealed = unhex(
        "010020000100014b28f881333e7c164ffc499ad9796f877f4e1051ee6d31bad19dec96c208b4726374e469135906992e1268c5"
        "94d2a10c695d858c40a026e7965e7d86b83dd440b2c0185204b4d63525"
    )
    secret = unhex("62d87a6ba569ee81014c2641f52bea36")
    nonce = unhex("c789e7151fcba46158ca84b04464910d")
    answer = unhex("c789e7151fcba46158ca84b04464910d86f9013e404feea014e7be4a441f234f857fbd")


class Chunked:
    """Appendix A of draft-ietf-ohai-chunked-ohttp-08: pieces of 12, 13 and 0 bytes; of 1, 2 and 0."""

    key = ohttp.GatewayKey(
        1,
        X25519PrivateKey.from_private_bytes(unhex("1c190d72acdbe4dbc69e680503bb781a932c70a12c8f3754434c67d8640d8698")),
    )
    entropy = unhex("b26d565f3f875ed480d1abced3d665159650c99174fd0b124ac4bda0c64ae324")
    sealed = unhex(
        "010020000100018811eb457e100811c40a0aa71340a1b81d804bb986f736f2f566a7199761a0321c2ad24942d4d692563012f2980c8fef4"
        "37a336b9b2fc938ef77a5834f1d2e33d8fd25577afe31bd1c79d094f76b6250ae6549b473ecd950501311001c6c1395d0ef7c1022297966"
        "307b8a7f"
    )
    answer = unhex(
        "bcce7f4cb921309ba5d62edf1769ef091179bf1cc87fa0e2c02de4546945aa3d1e4812b348b5bd4c594c16b6170b07b475845d1f3200ed9d"
        "8a796617a5b27265f4d73247f639"
    )


def keys(*given):
    return {key.key_id: key for key in given}


def test_request_and_answer_are_the_published_bytes():
    sealed, opens = ohttp.seal_request(Example.key.config, CONTENT, entropy=Example.entropy)
    assert sealed == Example.sealed
    content, seals = ohttp.open_request(keys(Example.key), sealed)
    assert (content, seals.secret) == (CONTENT, Example.secret)
    assert ohttp.seal_response(seals, ANSWER, nonce=Example.nonce) == Example.answer
    assert ohttp.open_response(opens, Example.answer) == ANSWER


def test_chunked_request_and_answer_are_the_published_bytes():
    sealer = ohttp.RequestSealer(Chunked.key.config, entropy=Chunked.entropy)
    sealed = sealer.chunk(CONTENT[:12]) + sealer.chunk(CONTENT[12:]) + sealer.chunk(b"", last=True)
    assert sealed == Chunked.sealed
    opener = ohttp.RequestOpener(keys(Chunked.key))
    assert b"".join(opener.feed(sealed, last=True)) == CONTENT
    answering = ohttp.ResponseSealer(opener.response, nonce=Chunked.answer[:16])
    answer = answering.chunk(ANSWER[:1]) + answering.chunk(ANSWER[1:]) + answering.chunk(b"", last=True)
    assert answer == Chunked.answer
    assert ohttp.ResponseOpener(sealer.response).feed(answer, last=True) == [ANSWER[:1], ANSWER[1:], b""]


def test_key_configuration_is_the_published_one_and_a_list_holds_several():
    config = Example.key.config
    assert config.encode() == Example.config
    assert ohttp.decode_key(Example.config) == config
    other = config._replace(key_id=2)
    assert ohttp.decode_keys(ohttp.encode_keys([config, other])) == (config, other)
    assert ohttp.decode_keys(b"") == ()


def test_keys_that_cannot_be_used_here_are_passed_over():
    p256 = bytes((9, 0, 0x10)) + bytes(65) + bytes((0, 4, 0, 1, 0, 1))
    export_only = Example.key.config._replace(suites=(ohttp.Suite(1, 0xFFFF),))
    listed = len(p256).to_bytes(2, "big") + p256 + ohttp.encode_keys([export_only, Example.key.config])
    assert ohttp.decode_keys(listed) == (Example.key.config,)


def test_first_suite_known_here_is_taken():
    config = Example.key.config
    strange = config._replace(suites=(ohttp.Suite(3, 1), ohttp.CHACHA20, ohttp.AES_128_GCM))
    assert ohttp.choose(strange) == ohttp.CHACHA20
    with pytest.raises(ValueError, match="suite"):
        ohttp.seal_request(config._replace(suites=()), b"", entropy=Example.entropy)


LISTED = (45).to_bytes(2, "big") + Example.config


@pytest.mark.parametrize(
    "data",
    [
        LISTED[:-1],
        LISTED + b"\0",
        (46).to_bytes(2, "big") + Example.config,
        (46).to_bytes(2, "big") + Example.config + b"\0",
        (43).to_bytes(2, "big") + Example.config[:35] + b"\0\6" + Example.config[37:43],
        (37).to_bytes(2, "big") + Example.config[:35] + b"\0\0",
        (2).to_bytes(2, "big") + b"\1\0",
        LISTED * (limits_relay.RELAY_KEYS_MAX + 1),
        bytes(limits_relay.RELAY_KEYS_BYTES_MAX + 1),
    ],
)
def test_an_error_anywhere_in_a_list_of_keys_refuses_all_of_it(data):
    with pytest.raises(errors.RemoteProtocolError):
        ohttp.decode_keys(data)


@pytest.mark.parametrize("suite", BOTH)
def test_either_suite_seals_and_opens(suite):
    key = dataclasses.replace(Example.key, suites=(suite,))
    sealed, opens = ohttp.seal_request(key.config, CONTENT, entropy=bytes(range(32)))
    content, seals = ohttp.open_request(keys(key), sealed)
    assert content == CONTENT
    answer = ohttp.seal_response(seals, ANSWER, nonce=bytes(range(32)))
    assert ohttp.open_response(opens, answer) == ANSWER


@pytest.mark.parametrize("at", [0, 2, 4, 6])
def test_request_for_another_key_or_suite_is_told_apart(at):
    """The client then fetches the keys again (RFC 9458 section 5.3)."""
    changed = bytearray(Example.sealed)
    changed[at] ^= 0x40
    with pytest.raises(errors.UnknownKeyError):
        ohttp.open_request(keys(Example.key), bytes(changed))


@pytest.mark.parametrize("at", [7, 38, 39, 60, len(Example.sealed) - 1])
def test_changed_request_is_refused(at):
    changed = bytearray(Example.sealed)
    changed[at] ^= 1
    with pytest.raises(errors.SignatureError):
        ohttp.open_request(keys(Example.key), bytes(changed))


def test_ephemeral_key_of_low_order_is_refused():
    """An all-zero shared secret is everybody's (RFC 9180 section 7.1.4)."""
    with pytest.raises(errors.SignatureError, match="key"):
        ohttp.open_request(keys(Example.key), Example.sealed[:7] + bytes(32) + Example.sealed[39:])


@pytest.mark.parametrize("length", [0, 6, 7, 38])
def test_request_cut_short_is_refused(length):
    with pytest.raises(errors.RemoteProtocolError):
        ohttp.open_request(keys(Example.key), Example.sealed[:length])
    with pytest.raises(errors.RemoteProtocolError):
        ohttp.RequestOpener(keys(Example.key)).feed(Example.sealed[:length], last=True)


def test_answer_to_another_request_or_changed_is_refused():
    _, opens = ohttp.seal_request(Example.key.config, CONTENT, entropy=Example.entropy)
    _, others = ohttp.seal_request(Example.key.config, CONTENT, entropy=bytes(range(32)))
    with pytest.raises(errors.SignatureError):
        ohttp.open_response(others, Example.answer)
    with pytest.raises(errors.SignatureError):
        ohttp.open_response(opens, Example.answer[:-1] + b"\0")
    with pytest.raises(errors.RemoteProtocolError):
        ohttp.open_response(opens, Example.answer[:31])


def test_whole_and_chunked_messages_do_not_pass_for_each_other():
    with pytest.raises(errors.SignatureError):
        ohttp.open_request(keys(Chunked.key), Chunked.sealed)
    opener = ohttp.RequestOpener(keys(Example.key))
    body = b"\0" + Example.sealed[39:]
    with pytest.raises(errors.SignatureError):
        opener.feed(Example.sealed[:39] + body, last=True)


def sealed_chunks():
    sealer = ohttp.RequestSealer(Chunked.key.config, entropy=Chunked.entropy)
    return [sealer.chunk(b"one"), sealer.chunk(b"two"), sealer.chunk(b"three", last=True)]


@pytest.mark.parametrize(
    ("order", "wrong"),
    [
        ((0, 2), errors.SignatureError),
        ((0, 1, 1, 2), errors.SignatureError),
        ((0, 1), errors.RemoteProtocolError),
        ((0,), errors.RemoteProtocolError),
    ],
)
def test_chunks_left_out_repeated_or_without_an_end_are_refused(order, wrong):
    pieces = sealed_chunks()
    opener = ohttp.RequestOpener(keys(Chunked.key))
    with pytest.raises(wrong):
        opener.feed(b"".join(pieces[at] for at in order), last=True)


def test_chunk_of_the_middle_does_not_pass_for_the_last():
    first, second, _ = sealed_chunks()
    opener = ohttp.RequestOpener(keys(Chunked.key))
    with pytest.raises(errors.SignatureError):
        opener.feed(first + b"\0" + second[1:], last=True)


def test_a_chunk_that_is_too_long_is_refused_before_it_came():
    first, _, _ = sealed_chunks()
    opener = ohttp.RequestOpener(keys(Chunked.key))
    with pytest.raises(errors.RemoteProtocolError, match="more than"):
        opener.feed(first + bhttp.varint(limits_relay.RELAY_CHUNK_BYTES_MAX + 17))


def test_what_is_printed_shows_no_secret():
    _, opens = ohttp.seal_request(Example.key.config, CONTENT, entropy=Example.entropy)
    shown = json.dumps([repr(opens), repr(Example.key)])
    assert repr(opens.secret)[2:20] not in shown
    assert "secret" not in shown
