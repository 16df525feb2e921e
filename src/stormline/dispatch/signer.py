"""Signing keys on disk, and signed answers that are made once and given out often."""

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch import planner
from stormline.dispatch.rules import RuleSet
from stormline.wire import plan as wire_plan
from stormline.wire.jws import SigningKey
from stormline.wire.plan import PlanRequest


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


class _Entry(NamedTuple):
    text: bytes
    issued_at: int


class PlanSigner:
    """Answers questions with signed text, remembering what it signed.

    Equal questions (same app, hosts and rule version) get the same bytes for `refresh_s`. The memory is bounded in
    entries and in bytes; what was not asked for longest goes first.
    """

    def __init__(
        self,
        key: SigningKey,
        *,
        refresh_s: float = limits.PLAN_REFRESH_S,
        entries_max: int = limits.PLAN_CACHE_ENTRIES_MAX,
        bytes_max: int = limits.PLAN_CACHE_BYTES_MAX,
    ) -> None:
        self._key = key
        self._refresh_s = refresh_s
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._entries: OrderedDict[tuple[str, int, tuple[str, ...]], _Entry] = OrderedDict()
        self.bytes_held = 0
        """Signed text remembered, in bytes."""

    def __len__(self) -> int:
        """Answers remembered."""
        return len(self._entries)

    def answer(self, request: PlanRequest, rules: RuleSet, wall: float) -> bytes:
        """Give the signed answer to a question.

        Args:
            request: the question.
            rules: checked rules.
            wall: now, seconds since 1970; may step either way.

        Raises:
            RequestRefused: see `planner.plan_for`.
        """
        planner.check_app(request.app, rules)
        hosts = planner.hosts_of(request)
        key = (request.app, rules.version, hosts)
        entry = self._entries.get(key)
        if entry is not None:
            if entry.issued_at <= wall < entry.issued_at + self._refresh_s:
                self._entries.move_to_end(key)
                return entry.text
            self._forget(key)
        plan = planner.plan_for(request, rules, wall)
        text = wire_plan.sign(plan, key=self._key.key, kid=self._key.kid).encode("ascii")
        self._entries[key] = _Entry(text, plan.issued_at)
        self.bytes_held += len(text)
        while len(self._entries) > self._entries_max or self.bytes_held > self._bytes_max:
            self._forget(next(iter(self._entries)))
        return text

    def _forget(self, key: tuple[str, int, tuple[str, ...]]) -> None:
        self.bytes_held -= len(self._entries.pop(key).text)
