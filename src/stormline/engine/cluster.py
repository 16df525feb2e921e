"""A cluster of NATS servers on loopback, for tests and benches: members can be killed and started again.

In production a cluster is the operator's, on machines of its own; these are the same servers and settings.
"""

import asyncio
import dataclasses
import signal
import socket
from pathlib import Path

import msgspec

from stormline.core import ids, limits_platform
from stormline.core.clock import Rng
from stormline.core.values import Address, Secret
from stormline.engine.nats import EngineConfig
from stormline.engine.server import PASSWORDS, Member, Passwords, RunningServer, start_server
from stormline.net.files import write_atomic

_HOST = "127.0.0.1"


@dataclasses.dataclass(kw_only=True)
class NatsCluster:
    """A running cluster. Made by `start_cluster`.

    Attributes:
        servers: its members, also those that were killed.
        core: how the platform's roles connect: all members' addresses, as many replicas as members.
        biz: how business services connect.
    """

    servers: list[RunningServer]
    core: EngineConfig
    biz: EngineConfig
    _folder: Path
    _rng: Rng
    _members: list[Member]
    _ports: list[int]
    _sync_always: bool

    def number(self, name: str) -> int:
        """Say which member has this name."""
        return [member.name for member in self._members].index(name)

    async def kill(self, number: int) -> None:
        """Kill a member as `kill -9` does."""
        child = self.servers[number].child
        child.send_signal(signal.SIGKILL)
        await child.wait()

    async def start(self, number: int) -> None:
        """Start a member (again) on its folder; returns when the cluster's streams answer through it.

        Raises:
            PlatformError: it does not answer, or the cluster has no majority.
        """
        place = (self._members[number], self._ports[number])
        self.servers[number] = await _start(self._folder, self._rng, *place, sync_always=self._sync_always)

    async def stop(self) -> None:
        """Stop all members."""
        await asyncio.gather(*(server.stop() for server in self.servers))


async def start_cluster(folder: Path, *, rng: Rng, size: int = 3, sync_always: bool = False) -> NatsCluster:
    """Start a cluster on free ports of loopback and return when its streams answer through each member.

    Args:
        folder: where its members keep their state.
        rng: for the passwords.
        size: how many members.
        sync_always: see `engine.server.start_server`.

    Raises:
        PlatformError: a member did not start.
    """
    ports = free_ports(2 * size)
    routes = tuple(Address(_HOST, port) for port in ports[size:])
    password = Secret(ids.new_id(rng))
    passwords = msgspec.json.encode(Passwords(core=ids.new_id(rng, 32), biz=ids.new_id(rng, 32)))
    members = [Member(name=f"n{each}", routes=routes[each], others=routes, password=password) for each in range(size)]
    for member in members:
        (folder / member.name).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(folder / member.name / PASSWORDS, passwords, mode=0o600)
    starting = [
        asyncio.create_task(_start(folder, rng, *place, sync_always=sync_always))
        for place in zip(members, ports, strict=False)
    ]
    try:
        servers = [await task for task in starting]
    except BaseException:
        for task in starting:
            task.cancel()
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(outcome, RunningServer):
                await outcome.stop()
        raise
    url = ",".join(server.core.url for server in servers)
    return NatsCluster(
        servers=servers,
        core=dataclasses.replace(servers[0].core, url=url, replicas=size),
        biz=dataclasses.replace(servers[0].biz, url=url),
        _folder=folder,
        _rng=rng,
        _members=members,
        _ports=ports[:size],
        _sync_always=sync_always,
    )


async def _start(folder: Path, rng: Rng, member: Member, port: int, *, sync_always: bool) -> RunningServer:
    return await start_server(
        folder / member.name,
        rng=rng,
        host=_HOST,
        port=port,
        wait_s=limits_platform.ENGINE_CLUSTER_START_TIMEOUT_S,
        sync_always=sync_always,
        member=member,
    )


def free_ports(count: int) -> list[int]:
    """Find ports of loopback that nobody listens on."""
    sockets = [socket.create_server((_HOST, 0)) for _ in range(count)]
    try:
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
