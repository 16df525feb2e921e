"""What the bench of the relay asks."""

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.bench import relay, relayed
from stormline.bench.served import Asked
from stormline.net.clock import SystemRng
from stormline.wire import bhttp, ohttp

KEY = ohttp.GatewayKey(1, X25519PrivateKey.generate())


def test_each_sealed_request_has_a_key_of_its_own_and_says_the_same():
    first, second = (relay.Exchange.make(KEY.config, 8443, SystemRng()) for _ in range(2))
    assert first.key.enc != second.key.enc
    opener = ohttp.RequestOpener({1: KEY})
    request = bhttp.decode_request(b"".join(opener.feed(first.sealed, last=True)))
    assert (request.method, request.authority) == (b"GET", f"{relayed.NAME}:8443".encode())
    assert request.headers == relay.FIELDS
    answer = ohttp.ResponseSealer(opener.response, nonce=bytes(32)).chunk(
        bhttp.encode_response(bhttp.Response(200, (), b"items")), last=True
    )
    assert first.opened(answer).content == b"items"


def test_the_peer_is_the_same_request_without_a_seal():
    (request,) = Asked(relayed.PLAIN, (), "", "accept: */*\r\n").requests()
    assert request == b"GET /plain HTTP/1.1\r\nhost: server\r\naccept: */*\r\n\r\n"
