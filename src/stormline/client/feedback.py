"""What a user says of the app: sent with the last failures by any way there is, or kept until there is one.

Each has an id of its own and lies on disk before it is sent, until the platform has taken it: so it survives a restart,
and what was sent twice because an answer was lost is stored once. The ways, one after the other: the APM's address in
the plan; then, where the plan has the APM's name among its hosts, whatever calls go by: the long connection, a relay.
"""

import asyncio
import contextlib
import logging
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import msgspec

from stormline.client import fetch
from stormline.client.netlog import CLIENT_NAME, NetworkLog, public_key
from stormline.core import errors, ids
from stormline.core import limits_netlog as limits
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.net.files import write_atomic
from stormline.net.logfile import read_folder
from stormline.outbound.messages import Headers
from stormline.outbound.pool import HttpPool
from stormline.telemetry import feedback, netlog

if TYPE_CHECKING:
    from stormline.client.answer import Answer
    from stormline.client.config import Config
    from stormline.client.outside import Outside
    from stormline.client.scheduling import Scheduling
    from stormline.client.trace import CallTrace
    from stormline.wire.plan import Endpoint

_log = logging.getLogger("stormline.client")
FOLDER: Final = "feedback"
"""Below the folder of the network log, or the client's store."""
_SUFFIX: Final = ".feedback"
_FOR_GOOD: Final = frozenset({400, 413, 415, 422})
"""Answers that will be the same however often it is sent."""


class Feedback(NamedTuple):
    """What became of a feedback.

    Attributes:
        id: names it, here and on the platform (`stormline apm feedback ID`).
        state: `sent`: the platform has it; `kept`: it is sent as soon as there is a way, also after a restart where the
            client has a folder; `refused`: the platform will not take it.
        reason: why it was not sent, empty where it was.
    """

    id: str
    state: Literal["sent", "kept", "refused"]
    reason: str = ""


class Client(Protocol):
    """What feedback needs of a client; `client.runtime.Runtime` is one."""

    config: "Config"
    clock: Clock
    rng: Rng
    netlog: NetworkLog | None
    scheduling: "Scheduling | None"

    def trace(self, *, method: str, host: str, path: str) -> "CallTrace":
        """See `Runtime.trace`."""
        ...

    def execute(
        self,
        *,
        method: str,
        scheme: str,
        host: str,
        port: int,
        target: bytes,
        headers: Headers,
        body: bytes,
        extensions: Mapping[str, Any],
        trace: "CallTrace",
    ) -> Coroutine[None, None, "Answer"]:
        """See `Runtime.execute`."""
        ...


