"""Signing keys on disk, and signed answers that are made once and given out often."""

from collections import OrderedDict
from pathlib import Path

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch import planner
from stormline.dispatch.nearest import NO_MEASURES, Locate, Measures, Nearest
from stormline.dispatch.planner import Standing
from stormline.dispatch.rules import RuleSet
from stormline.wire import plan as wire_plan
from stormline.wire.jws import SigningKey
from stormline.wire.plan import PlanRequest, Unchanged


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 private key, PEM PKCS#8 without a password.

    Raises:
        ConfigError: missing, unreadable, corrupt, or another kind of key; the message names the path.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limits.PLATFORM_FILE_BYTES_MAX)
    except OSError as error:
        raise errors.ConfigError(f"{path}: cannot read the signing key: {error.strerror}") from error
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise errors.ConfigError(f"{path}: not a private key in PEM form without a password") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise errors.ConfigError(f"{path}: not an Ed25519 key")
    return key


_Key = tuple[str, int, int, int, str, tuple[str, ...], tuple[str, str, str, int, bool]]
_CHANGES_KEPT = 4
"""Different plans from which the way to one answer is remembered: devices hold the last one, or that before it."""


class _Entry:
    """One answer and what was made from it."""

    __slots__ = ("changes", "plan", "since", "text", "unchanged", "until")

    def __init__(self, plan: wire_plan.Plan, text: bytes, until: float) -> None:
        self.plan = plan
        self.text = text
        self.since = plan.issued_at
        self.until = until
        self.unchanged = b""
        self.changes: dict[str, bytes] = {}

    @property
    def size(self) -> int:
        return len(self.text) + len(self.unchanged) + sum(map(len, self.changes.values()))


