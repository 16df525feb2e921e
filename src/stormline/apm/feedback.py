"""What users say: taken from devices once each, bounded, and given to operators."""

import asyncio
import base64
from typing import Any, Final

import pyarrow as pa

from stormline.apm.rows import Origin
from stormline.apm.store import Store
from stormline.core import errors
from stormline.core import limits_netlog as limits
from stormline.core.clock import Clock
from stormline.policy.ratelimit import RateLimiter
from stormline.telemetry.feedback import Feedback

_SCHEMA: Final = pa.schema(
    [
        ("received_at", pa.timestamp("ms", "UTC")),
        ("said_at", pa.timestamp("ms", "UTC")),
        *((name, pa.string()) for name in ("app", "id", "device", "user", "platform", "client", "text")),
        ("log_bytes", pa.uint32()),
        ("log", pa.string()),
    ]
)
_HELD: Final = "SELECT countIf(app = {app:String} AND id = {id:String}) AS same, count() AS held FROM feedback"
_SHOWN: Final = (
    "toUnixTimestamp64Milli(received_at) AS received_at_ms, toUnixTimestamp64Milli(said_at) AS said_at_ms, "
    "app, id, device, user, platform, client, text, log_bytes"
)
_LIST: Final = f"""
SELECT {_SHOWN} FROM feedback FINAL
WHERE received_at >= fromUnixTimestamp64Milli({{since:Int64}}) AND ({{app:String}} = '' OR app = {{app:String}})
ORDER BY received_at DESC, id LIMIT {{limit:UInt32}}
"""  # noqa: S608 - constants only; values go in as parameters
_ONE: Final = f"SELECT {_SHOWN}, log FROM feedback FINAL WHERE id = {{id:String}} LIMIT 1"  # noqa: S608 - as above


class TooOften(Exception):
    """A device says too much at once.

    Attributes:
        wait_s: seconds until it may speak again.
    """

    def __init__(self, wait_s: float) -> None:
        super().__init__("too much feedback from this device")
        self.wait_s = wait_s


class FeedbackDesk:
    """Takes feedback; one for each store.

    Args:
        store: where it is kept.
        clock: time.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._one = asyncio.Lock()  # between the question whether it is there and its storing
        self._rates = RateLimiter(
            rate_per_s=1.0 / limits.FEEDBACK_DEVICE_PAUSE_S,
            burst=limits.FEEDBACK_DEVICE_BURST,
            keys_max=limits.FEEDBACK_DEVICES_MAX,
        )

    async def take(self, origin: Origin, said: Feedback) -> bool:
        """Store feedback, once by its id; when this returns it survives a crash.

        Returns:
            False where it had been stored before.

        Raises:
            TooOften: the device has to wait.
            StoreBusy: there is no room for more.
            StoreError: it is not known to be stored.
        """
        wait_s = self._rates.take(f"{origin.app} {origin.device}", self._clock.monotonic())
        if wait_s:
            raise TooOften(wait_s)
        async with self._one:
            [found] = await self._store.query(_HELD, {"app": origin.app, "id": said.id})
            if found["same"]:
                return False
            if found["held"] >= limits.FEEDBACK_ROWS_MAX:
                raise errors.StoreBusy("no room for more feedback", retry_after_s=3600.0)
            row = {
                "received_at": int(self._clock.wall() * 1000),
                "said_at": said.said_at_ms,
                "app": origin.app,
                "id": said.id,
                "device": origin.device,
                "user": origin.user,
                "platform": said.platform,
                "client": said.client,
                "text": said.text,
                "log_bytes": len(said.log),
                "log": base64.b64encode(said.log).decode("ascii"),
            }
            await self._store.insert_table("feedback", pa.Table.from_pylist([row], schema=_SCHEMA))
        return True

    async def list(self, *, since_ms: int, app: str, limit: int) -> list[dict[str, Any]]:
        """Give what was said since, the newest first, without the logs.

        Raises:
            StoreError: the store cannot answer now.
        """
        return await self._store.query(_LIST, {"since": since_ms, "app": app, "limit": limit})

    async def one(self, feedback_id: str) -> dict[str, Any] | None:
        """Give one feedback with its log in base64, None where there is none of this id.

        Raises:
            StoreError: the store cannot answer now.
        """
        found = await self._store.query(_ONE, {"id": feedback_id})
        return found[0] if found else None
