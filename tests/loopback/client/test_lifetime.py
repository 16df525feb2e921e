"""Where a client begins and ends: loops, threads, forks, interrupts, and the interpreter's own end.

Most run in a fresh interpreter with every warning an error, and look at what it printed.
"""

import subprocess
import sys
import textwrap
import threading

import pytest

import stormline
from stormline.core import errors

pytestmark = pytest.mark.loopback

PRELUDE = """
import asyncio, gc, os, signal, sys, threading, time, warnings
import httpx2, stormline
from stormline.testing.origin import running_origin, plain, answer_plainly

def serve(answer=answer_plainly):
    '''Run an origin on a thread; give it.'''
    ready, box = threading.Event(), []
    async def main():
        async with running_origin(answer) as origin:
            box.append(origin); ready.set()
            await asyncio.Event().wait()
    threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
    ready.wait()
    return box[0]

async def silent(request, writer):
    await asyncio.sleep(60)

def descriptors():
    return len(os.listdir("/proc/self/fd"))
"""


def run(code, *, timeout_s=30, flags=("-W", "error")):
    """Run code in a fresh interpreter; give what it printed. It must end by itself, well and without a complaint."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_client_never_closed_ends_quietly_with_its_loop():
    out = run("""
        origin = serve()
        client = stormline.AsyncClient()
        async def main():
            print((await client.get(origin.url())).text)
        asyncio.run(main())
    """)
    assert out == ["ok"]


def test_client_dropped_on_a_living_loop_closes_its_sockets():
    out = run("""
        origin = serve()
        async def main():
            before = descriptors()
            client = stormline.AsyncClient()
            await client.get(origin.url())
            del client
            gc.collect()
            for _ in range(100):
                await asyncio.sleep(0.01)
                if descriptors() <= before + 1:  # the origin's end may linger
                    break
            print(descriptors() <= before + 1)
        asyncio.run(main())
    """)
    assert out == ["True"]


def test_answer_outlives_the_client_it_came_from():
    out = run("""
        async def slow(request, writer):
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\no")
            await writer.drain()
            await asyncio.sleep(0.3)
            writer.write(b"k")
        origin = serve(slow)
        async def ask():
            client = httpx2.AsyncClient(transport=stormline.AsyncTransport())
            return await client.send(client.build_request("GET", origin.url()), stream=True)
        async def main():
            response = await ask()
            gc.collect()
            print((await response.aread()).decode())
        asyncio.run(main())
    """)
    assert out == ["ok"]


def test_one_client_serves_three_loops_in_turn_without_leaks():
    out = run("""
        origin = serve()
        client = stormline.AsyncClient()
        async def main():
            print((await client.get(origin.url())).text)
        held = []
        for _ in range(3):
            asyncio.run(main())
            held.append(descriptors())
        time.sleep(0.2)
        print(held[-1] - held[0] <= 1)
    """)
    assert out == ["ok", "ok", "ok", "True"]


def test_loop_closed_without_ceremony_is_borne():
    out = run("""
        origin = serve()
        client = stormline.AsyncClient()
        for _ in range(2):
            loop = asyncio.new_event_loop()
            print(loop.run_until_complete(client.get(origin.url())).text)
            loop.close()
    """)
    assert out == ["ok", "ok"]


async def test_second_living_loop_gets_one_clear_error(origin):
    import asyncio

    there = await origin()
    caught = []
    async with stormline.AsyncClient() as client:
        assert (await client.get(there.url())).text == "ok"

        def elsewhere():
            for use in (lambda: client.get(there.url()), client.aclose):
                try:
                    asyncio.run(use())
                except errors.LocalProtocolError as error:
                    caught.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
        # aclose failed there, so the transport is still good here
        client._state = type(client._state).OPENED
        assert (await client.get(there.url())).text == "ok"
    assert all("another event loop" in text for text in caught)
    assert len(caught) == 2


def test_trio_gets_one_clear_error():
    class NotAsyncio:
        """What trio looks like from here: coroutines run, and asyncio knows of no loop."""

        def __init__(self, coroutine):
            self._coroutine = coroutine

        def run(self):
            try:
                self._coroutine.send(None)
            except StopIteration as stop:
                return stop.value

    transport = stormline.AsyncTransport()
    import httpx2

    with pytest.raises(errors.LocalProtocolError, match="trio is not supported") as caught:
        NotAsyncio(transport.handle_async_request(httpx2.Request("GET", "http://127.0.0.1/"))).run()
    assert isinstance(caught.value, httpx2.LocalProtocolError)


def test_child_after_fork_works_and_the_parent_goes_on():
    out = run(
        """
        import threading
        origin = serve()
        client = stormline.Client()
        print(client.get(origin.url()).text, flush=True)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if client.get(origin.url()).text == "ok" else 2
                gc.collect()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(client.get(origin.url()).text)
        client.close()
        """
    )
    assert out == ["ok", "0", "ok"]


def test_interrupt_ends_a_synchronous_call_and_the_client_goes_on():
    out = run("""
        async def answer(request, writer):
            if request.target == "/slow":
                await asyncio.sleep(60)
            writer.write(plain())
        origin = serve(answer)
        with stormline.Client() as client:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                client.get(origin.url("/slow"))
            except KeyboardInterrupt:
                print("interrupted")
            print(client.get(origin.url()).text)
    """)
    assert out == ["interrupted", "ok"]


def test_interrupt_while_a_body_is_read_ends_the_call():
    out = run("""
        origin = serve()
        def chunks():
            yield b"x"
            time.sleep(60)
        with stormline.Client() as client:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                client.post(origin.url(), content=chunks())
            except KeyboardInterrupt:
                print("interrupted")
            print(client.get(origin.url()).text)
    """)
    assert out == ["interrupted", "ok"]


@pytest.mark.parametrize("kind", ["a thread waits", "a body is read", "never closed"])
def test_interpreter_ends_soon_with_requests_in_flight(kind):
    code = {
        "a thread waits": "threading.Thread(target=client.get, args=(origin.url(),), daemon=True).start()",
        "a body is read": (
            "threading.Thread(target=lambda: client.post(origin.url(), content=iter(lambda: time.sleep(60), 0)),"
            " daemon=True).start()"
        ),
        "never closed": "",
    }[kind]
    out = run(
        f"""
        origin = serve(silent)
        client = stormline.Client(timeout=None)
        threading.excepthook = lambda args: None  # the thread's call is cancelled under it
        {code}
        time.sleep(0.3)
        print("end", flush=True)
        """,
        timeout_s=8,
    )
    assert out == ["end"]


def test_synchronous_client_inside_the_background_loop_is_refused():
    from stormline.client.background import BACKGROUND

    async def inside():
        with stormline.Client() as client:
            client.get("http://127.0.0.1:1/")

    with pytest.raises(errors.LocalProtocolError):
        BACKGROUND.run(inside())
    BACKGROUND.stop()


def test_client_loads_no_server_package():
    code = """
