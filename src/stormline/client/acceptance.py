"""Which of dispatch's answers a client believes, and what it keeps of them.

The signature says who speaks. Two things are left to an attacker who has kept old answers: to give one again while a
newer is known, and to give one that nobody should use any more. Against the first stands the **highest version seen**,
kept in a file of its own, so that it holds over restarts and where the stored plan is damaged. Against the second
stands the **expiry**, judged by the best clock there is:

1. the device's own clock, within `limits.CLOCK_SKEW_S`;
2. the `Date` of an answer over TLS that was verified, and then that time carried on by the monotonic clock;
3. where the answer is from the **future** of both (a clock that is years behind verifies no certificate): two centres
   at different addresses whose answers bear valid signatures and times within `limits_network.CLOCK_WITNESS_S`. A
   recording cannot be from the future of a clock that is right, so this opens nothing for one.

What is in its time by one of these is in its time. The limits: whoever stands on the way to both centres of a device
whose clock is behind can hold it at one past moment, yet never at a version older than it has seen. And a clock that is
ahead by more than a certificate's life gets no new plan: an expired answer in the clear may be a recording, so what was
stored goes on serving as stale. The monotonic clock may stand while the device sleeps; then the time of 2 lags by that.
"""

import contextlib
import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from stormline.client.store import Store
from stormline.core import errors, limits, limits_network
from stormline.core.clock import Clock
from stormline.wire import jws, plan, strictjson
from stormline.wire.bundle import Bundle
from stormline.wire.plan import Plan

_log = logging.getLogger("stormline.client")
_TIME: tuple[str, ...] = ("expired", "not-yet-valid")


class Times(msgspec.Struct):
    """When a signed answer was made and until when it holds, seconds since 1970."""

    issued_at: int
    expires_at: int


class _Floor(msgspec.Struct):
    """What is kept on disk: the highest version seen, the ids of the keys that were trusted then, and told keys."""

    version: int
    kids: tuple[str, ...] = ()
    keys: dict[str, str] = {}


_times_decoder = msgspec.json.Decoder(Times)
_floor_decoder = msgspec.json.Decoder(_Floor)


class _Witness(NamedTuple):
    issued_at: float
    heard_at: float


