"""Whatever happens on the ways out: a plan names each once, and there is always one where the system has one."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.policy.paths import PathPolicy, Way

NAMES = ("a", "b", "c", "d", "e", "f")
names = st.sampled_from(NAMES)
ways = st.lists(st.builds(Way, names, st.booleans()), max_size=6, unique_by=lambda way: way.name)
events = st.lists(
    st.one_of(
        st.tuples(st.just("routes"), ways),
        st.tuples(st.just("beside"), names, st.floats(0.0, 20.0)),
        st.tuples(st.just("heard"), names),
        st.tuples(st.just("answered"), names),
        st.tuples(st.just("probe")),
        st.tuples(st.just("probed"), names, st.booleans()),
        st.tuples(st.just("carried"), names, st.integers(0, 2 * limits.PATH_METERED_BYTES)),
    ),
    max_size=60,
)


@given(events, st.lists(st.floats(0.0, 60.0), min_size=60, max_size=60))
def test_plan_names_what_there_is_once_and_never_nothing(events, steps):
    paths, now, known = PathPolicy(), 0.0, ()
    for event, step in zip(events, steps, strict=False):
        now += step
        match event:
            case "routes", found:
                paths.routes(found)
                known = [way.name for way in found[: limits.PATHS_MAX]]
            case "beside", name, dark_s:
                other = paths.beside(name, dark_s=dark_s, now=now)
                assert other is None or (other in known and other != name)
            case "heard", name:
                paths.heard(name, now)
                assert known[:1] != [name] or paths.plan(now)[0] == name
            case "answered", name:
                dead = paths.answered(name, now)
                if dead is not None:
                    plan = paths.plan(now)
                    assert {dead, name} <= set(known)
                    assert plan[0] != dead or plan == (dead,)  # the bytes of all others are used up
            case ("probe",):
                asked = paths.probe(now)
                assert asked is None or (asked in known and paths.probe(now) != asked)
            case "probed", name, alive:
                paths.probed(name, now, alive=alive)
            case "carried", name, size:
                paths.carried(name, size, now)
        plan = paths.plan(now)
        assert len(set(plan)) == len(plan)
        assert set(plan) <= set(known)
        assert bool(plan) is bool(known)
        assert not known or known[0] in plan
        due = paths.next_timer()
        assert due is None or due <= now + limits.PATH_PROBE_S_MAX
