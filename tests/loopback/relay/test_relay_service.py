"""A real relay and gateway on loopback, before a real origin over TLS: what gets through, what not, and who sees it."""

import asyncio
import contextlib
import json
import logging
import ssl
from email.utils import formatdate

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.core import errors, limits_relay
from stormline.net.clock import SystemClock, SystemRng
from stormline.relay import keys, service
from stormline.wire import bhttp, ohttp

pytestmark = pytest.mark.loopback
either = pytest.mark.parametrize("stage", ["together", "apart"], indirect=True)
RNG = SystemRng()
CLOCK = SystemClock()


@either
async def test_a_request_gets_through_and_the_origin_sees_it_as_it_was(stage):
    head = stage.head(b"POST", b"/x?y=1", [(b"authorization", b"Bearer s"), (b"date", formatdate().encode()),
                                           (b"te", b"trailers"), (b"via", b"1.1 liar")])  # fmt: skip
    answer = await stage.ask(head, b"body")
    assert (answer.status, answer.content) == (200, b"hello body")
    (scope,) = stage.origin.seen
    assert (scope["method"], scope["raw_path"], scope["query_string"]) == ("POST", b"/x", b"y=1")
    fields = dict(scope["headers"])
    assert fields[b"host"] == b"a.test:%d" % stage.origin_port
    assert fields[b"authorization"] == b"Bearer s"
    assert not {b"te", b"via", b"forwarded", b"x-forwarded-for", b"user-agent"} & set(fields)
    assert dict(answer.headers)[b"x-mixed"] == b"Case"
    assert not {b"connection", b"x-hop", b"proxy-status", b"transfer-encoding"} & {name for name, _ in answer.headers}


async def test_errors_and_redirects_of_the_origin_come_back_inside_as_they_are(stage):
    none, moved = await stage.ask(stage.head(path=b"/none")), await stage.ask(stage.head(path=b"/moved"))
    assert none.status == 404
    assert moved.status == 302
    assert dict(moved.headers)[b"location"] == b"https://127.0.0.1/secret"
    assert [scope["path"] for scope in stage.origin.seen] == ["/none", "/moved"], "a redirect was followed"


@either
async def test_chunks_come_as_the_origin_sends_them(stage):
    seen = []
    async for events in stage.ask_chunked(stage.head(path=b"/stream")):
        text = b"".join(event.content for event in events if isinstance(event, bhttp.Data))
        if b"piece 0;" in text and not stage.origin.go_on.is_set():
            seen.append(text)
            stage.origin.go_on.set()  # the rest is sent only after the first piece was seen here
    assert seen == [b"piece 0;"]
    assert text == b"piece 0;piece 1;piece 2;hello "
    assert isinstance(events[-1], bhttp.End)


async def test_small_and_large_answers_come_whole_in_chunks(stage):
    small = await stage.told(stage.head())
    assert (small.status, small.content) == (200, b"hello ")
    large = await stage.told(stage.head(path=b"/large"))
    assert len(large.content) == 40 * 50_000 + len(b"hello ")


@either
async def test_a_large_body_goes_through_in_chunks(stage):
    pieces = [bytes([number]) * 8000 for number in range(60)]
    head = stage.head(b"PUT", b"/up", [(b"date", formatdate().encode())])
    answer = await stage.told(head, pieces)
    assert answer.content == b"hello " + b"".join(pieces)


@either
async def test_a_request_that_breaks_off_never_reaches_the_origin_whole(stage):
    head = stage.head(b"PUT", b"/up", [(b"date", formatdate().encode())])
    async for events in stage.ask_chunked(head, [b"half"], breaks_off=lambda: stage.origin.seen):
        told = events
    assert told[0].status == 400
    assert b"maybe-delivered" in dict(told[0].headers)[b"proxy-status"]
    assert stage.origin.bodies == []


async def test_a_request_that_came_at_once_and_is_not_whole_reaches_nobody(stage):
    head = stage.head(b"PUT", b"/up", [(b"date", formatdate().encode())])
    sealer = ohttp.RequestSealer(stage.config, entropy=RNG.token_bytes(32))
    part = sealer.chunk(bhttp.request_head(head) + bhttp.chunk(b"half"))
    headers = {"content-type": ohttp.CHUNKED_REQUEST_TYPE}
    answer = await stage.http.post(stage.relay, content=part, headers=headers)
    assert answer.status_code == 400
    assert stage.origin.seen == []


