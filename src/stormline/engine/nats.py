"""The engine on NATS, through the stock `nats-py` client.

One `nats-py` client serves one connection's life; when it is lost we make a new one and put all subscriptions on it.
Its own reconnecting is not used, for three reasons: it keeps unsent messages and sends them after the reconnection,
long after their sender was told they failed; requests in flight wait for their time-out instead of failing at once;
and after some server errors it closes for good.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription  # noqa: TC002 - the one import block stays plain

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.core.clock import Rng
from stormline.core.values import Secret
from stormline.engine.nats_kv import Bucket, NatsKeyValue, ensure_bucket
from stormline.engine.nats_link import FAILURES, CancelGuard, Link, QuickClient, shut
from stormline.engine.nats_stream import Consuming, NatsStream, ensure_stream
from stormline.engine.port import (
    Handler,
    Listener,
    Message,
    Reply,
    StreamConfig,
    check_bucket,
    check_message,
    check_stream,
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
        self._kept: dict[str, Bucket | StreamConfig] = {}
        self._ensuring: asyncio.Task[None] | None = None
        self._urls = config.url.split(",")
        self._next_url = int(rng.random() * len(self._urls))  # roles spread over a cluster's servers
        self._consumers: set[Consuming] = set()
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
                pause_s = self._pause_s(attempt // len(self._urls))
                if _refused(error.__cause__) or (attempt + 1 >= len(self._urls) and loop.time() + pause_s > end):
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
            self._learn_urls(link.client)
            await shut(link.client)
            self._link = await self._redial()
            self._changed.set()
            _log.info("engine connected again: %s", self._config.url)

    async def _redial(self) -> Link:
        attempt = 0
        reason = ""
        while True:
            await asyncio.sleep(self._pause_s(attempt // len(self._urls)))
            try:
                return await self._dial()
            except errors.EngineUnavailable as error:
                _log.log(logging.DEBUG if str(error) == reason else logging.WARNING, "%s", error)
                reason = str(error)
                attempt += 1

    def _pause_s(self, attempt: int) -> float:
        whole_s = limits.ENGINE_RECONNECT_PAUSE_S * 2.0 ** min(attempt, 16)
        return min(whole_s, limits.ENGINE_RECONNECT_PAUSE_MAX_S) * (0.5 + self._rng.random() / 2)

    def _learn_urls(self, client: Client) -> None:
        """Remember the servers that the last one named, after those we were told."""
        told = len(self._config.url.split(","))
        found = [f"nats://{each.netloc.rpartition('@')[2]}" for each in client.discovered_servers]
        fresh = [url for url in dict.fromkeys(found) if url not in self._urls]
        self._urls = [*self._urls[:told], *fresh, *self._urls[told:]][: told + limits.ENGINE_URLS_LEARNED_MAX]

    async def _dial(self) -> Link:
        """Make a connection that works: credentials accepted, subscriptions on it, what keeps keys and records there.

        Each attempt is at the next server. The last part is waited for only a little: where nobody can say yet, as
        while a cluster elects a leader, it is done beside the messages.
        """
        guard = CancelGuard()
        url = self._urls[self._next_url % len(self._urls)]
        self._next_url += 1
        client = QuickClient()
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
                    [url],
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
                attached: set[_Subscription] = set()
                while missing := self._subscriptions.keys() - attached:  # new ones may come while we wait
                    for subscription in missing:
                        await subscription.attach(client)
                    attached |= missing
                    await link.sync()
            guard.check()
            await self._ensure_kept(link)
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

    async def _ensure_kept(self, link: Link) -> None:
        if self._ensuring is not None:
            self._ensuring.cancel()
        self._ensuring = asyncio.create_task(self._ensure_each(link), name="engine ensure")
        if self._config.replicas == 1:  # a single server may have lost what it kept in memory, a cluster hardly
            await asyncio.wait([self._ensuring], timeout=limits.ENGINE_ENSURE_S)

    async def _ensure_each(self, link: Link) -> None:
        for kept in list(self._kept.values()):
            attempt = 0
            while link.connected:
                try:
                    await self._ensure(link, kept)
                    break
                except errors.ConfigError as error:
                    _log.warning("engine: %s", error)
                    break
                except (errors.EngineError, *FAILURES) as error:
                    _log.debug("engine: %s is not there yet: %s", kept.name, error)
                await asyncio.sleep(self._pause_s(attempt))
                attempt += 1

    async def _ensure(self, link: Link, kept: Bucket | StreamConfig) -> None:
        if isinstance(kept, Bucket):
            await ensure_bucket(link, kept)
        else:
            await ensure_stream(link, kept, self._config.replicas)

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
        for task in (self._keeper, self._ensuring):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for subscription in list(self._subscriptions):
            await subscription.close()
        for consumer in list(self._consumers):
            await consumer.close()
        await self._settle()
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

    async def _settle(self) -> None:
        """Return when the server knows that our interests have ended; what it had sent us has come by then."""
        if self._link is not None and self._link.connected:
            try:
                await self._link.sync(limits.ENGINE_DRAIN_S)
            except errors.EngineError as error:
                _log.debug("engine: ending interests: %s", error)

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
        self._kept[f"KV_{bucket}"] = wanted
        return NatsKeyValue(self, bucket)

    # -- streams ------------------------------------------------------------------------------------------------------

    async def stream(
        self,
        name: str,
        subjects: Sequence[str],
        *,
        persistent: bool,
        max_bytes: int,
        max_age_s: float | None = None,
        max_per_subject: int | None = None,
    ) -> NatsStream:
        """See `engine.port.Engine.stream`."""
        wanted = StreamConfig(
            name=name,
            subjects=tuple(subjects),
            persistent=persistent,
            max_bytes=max_bytes,
            max_age_s=max_age_s,
            max_per_subject=max_per_subject,
        )
        check_stream(wanted)
        await ensure_stream(self.link(), wanted, self._config.replicas)
        self._kept[name] = wanted
        return NatsStream(self, wanted)

    def consuming(self, consumer: Consuming) -> None:
        """Let a consumer run for as long as the engine is open."""
        if self._closed:
            raise errors.EngineUnavailable("engine closed")
        self._consumers.add(consumer)
        task = consumer.start()
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        task.add_done_callback(lambda _: self._consumers.discard(consumer))


def _refused(problem: BaseException | None) -> bool:
    return "authorization violation" in str(problem).lower()


def _message(message: Msg) -> Message:
    return Message(message.subject, message.data, message.headers or {})


async def connect(config: EngineConfig, *, rng: Rng, wait_s: float = limits.ENGINE_WAIT_S) -> NatsEngine:
    """Connect to the engine; from then on the connection is kept, however often it is lost.

    Args:
        config: where, and as whom.
        rng: for unguessable inboxes and jitter.
        wait_s: how long to try for a first connection; 0 tries each server once.

    Raises:
        EngineUnavailable: no connection in that time (refused credentials: at once); the message names the address.
    """
    engine = NatsEngine(config, rng)
    await engine.start(wait_s)
    return engine
