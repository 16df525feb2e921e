"""What the answers to probes mean, and which URL may be asked."""

import re
from pathlib import Path

import pytest

from stormline.core.errors import ConfigError
from stormline.core.values import Address
from stormline.net.probes import CaptiveUrl, dns_question, name_servers, read_captive_answer, read_dns_answer
from stormline.policy.verdict import Finding


def http(status: str, body: bytes = b"", *fields: str) -> bytes:
    head = "".join(f"{field}\r\n" for field in fields)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


API = "Content-Type: application/captive+json"


@pytest.mark.parametrize(
    ("data", "finding"),
    [
        (http("204 No Content"), Finding.ANSWERED),
        (http("200 OK", b"success\n"), Finding.ANSWERED),
        (http("200 OK", b"<HTML><HEAD><TITLE>Success</TITLE></HEAD><BODY>Success</BODY></HTML>"), Finding.ANSWERED),
        (http("200 OK", b"Microsoft Connect Test"), Finding.ANSWERED),
        (http("200 OK", b"NetworkManager is online\n"), Finding.ANSWERED),
        (http("200 OK", b"<html>" + b"Login with success" * 50), Finding.FOREIGN),
        (http("200 OK"), Finding.FOREIGN),
        (http("302 Found", b"", "Location: http://portal.test/"), Finding.FOREIGN),
        (http("511 Network Authentication Required"), Finding.FOREIGN),
        (http("404 Not Found"), Finding.FAILED),
        (http("503 Unwell"), Finding.FAILED),
        (http("200 OK", b'{"captive": true, "user-portal-url": "https://p.test/"}', API), Finding.FOREIGN),
        (http("200 OK", b'{"captive": false}', API), Finding.ANSWERED),
        (http("200 OK", b'{"captive": 1}', API), Finding.UNKNOWN),
        (http("200 OK", b"[" * 4000, API), Finding.UNKNOWN),
        (b"SSH-2.0-x\r\n", Finding.UNKNOWN),
        (b"", Finding.UNKNOWN),
    ],
)
def test_check_answer_means(data: bytes, finding: Finding) -> None:
    assert read_captive_answer(data) is finding


def test_check_url_becomes_a_request() -> None:
    url = CaptiveUrl("http://check.test:8080/generate_204?x=1")
    assert url.address == Address("check.test", 8080)
    assert url.request().startswith(b"GET /generate_204?x=1 HTTP/1.1\r\nHost: check.test:8080\r\n")
    assert CaptiveUrl("http://[2001:db8::1]").request().startswith(b"GET / HTTP/1.1\r\nHost: [2001:db8::1]\r\n")


@pytest.mark.parametrize(
    "url", ["https://check.test/", "check.test", "http://", "http://a:b@c.test/", "http://a.test:99999/", "http://[x/",
            "http://a.test/\r\nX: y", "http://a.test/ b", "http://ä.test/"]
)  # fmt: skip
def test_check_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="captive_url"):
        CaptiveUrl(url)


@pytest.mark.parametrize(
    ("rcode", "finding"), [(0, Finding.ANSWERED), (3, Finding.ANSWERED), (2, Finding.FAILED), (5, Finding.FAILED)]
)
def test_dns_answer_means(rcode: int, finding: Finding) -> None:
    question = dns_question("shop.test", 77)
    assert question.endswith(b"\x04shop\x04test\x00\x00\x01\x00\x01")
    answer = question[:2] + bytes((0x81, 0x80 | rcode)) + question[4:]
    assert read_dns_answer(answer, question) is finding
    assert read_dns_answer(b"\0\0" + answer[2:], question) is Finding.UNKNOWN
    assert read_dns_answer(question, question) is Finding.UNKNOWN


@pytest.mark.parametrize("name", ["", ".", "a..b", "x" * 64, "a." * 200, "\udcff.test"])
def test_what_is_no_name_is_not_asked_for(name: str) -> None:
    assert dns_question(name, 1) == b""


def test_name_servers_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("# x\nsearch a\nnameserver 10.0.0.1\nnameserver ::1 # y\nnameserver here\noptions z\nnameserver\n")
    assert name_servers(path) == (Address("10.0.0.1", 53), Address("::1", 53))
    assert name_servers(tmp_path / "none") == ()
    path.write_text("".join(f"nameserver 10.0.0.{number}\n" for number in range(9)))
    assert len(name_servers(path)) == 3
    assert not re.search("x", str(name_servers(path)))
