"""Fill the made parts of `reference/protocol.md` from the code; the prose between them is written by hand.

    .venv/bin/python docs/make_protocol.py            write them
    .venv/bin/python docs/make_protocol.py --check    exit 1 where the page is stale

`tests/unit/test_wire_protocol_page.py` holds the page to this.
"""

import argparse
import inspect
import json
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from stormline.core import limits, limits_carriers
from stormline.wire import messages as m
from stormline.wire import short, states
from stormline.wire.states import Role, State

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "protocol.md"
VECTORS = ROOT / "tests" / "vectors" / "protocol.json"
HEX_CHARS = 96
"""Width of a line of hex in the example."""

_TYPES = {int: "integer", str: "text", bytes: "binary", bool: "boolean", float: "float"}
_PLURALS = {int: "integers", str: "texts"}
WORDS = {"None": "nil", "`core.codes`": "[codes](codes.md)", "`wire.tokens`": "[section 10](#10-the-device-token)"}
LIMITS = (
    ("FRAME_BYTES_MAX", "a frame's payload"),
    ("FRAME_BEFORE_HELLO_BYTES_MAX", "the payload of the HELLO frame"),
    ("CHUNK_BYTES_MAX", "`body` of one CALL, REPLY or DATA"),
    ("CREDIT_BYTES", "credit of each body at its beginning"),
    ("CREDIT_WINDOW_BYTES_MAX", "credit of one body at any time"),
    ("CALLS_IN_FLIGHT_MAX", "calls open at once, for each side as caller"),
    ("CALL_HEADERS_MAX", "pairs in one `headers` or `trailers`"),
    ("CALL_HEADER_BYTES_MAX", "characters of all names and values of one `headers` or `trailers`"),
    ("PUSH_BODY_BYTES_MAX", "`body` of one PUSH"),
    ("PUSHES_UNACKED_MAX", "pushes sent and not acknowledged"),
    ("PLAN_HOSTS_MAX", "`hosts` of one NOTICE; more than that means any, which is said by none"),
    ("NOTICE_HOST_CHARS_MAX", "characters of one of them"),
    ("PLAN_VERSION_MAX", "`version` of a NOTICE; 0 and up"),
    ("REASON_CHARS_MAX", "characters of a `reason`; a reader cuts longer ones"),
    ("TOKEN_BYTES_MAX", "a device token"),
    ("NAME_BYTES_MAX", "an app, device or user name in a token, UTF-8"),
    ("HELLO_TAGS_MAX", "`tags` of a HELLO a server keeps; the first"),
    ("HELLO_WORD_CHARS_MAX", "characters of a tag or a version it keeps; the first"),
    ("HELLO_TIMEOUT_S", "seconds from the connection (client: from its HELLO) to the WELCOME"),
    ("HEARTBEAT_S", "seconds of silence after which a client in the foreground pings at the latest"),
    ("HEARTBEAT_ANSWER_S", "seconds without any frame after a PING until the link is dead"),
    ("SESSION_IDLE_S", "seconds of silence after which a server gives a client up at the earliest"),
    ("WIRE_SECONDS_MAX", "seconds of any span in a WELCOME; a longer one, a negative one or NaN is refused"),
    ("CLOCK_SKEW_S", "seconds by which a token may come from the future"),
)
SHORT_LIMITS = (
    ("SHORT_UP_BYTES", "`data` of a question"),
    ("SHORT_DOWN_BYTES", "`data` of an answer"),
    ("SHORT_NAME_CHARS_MAX", "characters of `channel`"),
    ("SHORT_WAIT_MAX_S", "seconds an answer is held at most, whatever `wait_ms` says"),
    ("SHORT_GONE_S", "seconds without an exchange after which a channel is gone"),
    ("SHORT_LINGER_S", "seconds for which the last bytes of one that has ended can be asked for"),
    ("SHORT_REQUEST_S", "seconds from the first byte of a request to its last"),
)


def _upper(kind: type) -> str:
    return kind.__name__.upper()


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def _type(annotation: Any) -> str:
    if annotation == m.Headers:
        return "array of [text, text]"
    if get_origin(annotation) in (Union, types.UnionType):
        (inner,) = [each for each in get_args(annotation) if each is not type(None)]
        return f"{_type(inner)} or nil"
    if get_origin(annotation) is tuple:
        return f"array of {_PLURALS[get_args(annotation)[0]]}"
    return _TYPES[annotation]


