"""The network log of a client: failed calls in full, the others as counts, never a secret, never in the way."""

import asyncio
import contextlib
import json
import logging
import subprocess
import sys

import httpx2
import msgspec
import pytest

import stormline
from stormline.client.config import Config
from stormline.core import limits_netlog as limits
from stormline.net import logfile
from stormline.telemetry import netlog
from stormline.telemetry.feedback import decode
from stormline.telemetry.netlog import Failure, Finding, Line, Summary
from stormline.testing.gateway import answering, scripted_gateway
from stormline.testing.origin import plain
from stormline.testing.world import APM_NAME, APP, HOST, bundle_for, rules_for, running_dispatch, wait_until
from stormline.wire.plan import Carrier, Endpoint

pytestmark = pytest.mark.loopback

MARKS = ("MARKUSER", "MARKPASSWORD", "MARKQUERY", "MARKFRAGMENT", "MARKAUTHORIZATION", "MARKCOOKIE", "MARKBODY",
         "MARKANSWER")  # fmt: skip


def read(folder):
    return netlog.read(logfile.read_folder(folder))


def records(folder, kind):
    return [entry.record for entry in read(folder).entries if isinstance(entry.record, kind)]


def config(folder, **change):
    return Config(store=folder, trust_env=False, network_probes=False, **({"deadline_s": 2.0} | change))


async def ask(client, url, **options):
    with contextlib.suppress(httpx2.TransportError):
        await client.get(url, **options)


def url_of(there):
    return f"http://{there.address}"


async def test_call_to_a_dead_server_is_there_in_full_while_the_client_lives(tmp_path):
    async with stormline.AsyncClient(config=config(tmp_path)) as client:
        await ask(client, "http://127.0.0.1:1/orders/7?page=2")
        await wait_until(lambda: records(tmp_path / "netlog", Failure))
        (failure,) = records(tmp_path / "netlog", Failure)
    call = failure.call
    assert (call.method, call.host, call.path) == ("GET", "127.0.0.1", "/orders/7")
    assert (call.failure, call.phase, call.ok_network) == ("tcp.failed", "connect", False)
    assert call.stages_ms["connect"] >= 0
    assert {each.failure for each in call.attempts} == {"tcp.failed"}
    assert any("127.0.0.1:1 failed: connection refused" in line for _, line in failure.story)
    assert [at for at, _ in failure.story] == sorted(at for at, _ in failure.story)
    assert failure.causes == [
        "ConnectError: no connection: 127.0.0.1:1: connection refused",
        "ConnectionRefusedError: [111] Connection refused",
    ]
    assert failure.network.condition
    assert failure.network.kind


async def test_answers_that_are_failures_are_in_full_and_good_ones_are_counted(origin, tmp_path):
    async def answer(request, writer):
        writer.write(plain(b"no", status="404 Not Found") if "missing" in request.target else plain(b"{}"))

    there = await origin(answer)
    async with stormline.AsyncClient(config=config(tmp_path), parse=lambda response: False) as client:
        for _ in range(3):
            await client.get(url_of(there))
    async with stormline.AsyncClient(config=config(tmp_path)) as client:
        for _ in range(5):
            await client.get(url_of(there), extensions={"stormline.business": "home"})
        await client.get(url_of(there) + "/missing")
    found = records(tmp_path / "netlog", Failure)
    assert [(each.call.status, each.call.failure) for each in found] == [(200, "parse")] * 3 + [(404, "http.404")]
    summaries = records(tmp_path / "netlog", Summary)
    assert sum(each.calls for each in summaries) == 5
    assert all(each.total_ms > 0 and each.slowest_ms > 0 and each.since_ms <= each.at_ms for each in summaries)


async def test_count_is_written_after_a_span_also_while_all_goes_well(origin, tmp_path, monkeypatch):
    from stormline.client import netlog as module

    monkeypatch.setattr(module, "_SUMMARY_MS", 0.0)
    there = await origin()
    async with stormline.AsyncClient(config=config(tmp_path)) as client:
        await client.get(url_of(there))
        folder = tmp_path / "netlog"  # made by a thread
        await wait_until(lambda: folder.exists() and records(folder, Summary))


