"""The engine on NATS, through the stock `nats-py` client.

One `nats-py` client serves one connection's life; when it is lost we make a new one and put all subscriptions on it.
Its own reconnecting is not used, for three reasons: it keeps unsent messages and sends them after the reconnection,
long after their sender was told they failed; requests in flight wait for their time-out instead of failing at once;
and after some server errors it closes for good.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription  # noqa: TC002 - the one import block stays plain

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.core.clock import Rng
from stormline.core.values import Secret
from stormline.engine.nats_kv import Bucket, NatsKeyValue, ensure_bucket
from stormline.engine.nats_link import FAILURES, CancelGuard, Link, shut
from stormline.engine.port import (
    Handler,
    Listener,
    Message,
    Reply,
    check_bucket,
    check_message,
    check_subscription,
    error_reply,
)

_log = logging.getLogger("stormline.engine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Where the engine is and who we are to it.

    Attributes:
        url: `nats://host:port`; several, separated by commas, for a cluster.
        user: user name.
        password: its password; never shown.
        name: our name in the engine's monitoring.
        replicas: copies of each key a cluster keeps; 1 for a single node.
    """

    url: str
    user: str
    password: Secret
    name: str = "stormline"
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse a URL with credentials in it: URLs are logged.

        Raises:
            ConfigError: it has some.
        """
        if "@" in self.url:
            raise errors.ConfigError("engine url: put user and password into their own settings")


class _Subscription:
    """A standing interest; put on each new link in turn."""

    def __init__(
        self, owner: dict["_Subscription", None], subject: str, queue: str, take: Callable[[Msg], Awaitable[None]]
    ) -> None:
        self._owner = owner
        self._subject = subject
        self._queue = queue
        self._take = take
        self._current: NatsSubscription | None = None
        owner[self] = None

    async def attach(self, client: Client) -> None:
        self._current = await client.subscribe(
            self._subject,
            queue=self._queue,
            cb=self._on_message,
            pending_msgs_limit=limits.ENGINE_QUEUE_MESSAGES_MAX,
            pending_bytes_limit=limits.ENGINE_QUEUE_BYTES_MAX,
        )
        if self not in self._owner:  # closed meanwhile
            await self._detach()

    async def _on_message(self, message: Msg) -> None:
        await self._take(message)

    async def close(self) -> None:
        """End the interest."""
        self._owner.pop(self, None)
        await self._detach()

    async def _detach(self) -> None:
        current, self._current = self._current, None
        if current is None:
            return
        try:
            await current.unsubscribe()
        except FAILURES as error:
            _log.debug("unsubscribing %s: %r", self._subject, error)  # its connection is gone, and it with it


class NatsEngine:
    """`engine.port.Engine` on NATS. Made by `connect`."""

    def __init__(self, config: EngineConfig, rng: Rng) -> None:
        self._config = config
        self._rng = rng
        self._link: Link | None = None
        self._changed = asyncio.Event()
        self._subscriptions: dict[_Subscription, None] = {}
        self._buckets: dict[str, Bucket] = {}
        self._handlers: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False

    # -- the connection -----------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether it works now, as far as we know."""
        return self._link is not None and self._link.connected

    def link(self) -> Link:
        """Give the present connection.

        Raises:
            EngineUnavailable: there is none.
        """
        if self._link is None or not self._link.connected:
            raise errors.EngineUnavailable(
                f"engine at {self._config.url} {'closed' if self._closed else 'unavailable'}"
            )
        return self._link

    async def wait_link(self) -> Link | None:
        """Wait for a connection and give it; None once the engine is closed."""
        while not self._closed:
            if self._link is not None and self._link.connected:
                return self._link
            self._changed.clear()
            await self._changed.wait()
        return None

    async def start(self, wait_s: float) -> None:
        """Connect for the first time, trying for `wait_s` seconds, and keep the connection from then on."""
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        for attempt in range(1 << 30):
            try:
                self._link = await self._dial()
                break
            except errors.EngineUnavailable as error:
                pause_s = self._pause_s(attempt)
                if _refused(error.__cause__) or loop.time() + pause_s > end:
                    raise
                await asyncio.sleep(pause_s)
        _log.info("engine connected: %s", self._config.url)
        self._keeper = asyncio.create_task(self._keep(), name="engine keeper")

    async def _keep(self) -> None:
        while True:
            link = self._link
            assert link is not None  # noqa: S101 - set by start and below
            while link.connected:
                try:
                    async with asyncio.timeout(limits.ENGINE_LOOK_S):
                        await link.lost.wait()
                except TimeoutError:
                    continue
            link.fail()
            _log.warning("engine lost: %s", self._config.url)
            await shut(link.client)
            self._link = await self._redial()
            self._changed.set()
            _log.info("engine connected again: %s", self._config.url)

    async def _redial(self) -> Link:
        attempt = 0
        reason = ""
        while True:
            await asyncio.sleep(self._pause_s(attempt))
            try:
                return await self._dial()
            except errors.EngineUnavailable as error:
                _log.log(logging.DEBUG if str(error) == reason else logging.WARNING, "%s", error)
                reason = str(error)
                attempt += 1

    def _pause_s(self, attempt: int) -> float:
        whole_s = limits.ENGINE_RECONNECT_PAUSE_S * 2.0 ** min(attempt, 16)
        return min(whole_s, limits.ENGINE_RECONNECT_PAUSE_MAX_S) * (0.5 + self._rng.random() / 2)

    async def _dial(self) -> Link:
        """Make a connection that works: credentials accepted, subscriptions on it, buckets there."""
        guard = CancelGuard()
        client = Client()
        problems: list[Exception] = []
        link = Link(client, f"_INBOX.{ids.new_id(self._rng)}")

        async def on_error(error: Exception) -> None:
            if client.is_connected and not isinstance(error, OSError | nats.errors.StaleConnectionError):
                _log.warning("engine: %s", error)
            else:
                problems[:] = [error]
                _log.debug("engine: %r", error)

        async def on_closed() -> None:
            link.lost.set()

        try:
            async with asyncio.timeout(limits.ENGINE_CONNECT_TIMEOUT_S):
                await client.connect(
                    self._config.url.split(","),
                    name=self._config.name,
                    user=self._config.user,
                    password=self._config.password.reveal(),
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=limits.ENGINE_CONNECT_TIMEOUT_S,
                    ping_interval=limits.ENGINE_PING_S,
                    max_outstanding_pings=limits.ENGINE_PINGS_MAX,
                    pending_size=limits.ENGINE_OUT_BYTES_MAX,
                    flush_timeout=limits.ENGINE_OUT_WAIT_S,
                    error_cb=on_error,
                    disconnected_cb=on_closed,
                    closed_cb=on_closed,
                )
                await link.start()
                for bucket in list(self._buckets.values()):
                    await ensure_bucket(link, bucket)
                attached: set[_Subscription] = set()
                while missing := self._subscriptions.keys() - attached:  # new ones may come while we wait
                    for subscription in missing:
                        await subscription.attach(client)
                    attached |= missing
                    await link.sync()
            guard.check()
        except Exception as error:
            # The client raises more kinds than it documents; all mean that this attempt failed.
            await shut(client)
            guard.check()
            problem = problems[0] if problems else error
            raise self._unavailable(problem) from problem
        except BaseException:
            await shut(client)
            raise
        return link

    def _unavailable(self, problem: Exception) -> errors.EngineUnavailable:
        if _refused(problem):
            return errors.EngineUnavailable(f"engine at {self._config.url} refused user '{self._config.user}'")
        reason = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
        return errors.EngineUnavailable(f"engine at {self._config.url} unavailable: {reason}")

    async def close(self) -> None:
        """See `engine.port.Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._changed.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        for subscription in list(self._subscriptions):
            await subscription.close()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=limits.ENGINE_DRAIN_S)
        running = list(self._handlers)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._link is not None:
            self._link.fail()
            await shut(self._link.client)

    # -- messages -----------------------------------------------------------------------------------------------------

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        check_message(subject, data, headers)
        return _message(await self.link().call(subject, data, headers, timeout_s=timeout_s))

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `engine.port.Engine.publish`."""
        check_message(subject, data, headers)
        await self.link().send(subject, data, headers)

    async def serve(self, subject: str, handler: Handler, *, queue: str = "") -> _Subscription:
        """See `engine.port.Engine.serve`."""
        running = 0

        async def run(message: Msg) -> None:
            nonlocal running
            try:
                reply = await handler(_message(message))
                check_message("reply", reply.data, reply.headers)
            except Exception:
                _log.exception("handler of %s failed", subject)
                reply = error_reply(500, "internal error")
            finally:
                running -= 1
            await self._answer(message, reply)

        async def take(message: Msg) -> None:
            nonlocal running
            if running >= limits.ENGINE_HANDLERS_MAX:
                await self._answer(message, error_reply(503, "overloaded"))
                return
            running += 1
            task = asyncio.create_task(run(message))
            self._handlers.add(task)
            task.add_done_callback(self._handlers.discard)

        return await self._add(subject, queue, take)

    async def subscribe(self, subject: str, handler: Listener, *, queue: str = "") -> _Subscription:
        """See `engine.port.Engine.subscribe`."""

        async def take(message: Msg) -> None:
            try:
                await handler(_message(message))
            except Exception:
                _log.exception("listener of %s failed", subject)

        return await self._add(subject, queue, take)

    async def _add(self, subject: str, queue: str, take: Callable[[Msg], Awaitable[None]]) -> _Subscription:
        check_subscription(subject, queue)
        if self._closed:
            raise errors.EngineUnavailable("engine closed")
        subscription = _Subscription(self._subscriptions, subject, queue, take)
        link = self._link
        if link is not None and link.connected:
            try:
                await subscription.attach(link.client)
                await link.sync()
            except (*FAILURES, errors.EngineError) as error:
                _log.debug("subscribing %s: %r", subject, error)  # the next link will have it
        return subscription

    async def _answer(self, message: Msg, reply: Reply) -> None:
        if not message.reply:
            return
        try:
            await self.link().send(message.reply, reply.data, reply.headers)
        except (errors.EngineError, errors.ConfigError) as error:
            _log.debug("answer on %s not sent: %s", message.subject, error)  # its requester was told 'lost'

    # -- keys ---------------------------------------------------------------------------------------------------------

    async def kv(self, bucket: str, *, persistent: bool, ttl_s: float | None = None) -> NatsKeyValue:
        """See `engine.port.Engine.kv`."""
        check_bucket(bucket, ttl_s)
        wanted = Bucket(name=bucket, persistent=persistent, ttl_s=ttl_s, replicas=self._config.replicas)
        await ensure_bucket(self.link(), wanted)
        self._buckets[bucket] = wanted
        return NatsKeyValue(self, bucket)


def _refused(problem: BaseException | None) -> bool:
    return "authorization violation" in str(problem).lower()


def _message(message: Msg) -> Message:
    return Message(message.subject, message.data, message.headers or {})


async def connect(config: EngineConfig, *, rng: Rng, wait_s: float = limits.ENGINE_WAIT_S) -> NatsEngine:
    """Connect to the engine; from then on the connection is kept, however often it is lost.

    Args:
        config: where, and as whom.
        rng: for unguessable inboxes and jitter.
        wait_s: how long to try for a first connection; 0 tries once.

    Raises:
        EngineUnavailable: no connection in that time (refused credentials: at once); the message names the address.
    """
    engine = NatsEngine(config, rng)
    await engine.start(wait_s)
    return engine
