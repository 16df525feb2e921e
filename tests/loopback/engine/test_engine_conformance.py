"""One suite for every version of the engine: what holds here is the port's contract."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.engine.port import Change, Engine, Handler, KeyValue, Message, Reply, error_reply, reply_error

pytestmark = pytest.mark.loopback

WAIT_S = 10.0


def answer(text: bytes) -> Handler:
    async def handler(message: Message) -> Reply:
        return Reply(text)

    return handler


async def echo(message: Message) -> Reply:
    return Reply(message.data, {"Subject": message.subject, **message.headers})


class TestRequests:
    async def test_request_answered_gives_data_and_headers(self, platform):
        asker, worker = await platform.engine(), await platform.engine()
        await worker.serve("t.echo", echo)

        reply = await asker.request("t.echo", b"\x00hello", {"X-One": "grüße: 1", "x-two": ""}, timeout_s=WAIT_S)

        assert reply.data == b"\x00hello"
        assert dict(reply.headers) == {"X-One": "grüße: 1", "x-two": "", "Subject": "t.echo"}
        assert reply_error(reply) is None

    async def test_request_without_listeners_raises_no_responders_and_was_not_delivered(self, platform):
        asker = await platform.engine()
        with pytest.raises(errors.NoResponders) as caught:
            await asker.request("t.nobody", b"", timeout_s=WAIT_S)
        assert caught.value.maybe_delivered is False

    async def test_request_without_answer_times_out_and_may_be_delivered(self, platform):
        asker, worker = await platform.engine(), await platform.engine()

        async def never(message: Message) -> Reply:
            await asyncio.Event().wait()
            return Reply()

        await worker.serve("t.never", never)
        with pytest.raises(errors.EngineTimeout) as caught:
            await asker.request("t.never", b"", timeout_s=0.05)
        assert caught.value.maybe_delivered is True

    async def test_handler_failure_answers_500_without_details(self, platform, caplog):
        asker = await platform.engine()

        async def broken(message: Message) -> Reply:
            raise RuntimeError("secret detail")

        await asker.serve("t.broken", broken)
        reply = await asker.request("t.broken", b"", timeout_s=WAIT_S)
        assert reply_error(reply) == (500, "internal error")
        assert "handler of t.broken failed" in caplog.text

    async def test_handler_with_malformed_reply_header_answers_500(self, platform):
        asker = await platform.engine()

        async def broken(message: Message) -> Reply:
            return Reply(b"", {"X": "a\r\nb"})

        await asker.serve("t.broken", broken)
        assert reply_error(await asker.request("t.broken", b"", timeout_s=WAIT_S)) == (500, "internal error")

    async def test_error_reply_reaches_the_asker(self, platform):
        asker = await platform.engine()

        async def refuse(message: Message) -> Reply:
            return error_reply(404, "no such\r\n  order")

        await asker.serve("t.refuse", refuse)
        assert reply_error(await asker.request("t.refuse", b"", timeout_s=WAIT_S)) == (404, "no such order")

    async def test_handlers_beyond_the_bound_get_overloaded_and_the_rest_finish(self, platform, monkeypatch):
        monkeypatch.setattr(limits, "ENGINE_HANDLERS_MAX", 3)
        asker = await platform.engine()
        gate = asyncio.Event()
        started = 0

        async def slow(message: Message) -> Reply:
            nonlocal started
            started += 1
            await gate.wait()
            return Reply(b"done")

        await asker.serve("t.slow", slow)
        tasks = [asyncio.create_task(asker.request("t.slow", b"", timeout_s=WAIT_S)) for _ in range(5)]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert [reply_error(task.result()) for task in done] == [(503, "overloaded")] * 2
        gate.set()
        assert [task.result().data for task in (await asyncio.wait(waiting))[0]] == [b"done"] * 3
        assert started == 3

    async def test_requests_beyond_the_bound_are_refused(self, platform, monkeypatch):
        monkeypatch.setattr(limits, "ENGINE_REQUESTS_MAX", 2)
        asker = await platform.engine()
        gate = asyncio.Event()

        async def slow(message: Message) -> Reply:
            await gate.wait()
            return Reply()

        await asker.serve("t.slow", slow)
        monkeypatch.setattr(limits, "ENGINE_REQUESTS_MAX", 1)
        first = asyncio.create_task(asker.request("t.slow", b"", timeout_s=WAIT_S))
        await asyncio.sleep(0)
        with pytest.raises(errors.EngineUnavailable):
            await asker.request("t.slow", b"", timeout_s=WAIT_S)
        gate.set()
        await first

    async def test_request_cancelled_leaves_the_engine_well(self, platform):
        asker = await platform.engine()
        gate = asyncio.Event()

        async def slow(message: Message) -> Reply:
            await gate.wait()
            return Reply(message.data)

        await asker.serve("t.slow", slow)
        task = asyncio.create_task(asker.request("t.slow", b"1", timeout_s=WAIT_S))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        assert (await asker.request("t.slow", b"2", timeout_s=WAIT_S)).data == b"2"

    async def test_large_message_passes_and_larger_is_refused(self, platform):
        asker = await platform.engine()
        await asker.serve("t.size", answer(b"ok"))
        size = limits.ENGINE_MESSAGE_BYTES_MAX
        assert (await asker.request("t.size", bytes(size), timeout_s=WAIT_S)).data == b"ok"
        with pytest.raises(errors.ConfigError):
            await asker.request("t.size", bytes(size + 1), timeout_s=WAIT_S)
        with pytest.raises(errors.ConfigError):
            await asker.request("t.size", bytes(size - 10), {"X": "y" * 20}, timeout_s=WAIT_S)
        assert asker.connected

    @pytest.mark.parametrize("subject", ["", "a b", "a..b", ".a", "a.", "a.*", "a.>", "a\r\nPUB x 1", "ü", "a" * 2000])
    async def test_malformed_subject_is_refused(self, platform, subject):
        engine = await platform.engine()
        with pytest.raises(errors.ConfigError):
            await engine.request(subject, b"", timeout_s=WAIT_S)
        with pytest.raises(errors.ConfigError):
            await engine.publish(subject, b"")

    @pytest.mark.parametrize(
        ("name", "value"), [("a b", "x"), ("", "x"), ("a:", "x"), ("a", "x\ny"), ("a", " x"), ("a", "\ud800")]
    )
    async def test_malformed_header_is_refused(self, platform, name, value):
        engine = await platform.engine()
        with pytest.raises(errors.ConfigError):
            await engine.publish("t.x", b"", {name: value})

    @pytest.mark.parametrize("subject", ["", "a.>.b", "a*", "a. b", ">.a", "a..b"])
    async def test_malformed_subscription_is_refused(self, platform, subject):
        engine = await platform.engine()
        with pytest.raises(errors.ConfigError):
            await engine.serve(subject, echo)
        with pytest.raises(errors.ConfigError):
            await engine.serve("a", echo, queue="b *")


class TestSubscriptions:
    clustered = True

    async def test_queue_group_gives_each_message_to_one(self, platform):
        asker = await platform.engine()
        counts = {b"a": 0, b"b": 0}
        for name in counts:
            await (await platform.engine()).serve("t.work", answer(name), queue="workers")
        for _ in range(64):
            counts[(await asker.request("t.work", b"", timeout_s=WAIT_S)).data] += 1
        assert sum(counts.values()) == 64
        assert min(counts.values()) > 0  # with NATS' random choice all on one side is 2^-63

    async def test_publish_reaches_all_plain_subscribers_and_one_of_a_queue(self, platform):
        sender = await platform.engine()
        plain: asyncio.Queue[bytes] = asyncio.Queue()
        grouped: asyncio.Queue[bytes] = asyncio.Queue()
        for queue, group in ((plain, ""), (plain, ""), (grouped, "g"), (grouped, "g")):
            await (await platform.engine()).subscribe("t.news", put_into(queue), queue=group)
        await sender.publish("t.news", b"1")
        await sender.publish("t.news", b"end")
        async with asyncio.timeout(WAIT_S):
            assert sorted([await plain.get() for _ in range(4)]) == [b"1", b"1", b"end", b"end"]
            assert sorted([await grouped.get() for _ in range(2)]) == [b"1", b"end"]
        assert plain.empty()
        assert grouped.empty()

    @pytest.mark.parametrize(
        ("pattern", "wanted"),
        [
            ("w.*.c", [b"w.b.c", b"w.x.c"]),
            ("w.>", [b"w.b", b"w.b.c", b"w.x.c", b"w.b.c.d"]),
            ("w.*", [b"w.b"]),
            ("*.b.>", [b"w.b.c", b"w.b.c.d"]),
        ],
    )
    async def test_wildcards_match_as_in_nats(self, platform, pattern, wanted):
        engine = await platform.engine()
        got: asyncio.Queue[bytes] = asyncio.Queue()
        await engine.subscribe(pattern, put_into(got))
        await engine.subscribe("end", put_into(got))
        for subject in ("w", "w.b", "w.b.c", "w.x.c", "w.b.c.d", "v.b"):
            await engine.publish(subject, subject.encode())
        seen = []
        async with asyncio.timeout(WAIT_S):
            while len(seen) < len(wanted):
                seen.append(await got.get())
        assert seen == wanted

    async def test_listener_gets_messages_one_at_a_time_in_order(self, platform):
        sender, taker = await platform.engine(), await platform.engine()
        seen: list[bytes] = []
        running = 0
        end = asyncio.Event()

        async def listen(message: Message) -> None:
            nonlocal running
            running += 1
            assert running == 1
            await asyncio.sleep(0)
            running -= 1
            seen.append(message.data)
            if len(seen) == 200:
                end.set()

        await taker.subscribe("t.order", listen)
        for number in range(200):
            await sender.publish("t.order", str(number).encode())
        async with asyncio.timeout(WAIT_S):
            await end.wait()
        assert seen == [str(number).encode() for number in range(200)]

    async def test_listener_failure_does_not_stop_the_next_message(self, platform, caplog):
        engine = await platform.engine()
        got: asyncio.Queue[bytes] = asyncio.Queue()

        async def listen(message: Message) -> None:
            if message.data == b"bad":
                raise RuntimeError("bad message")
            await got.put(message.data)

        await engine.subscribe("t.news", listen)
        await engine.publish("t.news", b"bad")
        await engine.publish("t.news", b"good")
        async with asyncio.timeout(WAIT_S):
            assert await got.get() == b"good"
        assert "listener of t.news failed" in caplog.text

    async def test_slow_listener_loses_the_newest_beyond_the_bound_and_says_so(self, platform, monkeypatch, caplog):
        monkeypatch.setattr(limits, "ENGINE_QUEUE_MESSAGES_MAX", 4)
        engine = await platform.engine()
        gate, first = asyncio.Event(), asyncio.Event()
        seen: list[bytes] = []

        async def listen(message: Message) -> None:
            first.set()
            await gate.wait()
            seen.append(message.data)

        await engine.subscribe("t.flood", listen)
        await engine.publish("t.flood", b"0")
        async with asyncio.timeout(WAIT_S):
            await first.wait()
        for number in range(1, 20):
            await engine.publish("t.flood", str(number).encode())
        await engine.serve("t.after", answer(b""))
        await engine.request("t.after", b"", timeout_s=WAIT_S)
        gate.set()
        await until(lambda: len(seen) == 5)
        assert seen == [b"0", b"1", b"2", b"3", b"4"]
        assert "slow" in caplog.text

    async def test_closed_subscription_gets_nothing_more(self, platform):
        engine = await platform.engine()
        subscription = await engine.serve("t.gone", echo)
        await engine.request("t.gone", b"", timeout_s=WAIT_S)
        await subscription.close()
        await subscription.close()
        with pytest.raises(errors.NoResponders):
            await engine.request("t.gone", b"", timeout_s=WAIT_S)

    async def test_closed_engine_refuses_and_its_subscriptions_are_gone(self, platform):
        engine, other = await platform.engine(), await platform.engine()
        await engine.serve("t.x", echo)
        await engine.close()
        await engine.close()
        assert not engine.connected
        with pytest.raises(errors.EngineUnavailable):
            await engine.request("t.x", b"", timeout_s=WAIT_S)
        with pytest.raises(errors.EngineUnavailable):
            await engine.publish("t.x", b"")
        with pytest.raises(errors.EngineUnavailable):
            await engine.serve("t.x", echo)
        with pytest.raises(errors.NoResponders):
            await other.request("t.x", b"", timeout_s=WAIT_S)

    async def test_closing_engine_lets_a_running_handler_answer(self, platform):
        asker, worker = await platform.engine(), await platform.engine()
        entered, gate = asyncio.Event(), asyncio.Event()

        async def slow(message: Message) -> Reply:
            entered.set()
            await gate.wait()
            return Reply(b"done")

        await worker.serve("t.slow", slow)
        task = asyncio.create_task(asker.request("t.slow", b"", timeout_s=WAIT_S))
        await entered.wait()
        asyncio.get_running_loop().call_later(0.05, gate.set)
        await worker.close()
        assert (await task).data == b"done"


def put_into(queue: "asyncio.Queue[bytes]") -> Callable[[Message], Awaitable[None]]:
    async def listener(message: Message) -> None:
        await queue.put(message.data)

    return listener


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the other side may be another process
            await asyncio.sleep(0.01)


class TestKeys:
    clustered = True

    async def test_put_then_get_gives_value_and_growing_revision(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=True)
        assert await kv.get("a.b") is None
        first = await kv.put("a.b", b"1")
        other = await kv.put("a.c", b"")
        second = await kv.put("a.b", b"2")
        assert first < other < second
        entry = await kv.get("a.b")
        assert entry is not None
        assert (entry.value, entry.revision) == (b"2", second)
        empty = await kv.get("a.c")
        assert empty is not None
        assert empty.value == b""

    async def test_create_of_existing_key_conflicts(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=False)
        await kv.create("k", b"1")
        with pytest.raises(errors.Conflict):
            await kv.create("k", b"2")
        assert (await must(kv, "k")) == b"1"

    async def test_many_keys_are_read_in_one_request_as_they_are_now(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=False)
        revisions = {key: await kv.put(key, key.encode()) for key in ("a.b", "a.c.d", "ab.c", "z", "a.e")}
        revisions["a.b"] = await kv.put("a.b", b"newer")
        await kv.delete("a.e")
        found = await kv.get_many(["a.b", "z", "a.e", "never"])
        assert {key: (entry.value, entry.revision) for key, entry in found.items()} == {
            "a.b": (b"newer", revisions["a.b"]),
            "z": (b"z", revisions["z"]),
        }
        assert await kv.get_many(["never"]) == await kv.get_many([]) == {}
        below = await kv.under("a")
        assert {key: entry.value for key, entry in below.items()} == {"a.b": b"newer", "a.c.d": b"a.c.d"}
        assert await kv.under("a.c.d") == await kv.under("nothing") == {}
        for wrong in (["a", ""], ["a.*"], ["k"] * (limits.ENGINE_KV_READ_MAX + 1)):
            with pytest.raises(errors.ConfigError):
                await kv.get_many(wrong)

    async def test_more_keys_below_a_prefix_than_one_read_gives_are_an_error(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=False)
        for start in range(0, limits.ENGINE_KV_READ_MAX, 128):
            await asyncio.gather(*(kv.put(f"a.{number}", b"x") for number in range(start, start + 128)))
        assert len(await kv.under("a")) == limits.ENGINE_KV_READ_MAX
        await kv.put("a.more", b"x")
        with pytest.raises(errors.EngineError):
            await kv.under("a")

    async def test_create_after_delete_works(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=False)
        first = await kv.create("k", b"1")
        await kv.delete("k")
        assert await kv.create("k", b"2") > first
        assert (await must(kv, "k")) == b"2"

    async def test_update_with_old_revision_conflicts_and_writes_nothing(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=True)
        first = await kv.put("k", b"1")
        second = await kv.update("k", b"2", first)
        with pytest.raises(errors.Conflict) as caught:
            await kv.update("k", b"3", first)
        assert caught.value.maybe_delivered is False
        assert (await must(kv, "k")) == b"2"
        await kv.delete("k")
        with pytest.raises(errors.Conflict):
            await kv.update("k", b"3", second)

    async def test_update_by_many_at_once_loses_no_increment(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=False)
        await kv.put("n", b"0")

        async def increment() -> None:
            while True:
                entry = await kv.get("n")
                assert entry is not None
                try:
                    await kv.update("n", str(int(entry.value) + 1).encode(), entry.revision)
                except errors.Conflict:
                    continue
                return

        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(increment())
        assert (await must(kv, "n")) == b"20"

    async def test_delete_removes_and_checks_the_revision(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=True)
        first = await kv.put("k", b"1")
        second = await kv.put("k", b"2")
        with pytest.raises(errors.Conflict):
            await kv.delete("k", first)
        assert (await must(kv, "k")) == b"2"
        await kv.delete("k", second)
        assert await kv.get("k") is None
        await kv.delete("k")
        await kv.delete("never")

    async def test_expired_key_is_gone_told_to_watchers_and_can_be_created(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=False, ttl_s=1.0)
        await kv.put("p.k", b"1")
        changes = kv.watch()
        assert pair(await following(changes)) == ("p.k", b"1")
        assert pair(await following(changes)) == ("p.k", None)
        assert await kv.get("p.k") is None
        await kv.create("p.k", b"2")
        assert pair(await following(changes)) == ("p.k", b"2")

    async def test_bucket_with_other_properties_is_refused(self, platform):
        engine = await platform.engine()
        await engine.kv("b", persistent=True)
        await engine.kv("b", persistent=True)
        with pytest.raises(errors.ConfigError):
            await engine.kv("b", persistent=False)
        with pytest.raises(errors.ConfigError):
            await engine.kv("b", persistent=True, ttl_s=5.0)

    async def test_malformed_keys_buckets_and_lives_are_refused(self, platform):
        engine = await platform.engine()
        kv = await engine.kv("b", persistent=False)
        for key in ("", ".", "a..b", "a.", "*", ">", "a b", "ü", "a" * 2000):
            for attempt in (kv.get(key), kv.put(key, b""), kv.create(key, b""), kv.update(key, b"", 1), kv.delete(key)):
                with pytest.raises(errors.ConfigError):
                    await attempt
        with pytest.raises(errors.ConfigError):
            await following(kv.watch("*"))
        for bucket in ("", "a.b", "a" * 65, "a>"):
            with pytest.raises(errors.ConfigError):
                await engine.kv(bucket, persistent=False)
        for ttl_s in (0.0, -1.0, 0.5, float("nan")):
            with pytest.raises(errors.ConfigError):
                await engine.kv("c", persistent=False, ttl_s=ttl_s)


async def must(kv: KeyValue, key: str) -> bytes:
    entry = await kv.get(key)
    assert entry is not None
    return entry.value


def pair(change: Change) -> tuple[str, bytes | None]:
    return change.key, change.value


async def following(changes: AsyncIterator[Change]) -> Change:
    async with asyncio.timeout(WAIT_S):
        return await anext(changes)


class TestWatch:
    clustered = True

    async def test_watch_gives_present_keys_then_changes(self, platform):
        engine, other = await platform.engine(), await platform.engine()
        kv = await engine.kv("b", persistent=True)
        await kv.put("r.gone", b"x")
        await kv.delete("r.gone")
        revision = await kv.put("r.a", b"1")
        await kv.put("s.a", b"other prefix")
        await kv.put("r", b"the prefix itself")
        changes = kv.watch("r")
        assert await following(changes) == Change("r.a", b"1", revision)
        theirs = await other.kv("b", persistent=True)
        revision = await theirs.put("r.b.c", b"2")
        await theirs.put("rr.b", b"other prefix")
        assert await following(changes) == Change("r.b.c", b"2", revision)
        await theirs.delete("r.a")
        deleted = await following(changes)
        assert pair(deleted) == ("r.a", None)
        assert deleted.revision > revision
        await theirs.put("r.a", b"3")
        assert pair(await following(changes)) == ("r.a", b"3")

    async def test_watch_of_empty_bucket_gives_the_first_write(self, platform):
        kv = await (await platform.engine()).kv("b", persistent=False)
        changes = kv.watch()
        first = asyncio.create_task(following(changes))
        await asyncio.sleep(0.05)
        await kv.put("k", b"1")
        assert pair(await first) == ("k", b"1")

    async def test_watch_of_more_keys_than_its_queue_gives_all(self, platform, monkeypatch):
        monkeypatch.setattr(limits, "ENGINE_WATCH_QUEUE_MAX", 8)
        kv = await (await platform.engine()).kv("b", persistent=False)
        for number in range(300):
            await kv.put(f"k.{number}", b"x" * 100)
        changes = kv.watch("k")
        seen = [(await following(changes)).key for _ in range(300)]
        assert sorted(seen) == sorted(f"k.{number}" for number in range(300))
        await kv.put("k.last", b"")
        assert (await following(changes)).key == "k.last"

    async def test_watch_ends_when_the_engine_closes(self, platform):
        engine = await platform.engine()
        kv = await engine.kv("b", persistent=False)
        await kv.put("k", b"1")
        changes = kv.watch()
        await following(changes)
        rest = asyncio.create_task(collect(changes))
        await asyncio.sleep(0.05)
        await engine.close()
        async with asyncio.timeout(WAIT_S):
            assert await rest == []

    async def test_watch_abandoned_leaves_the_engine_well(self, platform):
        engine = await platform.engine()
        kv = await engine.kv("b", persistent=False)
        await kv.put("k", b"1")
        for _ in range(3):
            changes = kv.watch()
            await following(changes)
            await changes.aclose()
        assert (await must(kv, "k")) == b"1"


async def collect(changes: AsyncIterator[Change]) -> list[Change]:
    return [change async for change in changes]


class TestLoss:
    async def test_requests_fail_at_once_while_away_and_work_again_after(self, platform):
        asker, worker = await platform.engine(), await platform.engine()
        await worker.serve("t.echo", echo, queue="q")
        await asker.request("t.echo", b"", timeout_s=WAIT_S)
        kv = await asker.kv("b", persistent=True)

        await platform.cut()

        assert not asker.connected
        loop = asyncio.get_running_loop()
        start = loop.time()
        for attempt in (
            asker.request("t.echo", b"", timeout_s=60.0),
            asker.publish("t.echo", b""),
            asker.kv("b", persistent=True),
            kv.get_many(["k"]),
            kv.under("k"),
        ):
            with pytest.raises(errors.EngineUnavailable) as caught:
                await attempt
            assert caught.value.maybe_delivered is False
        assert loop.time() - start < 5.0

        await platform.heal()
        assert (await asker.request("t.echo", b"again", timeout_s=WAIT_S)).data == b"again"

    async def test_request_in_flight_fails_with_the_loss_and_may_be_delivered(self, platform):
        asker, worker = await platform.engine(), await platform.engine()
        entered = asyncio.Event()

        async def never(message: Message) -> Reply:
            entered.set()
            await asyncio.Event().wait()
            return Reply()

        await worker.serve("t.never", never)
        task = asyncio.create_task(asker.request("t.never", b"", timeout_s=3600.0))
        await entered.wait()
        await platform.cut()
        with pytest.raises(errors.EngineUnavailable) as caught:
            async with asyncio.timeout(WAIT_S):
                await task
        assert caught.value.maybe_delivered is True

    async def test_message_refused_while_away_is_not_delivered_later(self, platform):
        sender, taker = await platform.engine(), await platform.engine()
        got: asyncio.Queue[bytes] = asyncio.Queue()
        await taker.subscribe("t.news", put_into(got))
        await platform.cut()
        with pytest.raises(errors.EngineUnavailable):
            await sender.publish("t.news", b"refused")
        await platform.heal()
        await sender.publish("t.news", b"after")
        async with asyncio.timeout(WAIT_S):
            assert await got.get() == b"after"

    async def test_subscription_made_or_closed_while_away_holds_after(self, platform):
        asker, worker = await platform.engine(), await platform.engine()
        old = await worker.serve("t.old", echo)
        await platform.cut()
        await worker.serve("t.new", echo)
        await old.close()
        await platform.heal()
        assert (await asker.request("t.new", b"x", timeout_s=WAIT_S)).data == b"x"
        with pytest.raises(errors.NoResponders):
            await asker.request("t.old", b"", timeout_s=WAIT_S)

    async def test_persistent_keys_survive_and_others_may_be_written_again(self, platform):
        engine = await platform.engine()
        durable = await engine.kv("durable", persistent=True)
        volatile = await engine.kv("volatile", persistent=False)
        revision = await durable.put("k", b"1")
        await volatile.put("k", b"1")
        await platform.cut()
        for attempt in (durable.get("k"), durable.put("k", b""), volatile.get("k")):
            with pytest.raises(errors.EngineUnavailable):
                await attempt
        await platform.heal()
        entry = await durable.get("k")
        assert entry is not None
        assert (entry.value, entry.revision) == (b"1", revision)
        assert await durable.update("k", b"2", revision) > revision
        assert await volatile.get("k") is None
        await volatile.create("k", b"2")
        assert (await must(volatile, "k")) == b"2"

    async def test_watch_goes_on_after_the_loss_with_deletions_of_what_was_lost(self, platform):
        engine = await platform.engine()
        durable = await engine.kv("durable", persistent=True)
        volatile = await engine.kv("volatile", persistent=False)
        await durable.put("k", b"1")
        await volatile.put("gone", b"1")
        of_durable, of_volatile = durable.watch(), volatile.watch()
        assert pair(await following(of_durable)) == ("k", b"1")
        assert pair(await following(of_volatile)) == ("gone", b"1")
        waiting = asyncio.create_task(following(of_durable))
        await platform.cut()
        await platform.heal()
        assert pair(await waiting) == ("k", b"1")  # the present keys again
        assert pair(await following(of_volatile)) == ("gone", None)
        await durable.put("k", b"2")
        await volatile.put("new", b"2")
        assert pair(await following(of_durable)) == ("k", b"2")
        assert pair(await following(of_volatile)) == ("new", b"2")

    async def test_loss_again_and_again_is_survived(self, platform):
        engine: Engine = await platform.engine()
        await engine.serve("t.echo", echo)
        for _ in range(3):
            await platform.cut()
            await platform.heal()
            assert (await engine.request("t.echo", b"x", timeout_s=WAIT_S)).data == b"x"

    async def test_closing_while_away_is_quick_and_clean(self, platform):
        engine = await platform.engine()
        await engine.serve("t.echo", echo)
        await platform.cut()
        async with asyncio.timeout(WAIT_S):
            await engine.close()
