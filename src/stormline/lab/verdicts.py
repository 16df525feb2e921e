"""Does the client say rightly what is wrong with its network? Each cause is made, and its verdict is looked at.

A verdict is looked at each half second. From `GRACE_S` after a cause has come until it goes, high confidence in
anything else is wrong; outside of causes, high confidence in any fault is. What a run counts as is its last verdict
before the cause goes, or before the run ends.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stormline.core import errors
from stormline.lab import profiles, verdict_client
from stormline.lab.stage import Stage
from stormline.net.clock import SystemClock
from stormline.policy.verdict import Condition, Confidence

GRACE_S: Final = 8.0
"""After a cause has come or gone, until the verdict has to have followed."""
FAIR: Final = frozenset({Condition.OK, Condition.SLOW})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A profile and what is to be said of it."""

    profile: str
    right: frozenset[Condition]
    duration_s: float = 36.0
    airplane: bool = False
    """All radios are switched off while the cause lasts."""

    @property
    def name(self) -> str:
        """What the matrix calls it."""
        return "airplane" if self.airplane else self.profile


def _fault(profile: str, right: Condition, **more: Any) -> Case:
    return Case(profile=profile, right=frozenset({right}), **more)


CASES: Final = (
    Case(profile="wifi", right=FAIR, duration_s=24.0),
    Case(profile="4g", right=FAIR, duration_s=24.0),
    Case(profile="3g", right=FAIR, duration_s=24.0),
    Case(profile="edge", right=FAIR, duration_s=36.0),
    Case(profile="lossy4g", right=FAIR, duration_s=24.0),
    Case(profile="subway", right=FAIR),
    Case(profile="elevator", right=FAIR),
    _fault("offline", Condition.NO_NETWORK),
    _fault("offline", Condition.AIRPLANE, airplane=True),
    _fault("forbidden", Condition.PERMISSION),
    _fault("router-dead", Condition.ROUTER_FAULT, duration_s=80.0),
    _fault("portal", Condition.CAPTIVE_PORTAL, duration_s=60.0),
    _fault("dns-hijack", Condition.DNS_ONLY_BROKEN),
    _fault("dns-dead", Condition.DNS_ONLY_BROKEN),
    Case(profile="dns-empty", right=FAIR | {Condition.DNS_ONLY_BROKEN}),
    _fault("fake-wifi", Condition.DEAD_WIFI, duration_s=64.0),
    _fault("server-down", Condition.SERVER_FAULT, duration_s=60.0),
)
"""What is looked at; healthy and merely slow networks too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look: when (seconds since the run's beginning), and what was said."""

    at_s: float
    condition: Condition
    confidence: Confidence
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run.

    Attributes:
        case: what was made.
        seed: of its chance.
        said: the verdict it counts as.
        confidence: how sure that was.
        why: what it was said from.
        right: it is one of those that are.
        wrong_high: looks at which something wrong was said with high confidence.
        first_right_s: from the cause to the first right verdict; None: none, or there is no cause.
    """

    case: Case
    seed: int
    said: Condition
    confidence: Confidence
    why: str
    right: bool
    wrong_high: tuple[Seen, ...]
    first_right_s: float | None

    def data(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "case": self.case.name,
            "seed": self.seed,
            "said": self.said,
            "confidence": self.confidence,
            "why": self.why,
            "right": self.right,
            "first_right_s": self.first_right_s,
            "wrong_high": [
                {"at_s": round(each.at_s, 1), "condition": each.condition, "why": each.why} for each in self.wrong_high
            ],
        }


def judge(case: Case, seed: int, looks: Sequence[Seen], cause: tuple[float, float] | None) -> Outcome:
    """Say what a run's looks mean.

    Args:
        case: what was made.
        seed: of its chance.
        looks: in order of time; at least one.
        cause: from when to when it was there; None: the whole run.

    Raises:
        PlatformError: no look falls into the cause: the run says nothing.
    """
    begin, end = (0.0, looks[-1].at_s) if cause is None else cause
    inside = [each for each in looks if begin + (GRACE_S if begin else 0.0) <= each.at_s <= end]
    outside = [each for each in looks if each.at_s < begin or each.at_s > end + GRACE_S]
    if not inside:
        raise errors.PlatformError(f"verdicts: no look at {case.name} while its cause was there")
    sure = Confidence.HIGH
    wrong = [each for each in inside if each.confidence is sure and each.condition not in case.right]
    wrong += [each for each in outside if each.confidence is sure and each.condition not in FAIR]
    caused = [each for each in looks if begin <= each.at_s <= end and each.condition in case.right]
    last = inside[-1]
    return Outcome(
        case=case,
        seed=seed,
        said=last.condition,
        confidence=last.confidence,
        why=last.why,
        right=last.condition in case.right,
        wrong_high=tuple(wrong),
        first_right_s=None if not caused or case.right & FAIR else round(caused[0].at_s - begin, 1),
    )


def run(case: Case, seed: int, folder: Path, *, watch: str = "auto") -> Outcome:
    """Make a case and look at it.

    Args:
        case: what to make.
        seed: of its chance.
        folder: an empty folder of its own.
        watch: how the client watches its network, as `Config.network_watch` has it.

    Raises:
        PlatformError: the laboratory cannot work here, or the client ended.
    """
    clock = SystemClock()
    profile = profiles.get(case.profile)
    with Stage(profile, seed, folder=folder / "keys", duration_s=case.duration_s) as stage:
        radios = folder / "root/sys/class/rfkill/rfkill0"
        radios.mkdir(parents=True)
        for name, text in (("type", "wlan"), ("soft", "0"), ("hard", "0")):
            (radios / name).write_text(text + "\n")
        told = {
            "base_url": stage.base_url,
            "ca_file": str(stage.ca_file),
            "check_url": stage.check_url,
            "watch": watch,
            "root": str(folder / "root") if watch == "auto" else None,
        }
        words = [sys.executable, "-P", str(Path(verdict_client.__file__)), json.dumps(told)]
        events = [each for each in stage.events if each.at_s > 0 or each.until_s is not None]
        cause = None
        if events and not case.right & FAIR:
            cause = (events[0].at_s, events[-1].until_s or case.duration_s)
        looks: list[Seen] = []
        with contextlib.ExitStack() as stack:
            client = stage.popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
            stack.enter_context(client)
            stack.callback(client.kill)
            if client.stdout is None or not client.stdout.readline():
                raise errors.PlatformError(f"verdicts: the client of {case.name} does not start")
            begin_s = stage.begin()
            if case.airplane and cause is not None:
                timers = [
                    threading.Timer(at_s, (radios / "soft").write_text, (text,))
                    for at_s, text in ((cause[0], "1\n"), (cause[1], "0\n"))
                ]
                for timer in timers:
                    timer.daemon = True
                    timer.start()
                    stack.callback(timer.cancel)
            for line in client.stdout:
                at_s = clock.monotonic() - begin_s
                if at_s > case.duration_s:
                    break
                said = json.loads(line)
                looks.append(
                    Seen(
                        at_s=at_s,
                        condition=Condition(said["condition"]),
                        confidence=Confidence(said["confidence"]),
                        why=said["why"],
                    )
                )
            else:
                raise errors.PlatformError(f"verdicts: the client ended in {case.name}")
        stage.finish()
    return judge(case, seed, looks, cause)


def run_all(
    cases: Sequence[Case],
    seeds: Sequence[int],
    *,
    folder: Path,
    jobs: int,
    watch: str = "auto",
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Make every case with every seed, some side by side.

    Raises:
        PlatformError: see `run`.
    """

    def one(pair: tuple[Case, int]) -> Outcome:
        case, seed = pair
        own = folder / f"{case.name}-{seed}"
        own.mkdir(parents=True)
        outcome = run(case, seed, own, watch=watch)
        on_outcome(outcome)
        return outcome

    pairs = [(case, seed) for seed in seeds for case in cases]
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        return list(pool.map(one, pairs))


def matrix(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Count verdicts by case; `condition` for those of high confidence, `condition?` for the others."""
    found: dict[str, dict[str, int]] = {}
    for each in outcomes:
        row = found.setdefault(each.case.name, {})
        label = each.said.value + ("" if each.confidence is Confidence.HIGH else "?")
        row[label] = row.get(label, 0) + 1
    return found
