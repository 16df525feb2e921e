"""Requests that are sent again: what servers say that failed, what they ask for, and where it ends."""

import asyncio
import importlib

import httpx2
import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.core import limits
from stormline.testing.origin import plain

pytestmark = pytest.mark.loopback

STATUSES = {
    429: "429 Too Many Requests",
    500: "500 Internal Server Error",
    502: "502 Bad Gateway",
    503: "503 Service Unavailable",
    504: "504 Gateway Timeout",
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Make no pauses of our own; those that a server asks for stay."""
    monkeypatch.setattr(limits, "RETRY_PAUSE_S", 0.001)


@pytest.fixture(name="module", params=["httpx2", "httpx"])
def _module(request):
    return importlib.import_module(request.param)


def client_of(module, **settings):
    return module.AsyncClient(transport=stormline.AsyncTransport(config=stormline.Config(**settings)))


def failing(*statuses, then=b"well", **fields):
    """Answer so in turn, each body with its number, and well after them."""
    left = list(statuses)

    async def answer(request, writer):
        number = len(statuses) - len(left) + 1
        writer.write(plain(b"%d" % number, STATUSES[left.pop(0)], **fields) if left else plain(then))

    return answer


def story(response):
    return [line for _, line in response.extensions["stormline"].timeline.story]


class TestStatuses:
    @pytest.mark.parametrize("status", STATUSES)
    async def test_read_is_asked_again_and_the_good_answer_given(self, module, origin, status):
        there = await origin(failing(status, status))
        async with client_of(module) as client:
            response = await client.get(there.url())
        assert (response.status_code, response.text) == (200, "well")
        assert there.counts["GET"] == 3
        assert there.connections == 1  # a server that says so is not left for that

    async def test_last_answer_is_given_where_all_say_the_same(self, module, origin):
        there = await origin(failing(*[503] * 9, retry_after="0", x_reason="maintenance"))
        async with client_of(module) as client:
            response = await client.get(there.url())
        assert (response.status_code, response.text) == (503, str(limits.ATTEMPTS_MAX))
        assert response.headers["x-reason"] == "maintenance"
        assert there.counts["GET"] == limits.ATTEMPTS_MAX
        assert response.extensions["stormline"].record.failure == "http.503"

    async def test_no_statuses_make_every_answer_final(self, module, origin):
        there = await origin(failing(503))
        async with client_of(module, retry_statuses=frozenset()) as client:
            assert (await client.get(there.url())).status_code == 503
        assert there.counts["GET"] == 1

    async def test_caller_who_wants_no_retries_gets_the_first_answer(self, module, origin):
        there = await origin(failing(503))
        async with client_of(module) as client:
            response = await client.get(there.url(), extensions={"stormline.retries": False})
        assert (response.status_code, there.counts["GET"]) == (503, 1)

    async def test_other_statuses_are_final(self, origin):
        there = await origin(failing(500))
        async with client_of(httpx2, retry_statuses=frozenset({503})) as client:
            assert (await client.get(there.url())).status_code == 500
        assert there.counts["GET"] == 1

    async def test_write_is_not_repeated(self, module, origin):
        there = await origin(failing(503, retry_after="0"))
        async with client_of(module) as client:
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                await client.request(method, there.url(), content=b"x")
        assert there.counts == {"POST": 1, "PUT": 1, "PATCH": 1, "DELETE": 1}

    async def test_write_with_a_key_is_repeated_with_the_same_key_and_body(self, module, origin):
        there = await origin(failing(503, 500))
        async with client_of(module) as client:
            response = await client.post(there.url(), content=b"order", headers={"Idempotency-Key": "k1"})
        assert response.text == "well"
        assert [(each.body, each.headers["idempotency-key"]) for each in there.requests] == [(b"order", "k1")] * 3

    async def test_body_that_is_a_stream_is_not_repeated(self, origin):
        async def chunks():
            yield b"order"

        there = await origin(failing(503))
        async with client_of(httpx2) as client:
            response = await client.post(there.url(), content=chunks(), headers={"Idempotency-Key": "k1"})
        assert (response.status_code, response.text) == (503, "1")
        assert there.counts["POST"] == 1

    async def test_large_answer_is_not_held_back_for_another_try(self, origin):
        async def large(request, writer):
            writer.write(plain(bytes(limits.RETRY_KEPT_BYTES + 1), STATUSES[503]))

        there = await origin(large)
        async with client_of(httpx2) as client:
            response = await client.get(there.url())
        assert (response.status_code, len(response.content)) == (503, limits.RETRY_KEPT_BYTES + 1)
        assert there.counts["GET"] == 1

    async def test_answer_whose_body_breaks_off_is_repeated_like_any_other(self, origin):
        async def broken(request, writer):
            if len(there.requests) > 1:
                writer.write(plain(b"well"))
            else:
                writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 10\r\n\r\nhalf")
                writer.close()

        there = await origin(broken)
        async with client_of(httpx2) as client:
            assert (await client.get(there.url())).text == "well"

    async def test_synchronous_read_is_asked_again(self, origin):
        def ask():
            with stormline.Client() as client:
                return client.get(there.url())

        there = await origin(failing(503, 429))
        response = await asyncio.to_thread(ask)
        BACKGROUND.stop()
        assert (response.text, there.counts["GET"]) == ("well", 3)


class TestRetryAfter:
    async def test_pause_that_the_server_asks_for_is_made(self, module, origin):
        times = []

        async def busy(request, writer):
            times.append(asyncio.get_running_loop().time())
            writer.write(plain(b"busy", STATUSES[503], retry_after="1") if len(times) == 1 else plain(b"well"))

        there = await origin(busy)
        async with client_of(module) as client:
            response = await client.get(there.url())
        assert response.text == "well"
        assert times[1] - times[0] >= 1.0
        assert any(line.startswith("pause 1") for line in story(response))

    @pytest.mark.parametrize("status", [429, 503])
    async def test_answer_is_given_at_once_where_the_pause_is_longer_than_the_patience(self, module, origin, status):
        there = await origin(failing(*[status] * 9, retry_after="3600"))
        async with client_of(module, deadline_s=5.0) as client:
            response = await client.get(there.url())
        assert (response.status_code, response.text, response.headers["retry-after"]) == (status, "1", "3600")
        assert there.counts["GET"] == 1

    async def test_nonsense_counts_as_nothing_said(self, origin):
        there = await origin(failing(503, retry_after="soon"))
        async with client_of(httpx2) as client:
            assert (await client.get(there.url())).text == "well"


class TestBounds:
    async def test_server_that_always_fails_gets_no_storm(self, origin):
        async def broken(request, writer):
            writer.write(plain(b"busy", STATUSES[429]))

        there, asked = await origin(broken), 60
        async with client_of(httpx2) as client:
            answers = [await client.get(there.url()) for _ in range(asked)]
        assert {each.status_code for each in answers} == {429}
        assert asked + limits.RETRY_BURST <= there.counts["GET"]
        assert there.counts["GET"] <= asked + limits.RETRY_BURST + limits.RETRY_SHARE * asked
        assert any("retry budget of 127.0.0.1 is spent" in line for line in story(answers[-1]))

    async def test_origin_that_drops_every_request_gets_no_storm(self, origin):
        async def drop(request, writer):
            writer.close()

        there, asked = await origin(drop), 60
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with client_of(httpx2) as client:
            for _ in range(asked):
                with pytest.raises(httpx2.ReadError):
                    await client.get(there.url())
        earned = limits.RETRY_SHARE * asked + limits.RETRY_FLOOR_PER_S * (loop.time() - began)
        assert there.counts["GET"] <= asked + limits.RETRY_BURST + earned

    async def test_deadline_holds_over_all_attempts(self, module, origin):
        async def slowly(request, writer):
            await asyncio.sleep(0.4)
            writer.write(plain(b"%d" % len(there.requests), STATUSES[503]))

        there = await origin(slowly)
        async with client_of(module, deadline_s=1.0) as client:
            response = await client.get(there.url())
        assert response.status_code == 503  # the last that came in time, though the attempt after it was cut short
        assert int(response.text) < limits.ATTEMPTS_MAX
