"""The relay as a means: through which relays a request may go, and one try through one of them.

Loaded with a platform alone: its plans name the relays and their keys, signed.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Final

from stormline.client.lanes import Failed, Lane, Reply, Run
from stormline.client.sealed import RelayPlace, Sealer, UnknownRelayKey
from stormline.core import errors, limits, limits_relay
from stormline.core.clock import Clock, Rng
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.policy.means import Means, Step
from stormline.wire import jws, ohttp
from stormline.wire.plan import SEALED, Endpoint

_log = logging.getLogger("stormline.client")
CARRIER: Final = SEALED
"""What the records say an answer came by."""


class Relaying:
    """Gives the steps through relays and takes them. Belongs to one event loop.

    Args:
        clock: for requests that change something.
        rng: seals.
        ask_keys: called where a relay has other keys than the plan says: a newer plan is wanted.
    """

    def __init__(self, *, clock: Clock, rng: Rng, ask_keys: Callable[[], None]) -> None:
        self._sealer = Sealer(clock=clock, rng=rng)
        self._ask_keys = ask_keys

    def steps(self, run: Run) -> tuple[Step, ...]:
        """Give a step for each relay that dispatch names for a request, best first."""
        return tuple(Step(Means.RELAY, (place.address,)) for place in _places(run))

    async def ask(self, lane: Lane) -> Reply:
        """Take one step: send the request of a lane through the relay of its step.

        Raises:
            Failed: it got no answer of the origin's.
        """
        run = lane.run
        place = next(each for each in _places(run) if each.address == lane.step.addresses[0])
        request = run.request
        if run.body.whole is None:
            request = request._replace(body=run.body.chunks())
        try:
            response = await self._sealer.request(
                request,
                place,
                lane.path.pool,
                deadline_s=run.remaining(),
                body_deadline_s=limits.CALL_DEADLINE_MAX_S,
                connect_timeout_s=run.limits.connect_timeout_s,
                read_timeout_s=run.limits.read_timeout_s if run.limits.read_timeout_s is not None else math.inf,
                newer_than=lane.newer_than,
                follower=lane,
            )
        except UnknownRelayKey as error:
            self._ask_keys()
            raise Failed(error, reused=False) from error
        except errors.TransportError as error:
            sent = error.phase.reached(Phase.SEND)
            reused = not lane.dialled and sent and isinstance(error, errors.ReadError | errors.WriteError)
            raise Failed(error, reused=reused) from error
        # What the connection to a relay is like says nothing of the origin: nobody learns from it.
        return Reply(
            status=response.status,
            reason=b"",
            http_version=response.http_version,
            headers=tuple(response.headers),
            source=response.source,
            held=None,
            carrier=CARRIER,
            reused=response.reused,
        )


def _places(run: Run) -> list[RelayPlace]:
    """Give the relays that dispatch names for a request, as far as this client can use them."""
    command = run.limits.command
    if command is None or run.request.scheme != "https":
        return []
    return [place for each in command.policy.relays if (place := _read(each)) is not None]


@functools.lru_cache(limits_relay.RELAY_PLACES_MAX)
def _read(relay: Endpoint) -> RelayPlace | None:
    address = Address(relay.host, relay.port)
    if relay.carrier != SEALED or not address.is_ip:
        return None
    try:
        keys = ohttp.decode_keys(jws.b64url_decode(relay.keys))
    except (ValueError, errors.RemoteProtocolError) as error:
        _log.warning("the plan names relay %s with keys that cannot be read: %s", address, error)
        return None
    return RelayPlace(address, keys[0]) if keys else None
