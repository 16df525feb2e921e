"""Write `protocol.json`: frames of every message for whoever speaks the protocol in another language.

    .venv/bin/python tests/vectors/make.py            write the file
    .venv/bin/python tests/vectors/make.py --check    exit 1 where it is stale

`tests/unit/test_wire_vectors.py` reads the frames with a MessagePack reader of its own, and holds the file to this.
"""

import argparse
import json
import sys
from pathlib import Path

import msgspec

from stormline.core import limits
from stormline.core.codes import Code
from stormline.wire import frames
from stormline.wire import messages as m

FILE = Path(__file__).parent / "protocol.json"
ABOUT = (
    "Frames of the stormline long connection (docs/reference/protocol.md). 'messages': 'frame' is what this version "
    "writes for 'fields', in hex; every reader must read it so. 'readings': frames that this version does not write "
    "but reads, so must you. 'invalid': a server or client that has read 'given' must refuse 'frame' and close with "
    "'code'. 'example': the conversation of the documentation. Bytes are {\"hex\": ...}."
)

MESSAGES: dict[str, m.Message] = {
    "hello-smallest": m.Hello(versions=(1,), app="shop"),
    "hello-full": m.Hello(
        versions=(1, 2),
        app="shop",
        token="eyJhbGciOiJFZERTQSJ9.e30.c2ln",
        unit="eu-1",
        resume="r-123",
        received=41,
        network="cell",
        client="example/1.0",
        capabilities=("compress",),
        app_version="3.1",
        tags=("kiosk", "süd"),
    ),
    "welcome-smallest": m.Welcome(version=1, session="s-1", device="d-1"),
    "welcome-full": m.Welcome(
        version=1,
        session="s-1",
        device="d-1",
        user="ünï",
        unit="eu-1",
        unit_epoch=3,
        resume="r-124",
        resume_window_s=120.0,
        resumed=True,
        heartbeat_s=60.0,
        time_ms=1_800_000_000_123,
        capabilities=("compress",),
        received=17,
        return_spread_s=9.0,
    ),
    "close-plain": m.Close(Code.OK),
    "close-with-advice": m.Close(Code.OVERLOADED, "too many sessions", 30_000),
    "call-rpc": m.Call(1, "rpc", "orders.create", body=b'{"item":7}', deadline_ms=5000),
    "call-api-with-body-to-come": m.Call(
        3,
        "api",
        "POST",
        "https://api.example/upload?x=1",
        (("content-type", "text/plain"), ("x-latin", "\xe4")),
        b"\x00\x01\xff",
        True,
        15_000,
    ),
    "call-of-the-server": m.Call(2, "session", "refresh"),
    "call-large-id": m.Call(2**53 + 1, "rpc", "a.b"),
    "data-chunk": m.Data(3, b"more"),
    "data-end-with-trailers": m.Data(3, b"", True, (("checksum", "abc"),)),
    "data-256-bytes": m.Data(3, bytes(range(256))),
    "reply-rpc": m.Reply(1, 0, body=b'{"id":9}'),
    "reply-api-with-body-to-come": m.Reply(3, 200, (("content-type", "text/plain"),), b"first", True),
    "fail-plain": m.Fail(1, Code.CALL_NOT_FOUND),
    "fail-full": m.Fail(1, Code.CALL_DEADLINE, "no answer in time", 1000, True),
    "cancel": m.Cancel(1),
    "cancel-for-a-deadline": m.Cancel(1, Code.CALL_DEADLINE),
    "credit": m.Credit(3, 131_072),
    "push-smallest": m.Push(1, "m-1"),
    "push-full": m.Push(2, "m-2", "orders", (("kind", "paid"),), b"paid", 1_800_000_060_000),
    "ack-one": m.Ack((1,)),
    "ack-several": m.Ack((1, 2, 300)),
    "ping": m.Ping(1),
    "pong-largest": m.Pong(2**64 - 1),
    "goaway-plain": m.GoAway(Code.GOING_AWAY, 0),
    "goaway-after-the-first-call": m.GoAway(Code.GOING_AWAY, 1),
    "notice-of-any-host": m.Notice(7),
    "notice-of-two-hosts": m.Notice(2**53 - 1, ("api.example", "img.example")),
    "received": m.Received(33),
    "goaway-full": m.GoAway(Code.GOING_AWAY, 5, "update", 3000, 60_000),
}

# name: (the message it must be read as, the payload's array)
READINGS: dict[str, tuple[m.Message, list[object]]] = {
    "hello-without-optional-fields": (m.Hello((1,), "shop"), [0, [1], "shop"]),
    "call-without-optional-fields": (m.Call(1, "rpc", "a.b"), [3, 1, "rpc", "a.b"]),
    "cancel-without-code": (m.Cancel(1, 503), [7, 1]),
    "welcome-without-optional-fields": (m.Welcome(1, "s-1", "d-1"), [1, 1, "s-1", "d-1"]),
    "fail-with-fields-of-a-later-version": (
        m.Fail(1, 500, "no", None, False),
        [6, 1, 500, "no", None, False, "new", {"and": [1, 2.5, None]}],
    ),
    "notice-without-optional-fields": (m.Notice(7), [14, 7]),
    "welcome-with-whole-numbers-for-floats": (
        m.Welcome(1, "s-1", "d-1", resume_window_s=120.0, heartbeat_s=60.0),
        [1, 1, "s-1", "d-1", "", "", 0, "", 120, False, 60],
    ),
}
# The same values in longer forms than needed: array 16, unsigned 8 and 64.
LONG_FORM = (m.Ping(7), bytes.fromhex("dc0002" + "cc0b" + "cf0000000000000007"))


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(frames.PREFIX_BYTES, "big") + payload


