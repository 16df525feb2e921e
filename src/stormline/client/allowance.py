"""What one call may take and do: who says it, and whose word counts.

For each thing the first of these that says something:

1. the call itself: its extensions, and a time-out that is not the default of httpx or of the config;
2. the first rule of the app that fits it (`rules`);
3. the plan of dispatch (`commands`);
4. the config, and what stands here.

What a plan switches off (`disabled`, `clear: false`) is off, whoever says what. A plan is asked for its word when the
call begins; one that changes later holds for the next call.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from stormline.client import patterns
from stormline.client.config import Config
from stormline.client.lanes import CallLimits
from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.clock import Rng
from stormline.outbound.messages import HttpRequest
from stormline.policy import presets
from stormline.policy.presets import Preset
from stormline.policy.shape import Pattern, RequestShape
from stormline.telemetry.timeline import CallRecord

if TYPE_CHECKING:
    from stormline.client.commands import Command, Commands
    from stormline.client.rules import BusinessRule
    from stormline.client.scheduling import Scheduling
    from stormline.wire.plan import HostPlan, Plan

HTTPX_TIMEOUT_S: Final = 5.0
"""What httpx and httpx2 give every request whose caller says nothing of time."""
_TIME_EXTENSIONS: Final = frozenset(
    {"stormline.deadline_s", "stormline.plan", "stormline.priority", "stormline.retries", "stormline.wait_for_network"}
)
_NO_LIMITS: Final = CallLimits(0.0, None, None, None, False)
"""Stands where no call has been yet."""


class Allowance:
    """Gives each call of one client its limits.

    Args:
        config: the client's settings.
        rng: draws which calls are recorded.

    Attributes:
        scheduling: holds the plans of a platform; None: there is none, and nothing is commanded.
        commands: reads them.
    """

    def __init__(self, config: Config, rng: Rng) -> None:
        self._config = config
        self._rng = rng
        self._read: Plan | None = None
        self._usual: tuple[tuple[float | None, float | None, Command | None] | None, CallLimits] = (None, _NO_LIMITS)
        self.scheduling: Scheduling | None = None
        self.commands: Commands | None = None

    def of(
        self,
        request: HttpRequest,
        shape: RequestShape,
        extensions: Mapping[str, Any],
        rule: "BusinessRule | None",
        trace: CallTrace,
        kept: Callable[[CallRecord], None],
    ) -> CallLimits:
        """Give a call's limits.

        Args:
            request: as it is sent.
            shape: what it looks like.
            extensions: of the request; see `Runtime.execute`.
            rule: that fits it.
            trace: follows it.
            kept: takes its record where that is not to be sent.

        Raises:
            LocalProtocolError: an extension has a wrong type or value.
        """
        if self.scheduling is None or self.commands is None:
            return self._limits(shape, extensions, rule, None)
        plan = self.scheduling.plan
        if plan is not None and plan is not self._read:
            self._read = plan
            self.commands.read(plan)
        host_plan = None if plan is None or plan.dns_only else plan.hosts.get(request.host)
        if host_plan is not None:
            return self._commanded(request, shape, extensions, rule, trace, kept, host_plan)
        found = self._limits(shape, extensions, rule, None)
        if plan is not None and (plan.dns_only or request.host in plan.unknown):
            return found
        return found._replace(told=functools.partial(self._commanded, request, shape, extensions, rule, trace, kept))

    def _commanded(
        self,
        request: HttpRequest,
        shape: RequestShape,
        extensions: Mapping[str, Any],
        rule: "BusinessRule | None",
        trace: CallTrace,
        kept: Callable[[CallRecord], None],
        host_plan: "HostPlan",
    ) -> CallLimits:
        command = None if self.commands is None else self.commands.find(host_plan, request, trace.record.business)
        if command is not None:
            trace.note(command.words)
            share = command.policy.sample
            if share is not None and share < 1.0 and self._rng.random() >= share:
                trace.divert(kept)
        return self._limits(shape, extensions, rule, command)

    def _limits(
        self,
        shape: RequestShape,
        extensions: Mapping[str, Any],
        rule: "BusinessRule | None",
        command: "Command | None",
    ) -> CallLimits:
        """Give the limits where it is known what is commanded.

        httpx sends its default read timeout of five seconds with each request that says nothing: that, or our own
        default, is no wish of the caller's, and must not end an idle stream or a poll that the server may hold.
        """
        config = self._config
        timeouts = extensions.get("timeout") or {}
        read_s = timeouts.get("read", config.read_timeout_s)
        connect_s = timeouts.get("connect", config.connect_timeout_s)
        plain = None
        if rule is None and shape.pattern is Pattern.CALL and _TIME_EXTENSIONS.isdisjoint(extensions):
            plain = (read_s, connect_s, command)
            if plain == self._usual[0]:  # as the one before, as almost always
                return self._usual[1]
        asked = read_s not in (HTTPX_TIMEOUT_S, config.read_timeout_s)
        if command is not None:
            policy = command.policy
            if not asked and policy.read_timeout_s is not None:
                read_s = policy.read_timeout_s
            if policy.connect_timeout_s is not None and connect_s in (HTTPX_TIMEOUT_S, config.connect_timeout_s):
                connect_s = policy.connect_timeout_s
        held_s = 0.0
        if shape.pattern is Pattern.LONG_POLL:
            held_s = limits.LONG_POLL_HOLD_S if shape.hold_s is None else shape.hold_s
        deadline_s = _told_deadline(extensions) or (rule and rule.deadline_s)
        if deadline_s is None and command is not None:
            deadline_s = _commanded_deadline(command, shape.pattern, read_s if asked else 0.0, held_s)
        deadline_s = deadline_s or config.deadline_s
        if deadline_s is None:
            deadline_s = max(limits.CALL_DEADLINE_S, limits.CALL_DEADLINE_MAX_S if read_s is None else read_s) + held_s
            if shape.pattern in (Pattern.UPLOAD, Pattern.STREAM):
                deadline_s = limits.CALL_DEADLINE_MAX_S
        if read_s is not None and not asked:
            read_s = None if shape.pattern is Pattern.STREAM else read_s + held_s
        resends = extensions.get("stormline.retries", True)
        if not isinstance(resends, bool):
            raise errors.LocalProtocolError(f"stormline.retries={resends!r}: expected True or False")
        found = CallLimits(
            deadline_s=min(deadline_s, limits.CALL_DEADLINE_MAX_S),
            read_timeout_s=read_s,
            connect_timeout_s=connect_s,
            stream_timeout_s=read_s if asked else None,
            resends=resends,
            preset=_preset(extensions, rule, command),
            clear=None if rule is None else rule.clear,
            urgency=_urgency(extensions, rule, command),
            wait_network_s=patterns.wait_for_network_s(extensions),
            ipv4_first=rule is not None and rule.ipv4_first,
            command=command,
        )
        if plain is not None:
            self._usual = (plain, found)
        return found


def _told_deadline(extensions: Mapping[str, Any]) -> float | None:
    deadline_s: float | None = extensions.get("stormline.deadline_s")
    if deadline_s is not None and not 0 < deadline_s <= limits.CALL_DEADLINE_MAX_S:
        raise errors.LocalProtocolError(
            f"stormline.deadline_s={deadline_s!r}: expected seconds in (0, {limits.CALL_DEADLINE_MAX_S:.0f}]"
        )
    return deadline_s


def _commanded_deadline(command: "Command", pattern: Pattern, read_s: float | None, held_s: float) -> float | None:
    """Give a plan's deadline, None where it says none that holds for such a request.

    It is written for calls: a large upload and an event stream are bounded by silence alone, and whoever bears a longer
    silence outright has that time.
    """
    told_s = command.policy.deadline_s
    if told_s is None or pattern in (Pattern.UPLOAD, Pattern.STREAM):
        return None
    return limits.CALL_DEADLINE_MAX_S if read_s is None else max(told_s + held_s, read_s)


def _preset(extensions: Mapping[str, Any], rule: "BusinessRule | None", command: "Command | None") -> Preset:
    name = extensions.get("stormline.plan")
    if name is not None:
        try:
            return presets.preset(name)
        except errors.ConfigError as error:
            raise errors.LocalProtocolError(f"stormline.{error}") from None
    told = None if command is None else command.preset
    if rule is None:
        return presets.ORDINARY if told is None else told
    return rule.preset if told is None else rule.over(told)


def _urgency(extensions: Mapping[str, Any], rule: "BusinessRule | None", command: "Command | None") -> int:
    """Give the urgency of a request. Who names the preset `key` has said that it goes first."""
    told = extensions.get("stormline.priority")
    if told is None and rule is not None:
        told = rule.priority
    named = extensions.get("stormline.plan")
    if told is None and named is None and rule is not None and rule.plan is not None:
        named = rule.preset.name
    if told is None and named == presets.KEY.name:
        told = "key"
    if told is None and named is None and command is not None:
        told = command.policy.urgency
        if told is None and command.preset is not None and command.preset.name == presets.KEY.name:
            told = "key"
    return patterns.urgency(told)
