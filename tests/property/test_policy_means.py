"""The ladder keeps its rules whatever happens: two phases, one more try for a stale connection, bounded tries."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.core.values import Address
from stormline.policy.means import Means, Outcome, Step, plan

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
