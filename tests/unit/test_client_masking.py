"""URLs in log lines, and free text, lose what is secret in them, and nothing else."""

import importlib
import logging

import pytest

import stormline
from stormline.client.masking import mask_logger, mask_text, mask_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://a.test/feed", "https://a.test/feed"),
        ("https://a.test", "https://a.test"),
        ("https://user:word@a.test:8443/feed", "https://***@a.test:8443/feed"),
        ("https://word@a.test/", "https://***@a.test/"),
        ("https://us@er:wo@rd@a.test/", "https://***@a.test/"),
        ("https://a.test/p/a%20b?token=t&page=2&page=3", "https://a.test/p/a%20b?token=***&page=***&page=***"),
        ("https://a.test/?token", "https://a.test/?***"),
        ("https://a.test/?a=b=c&&=d", "https://a.test/?a=***&&=***"),
        ("https://a.test?token=t", "https://a.test?token=***"),
        ("https://a.test/a?", "https://a.test/a?"),
        ("https://a.test/@me?mail=x@y.test", "https://a.test/@me?mail=***"),
        ("https://a.test/#access_token=t", "https://a.test/#***"),
        ("https://a.test/?u=https://user:word@b.test/#x", "https://a.test/?u=***#***"),
        ("https://[::1]:8443/a?b=c", "https://[::1]:8443/a?b=***"),
        ("/feed?token=t", "/feed?token=***"),
        ("https://a.test/a\nb?t=\ns", "https://a.test/a\nb?t=***"),
        ("", ""),
    ],
)
def test_masked_url_keeps_place_path_and_names_only(url, shown):
    assert mask_url(url) == shown


@pytest.fixture(name="logger")
def _logger():
    logger = logging.getLogger("test.masking")
    yield logger
    logger.filters.clear()


@pytest.mark.parametrize("module", ["httpx", "httpx2"])
def test_filter_masks_urls_of_either_module_and_leaves_the_rest_of_the_line(module, logger, caplog):
    url = importlib.import_module(module).URL("https://user:word@a.test/feed?token=t")
    logger.addFilter(stormline.MaskUrls())
    logger.warning('HTTP Request: %s %s "%s %d"', "GET", url, "HTTP/2", 200)
    logger.warning("no arguments")
    logger.warning("by name: %(url)s", {"url": "https://a.test/"})
    assert caplog.messages == [
        'HTTP Request: GET https://***@a.test/feed?token=*** "HTTP/2 200"',
        "no arguments",
        "by name: https://a.test/",
    ]
    assert str(url) == "https://user:word@a.test/feed?token=t"


def test_logger_is_masked_once_however_often_it_is_asked_for(logger):
    for _ in range(3):
        mask_logger(logger.name)
    assert len(logger.filters) == 1


@pytest.mark.parametrize(
    "text",
    [
        "shipping: 5 EUR, ping: 12 ms, mapping = {1: 2}",
        "failed in connect: no connection: [2001:db8::1]:443: network is unreachable",
        '  File "/srv/app/handlers/order_processing.py", line 12, in take_order',
        "plan version 17, stale: 3 endpoints",
        "what? really: yes",
        "module stormline.client.executor, function _after_failure_of_a_reused_one",
    ],
)
def test_text_without_credentials_is_left_as_it_is(text):
    assert mask_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://ann:pw@a.example/x?q=1#f ok", "GET https://***@a.example/x?q=***#*** ok"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("{'cookie': 'a=b; c=d'}", "{'cookie': ***"),
        ("password=hunter2, user=ann", "password=***, user=ann"),
        ('"access_token": "abc"', '"access_token": ***'),
        ("pin: 1234", "pin: ***"),
        ("sent with Bearer abcdef1", "sent with Bearer ***"),
        ("key id 0123456789abcdef0123 used", "key id *** used"),
        ("mail of ann@a.example", "mail of ***@a.example"),
        ("one\ntoken=x\nthree", "one\ntoken=***\nthree"),
    ],
)
def test_text_loses_its_credentials(text, shown):
    assert mask_text(text) == shown
