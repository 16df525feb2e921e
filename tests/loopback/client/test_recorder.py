"""Call records on their way to the APM: bounded, quiet, patient, and never in the calls' way."""

import asyncio
import ssl

import pytest

from stormline.core import limits
from stormline.telemetry import report
from stormline.testing.gateway import answering
from stormline.testing.origin import plain, running_origin
from stormline.testing.world import APM_NAME, HOST, wait_until
from stormline.wire.plan import Carrier, Endpoint

pytestmark = pytest.mark.loopback
URL = f"https://{HOST}/"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(limits, "REPORT_INTERVAL_S", 0.05)
    monkeypatch.setattr(limits, "REPORT_RETRY_S", 0.1)


class Apm:
    """An APM that answers as told, the last answer for ever; it keeps every report it read."""

    def __init__(self, *answers):
        self._answers = answers or (plain(b"{}", status="202 Accepted"),)
        self.reports = []
        self.tokens = []

    async def answer(self, request, writer):
        self.reports.append(report.decode(request.body))
        self.tokens.append(request.headers["authorization"])
        answer = self._answers[min(len(self.reports), len(self._answers)) - 1]
        if answer is None:
            await asyncio.sleep(60)
        writer.write(answer)

    def running(self, pki):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pki.apm.certificate, pki.apm.key)
        return running_origin(self.answer, ssl=context)

    @property
    def calls(self):
        return [call for each in self.reports for call in each.calls]


def busy(status, **headers):
    return plain(b"{}", status=status, **headers)


@pytest.fixture(name="reporting")
async def _reporting(world, pki):
    """Make a world whose plan names this APM: `await reporting(apm)`."""
    import contextlib

    async with contextlib.AsyncExitStack() as stack:

        async def make(apm):
            there = await stack.enter_async_context(apm.running(pki))
            endpoint = Endpoint(host="127.0.0.1", port=there.address.port, carrier=Carrier.H1, server_name=APM_NAME)
            return await world(answering(), report=endpoint)

        yield make


async def test_finished_calls_are_reported_with_the_device_s_token(reporting):
    apm = Apm()
    here = await reporting(apm)
    async with here.client(report=True, business="login", network="wifi") as client, client.channel() as channel:
        await channel.wait_connected()
        await client.post(URL + "a?secret=1", content=b"x")
        await channel.call("orders.list")
        await wait_until(lambda: len(apm.calls) == 2)
    first, second = apm.calls
    assert (first.method, first.host, first.path, first.status, first.means) == ("POST", HOST, "/a", 200, "long")
    assert (first.business, first.network, first.ok, first.family) == ("login", "wifi", True, 4)
    assert (second.method, second.host, second.path, second.ok) == ("CALL", "orders", "orders.list", True)
    assert len({call.call_id for call in apm.calls}) == 2
    assert set(apm.tokens) == {f"Bearer {here.gateway.ends[0].hello.token}"}


async def test_reports_make_no_records_of_their_own(reporting):
    apm = Apm()
    here = await reporting(apm)
    async with here.client(report=True) as client:
        await client.get(URL)
        await wait_until(lambda: apm.calls)
        await asyncio.sleep(0.3)
    assert len(apm.reports) == 1
    assert len(apm.calls) == 1


async def test_closing_client_sends_what_is_left(reporting):
    apm = Apm()
    here = await reporting(apm)
    async with here.client(report=True) as client:
        for _ in range(3):
            await client.get(URL)
    assert len(apm.calls) == 3


async def test_report_on_its_way_at_the_close_is_not_sent_twice(reporting):
    apm = Apm()
    here = await reporting(apm)
    taken = apm.answer

    async def slow(request, writer):
        await asyncio.sleep(0.3)
        await taken(request, writer)

    apm.answer = slow
    here = await reporting(apm)
    async with here.client(report=True) as client:
        await client.get(URL)
        await asyncio.sleep(0.15)
    assert len(apm.calls) == 1


async def test_report_off_sends_nothing(reporting):
    apm = Apm()
    here = await reporting(apm)
    async with here.client(report=False) as client:
        await client.get(URL)
        await asyncio.sleep(0.2)
    assert apm.reports == []


@pytest.mark.parametrize("status", ["503 Busy", "429 Slow", "500 Oops", "408 Late"])
async def test_busy_apm_gets_the_same_records_later(reporting, status):
    apm = Apm(busy(status), plain(b"{}"))
    here = await reporting(apm)
    async with here.client(report=True) as client:
        await client.get(URL)
        await wait_until(lambda: len(apm.reports) == 2)
        await asyncio.sleep(0.2)
    first, second = apm.reports
    assert [call.call_id for call in first.calls] == [call.call_id for call in second.calls]
    assert second.dropped == 0


