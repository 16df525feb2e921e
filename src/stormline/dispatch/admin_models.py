"""What the admin API takes and gives, for FastAPI's checks and the OpenAPI page."""

from pydantic import BaseModel, ConfigDict, Field

from stormline.core import limits_platform as limits
from stormline.dispatch.editor import Author
from stormline.dispatch.health import Verdict
from stormline.dispatch.rollout import Counts


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Order(_Order):
    """Who changes something, and why."""

    who: str = Field(min_length=1, max_length=limits.RULES_WHO_CHARS_MAX)
    why: str = Field(default="", max_length=limits.RULES_WHY_CHARS_MAX)

    @property
    def author(self) -> Author:
        """The same for the editor."""
        return Author(self.who, self.why)


class RollbackOrder(Order):
    """Go back to an earlier version's content."""

    version: int | None = Field(default=None, ge=1, description="absent: the newest that says something else")
    dry_run: bool = False


class StepOrder(Order):
    """Go on with the roll-out."""

    percent: float | None = Field(default=None, gt=0, le=100, description="absent: the next of its steps")


class DrainOrder(Order):
    """Endpoints to take out of service, or back into it."""

    host: str = Field(min_length=1, max_length=limits.HOST_CHARS_MAX, description="as the rules name it")
    port: int = Field(default=0, ge=0, le=65535, description="0: all ports")


class CallCounts(_Order):
    """Calls of one arm since the present step began, not since the last report."""

    calls: int = Field(ge=0, le=2**53 - 1)
    successes: int = Field(ge=0, le=2**53 - 1)

    @property
    def counts(self) -> Counts:
        """The same for the editor."""
        return Counts(self.calls, self.successes)


class OutcomesOrder(_Order):
    """How calls fare with the rules being rolled out, and without. The same report may come again."""

    version: int = Field(ge=1)
    new: CallCounts
    old: CallCounts


class RolloutAnswer(BaseModel):
    """A roll-out under way."""

    version: int = Field(description="what is rolled out")
    percent: float = Field(description="share of devices that get it now")
    steps: list[float]
    started_at: int = Field(description="seconds since 1970")
    stepped_at: int = Field(description="when the present step began; the counts are since then")
    new: CallCounts
    old: CallCounts
    looks: int = Field(description="how often the counts were judged")


class MaybeRollout(BaseModel):
    """The roll-out under way."""

    rollout: RolloutAnswer | None


class StateAnswer(BaseModel):
    """What holds after a change."""

    version: int = Field(description="version that holds for all")
    newest: int = Field(description="newest version given out; higher only while a roll-out is open")
    rollout: RolloutAnswer | None
    drains: list[str]


class DifferenceAnswer(BaseModel):
    """One value that differs, both as JSON text; null where it is not there."""

    path: str
    before: str | None
    after: str | None


class DiffAnswer(BaseModel):
    """What differs between two rule sets, versions aside."""

    count: int = Field(description="also those that are not listed")
    differences: list[DifferenceAnswer]


class ChangeAnswer(StateAnswer, DiffAnswer):
    """What a change did, or with `dry_run` would do: then the state is the one before."""

    dry_run: bool
    dead: list[str] = Field(description="changed hosts and apps without an endpoint that answers")
    served: bool = Field(description="whether this centre answers by it already")


class StatusAnswer(BaseModel):
    """Which rules this centre serves."""

    version: int
    newest: int
    stale: bool = Field(description="newer rules may exist: the engine is away, or they could not be taken")
    problem: str = Field(description="why, empty where all is well")
    rejects: dict[str, int] = Field(description="rules in the engine that were not served since the start, by reason")
    hosts: int
    apps: int
    rollout: RolloutAnswer | None
    drains: list[str]


class VersionAnswer(BaseModel):
    """A version that is kept."""

    version: int
    bytes: int
    digest: str = Field(description="equal for versions that say the same")


class RecordAnswer(BaseModel):
    """Who did what, when and why."""

    number: int
    at: int = Field(description="seconds since 1970")
    who: str
    what: str
    version: int
    detail: str
    why: str


class HistoryAnswer(BaseModel):
    """What was done, newest first, and what can be gone back to."""

    version: int
    newest: int
    versions: list[VersionAnswer]
    log: list[RecordAnswer]


class JudgementAnswer(BaseModel):
    """What the counts said."""

    halted: bool
    p_value: float | None = Field(description="null where there were too few calls, or too few new ones, to look")
    version: int = Field(description="version that holds for all")


class DrainAnswer(BaseModel):
    """Endpoints out of service by hand."""

    host: str
    port: int = Field(description="0: all ports")


class DrainsAnswer(BaseModel):
    """All of them."""

    drains: list[DrainAnswer]


class TargetAnswer(BaseModel):
    """An endpoint that is probed; hosts that share it share the verdict."""

    address: str
    carrier: str
    server_name: str = Field(description="name its certificate must carry; empty for that of the host")
    verdict: Verdict = Field(description="damped: it answers, and is not believed yet")
    since_s: float = Field(description="seconds for which it has been so")
    streak: int = Field(description="good probes in a row, failed ones below zero")
    falls: float = Field(description="falls remembered; they fade")
    reason: str = Field(description="why the latest probe failed")
    drained: bool


class HealthAnswer(BaseModel):
    """What the probes of this centre think."""

    revision: int = Field(description="grows whenever something else is handed out")
    unprobed: int = Field(description="endpoints that are not probed: too many, or of a kind that cannot be")
    drains: list[DrainAnswer]
    targets: list[TargetAnswer]


class ErrorBody(BaseModel):
    """Why not."""

    code: str
    message: str


class ErrorAnswer(BaseModel):
    """The form of every error."""

    error: ErrorBody
