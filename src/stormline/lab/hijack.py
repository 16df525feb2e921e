"""A box on the way that answers questions to scheduling centres which come in clear HTTP.

It knows the true centre, and gives what a forger can make of its answers. Each way to lie has a port of its own.
"""

import asyncio
import contextlib
import enum
from collections.abc import Mapping

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import limits_lab
from stormline.core.values import Address
from stormline.lab.origin_answers import PAGE
from stormline.wire import jws, plan
from stormline.wire.plan import Carrier, Endpoint, HostPlan, Plan, PlanRequest


class Lie(enum.StrEnum):
    """What is answered, always with status 200."""

    PAGE = "page"
    """A page of its own, as captive portals answer everything."""
    FORGED = "forged"
    """The true plan with the forger's addresses in it, signed with the forger's key under the true key's id."""
    ALTERED = "altered"
    """The same, with the signature of the true plan."""
    TRUNCATED = "truncated"
    """The first half of the true plan."""
    OLDER = "older"
    """A true plan that was recorded when the box began."""
    OTHER_APP = "other-app"
    """What the centre says to another app about the same hosts."""


class Box:
    """Answers for a centre, as it likes. Make it in a running loop, `start` it, and `close` it.

    Args:
        centre: where the true one answers in clear HTTP.
        forger: where the plans of the forger lead.
        other_app: an app that the centre knows too.
    """

    def __init__(self, centre: Address, forger: Address, other_app: str) -> None:
        self._centre = centre
        self._forger = forger
        self._other_app = other_app
        self._key = Ed25519PrivateKey.generate()
        self._recorded = b""
        self._servers: list[asyncio.Server] = []

    async def start(self, host: str, ports: Mapping[Lie, int], record: PlanRequest) -> None:
        """Record the answer to a question, and listen.

        Raises:
            OSError: a port is taken, or the centre does not answer.
        """
        self._recorded = await self._ask(record)
        for lie, port in ports.items():
            self._servers.append(await self._listen(lie, host, port))

    async def _listen(self, lie: Lie, host: str, port: int) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, EOFError, ValueError):
                while True:
                    body = await self.answer(lie, await _read(reader))
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
                    await writer.drain()
            writer.close()

        return await asyncio.start_server(serve, host, port, backlog=limits_lab.LAB_BACKLOG)

    async def answer(self, lie: Lie, body: bytes) -> bytes:
        """Give the answer to a question.

        Raises:
            ValueError: it is none.
            OSError: the centre does not answer.
        """
        if lie is Lie.PAGE:
            return PAGE
        if lie is Lie.OLDER:
            return self._recorded
        # Asked as by one who holds nothing, so that the answer is whole and there is something to change.
        asked = msgspec.structs.replace(plan.decode_request(body), held="")
        if lie is Lie.OTHER_APP:
            return await self._ask(msgspec.structs.replace(asked, app=self._other_app))
        true = await self._ask(asked)
        return true[: len(true) // 2] if lie is Lie.TRUNCATED else self._changed(lie, true)

    def _changed(self, lie: Lie, true: bytes) -> bytes:
        header, payload, signature = true.split(b".")
        found = msgspec.json.decode(jws.b64url_decode(payload), type=Plan)
        bad = HostPlan(endpoints=(Endpoint(host=self._forger.host, port=self._forger.port, carrier=Carrier.H2),))
        hosts, version = dict.fromkeys(found.hosts, bad), found.version + 9
        text = msgspec.json.encode(msgspec.structs.replace(found, hosts=hosts, gateways=(), version=version))
        if lie is Lie.FORGED:
            kid = msgspec.json.decode(jws.b64url_decode(header))["kid"]
            return jws.sign(text, key=self._key, kid=kid, typ=plan.TYP).encode()
        return b".".join((header, jws.b64url(text).encode(), signature))

    async def _ask(self, question: PlanRequest) -> bytes:
        body = msgspec.json.encode(question)
        reader, writer = await asyncio.open_connection(*self._centre)
        try:
            writer.write(b"POST /v1/plan HTTP/1.1\r\nhost: centre\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
            return await _read(reader)
        finally:
            writer.close()

    def close(self) -> None:
        """Listen no more."""
        for server in self._servers:
            server.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Give the body of the next message, of a kind that has a Content-Length."""
    length = 0
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return await reader.readexactly(min(length, limits_lab.LAB_REQUEST_BODY_BYTES_MAX))
