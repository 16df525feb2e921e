"""The APM role whole: a real process, the real store, real HTTP."""

import concurrent.futures
import gzip
import math
import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from stormline.core.checks import CheckName, CheckState
from stormline.net.clock import SystemClock
from stormline.telemetry import report
from stormline.telemetry.diagnosis import Check, Diagnosis
from stormline.telemetry.timeline import AttemptRecord

pytestmark = pytest.mark.loopback


@pytest.fixture(name="api")
def _api(shared_apm: Any, make_api: Any) -> Any:
    return make_api(shared_apm.url)


def _host(api: Any, host: str, **query: Any) -> dict[str, Any]:
    [found] = [entry for entry in api.get("/v1/top", **query)["hosts"] if entry["host"] == host]
    return dict(found)


def _error(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_report_acknowledged_is_in_top_at_once(api: Any, make_call: Any) -> None:
    calls = [make_call("fresh.example", total_ms=float(ms)) for ms in range(1, 101)]
    calls += [make_call("fresh.example", ok=False) for _ in range(60)]
    calls += [make_call("fresh.example", status=503, ok_http=False) for _ in range(30)]
    calls += [make_call("fresh.example", ok_parse=False) for _ in range(10)]
    answer = api.report(*calls)
    assert (answer.status_code, answer.json()) == (200, {"stored": 200, "dropped": 0})
    entry = _host(api, "fresh.example", app="demo")
    assert entry["calls"] == 200
    assert entry["success_pct"] == 50.0
    assert entry["network_pct"] == 70.0
    assert entry["http_pct"] == pytest.approx(100 * 110 / 140, abs=0.001)
    assert entry["parse_pct"] == 0.0
    assert entry["failures"] == {"timeout": 60, "http-503": 30, "parse": 10}
    assert 1 <= entry["p50_ms"] <= entry["p95_ms"] <= entry["p99_ms"] <= 100
    assert api.get("/v1/top", app="another")["hosts"] == []
    assert api.get("/v1/top", app="another")["total"]["success_pct"] is None
    assert api.get("/v1/top")["total"]["calls"] >= 200


def test_calls_latest_give_stages_and_attempts_back(api: Any, make_call: Any) -> None:
    first, second = make_call("story.example", path="/first"), make_call("story.example", path="/second")
    api.report(first)
    api.report(second)
    calls = api.get("/v1/calls", host="story.example", limit=5)["calls"]
    assert [call["path"] for call in calls] == ["/second", "/first"]
    call = calls[1]
    assert call["stages_ms"] == first.stages_ms
    assert call["started_at_ms"] == first.started_at_ms
    assert (call["device"], call["user"], call["app"]) == ("device-1", "ann", "demo")
    assert call["ok_parse"] is None
    [attempt] = call["attempts"]
    assert (attempt["means"], attempt["carrier"], attempt["reused"]) == ("long", "sl-tls", True)
    assert len(api.get("/v1/calls", host="story.example", limit=1)["calls"]) == 1


def test_addresses_count_what_is_their_own_fault_and_for_how_many_devices(
    api: Any, make_call: Any, devices: Any
) -> None:
    def attempt(address: str, failure: str, carrier: str = "h1") -> AttemptRecord:
        return AttemptRecord(means="direct", address=address, carrier=carrier, failure=failure)

    for number in range(4):
        ill = "timeout.first_byte" if number < 3 else ""
        tries = [attempt("192.0.2.1:443", ill), attempt("192.0.2.2:443", "cancelled"), attempt("", "tcp.failed")]
        tries += [attempt("192.0.2.3:443", failure, "sl-tls") for failure in ("http.503", "gateway.call-failed")]
        tries += [attempt("192.0.2.4:443", failure) for failure in ("http.503", "client.queue")]
        call = make_call("addresses.example", attempts=tries)
        assert api.report(call, token=devices.token(f"address-{number}", app="addresses")).status_code == 200
    found = {each.pop("address"): each for each in api.get("/v1/addresses", app="addresses")["addresses"]}
    assert found == {
        "192.0.2.1:443": {"tries": 4, "failures": 3, "devices": 4, "failing": 3},
        "192.0.2.2:443": {"tries": 4, "failures": 0, "devices": 4, "failing": 0},
        "192.0.2.3:443": {"tries": 8, "failures": 0, "devices": 4, "failing": 0},
        "192.0.2.4:443": {"tries": 8, "failures": 4, "devices": 4, "failing": 4},
    }
    assert api.get("/v1/addresses", app="another")["addresses"] == []


def test_diagnoses_are_kept_with_their_checks_and_counted_by_verdict(api: Any, devices: Any, make_call: Any) -> None:
    def made(verdict: str, at_s: float = 0.0) -> Diagnosis:
        check = Check(
            name=CheckName.TCP, state=CheckState.BAD, took_s=3.2, detail="silent", data={"address": "192.0.2.1"}
        )
        return Diagnosis(
            url="https://ill.example/cart", host="ill.example", network="wifi", automatic=True,
            started_at=SystemClock().wall() - at_s, took_s=4.5, verdict=verdict, confidence="high", hint="Wait.",
            why="nothing comes back", checks=[check],
        )  # fmt: skip

    first = made("dead_wifi", 3.0)
    answer = api.report(make_call("ill.example"), diagnoses=[first, made("tls_interception", 2.0)])
    assert (answer.status_code, answer.json()) == (200, {"stored": 3, "dropped": 0})
    assert api.report(diagnoses=[first]).json()["stored"] == 1  # sent again, kept once
    assert api.report(diagnoses=[made("dead_wifi", 1.0)], token=devices.token("device-2")).status_code == 200
    told = api.get("/v1/diagnoses", host="ill.example")
    assert told["verdicts"] == [
        {"verdict": "dead_wifi", "times": 2, "devices": 2}, {"verdict": "tls_interception", "times": 1, "devices": 1}
    ]  # fmt: skip
    latest = told["diagnoses"][0]
    assert (latest["device"], latest["verdict"], latest["network"], latest["automatic"]) == (
        "device-2", "dead_wifi", "wifi", True
    )  # fmt: skip
    assert latest["checks"][0]["data"] == {"address": "192.0.2.1"}
    assert latest["took_ms"] == 4500
    assert len(api.get("/v1/diagnoses", host="ill.example", verdict="tls_interception")["diagnoses"]) == 1
    assert len(api.get("/v1/diagnoses", host="ill.example", limit=1)["diagnoses"]) == 1


def test_diagnosis_that_is_no_good_is_left_out_and_the_rest_kept(api: Any, make_call: Any) -> None:
    bad = Diagnosis(
        url="", host="h" * 5000, started_at=0.0, took_s=0.0, verdict="ok", confidence="high", hint="", why=""
    )
    assert api.report(make_call("beside.example"), diagnoses=[bad]).json() == {"stored": 1, "dropped": 1}
    odd = msgspec.msgpack.encode({"calls": [make_call("beside.example")], "diagnoses": [{"url": 7}, "x"]})
    assert api.post(odd).json() == {"stored": 1, "dropped": 2}


def test_series_counts_each_call_once(api: Any, make_call: Any) -> None:
    api.report(*[make_call("series.example") for _ in range(7)], make_call("series.example", ok=False))
    series = api.get("/v1/series", window_s=600, step_s=10)
    line = series["hosts"]["series.example"]
    assert len(line["calls"]) == 60
    assert (sum(line["calls"]), sum(line["successes"])) == (8, 7)
    assert series["start_s"] <= SystemClock().wall() - 590
    assert sum(series["total"]["calls"]) >= 8


def test_report_with_bad_rows_stores_the_good_ones(api: Any, make_call: Any) -> None:
    before = api.get("/v1/stats")["ingest"]
    bad = [
        make_call("bad.example", total_ms=math.nan),
        make_call("bad.example", total_ms=math.inf),
        make_call("bad.example", stages_ms={"tls": -1.0}),
        make_call("bad.example", started_at_ms=-5),
        make_call("bad.example", path="p" * 5000),
        make_call("bad.example", bytes_up=2**64 - 1),
    ]
    answer = api.report(make_call("bad.example"), *bad, make_call("bad.example"), dropped=3)
    assert answer.json() == {"stored": 2, "dropped": 6}
    assert _host(api, "bad.example")["calls"] == 2
    after = api.get("/v1/stats")["ingest"]
    assert sum(after["dropped"].values()) - sum(before["dropped"].values()) == 6
    assert after["lost_by_clients"] - before["lost_by_clients"] == 3


def test_report_with_a_malformed_record_stores_the_others(api: Any, make_call: Any) -> None:
    good = msgspec.to_builtins(make_call("mixed.example"))
    body = msgspec.msgpack.encode({"calls": [good, {"host": 5}, {**good, "call_id": "z", "status": "high"}, None]})
    assert api.post(body).json() == {"stored": 1, "dropped": 3}
    assert _host(api, "mixed.example")["calls"] == 1


def test_report_with_a_wrong_clock_is_kept_and_flagged(api: Any, make_call: Any) -> None:
    api.report(make_call("clock.example", started_at_ms=1_000_000))
    [call] = api.get("/v1/calls", host="clock.example")["calls"]
    assert call["clock_off"] is True
    assert call["started_at_ms"] == call["received_at_ms"]


def test_report_sent_twice_counts_once(api: Any, make_call: Any) -> None:
    call = make_call("twice.example")
    assert api.report(call, call).json()["stored"] == 2
    assert api.report(call).json()["stored"] == 1
    assert _host(api, "twice.example")["calls"] == 1


def test_report_compressed_is_understood_and_bounded(api: Any, make_call: Any) -> None:
    body = report.encode(report.Report(calls=[make_call("gzip.example")]))
    assert api.post(gzip.compress(body), content_encoding="gzip").json()["stored"] == 1
    bomb = gzip.compress(b"\0" * 50_000_000)
    assert len(bomb) < report.BATCH_BYTES_MAX
    assert _error(api.post(bomb, content_encoding="gzip")) == (413, "call-too-large")
    assert _error(api.post(gzip.compress(body)[:-4], content_encoding="gzip")) == (400, "call-bad-request")
    assert _error(api.post(body, content_encoding="gzip")) == (400, "call-bad-request")
    assert api.post(body, content_encoding="br").status_code == 415


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 300_000,
        b"\x81\xa1z" + b"\x91" * 300_000,
        msgspec.msgpack.encode({"version": 9}),
        msgspec.msgpack.encode({"calls": [None] * 501}),
        msgspec.msgpack.encode([1, 2]),
    ],
)
def test_report_malformed_is_refused(api: Any, body: bytes) -> None:
    assert _error(api.post(body)) == (400, "call-bad-request")


