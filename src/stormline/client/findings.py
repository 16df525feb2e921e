"""What a diagnosis has found so far: checks that are open, and those that are done."""

import asyncio
from typing import Any, Final

from stormline.core import limits_diagnosis as limits
from stormline.core.checks import CheckName, CheckState
from stormline.telemetry.diagnosis import Check

_ORDER: Final = {name: place for place, name in enumerate(CheckName)}


def shown(text: object) -> str:
    """Cut a text that comes from outside, on one line."""
    return " ".join(str(text).split())[: limits.DIAGNOSIS_TEXT_CHARS_MAX]


def reason_in_words(error: BaseException) -> str:
    """Say in words why something failed."""
    if isinstance(error, TimeoutError) and not error.args:
        return "nothing came back in time"
    return shown(getattr(error, "strerror", None) or str(error) or type(error).__name__)


class Open:
    """A check under way. Ended once; what comes later is passed over.

    Attributes:
        data: what is found, as it is found.
    """

    __slots__ = ("_began", "_findings", "data", "name")

    def __init__(self, findings: "Findings", name: CheckName, data: dict[str, Any], began: float) -> None:
        self._findings = findings
        self._began = began
        self.name = name
        self.data = data

    def end(self, state: CheckState, detail: str, **data: Any) -> None:
        """End it."""
        self.data.update(data)
        self._findings.take(self, state, detail, self._began)


class Findings:
    """Collects checks. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: dict[Open, None] = {}
        self._done: list[Check] = []

    def begin(self, name: CheckName, **data: Any) -> Open:
        """Begin a check."""
        one = Open(self, name, data, self._loop.time())
        self._open[one] = None
        return one

    def add(self, name: CheckName, state: CheckState, detail: str, **data: Any) -> None:
        """Add a check that takes no time."""
        self._done.append(Check(name=name, state=state, detail=shown(detail), data=data))

    def skip(self, name: CheckName, why: str, **data: Any) -> None:
        """Add a check that is not made."""
        self.add(name, CheckState.SKIPPED, why, **data)

    def take(self, one: Open, state: CheckState, detail: str, began: float) -> None:
        """Take the end of a check."""
        if one in self._open:
            del self._open[one]
            took_s = round(self._loop.time() - began, 4)
            self._done.append(Check(name=one.name, state=state, took_s=took_s, detail=shown(detail), data=one.data))

    def finish(self) -> list[Check]:
        """End what is still open, for there is no time left; give all checks in the order of their names."""
        for one in list(self._open):
            one.end(CheckState.UNKNOWN, "not done in time")
        return sorted(self._done, key=lambda check: _ORDER[check.name])

    @property
    def done(self) -> list[Check]:
        """Those that are done."""
        return self._done