@either
async def test_an_answer_that_breaks_off_is_not_taken_for_whole(stage):
    got = []

    async def read():
        async for events in stage.ask_chunked(stage.head(path=b"/breaks")):
            got[:] = events
            stage.origin.go_on.set()

    with pytest.raises((errors.RemoteProtocolError, httpx2.RemoteProtocolError)):
        await read()
    assert b"".join(event.content for event in got if isinstance(event, bhttp.Data)) == b"only half"
    assert not any(isinstance(event, bhttp.End) for event in got)
    whole = await stage.ask(stage.head(path=b"/breaks"))
    assert whole.status == 502
    assert ohttp.RELAY_NAME.encode() in dict(whole.headers)[b"proxy-status"]


@pytest.mark.parametrize(
    ("change", "status", "error"),
    [
        ({"authority": b"evil.test"}, 403, b"http_request_denied"),
        ({"authority": b"127.0.0.1"}, 403, b"http_request_denied"),
        ({"authority": b"0x7f.1"}, 400, b"http_request_error"),
        ({"authority": b"[::ffff:127.0.0.1]"}, 403, b"http_request_denied"),
        ({"authority": b"a.test"}, 403, b"http_request_denied"),
        ({"scheme": b"http"}, 403, b"http_request_denied"),
        ({"method": b"TRACE"}, 405, b"http_request_denied"),
        ({"headers": ((b"host", b"evil.test"),)}, 400, b"http_request_error"),
        ({"authority": b"b.test"}, 502, b"destination_unavailable"),
    ],
)
async def test_what_is_not_relayed_is_told_inside_and_reaches_nobody(stage, change, status, error):
    answer = await stage.ask(stage.head()._replace(**change))
    assert answer.status == status
    told = dict(answer.headers)[b"proxy-status"]
    assert told.startswith(b"%s; error=%s" % (ohttp.RELAY_NAME.encode(), error))
    assert b"maybe-delivered" not in told
    assert stage.origin.seen == []


async def test_a_name_that_leads_inside_is_refused(stage):
    """The settings name the host and no address: then only the public internet counts."""
    answer = await stage.ask(stage.head(host=b"localhost"))
    assert (answer.status, stage.origin.seen) == (502, [])
    assert b"error=destination_ip_prohibited" in dict(answer.headers)[b"proxy-status"]


async def test_an_origin_with_the_wrong_certificate_is_never_spoken_to(stage):
    answer = await stage.ask(stage.head(host=b"wrong.test"))
    assert (answer.status, stage.origin.seen) == (502, [])
    assert b"error=tls_certificate_error" in dict(answer.headers)[b"proxy-status"]


async def test_a_repeated_request_that_changes_something_is_refused(stage):
    head = stage.head(b"POST", headers=[(b"date", formatdate().encode())])
    sealed, key = stage.seal(head, b"pay")
    answers = [
        await stage.http.post(stage.relay, content=sealed, headers={"content-type": ohttp.REQUEST_TYPE})
        for _ in range(2)
    ]
    first, second = (bhttp.decode_response(ohttp.open_response(key, answer.content)) for answer in answers)
    assert (first.status, second.status) == (200, 409)
    assert stage.origin.bodies == [b"pay"]


async def test_a_read_may_be_repeated(stage):
    sealed, _ = stage.seal(stage.head())
    for _ in range(2):
        answer = await stage.http.post(stage.relay, content=sealed, headers={"content-type": ohttp.REQUEST_TYPE})
        assert answer.status_code == 200
    assert len(stage.origin.seen) == 2


@pytest.mark.parametrize("headers", [[], [(b"date", formatdate(0).encode())], [(b"date", b"soon")]])
async def test_a_device_with_a_wrong_clock_is_told_the_time(stage, headers):
    answer = await stage.ask(stage.head(b"POST", headers=headers), b"pay")
    assert answer.status == 400
    assert json.loads(answer.content)["type"] == ohttp.DATE_PROBLEM
    told = dict(answer.headers)[b"date"]
    again = await stage.ask(stage.head(b"POST", headers=[(b"date", told)]), b"pay")
    assert again.status == 200


