"""The ladder keeps its rules whatever happens: two phases, one more try for a stale connection, bounded tries."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.core.values import Address
from stormline.policy import means
from stormline.policy.means import Means, Outcome, Step, plan
from stormline.policy.presets import Preset
from stormline.policy.resend import SAFE_METHODS

ORIGINS = tuple(Step(Means.IP_DIRECT, (Address(f"192.0.2.{n}", 443),)) for n in range(1, 4))

outcomes = st.builds(
    Outcome,
    maybe_delivered=st.booleans(),
    reused=st.booleans(),
    body_spent=st.booleans(),
    untouched=st.booleans(),
    final=st.booleans(),
)


@given(
    method=st.sampled_from(["GET", "POST", "DELETE"]),
    has_key=st.booleans(),
    long=st.booleans(),
    long_last=st.booleans(),
    origins=st.integers(0, 8),
    disabled=st.sets(st.sampled_from(list(Means))),
    path=st.lists(outcomes, max_size=20),
)
def test_ladder_keeps_its_rules_whatever_happens(method, has_key, long, long_last, origins, disabled, path):
    made = plan(
        long=long, long_last=long_last, origins=ORIGINS[:3] * origins, disabled=disabled, method=method, has_key=has_key
    )
    steps = [made.next()]
    write = method != "GET" and not has_key
    for outcome in path:
        before, step = steps[-1], made.next(outcome)
        steps.append(step)
        if before is None:
            assert step is None
        if (outcome.maybe_delivered and write) or outcome.body_spent:
            assert step is None
        if step is not None and step.fresh:
            assert outcome.reused or outcome.untouched
            assert (step.means, step.addresses) == (before.means, before.addresses)
            assert not before.fresh or outcome.untouched
    given_steps = [step for step in steps if step is not None]
    assert made.tries <= limits.ATTEMPTS_MAX
    assert len(given_steps) <= limits.ATTEMPTS_MAX + sum(outcome.untouched or outcome.reused for outcome in path)
    assert not {step.means for step in given_steps} & disabled
    if not long:
        assert Means.LONG not in {step.means for step in given_steps}


BACKUPS = tuple(Step(Means.IP_DIRECT, (Address(f"198.51.100.{n}", 443),), backup=True) for n in range(1, 4))
CLEAR = Step(Means.CLEAR)


@st.composite
def presets(draw):
    tls_only = draw(st.booleans())
    return Preset(
        name="drawn",
        long=draw(st.integers(0, 1)),
        ip_direct=draw(st.none() | st.integers(0, 8)),
        direct=draw(st.none() | st.integers(0, 6)),
        clear=0 if tls_only else draw(st.integers(0, 3)),
        original=draw(st.integers(0, 3)),
        attempts=draw(st.integers(1, 6)),
        tls_only=tls_only,
    )


@given(
    preset=presets(),
    method=st.sampled_from(["GET", "HEAD", "POST", "DELETE"]),
    has_key=st.booleans(),
    long=st.booleans(),
    long_last=st.booleans(),
    origins=st.integers(0, 3),
    backups=st.integers(0, 3),
    clear=st.booleans(),
    disabled=st.sets(st.sampled_from(list(Means))),
    path=st.lists(st.none() | outcomes, max_size=20),
)
def test_plan_keeps_to_its_preset_whatever_happens(
    preset, method, has_key, long, long_last, origins, backups, clear, disabled, path
):
    made = plan(
        long=long,
        long_last=long_last,
        origins=ORIGINS[:origins],
        backup=BACKUPS[:backups],
        clear=CLEAR if clear else None,
        disabled=disabled,
        method=method,
        has_key=has_key,
        preset=preset,
    )
    steps = [made.next()]
    counted = [steps[0]]
    write = method not in SAFE_METHODS and not has_key
    over = False
    for outcome in path:
        step = made.beside() if outcome is None else made.next(outcome)
        steps.append(step)
        if outcome is None:
            assert step is None or not write, "a write has nothing beside it"
        if over:
            assert step is None
        if outcome is not None and outcome.maybe_delivered and write:
            assert step is None, "a write that may have left goes nowhere else"
            over = True
        elif step is not None and (outcome is None or not (outcome.untouched or (outcome.reused and step.fresh))):
            counted.append(step)
    tried = [step for step in steps if step is not None]
    counted = [step for step in counted if step is not None]
    assert made.tries <= preset.attempts
    assert not {step.means for step in tried} & disabled
    by = {means: sum(step.means is means for step in counted) for means in Means}
    assert by[Means.LONG] <= preset.long
    assert by[Means.CLEAR] <= preset.clear
    assert by[Means.ORIGINAL] <= preset.original
    if preset.direct is not None:
        assert by[Means.DIRECT] <= preset.direct
    if preset.ip_direct is not None:
        assert by[Means.IP_DIRECT] <= preset.ip_direct
    if method not in SAFE_METHODS or preset.tls_only or not clear:
        assert Means.CLEAR not in {step.means for step in tried}


@given(
    st.sets(st.sampled_from(sorted(means.SWITCHES))), st.sampled_from(["GET", "POST", "PUT"]), st.booleans(),
    st.booleans(), st.lists(st.booleans(), max_size=8),
)  # fmt: skip
def test_origin_that_is_known_by_name_alone_gets_the_steps_of_a_plan(off, method, has_key, resends, ends):
    common = {"disabled": frozenset(off), "method": method, "has_key": has_key, "resends": resends}
    ladders = means.by_name(**common), means.plan(long=False, origins=(), **common)
    outcome = None
    for maybe in ends:
        one, other = (ladder.next(outcome) for ladder in ladders)
        assert one == other
        outcome = means.Outcome(maybe_delivered=maybe)


@given(
    preset=presets(),
    long=st.booleans(),
    long_last=st.booleans(),
    origins=st.integers(0, 3),
    backups=st.integers(0, 3),
    order=st.lists(st.sampled_from(list(Means)), max_size=6).map(tuple),
)
def test_order_of_a_plan_moves_steps_and_adds_none(preset, long, long_last, origins, backups, order):
    def steps(order):
        made = plan(
            long=long, long_last=long_last, origins=ORIGINS[:origins], backup=BACKUPS[:backups], clear=CLEAR,
            disabled=(), method="GET", has_key=False, preset=preset, order=order,
        )  # fmt: skip
        found = [made.next()]
        while found[-1] is not None:
            found.append(made.next(Outcome(maybe_delivered=False)))
        return found[:-1]

    usual, ordered = steps(()), steps(order)
    assert len(usual) == len(ordered)
    if len(usual) < preset.attempts:  # else what is last is cut off
        assert sorted(map(repr, usual)) == sorted(map(repr, ordered))
    last = (Means.CLEAR, Means.ORIGINAL)
    first = list(dict.fromkeys(step.means for step in ordered if step.means not in last))
    assert [step.means in last for step in ordered] == sorted(step.means in last for step in ordered)
    if long_last and Means.LONG in first:
        assert first[-1] is Means.LONG
        first.pop()
    named = [each for each in dict.fromkeys(order) if each in first]
    assert first[: len(named)] == named
