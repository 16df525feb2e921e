"""Where the user of this device belongs, as dispatch signed it: checked, kept between starts, gone with its user."""

import logging
from collections.abc import Iterable, Mapping

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from stormline.client.acceptance import times_of
from stormline.client.store import Store
from stormline.core import errors, limits
from stormline.core.clock import Clock
from stormline.wire import plan
from stormline.wire.plan import Home

_log = logging.getLogger("stormline.client")


class Residence:
    """The home of whoever the device token names. Never waits.

    An epoch once seen is never gone back behind, whoever the user is: units are cut for all of them at once.

    Attributes:
        user: whose; empty for nobody.
    """

    def __init__(self, app: str, clock: Clock, store: Store | None) -> None:
        self._app = app
        self._clock = clock
        self._store = store
        self._home: Home | None = None
        self._until = 0.0
        self._epoch = 0
        self.user = ""

    @property
    def home(self) -> Home | None:
        """What holds now; None where nobody has said it, or it has expired."""
        return self._home if self._home is not None and self._clock.monotonic() < self._until else None

    def belong_to(self, user: str) -> None:
        """The device is this user's from now on; what was said of another is forgotten."""
        if user == self.user:
            return
        self.user = user
        if self._home is not None:
            self._forget()

    def restore(self, keys: Mapping[str, Ed25519PublicKey]) -> None:
        """Take what is kept of the last run, where it is this user's and has not expired."""
        text = self._store.load_home() if self._store is not None else ""
        if not text or not self.user:
            return
        try:
            # It was judged when it came; its time says only how long it holds.
            home = self._verify(text.encode("ascii", "replace"), keys, float(times_of(text).issued_at))
        except errors.AnswerRejected as error:
            _log.info("stored home not used: %s", error)
            self._forget()
            return
        self._hold(home, home.expires_at - self._clock.wall())

    def take(self, text: bytes, keys: Mapping[str, Ed25519PublicKey], walls: Iterable[float]) -> None:
        """Check what dispatch says, hold it and keep it on disk.

        Args:
            text: the second line of an answer.
            keys: whose signature counts.
            walls: now by each clock there is, seconds since 1970; by one of them it must be in its time.

        Raises:
            AnswerRejected: with the reason; nothing has changed then.
        """
        if not self.user:
            return
        refused: errors.AnswerRejected | None = None
        for wall in walls:
            try:
                home = self._verify(text, keys, wall)
            except errors.AnswerRejected as error:
                refused = refused or error
                continue
            self._hold(home, home.expires_at - home.issued_at)
            if self._store is not None:
                self._store.save_home(text.decode("ascii"))
            return
        if refused is not None:
            raise refused

    def _verify(self, text: bytes, keys: Mapping[str, Ed25519PublicKey], wall: float) -> Home:
        return plan.verify_home(text, keys=keys, app=self._app, user=self.user, epoch_min=self._epoch, wall=wall)

    def _hold(self, home: Home, life_s: float) -> None:
        self._home, self._epoch = home, max(self._epoch, home.epoch)
        self._until = self._clock.monotonic() + min(limits.PLAN_LIFE_S, max(0.0, life_s))

    def _forget(self) -> None:
        self._home = None
        if self._store is not None:
            self._store.save_home("")
