"""Binary and oblivious HTTP with other implementations: `tests/vectors/relay.json`, made by `make_relay.mjs`."""

import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.wire import bhttp, ohttp

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "relay.json").read_text())


def test_messages_written_by_another_are_read():
    request = bhttp.decode_request(bytes.fromhex(VECTORS["written"]["request"]))
    assert (request.method, request.authority, request.path) == (b"PUT", b"www.example.com", b"/hello.txt")
    assert dict(request.headers)[b"x-a"] == b"b"
    assert request.content == b"hi"
    response = bhttp.decode_response(bytes.fromhex(VECTORS["written"]["response"]))
    assert (response.status, dict(response.headers)[b"x-a"], response.content) == (404, b"b", b"body")


def test_messages_of_ours_were_read_by_another_as_they_are_read_here():
    told, data = VECTORS["read"]["request"], bytes.fromhex(VECTORS["read"]["request"]["data"])
    request = bhttp.decode_request(data)
    assert bhttp.encode_request(request, pad_to=16) == data
    url = b"%s://%s%s" % (request.scheme, request.authority, request.path)
    assert (told["method"].encode(), told["url"].encode(), told["content"].encode()) == (
        request.method,
        url,
        request.content,
    )
    assert told["fields"] == {name.decode(): value.decode() for name, value in request.headers}
    told, data = VECTORS["read"]["response"], bytes.fromhex(VECTORS["read"]["response"]["data"])
    response = bhttp.decode_response(data)
    assert bhttp.encode_response(response) == data
    assert (told["status"], told["content"].encode()) == (response.status, response.content)
    assert told["fields"] == {name.decode(): value.decode() for name, value in response.headers}


def test_a_request_that_another_sealed_is_opened():
    key = ohttp.GatewayKey(1, X25519PrivateKey.from_private_bytes(bytes(range(32))))
    content, _ = ohttp.open_request({1: key}, bytes.fromhex(VECTORS["ohttpy"]))
    request = bhttp.decode_request(content)
    assert (request.method, request.path, request.content) == (b"POST", b"/x", b"payload")
    assert request.headers == ((b"x-b", b"c"),)
