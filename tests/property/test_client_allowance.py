"""Whose word counts for one call: its own, then the app's rule, then the plan's, then the config's; switches always."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.client import allowance
from stormline.client.allowance import Allowance
from stormline.client.commands import Commands
from stormline.client.config import Config
from stormline.client.rules import BusinessRule, ClearHttp
from stormline.core import limits
from stormline.outbound.messages import HttpRequest
from stormline.policy import means, presets
from stormline.policy.admission import NORMAL, URGENCIES
from stormline.policy.means import Means
from stormline.policy.shape import Pattern, RequestShape
from stormline.wire.httpsig import VerifyKey
from stormline.wire.plan import HostPlan, PathPlan, Plan, Policy

HOST = "a.test"
REQUEST = HttpRequest("GET", "https", HOST, 443, b"/x", (), None)
CLEAR = ClearHttp(keys={"k": VerifyKey("hmac-sha256", b"0123456789abcdef")})
seconds = st.floats(0.1, 600.0)
names = st.sampled_from(["", *presets.PRESETS, "swift"])
tries = st.dictionaries(st.sampled_from([*presets.TRIES, "pigeon"]), st.integers(0, 100), max_size=4)
policies = st.builds(
    Policy,
    preset=names,
    order=st.lists(st.sampled_from([*(each.value for each in Means), "pigeon"]), max_size=4).map(tuple),
    tries=tries,
    connect_timeout_s=st.none() | seconds,
    read_timeout_s=st.none() | seconds,
    deadline_s=st.none() | seconds,
    clear=st.none() | st.booleans(),
    sample=st.none() | st.floats(0, 1),
    urgency=st.none() | st.integers(0, 7),
    disabled=st.lists(st.sampled_from([*means.SWITCHES, "h2", "sl-tls", "warp"]), max_size=3).map(tuple),
)
rules = st.builds(
    BusinessRule,
    plan=st.none() | st.sampled_from(["key", "ordinary"]),
    tries=st.just({}) | st.just({"direct": 2}),
    clear=st.none() | st.just(CLEAR),
    deadline_s=st.none() | seconds,
    priority=st.none() | st.sampled_from(["background", 2]),
)
shapes = st.sampled_from([Pattern.CALL, Pattern.DOWNLOAD, Pattern.LONG_POLL, Pattern.UPLOAD, Pattern.STREAM])


@st.composite
def extensions(draw):
    made = {}
    for name, values in (
        ("stormline.deadline_s", seconds),
        ("stormline.plan", st.sampled_from(sorted(presets.PRESETS))),
        ("stormline.priority", st.integers(0, 7)),
        ("timeout", st.fixed_dictionaries({}, optional={"read": st.none() | seconds, "connect": st.none() | seconds})),
    ):
        if draw(st.booleans()):
            made[name] = draw(values)
    return made


class Trace:
    """A call's trace, as far as it is asked here."""

    def __init__(self):
        self.record = SimpleNamespace(business="")
        self.sink = None
        self.story = []
        self.note = self.story.append

    def divert(self, sink):
        self.sink = sink


def limits_of(policy, extensions, rule, pattern=Pattern.CALL, *, trace=None, chance=0.5, config=None, **host):
    made = Allowance(Config() if config is None else config, SimpleNamespace(random=lambda: chance))
    plan = Plan(app="demo", version=1, issued_at=0, expires_at=1, hosts={HOST: HostPlan(policy=policy, **host)})
    made.scheduling, made.commands = SimpleNamespace(plan=plan), Commands()
    shape = RequestShape(host=HOST, path_class="GET /x", pattern=pattern)
    return made.of(REQUEST, shape, extensions, rule, trace or Trace(), str)


def first(*said):
    return next(each for each in said if each is not None)