def _default(value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None:
        return "nil"
    return "`[]`" if value == () else "empty" if value in ("", b"") else f"`{json.dumps(value)}`"


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Give what a message's docstring says of each field."""
    doc = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", doc, re.MULTILINE)
    return {name: _for_readers(" ".join(text.split())) for name, text in found}


def _for_readers(text: str) -> str:
    """Say in the page's words what a docstring says in the code's."""
    for code, page in WORDS.items():
        text = text.replace(code, page)
    return text


def _messages() -> str:
    overview, parts = [], []
    for tag, kind in enumerate(m.ALL):
        by = [
            role.value
            for role in Role
            if any(kind in states.SENDS[role, s] for s in State if (role, s) in states.SENDS)
        ]
        summary = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
        overview.append((str(tag), f"[{_upper(kind)}](#{kind.__name__.lower()})", " and ".join(by)))
        said = meanings(kind)
        hints = get_type_hints(kind)
        rows = [("0", "tag", "integer", "required", f"`{tag}`")]
        for position, field in enumerate(msgspec.structs.fields(kind), start=1):
            rows.append(
                (str(position), f"`{field.name}`", _type(hints[field.name]), _default(field.default), said[field.name])
            )
        parts.append(f"### {_upper(kind)}\n\n{' '.join(summary.split())}\n")
        parts.append(_table(("position", "field", "type", "default", "meaning"), rows) + "\n")
    return _table(("tag", "message", "sent by"), overview) + "\n\n" + "\n".join(parts).rstrip()


def _short() -> str:
    parts = []
    for title, kind in (("The question", short.Ask), ("The answer", short.Tell)):
        said, hints = meanings(kind), get_type_hints(kind)
        rows = [
            (str(position), f"`{field.name}`", _type(hints[field.name]), _default(field.default), said[field.name])
            for position, field in enumerate(msgspec.structs.fields(kind))
        ]
        parts.append(f"{title}:\n\n" + _table(("position", "field", "type", "default", "meaning"), rows))
    bounds = [(f"{getattr(limits_carriers, name):,.15g}", what, f"`{name}`") for name, what in SHORT_LIMITS]
    parts.append(_table(("bound", "of what", "name in [limits](limits.md)"), bounds))
    return "\n\n".join(parts)


def _states() -> str:
    arrows: dict[tuple[State, State], list[str]] = {}
    rows = []
    for state in State:
        cells = []
        for role in Role:
            sends = states.SENDS.get((role, state), {})
            cells.append(", ".join(_upper(kind) for kind in sends) or "nothing")
            for kind, after in sends.items():
                if after is not state:
                    arrows.setdefault((state, after), []).append(f"{role.value} {_upper(kind)}")
        rows.append((f"`{state.value}`", *cells))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {State.NEW.value}"]
    for (before, after), labels in arrows.items():
        both = {label.partition(" ")[2] for label in labels}
        joined = " or ".join(labels)
        if len(labels) == 2 and len(both) == 1:
            joined = f"either side {both.pop()}"
        lines.append(f"    {before.value} --> {after.value}: {joined}")
    lines += [f"    {State.CLOSED.value} --> [*]", "```"]
    crossing = ", ".join(_upper(kind) for kind in m.ALL if kind in states.CROSSING)
    closing = f"Received in `draining` as well, because it may have crossed the GOAWAY on its way: {crossing}."
    table = _table(("state", "the client may send", "the server may send"), rows)
    return "\n".join(lines) + "\n\n" + table + "\n\n" + closing


def _limits() -> str:
    rows = []
    for name, meaning in LIMITS:
        value = getattr(limits, name)
        rows.append((f"{value:,.15g}" if isinstance(value, float) else f"{value:,}", meaning, f"`{name}`"))
    return _table(("bound", "of what", "name in [limits](limits.md)"), rows)


def _hex(frame: str) -> str:
    spaced = f"{frame[:8]} {frame[8:]}"
    return "\n".join(spaced[at : at + HEX_CHARS] for at in range(0, len(spaced), HEX_CHARS))


def _array(entry: dict[str, Any]) -> str:
    tag = [kind.__name__ for kind in m.ALL].index(entry["message"])
    cells = [
        f"bin({value['hex']})" if isinstance(value, dict) else json.dumps(value, ensure_ascii=False)
        for value in entry["fields"].values()
    ]
    return f"[{', '.join([str(tag), *cells])}]"


def _example() -> str:
    content = json.loads(VECTORS.read_text(encoding="utf-8"))
    by_name = {entry["name"]: entry for entry in content["messages"]}
    blocks = []
    for line in content["example"]:
        entry = by_name[line["name"]]
        blocks.append(f"{line['from']}: {entry['message'].upper()}  {_array(entry)}\n{_hex(entry['frame'])}")
    return "```text\n" + "\n\n".join(blocks) + "\n```"


PARTS = {"short": _short, "messages": _messages, "states": _states, "limits": _limits, "example": _example}


def fill(page: str) -> str:
    """Give the page with its made parts made anew.

    Raises:
        ValueError: a part has no place in the page.
    """
    for name, make in PARTS.items():
        place = re.compile(rf"(<!-- made: {name} -->).*?(<!-- end: {name} -->)", re.DOTALL)
        if len(place.findall(page)) != 1:
            raise ValueError(f"{PAGE.name}: expected one place for the part {name!r}")
        text = make()
        page = place.sub(lambda found, text=text: f"{found[1]}\n\n{text}\n\n{found[2]}", page)
    return page


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="Fill the made parts of docs/reference/protocol.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is stale")
    page = PAGE.read_text(encoding="utf-8")
    filled = fill(page)
    if parser.parse_args().check:
        return 1 if filled != page else 0
    PAGE.write_text(filled, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