def test_report_too_large_is_refused(api: Any) -> None:
    assert _error(api.post(b"x" * (report.BATCH_BYTES_MAX + 1))) == (413, "call-too-large")


def test_report_too_large_in_chunks_is_refused(api: Any) -> None:
    answer = api.client.post(
        "/v1/report",
        content=iter([b"x" * 65536] * 17),
        headers={"authorization": f"Bearer {api.devices.token()}", "content-type": report.MEDIA_TYPE},
    )
    assert _error(answer) == (413, "call-too-large")


def test_report_without_a_good_token_is_refused(api: Any, devices: Any) -> None:
    assert _error(api.post(b"", devices.token(life_s=-1))) == (401, "token-expired")
    assert _error(api.post(b"", devices.token(kid="other"))) == (401, "token-key-unknown")
    assert _error(api.post(b"", "no.such.token")) == (401, "token-invalid")
    missing = api.client.post("/v1/report", content=b"")
    assert _error(missing) == (401, "token-missing")
    assert missing.headers["www-authenticate"].startswith("Bearer")


def test_admin_api_without_the_key_is_refused(api: Any, devices: Any) -> None:
    for path in ("/v1/top", "/v1/series", "/v1/calls", "/v1/addresses", "/v1/stats"):
        assert _error(api.client.get(path)) == (401, "token-missing")
        assert _error(api.admin(path, key="wrong")) == (401, "token-invalid")
        assert _error(api.admin(path, key=devices.token())) == (401, "token-invalid")


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/v1/top", {"window_s": "0"}),
        ("/v1/top", {"window_s": "nan"}),
        ("/v1/top", {"window_s": "9" * 30}),
        ("/v1/top", {"app": "a" * 300}),
        ("/v1/calls", {"limit": "501"}),
        ("/v1/series", {"window_s": "3600", "step_s": "1"}),
    ],
)
def test_question_with_bad_numbers_is_refused(api: Any, path: str, query: dict[str, str]) -> None:
    assert _error(api.admin(path, **query)) == (400, "call-bad-request")