@either
async def test_an_unknown_key_is_told_outside_so_that_the_client_fetches_it(stage):
    other = ohttp.GatewayKey(9, X25519PrivateKey.generate())
    sealed, _ = ohttp.seal_request(other.config, b"", entropy=RNG.token_bytes(32))
    answer = await stage.http.post(stage.relay, content=sealed, headers={"content-type": ohttp.REQUEST_TYPE})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    listed = await stage.http.get(stage.relay)
    assert ohttp.decode_keys(listed.content) == (stage.config,)
    assert listed.headers["content-type"] == ohttp.KEYS_TYPE


@pytest.mark.parametrize(
    ("content", "media", "status"),
    [
        (b"", ohttp.REQUEST_TYPE, 400),
        (b"nonsense" * 20, ohttp.REQUEST_TYPE, 400),
        (b"nonsense" * 20, ohttp.CHUNKED_REQUEST_TYPE, 400),
        (b"", ohttp.CHUNKED_REQUEST_TYPE, 400),
        (b"{}", "application/json", 415),
    ],
)
async def test_what_is_no_sealed_request_is_refused_outside(stage, content, media, status):
    answer = await stage.http.post(stage.relay, content=content, headers={"content-type": media})
    assert answer.status_code == status
    assert stage.origin.seen == []


@pytest.mark.parametrize("media", [ohttp.REQUEST_TYPE, ohttp.CHUNKED_REQUEST_TYPE])
async def test_a_head_that_does_not_come_is_not_waited_for(stage, media, monkeypatch):
    monkeypatch.setattr(limits_relay, "RELAY_HEAD_S", 0.2)
    sealed = ohttp.RequestSealer(stage.config, entropy=RNG.token_bytes(32)).chunk(b"\0" * 50)
    reader, writer = await asyncio.open_connection(*stage.relay.split("/")[2].split(":"))
    with contextlib.closing(writer):
        writer.write(f"POST / HTTP/1.1\r\nhost: relay\r\ncontent-type: {media}\r\ncontent-length: 99\r\n\r\n".encode())
        for piece in (sealed[:30], sealed[30:40]):
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    assert stage.origin.seen == []


async def test_a_request_that_is_too_large_is_refused(stage):
    content = bytes(limits_relay.RELAY_REQUEST_BYTES_MAX + 1)
    answer = await stage.http.post(stage.relay, content=content, headers={"content-type": ohttp.REQUEST_TYPE})
    assert answer.status_code == 413


async def test_the_gateway_is_found_behind_tls_alone(stage):
    found = await stage.http.get(stage.tls + service.GATEWAY_PATH)
    assert ohttp.decode_keys(found.content) == (stage.config,)
    assert (await stage.ask(stage.head(), at=stage.tls + service.GATEWAY_PATH)).status == 200
    assert (await stage.http.get(stage.relay + service.GATEWAY_PATH[1:])).status_code == 404
    assert (await stage.http.get(stage.relay + "healthz")).json() == {"status": "ok", "closes": {}}


async def test_one_line_cannot_take_all(stage):
    answers = await asyncio.gather(
        *(stage.http.get(stage.relay) for _ in range(limits_relay.RELAY_BURST + 60)), return_exceptions=True
    )
    codes = [each.status_code for each in answers if isinstance(each, httpx2.Response)]
    assert codes.count(429) >= 1
    assert codes.count(200) >= limits_relay.RELAY_BURST
    late = next(each for each in answers if isinstance(each, httpx2.Response) and each.status_code == 429)
    assert int(late.headers["retry-after"]) >= 1


async def test_the_log_shows_neither_what_is_asked_nor_keys(stage, caplog):
    with caplog.at_level(logging.DEBUG, logger="stormline"):
        await stage.ask(
            stage.head(b"POST", b"/private-path", [(b"date", formatdate().encode()), (b"cookie", b"secret")])
        )
        await stage.ask(stage.head(host=b"wrong.test", path=b"/private-path"))
    assert "private-path" not in caplog.text
    assert "secret" not in caplog.text


def test_a_key_is_its_owners_alone(tmp_path):
    path = tmp_path / "relay.key"
    key = keys.write_key(path, 3)
    assert path.stat().st_mode & 0o777 == 0o600
    (read,) = keys.read_held(path)
    assert (read.key.config, read.until) == (key.config, None)
    with pytest.raises(errors.ConfigError, match="cannot write"):
        keys.write_key(path, 3)
    path.chmod(0o644)
    with pytest.raises(errors.ConfigError, match="chmod 600"):
        keys.read_held(path)


