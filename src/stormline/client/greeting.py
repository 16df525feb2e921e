"""Greeting a gateway on a new connection, before a session of ours goes on over it."""

import asyncio

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import ConnectError, RefusedError, RemoteProtocolError
from stormline.core.phase import Phase
from stormline.net.stream import Stream
from stormline.wire import connection, messages
from stormline.wire import events as e
from stormline.wire.states import Role


async def greet(
    stream: Stream, hello: messages.Hello, *, heartbeat_s: float
) -> tuple[connection.Connection, messages.Welcome]:
    """Say HELLO on a stream, and wait for the WELCOME; what the gateway sends behind it stays in the machine.

    Cancelled or failed, the stream is for the caller to close.

    Raises:
        RefusedError: the gateway said CLOSE.
        ConnectError: the connection was lost, or no WELCOME came in `limits.HELLO_TIMEOUT_S`.
    """
    loop = asyncio.get_running_loop()
    machine = connection.Connection(Role.CLIENT, loop.time(), heartbeat_s=heartbeat_s)
    machine.send_hello(hello)
    try:
        async with asyncio.timeout(limits.HELLO_TIMEOUT_S):
            await stream.send_all(machine.data_to_send())
            while (event := machine.next_event()) is None:
                data = await stream.receive()
                if data:
                    machine.receive_data(data, loop.time())
                else:
                    machine.receive_eof(loop.time())
    except (OSError, TimeoutError, RemoteProtocolError) as error:
        raise ConnectError(
            f"no greeting from {stream.peer}: {error}", phase=Phase.CONNECT, maybe_delivered=False
        ) from error
    if isinstance(event, e.Welcomed):
        return machine, event.welcome
    if isinstance(event, e.Closed) and event.by_peer and event.code != Code.OK:
        raise RefusedError(event.code, event.reason, event.retry_after_s)
    raise ConnectError(f"no greeting from {stream.peer}: {event}", phase=Phase.CONNECT, maybe_delivered=False)