def _json(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    return value


def _entry(name: str, message: m.Message, frame: bytes) -> dict[str, object]:
    fields = {field: _json(getattr(message, field)) for field in message.__struct_fields__}
    return {"name": name, "message": type(message).__name__, "fields": fields, "frame": frame.hex()}


def _invalid() -> list[dict[str, object]]:
    hello, welcome = frames.encode(MESSAGES["hello-smallest"]), frames.encode(MESSAGES["welcome-smallest"])
    resuming = frames.encode(m.Hello((1,), "shop", capabilities=("resume",)))
    call = frames.encode(m.Call(1, "rpc", "a.b"))
    begun = frames.encode(m.Call(1, "rpc", "a.b", more=True))
    error, large, flow = Code.PROTOCOL_ERROR, Code.FRAME_TOO_LARGE, Code.FLOW_CONTROL
    cases = [
        ("an HTTP request", "server", [], b"GET / HTTP/1.1\r\n\r\n", large),
        ("a TLS handshake", "server", [], bytes.fromhex("1603010200010001fc0303"), large),
        ("a length of 2 GiB", "server", [], bytes.fromhex("80000000"), large),
        (
            "a HELLO longer than allowed",
            "server",
            [],
            (limits.FRAME_BEFORE_HELLO_BYTES_MAX + 1).to_bytes(4, "big"),
            large,
        ),
        ("an empty frame", "server", [], bytes(4), error),
        ("no MessagePack", "server", [], _frame(b"\xc1"), error),
        ("a map", "server", [], _frame(b"\x81\x00\x0b"), error),
        ("an unknown tag", "server", [hello], _frame(b"\x92\x10\x01"), error),
        ("a field of a wrong type", "server", [hello], _frame(b"\x92\x0b\xa11"), error),
        ("a required field missing", "server", [hello], _frame(b"\x91\x0b"), error),
        ("bytes after the array", "server", [hello], _frame(b"\x92\x0b\x01\x00"), error),
        ("no version in common", "server", [], frames.encode(m.Hello((2,), "shop")), Code.VERSION_UNSUPPORTED),
        ("a version not offered", "client", [], frames.encode(m.Welcome(2, "s", "d")), Code.VERSION_UNSUPPORTED),
        ("a call before HELLO", "server", [], call, error),
        ("a call before WELCOME", "client", [], frames.encode(m.Call(2, "rpc", "a.b")), error),
        ("a second HELLO", "server", [hello], hello, error),
        ("a second WELCOME", "client", [welcome], welcome, error),
        ("a notice without the capability", "client", [welcome], frames.encode(m.Notice(7)), error),
        ("a confirmation without the capability", "server", [hello], frames.encode(m.Received(0)), error),
        ("a confirmation of what was never sent", "server", [resuming], frames.encode(m.Received(1)), error),
        ("a notice from a client", "server", [hello], frames.encode(m.Notice(7)), error),
        ("a push from a client", "server", [hello], frames.encode(m.Push(1, "m")), error),
        ("an even call id from a client", "server", [hello], frames.encode(m.Call(2, "rpc", "a.b")), error),
        ("a call id used before", "server", [hello, call], call, error),
        ("a reply to a call never made", "server", [hello], frames.encode(m.Reply(2, 0)), error),
        ("a cancel of a call never opened", "server", [hello], frames.encode(m.Cancel(1)), error),
        ("body bytes that were not announced", "server", [hello, call], frames.encode(m.Data(1, b"x")), error),
        ("credit of nothing", "server", [hello, begun], frames.encode(m.Credit(1, 0)), flow),
        ("a push out of sequence", "client", [welcome], frames.encode(m.Push(2, "m")), error),
        ("an acknowledgement of no push", "server", [hello], frames.encode(m.Ack((1,))), error),
    ]
    return [
        {"name": name, "role": role, "given": [each.hex() for each in given], "frame": frame.hex(), "code": int(code)}
        for name, role, given, frame, code in cases
    ]


def _example() -> list[dict[str, object]]:
    lines = [
        ("client", "hello-smallest"),
        ("client", "call-rpc"),
        ("server", "welcome-smallest"),
        ("server", "reply-rpc"),
        ("server", "push-smallest"),
        ("client", "ack-one"),
        ("server", "goaway-after-the-first-call"),
        ("client", "close-plain"),
    ]
    return [{"from": side, "name": name} for side, name in lines]


def make() -> str:
    """Give the text of the file."""
    readings = [
        _entry(name, message, _frame(msgspec.msgpack.encode(array))) for name, (message, array) in READINGS.items()
    ]
    content = {
        "about": ABOUT,
        "version": m.VERSION,
        "messages": [_entry(name, message, frames.encode(message)) for name, message in MESSAGES.items()],
        "readings": [*readings, _entry("ping-in-longer-forms", LONG_FORM[0], _frame(LONG_FORM[1]))],
        "invalid": _invalid(),
        "example": _example(),
    }
    return json.dumps(content, indent=1, ensure_ascii=True) + "\n"


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description="Write the vectors of the wire protocol.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is stale")
    text = make()
    stale = not FILE.exists() or FILE.read_text(encoding="utf-8") != text
    if parser.parse_args().check:
        return 1 if stale else 0
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
