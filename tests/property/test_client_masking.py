"""A credential planted in a line, in any of the usual forms, is not in what is kept of it; nor in the file."""

import string

from hypothesis import given
from hypothesis import strategies as st

from stormline.client.masking import mask_text
from stormline.client.netlog import masked
from stormline.telemetry import netlog
from stormline.telemetry.netlog import Failure, FileWriter
from stormline.telemetry.timeline import CallRecord

SECRETS = st.text(string.ascii_letters + string.digits, min_size=8, max_size=40).map(lambda text: f"Zq9{text}")
WORDS = st.lists(
    st.sampled_from(["failed", "at", "192.0.2.1:443", "no answer,", "(try 2)", "=>", ":", "ünï"]), max_size=6
)
FORMS = st.sampled_from(
    [
        "Authorization: Bearer {}", "authorization: Basic {}", "{{'Authorization': '{}', 'Accept': '*/*'}}",
        "('cookie', 'sid={}; theme=dark')", "Set-Cookie: id={}; Path=/", "Proxy-Authorization: Digest {}",
        "X-Api-Key: {}", "x-auth-token = {}", "bearer {}", "https://ann:{}@a.example/x", "https://a.example/x?q={}",
        "/path?session={}#frag", "https://a.example/#{}", "token={}", "access_token: {}", '"refresh_token": "{}"',
        "password='{}'", "PASSWD={}", "client_secret={};", "api-key={}", "apikey: {}", "session_id={}", "signature={}",
        "ann:{}@a.example", "redis://:{}@db/0",
    ]
)  # fmt: skip


def said(words, form, secret, after):
    return f"{' '.join(words)} {form.format(secret)} {' '.join(after)}"


@given(WORDS, FORMS, SECRETS, WORDS)
def test_planted_secret_is_not_in_a_masked_text(words, form, secret, after):
    assert secret not in mask_text(said(words, form, secret, after))


@given(WORDS, FORMS, SECRETS, WORDS)
def test_planted_secret_is_neither_in_the_bytes_nor_in_what_is_read_of_a_failure(words, form, secret, after):
    line = said(words, form, secret, after)
    call = CallRecord(call_id="c", started_at_ms=1, method="GET", host="h", path="/x")
    failure = masked(Failure(at_ms=1, call=call, story=[(0.0, line)], causes=[line, line]))
    writer = FileWriter(b"instance", 1)
    data = writer.header + writer.record(netlog.encode(failure), 0)
    assert secret.encode() not in data
    (entry,) = netlog.read([data]).entries
    assert secret not in str(netlog.shown(entry.record))


@given(st.text(max_size=300))
def test_masking_is_total_and_what_is_masked_stays_so(text):
    once = mask_text(text)
    assert mask_text(once).count("\n") == once.count("\n") == text.count("\n")


@given(WORDS)
def test_lines_without_credentials_stay_as_they_are(words):
    assert mask_text(" ".join(words)) == " ".join(words)
