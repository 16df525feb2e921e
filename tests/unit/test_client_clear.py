"""Which requests may go over clear HTTP, and how."""

import pytest

from stormline.client import clear
from stormline.client.rules import ClearHttp
from stormline.outbound.messages import HttpRequest, field_value
from stormline.wire import httpsig

CONSENT = ClearHttp(give_untrusted=True, port=8080)
PLAIN = ((b"Host", b"a.test"), (b"Accept", b"*/*"), (b"User-Agent", b"x"), (b"Accept-Encoding", b"gzip"))


def request(method="GET", target=b"/items?page=2", headers=PLAIN, body=None, scheme="https", port=443):
    return HttpRequest(method, scheme, "a.test", port, target, headers, body)


def test_plain_read_may_go():
    assert clear.may_ask(request()) == ""
    assert clear.may_ask(request(body=b"")) == ""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "QUERY"])
def test_nothing_but_get_goes(method):
    assert clear.may_ask(request(method))


@pytest.mark.parametrize(
    "field",
    [
        (b"Authorization", b"Bearer x"), (b"Cookie", b"a=b"), (b"Proxy-Authorization", b"x"), (b"X-Api-Key", b"x"),
        (b"X-API-KEY", b"x"), (b"apikey", b"x"), (b"X-Auth-Token", b"x"), (b"X-Amz-Security-Token", b"x"),
        (b"X-Session-Id", b"x"), (b"X-CSRF-Token", b"x"), (b"X-Client-Secret", b"x"), (b"X-Signature", b"x"),
        (b"X-Password", b"x"), (b"X-Plain", b"Bearer abc"), (b"X-Plain", b" Basic YTpi"), (b"X-Jwt", b"x"),
        (b"Ocp-Apim-Subscription-Key", b"x"),
    ],
)  # fmt: skip
def test_request_with_a_credential_does_not_go(field):
    assert clear.may_ask(request(headers=(*PLAIN, field)))


@pytest.mark.parametrize(
    "query", [b"token=x", b"a=1&api_key=x", b"Access%5FToken=x", b"sig=x", b"x-session=1", b"key=1", b"PASSWORD="]
)
def test_request_with_a_credential_in_its_query_does_not_go(query):
    assert clear.may_ask(request(target=b"/items?" + query))


def test_request_with_a_body_does_not_go():
    assert clear.may_ask(request(body=b"x"))


def test_request_goes_to_the_same_host_at_the_port_of_the_consent_and_asks_for_a_signature():
    sent = clear.in_clear(request(), CONSENT, "0123")
    assert (sent.scheme, sent.host, sent.port, sent.target) == ("http", "a.test", 8080, b"/items?page=2")
    assert field_value(sent.headers, b"host") is None  # made anew, with its port
    assert httpsig.nonce_of(field_value(sent.headers, b"accept-signature")) == "0123"


def test_request_that_is_for_http_keeps_its_port_and_host_field():
    sent = clear.in_clear(request(scheme="http", port=81), CONSENT, "0123")
    assert sent.port == 81
    assert field_value(sent.headers, b"host") == b"a.test"