@given(policies, extensions(), st.none() | rules)
def test_first_who_says_something_has_the_word_of_a_call(policy, told, rule):
    found = limits_of(policy, told, rule)
    timeouts, config = told.get("timeout", {}), Config()
    unsaid = (allowance.HTTPX_TIMEOUT_S, config.read_timeout_s)
    own_read = "read" in timeouts and timeouts["read"] not in unsaid
    own_connect = "connect" in timeouts and timeouts["connect"] not in (*unsaid, config.connect_timeout_s)
    if own_read:
        assert found.read_timeout_s == timeouts["read"]
    else:
        assert found.read_timeout_s == first(policy.read_timeout_s, timeouts.get("read"), config.read_timeout_s)
    if own_connect:
        assert found.connect_timeout_s == timeouts["connect"]
    else:
        usual = first(timeouts.get("connect"), config.connect_timeout_s)
        assert found.connect_timeout_s == first(policy.connect_timeout_s, usual)
    said_s = told.get("stormline.deadline_s") or (rule and rule.deadline_s)
    if said_s:
        assert found.deadline_s == said_s
    elif policy.deadline_s is not None and not own_read:
        assert found.deadline_s == policy.deadline_s
    elif policy.deadline_s is not None and timeouts["read"] is not None:
        assert found.deadline_s == max(policy.deadline_s, timeouts["read"])
    else:
        assert found.deadline_s >= limits.CALL_DEADLINE_S


@given(policies, extensions(), st.none() | rules)
def test_preset_and_urgency_are_the_app_s_where_it_names_them_else_the_plan_s(policy, told, rule):
    found = limits_of(policy, told, rule)
    app = told.get("stormline.plan") or (rule and rule.plan)
    known = policy.preset in presets.PRESETS
    name = app or (policy.preset if known else "ordinary")
    assert found.preset.name == name
    if told.get("stormline.plan"):
        assert found.preset is presets.PRESETS[name]
    elif rule is not None and rule.plan:
        assert found.preset == rule.preset
    elif rule is not None and "direct" in rule.tries:
        assert found.preset.direct == 2
    elif "direct" in policy.tries:
        assert found.preset.direct == min(policy.tries["direct"], 6)
    key = URGENCIES["key"]
    own = first(told.get("stormline.priority"), rule and rule.priority, key if app == "key" else None, -1)
    if own != -1:
        assert found.urgency == (URGENCIES[own] if isinstance(own, str) else own)
    elif app:
        assert found.urgency == NORMAL
    else:
        assert found.urgency == first(policy.urgency, key if name == "key" else None, NORMAL)


@given(policies, extensions(), st.none() | rules)
def test_what_the_plan_switches_off_is_off_whoever_says_what(policy, told, rule):
    found = limits_of(policy, told, rule)
    assert found.off >= set(policy.disabled) - {"warp"}
    if policy.clear is False:
        assert Means.CLEAR in found.off
    if rule is None or rule.clear is None:
        assert found.clear is None, "a plan gave what only the app may"
    assert not found.preset.tls_only or found.preset.clear == 0
    assert set(found.order) <= set(Means)


@given(policies, st.none() | rules, shapes)
def test_plan_s_times_end_no_idle_stream_no_held_poll_and_no_upload(policy, rule, pattern):
    found = limits_of(policy, {}, rule, pattern)
    if pattern is Pattern.STREAM:
        assert found.read_timeout_s is None
        assert found.stream_timeout_s is None
    if pattern is Pattern.LONG_POLL:
        assert found.read_timeout_s > limits.LONG_POLL_HOLD_S
        assert (rule and rule.deadline_s) or found.deadline_s > limits.LONG_POLL_HOLD_S
    if pattern in (Pattern.UPLOAD, Pattern.STREAM) and not (rule and rule.deadline_s):
        assert found.deadline_s == limits.CALL_DEADLINE_MAX_S


@given(st.none() | st.floats(0, 1), st.floats(0, 1, exclude_max=True))
def test_call_beyond_the_plan_s_share_is_not_reported(share, chance):
    trace = Trace()
    limits_of(Policy(sample=share), {}, None, trace=trace, chance=chance)
    assert (trace.sink is not None) is (share is not None and chance >= share)


@pytest.mark.parametrize("policy", [None, Policy()])
def test_plan_that_says_nothing_leaves_everything_as_it_is_without_one(policy):
    assert limits_of(policy, {}, None).command is None
    assert limits_of(policy, {}, None) == limits_of(policy, {}, None, paths=(PathPlan(path="/y"),))
    assert limits_of(policy, {}, None, config=Config(deadline_s=3.0)).deadline_s == 3.0


def test_host_that_dispatch_was_not_asked_of_gets_its_word_when_it_comes():
    made = Allowance(Config(), SimpleNamespace(random=lambda: 0.5))
    made.scheduling, made.commands = SimpleNamespace(plan=None), Commands()
    found = made.of(REQUEST, RequestShape(host=HOST, path_class="GET /x"), {}, None, Trace(), str)
    assert found.told(HostPlan(deadline_s=2.0)).deadline_s == 2.0
    assert found.told(HostPlan()).told is None
