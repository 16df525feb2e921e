"""Answers and errors carry the timeline of their call, and `stormline get -v` tells it."""

import socket
import subprocess
import sys

import httpx
import httpx2
import pytest

import stormline

pytestmark = pytest.mark.loopback


def _closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize("module", [httpx2, httpx])
async def test_error_carries_the_story_of_its_call_with_a_line_for_each_attempt(module):
    async with module.AsyncClient(transport=stormline.AsyncTransport()) as client:
        with pytest.raises(module.ConnectError) as caught:
            await client.get(f"http://127.0.0.1:{_closed_port()}/")
    trace = caught.value.trace
    story = [line for _, line in trace.timeline.story]
    assert story.count("try direct") == len(trace.record.attempts) == 4
    assert [attempt.failure for attempt in trace.record.attempts] == ["tcp.failed"] * 4
    assert trace.record.failure == "tcp.failed"
    assert sum(trace.record.stages_ms.values()) == pytest.approx(trace.record.total_ms)


async def test_pause_between_attempts_is_time_in_the_queue():
    async with httpx2.AsyncClient(transport=stormline.AsyncTransport()) as client:
        with pytest.raises(httpx2.ConnectError) as caught:
            await client.get(f"http://127.0.0.1:{_closed_port()}/")
    stages = caught.value.trace.record.stages_ms
    assert stages["queued"] > 0.5 * caught.value.trace.record.total_ms


def test_get_verbose_tells_the_story_of_a_request_that_failed():

    url = f"http://127.0.0.1:{_closed_port()}/"
    done = subprocess.run(
        [sys.executable, "-m", "stormline.cli.main", "get", "-v", url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("try direct") == 4
    assert "in all:" in done.stderr