class Acceptance:
    """The plan held, and the judge of what may follow it. Never waits.

    A floor of another platform does not count: where none of the keys of then is trusted now, the platform was made
    anew, and its versions begin anew. In a change of keys with overlap the old and the new bundle share one.
    """

    def __init__(self, bundle: Bundle, clock: Clock, store: Store | None) -> None:
        self._app = bundle.app
        self._keys = jws.load_public_keys(bundle.dispatch_keys)
        self._told: dict[str, str] = {}  # keys that plans have told of, for the time when the bundle's are retired
        self._clock = clock
        self._store = store
        self._true_offset: float | None = None  # true time minus the monotonic clock
        self._witnesses: dict[str, _Witness] = {}
        self._plan: Plan | None = None
        self._texts: list[str] = []  # a whole plan as it was signed, and what changed it since; for the disk
        self._texts_give = ""  # the digest of what they come to
        self._whole = False  # the next answer is wanted whole
        self._fresh_until = self._stands_until = 0.0
        self._refresh_at = 0.0
        self._floor = self._load_floor()

    @property
    def plan(self) -> Plan | None:
        """The plan held, fresh or stale."""
        return self._plan

    @property
    def fresh(self) -> bool:
        """The plan held has not expired."""
        return self._clock.monotonic() < self._fresh_until

    @property
    def stands(self) -> bool:
        """The plan held has not expired, or not long ago: it serves while a newer one is asked for."""
        return self._clock.monotonic() < self._stands_until

    @property
    def due(self) -> bool:
        """It is time to ask for a newer one."""
        return self._clock.monotonic() >= self._refresh_at

    @property
    def floor(self) -> int:
        """The highest version seen, 0 for none."""
        return self._floor

    @property
    def held(self) -> Plan | None:
        """The plan to be named as held in a question; None where a whole answer is wanted."""
        return None if self._whole else self._plan

    @property
    def may_change(self) -> bool:
        """Whether an answer may hold only what changed: there is room to keep it behind what it changes."""
        if self._store is None:
            return True
        room = limits.PLAN_BYTES_MAX - sum(map(len, self._texts))
        return 0 < len(self._texts) <= limits_network.PLAN_CHANGES_KEPT and len(self._texts[0]) < room

    @property
    def keys(self) -> Mapping[str, Ed25519PublicKey]:
        """The keys that are trusted."""
        return self._keys

    @property
    def walls(self) -> tuple[float, ...]:
        """The time now by each clock there is, seconds since 1970."""
        walls = (self._clock.wall(),)
        return walls if self._true_offset is None else (*walls, self._true_offset + self._clock.monotonic())

    def make_due(self) -> None:
        """Ask for a newer one at the next occasion."""
        self._refresh_at = 0.0

    def restore(self) -> Plan | None:
        """Take the plan of the last run, also an expired one, which then is stale; None where none is usable."""
        stored = (self._store.load_plan() if self._store is not None else "").split("\n")
        if not stored[0]:
            return None
        held: Plan | None = None
        texts: list[str] = []
        try:
            for text in stored[: limits_network.PLAN_CHANGES_KEPT + 2]:
                confirms = held is not None and jws.typ_of(text) == plan.TYP_UNCHANGED
                asked = (*held.hosts, *held.unknown) if held is not None and confirms else ()
                # It was judged when it came; its time says only whether it is fresh still.
                held = self._verify(text, asked, times_of(text).issued_at, version_min=0, held=held)
                if not confirms:
                    texts.append(text)
            if held is None or held.version < self._floor:
                raise errors.AnswerRejected("stale-version", f"it is older than version {self._floor}, which was seen")
        except errors.AnswerRejected as error:
            _log.info("stored plan not used: %s", error)
            return None
        self._texts, self._texts_give = texts, held.digest
        self._hold(held, min(self._life_s(held), held.expires_at - self._clock.wall()))
        return held

    def take(
        self,
        signed: str | bytes,
        hosts: Iterable[str],
        *,
        held: Plan | None = None,
        source: str = "",
        server_wall: float | None = None,
    ) -> Plan:
        """Check an answer, hold it and keep it on disk.

        Args:
            signed: the answer's body.
            hosts: the hosts asked for.
            held: the plan that the question named as held; None for the one that is held now.
            source: host of the centre that gave it in the clear: a witness of the time; empty for none.
            server_wall: the moment by a server whose certificate was verified, seconds since 1970.

        Raises:
            AnswerRejected: with the reason; nothing has changed then.
        """
        asked, held = tuple(hosts), held or self._plan
        if server_wall is not None:
            self._true_offset = server_wall - self._clock.monotonic()
        try:
            accepted = self._in_time(signed, asked, source, held)
        except errors.AnswerRejected as error:
            self._whole = self._whole or error.reason == "wrong-base"
            raise
        self._whole = self._whole and jws.typ_of(signed) != plan.TYP
        self._hold(accepted, self._life_s(accepted))
        learned = self._learn_keys(accepted)
        if self._store is not None:
            if learned or accepted.version > self._floor:  # before the plan: a crash between them must not lower it
                floor = _Floor(max(self._floor, accepted.version), tuple(sorted(self._keys)), self._told)
                self._store.save_floor(msgspec.json.encode(floor).decode("ascii"))
            text = signed if isinstance(signed, str) else signed.decode("ascii", "replace")
            self._keep(self._store, text, accepted, base="" if held is None else held.digest)
        self._floor = max(self._floor, accepted.version)
        return accepted

    def _learn_keys(self, accepted: Plan) -> bool:
        """Trust the keys a plan tells of, in the place of those that plans told of before; True where some are new."""
        fresh = {kid: key for kid, key in accepted.keys.items() if kid not in self._keys}
        if not fresh or len(accepted.keys) > limits_network.CENTRE_KEYS_MAX:
            return False
        try:
            self._keys |= jws.load_public_keys(fresh)
        except errors.SignatureError as error:
            _log.warning("keys told by a plan are not used: %s", error)
            return False
        self._told = {**self._told, **fresh}
        while len(self._told) > limits_network.CENTRE_KEYS_MAX:
            oldest = next(iter(self._told))
            del self._told[oldest], self._keys[oldest]
        return True

    def _keep(self, store: Store, signed: str, accepted: Plan, *, base: str) -> None:
        """Write down a whole plan; what changes or confirms it goes behind it, where it belongs to that one."""
        typ = jws.typ_of(signed)
        if typ == plan.TYP:
            self._texts = [signed]
        elif not self._texts or base != self._texts_give:
            self._whole = True
            return
        elif typ == plan.TYP_CHANGES:
            self._texts.append(signed)
        self._texts_give = accepted.digest
        store.save_plan("\n".join(self._texts if typ != plan.TYP_UNCHANGED else [*self._texts, signed]))

    def _in_time(self, signed: str | bytes, hosts: tuple[str, ...], source: str, held: Plan | None) -> Plan:
        out_of_time: errors.AnswerRejected | None = None
        for wall in self.walls:
            try:
                return self._verify(signed, hosts, wall, held=held)
            except errors.AnswerRejected as error:
                if error.reason not in _TIME:
                    raise
                out_of_time = out_of_time or error
        issued_at = times_of(signed).issued_at
        intact = self._verify(signed, hosts, issued_at, held=held)
        if out_of_time is not None and (
            not source or out_of_time.reason == "expired" or not self._agrees(intact, source)
        ):
            raise out_of_time
        return intact

    def _agrees(self, intact: Plan, source: str) -> bool:
        """Say whether a centre at another address has told nearly the same time a moment ago; remember this one."""
        now = self._clock.monotonic()
        agreed = any(
            host != source
            and now - each.heard_at < limits_network.CLOCK_WITNESS_S
            and abs((intact.issued_at - each.issued_at) - (now - each.heard_at)) < limits_network.CLOCK_WITNESS_S
            for host, each in self._witnesses.items()
        )
        self._witnesses[source] = _Witness(float(intact.issued_at), now)
        while len(self._witnesses) > limits_network.CENTRES_MAX:
            del self._witnesses[next(iter(self._witnesses))]
        return agreed

    @property
    def kids(self) -> tuple[str, ...]:
        """Ids of the keys that are trusted."""
        return tuple(sorted(self._keys))

    def _verify(
        self,
        signed: str | bytes,
        hosts: tuple[str, ...],
        wall: float,
        *,
        held: Plan | None,
        version_min: int | None = None,
    ) -> Plan:
        floor = self._floor if version_min is None else version_min
        return plan.verify(signed, keys=self._keys, app=self._app, hosts=hosts, version_min=floor, wall=wall, held=held)

    @staticmethod
    def _life_s(accepted: Plan) -> float:
        # By the centre's own clock, spent on our monotonic one: a wrong wall clock here does not matter.
        return min(limits.PLAN_LIFE_S, max(0.0, accepted.expires_at - accepted.issued_at))

    def _hold(self, accepted: Plan, left_s: float) -> None:
        now, life_s = self._clock.monotonic(), self._life_s(accepted)
        self._plan, self._fresh_until = accepted, now + left_s
        self._stands_until = self._fresh_until + limits_network.PLAN_STALE_LIVES * life_s
        self._refresh_at = now + max(0.0, left_s - 0.25 * life_s)

    def _load_floor(self) -> int:
        text = self._store.load_floor() if self._store is not None else ""
        try:
            kept = strictjson.decode(text.encode("ascii"), _floor_decoder)
        except ValueError:
            return 0
        if kept.version <= 0 or not self._keys.keys() & set(kept.kids):
            return 0
        with contextlib.suppress(errors.SignatureError):
            self._keys |= jws.load_public_keys(kept.keys)
            self._told = kept.keys
        return kept.version


def times_of(signed: str | bytes) -> Times:
    """Read an answer's times. Nothing is checked by this: the same text must pass `plan.verify` or `verify_home`.

    Raises:
        AnswerRejected: there are none.
    """
    raw = signed.encode("utf-8", "replace") if isinstance(signed, str) else signed
    try:
        return strictjson.decode(jws.b64url_decode(raw.split(b".")[1]), _times_decoder)
    except (ValueError, IndexError) as error:
        raise errors.AnswerRejected("malformed", str(error)) from error
