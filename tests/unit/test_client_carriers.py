"""Opening the long connection: who is tried when; on a `VirtualLoop`, with dialers that do what a test says."""

import asyncio
import subprocess
import sys

import pytest

from stormline.client.carriers import TLS, WSS, Carriers, Target
from stormline.client.steering import Steering
from stormline.core import errors, limits_carriers
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.policy.shape import Network
from stormline.testing.simloop import SimClock, SimRng, on_virtual_time
from stormline.wire import messages

HEAD_START_S = limits_carriers.CARRIER_HEAD_START_S
TARGETS = [Target(by, "g.test", "g.test", 443, (Address("192.0.2.1", 443),)) for by in (TLS, WSS)]


class Line:
    """A stream that only says how it came and whether it was closed."""

    def __init__(self, carrier):
        self.carrier = carrier
        self.alpn = messages.ALPN
        self.peer = Address("192.0.2.1", 443)
        self.closed = False

    def close(self):
        self.closed = True


class Dialer:
    """Connects after a time, or fails with a text."""

    def __init__(self, carrier, after_s, failure=""):
        self.carrier, self.after_s, self.failure = carrier, after_s, failure
        self.dialled_at, self.given = [], []

    async def dial(self, host, port, **more):
        self.dialled_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.after_s)
        if self.failure:
            raise errors.ConnectError(self.failure, phase=Phase.CONNECT, maybe_delivered=False)
        self.given.append(Line(self.carrier))
        return self.given[-1]


def opened(tls, wss, *, times=1):
    """Open so many times; give carrier or error of the last, when it came, and the dialers."""

    async def run():
        loop = asyncio.get_running_loop()
        steering = Steering(Network("n", "wifi"), rng=SimRng(1), wall_s=SimClock(loop).wall)
        carriers = Carriers(steering, {TLS: tls, WSS: wss}, 5.0)

        result = None
        for _ in range(times):
            began = loop.time()
            try:
                stream = await carriers.open(TARGETS, lambda stage: None)
                carriers.stands(stream.carrier, lambda better: None)
                result = stream.carrier
            except errors.TransportError as error:
                result = str(error)
        carriers.close()
        return result, loop.time() - began

    return on_virtual_time(run)()


@pytest.fixture(autouse=True)
def _no_upgrade(monkeypatch):
    async def upgraded(stream, target, ends_at):
        return stream

    monkeypatch.setattr("stormline.client.carriers._upgrade", upgraded)


def test_best_carrier_within_its_head_start_is_alone():
    tls, wss = Dialer(TLS, HEAD_START_S - 0.1), Dialer(WSS, 0.1)
    assert opened(tls, wss)[0] == TLS
    assert wss.dialled_at == []


def test_silent_carrier_is_overtaken_by_the_next_and_what_comes_later_is_closed():
    tls, wss = Dialer(TLS, 60.0), Dialer(WSS, 0.5)
    carrier, took_s = opened(tls, wss)
    assert (carrier, took_s) == (WSS, pytest.approx(HEAD_START_S + 0.5))
    assert tls.given == []


def test_failed_carrier_gives_way_at_once():
    carrier, took_s = opened(Dialer(TLS, 0.2, "reset"), Dialer(WSS, 0.5))
    assert (carrier, took_s) == (WSS, pytest.approx(0.7))


def test_late_better_carrier_that_still_comes_first_is_used_and_the_other_dropped():
    tls, wss = Dialer(TLS, HEAD_START_S + 0.2), Dialer(WSS, 5.0)
    assert opened(tls, wss)[0] == TLS
    assert len(wss.dialled_at) == 1


def test_what_failed_twice_while_the_other_stood_is_not_tried_first_again():
    tls, wss = Dialer(TLS, 0.1, "reset"), Dialer(WSS, 0.1)
    assert opened(tls, wss, times=4) == (WSS, pytest.approx(0.1))
    assert len(tls.dialled_at) == limits_carriers.CARRIER_FAILURES_MAX


def test_error_names_each_carrier_s_reason():
    said, took_s = opened(Dialer(TLS, 0.1, "reset by a box"), Dialer(WSS, 0.2, "status 403"))
    assert said == "reset by a box; status 403"
    assert took_s == pytest.approx(0.3)


def test_client_of_a_platform_loads_no_websocket_before_it_needs_one():
    code = "import sys, stormline.client.runtime, stormline.client.longline; print('websockets' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"