import sys, stormline
stormline.AsyncTransport, stormline.AsyncClient, stormline.Channel, stormline.Client, stormline.Transport
servers = {"gateway", "dispatch", "apm", "appgw", "engine", "web", "settings", "assembly", "cli", "testing"}
others = {"nats", "uvloop", "starlette", "fastapi", "uvicorn", "pydantic", "chdb", "typer", "rich", "httpx"}
print(*sorted(each for each in sys.modules if each.split(".")[0] in others))
print(*sorted(each for each in sys.modules if each.startswith("stormline.") and each.split(".")[1] in servers))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == []


def test_transport_alone_loads_no_http_client_and_no_cryptography():
    code = """
import sys, stormline
stormline.AsyncTransport(), stormline.Transport()
print(*sorted({each.split(".")[0] for each in sys.modules} & {"httpx", "httpx2", "cryptography", "anyio"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == []


def test_transport_types_fit_the_clients_of_httpx2():
    import inspect

    import httpx2

    for ours, theirs in (
        (stormline.AsyncTransport, httpx2.AsyncBaseTransport),
        (stormline.Transport, httpx2.BaseTransport),
    ):
        needed = [name for name, _ in inspect.getmembers(theirs, inspect.isfunction) if name != "__init__"]
        assert [name for name in needed if not callable(getattr(ours, name, None))] == []
