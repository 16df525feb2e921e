"""Published vectors: fresh, right by a MessagePack reader that shares no code with ours, and kept by the machine."""

import json
import runpy
import struct
from pathlib import Path
from typing import Any

import pytest

from stormline.core.codes import Code
from stormline.core.errors import RemoteProtocolError
from stormline.testing.pair import HELLO, WELCOME, said
from stormline.wire import events as e
from stormline.wire import frames
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS: dict[str, Any] = json.loads((FOLDER / "protocol.json").read_text(encoding="utf-8"))
BY_NAME = {entry["name"]: entry for entry in VECTORS["messages"]}


class Reader:
    """Reads MessagePack by its specification, slowly."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        assert self.at + size <= len(self.data), "cut short"
        self.at += size
        return self.data[self.at - size : self.at]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def value(self) -> Any:
        head = self.unsigned(1)
        if head < 0x80:
            return head
        if head < 0x90:
            return self.pairs(head & 0x0F)
        if head < 0xA0:
            return self.array(head & 0x0F)
        if head < 0xC0:
            return self.take(head & 0x1F).decode()
        if head >= 0xE0:
            return head - 0x100
        match head:
            case 0xC0:
                return None
            case 0xC2 | 0xC3:
                return head == 0xC3
            case 0xC4 | 0xC5 | 0xC6:
                return self.take(self.unsigned(1 << (head - 0xC4)))
            case 0xCA:
                return struct.unpack(">f", self.take(4))[0]
            case 0xCB:
                return struct.unpack(">d", self.take(8))[0]
            case 0xCC | 0xCD | 0xCE | 0xCF:
                return self.unsigned(1 << (head - 0xCC))
            case 0xD0 | 0xD1 | 0xD2 | 0xD3:
                return int.from_bytes(self.take(1 << (head - 0xD0)), "big", signed=True)
            case 0xD9 | 0xDA | 0xDB:
                return self.take(self.unsigned(1 << (head - 0xD9))).decode()
            case 0xDC | 0xDD:
                return self.array(self.unsigned(2 << (head - 0xDC)))
            case 0xDE | 0xDF:
                return self.pairs(self.unsigned(2 << (head - 0xDE)))
        raise AssertionError(f"no value begins with {head:#x}")

    def array(self, size: int) -> list[Any]:
        return [self.value() for _ in range(size)]

    def pairs(self, size: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(size)}


def plain(value: Any) -> Any:
    """Give a JSON value of the file as MessagePack holds it."""
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [plain(each) for each in value] if isinstance(value, list) else value


def unpack(frame: bytes) -> list[Any]:
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    reader = Reader(frame[4:])
    array = reader.value()
    assert reader.at == len(frame) - 4
    assert isinstance(array, list)
    return array


def test_vectors_file_is_what_the_code_writes():
    made = runpy.run_path(str(FOLDER / "make.py"))["make"]()
    assert (FOLDER / "protocol.json").read_text(encoding="utf-8") == made, "stale: run tests/vectors/make.py"


def test_vectors_hold_every_message_and_the_version():
    assert {entry["message"] for entry in VECTORS["messages"]} == {kind.__name__ for kind in m.ALL}
    assert VECTORS["version"] == m.VERSION


@pytest.mark.parametrize("entry", VECTORS["messages"], ids=lambda entry: entry["name"])
def test_vector_read_by_another_reader_is_tag_and_fields_in_order(entry: dict[str, Any]):
    kind = getattr(m, entry["message"])
    assert list(entry["fields"]) == list(kind.__struct_fields__)
    array = unpack(bytes.fromhex(entry["frame"]))
    assert array == [m.ALL.index(kind), *map(plain, entry["fields"].values())]
    assert [type(value) for value in array[1:]] == [type(plain(value)) for value in entry["fields"].values()]


@pytest.mark.parametrize("entry", VECTORS["messages"] + VECTORS["readings"], ids=lambda entry: entry["name"])
def test_vector_read_by_us_is_the_message_it_says(entry: dict[str, Any]):
    message = frames.decode_payload(bytes.fromhex(entry["frame"])[4:])
    assert type(message).__name__ == entry["message"]

    def listed(value: Any) -> Any:
        return [listed(each) for each in value] if isinstance(value, tuple) else value

    assert {name: listed(getattr(message, name)) for name in message.__struct_fields__} == {
        name: plain(value) for name, value in entry["fields"].items()
    }


@pytest.mark.parametrize("entry", VECTORS["readings"], ids=lambda entry: entry["name"])
def test_vector_reading_begins_with_the_fields_it_says(entry: dict[str, Any]):
    array = unpack(bytes.fromhex(entry["frame"]))
    fields = [plain(value) for value in entry["fields"].values()]
    shared = min(len(array) - 1, len(fields))
    assert array[1 : shared + 1] == fields[:shared]


@pytest.mark.parametrize("entry", VECTORS["invalid"], ids=lambda entry: entry["name"].replace(" ", "-"))
def test_vector_invalid_is_refused_with_its_code(entry: dict[str, Any]):
    machine = Connection(Role(entry["role"]), 0.0)
    if machine.role is Role.CLIENT:
        machine.send_hello(HELLO)
    for given in entry["given"]:
        machine.receive_data(bytes.fromhex(given), 0.0)
        for event in iter(machine.next_event, None):
            if isinstance(event, e.HelloReceived):
                machine.send_welcome(WELCOME)
    said(machine)
    machine.receive_data(bytes.fromhex(entry["frame"]), 0.0)
    with pytest.raises(RemoteProtocolError) as caught:
        list(iter(machine.next_event, None))
    assert caught.value.code == entry["code"]
    assert machine.state is State.CLOSED
    (close,) = said(machine)
    assert isinstance(close, m.Close)
    assert close.code == entry["code"]


def test_vector_example_is_a_conversation_that_both_sides_accept():
    sides = {Role.CLIENT: Connection(Role.CLIENT, 0.0), Role.SERVER: Connection(Role.SERVER, 0.0)}
    client, server = sides[Role.CLIENT], sides[Role.SERVER]
    does = {
        "Hello": lambda fields: client.send_hello(m.Hello(tuple(fields["versions"]), fields["app"])),
        "Welcome": lambda fields: server.send_welcome(m.Welcome(**{**fields, "capabilities": ()})),
        "Call": lambda fields: client.send_call(
            fields["gate"], fields["method"], body=plain(fields["body"]), deadline_s=fields["deadline_ms"] / 1000
        ),
        "Reply": lambda fields: server.send_reply(fields["id"], fields["status"], body=plain(fields["body"])),
        "Push": lambda fields: server.send_push(fields["id"], plain(fields["body"])),
        "Ack": lambda fields: client.send_ack(fields["seqs"][0]),
        "GoAway": lambda fields: server.send_goaway(Code(fields["code"])),
        "Close": lambda fields: client.close(fields["code"]),
    }
    for line in VECTORS["example"]:
        entry, role = BY_NAME[line["name"]], Role(line["from"])
        does[entry["message"]](entry["fields"])
        data = sides[role].data_to_send()
        assert data.hex() == entry["frame"], line
        sides[role.peer].receive_data(data, 0.0)
        for side in (client, server):
            list(iter(side.next_event, None))
    assert client.state is server.state is State.CLOSED