@pytest.mark.parametrize("text", ["", "7", "7 abc", "x 00", "300 " + "11" * 32, "7 " + "11" * 31,
                                  "7 " + "11" * 32 + " soon", "7 " + "11" * 32 + " 1 2"])  # fmt: skip
def test_what_is_no_key_is_refused_and_not_shown(tmp_path, text):
    path = tmp_path / "relay.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(errors.ConfigError) as caught:
        keys.read_held(path)
    assert "11" * 31 not in str(caught.value)


def test_keys_have_ids_of_their_own(tmp_path):
    keys.write_key(tmp_path / "a", 1)
    keys.write_key(tmp_path / "b", 1)
    for paths in ((), (tmp_path / "a", tmp_path / "b")):
        with pytest.raises(errors.ConfigError, match="id of its own"):
            keys.read_keys(paths, 0)


def ids(held):
    return [each.key.key_id for each in held]


def test_a_new_key_stands_before_the_old_ones_until_their_time_is_over(tmp_path):
    path = tmp_path / "relay.key"
    first = keys.write_key(path, 255)
    made = keys.rotate(path, 1000.0)
    assert ids(made) == [0, 255]
    assert made[1].key.config == first.config
    assert [each.key.config for each in keys.rotate(path, 1000.0)] == [each.key.config for each in made], "gone on with"
    keys.settle(path, 2000.5)
    assert [each.until for each in keys.read_held(path)] == [None, 2000]
    assert [key.key_id for key in keys.read_keys((path,), 1999).held] == [0, 255]
    assert [key.key_id for key in keys.read_keys((path,), 2000).held] == [0]
    assert ids(keys.rotate(path, 1999)) == [1, 0, 255]
    assert [each.until for each in keys.settle(path, 3000)] == [None, 3000, 2000]
    assert ids(keys.rotate(path, 2500)) == [2, 1, 0]
    assert path.stat().st_mode & 0o777 == 0o600


def test_there_are_no_more_keys_than_a_client_reads(tmp_path):
    path = tmp_path / "relay.key"
    keys.write_key(path, 1)
    for _ in range(limits_relay.RELAY_KEYS_MAX - 1):
        keys.rotate(path, 0.0)
        keys.settle(path, 1000.0)
    with pytest.raises(errors.ConfigError, match="wait"):
        keys.rotate(path, 0.0)
    assert len(ohttp.decode_keys(keys.read_keys((path,), 0.0).listed)) == limits_relay.RELAY_KEYS_MAX


async def test_a_changed_file_of_keys_is_taken_up_without_a_start(tmp_path, relaying):
    path = tmp_path / "relay.key"
    old = keys.write_key(path, 1)
    async with relaying(service.RelayConfig(keys=(path,))) as (address,), httpx2.AsyncClient() as http:

        async def listed():
            return [key.key_id for key in ohttp.decode_keys((await http.get(f"http://{address}/")).content)]

        async def listed_is(*wanted):
            async with asyncio.timeout(30):
                while await listed() != list(wanted):  # noqa: ASYNC110 - it is the relay that says it
                    await asyncio.sleep(0.05)

        assert await listed() == [1]
        keys.rotate(path, CLOCK.wall())
        await listed_is(2, 1)
        path.chmod(0o644)  # not to be used: those before stay
        await asyncio.sleep(2 * limits_relay.RELAY_KEYS_LOOK_S)
        assert await listed() == [2, 1]
        path.chmod(0o600)
        keys.settle(path, CLOCK.wall())
        await listed_is(2)
        sealed, _ = ohttp.seal_request(old.config, b"", entropy=RNG.token_bytes(32))
        answer = await http.post(f"http://{address}/", content=sealed, headers={"content-type": ohttp.REQUEST_TYPE})
        assert json.loads(answer.content)["type"] == ohttp.KEY_PROBLEM


def test_ssl_is_verified_by_default(tmp_path):
    keys.write_key(tmp_path / "a", 1)
    made = service.Service(service.RelayConfig(keys=(tmp_path / "a",)), clock=CLOCK, rng=RNG)
    assert made.gateway is not None
    context = made.pool._dialer._context
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
