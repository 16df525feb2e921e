"""`stormline netlog`: what the log holds, for people and programs, in clear and sealed."""

import json

import pytest

from stormline.cli import main
from stormline.net.logfile import LogStore
from stormline.telemetry import netlog
from stormline.telemetry.netlog import Failure, Finding, Line, Summary
from stormline.telemetry.timeline import CallRecord
from stormline.wire import jws

NOW_MS = 1_800_000_000_000
CALL = CallRecord(
    call_id="c-1", started_at_ms=NOW_MS, method="GET", host="api.example", path="/x", failure="tcp.failed",
    stages_ms={"connect": 12.0}, total_ms=12.0,
)  # fmt: skip
RECORDS = (
    Failure(
        at_ms=NOW_MS, call=CALL, story=[(1.0, "try direct")], causes=["ConnectError: no", "OSError"],
        network=netlog.Network(kind="wifi", condition="ok"),
    ),
    Summary(at_ms=NOW_MS, since_ms=NOW_MS - 1000, calls=4, total_ms=100.0, slowest_ms=70.0, lost=2),
    Line(at_ms=NOW_MS, level=30, name="WARNING", logger="shop", text="two\nlines \x1b[2J", trace="Traceback"),
    Finding(at_ms=NOW_MS, call_id="c-1", content=b"\x81\xa3dns\xa4dead"),
)  # fmt: skip


def write(folder, **options):
    store = LogStore(folder, client="test/1", **options)
    for record in RECORDS:
        store.write(netlog.encode(record))
    store.close(30.0)


def run(capsys, *arguments):
    assert main.run(["netlog", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_show_tells_people_what_failed_and_why(tmp_path, capsys):
    write(tmp_path)
    said = run(capsys, "show", "--dir", tmp_path)
    for part in (
        "2027-01-15 08:00:00.000 FAILED GET api.example/x: tcp.failed, 12 ms (connect 12)",
        "1.0 ms  try direct",
        "error: ConnectError: no",
        "caused by: OSError",
        "network: wifi, ok",
        "4 calls succeeded, 25 ms on average, 70 ms at most, 2 records lost",
        "WARNING shop: two",
        "Traceback",
        "diagnosis of c-1",
        "{'dns': 'dead'}",
    ):
        assert part in said
    assert "\x1b" not in said


def test_show_json_gives_each_record_and_what_was_not_read(tmp_path, capsys):
    write(tmp_path)
    *found, unread = map(json.loads, run(capsys, "show", "--dir", tmp_path, "--json").splitlines())
    assert [each["type"] for each in found] == ["began", "failure", "summary", "line", "finding"]
    assert [each["number"] for each in found] == [0, 1, 2, 3, 4]
    assert found[1]["call"]["host"] == "api.example"
    assert unread == {"type": "unread", "lost": 0, "damaged_bytes": 0, "malformed": 0, "sealed": 0, "keys": []}


def test_show_failures_and_since_leave_the_rest_out(tmp_path, capsys):
    write(tmp_path)
    found = run(capsys, "show", "--dir", tmp_path, "--json", "--failures").splitlines()
    assert [json.loads(each)["type"] for each in found] == ["failure", "finding", "unread"]
    begins = [json.loads(each)["at_ms"] for each in run(capsys, "show", "--dir", tmp_path, "--json").splitlines()[:-1]]
    assert min(begins) < NOW_MS
    assert run(capsys, "show", "--dir", tmp_path, "--since", "0") != ""


def test_export_is_one_file_that_show_reads(tmp_path, capsys):
    write(tmp_path / "log")
    (tmp_path / "log" / "0000000000001-x-000001.slog").write_bytes(b"garbage")
    told = json.loads(run(capsys, "export", tmp_path / "one", "--dir", tmp_path / "log", "--json"))
    assert told["bytes"] == (tmp_path / "one").stat().st_size
    assert told["damaged_bytes"] == 7
    assert (tmp_path / "one").stat().st_mode & 0o077 == 0
    of_folder = run(capsys, "show", "--dir", tmp_path / "log", "--json").splitlines()
    of_file = run(capsys, "show", "--dir", tmp_path / "one", "--json").splitlines()
    assert of_file[:-1] == of_folder[:-1]


def test_sealed_log_is_shown_with_its_key_alone(tmp_path, capsys):
    key = tmp_path / "key.pem"
    told = json.loads(run(capsys, "key", key, "--json"))
    assert key.stat().st_mode & 0o077 == 0
    write(tmp_path / "log", public=netlog.check_public(jws.b64url_decode(told["key"])))
    closed = run(capsys, "show", "--dir", tmp_path / "log")
    assert closed == f"sealed: 5 records, to the key {told['key_id']}: give it with --key\n"
    run(capsys, "export", tmp_path / "one", "--dir", tmp_path / "log")
    assert "FAILED GET api.example/x" in run(capsys, "show", "--dir", tmp_path / "one", "--key", key)
    assert main.run(["netlog", "key", str(key)]) == 1, "a key is written over"


def test_key_file_that_holds_none_is_an_error(tmp_path, capsys):
    write(tmp_path / "log")
    (tmp_path / "key").write_text("nothing")
    assert main.run(["netlog", "show", "--dir", str(tmp_path / "log"), "--key", str(tmp_path / "key")]) == 1
    assert "not a private key" in capsys.readouterr().err


def test_damage_is_told(tmp_path, capsys):
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert "damaged bytes" in run(capsys, "show", "--dir", tmp_path)


@pytest.mark.parametrize("command", ["show", "export"])
def test_folder_that_is_not_there_is_an_error(tmp_path, command, capsys):
    arguments = ["netlog", command, *([str(tmp_path / "out")] if command == "export" else []), "--dir"]
    assert main.run([*arguments, str(tmp_path / "nothing")]) == 1
    assert "No such file" in capsys.readouterr().err
