"""What generated clients stand on (`stormline codegen`): one transport, credentials that mask themselves, answers read.

Methods of a generated client raise, next to the errors of the transport:

- `ApiError`, or a class of it that holds the document's own model, where the status stands for an error;
- `UnexpectedAnswer` where status, content type or body are not what the document says;
- `ConfigError` where an argument cannot stand in the request.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Self, TypeAlias, TypeVar

import httpx2

from stormline.client import sse
from stormline.client.typed_call import Answer, Credential, File, Operation, Param, credential, judge, prepare
from stormline.core.errors import ApiError, UnexpectedAnswer

__all__ = [
    "Answer", "ApiError", "AsyncApi", "AsyncCalls", "AsyncEvents", "AsyncSender", "Credential", "Events", "File",
    "Operation", "Param", "SyncApi", "SyncCalls", "SyncSender", "UnexpectedAnswer", "credential",
]  # fmt: skip

T = TypeVar("T")
Events: TypeAlias = Iterator[sse.Event]
AsyncEvents: TypeAlias = AsyncIterator[sse.Event]


class AsyncSender:
    """Sends the operations of one client.

    Args:
        base_url: what all paths begin with.
        client: whose transport is used.
        credentials: by the document's names for them.
    """

    def __init__(self, base_url: str, client: httpx2.AsyncClient, credentials: Mapping[str, Credential]) -> None:
        self.base_url = base_url
        self.client = client
        self._credentials = credentials

    async def send(
        self,
        operation: Operation[T],
        values: tuple[Any, ...] = (),
        body: Any = None,
        *,
        deadline_s: float | None = None,
        business: str | None = None,
    ) -> T:
        """Send one operation and give its answer. Cancelling it cancels the request.

        Raises:
            ApiError: the status stands for an error.
            UnexpectedAnswer: the answer is not what the document says.
            ConfigError: a value cannot stand where it belongs.
            TransportError: no answer came.
        """
        told = prepare(
            operation, values, body, base_url=self.base_url, credentials=self._credentials,
            deadline_s=deadline_s, business=business,
        )  # fmt: skip
        return judge(operation, await self.client.request(**told))

    async def events(
        self,
        operation: Operation[Any],
        values: tuple[Any, ...] = (),
        body: Any = None,
        *,
        deadline_s: float | None = None,
        business: str | None = None,
    ) -> AsyncEvents:
        """Send one operation and yield the events of its answer until it ends; see `send` and `sse.aevents`."""
        told = prepare(
            operation, values, body, base_url=self.base_url, credentials=self._credentials,
            deadline_s=deadline_s, business=business,
        )  # fmt: skip
        async with self.client.stream(**told) as response:
            if response.status_code != 200:
                await response.aread()
                judge(operation, response)
            async for event in sse.aevents(response):
                yield event


class SyncSender:
    """The same for synchronous clients; see `AsyncSender`."""

    def __init__(self, base_url: str, client: httpx2.Client, credentials: Mapping[str, Credential]) -> None:
        self.base_url = base_url
        self.client = client
        self._credentials = credentials

    def send(
        self,
        operation: Operation[T],
        values: tuple[Any, ...] = (),
        body: Any = None,
        *,
        deadline_s: float | None = None,
        business: str | None = None,
    ) -> T:
        """Send one operation and give its answer; see `AsyncSender.send`."""
        told = prepare(
            operation, values, body, base_url=self.base_url, credentials=self._credentials,
            deadline_s=deadline_s, business=business,
        )  # fmt: skip
        return judge(operation, self.client.request(**told))

    def events(
        self,
        operation: Operation[Any],
        values: tuple[Any, ...] = (),
        body: Any = None,
        *,
        deadline_s: float | None = None,
        business: str | None = None,
    ) -> Events:
        """Send one operation and yield the events of its answer; see `AsyncSender.events`."""
        told = prepare(
            operation, values, body, base_url=self.base_url, credentials=self._credentials,
            deadline_s=deadline_s, business=business,
        )  # fmt: skip
        with self.client.stream(**told) as response:
            if response.status_code != 200:
                response.read()
                judge(operation, response)
            yield from sse.events(response)


class AsyncCalls:
    """Some operations of an API."""

    def __init__(self, sender: AsyncSender) -> None:
        self._sender = sender


class SyncCalls:
    """Some operations of an API, for synchronous code."""

    def __init__(self, sender: SyncSender) -> None:
        self._sender = sender


class AsyncApi(AsyncCalls):
    """An API's client, to be used with `async with`, or closed with `aclose`.

    Args:
        base_url: what all paths begin with.
        client: whose transport is used.
        owned: close `client` with this one.
        credentials: by the document's names for them.
    """

    def __init__(
        self, base_url: str, client: httpx2.AsyncClient, *, owned: bool, credentials: Mapping[str, Credential]
    ) -> None:
        super().__init__(AsyncSender(base_url, client, credentials))
        self._owned = owned

    def __repr__(self) -> str:
        """Name class and address; no credential."""
        return f"{type(self).__name__}({self._sender.base_url!r})"

    async def aclose(self) -> None:
        """Close the client below, unless the caller brought it."""
        if self._owned:
            await self._sender.client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ending: object) -> None:
        await self.aclose()


class SyncApi(SyncCalls):
    """An API's client for synchronous code, to be used with `with`, or closed with `close`; see `AsyncApi`."""

    def __init__(
        self, base_url: str, client: httpx2.Client, *, owned: bool, credentials: Mapping[str, Credential]
    ) -> None:
        super().__init__(SyncSender(base_url, client, credentials))
        self._owned = owned

    def __repr__(self) -> str:
        """Name class and address; no credential."""
        return f"{type(self).__name__}({self._sender.base_url!r})"

    def close(self) -> None:
        """Close the client below, unless the caller brought it."""
        if self._owned:
            self._sender.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ending: object) -> None:
        self.close()
