"""The real client on a link whose course is laid out: what it says of the network, and what becomes of its calls.

seen = simlevel.run(course, asks, seed=1, duration_s=120.0)
seen.told            # [(0.4, Level.GOOD, "round trip 62 ms ..."), ...], whenever the level changed
"""

import asyncio
import functools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.client.outside import Outside
from stormline.core import errors
from stormline.net.network import NoNetworkPort
from stormline.net.resolve import Resolver
from stormline.netmodel.course import Course
from stormline.netmodel.params import BlackoutMode, LinkParams
from stormline.policy.level import Level
from stormline.policy.network import NetworkInfo
from stormline.testing import simloop
from stormline.testing.history import History
from stormline.testing.simdevice import SimNames
from stormline.testing.simloop import SimClock, SimRng, VirtualLoop
from stormline.testing.simnet import Host, Link, SimNet
from stormline.testing.simorigin import Origin
from stormline.testing.simplatform import Ledger, answer_text, open_tcp_of
from stormline.testing.simtcp import Segment
from stormline.testing.simtls import SimTrust

LOOK_S: Final = 0.1
"""How often the client is asked for the level."""
PATIENCE_S: Final = 10.0
_NAME: Final = "o.sim"


@dataclass
class Seen:
    """What came of a run.

    Attributes:
        told: (second, level, evidence), whenever the level changed.
        took_s: how long each call took that was answered rightly; the others are not in it.
        asked: calls made.
        stories: what the calls noted, by number of the call.
        packets: on the network, both ways.
        sent: when packets left the device, in order.
        heard: when one reached it, in order.
    """

    told: list[tuple[float, Level, str]] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    asked: int = 0
    stories: list[list[str]] = field(default_factory=list)
    packets: int = 0
    sent: list[float] = field(default_factory=list)
    heard: list[float] = field(default_factory=list)


