"""stormline that is told that its network is cellular, so that bytes cost money; `options` as of `stormline`."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from stormline.lab.drivers import stormline

costs = stormline.costs
level = stormline.level


def client(config: dict[str, Any]) -> AbstractAsyncContextManager[Callable[[str], Awaitable[tuple[int, bytes]]]]:
    """Give a function that makes one request."""
    return stormline.client({**config, "options": {**config["options"], "network": "cell"}})
