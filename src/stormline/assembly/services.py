"""Which business services answer on the bus: NATS micro-services, asked by their own convention."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from stormline.core import errors
from stormline.core import limits_service as limits
from stormline.engine.nats import EngineConfig
from stormline.engine.nats_link import FAILURES, shut

_Text = Annotated[str, msgspec.Meta(max_length=limits.SERVICE_TEXT_CHARS_MAX)]
_ASK: Final = "$SRV.STATS"


class _Endpoint(msgspec.Struct, frozen=True):
    subject: _Text
    num_requests: int = 0


class _Said(msgspec.Struct, frozen=True):
    name: _Text
    id: _Text
    version: _Text
    endpoints: Annotated[list[_Endpoint], msgspec.Meta(max_length=limits.SERVICE_ENDPOINTS_MAX)] = []


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """One process of a service.

    Attributes:
        name: the service.
        version: its version.
        id: the process's own id.
        methods: what devices may call there.
        requests: calls it has taken since it started.
    """

    name: str
    version: str
    id: str
    methods: tuple[str, ...]
    requests: int


async def discover(config: EngineConfig) -> list[ServiceProcess]:
    """Ask who is there, and give those that answer within `limits.SERVICE_ANSWER_S` of the last answer, by name.

    What is no answer of a service is passed over.

    Raises:
        PlatformError: the engine cannot be reached.
    """
    client, heard, news = Client(), dict[str, ServiceProcess](), asyncio.Event()

    async def on_error(error: Exception) -> None:
        pass

    async def take(message: Msg) -> None:
        try:
            said = msgspec.json.decode(message.data, type=_Said)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if len(heard) < limits.SERVICE_PROCESSES_MAX:
            methods = tuple(each.subject[4:] for each in said.endpoints if each.subject.startswith("rpc."))
            requests = sum(each.num_requests for each in said.endpoints)
            heard[said.id] = ServiceProcess(said.name, said.version, said.id, methods, requests)
        news.set()

    try:
        async with asyncio.timeout(limits.SERVICE_ASK_S):
            await client.connect(
                config.url.split(","),
                user=config.user,
                password=config.password.reveal(),
                allow_reconnect=False,
                connect_timeout=int(limits.SERVICE_ASK_S),
                error_cb=on_error,
            )
            inbox = client.new_inbox()
            await client.subscribe(inbox, cb=take)
            await client.publish(_ASK, b"", reply=inbox)
            await client.flush(int(limits.SERVICE_ASK_S))
        while True:
            news.clear()
            try:
                async with asyncio.timeout(limits.SERVICE_ANSWER_S):
                    await news.wait()
            except TimeoutError:
                return sorted(heard.values(), key=lambda process: (process.name, process.version, process.id))
    except (*FAILURES, nats.errors.Error) as error:
        raise errors.PlatformError(f"services: the engine at {config.url} cannot be asked: {error!r}") from error
    finally:
        await shut(client)