async def test_lines_of_the_app_stand_between_its_calls_and_after_a_close(tmp_path):
    handler = stormline.NetworkLogHandler(tmp_path / "netlog", level=logging.INFO)
    logger = logging.getLogger("app.under.test")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        async with stormline.AsyncClient(config=config(tmp_path)) as client:
            logger.info("before %d", 1)
            logger.debug("unseen")
            await ask(client, "http://127.0.0.1:1/")
            logger.warning("after")
        logger.error("closed")
    finally:
        logger.removeHandler(handler)
        handler.close()
    entries = [e for e in read(tmp_path / "netlog").entries if isinstance(e.record, Line | Failure)]
    assert [getattr(e.record, "text", "call") for e in entries] == ["before 1", "call", "after", "closed"]
    assert len({entry.instance for entry in entries}) == 1
    await wait_until(lambda: not list((tmp_path / "netlog").glob("*.tail")))


async def test_secrets_of_calls_are_nowhere_in_the_files(origin, tmp_path):
    async def answer(request, writer):
        body = b"MARKANSWER"
        writer.write(plain(body, status="500 Oops", set_cookie="id=MARKANSWER"))

    there = await origin(answer)
    headers = {
        "Authorization": "Bearer MARKAUTHORIZATION",
        "Cookie": "sid=MARKCOOKIE",
        "X-Api-Key": "MARKAUTHORIZATION",
    }
    async with stormline.AsyncClient(config=config(tmp_path)) as client:
        for base in (url_of(there), "http://127.0.0.1:1"):
            marked = base.replace("http://", "http://MARKUSER:MARKPASSWORD@") + "/x?q=MARKQUERY#MARKFRAGMENT"
            with contextlib.suppress(httpx2.TransportError):
                await client.post(marked, headers=headers, content=b"MARKBODY")
        logger = logging.getLogger("app.secrets")
        handler = stormline.NetworkLogHandler(tmp_path / "netlog")
        handler.handle(logger.makeRecord("app", 40, "", 0, "%s to %s", (headers, "http://a:MARKPASSWORD@b"), None))
        handler.close()
        await wait_until(lambda: len(records(tmp_path / "netlog", Failure)) == 2)
        raw = b"".join(logfile.read_folder(tmp_path / "netlog"))
    said = json.dumps([netlog.shown(entry.record) for entry in read(tmp_path / "netlog").entries])
    assert "500" in said
    for mark in MARKS:
        assert mark not in said
        assert mark.encode() not in raw


async def test_diagnosis_is_kept_beside_its_call(tmp_path):
    async with stormline.AsyncClient(config=config(tmp_path)) as client:
        log = client._storm.runtime().netlog
        log.record_diagnosis(netlog.Network(kind="wifi"), call_id="c-1")
        log.record_diagnosis(b"\x81\xa1a\x01")
    found = records(tmp_path / "netlog", Finding)
    assert [netlog.shown(each)["content"] for each in found] == [{"kind": "wifi"}, {"a": 1}]
    assert [each.call_id for each in found] == ["c-1", ""]


@pytest.mark.parametrize("change", [{"folder": None}, {"network_log_bytes": 0}])
async def test_no_folder_or_no_bytes_is_no_log(tmp_path, change):
    async with stormline.AsyncClient(config=config(**({"folder": tmp_path / "store"} | change))) as client:
        await ask(client, "http://127.0.0.1:1/")
        assert client._storm.runtime().netlog is None
    assert not (tmp_path / "store" / "netlog").exists()


