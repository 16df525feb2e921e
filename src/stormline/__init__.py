"""stormline keeps apps connected, and their requests succeeding, on networks that lose, stall, lie and change.

Two lines put it under a program that uses httpx or httpx2:

    import httpx2, stormline
    client = httpx2.AsyncClient(transport=stormline.AsyncTransport())
"""

from typing import TYPE_CHECKING, Any

from stormline.core import errors

if TYPE_CHECKING:
    from stormline.client.api import AsyncClient, Client, mark_parsed
    from stormline.client.channel import Channel
    from stormline.client.config import Config
    from stormline.client.masking import MaskUrls
    from stormline.client.netlog import NetworkLogHandler
    from stormline.client.rules import BusinessRule, ClearHttp
    from stormline.client.transport import AsyncTransport, Transport
    from stormline.outbound.doh_server import DohServer
    from stormline.policy.presets import Preset
    from stormline.service.rpc import Service, ServiceCall
    from stormline.wire.httpsig import VerifyKey

__all__ = [
    "AsyncClient", "AsyncTransport", "BusinessRule", "Channel", "ClearHttp", "Client", "Config", "DohServer",
    "MaskUrls", "NetworkLogHandler", "Preset", "Service", "ServiceCall", "Transport", "VerifyKey", "errors",
    "mark_parsed",
]  # fmt: skip

_HOMES = {
    "AsyncClient": "stormline.client.api",
    "AsyncTransport": "stormline.client.transport",
    "BusinessRule": "stormline.client.rules",
    "Channel": "stormline.client.channel",
    "ClearHttp": "stormline.client.rules",
    "Client": "stormline.client.api",
    "Config": "stormline.client.config",
    "DohServer": "stormline.outbound.doh_server",
    "MaskUrls": "stormline.client.masking",
    "NetworkLogHandler": "stormline.client.netlog",
    "Preset": "stormline.policy.presets",
    "Service": "stormline.service.rpc",
    "ServiceCall": "stormline.service.rpc",
    "Transport": "stormline.client.transport",
    "VerifyKey": "stormline.wire.httpsig",
    "mark_parsed": "stormline.client.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: servers and tools need not load the client."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stormline' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