class Outbox:
    """What is kept, at most `limits_netlog.FEEDBACK_KEPT_MAX`, the oldest go first. Its methods may block.

    Args:
        folder: where; None: in memory. A folder that cannot be written costs one warning, and memory takes its place.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: dict[str, bytes] = {}
        self._told = False

    def put(self, name: str, data: bytes) -> None:
        """Keep one."""
        if self._folder is not None:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomic(self._folder / f"{name}{_SUFFIX}", data, mode=0o600)
                for path in self._paths()[: -limits.FEEDBACK_KEPT_MAX]:
                    path.unlink(missing_ok=True)
            except OSError as error:
                if not self._told:
                    self._told = True
                    _log.warning("feedback cannot be kept in %s: %s", self._folder, error.strerror or error)
            else:
                return
        self._held[name] = data
        while len(self._held) > limits.FEEDBACK_KEPT_MAX:
            del self._held[next(iter(self._held))]

    def _paths(self) -> list[Path]:
        if self._folder is None:
            return []
        try:
            return sorted(path for path in self._folder.iterdir() if path.suffix == _SUFFIX)
        except OSError:
            return []

    def names(self) -> list[str]:
        """Name what is kept, the oldest first."""
        return sorted({*(path.stem for path in self._paths()), *self._held})

    def get(self, name: str) -> bytes | None:
        """Give one; None where it is gone, or none of ours."""
        if name in self._held or self._folder is None:
            return self._held.get(name)
        try:
            with (self._folder / f"{name}{_SUFFIX}").open("rb") as file:
                data = file.read(limits.FEEDBACK_BYTES_MAX + 1)
            feedback.decode(data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("kept feedback is dropped: %s", error)
            self.drop(name)
            return None
        return data

    def drop(self, name: str) -> None:
        """Keep one no longer."""
        self._held.pop(name, None)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / f"{name}{_SUFFIX}").unlink(missing_ok=True)


class _Refused(Exception):
    """The platform will not take it."""


class _Failed(Exception):
    """It was not sent now.

    Attributes:
        after_s: pause that the platform asks for.
    """

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class FeedbackSender:
    """Sends what users say, and again what is kept. Belongs to one event loop.

    Args:
        outbox: what is kept.
        post: sends one; raises _Failed or _Refused.
        rng: spreads pauses.
        clock: the wall clock's time.
        aside: does what may block.
    """

    def __init__(
        self,
        outbox: Outbox,
        post: Callable[[bytes, str], Awaitable[None]],
        *,
        rng: Rng,
        clock: Clock,
        aside: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox
        self._post = post
        self._rng = rng
        self._clock = clock
        self._aside = aside
        self._failures = 0
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[None] | None = None
        self._sending: set[str] = set()
        if outbox.names():
            self._later(limits.FEEDBACK_RETRY_S / 10)

    async def say(self, text: str, pack: Callable[[], bytes]) -> Feedback:
        """Keep a feedback and try to send it, for `limits_netlog.FEEDBACK_SEND_S` at most.

        Cancelled, it stays kept once it is on disk.

        Args:
            text: 1 to `limits_netlog.FEEDBACK_TEXT_CHARS_MAX` characters.
            pack: gives the log that goes with it; may block.

        Raises:
            ConfigError: the text has another length.
        """
        if not 0 < len(text) <= limits.FEEDBACK_TEXT_CHARS_MAX:
            raise errors.ConfigError(f"feedback: expected 1 to {limits.FEEDBACK_TEXT_CHARS_MAX} characters")
        said = feedback.Feedback(
            id=ids.new_id(self._rng),
            said_at_ms=int(self._clock.wall() * 1000),
            text=text.encode("utf-8", "replace").decode(),
            client=CLIENT_NAME,
            platform=sys.platform,
        )
        name = f"{said.said_at_ms:013d}-{said.id}"
        made: list[bytes] = []

        def keep() -> None:
            try:
                log = pack()
            except Exception:  # what the user says is worth more than the log
                _log.exception("feedback goes without the network log")
                log = b""
            made.append(feedback.encode(msgspec.structs.replace(said, log=log)))
            self._outbox.put(name, made[0])

        self._sending.add(name)
        try:
            await self._aside(keep)
            return await self._try(name, said.id, made[0])
        finally:
            self._sending.discard(name)

    async def _try(self, name: str, feedback_id: str, data: bytes) -> Feedback:
        if self._over:
            return Feedback(feedback_id, "kept", "the client is closed")
        try:
            async with asyncio.timeout(limits.FEEDBACK_SEND_S):
                await self._post(data, feedback_id)
        except (_Failed, TimeoutError) as error:
            self._failures += 1
            reason = str(error) or f"no answer within {limits.FEEDBACK_SEND_S:g} s"
            _log.info("feedback %s is kept: %s", feedback_id, reason)
            self._later(max(self._pause_s(), getattr(error, "after_s", 0.0)))
            return Feedback(feedback_id, "kept", reason)
        except _Refused as error:
            _log.warning("feedback %s was refused: %s", feedback_id, error)
            await self._aside(lambda: self._outbox.drop(name))
            return Feedback(feedback_id, "refused", str(error))
        self._failures = 0
        await self._aside(lambda: self._outbox.drop(name))
        return Feedback(feedback_id, "sent")

    def _pause_s(self) -> float:
        doubled = limits.FEEDBACK_RETRY_S * min(10.0, 2.0 ** min(self._failures, 8))
        return doubled * (0.5 + 0.5 * self._rng.random())

    def _later(self, pause_s: float) -> None:
        if self._timer is None and not self._over:
            # A timer, not a task: a loop that ends before it fires has nothing to complain of.
            self._timer = self._loop.call_later(pause_s, self.send_kept)

    def send_kept(self) -> None:
        """Send what is kept, now: the network is another one, say."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._over or (self._sender is not None and not self._sender.done()):
            return
        self._sender = self._loop.create_task(self._send_kept(), name="stormline feedback")

    async def _send_kept(self) -> None:
        found: list[str] = []
        await self._aside(lambda: found.extend(self._outbox.names()))
        for name in found:
            if name in self._sending:
                continue
            read: list[bytes | None] = []
            await self._aside(lambda name=name, read=read: read.append(self._outbox.get(name)))  # type: ignore[misc]
            data = read[0] if read else None
            if data is None:
                continue
            if (await self._try(name, name.partition("-")[2], data)).state == "kept":
                return  # the rest would fare no better

    def abandon(self) -> None:
        """Stop; what is kept stays so. Also where the event loop is closed."""
        self._over = True
        with contextlib.suppress(RuntimeError):  # a closed loop cannot cancel any more
            if self._timer is not None:
                self._timer.cancel()
            if self._sender is not None:
                self._sender.cancel()

    async def aclose(self) -> None:
        """Stop; what is kept stays so."""
        self.abandon()
        if self._sender is not None:
            await asyncio.gather(self._sender, return_exceptions=True)


# -- what goes with it ------------------------------------------------------------------------------------------------
def packer(client: Client) -> Callable[[], bytes]:
    """Give what gives the last failures of a client as a file; may block.

    They are those of this process, and of those before it where the files are clear.
    """
    log, clock, rng, key = client.netlog, client.clock, client.rng, client.config.network_log_key

    def pack() -> bytes:
        if log is None:
            return b""
        public = public_key(key)
        records = log.last()
        if public is None:
            records = [*_on_disk(log.store.folder, set(records)), *records]
        entropy = rng.token_bytes(netlog.ENTROPY_BYTES) if public is not None else b""
        instance = rng.token_bytes(netlog.INSTANCE_BYTES)
        writer = netlog.FileWriter(instance, int(clock.wall() * 1000), public=public, entropy=entropy)
        return feedback.pack_log(records, writer)

    return pack