async def test_folder_that_cannot_be_written_costs_the_calls_nothing(origin, tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    there = await origin()
    async with stormline.AsyncClient(config=config(None, network_log_dir=tmp_path / "file" / "log")) as client:
        for _ in range(3):
            assert (await client.get(url_of(there))).status_code == 200
            await ask(client, "http://127.0.0.1:1/")
    assert len([each for each in caplog.records if "network log" in each.message]) == 1


@pytest.mark.parametrize("change", [{"network_log_key": "nonsense"}, {"network_log_bytes": 5}])
def test_settings_that_cannot_be_are_refused(tmp_path, change):
    with pytest.raises(stormline.errors.ConfigError, match=next(iter(change))):
        config(tmp_path, **change)


# -- feedback ---------------------------------------------------------------------------------------------------------
async def test_feedback_goes_by_the_long_connection_where_the_apm_cannot_be_reached(pki, tmp_path):
    taken = []

    async def handle(end, call):
        taken.append((call, call.body))
        end.reply(call, b"{}")

    gone = Endpoint(host="127.0.0.1", port=1, carrier=Carrier.H1, server_name=APM_NAME)
    async with scripted_gateway(pki.gateway, answering(handle)) as gateway:
        made = rules_for(gateway.address, report=gone)
        hosts = {**made.hosts, APM_NAME: made.hosts[HOST]}
        rules = msgspec.structs.replace(made, hosts=hosts, apps={APP: frozenset(hosts)})
        async with running_dispatch(pki, rules) as (address, _):
            given = config(tmp_path, bundle=bundle_for(pki, address), report=False)
            async with stormline.AsyncClient(config=given) as client:
                said = await client.feedback("over the long connection")
    assert (said.state, said.reason) == ("sent", "")
    ((call, body),) = taken
    assert (call.gate, call.method, call.target) == ("api", "POST", f"https://{APM_NAME}/v1/feedback")
    assert decode(body).text == "over the long connection"
    assert dict(call.headers)["authorization"] == f"Bearer {gateway.ends[0].hello.token}"
    assert dict(call.headers)["idempotency-key"] == said.id


async def test_feedback_without_platform_and_folder_is_refused():
    async with stormline.AsyncClient(config=config(None)) as client:
        with pytest.raises(stormline.errors.ConfigError, match="platform or a folder"):
            await client.feedback("hello")


@pytest.mark.parametrize("text", ["", "x" * (limits.FEEDBACK_TEXT_CHARS_MAX + 1)])
async def test_feedback_of_no_or_too_many_characters_is_refused(tmp_path, text):
    async with stormline.AsyncClient(config=config(tmp_path)) as client:
        with pytest.raises(stormline.errors.ConfigError, match="characters"):
            await client.feedback(text)


async def test_feedback_without_a_platform_is_kept_bounded_the_oldest_go(tmp_path):
    async with stormline.AsyncClient(config=config(tmp_path)) as client:
        said = [await client.feedback(f"number {n}") for n in range(limits.FEEDBACK_KEPT_MAX + 2)]
    assert {each.state for each in said} == {"kept"}
    kept = sorted((tmp_path / "feedback").iterdir())
    assert len(kept) == limits.FEEDBACK_KEPT_MAX
    assert [decode(path.read_bytes()).text for path in kept][-1] == f"number {limits.FEEDBACK_KEPT_MAX + 1}"
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept)


class Apm:
    """An APM that answers as told, the last answer for ever."""

    def __init__(self, *answers):
        self.answers = answers
        self.taken = []

    async def answer(self, request, writer):
        self.taken.append((decode(request.body), request.headers))
        writer.write(self.answers[min(len(self.taken), len(self.answers)) - 1])

    @contextlib.asynccontextmanager
    async def running(self, pki, world):
        import ssl

        from stormline.testing.origin import running_origin

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pki.apm.certificate, pki.apm.key)
        async with running_origin(self.answer, ssl=context) as there:
            endpoint = Endpoint(host="127.0.0.1", port=there.address.port, carrier=Carrier.H1, server_name=APM_NAME)
            yield await world(answering(), report=endpoint)


async def test_refused_feedback_is_kept_no_longer(world, pki, tmp_path):
    apm = Apm(plain(b"{}", status="400 Bad Request"))
    async with apm.running(pki, world) as here, here.client(store=tmp_path) as client:
        said = await client.feedback("no")
        assert (said.state, said.reason) == ("refused", "the APM answered 400")
    assert list((tmp_path / "feedback").iterdir()) == []


