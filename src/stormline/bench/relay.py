"""What a sealed request costs the relay and its gateway, in CPU time of the one process that both are in.

The peer is the same process passing the same request on without a seal, to the same origin over the same connections
(HTTP/1.1, TLS). Both take turns; see `served`. Each sealed request has an ephemeral key of its own.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stormline.assembly.authority import ensure_authority
from stormline.bench import origin, relayed
from stormline.bench.onecore import one_core
from stormline.bench.results import Row, row
from stormline.bench.served import REQUESTS, Asked, Server, served
from stormline.core import errors
from stormline.net.clock import SystemClock, SystemRng
from stormline.relay import keys
from stormline.wire import bhttp, ohttp

GOAL_US: Final = 400.0
"""A small request through relay and gateway."""
GOAL_RATIO: Final = 1.6
"""The same, as a multiple of the request without a seal."""
FIELDS: Final = (
    (b"accept", b"application/json"),
    (b"accept-encoding", b"br, gzip, zstd"),
    (b"user-agent", b"shop/4.2.1 (android 14)"),
    (b"authorization", b"Bearer 3f1c7c0e9d9b4f0ea7b2d8c5"),
    (b"x-request-id", b"01J9ZK3V7Q8W2E4R5T6Y"),
)
"""What a small request of an app carries."""
_PEER: Final = "the same request passed on unsealed"


class Exchange(NamedTuple):
    """A sealed request, and what opens its answer."""

    sealed: bytes
    key: ohttp.ResponseKey

    @classmethod
    def make(cls, config: ohttp.KeyConfig, port: int, rng: SystemRng) -> "Exchange":
        """Seal a request for the bench's origin, as a client does: in chunks, of which it is one."""
        request = bhttp.Request(b"GET", b"https", f"{relayed.NAME}:{port}".encode(), b"/items?page=1", FIELDS)
        sealer = ohttp.RequestSealer(config, entropy=rng.token_bytes(ohttp.ENTROPY_BYTES))
        return cls(sealer.chunk(bhttp.encode_request(request), last=True), sealer.response)

    def opened(self, answer: bytes) -> bhttp.Response:
        """Open the answer."""
        return bhttp.decode_response(b"".join(ohttp.ResponseOpener(self.key).feed(answer, last=True)))


def run() -> list[Row]:
    """Measure; takes half a minute on a quiet machine."""
    with one_core(), _stage() as stage:
        config, port, server = stage
        rng = SystemRng()
        exchanges = [Exchange.make(config, port, rng) for _ in range(REQUESTS)]
        sealed = Asked("/", tuple(each.sealed for each in exchanges), ohttp.CHUNKED_REQUEST_TYPE)
        fields = "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in FIELDS)
        plain = Asked(relayed.PLAIN, (), "", fields)
        bodies = (exchanges[0].opened(server.ask(sealed)).content, server.ask(plain))
        if bodies != (origin.BODY, origin.BODY):
            raise errors.PlatformError("bench: the relay gave another answer than the origin")
        relay_us, plain_us = server.pair(sealed, plain)
    return [
        row("relay_us", relay_us, "us", goal=GOAL_US, peer=_PEER, peer_value=plain_us),
        row("relay_ratio", relay_us / plain_us, "x", goal=GOAL_RATIO, peer=_PEER, peer_value=1.0),
    ]


@contextlib.contextmanager
def _stage() -> Iterator[tuple[ohttp.KeyConfig, int, Server]]:
    with tempfile.TemporaryDirectory(prefix="stormline-bench-") as name:
        folder = Path(name)
        authority = ensure_authority(folder / "ca", clock=SystemClock(), rng=SystemRng())
        files = authority.issue("origin", names=[relayed.NAME])
        key = keys.write_key(folder / "relay-key", 1)
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", origin.__name__, files.certificate, files.key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            ports = process.stdout.readline().split() if process.stdout is not None else []
            if len(ports) != 3:
                raise errors.PlatformError("bench: the origin did not start; what it said stands above")
            where = (f"127.0.0.1:{ports[2]}", str(authority.certificate), str(folder / "relay-key"))
            with served(relayed.__name__, *where) as server:
                yield key.config, int(ports[2]), server
        finally:
            process.communicate()
