"""Calls both ways and pushes, as an application sees them."""

import asyncio
import json

import pytest

import stormline
from stormline.core import errors, limits
from stormline.core.codes import Code
from stormline.testing.gateway import answering
from stormline.testing.world import wait_until
from stormline.wire import events as e

pytestmark = pytest.mark.loopback


async def rpc(end, call):
    """Answer with what was asked."""
    answer = {"method": call.method, "params": json.loads(call.body), "key": dict(call.headers).get("idempotency-key")}
    end.machine.send_reply(call.call_id, 0, body=json.dumps(answer).encode())
    end.flush()


class TestCalls:
    async def test_call_gives_the_service_s_answer(self, world):
        here = await world(answering(rpc))
        async with here.client() as client, client.channel() as channel:
            answer = await channel.call("orders.create", {"n": 1}, idempotency_key="k")
        assert answer == {"method": "orders.create", "params": {"n": 1}, "key": "k"}

    async def test_calls_and_requests_share_one_link(self, world):
        async def handle(end, call):
            await (rpc(end, call) if call.gate == "rpc" else asyncio.sleep(0, end.reply(call, b"http")))

        here = await world(answering(handle))
        async with here.client() as client, client.channel() as channel:
            await asyncio.gather(channel.call("a.b"), client.get("https://shop.test/"), channel.call("a.c"))
        assert len(here.gateway.ends) == 1

    async def test_record_says_by_which_version_of_the_plan_the_call_was_made(self, world, records):
        async def handle(end, call):
            await (rpc(end, call) if call.gate == "rpc" else asyncio.sleep(0, end.reply(call, b"http")))

        here = await world(answering(handle), version=7)
        async with here.client(report=True) as client, client.channel() as channel:
            await client.get("https://shop.test/")
            await channel.call("a.b")
        assert [record.plan_version for record in records] == [7, 7]

    async def test_large_parameters_and_answers_go_in_pieces(self, world):
        async def script(end):
            await end.welcome()
            call = await end.next(e.CallReceived)
            await end.send(call, await end.body(call), status=0)
            await end.stay()

        here = await world(script)
        async with here.client() as client, client.channel() as channel:
            assert await channel.call("orders.echo", "x" * 1_000_000) == "x" * 1_000_000

    async def test_refusal_of_the_service_is_a_call_error(self, world):
        async def handle(end, call):
            end.machine.send_fail(call.call_id, Code.CALL_REFUSED, "not you", retry_after_s=2.0)
            end.flush()

        here = await world(answering(handle))
        async with here.client() as client, client.channel() as channel:
            with pytest.raises(errors.CallError) as caught:
                await channel.call("orders.create")
        assert (caught.value.code, caught.value.reason, caught.value.retry_after_s) == (
            Code.CALL_REFUSED, "not you", 2.0,
        )  # fmt: skip

    async def test_deadline_ends_the_call_here_and_cancels_it_there(self, world):
        async def mute(end, call):
            pass

        here = await world(answering(mute))
        async with here.client() as client, client.channel() as channel:
            with pytest.raises(errors.DeadlineExceeded) as caught:
                await channel.call("orders.slow", deadline_s=0.2)
            assert caught.value.maybe_delivered is True
            await wait_until(lambda: any(isinstance(x, e.CallCancelled) for x in here.gateway.ends[0].heard))
            assert here.gateway.calls["orders.slow"] == 1
            asked = next(x for x in here.gateway.ends[0].heard if isinstance(x, e.CallReceived))
            assert 0 < asked.deadline_s <= 0.2

    async def test_lost_call_is_not_made_twice(self, world):
        async def dies(end):
            await end.welcome()
            await end.next(e.CallReceived)
            end.abort()

        here = await world(dies, answering(rpc))
        async with here.client() as client, client.channel() as channel:
            with pytest.raises(errors.ChannelLost) as caught:
                await channel.call("orders.create")
            assert caught.value.maybe_delivered is True
            assert await channel.call("orders.list") is not None
        assert here.gateway.calls["orders.create"] == 1

    async def test_lost_call_with_a_key_is_made_again(self, world):
        async def dies(end):
            await end.welcome()
            await end.next(e.CallReceived)
            end.abort()

        here = await world(dies, answering(rpc))
        async with here.client() as client, client.channel() as channel:
            assert (await channel.call("orders.create", idempotency_key="k1"))["key"] == "k1"

    async def test_call_refused_with_the_greeting_is_made_on_the_next_link(self, world):
        async def busy(end):
            await end.refuse(Code.OVERLOADED, "later", retry_after_s=0.05)

        here = await world(busy, busy, answering(rpc))
        async with here.client() as client, client.channel() as channel:
            assert (await channel.call("orders.create", 1))["params"] == 1

    async def test_gateway_away_is_waited_for_within_the_deadline(self, world):
        here = await world(answering(rpc))
        await here.gateway.stop()
        async with here.client() as client, client.channel() as channel:
            with pytest.raises(errors.TransportError) as caught:
                await channel.call("orders.create", deadline_s=0.5)
        assert caught.value.maybe_delivered is False

    @pytest.mark.parametrize("method", ["", "orders", "Orders.create", "a..b", "a.b "])
    async def test_malformed_method_is_refused_unsent(self, world, method):
        here = await world(answering(rpc))
        async with here.client() as client, client.channel() as channel:
            with pytest.raises(errors.ConfigError):
                await channel.call(method)

    @pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), 1e9])
    async def test_useless_deadline_is_refused(self, world, deadline_s):
        here = await world(answering(rpc))
        async with here.client() as client, client.channel() as channel:
            with pytest.raises(errors.ConfigError):
                await channel.call("orders.create", deadline_s=deadline_s)

    async def test_too_large_parameters_are_refused_unsent(self, world, monkeypatch):
        monkeypatch.setattr(limits, "CALL_BODY_BYTES_MAX", 1000)
        here = await world(answering(rpc))
        async with here.client() as client, client.channel() as channel:
            with pytest.raises(errors.LocalProtocolError):
                await channel.call("orders.create", "x" * 1001)
            assert await channel.call("orders.create", "x")

    async def test_answer_that_is_no_json_is_an_error_of_its_own(self, world):
        async def handle(end, call):
            end.reply(call, b"<html>", status=0)

        here = await world(answering(handle))
        async with here.client() as client, client.channel() as channel:
            with pytest.raises(errors.DecodeError) as caught:
                await channel.call("orders.create")
        assert caught.value.maybe_delivered is True


