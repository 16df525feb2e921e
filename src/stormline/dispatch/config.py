"""What a scheduling centre needs to run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.core.values import Secret
from stormline.dispatch.doh import DohConfig
from stormline.dispatch.probing import HealthConfig
from stormline.dispatch.rules import RuleSet, check
from stormline.web.server import TlsFiles
from stormline.wire.jws import SigningKey


class KeyFile(NamedTuple):
    """A signing key on disk (Ed25519, PEM PKCS#8) and the id under which verifiers know it."""

    path: Path
    kid: str


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """Configuration of `dispatch.service.run`.

    Attributes:
        host: IP address to listen on.
        port: TCP port, 0 for a free one.
        tls: certificate and key; None only where TLS ends in front of this process.
        plain_port: second port for plans in plain HTTP (their signature protects them; enrolment and the admin API
            are refused there), 0 for a free one, None for no such port.
        unit: this unit; written into the rules.
        rules: what to answer; checked and brought into normal form here.
        plan_key: signs plans.
        plan_keys_more: plan keys of a rotation under way, the next or the last: told to all clients, and used for
            those that trust no other.
        geo: MaxMind databases that place client addresses (country, and autonomous system); needs `maxminddb`.
        token_key: signs device tokens; must not be the plan key, so that the two can be changed apart.
        admin_key: bearer key of the admin API, `limits.ADMIN_KEY_CHARS_MIN` or more visible ASCII characters.
        health: how endpoints are probed; None: they are not, and all count as well.
        enrol_burst: devices one address may enrol at once.
        enrol_rate_per_s: devices one address may enrol in the long run.
        doh: how DNS over HTTPS is answered, on the first port.

    Raises:
        ConfigError: one of these is not so; the message names it.
    """

    host: str
    port: int
    tls: TlsFiles | None
    plain_port: int | None = None
    unit: str
    rules: RuleSet
    plan_key: SigningKey | KeyFile
    token_key: SigningKey | KeyFile
    plan_keys_more: tuple[SigningKey | KeyFile, ...] = ()
    geo: tuple[Path, ...] = ()
    admin_key: Secret
    health: HealthConfig | None = None
    enrol_burst: int = limits.ENROL_BURST
    enrol_rate_per_s: float = limits.ENROL_RATE_PER_S
    doh: DohConfig = field(default_factory=DohConfig)

    def __post_init__(self) -> None:
        """Check what can be checked without the disk."""
        for name, port in (("port", self.port), ("plain_port", self.plain_port or 0)):
            if not 0 <= port < 65536:
                raise errors.ConfigError(f"dispatch: {name} {port} must be 0 to 65535")
        ids.check_label(self.unit, "dispatch: unit")
        if self.rules.unit not in ("", self.unit):
            raise errors.ConfigError(f"dispatch: the rules are for unit {self.rules.unit!r}, this is {self.unit!r}")
        object.__setattr__(self, "rules", check(msgspec.structs.replace(self.rules, unit=self.unit)))
        if len({self.plan_key.kid, *(key.kid for key in self.plan_keys_more)}) <= len(self.plan_keys_more):
            raise errors.ConfigError("dispatch: two plan keys have the same id")
        if self.token_key.kid in (key.kid for key in (self.plan_key, *self.plan_keys_more)):
            raise errors.ConfigError(f"dispatch: plan and token key have the same id {self.token_key.kid!r}")
        admin_key = self.admin_key.reveal()
        if len(admin_key) < limits.ADMIN_KEY_CHARS_MIN or not all("!" <= char <= "~" for char in admin_key):
            raise errors.ConfigError(
                f"dispatch: admin_key must be {limits.ADMIN_KEY_CHARS_MIN} or more visible ASCII characters"
            )
        if self.enrol_burst < 1 or not self.enrol_rate_per_s > 0:
            raise errors.ConfigError("dispatch: enrol_burst must be at least 1 and enrol_rate_per_s above 0")