def test_question_with_quotes_is_a_value_not_sql(api: Any) -> None:
    assert api.get("/v1/top", app="' OR 1=1 --")["hosts"] == []
    assert api.get("/v1/calls", host="\\' OR '1'='1")["calls"] == []


@pytest.mark.parametrize(
    "host", ["tab\there", "quote'\\", "line\nline", "ünïcode.example", "nul\0", "{x:String}", "%s ?"]
)
def test_host_with_odd_characters_is_kept_and_found(api: Any, make_call: Any, host: str) -> None:
    api.report(make_call(host))
    [call] = api.get("/v1/calls", host=host)["calls"]
    assert call["host"] == host
    assert _host(api, host)["calls"] == 1


def test_unknown_endpoint_answers_json(api: Any) -> None:
    assert api.client.get("/nothing").json()["error"]["message"]
    assert api.client.get("/v1/report").status_code == 405
    assert api.client.get("/healthz").json() == {"ok": True, "closes": {}}


def test_killed_apm_has_every_acknowledged_row_after_restart(
    start_role: Any, apm_spec: Any, make_api: Any, make_call: Any, tmp_path: Path
) -> None:
    role = start_role(apm_spec(tmp_path / "store"))
    api = make_api(role.url)
    for _ in range(20):
        calls = [make_call("durable.example") for _ in range(25)]
        assert api.report(*calls).json()["stored"] == 25
    os.kill(role.process.pid, signal.SIGKILL)
    role.process.wait()
    again = make_api(start_role(apm_spec(tmp_path / "store")).url)
    assert _host(again, "durable.example")["calls"] == 500


