"""What the directory keeps of a device: one entry, written once for each session.

Layout of the bucket `directory_<unit>`; names from outside are base32 tokens (`core.ids.subject_token`):

| key                       | value           | written                                                     |
|---------------------------|-----------------|-------------------------------------------------------------|
| `d.<app>.<device>`        | `Record`        | when a session begins and when it ends, by compare-and-set  |
| `u.<app>.<user>.<device>` | nothing         | when a user is new on a device, then every few hours        |
| `j.<node>.<run>.<number>` | keys of devices | by each node, for many new sessions at once                 |
| `n.<node>`                | nothing         | by each node: gone where the engine has lost its memory     |

A device is found by one read, the devices of a user by one read of the few keys below `u.<app>.<user>`. Nothing is
kept up to date by the second: which nodes live is heard from themselves (`appgw.nodes`), and what a node wrote counts
only while that run of it lives.
"""

import functools
from typing import Final, NamedTuple

import msgspec

from stormline.core import limits
from stormline.core.ids import subject_token

NETWORKS: Final = ("wifi", "cell", "wired", "unknown")
"""Kinds of network a HELLO names; what it says otherwise counts as the last."""


class About(NamedTuple):
    """What a device said of itself in its HELLO: for people and statistics, nothing is decided by it.

    Attributes:
        network: one of `NETWORKS`.
        client: name and version of its library.
        version: version of the application.
        tags: words the application chose.
    """

    network: str = "unknown"
    client: str = ""
    version: str = ""
    tags: tuple[str, ...] = ()


UNKNOWN: Final = About()


def about(network: str, client: str, version: str, tags: tuple[str, ...]) -> About:
    """Keep what is in bounds: no client can fill the directory."""
    words = (_text(each) for each in tags[: limits.HELLO_TAGS_MAX])
    return About(
        network if network in NETWORKS else "unknown",
        _text(client),
        _text(version),
        tuple(dict.fromkeys(word for word in words if word)),
    )


def _text(text: str) -> str:
    return text[: limits.HELLO_WORD_CHARS_MAX].encode("utf-8", "replace").decode().strip()


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A device's newest session, live or ended. Fields are only ever added at the end, with a default.

    Attributes:
        node: the node that has, or had, the session.
        run: which run of that node.
        session: its id.
        epoch: grows with each session of the device: milliseconds since 1970 at its begin, more where the last
            session's node had a clock ahead of ours.
        online: the session has not ended, as far as its node could say.
        user: who is logged in, empty for nobody.
        about: what the device said of itself.
        seen_ms: when this was written; of an ended session, when it was seen last. Milliseconds since 1970.
        indexed_ms: when the user's key was written last.
        login_ms: see `appgw.port.Identity`.
        returned: likewise.
    """

    node: str
    run: str
    session: str
    epoch: int
    online: bool = True
    user: str = ""
    about: About = UNKNOWN
    seen_ms: int = 0
    indexed_ms: int = 0
    login_ms: int = 0
    returned: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)
encode = _encoder.encode


def read(value: bytes) -> Record | None:
    """Read an entry; one that is malformed (another version's, say) counts as none."""
    try:
        return _decoder.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def ended(entry: Record, seen_ms: int) -> Record:
    """Give the entry of the same session, ended."""
    return msgspec.structs.replace(entry, online=False, seen_ms=seen_ms)


def bucket_of(unit: str) -> str:
    """Give the name of a unit's bucket."""
    return f"directory_{unit}"


_app_token = functools.lru_cache(maxsize=256)(subject_token)
"""There are few apps, and each connection names one."""


def key_of(app: str, device: str) -> str:
    """Give the key of a device's entry.

    Raises:
        ConfigError: a name is empty or too long.
    """
    return f"d.{_app_token(app)}.{subject_token(device)}"


def user_key_of(app: str, user: str, device: str = "") -> str:
    """Give the key that says that a user was on a device; without one, what all such keys of the user begin with.

    Raises:
        ConfigError: a name is empty or too long.
    """
    key = f"u.{subject_token(app)}.{subject_token(user)}"
    return f"{key}.{subject_token(device)}" if device else key