class _Ways(NoNetworkPort):
    """Tells of the ways out where there are several, and of nothing else."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def ways(self) -> tuple[NetworkInfo, ...]:
        """See `NetworkPort.ways`."""
        if len(self._names) < 2:
            return ()
        return tuple(NetworkInfo(interface=name, routed=True) for name in self._names)


class _WatchedNet(SimNet):
    """Notes when packets leave the one host that has a link, and when they reach it."""

    def watch(self, seen: Seen) -> None:
        """Note them there."""
        self._seen = seen

    def carry(self, source: Host, segment: Segment) -> None:
        """Take a packet from its sender."""
        if source.link is not None:
            self._seen.sent.append(self.loop.time())
        super().carry(source, segment)

    def _arrive(self, target: Host, segment: Segment) -> None:
        if target.link is not None:
            self._seen.heard.append(self.loop.time())
        super()._arrive(target, segment)


def run(
    course: Course,
    asks: Sequence[tuple[float, int]],
    *,
    seed: int,
    duration_s: float,
    http2: bool = True,
    cost_s: float = 0.02,
    kernel_tells: bool = True,
    second: Course | None = None,
    prepare: Callable[[AsyncClient], None] = lambda client: None,
) -> Seen:
    """Play a course.

    Args:
        course: of the device's link.
        asks: (second, bytes of the answer) of each call.
        seed: of all chance.
        duration_s: for how long levels are asked for.
        http2: the origin speaks it.
        cost_s: what the server needs, seconds, in the mean.
        kernel_tells: the device has TCP_INFO.
        second: of a link that the device has beside the usual one, metered.
        prepare: is given the client before the first call.
    """
    outcome = simloop.run(
        lambda: _play(
            course,
            asks,
            seed=seed,
            duration_s=duration_s,
            http2=http2,
            cost_s=cost_s,
            kernel_tells=kernel_tells,
            second=second,
            prepare=prepare,
        )
    )
    return outcome.result


async def _play(
    course: Course,
    asks: Sequence[tuple[float, int]],
    *,
    seed: int,
    duration_s: float,
    http2: bool,
    cost_s: float,
    kernel_tells: bool,
    second: Course | None,
    prepare: Callable[[AsyncClient], None],
) -> Seen:
    loop = cast("VirtualLoop", asyncio.get_running_loop())
    rng, seen = SimRng(seed, "level"), Seen()
    net = _WatchedNet(loop, rng.child("net"))
    net.watch(seen)
    origin = Origin(_NAME, Ledger(History(scenario="level", seed=seed)), rng.child("origin"), cost_s=cost_s)
    for number in range(3):
        ip = f"198.51.100.{number + 1}"
        origin.add(net.host(f"origin-{number}", ip), ip, http2=http2)
    link = net.link("device", course.up, course.down, fades=course.fades)
    host = net.host("device", "10.0.0.2", link=link)
    hosts = {"wlan0": host}
    if second is not None:
        beside = net.link("second", second.up, second.down, fades=second.fades)
        hosts["wwan0"] = net.host("device over wwan0", "10.1.0.2", link=beside)

    def answer(name: str) -> tuple[str, ...]:
        if name != _NAME:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return tuple(each.address.host for each in origin.hosts)

    async def open_over(interface: str, address: Any) -> Any:
        stream = await open_tcp_of(hosts[interface])(address)
        stream._tcp_info = kernel_tells  # as on a system without it
        return stream

    outside = Outside(
        clock=SimClock(loop),
        rng=rng.child("client"),
        open_tcp=functools.partial(open_over, "wlan0"),
        open_over=open_over,
        trust=SimTrust(),
        is_assigned=lambda ip: any(ip in each.addresses for each in hosts.values()),
        resolver=lambda: Resolver(SimNames(host, net, answer)),
        environ={},
        network=lambda how: _Ways(tuple(hosts)),
    )
    config = Config(report=False, deadline_s=PATIENCE_S, network_probes=False)
    async with AsyncClient(config=config, outside=outside) as client:
        prepare(client)
        acting = asyncio.create_task(_act(course, link, loop))
        looking = asyncio.create_task(_look(client, seen, loop))
        calls = [
            asyncio.create_task(_ask(client, seen, number, at_s, size)) for number, (at_s, size) in enumerate(asks)
        ]
        await asyncio.sleep(duration_s)
        looking.cancel()
        if calls:
            await asyncio.wait(calls)
        acting.cancel()
        await asyncio.gather(acting, looking, return_exceptions=True)
        for call in calls:
            call.result()
    await origin.stop()
    seen.packets = net.packets
    return seen


async def _act(course: Course, link: Link, loop: VirtualLoop) -> None:
    """Let the link follow its course."""
    actions: list[tuple[float, Callable[[], None]]] = [
        (at_s, functools.partial(_become, link, up, down)) for at_s, up, down in course.changes
    ]
    actions += [
        (begin_s, functools.partial(link.blackout, BlackoutMode.DROP, end_s - begin_s))
        for begin_s, end_s in course.dark
    ]
    for at_s, act in sorted(actions, key=lambda action: action[0]):
        await asyncio.sleep(at_s - loop.time())
        act()


def _become(link: Link, up: LinkParams, down: LinkParams) -> None:
    link.up.become(up)
    link.down.become(down)


async def _look(client: AsyncClient, seen: Seen, loop: VirtualLoop) -> None:
    while True:
        quality = client.quality
        if not seen.told or seen.told[-1][1] is not quality.level:
            seen.told.append((loop.time(), quality.level, quality.evidence))
        await asyncio.sleep(LOOK_S)


async def _ask(client: AsyncClient, seen: Seen, number: int, at_s: float, size: int) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at_s - loop.time())
    seen.asked += 1
    call_id = f"c{number}"
    try:
        async with asyncio.timeout_at(at_s + PATIENCE_S):
            response = await client.get(f"https://{_NAME}/op/{call_id}?size={size}")
    except (TimeoutError, errors.TransportError):
        return
    if response.status_code == 200 and response.content == answer_text(call_id, size):
        seen.took_s.append(loop.time() - at_s)
