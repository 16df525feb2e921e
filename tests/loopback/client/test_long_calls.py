"""Requests over the long connection, and what becomes of them when it breaks at any moment."""

import asyncio
import json

import httpx2
import pytest

import stormline
from stormline.core import limits
from stormline.core.codes import Code
from stormline.net.clock import SystemClock
from stormline.testing.gateway import answering
from stormline.testing.world import BOTH, HOST, bundle_for, rules_for, running_dispatch, wait_until
from stormline.wire import events as e
from stormline.wire import tokens

pytestmark = pytest.mark.loopback
URL = f"https://{HOST}/things?id=1"


def record_of(response):
    return response.extensions["stormline"].record


def lower(headers):
    return {name.lower(): value for name, value in headers}


def once(then):
    """A script that welcomes, reads one call, and does `then(end, call)`."""

    async def script(end):
        await end.welcome()
        call = await end.next(e.CallReceived)
        result = then(end, call)
        if asyncio.iscoroutine(result):
            await result

    return script


class TestWorks:
    async def test_request_is_carried_whole_both_ways(self, world):
        async def handle(end, call):
            body = {
                "method": call.method,
                "target": call.target,
                "headers": lower(call.headers),
                "body": call.body.hex(),
            }
            end.reply(call, json.dumps(body).encode(), status=201, headers=(("x-answer", "yes"), ("set-cookie", "a=1")))

        here = await world(answering(handle))
        async with here.client() as client:
            response = await client.post(URL, content=b"\x00\xffdata", headers={"X-Ask": "1", "Connection": "close"})
        said = response.json()
        assert response.status_code == 201
        assert response.headers["x-answer"] == "yes"
        assert client.cookies["a"] == "1"
        assert (said["method"], said["target"], said["body"]) == ("POST", URL, b"\x00\xffdata".hex())
        assert said["headers"]["x-ask"] == "1"
        assert not {"host", "connection"} & said["headers"].keys()

    async def test_first_call_leaves_in_the_flight_of_hello(self, world):
        heard = []

        async def script(end):
            await end.read_hello()
            # Whatever has come is in the machine now, although no WELCOME was said: the CALL is among it.
            await wait_until(lambda: len(end.machine._in) > 0)
            heard.append("call before welcome")
            await end.welcome()
            end.reply(await end.next(e.CallReceived), b"done")
            await end.stay()

        async def patient(end):
            # One read may bring HELLO alone; go on reading before WELCOME.
            reading = asyncio.ensure_future(read_on(end))
            try:
                await script(end)
            finally:
                reading.cancel()

        async def read_on(end):
            await wait_until(lambda: end.hello is not None)
            while len(end.machine._in) == 0:
                end.machine.receive_data(await end.reader.read(65536), asyncio.get_running_loop().time())

        here = await world(patient)
        async with here.client() as client:
            assert (await client.get(URL)).text == "done"
        assert heard == ["call before welcome"]

    async def test_hundred_requests_at_once_share_one_link(self, world):
        here = await world(answering())
        async with here.client() as client:
            answers = await asyncio.gather(*(client.post(URL, content=str(n)) for n in range(100)))
        assert [answer.text for answer in answers] == [str(n) for n in range(100)]
        assert len(here.gateway.ends) == 1

    async def test_more_requests_than_a_link_takes_wait_and_share_it(self, world, monkeypatch):
        monkeypatch.setattr(limits, "CALLS_IN_FLIGHT_MAX", 4)
        here = await world(answering())
        async with here.client() as client:
            answers = await asyncio.gather(*(client.post(URL, content=str(n)) for n in range(30)))
        assert [answer.text for answer in answers] == [str(n) for n in range(30)]
        assert len(here.gateway.ends) == 1

    async def test_more_requests_than_may_wait_fail_at_once(self, world, monkeypatch):
        monkeypatch.setattr(limits, "CALLS_IN_FLIGHT_MAX", 1)
        monkeypatch.setattr(limits, "LINK_WAITING_MAX", 1)

        async def mute(end, call):
            pass

        here = await world(answering(mute))
        async with here.client(disabled=frozenset({"direct"})) as client:
            first = [asyncio.ensure_future(client.get(URL)) for _ in range(2)]
            await wait_until(lambda: here.gateway.calls["GET"] == 1)
            with pytest.raises(stormline.errors.QueueFull) as caught:
                await client.get(URL)
            for task in first:
                task.cancel()
            await asyncio.gather(*first, return_exceptions=True)
        assert isinstance(caught.value, httpx2.PoolTimeout)
        assert caught.value.maybe_delivered is False

    async def test_one_failing_request_hurts_no_other(self, world):
        async def handle(end, call):
            if call.target.endswith("bad"):
                end.machine.send_fail(call.call_id, Code.CALL_UPSTREAM, "it broke", maybe_delivered=True)
                end.flush()
            else:
                await asyncio.sleep(0.02)
                end.reply(call, b"good")

        here = await world(answering(handle))
        async with here.client() as client:
            asked = [client.post(f"https://{HOST}/{'bad' if n % 3 == 0 else 'good'}", content=b"x") for n in range(30)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        for n, answer in enumerate(answers):
            if n % 3 == 0:
                assert isinstance(answer, stormline.errors.GatewayError)
                assert isinstance(answer, httpx2.ReadError)
                assert (answer.code, answer.maybe_delivered) == (Code.CALL_UPSTREAM, True)
            else:
                assert answer.text == "good"
        assert len(here.gateway.ends) == 1

    async def test_upload_of_five_megabytes_goes_as_credit_allows(self, world):
        async def script(end):
            await end.welcome()
            call = await end.next(e.CallReceived)
            end.reply(call, str(sum(await end.body(call))).encode())
            await end.stay()

        async def chunks():
            for n in range(80):
                yield bytes([n]) * 65536

        here = await world(script)
        async with here.client() as client:
            response = await client.post(URL, content=chunks())
        assert int(response.text) == sum(range(80)) * 65536
        assert record_of(response).bytes_up >= 80 * 65536

    async def test_download_with_a_slow_reader_is_held_back(self, world):
        size, sent = 5 * 1024 * 1024, []

        async def script(end):
            await end.welcome()
            call = await end.next(e.CallReceived)
            sending = asyncio.ensure_future(end.send(call, bytes(size)))
            while not sending.done():
                sent.append(size if sending.done() else limits.CREDIT_BYTES - end.machine.credit(call.call_id))
                await asyncio.sleep(0.005)
            await sending
            await end.stay()

        here = await world(script)
        got, held = 0, []
        async with here.client() as client, client.stream("GET", URL) as response:
            async for chunk in response.aiter_raw():
                got += len(chunk)
                link = next(iter(client._storm.runtime().longline._link._calls.values()), None)
                held.append(sum(map(len, link._chunks)) if link is not None else 0)
                if got % (64 * 1024) == 0:
                    await asyncio.sleep(0.002)
        assert got == size
        assert max(held) <= limits.CREDIT_BYTES

    async def test_upload_to_a_gateway_that_never_reads_ends_by_the_read_timeout(self, world):
        async def script(end):
            await end.welcome()
            await end.next(e.CallReceived)
            await asyncio.sleep(60)

        async def endless():
            while True:
                yield bytes(65536)

        here = await world(script)
        async with here.client(disabled=frozenset({"direct"})) as client:
            with pytest.raises(httpx2.WriteTimeout) as caught:
                await client.post(URL, content=endless(), timeout=httpx2.Timeout(5, read=0.3))
        assert caught.value.maybe_delivered is True

    async def test_upload_that_moves_outlasts_the_read_timeout(self, world):
        async def script(end):
            await end.welcome()
            call = await end.next(e.CallReceived)
            end.reply(call, str(len(await end.body(call))).encode())
            await end.stay()

        async def slow():
            for _ in range(12):
                await asyncio.sleep(0.1)
                yield b"x" * 100

        here = await world(script)
        async with here.client() as client:
            response = await client.post(URL, content=slow(), timeout=httpx2.Timeout(5, read=0.5))
        assert response.text == "1200"

    async def test_body_source_that_fails_ends_the_call_with_its_own_error(self, world):
        async def broken():
            yield b"x"
            raise ZeroDivisionError

        here = await world(answering(lambda end, call: asyncio.sleep(0)))
        async with here.client() as client:
            with pytest.raises(ZeroDivisionError):
                await client.post(URL, content=broken())
            await wait_until(lambda: any(isinstance(x, e.CallCancelled) for x in here.gateway.ends[0].heard))

    async def test_answer_before_the_body_is_out_ends_the_sending(self, world):
        left = asyncio.Event()

        async def endless():
            try:
                while True:
                    yield bytes(1000)
                    await asyncio.sleep(0.001)
            finally:
                left.set()

        async def handle(end, call):
            end.reply(call, b"too much", status=413)

        here = await world(answering(handle))
        async with here.client() as client:
            response = await client.post(URL, content=endless())
            await asyncio.wait_for(left.wait(), 5)
        assert response.status_code == 413


class TestLoss:
    """What is known of a request whose link went away: `maybe_delivered` is exact, writes are made once."""

    @staticmethod
    def abort(end, call):
        end.abort()

    async def test_write_lost_after_it_was_read_is_made_once_over_all_means(self, world, origin):
        here, there = await world(once(self.abort), answering()), await origin()
        async with here.client() as client:
            with pytest.raises(stormline.errors.ChannelLost) as caught:
                await client.post(there.url(host=BOTH), content=b"order")
        assert caught.value.maybe_delivered is True
        assert isinstance(caught.value, httpx2.ReadError)
        assert here.gateway.calls["POST"] + there.counts["POST"] == 1

    async def test_read_lost_is_asked_again_and_answered(self, world, origin):
        here, there = await world(once(self.abort), answering()), await origin()
        async with here.client() as client:
            response = await client.get(there.url(host=BOTH))
        assert response.status_code == 200
        attempts = record_of(response).attempts
        assert attempts[0].failure == "long.lost"
        assert attempts[0].maybe_delivered
        assert len(attempts) == 2

    async def test_read_on_a_link_that_stood_is_asked_again_on_a_fresh_link(self, world):
        async def second_call_dies(end):
            await end.welcome()
            end.reply(await end.next(e.CallReceived), b"first")
            await end.next(e.CallReceived)
            end.abort()

        here = await world(second_call_dies, answering())
        async with here.client() as client:
            assert (await client.get(URL)).text == "first"
            response = await client.get(URL)
        assert response.status_code == 200
        assert [each.means for each in record_of(response).attempts] == ["long", "long"]
        assert [each.reused for each in record_of(response).attempts] == [True, False]

    async def test_write_with_a_key_is_sent_again_with_the_same_key(self, world):
        keys = []

        async def handle(end, call):
            keys.append(lower(call.headers)["idempotency-key"])
            end.reply(call, b"made")

        async def dies(end):
            await end.welcome()
            call = await end.next(e.CallReceived)
            keys.append(lower(call.headers)["idempotency-key"])
            end.abort()

        here = await world(dies, answering(handle))
        async with here.client() as client:
            response = await client.post(URL, content=b"order", headers={"Idempotency-Key": "k1"})
        assert response.text == "made"
        assert keys == ["k1", "k1"]

    async def test_streamed_body_is_not_sent_again_once_read_from(self, world, origin):
        async def script(end):
            await end.welcome()
            await end.next(e.DataReceived)
            end.abort()

        async def chunks():
            yield b"x" * 100
            await asyncio.sleep(60)

        here, there = await world(script, answering()), await origin()
        async with here.client() as client:
            with pytest.raises(stormline.errors.ChannelLost):
                await client.post(there.url(host=BOTH), content=chunks(), headers={"Idempotency-Key": "k1"})
        assert len(here.gateway.ends) == 1
        assert there.requests == []

    async def test_half_a_body_is_an_error_never_an_answer(self, world):
        async def script(end):
            await end.welcome()
            call = await end.next(e.CallReceived)
            end.machine.send_reply(call.call_id, 200, body=b"half", more=True)
            end.flush()
            await asyncio.sleep(0.05)
            end.abort()

        here = await world(script)
        async with here.client() as client:
            with pytest.raises(stormline.errors.ChannelLost) as caught:
                await client.get(URL)
        assert caught.value.phase == "body"
        assert caught.value.maybe_delivered is True

    async def test_fail_in_the_middle_of_a_body_is_an_error(self, world):
        async def handle(end, call):
            end.machine.send_reply(call.call_id, 200, body=b"half", more=True)
            end.machine.send_fail(call.call_id, Code.CALL_UPSTREAM, "broke off", maybe_delivered=True)
            end.flush()

        here = await world(answering(handle))
        async with here.client() as client:
            with pytest.raises(stormline.errors.GatewayError) as caught:
                await client.get(URL)
        assert caught.value.phase == "body"

    async def test_gateway_that_dies_between_hello_and_welcome_leaves_a_write_unknown(self, world, origin):
        async def script(end):
            await end.read_hello()
            end.abort()

        here, there = await world(script), await origin()
        async with here.client() as client:
            with pytest.raises(stormline.errors.ChannelLost) as caught:
                await client.post(there.url(host=BOTH), content=b"order")
            assert caught.value.maybe_delivered is True
            assert there.counts["POST"] == 0
            assert (await client.get(there.url(host=BOTH))).text == "ok"

    @pytest.mark.parametrize("code", [Code.OVERLOADED, Code.GOING_AWAY, Code.APP_UNKNOWN, Code.VERSION_UNSUPPORTED])
    async def test_refused_greeting_delivers_nothing_so_a_write_goes_another_way(self, world, origin, code):
        async def script(end):
            await end.refuse(code, "no", retry_after_s=30.0)

        here, there = await world(script), await origin()
        async with here.client() as client:
            response = await client.post(there.url(host=BOTH), content=b"order")
            assert (response.text, there.counts["POST"]) == ("ok", 1)
            assert record_of(response).attempts[0].maybe_delivered is False
            for _ in range(3):  # and the gateway is left alone meanwhile
                assert (await client.post(there.url(host=BOTH), content=b"order")).text == "ok"
        assert len(here.gateway.ends) == 1

    async def test_write_refused_by_the_gateway_with_certainty_goes_another_way(self, world, origin):
        async def handle(end, call):
            end.machine.send_fail(call.call_id, Code.CALL_UNAVAILABLE, "no upstream", maybe_delivered=False)
            end.flush()

        here, there = await world(answering(handle)), await origin()
        async with here.client() as client:
            response = await client.post(there.url(host=BOTH), content=b"order")
        assert (response.text, there.counts["POST"], here.gateway.calls["POST"]) == ("ok", 1, 1)

    async def test_mute_gateway_costs_a_read_one_timeout_then_goes_another_way(self, world, origin):
        async def mute(end):
            await end.read_hello()
            await asyncio.sleep(60)

        here, there = await world(mute), await origin()
        async with here.client(read_timeout_s=0.3) as client:
            response = await client.get(there.url(host=BOTH))
        assert response.text == "ok"
        assert record_of(response).attempts[0].failure == "timeout.first_byte"

    async def test_gateway_that_speaks_no_tls_is_passed_by(self, pki, origin):
        async def hang_up(reader, writer):
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        address = stormline.core.values.Address(*server.sockets[0].getsockname()[:2])
        there = await origin()
        async with running_dispatch(pki, rules_for(address)) as (dispatch, _):
            config = stormline.Config(bundle=bundle_for(pki, dispatch), report=False)
            async with stormline.AsyncClient(config=config) as client:
                response = await client.post(there.url(host=BOTH), content=b"x")
        server.close()
        await server.wait_closed()
        assert (response.text, there.counts["POST"]) == ("ok", 1)

    async def test_gateway_that_breaks_the_protocol_is_told_why_and_left(self, world, origin):
        said = []

        async def script(end):
            await end.welcome()
            await end.next(e.CallReceived)
            end.writer.write(b"\x00\x00\x00\x05junk!")
            said.append(await end.next(e.Closed))

        here, there = await world(script), await origin()
        async with here.client() as client:
            assert (await client.get(there.url(host=BOTH))).text == "ok"
            await wait_until(lambda: said)
        assert said[0].by_peer
        assert said[0].code == Code.PROTOCOL_ERROR

    async def test_dead_link_is_found_by_heartbeat_and_replaced(self, world, monkeypatch):
        monkeypatch.setattr(limits, "HEARTBEAT_ANSWER_S", 0.2)

        async def deaf(end):
            await end.welcome(heartbeat_s=0.1)
            await asyncio.sleep(60)

        here = await world(deaf, answering())
        async with here.client() as client, client.channel() as channel:
            first = await channel.wait_connected()
            await wait_until(lambda: channel.session is not None and channel.session.session != first.session)
        assert len(here.gateway.ends) == 2

    async def test_second_gateway_is_tried_after_one_that_takes_hellos_and_dies(self, pki, world):
        async def dies(end):
            await end.read_hello()
            end.abort()

        good = await world(answering())
        bad = await world(dies)
        async with running_dispatch(pki, rules_for(bad.gateway.address, good.gateway.address)) as (dispatch, _):
            config = stormline.Config(bundle=bundle_for(pki, dispatch), report=False)
            async with stormline.AsyncClient(config=config) as client, client.channel() as channel:
                await channel.wait_connected()
        assert len(bad.gateway.ends) == 1
        assert len(good.gateway.ends) == 1


class TestToken:
    async def test_expired_token_is_renewed_once_and_the_call_succeeds(self, world):
        async def expired(end):
            await end.refuse(Code.TOKEN_EXPIRED, "too old")

        here = await world(expired, answering())
        async with here.client(disabled=frozenset({"direct"})) as client:
            assert (await client.post(URL, content=b"x")).text == "x"
        hellos = [end.hello.token for end in here.gateway.ends]
        assert len(set(hellos)) == 2
        keys = {here.pki.token_key.kid: here.pki.token_key.key.public_key()}
        assert {tokens.verify(text, keys=keys, wall=SystemClock().wall()).app for text in hellos} == {"demo"}

    async def test_token_of_an_earlier_platform_is_replaced(self, world):
        async def unknown(end):
            await end.refuse(Code.TOKEN_INVALID, "not ours")

        here = await world(unknown, answering())
        async with here.client(disabled=frozenset({"direct"})) as client:
            assert (await client.post(URL, content=b"x")).text == "x"

    async def test_tokens_that_are_never_taken_end_in_a_stop_not_in_a_storm(self, world):
        async def expired(end):
            await end.refuse(Code.TOKEN_EXPIRED, "too old")

        here = await world(expired)
        async with here.client(disabled=frozenset({"direct"})) as client:
            for _ in range(3):
                with pytest.raises(stormline.errors.TransportError) as caught:
                    await client.post(URL, content=b"x")
                assert caught.value.maybe_delivered is False
        assert len(here.gateway.ends) == 2

    async def test_given_token_is_never_replaced(self, world):
        async def expired(end):
            await end.refuse(Code.TOKEN_EXPIRED, "too old")

        here = await world(expired)
        async with here.client(disabled=frozenset({"direct"}), token=stormline.core.values.Secret("mine")) as client:
            with pytest.raises(stormline.errors.TransportError):
                await client.get(URL)
        assert [end.hello.token for end in here.gateway.ends] == ["mine"]


class TestLeaving:
    async def test_goaway_moves_new_calls_and_loses_no_open_one(self, world):
        going = asyncio.Event()

        async def leaving(end):
            await end.welcome()
            call = await end.next(e.CallReceived)
            end.machine.send_goaway(Code.GOING_AWAY, "restart", spread_s=30.0)
            end.flush()
            await going.wait()
            end.reply(call, b"from the old one")
            await end.stay()

        here = await world(leaving, answering())
        async with here.client(disabled=frozenset({"direct"})) as client:
            slow = asyncio.ensure_future(client.post(URL, content=b"slow"))
            await wait_until(lambda: client._storm.runtime().longline._leaving)
            assert (await client.post(URL, content=b"quick")).text == "quick"
            going.set()
            assert (await slow).text == "from the old one"
            await wait_until(lambda: not client._storm.runtime().longline._leaving)
        assert len(here.gateway.ends) == 2

    async def test_call_that_crosses_the_goaway_is_made_on_the_next_link(self, world):
        async def leaving(end):
            await end.welcome()
            end.reply(await end.next(e.CallReceived), b"first")
            await end.next(e.CallReceived)  # read, and refused: it came behind the GOAWAY
            end.machine._peer_call = 1
            end.machine.send_goaway(Code.GOING_AWAY, "restart")
            end.flush()
            await end.stay()

        here = await world(leaving, answering())
        async with here.client(disabled=frozenset({"direct"})) as client:
            assert (await client.post(URL, content=b"x")).text == "first"
            assert (await client.post(URL, content=b"y")).text == "y"

    async def test_replaced_device_stops_and_says_so(self, world):
        async def replaced(end):
            await end.welcome()
            await end.next(e.CallReceived)
            end.close(Code.REPLACED, "a newer login")

        here = await world(replaced, answering())
        async with here.client(disabled=frozenset({"direct"})) as client, client.channel() as channel:
            await channel.wait_connected()
            with pytest.raises(stormline.errors.TransportError):
                await client.get(URL)
            with pytest.raises(stormline.errors.RefusedError) as caught:
                await channel.call("orders.list")
            assert caught.value.code == Code.REPLACED
            # It was its own cause's cause once: a request that looked for the last of the causes never ended.
            assert caught.value.__cause__ is None
            with pytest.raises(stormline.errors.RefusedError):
                await channel.wait_connected()
            with pytest.raises(stormline.errors.RefusedError):
                async for _ in channel.pushes():
                    pass
        assert len(here.gateway.ends) == 1

    async def test_call_that_may_have_been_processed_says_so_where_its_repetition_meets_a_newer_copy(self, world):
        async def dies(end):
            await end.welcome()
            await end.next(e.CallReceived)
            end.abort()

        async def replaced(end):
            end.close(Code.REPLACED, "a newer login")

        here = await world(dies, replaced)
        async with here.client(disabled=frozenset({"direct"})) as client, client.channel() as channel:
            await channel.wait_connected()
            with pytest.raises(stormline.errors.TransportError) as caught:
                await channel.call("orders.create", idempotency_key="k-1")
            assert caught.value.maybe_delivered
            with pytest.raises(stormline.errors.RefusedError):
                await channel.call("orders.create")

    async def test_channel_closed_while_a_push_is_in_hand_gives_no_more_and_ends(self, world):
        async def pushing(end):
            await end.welcome()
            end.machine.send_push("p1", b"x")
            end.flush()
            await end.next(e.Closed)

        here = await world(pushing)
        in_hand, go_on = asyncio.Event(), asyncio.Event()

        async def read(channel):
            async for _ in channel.pushes():
                in_hand.set()
                await go_on.wait()

        async with here.client(disabled=frozenset({"direct"})) as client:
            async with client.channel() as channel:
                reading = asyncio.create_task(read(channel))
                await in_hand.wait()
            go_on.set()
            async with asyncio.timeout(20):
                await reading


class TestCancellation:
    """A request can be given up at any moment; nothing of it stays, here or there."""

    async def test_while_asking_dispatch(self, world):
        here = await world(answering())
        async with here.client() as client:
            task = asyncio.ensure_future(client.get(URL))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.get(URL)).status_code == 200

    async def test_while_the_link_is_opened_others_still_get_it(self, world):
        release = asyncio.Event()

        async def slow(end):
            await end.read_hello()
            await release.wait()
            await answering()(end)

        here = await world(slow)
        async with here.client() as client:
            first, second = (asyncio.ensure_future(client.get(URL)) for _ in range(2))
            await wait_until(lambda: here.gateway.ends and here.gateway.ends[0].hello)
            first.cancel()
            release.set()
            assert (await second).status_code == 200
            with pytest.raises(asyncio.CancelledError):
                await first

    @pytest.mark.parametrize("content", [b"", b"small", bytes(1_000_000), "stream"])
    async def test_while_waiting_for_the_answer_the_gateway_hears_of_it(self, world, content):
        async def endless():
            while True:
                yield bytes(10_000)

        async def mute(end, call):
            pass

        here = await world(answering(mute))
        async with here.client() as client:
            body = endless() if content == "stream" else content
            task = asyncio.ensure_future(client.post(URL, content=body))
            await wait_until(lambda: here.gateway.calls["POST"] == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until(lambda: any(isinstance(x, e.CallCancelled) for x in here.gateway.ends[0].heard))
            assert client._storm.runtime().longline._link._calls == {}

    async def test_in_the_middle_of_the_body(self, world, records):
        async def handle(end, call):
            end.machine.send_reply(call.call_id, 200, body=b"half", more=True)
            end.flush()

        here = await world(answering(handle))
        async with here.client(report=True) as client:
            task = asyncio.ensure_future(client.get(URL))
            await wait_until(lambda: here.gateway.calls["GET"] == 1)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until(lambda: any(isinstance(x, e.CallCancelled) for x in here.gateway.ends[0].heard))
        assert [(each.failure, each.phase, each.ok_network) for each in records] == [("cancelled", "body", False)]

    async def test_stream_left_early_is_given_up_and_recorded(self, world, records):
        async def handle(end, call):
            end.machine.send_reply(call.call_id, 200, body=b"first", more=True)
            end.flush()

        here = await world(answering(handle))
        async with here.client(report=True) as client:
            async with client.stream("GET", URL) as response:
                async for chunk in response.aiter_raw():
                    assert chunk == b"first"
                    break
            await wait_until(lambda: any(isinstance(x, e.CallCancelled) for x in here.gateway.ends[0].heard))
            assert [(each.failure, each.bytes_down) for each in records] == [("", 5)]


async def test_both_means_lost_keeps_the_error_that_may_have_been_delivered(world, origin):
    async def drop(request, writer):
        writer.close()

    async def handle(end, call):
        end.machine.send_fail(call.call_id, Code.CALL_UPSTREAM, "broke", maybe_delivered=True)
        end.flush()

    here, there = await world(answering(handle)), await origin(drop)
    async with here.client() as client:
        with pytest.raises(stormline.errors.TransportError) as caught:
            await client.get(there.url(host=BOTH))
    assert caught.value.maybe_delivered is True


async def test_all_means_switched_off_says_so(world):
    here = await world(answering(), disabled=("long",))
    async with here.client(disabled=frozenset({"direct"})) as client:
        with pytest.raises(stormline.errors.ConnectError, match="switched off"):
            await client.get(URL)


async def test_deadline_bounds_all_attempts_together(world, origin):
    async def mute(end, call):
        pass

    async def silent(request, writer):
        await asyncio.sleep(60)

    here, there = await world(answering(mute)), await origin(silent)
    async with here.client(deadline_s=0.5, read_timeout_s=0.3) as client:
        started = asyncio.get_running_loop().time()
        with pytest.raises(stormline.errors.DeadlineExceeded):
            await client.get(there.url(host=BOTH))
        assert asyncio.get_running_loop().time() - started < 5