class PlanSigner:
    """Answers questions with signed text, remembering what it signed.

    Equal questions from clients in one placement group (same app, hosts, rule version, region, operator, unit, role and
    bucket of devices) get the same bytes for `refresh_s`, or half the life of a shorter plan. The memory is bounded in
    entries and in bytes; what was signed first goes first.

    Who says what is held gets 'unchanged' where that is still true, whatever the version; and where `changes` may be
    sent and the content held is remembered, only what differs.

    Args:
        key: signs, unless the client trusts only one of `others`.
        others: keys of a rotation under way, the next or the last ones. All public keys go with every plan then, so
            that clients learn the next before it is used.
        standing: leaves out endpoints that are not well.
        locate: database for addresses that no network of the rules holds.
        refresh_s: how long signed bytes are given out again.
        entries_max: answers remembered.
        bytes_max: their text together.
    """

    def __init__(
        self,
        key: SigningKey,
        *,
        others: tuple[SigningKey, ...] = (),
        standing: Standing | None = None,
        locate: Locate | None = None,
        refresh_s: float = limits.PLAN_REFRESH_S,
        entries_max: int = limits.PLAN_CACHE_ENTRIES_MAX,
        bytes_max: int = limits.PLAN_CACHE_BYTES_MAX,
    ) -> None:
        self._signing = (key, *others)
        self._announced = {each.kid: each.public_text for each in self._signing} if others else {}
        self._refresh_s = refresh_s
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._locate = locate
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._history: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._near: list[tuple[RuleSet, int, Nearest]] = []
        self.standing: Standing = standing or planner.Everywhere()
        """Endpoints that may be handed out; may be replaced while nothing is asked."""
        self.measures: Measures = NO_MEASURES
        """What is measured of endpoints; may be replaced by one of a greater revision at any time."""
        self.bytes_held = 0
        """Signed text remembered, in bytes."""

    def __len__(self) -> int:
        """Answers remembered."""
        return len(self._entries)

    def answer(self, request: PlanRequest, rules: RuleSet, wall: float, *, address: str = "") -> bytes:
        """Give the signed answer to a question.

        Args:
            request: the question.
            rules: checked rules.
            wall: now, seconds since 1970; may step either way.
            address: the client's IP address as text, empty where it is not known.

        Raises:
            RequestRefused: see `planner.plan_for`.
        """
        hosts = planner.hosts_of(request)  # whether the app is known, who makes the plan looks
        near = self.nearest(rules)
        group = near.group(address, device=request.device, role=request.role)
        signing = self.key_for(request.kids)
        key: _Key = (
            request.app, rules.version, self.standing.revision, self.measures.revision, signing.kid, hosts, group,
        )  # fmt: skip
        entry = self._entries.get(key)
        if entry is not None and not entry.since <= wall < entry.until:
            self._forget(key)
            entry = None
        if entry is not None and not request.held:
            return entry.text
        if entry is None:
            place = near.place(address, device=request.device, role=request.role)
            plan = planner.plan_for(request, rules, wall, near=near, place=place, standing=self.standing)
            plan = msgspec.structs.replace(plan, keys=self._announced)
            plan = msgspec.structs.replace(plan, digest=wire_plan.content_digest(plan))
            text = wire_plan.sign(plan, key=signing.key, kid=signing.kid).encode("ascii")
            entry = _Entry(plan, text, plan.issued_at + min(self._refresh_s, (plan.expires_at - plan.issued_at) / 2))
            self._entries[key] = entry
            self.bytes_held += entry.size
            self._remember(plan)
        answer = self._shortest(request, hosts, entry, signing) if request.held else entry.text
        while len(self._entries) > self._entries_max or self.bytes_held > self._bytes_max:
            self._forget(next(iter(self._entries)))
        return answer

    def home(self, app: str, user: str, rules: RuleSet, wall: float, *, kids: tuple[str, ...] = ()) -> bytes:
        """Give a user's signed home, empty where the rules say nothing of units; the caller knows who the user is."""
        home = planner.home_for(app, user, rules, wall)
        signing = self.key_for(kids)
        return b"" if home is None else wire_plan.sign_home(home, key=signing.key, kid=signing.kid).encode("ascii")

    def key_for(self, kids: tuple[str, ...]) -> SigningKey:
        """Give the key to sign with for a client that trusts these; the first where it names none that is here."""
        for each in self._signing:
            if each.kid in kids:
                return each
        return self._signing[0]

    def nearest(self, rules: RuleSet) -> Nearest:
        """Give places and orders under these rules; made once for each rule set and revision of the measures."""
        for held in self._near:
            if held[0] is rules and held[1] == self.measures.revision:
                return held[2]
        made = Nearest(rules, locate=self._locate, measures=self.measures)
        # Two, as during a roll-out both are asked for in turn.
        self._near = [(rules, self.measures.revision, made), *self._near[:1]]
        return made

    def _shortest(self, request: PlanRequest, hosts: tuple[str, ...], entry: _Entry, signing: SigningKey) -> bytes:
        plan = entry.plan
        if request.held == plan.digest:
            if not entry.unchanged:
                answer = Unchanged(
                    app=plan.app,
                    version=plan.version,
                    issued_at=plan.issued_at,
                    expires_at=plan.expires_at,
                    held=plan.digest,
                    asked=wire_plan.question_digest(plan.app, hosts),
                )
                entry.unchanged = wire_plan.sign_unchanged(answer, key=signing.key, kid=signing.kid).encode("ascii")
                self.bytes_held += len(entry.unchanged)
            return entry.unchanged
        held = self._history.get(request.held) if request.changes else None
        if held is None:
            return entry.text
        text = entry.changes.get(request.held)
        if text is None:
            changed = wire_plan.changes(held, request.held, plan)
            text = wire_plan.sign(changed, key=signing.key, kid=signing.kid).encode("ascii")
            if len(entry.changes) >= _CHANGES_KEPT:
                self.bytes_held -= len(entry.changes.pop(next(iter(entry.changes))))
            entry.changes[request.held] = text
            self.bytes_held += len(text)
        return min(text, entry.text, key=len)

    def _remember(self, plan: wire_plan.Plan) -> None:
        self._history[plan.digest] = wire_plan.host_digests(plan)
        self._history.move_to_end(plan.digest)
        while len(self._history) > limits.PLAN_HISTORY_MAX:
            self._history.popitem(last=False)

    def _forget(self, key: _Key) -> None:
        self.bytes_held -= self._entries.pop(key).size