async def test_busy_apm_s_pause_is_kept(reporting, monkeypatch):
    monkeypatch.setattr(limits, "REPORT_RETRY_S", 0.01)
    apm = Apm(busy("503 Busy", retry_after="1"), plain(b"{}"))
    here = await reporting(apm)
    async with here.client(report=True) as client:
        await client.get(URL)
        await wait_until(lambda: apm.reports)
        await asyncio.sleep(0.05)
        assert len(apm.reports) == 1


@pytest.mark.parametrize("status", ["400 Bad", "401 Who", "403 No"])
async def test_refused_records_are_counted_and_not_sent_again(reporting, status):
    apm = Apm(busy(status), plain(b"{}"))
    here = await reporting(apm)
    async with here.client(report=True) as client:
        await client.get(URL)
        await wait_until(lambda: apm.reports)
        await asyncio.sleep(0.1)
        await client.get(URL)
        await wait_until(lambda: len(apm.reports) == 2)
    assert apm.reports[1].dropped == 1
    assert len(apm.reports[1].calls) == 1


async def test_too_large_report_is_halved(reporting):
    class Small(Apm):
        async def answer(self, request, writer):
            whole = report.decode(request.body)
            self.reports.append(whole)
            writer.write(busy("413 Too Large") if len(whole.calls) > 2 else plain(b"{}"))

    apm = Small()
    here = await reporting(apm)
    async with here.client(report=True) as client:
        await asyncio.gather(*(client.get(URL) for _ in range(7)))
        await wait_until(lambda: sum(len(each.calls) for each in apm.reports if len(each.calls) <= 2) == 7)
    sent = [call.call_id for each in apm.reports if len(each.calls) <= 2 for call in each.calls]
    assert len(set(sent)) == len(sent) == 7


async def test_hanging_apm_holds_no_call_up_and_the_close_is_bounded(reporting, monkeypatch):
    monkeypatch.setattr(limits, "REPORT_FLUSH_S", 0.2)
    apm = Apm(None)
    here = await reporting(apm)
    loop = asyncio.get_running_loop()
    async with here.client(report=True) as client:
        for _ in range(20):
            assert (await client.get(URL)).status_code == 200
        await wait_until(lambda: apm.reports)
        closing = loop.time()
    assert loop.time() - closing < 2.0
    assert len(apm.reports) <= 2


async def test_apm_away_drops_the_oldest_and_tells_how_many(reporting, monkeypatch):
    monkeypatch.setattr(limits, "REPORT_QUEUE_RECORDS_MAX", 5)
    apm = Apm(busy("503 Busy"), busy("503 Busy"), plain(b"{}"))
    here = await reporting(apm)
    async with here.client(report=True) as client:
        for n in range(12):
            await client.get(f"{URL}{n}")
            assert len(client._storm.runtime()._recorder._queue) <= 5
        await wait_until(lambda: len(apm.reports) >= 3)
        await asyncio.sleep(0.1)
    kept = apm.reports[2].calls
    assert apm.reports[2].dropped + len(kept) == 12
    assert kept[-1].path == "/11"


async def test_apm_that_is_not_there_is_left_alone_between_tries(world, monkeypatch):
    endpoint = Endpoint(host="127.0.0.1", port=1, carrier=Carrier.H1, server_name=APM_NAME)
    here = await world(answering(), report=endpoint)
    monkeypatch.setattr(limits, "REPORT_RETRY_S", 60.0)
    async with here.client(report=True) as client:
        await client.get(URL)
        recorder = client._storm.runtime()._recorder
        await wait_until(lambda: recorder._sender is not None)
        await asyncio.sleep(0.1)
        assert len(recorder._queue) == 1
        await client.get(URL)
        assert len(recorder._queue) == 2


async def test_plan_without_an_apm_keeps_nothing(world):
    here = await world(answering())
    async with here.client(report=True) as client:
        await client.get(URL)
        await wait_until(lambda: not client._storm.runtime()._recorder._queue)


def test_client_dropped_with_records_waiting_complains_of_nothing():
    import subprocess
    import sys

    code = """
import asyncio
from stormline.client.recorder import Recorder
from stormline.telemetry.timeline import CallRecord
async def main():
    recorder = Recorder(None, lambda: None, None, None, "test")
    recorder.add(CallRecord(call_id="a", started_at_ms=0, method="GET", host="h", path="/"))
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