def test_stopped_apm_ends_cleanly_and_in_time(start_role: Any, apm_spec: Any, make_api: Any, make_call: Any) -> None:
    role = start_role(apm_spec())
    api = make_api(role.url)
    api.report(make_call())  # its kept-alive connection stays open
    assert role.end() == 0  # `end` kills what takes too long
    assert "Traceback" not in role.log_text()


def test_apm_on_a_store_of_a_newer_version_refuses_it(start_role: Any, apm_spec: Any, tmp_path: Path) -> None:
    assert start_role(apm_spec(tmp_path / "store")).end() == 0
    script = (
        "import clickhouse_connect, sys\n"
        "client = clickhouse_connect.get_client(interface='chdb', path=sys.argv[1])\n"
        "client.command('INSERT INTO schema_versions (version) VALUES (99)')\n"
        "client.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=True, timeout=50)
    with pytest.raises(RuntimeError, match=r"StoreError: store: a newer stormline wrote it \(schema 99"):
        start_role(apm_spec(tmp_path / "store"))


def test_apm_brings_an_older_store_to_its_version_and_keeps_what_is_in_it(
    start_role: Any, apm_spec: Any, make_api: Any, make_call: Any, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    role = start_role(apm_spec(store))
    assert make_api(role.url).report(make_call("aged.example", plan_version=3)).status_code == 200
    assert role.end() == 0
    script = (
        "import clickhouse_connect, sys\n"
        "client = clickhouse_connect.get_client(interface='chdb', path=sys.argv[1])\n"
        "client.command('ALTER TABLE calls DROP COLUMN plan_version')\n"
        "client.command('DELETE FROM schema_versions WHERE version > 1')\n"
        "client.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(store)], check=True, timeout=50)
    again = make_api(start_role(apm_spec(store)).url)
    assert again.report(make_call("aged.example", plan_version=2**53 - 1)).status_code == 200
    calls = again.get("/v1/calls", host="aged.example")["calls"]
    assert [call["plan_version"] for call in calls] == [2**53 - 1, 0]


def test_second_apm_on_the_same_store_says_why(start_role: Any, apm_spec: Any, tmp_path: Path) -> None:
    start_role(apm_spec(tmp_path / "store"))
    with pytest.raises(RuntimeError, match=r"StoreError: store: cannot open .* is another process using it"):
        start_role(apm_spec(tmp_path / "store"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"admin_key": "short"}, "admin_key"),
        ({"token_keys": {"k1": "AAAA"}}, "token_keys"),
        ({"store_url": "http://127.0.0.1:1"}, "either a folder"),
    ],
)
def test_apm_with_wrong_settings_says_which(start_role: Any, apm_spec: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        start_role(apm_spec(**more))


def test_apm_with_unreachable_server_says_so_without_the_password(start_role: Any, apm_spec: Any) -> None:
    spec = apm_spec(store_url="http://user:hunter2@127.0.0.1:1/default")
    del spec["store_path"]
    with pytest.raises(RuntimeError, match="StoreError") as caught:
        start_role(spec)
    assert "hunter2" not in str(caught.value)


def test_apm_with_tls_answers_only_verified_clients(
    start_role: Any, apm_spec: Any, make_api: Any, make_call: Any, tmp_path: Path
) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem", "-subj", "/CN=apm",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    role = start_role(apm_spec(tls=[str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")]))
    trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    api = make_api(f"https://{role.address}", verify=trust)
    assert api.report(make_call("tls.example")).json()["stored"] == 1
    with pytest.raises(httpx2.ConnectError):
        make_api(f"https://{role.address}").client.get("/healthz")


def test_records_of_many_devices_at_once_share_commits(
    start_role: Any, apm_spec: Any, make_api: Any, make_call: Any, devices: Any
) -> None:
    role = start_role(apm_spec())
    apis = [make_api(role.url) for _ in range(16)]

    def send(number: int) -> int:
        calls = [make_call("many.example") for _ in range(10)]
        return int(apis[number % 16].report(*calls, token=devices.token(f"device-{number}")).json()["stored"])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(send, range(96))) == 960
    stats = apis[0].get("/v1/stats")["ingest"]
    assert (stats["stored"], stats["reports"], stats["queued"]) == (960, 96, 0)
    assert stats["commits"] <= 96
    assert _host(apis[0], "many.example")["calls"] == 960
