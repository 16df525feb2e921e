"""Who is online: one device, the devices of a user, all of an app in pages, and how many.

One device and a user's devices are read in the directory. A list is asked of the nodes one after the other: each looks
through the sessions it holds, so no query reads what is not asked for, and none reads the whole directory. Numbers are
sums over what each living node says once a second.
"""

import asyncio
import base64
import binascii
import heapq
import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from stormline.appgw import record, subjects
from stormline.appgw.directory import Directory
from stormline.appgw.nodes import Count, Nodes
from stormline.appgw.record import Record
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.engine.port import Handler, Message, Reply, Subscription, error_reply, reply_error

_log = logging.getLogger("stormline.appgw")
_SUBJECT = "presence"


class Requester(Protocol):
    """What asking other nodes needs of the engine."""

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        ...


class Server(Protocol):
    """What answering them needs of the engine."""

    async def serve(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.serve`."""
        ...


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device and its newest session.

    Attributes:
        app: application id.
        device: device id.
        online: the session has not ended. One that has lost its connection and waits for it counts as online.
        user: who is logged in, empty for nobody.
        unit: the unit.
        node: the node that has or had the session.
        session: its id.
        epoch: grows with each session of the device; by and large the milliseconds since 1970 at its begin.
        seen_ms: of an ended session, when it was seen last; of a live one, when its entry was written, 0 in lists.
        network: kind of network.
        client: name and version of the library.
        version: version of the application, empty where it says none.
        tags: what the application calls the device.
    """

    app: str
    device: str
    online: bool
    user: str = ""
    unit: str = ""
    node: str = ""
    session: str = ""
    epoch: int = 0
    seen_ms: int = 0
    network: str = "unknown"
    client: str = ""
    version: str = ""
    tags: tuple[str, ...] = ()


class Filter(msgspec.Struct, frozen=True, array_like=True):
    """Which devices; empty fields mean any.

    Attributes:
        tag: one of its tags.
        version: version of the application.
        network: kind of network.
        user: who is logged in.
    """

    tag: str = ""
    version: str = ""
    network: str = ""
    user: str = ""

    def takes(self, user: str, about: record.About) -> bool:
        """Say whether a device is meant."""
        return (
            (not self.tag or self.tag in about.tags)
            and (not self.version or self.version == about.version)
            and (not self.network or self.network == about.network)
            and (not self.user or self.user == user)
        )


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the devices that are online.

    Attributes:
        devices: in the order of nodes and keys.
        cursor: where the next page begins; empty after the last.
        silent: nodes that did not answer in time; their devices are not listed.
    """

    devices: list[Device]
    cursor: str
    silent: list[str]


class UnitCount(msgspec.Struct, kw_only=True):
    """Devices that are online in a unit.

    Attributes:
        devices: all.
        nodes: living nodes.
        versions: by version of the application; rare ones together as `other`.
        networks: by kind of network.
    """

    devices: int = 0
    nodes: int = 0
    versions: dict[str, int] = {}
    networks: dict[str, int] = {}


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    """A question to a node. Fields are only ever added at the end, with a default."""

    app: str
    wanted: Filter
    after: str
    limit: int


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A device, as its node answers."""

    key: str
    device: str
    session: str
    epoch: int
    user: str
    about: record.About


_encoder = msgspec.msgpack.Encoder()
_asks = msgspec.msgpack.Decoder(_Ask)
_rows = msgspec.msgpack.Decoder(list[_Row])


class Presence:
    """Answers for this node, and asks the others.

    Args:
        engine: the way to other nodes.
        directory: knows where devices are.
        nodes: knows which nodes live.
        unit: this unit.
        node: this node.
    """

    def __init__(self, engine: Requester, directory: Directory, nodes: Nodes, *, unit: str, node: str) -> None:
        self._engine = engine
        self._directory = directory
        self._nodes = nodes
        self._unit = unit
        self._node = node
        self._looking = asyncio.Lock()

    async def start(self, engine: Server) -> Subscription:
        """Begin to answer other nodes."""
        return await engine.serve(subjects.of_node(self._unit, self._node, _SUBJECT), self._take)

    async def device(self, app: str, device: str) -> Device:
        """Give a device's newest session; one that nothing is known of is offline.

        Raises:
            EngineError: the engine is away, and the device not here.
            ConfigError: a name is empty or too long.
        """
        entry = await self._directory.last(app, device)
        return Device(app=app, device=device, online=False) if entry is None else self._shown(app, device, entry)

    async def of_user(self, app: str, user: str) -> list[Device]:
        """Give the devices where a user is, or was last, logged in, those online first.

        Raises:
            EngineError: the engine is away, or the user has more than `limits.ENGINE_KV_READ_MAX` devices.
            ConfigError: a name is empty or too long.
        """
        found = await self._directory.of_user(app, user)
        devices = [self._shown(app, device, entry) for device, entry in found.items()]
        return sorted(devices, key=lambda one: (not one.online, -one.epoch, one.device))

    async def page(self, app: str, wanted: Filter, *, node: str = "", cursor: str = "", limit: int) -> Page:
        """List devices that are online, in pages; devices that come or go meanwhile may be missed or listed.

        Args:
            app: application id.
            wanted: which.
            node: only of this node; empty for all nodes of the unit.
            cursor: of the page before, empty for the first.
            limit: devices in the page, at most `limits.PRESENCE_PAGE_MAX`.

        Raises:
            RequestRefused: `bad-request`: the cursor is none of ours.
        """
        at, after = _read_cursor(cursor)
        names = sorted({beat.node for beat in self._nodes.live() if beat.unit == self._unit})
        names = [name for name in names if name >= at and (not node or name == node)]
        devices: list[Device] = []
        silent: list[str] = []
        for name in names:
            left = limit - len(devices)
            rows = await self._ask(name, _Ask(app, wanted, after if name == at else "", left + 1))
            if rows is None:
                silent.append(name)
                continue
            devices += [self._row(app, name, row) for row in rows[:left]]
            if len(rows) > left:
                last = rows[left - 1].key if left else (after if name == at else "")
                return Page(devices=devices, cursor=_cursor(name, last), silent=silent)
        return Page(devices=devices, cursor="", silent=silent)

    def counts(self, app: str) -> dict[str, UnitCount]:
        """Count the devices of an app that are online, by unit; other nodes' numbers are a second old."""
        found: dict[str, UnitCount] = {}
        for beat in self._nodes.live():
            unit = found.setdefault(beat.unit, UnitCount(versions={}, networks={}))
            unit.nodes += 1
            count = beat.apps.get(app, Count())
            unit.devices += count.devices
            for mine, its in ((unit.versions, count.versions), (unit.networks, count.networks)):
                for name, number in its.items():
                    mine[name] = mine.get(name, 0) + number
        return found

    # -- inside --------------------------------------------------------------------------------------------------

    async def _ask(self, node: str, ask: _Ask) -> list[_Row] | None:
        if node == self._node:
            return await self._find(ask)
        try:
            answer = await self._engine.request(
                subjects.of_node(self._unit, node, _SUBJECT),
                _encoder.encode(ask),
                timeout_s=limits.PRESENCE_NODE_TIMEOUT_S,
            )
            if (problem := reply_error(answer)) is not None:
                _log.warning("node %s answered a question with %d %s", node, *problem)
                return None
            return _rows.decode(answer.data)
        except (errors.EngineError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.info("node %s did not say what it holds: %s", node, error)
            return None

    async def _take(self, message: Message) -> Reply:
        try:
            ask = _asks.decode(message.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return error_reply(400, f"malformed question: {error}")
        if not 0 < ask.limit <= limits.PRESENCE_PAGE_MAX + 1:
            return error_reply(400, f"limit {ask.limit}")
        return Reply(_encoder.encode(await self._find(ask)))

    async def _find(self, ask: _Ask) -> list[_Row]:
        """Look through the sessions here in slices: frames of devices go between."""
        async with self._looking:
            held = list(self._directory.held())
            found: list[_Row] = []
            for start in range(0, len(held), limits.PRESENCE_SLICE):
                if start:
                    await asyncio.sleep(0)
                found += [
                    _Row(key, one.identity.device, one.identity.session, one.epoch, one.identity.user, one.about)
                    for key, one in held[start : start + limits.PRESENCE_SLICE]
                    if one.identity.app == ask.app
                    and key > ask.after
                    and ask.wanted.takes(one.identity.user, one.about)
                ]
        return heapq.nsmallest(ask.limit, found, key=lambda row: row.key)

    def _row(self, app: str, node: str, row: _Row) -> Device:
        live = Record(node, "", row.session, row.epoch, user=row.user, about=row.about)
        return self._shown(app, row.device, live)

    def _shown(self, app: str, device: str, entry: Record) -> Device:
        about = entry.about
        return Device(
            app=app,
            device=device,
            online=entry.online,
            user=entry.user,
            unit=self._unit,
            node=entry.node,
            session=entry.session,
            epoch=entry.epoch,
            seen_ms=entry.seen_ms,
            network=about.network,
            client=about.client,
            version=about.version,
            tags=about.tags,
        )


def _cursor(node: str, key: str) -> str:
    return base64.urlsafe_b64encode(f"{node} {key}".encode()).decode().rstrip("=")


def _read_cursor(cursor: str) -> tuple[str, str]:
    if not cursor:
        return "", ""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        node, separator, key = base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii").partition(" ")
    except (binascii.Error, ValueError) as error:
        raise errors.RequestRefused("bad-request", "cursor: not one of ours") from error
    if not separator:
        raise errors.RequestRefused("bad-request", "cursor: not one of ours")
    return node, key