class TestPushes:
    @staticmethod
    def pushing(*pushes, acks):
        """A script that pushes (id, body) pairs and takes `acks` acknowledgements."""

        async def script(end):
            await end.welcome()
            for push_id, body in pushes:
                end.machine.send_push(push_id, body, topic="news")
            end.flush()
            for _ in range(acks):
                await end.next(e.PushAcked)
            await end.stay()

        return script

    async def test_push_is_given_and_acknowledged(self, world):
        here = await world(self.pushing(("m1", b'{"a": 1}'), acks=1))
        async with here.client() as client, client.channel() as channel:
            push = await anext(aiter(channel.pushes()))
            push.ack()
            assert (push.id, push.topic, push.json()) == ("m1", "news", {"a": 1})
            await wait_until(lambda: any(isinstance(x, e.PushAcked) for x in here.gateway.ends[0].heard))
        assert "{" not in repr(push)

    async def test_same_message_twice_is_shown_once_and_acknowledged_twice(self, world):
        here = await world(self.pushing(("m1", b"1"), ("m1", b"1"), ("m2", b"2"), acks=3))
        seen = []
        async with here.client() as client, client.channel() as channel:
            async for push in channel.pushes():
                push.ack()
                seen.append(push.id)
                if push.id == "m2":
                    break
            # The second m1 had come before the first was acknowledged: it counts as one with it.
            await wait_until(lambda: acked(here.gateway.ends[0]) == {2, 3})
        assert seen == ["m1", "m2"]

    async def test_message_acknowledged_before_its_repetition_is_acknowledged_again(self, world):
        async def script(end):
            await end.welcome()
            for _ in range(2):
                end.machine.send_push("m1", b"1")
                end.flush()
                await end.next(e.PushAcked)
            end.machine.send_push("m2", b"2")
            end.flush()
            await end.stay()

        here = await world(script)
        async with here.client() as client, client.channel() as channel:
            pushes = aiter(channel.pushes())
            (await anext(pushes)).ack()
            assert (await anext(pushes)).id == "m2"

    async def test_unread_message_comes_again_on_the_next_link(self, world):
        async def dies(end):
            await end.welcome()
            end.machine.send_push("m1", b"1")
            end.flush()
            await asyncio.sleep(0.1)
            end.abort()

        here = await world(dies, self.pushing(("m1", b"1"), acks=1))
        async with here.client() as client, client.channel() as channel:
            await wait_until(lambda: len(here.gateway.ends) == 2)
            push = await anext(aiter(channel.pushes()))
            push.ack()
            await wait_until(lambda: acked(here.gateway.ends[1]) == {1})

    @pytest.mark.parametrize("confirmed", ["before it comes again", "after it came again"])
    async def test_shown_message_that_comes_again_is_confirmed_there_and_not_shown_again(self, world, confirmed):
        cut = asyncio.Event()

        async def dies(end):
            await end.welcome()
            end.machine.send_push("m1", b"1")
            end.flush()
            await cut.wait()
            end.abort()

        here = await world(dies, self.pushing(("m1", b"1"), ("m2", b"2"), acks=1))
        async with here.client() as client, client.channel() as channel:
            pushes = aiter(channel.pushes())
            push = await anext(pushes)
            cut.set()
            await wait_until(lambda: channel.session is None)
            if confirmed.startswith("before"):
                push.ack()
            assert (await anext(pushes)).id == "m2"
            push.ack()
            await wait_until(lambda: 1 in acked(here.gateway.ends[1]))

    async def test_pushes_end_with_the_channel(self, world):
        here = await world(answering(rpc))
        async with here.client() as client:
            async with client.channel() as channel:
                await channel.wait_connected()
                reading = asyncio.ensure_future(collect(channel))
                await asyncio.sleep(0)
            assert await reading == []
            assert client._storm.runtime().longline._keeping is None

    async def test_client_asked_to_leave_takes_pushes_until_its_next_session_stands(self, world):
        welcomed_when_left = []

        async def leaves(end):
            await end.welcome()
            end.machine.send_goaway(Code.GOING_AWAY, "stopping", spread_s=1.0)
            end.machine.send_push("p-1", b"1")
            end.flush()
            await end.next(e.PushAcked)
            await end.stay()
            welcomed_when_left.append(here.gateway.ends[1].hello is not None)

        here = await world(leaves, answering(rpc))
        async with here.client() as client, client.channel() as channel:
            reading = asyncio.ensure_future(anext(aiter(channel.pushes())))
            push = await reading
            push.ack()
            await wait_until(lambda: welcomed_when_left)
            assert channel.session.session == "s2"
        assert welcomed_when_left == [True]

    async def test_session_is_kept_over_losses(self, world):
        async def dies(end):
            await end.welcome()
            end.abort()

        here = await world(dies, dies, answering(rpc))
        async with here.client() as client, client.channel() as channel:
            await wait_until(lambda: len(here.gateway.ends) == 3)
            await channel.wait_connected()

    async def test_second_channel_of_a_client_is_refused_while_the_first_is_open(self, world):
        here = await world(answering(rpc))
        async with here.client() as client, client.channel():
            with pytest.raises(errors.LocalProtocolError):
                await client.channel().__aenter__()


