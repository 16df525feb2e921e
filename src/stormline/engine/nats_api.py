"""What keys and streams share of JetStream's wire interface: questions, answers, positions."""

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec
from nats.aio.msg import Msg

from stormline.core import errors, limits_platform
from stormline.engine.nats_link import Link

WRONG_LAST_SEQUENCE: Final = (10071, 10164)
OTHER_CONFIGURATION: Final = 10058
SUBJECTS_OVERLAP: Final = 10065
NO_ROOM: Final = (10023, 10028, 10047, 10077, 10122)
"""Insufficient resources, memory or storage; the stream's bytes are used up."""
SECOND_NS: Final = 1_000_000_000


class Links(Protocol):
    """Gives connections, one after the other."""

    def link(self) -> Link:
        """Give the present one, or raise `EngineUnavailable`."""
        ...

    async def wait_link(self) -> Link | None:
        """Wait for one; None once there will be none."""
        ...


class Problem(msgspec.Struct):
    """Why the interface says no."""

    err_code: int = 0
    description: str = ""


class Answer(msgspec.Struct):
    """The parts we read of an answer of the interface."""

    error: Problem | None = None
    seq: int = 0
    num_pending: int = 0


_decode = msgspec.json.Decoder(Answer).decode


async def call(
    link: Link, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, into: list[Msg] | None = None
) -> Msg:
    """Ask the interface and give its answer as it came; see `Link.call`."""
    try:
        return await link.call(subject, data, headers, timeout_s=limits_platform.ENGINE_KV_TIMEOUT_S, into=into)
    except errors.NoResponders as error:
        raise errors.EngineUnavailable(f"engine has nobody who keeps {subject}") from error


async def api(link: Link, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> Answer:
    """Ask the interface and read its answer."""
    message = await call(link, subject, data, headers)
    try:
        return _decode(message.data)
    except msgspec.MsgspecError as error:
        raise errors.EngineError(f"engine's answer on {subject} is malformed: {error}", maybe_delivered=True) from error


async def reach(link: Link, stream: str, subject: str) -> None:
    """Return when a stream that was just made can be written and read from here: in a cluster word of it travels.

    Raises:
        EngineUnavailable: it cannot, within `limits_platform.ENGINE_KV_TIMEOUT_S`.
    """
    try:
        async with asyncio.timeout(limits_platform.ENGINE_KV_TIMEOUT_S):
            for question, data, headers in (
                (subject, b"", {"Nats-Expected-Stream": "-"}),  # always refused, and only by the one that keeps it
                (f"$JS.API.DIRECT.GET.{stream}", b'{"seq": 1}', None),
            ):
                while True:
                    try:
                        await call(link, question, data, headers)
                        break
                    except errors.EngineUnavailable:
                        if not link.connected:
                            raise
                        await asyncio.sleep(limits_platform.ENGINE_RECONNECT_PAUSE_S)
    except TimeoutError:
        raise errors.EngineUnavailable(f"engine stream {stream} has no leader") from None


def positions(reply: str) -> tuple[int, int, int, int]:
    """Read deliveries, stream sequence, consumer sequence and pending count from `$JS.ACK....` (NATS ADR-15)."""
    parts = reply.split(".")
    try:
        # ...<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>; the longer form has domain and account in front.
        at = 4 if len(parts) == 9 else 6
        return int(parts[at]), int(parts[at + 1]), int(parts[at + 2]), int(parts[at + 4])
    except (IndexError, ValueError) as error:
        raise errors.EngineError("message of a consumer without its position") from error
