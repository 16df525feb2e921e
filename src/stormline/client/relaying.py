"""The relay as a means: through which relays a request may go, and one try through one of them.

Loaded with a platform alone: its plans name the relays and their keys, signed; where no plan says anything of a host,
the bundle does, which the app has brought.
"""

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from stormline.client.lanes import Failed, Lane, Reply, Run
from stormline.client.sealed import RelayPlace, Sealer, UnknownRelayKey
from stormline.core import errors, limits, limits_relay
from stormline.core.clock import Clock, Rng
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.messages import HttpResponse
from stormline.policy.means import HEDGE, Means, Step
from stormline.wire import jws, ohttp
from stormline.wire.bundle import Relay
from stormline.wire.plan import SEALED, Endpoint, Plan

_log = logging.getLogger("stormline.client")
CARRIER: Final = SEALED
"""What the records say an answer came by."""


class Beside(Protocol):
    """Opens another lane beside one; see `executor`."""

    def __call__(self, lane: Lane, *, hedge: bool, by: Means) -> None:
        """Open it, where request, host, budget and deadline allow."""


class Relaying:
    """Gives the steps through relays and takes them. Belongs to one event loop.

    Args:
        clock: for requests that change something.
        rng: seals.
        plan: gives the plan that is held.
        bundled: relays of the bundle by host, for hosts of which no plan says anything.
        ask_keys: called where a relay has other keys than the plan says: a newer one is wanted. What it gives is done
            once that was asked for, whatever came of it.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        rng: Rng,
        plan: Callable[[], Plan | None],
        bundled: Mapping[str, tuple[Endpoint, ...]],
        ask_keys: Callable[[], "asyncio.Future[None]"],
    ) -> None:
        self._sealer = Sealer(clock=clock, rng=rng)
        self._plan = plan
        self._bundled = bundled
        self._ask_keys = ask_keys

    def steps(self, run: Run) -> tuple[Step, ...]:
        """Give a step for each relay that dispatch names for a request, best first; without its word, the bundle's."""
        held, host = self._plan(), run.request.host
        told = held is not None and (host in held.hosts or host in held.unknown)
        return tuple(Step(Means.RELAY, (place.address,)) for place in (_places(run) if told else self._all(run)))

    def _all(self, run: Run) -> list[RelayPlace]:
        """Give the relays of the plan, then those of the bundle."""
        places = _places(run)
        known = {each.address for each in places}
        return places + [
            each for each in _read_all(run, self._bundled.get(run.request.host, ())) if each.address not in known
        ]

    def watch(self, lane: Lane, beside: Beside) -> None:
        """Ask through a relay beside a lane that has not come to a connection for a while.

        An address that swallows everything is knocked at for as long as a connection may take, and of those attempts a
        few are all the time a user has.

        Args:
            lane: one that begins.
            beside: opens another lane beside it.
        """
        ladder = lane.run.ladder
        if lane.step.means is not Means.RELAY and ladder.repeatable and ladder.ends_with(Means.RELAY):
            lane.timer = lane.run.loop.call_later(limits_relay.RELAY_BESIDE_S, self._beside, lane, beside)

    def _beside(self, lane: Lane, beside: Beside) -> None:
        run = lane.run
        if lane.held is not None or run.over or run.body.spent or not run.has_room():
            return
        if HEDGE not in run.off and lane.path.steering.spares(run):
            lane.note("no connection yet")
            beside(lane, hedge=True, by=Means.RELAY)

    async def ask(self, lane: Lane) -> Reply:
        """Take one step: send the request of a lane through the relay of its step.

        Raises:
            Failed: it got no answer of the origin's.
        """
        run = lane.run
        place = next(each for each in self._all(run) if each.address == lane.step.addresses[0])
        try:
            try:
                response = await self._send(lane, place)
            except UnknownRelayKey as error:
                newer = await self._with_newer_key(run, place)
                if newer is None:
                    raise
                run.trace.note(f"{error}; sealed anew for the key of a newer plan")
                response = await self._send(lane, newer)
        except errors.TransportError as error:
            sent = error.phase.reached(Phase.SEND) and not isinstance(error, UnknownRelayKey)
            reused = not lane.dialled and sent and isinstance(error, errors.ReadError | errors.WriteError)
            raise Failed(error, reused=reused) from error
        run.trace.record.means = Means.RELAY  # it may have run beside another
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

    async def _send(self, lane: Lane, place: RelayPlace) -> HttpResponse:
        run = lane.run
        request = run.request
        if run.body.whole is None:
            request = request._replace(body=run.body.chunks())
        return await self._sealer.request(
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

    async def _with_newer_key(self, run: Run, place: RelayPlace) -> RelayPlace | None:
        """Ask for a newer plan, and give the relay as it names it; None where it knows no other key, or too late.

        Nobody has the request; one whose body was read from a stream cannot be sealed again all the same.
        """
        asked = self._ask_keys()
        if run.body.spent:
            return None
        await asyncio.wait({asked}, timeout=min(run.remaining(), limits.PLAN_WAIT_S))
        held = self._plan()
        named = held.hosts.get(run.request.host) if held is not None else None
        if named is None:
            return None
        policies = (named.policy, *(each.policy for each in named.paths))
        found = (_read(relay) for policy in policies if policy is not None for relay in policy.relays)
        return next((each for each in found if each and each.address == place.address and each.key != place.key), None)


def _places(run: Run) -> list[RelayPlace]:
    """Give the relays that dispatch names for a request, as far as this client can use them."""
    command = run.limits.command
    return [] if command is None else _read_all(run, command.policy.relays)


def _read_all(run: Run, relays: Iterable[Endpoint]) -> list[RelayPlace]:
    return [place for each in relays if (place := _read(each)) is not None] if run.request.scheme == "https" else []


def by_host(relays: Iterable[Relay]) -> dict[str, tuple[Endpoint, ...]]:
    """Give the relays of a bundle for each of their hosts, as a plan would name them."""
    found: dict[str, tuple[Endpoint, ...]] = {}
    for each in relays:
        place = Endpoint(host=each.host, port=each.port, carrier=SEALED, keys=each.keys)
        for host in each.hosts:
            found[host] = (*found.get(host, ()), place)
    return found


@functools.lru_cache(limits_relay.RELAY_PLACES_MAX)
def _read(relay: Endpoint) -> RelayPlace | None:
    address = Address(relay.host, relay.port)
    if relay.carrier != SEALED or not address.is_ip:
        return None
    try:
        keys = ohttp.decode_keys(jws.b64url_decode(relay.keys))
    except (ValueError, errors.RemoteProtocolError) as error:
        _log.warning("relay %s has keys that cannot be read: %s", address, error)
        return None
    return RelayPlace(address, keys[0]) if keys else None