class TestServing:
    @staticmethod
    def calling(*calls, answers):
        """A script that calls the device with (method, params) pairs and gathers what comes back."""

        async def script(end):
            await end.welcome()
            for method, params in calls:
                body = json.dumps(params).encode()
                call_id = end.machine.send_call("rpc", method, body=body[:16384], more=len(body) > 16384)
                for at in range(16384, len(body), 16384):
                    end.machine.send_data(call_id, body[at : at + 16384], end=at + 16384 >= len(body))
            end.flush()
            while len(answers) < len(calls):
                event = await end.next(e.ReplyReceived, e.CallFailed)
                answers[event.call_id] = event
            await end.stay()

        return script

    async def test_device_answers_plain_and_async_handlers(self, world):
        answers = {}
        here = await world(self.calling(("lamp.set", {"on": True}), ("lamp.get", None), answers=answers))

        async def get(params):
            await asyncio.sleep(0)
            return params

        async with here.client() as client:
            channel = client.channel()
            channel.serve("lamp.set", lambda params: params["on"])
            channel.serve("lamp.get", get)
            async with channel:
                await wait_until(lambda: len(answers) == 2)
        assert [json.loads(answers[key].body) for key in sorted(answers)] == [True, None]

    async def test_handler_s_error_fails_that_call_alone(self, world, caplog):
        answers = {}
        here = await world(
            self.calling(("a.bad", 1), ("a.good", 2), ("a.unknown", 3), ("a.unjson", 4), answers=answers)
        )
        async with here.client() as client:
            channel = client.channel()
            channel.serve("a.bad", lambda params: params["secret"])
            channel.serve("a.good", lambda params: params)
            channel.serve("a.unjson", lambda params: {1, 2})
            async with channel:
                await wait_until(lambda: len(answers) == 4)
                assert channel.session is not None
        bad, good, unknown, unjson = (answers[key] for key in sorted(answers))
        assert (bad.code, bad.reason) == (Code.CALL_FAILED, "TypeError")
        assert good.body == b"2"
        assert unknown.code == Code.CALL_NOT_FOUND
        assert unjson.code == Code.CALL_FAILED

    async def test_large_parameters_reach_the_handler_whole(self, world):
        answers = {}
        here = await world(self.calling(("a.size", "x" * 200_000), answers=answers))
        async with here.client() as client:
            channel = client.channel()
            channel.serve("a.size", len)
            async with channel:
                await wait_until(lambda: answers)
        assert next(iter(answers.values())).body == b"200000"

    async def test_cancelled_call_ends_the_handler(self, world):
        ended = asyncio.Event()

        async def handler(params):
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        async def script(end):
            await end.welcome()
            call_id = end.machine.send_call("rpc", "a.slow")
            end.flush()
            await asyncio.sleep(0.1)
            end.machine.send_cancel(call_id)
            end.flush()
            await end.stay()

        here = await world(script)
        async with here.client() as client:
            channel = client.channel()
            channel.serve("a.slow", handler)
            async with channel:
                await asyncio.wait_for(ended.wait(), 5)

    async def test_more_calls_than_a_device_takes_are_refused(self, world, monkeypatch):
        monkeypatch.setattr(limits, "DEVICE_CALLS_MAX", 1)
        answers, release = {}, asyncio.Event()
        here = await world(self.calling(("a.slow", 1), ("a.slow", 2), answers=answers))

        async def slow(params):
            await release.wait()

        async with here.client() as client:
            channel = client.channel()
            channel.serve("a.slow", slow)
            async with channel:
                await wait_until(lambda: answers)
                release.set()
                await wait_until(lambda: len(answers) == 2)
        assert sorted(getattr(each, "code", 0) for each in answers.values()) == [0, Code.CALL_TOO_MANY]

    async def test_device_without_a_channel_serves_nothing(self, world):
        answers = {}
        here = await world(self.calling(("a.b", 1), answers=answers))
        async with here.client(disabled=frozenset({"direct"}), read_timeout_s=0.5) as client:
            asking = asyncio.ensure_future(client.get("https://shop.test/"))
            await wait_until(lambda: answers)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert next(iter(answers.values())).code == Code.CALL_NOT_FOUND


async def test_client_without_a_platform_has_no_channel():
    async with stormline.AsyncClient() as client:
        with pytest.raises(errors.ConfigError):
            client.channel()


def acked(end):
    return {seq for event in end.heard if isinstance(event, e.PushAcked) for seq in event.seqs}


async def collect(channel):
    return [push async for push in channel.pushes()]