@pytest.mark.parametrize("status", ["503 Busy", "429 Too Many Requests", "401 Unauthorized"])
async def test_feedback_that_is_not_taken_now_is_sent_again_with_its_id(world, pki, tmp_path, monkeypatch, status):
    monkeypatch.setattr(limits, "FEEDBACK_RETRY_S", 0.1)
    apm = Apm(plain(b"{}", status=status), plain(b"{}"))
    async with apm.running(pki, world) as here, here.client(store=tmp_path) as client:
        said = await client.feedback("again")
        assert said.state == "kept"
        await wait_until(lambda: not list((tmp_path / "feedback").iterdir()))
    assert [each.id for each, _ in apm.taken] == [said.id, said.id]
    assert {headers["idempotency-key"] for _, headers in apm.taken} == {said.id}


async def test_feedback_without_a_folder_is_kept_in_memory_and_sent(world, pki, monkeypatch):
    monkeypatch.setattr(limits, "FEEDBACK_RETRY_S", 0.1)
    apm = Apm(plain(b"{}", status="503 Busy"), plain(b"{}"))
    async with apm.running(pki, world) as here, here.client() as client:
        said = await client.feedback("memory")
        assert said.state == "kept"
        await wait_until(lambda: len(apm.taken) == 2)


async def test_cancelled_feedback_stays_kept(world, pki, tmp_path):
    async def silent(request, writer):
        await asyncio.sleep(60)

    apm = Apm(plain(b"{}"))
    apm.answer = silent
    async with apm.running(pki, world) as here, here.client(store=tmp_path) as client:
        saying = asyncio.create_task(client.feedback("patience"))
        await wait_until(lambda: list((tmp_path / "feedback").glob("*.feedback")))
        saying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saying
    assert len(list((tmp_path / "feedback").iterdir())) == 1


async def test_feedback_that_cannot_be_written_is_kept_in_memory_with_one_warning(
    world, pki, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(limits, "FEEDBACK_RETRY_S", 0.1)
    (tmp_path / "file").write_text("x")
    apm = Apm(*[plain(b"{}", status="503 Busy")] * 2, plain(b"{}"))
    async with apm.running(pki, world) as here, here.client(network_log_dir=tmp_path / "file" / "log") as client:
        said = [await client.feedback("one"), await client.feedback("two")]
        assert {each.state for each in said} == {"kept"}
        await wait_until(lambda: {each.text for each, _ in apm.taken[2:]} == {"one", "two"})
    assert len([each for each in caplog.records if "feedback cannot be kept" in each.message]) == 1


async def test_kept_feedback_that_is_damaged_is_dropped_and_the_rest_sent(world, pki, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "FEEDBACK_RETRY_S", 0.1)
    (tmp_path / "feedback").mkdir()
    (tmp_path / "feedback" / "0000000000001-garbage.feedback").write_bytes(b"garbage")
    async with stormline.AsyncClient(config=config(tmp_path)) as client:
        said = await client.feedback("whole")
    apm = Apm(plain(b"{}"))
    async with apm.running(pki, world) as here, here.client(store=tmp_path):
        await wait_until(lambda: not list((tmp_path / "feedback").iterdir()))
    assert [each.id for each, _ in apm.taken] == [said.id]


KILLED = """
import sys
from pathlib import Path
import httpx2, stormline
config = stormline.Config(store=Path(sys.argv[1]), deadline_s=0.3, trust_env=False, network_probes=False)
client = stormline.Client(config=config)
for number in range(10**6):
    try:
        client.get(f"http://127.0.0.1:1/call/{number}")
    except httpx2.TransportError:
        print(number, flush=True)
"""


def test_failures_of_a_killed_app_are_all_there_but_those_of_its_last_moment(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        for _ in range(6):
            assert process.stdout.readline()
    finally:
        process.kill()
        told = 6 + len(process.stdout.read().splitlines())
        process.wait()
        process.stdout.close()
    paths = [each.call.path for each in records(tmp_path / "netlog", Failure)]
    assert told - 2 <= len(paths) <= told + 1
    assert paths == [f"/call/{number}" for number in range(len(paths))]