def _on_disk(folder: Path, known: set[bytes]) -> list[bytes]:
    try:
        entries = netlog.read(read_folder(folder)).entries
    except OSError:
        return []
    records = (entry.record for entry in entries)
    found = (netlog.encode(each) for each in records if isinstance(each, netlog.Failure | netlog.Finding))
    return [each for each in found if each not in known]


# -- the ways ---------------------------------------------------------------------------------------------------------
class Ways:
    """Sends feedback to the APM that the plan names.

    Args:
        client: whose calls they may go by; by a call that gives None once it is gone.
        scheduling: plans and the device token.
        pool: connections to roles.
    """

    def __init__(self, client: Callable[[], Client | None], scheduling: "Scheduling", pool: HttpPool) -> None:
        self._client = client
        self._scheduling = scheduling
        self._pool = pool

    async def post(self, data: bytes, feedback_id: str) -> None:
        """Send one.

        Raises:
            _Failed: it was not taken now.
            _Refused: it never will be.
        """
        try:
            endpoint = await self._endpoint()
            token = await self._scheduling.token()
        except errors.DispatchError as error:
            raise _Failed(str(error)) from error
        headers = (
            (b"content-type", feedback.MEDIA_TYPE.encode("ascii")),
            (b"authorization", b"Bearer " + token.encode("ascii", "replace")),
            (b"idempotency-key", feedback_id.encode("ascii")),
        )
        try:
            status, answer_headers = await self._at_its_address(endpoint, headers, data)
        except errors.TransportError as error:
            status, answer_headers = await self._by_any_means(endpoint, headers, data, error)
        if status < 300:
            return
        if status in _FOR_GOOD:
            raise _Refused(f"the APM answered {status}")
        raise _Failed(f"the APM answered {status}", fetch.retry_after_s(answer_headers))

    async def _endpoint(self) -> "Endpoint":
        plan = self._scheduling.plan or await self._scheduling.refresh()
        if plan.report is None:
            raise _Failed("the platform names no APM")
        return plan.report

    async def _at_its_address(
        self, endpoint: "Endpoint", headers: tuple[tuple[bytes, bytes], ...], data: bytes
    ) -> tuple[int, tuple[tuple[bytes, bytes], ...]]:
        answer = await fetch.post(
            self._pool,
            address=Address(endpoint.host, endpoint.port),
            server_name=endpoint.server_name,
            path=feedback.PATH,
            headers=headers,
            body=data,
            timeout_s=limits.FEEDBACK_SEND_S / 2,
            size_max=limits.FEEDBACK_ANSWER_BYTES_MAX,
        )
        return answer.status, answer.headers

    async def _by_any_means(
        self,
        endpoint: "Endpoint",
        headers: tuple[tuple[bytes, bytes], ...],
        data: bytes,
        failed: errors.TransportError,
    ) -> tuple[int, tuple[tuple[bytes, bytes], ...]]:
        """Go as calls go, where the platform carries calls to the APM's name."""
        host, client = endpoint.server_name, self._client()
        if not host or client is None or await self._scheduling.host_plan(host) is None:
            raise _Failed(str(failed)) from failed
        trace = client.trace(method="POST", host=host, path=feedback.PATH)
        trace.divert(lambda record: None)  # like a report it makes no record of its own
        trace.log = None
        try:
            answer = await client.execute(
                method="POST",
                scheme="https",
                host=host,
                port=443,
                target=feedback.PATH.encode("ascii"),
                headers=((b"host", host.encode("ascii")), (b"content-length", str(len(data)).encode()), *headers),
                body=data,
                extensions={"stormline.deadline_s": limits.FEEDBACK_SEND_S / 2},
                trace=trace,
            )
            await answer.keep(limits.FEEDBACK_ANSWER_BYTES_MAX)
            await answer.aclose()
        except errors.TransportError as error:
            raise _Failed(f"{failed}; then {error}") from error
        return answer.status, tuple(answer.headers)


def sender(client: Client, outside: "Outside", pool: HttpPool | None) -> FeedbackSender:
    """Make what sends a client's feedback.

    Raises:
        ConfigError: the client has neither a platform to send to nor a folder to keep it in.
    """
    config, scheduling = client.config, client.scheduling
    folder = config.network_log_dir or config.store
    if scheduling is None and folder is None:
        raise errors.ConfigError("feedback needs a platform or a folder: give the client a bundle, or a store")
    post = _no_platform
    if scheduling is not None and pool is not None:
        post = Ways(weakref.ref(client), scheduling, pool).post
    return FeedbackSender(
        Outbox(None if folder is None else folder / FOLDER),
        post,
        rng=client.rng,
        clock=client.clock,
        aside=outside.aside,
    )


async def _no_platform(data: bytes, feedback_id: str) -> None:
    raise _Failed("no platform: it is sent by a client that has a bundle")
