"""Where a client begins and ends: loops, threads, forks, interrupts, and the interpreter's own end.

Most run in a fresh interpreter with every warning an error, and look at what it printed.
"""

import subprocess
import sys
import tempfile
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

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored

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

def serve_platform():
    '''Run on a thread: an HTTP/2 origin, and dispatch with a gateway; give the first's URL, trust, and a config.'''
    import contextlib, pathlib, ssl
    import h2.events as h2e
    from stormline.testing.gateway import answering
    from stormline.testing.http2 import Peer
    from stormline.testing.world import make_pki, running_world
    pki = make_pki(pathlib.Path.cwd())
    files = pki.ca.issue("local", names=["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    trust = ssl.create_default_context(cadata=pki.ca.ca_pem)
    trust.set_alpn_protocols(["h2", "http/1.1"])
    async def play(peer):
        for number in range(1, 1000):
            request = await peer.wait(h2e.RequestReceived, number)
            await peer.answer(request.stream_id, b"ok")
    async def connected(reader, writer):
        with contextlib.suppress(OSError, EOFError):
            await Peer(reader, writer).serve(play)
        writer.close()
    ready, box = threading.Event(), []
    async def main():
        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
        async with running_world(pki, answering()) as world:
            port = server.sockets[0].getsockname()[1]
            box.append((f"https://localhost:{port}/", trust, world.config(disabled=frozenset({"direct"}))))
            ready.set()
            await asyncio.Event().wait()
    threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
    ready.wait()
    return box[0]

def over(kind):
    '''Give a client, and a coroutine function that asks with it: over HTTP/1.1, HTTP/2 or the long connection.'''
    if kind == "h1":
        origin = serve()
        client, method, url = stormline.AsyncClient(), "GET", origin.url()
    else:
        url, trust, config = serve_platform()
        client, method = stormline.AsyncClient(verify=trust), "GET"
        if kind == "long":
            client, method, url = stormline.AsyncClient(config=config), "POST", "https://shop.test/"
    async def ask():
        response = await client.request(method, url, content=b"ok")
        return response.text
    return client, ask
"""

KINDS = ("h1", "h2", "long")
"""Carriers; what is known of HTTP/1.1 from other tests is asked of the last two only."""


def run(code, *, timeout_s=30, flags=("-W", "error")):
    """Run code in a fresh interpreter; give what it printed. It must end by itself, well and without a complaint."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *flags, "-c", PRELUDE + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=folder,
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


def test_fork_with_requests_under_way_leaves_them_to_the_parent():
    out = run(
        """
        import concurrent.futures
        asked, go_on = threading.Semaphore(0), threading.Event()
        async def answer(request, writer):
            if request.target == "/slow":
                asked.release()
                await asyncio.to_thread(go_on.wait)
            writer.write(plain(request.target.encode()))
        origin = serve(answer)
        client = stormline.Client()
        with concurrent.futures.ThreadPoolExecutor() as threads:
            slow = [threads.submit(client.get, origin.url("/slow")) for _ in range(3)]
            for _ in slow:
                asked.acquire()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = 0 if client.get(origin.url("/child")).text == "/child" else 2
                    client.close()
                    gc.collect()
                finally:
                    os._exit(code)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            go_on.set()
            print(*[each.result().text for each in slow])
        print(client.get(origin.url("/after")).text, origin.counts["GET"])
        client.close()
        """
    )
    assert out == ["0", "/slow", "/slow", "/slow", "/after", "5"]


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


# -- a pool outlives its loop (encode/httpx #2473, #2058; encode/httpcore #525: "Event loop is closed") ---------------
@pytest.mark.parametrize("kind", KINDS[1:])
def test_client_of_a_module_is_used_in_three_loops_in_turn(kind):
    """Connections, their tasks and timers belong to the loop that made them; the next one must not meet them."""
    out = run(f"""
        client, ask = over("{kind}")
        async def main():
            asyncio.get_running_loop().slow_callback_duration = 60.0
            print(await ask(), *await asyncio.gather(ask(), ask()))
        held = []
        for _ in range(3):
            asyncio.run(main(), debug=True)
            gc.collect()
            held.append(descriptors())
        time.sleep(0.3)
        print(descriptors() - held[0] <= 2)
    """)
    assert out == ["ok"] * 9 + ["True"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_client_left_open_and_collected_after_its_loop_ends_quietly(kind):
    out = run(f"""
        before = descriptors()
        client, ask = over("{kind}")
        ours = descriptors()
        async def main():
            print(await ask())
        asyncio.run(main())
        del client, ask
        for _ in range(3):
            gc.collect()
        for _ in range(100):
            if descriptors() <= ours + 1:  # the other end lives in this process too
                break
            time.sleep(0.02)
        print(descriptors() <= ours + 1)
    """)
    assert out == ["ok", "True"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_client_closed_twice_and_after_its_loop_is_closed_once(kind):
    out = run(f"""
        client, ask = over("{kind}")
        async def main():
            print(await ask())
            await client.aclose()
            await client.aclose()
            await client._storm.aclose()
        asyncio.run(main())
        asyncio.run(client.aclose())
        other = stormline.AsyncTransport()
        asyncio.run(other.aclose())
        asyncio.run(other.aclose())
    """)
    assert out == ["ok"]


@pytest.mark.parametrize("kind", KINDS)
def test_client_first_closed_on_the_loop_after_its_own_leaves_nothing(kind):
    out = run(f"""
        client, ask = over("{kind}")
        ours = descriptors()
        async def main():
            print(await ask())
        asyncio.run(main())
        asyncio.run(client.aclose())
        for _ in range(100):
            if descriptors() <= ours + 1:
                break
            time.sleep(0.02)
        print(descriptors() <= ours + 1)
    """)
    assert out == ["ok", "True"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_two_threads_with_loops_and_clients_of_their_own_do_not_meet(kind):
    out = run(f"""
        said = []
        asking = [over("{kind}") for _ in range(2)]
        def work(client, ask):
            async def main():
                async with client:
                    for _ in range(10):
                        said.append(await ask())
            asyncio.run(main())
        threads = [threading.Thread(target=work, args=each) for each in asking]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(said == ["ok"] * 20)
    """)
    assert out == ["True"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_one_client_in_two_threads_with_loops_is_one_clear_error_and_stays_good_at_home(kind):
    out = run(f"""
        client, ask = over("{kind}")
        async def stranger():
            try:
                await ask()
            except stormline.errors.LocalProtocolError as error:
                print("another event loop" in str(error), isinstance(error, httpx2.LocalProtocolError))
        async def main():
            print(await ask())
            for _ in range(3):
                await asyncio.to_thread(asyncio.run, stranger())
                print(await ask())
        asyncio.run(main())
    """)
    assert out == ["ok"] + ["True", "True", "ok"] * 3


@pytest.mark.parametrize("kind", KINDS[1:])
def test_interpreter_ends_well_with_a_client_of_a_module_still_open(kind):
    out = run(f"""
        client, ask = over("{kind}")
        async def main():
            print(await ask())
            asyncio.ensure_future(ask())  # and a request in flight, left behind with the loop
            await asyncio.sleep(0)
        asyncio.run(main())
        print("end", flush=True)
    """)
    assert out == ["ok", "end"]


@pytest.mark.parametrize("kind", KINDS)
def test_child_after_fork_uses_the_parent_s_asynchronous_client_on_a_loop_of_its_own(kind):
    """The child starts anew; neither what it says nor its end may reach the parent's connections."""
    out = run(
        f"""
        client, ask = over("{kind}")
        loop = asyncio.new_event_loop()
        print(loop.run_until_complete(ask()), flush=True)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if asyncio.run(ask()) == "ok" else 2
                gc.collect()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        connections = lambda: client._storm._runtime._pool.open_connections
        before = connections()
        print(loop.run_until_complete(ask()), connections() == before)
        loop.run_until_complete(client.aclose())
        loop.close()
        """
    )
    assert out == ["ok", "0", "ok", "True"]


@pytest.mark.parametrize("module", ["httpx2", "httpx"])
def test_transport_under_either_client_is_used_in_three_loops_and_left_open(module):
    out = run(f"""
        import {module}
        origin = serve()
        client = {module}.AsyncClient(transport=stormline.AsyncTransport())
        async def main():
            print((await client.get(origin.url())).text)
        for _ in range(3):
            asyncio.run(main())
        sync = {module}.Client(transport=stormline.Transport())
        print(sync.get(origin.url()).text)
    """)
    assert out == ["ok"] * 4
