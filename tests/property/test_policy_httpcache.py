"""What a shared cache may keep and give again: the cases of RFC 9111, and any answer at all."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_api as limits
from stormline.policy import httpcache
from stormline.policy.httpcache import Use

WALL = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT
DATE = ("date", "Sun, 06 Nov 1994 08:49:37 GMT")
TAG = ("etag", '"v1"')


def keep(control, *more, request=(), status=200, now=100.0, asked_at=100.0, wall_s=WALL):
    response = (("cache-control", control), *more)
    return httpcache.keep(tuple(request), status, response, asked_at=asked_at, now=now, wall_s=wall_s)


class TestWhatIsKept:
    @pytest.mark.parametrize(
        "control",
        [
            "",
            "max-age=60",  # nobody said that all may have it
            "must-revalidate, max-age=60",
            "private, max-age=60",
            "public, private, max-age=60",
            "public, no-store, max-age=60",
            "public",  # for how long?
            "public, max-age=0",
            "public, max-age=soon",
            "s-maxage=0, max-age=60",
            "PUBLIC, No-Store",
            'public, private="x", max-age=60',
        ],
    )
    def test_answer_not_for_all_or_for_no_time_is_not_kept(self, control):
        assert keep(control) is None

    @pytest.mark.parametrize("status", [206, 302, 307, 400, 401, 403, 500, 502, 503, 504, 100, 304])
    def test_status_that_is_not_kept(self, status):
        assert keep("public, max-age=60", status=status) is None

    @pytest.mark.parametrize("status", [200, 203, 204, 301, 308, 404, 410])
    def test_status_that_is_kept(self, status):
        assert keep("public, max-age=60", status=status).status == status

    def test_cookies_and_vary_by_all_are_not_kept(self):
        assert keep("public, max-age=60", ("set-cookie", "a=b")) is None
        assert keep("public, max-age=60", ("vary", "accept, *")) is None

    def test_request_that_says_no_store_is_not_kept(self):
        assert keep("public, max-age=60", request=[("cache-control", "no-store")]) is None

    def test_no_cache_is_kept_only_with_a_validator_and_always_asked_for(self):
        assert keep("public, no-cache, max-age=60") is None
        kept = keep("public, no-cache, max-age=60, stale-if-error=60", TAG)
        assert httpcache.use(kept, (), 100.0) == Use(False, False)

    @pytest.mark.parametrize("name", ["range", "if-match", "if-unmodified-since", "if-range"])
    def test_parts_and_preconditions_pass_by(self, name):
        assert httpcache.may_use("GET", ())
        assert not httpcache.may_use("GET", ((name, "x"),))
        assert not httpcache.may_use("POST", ())


class TestHowLong:
    @pytest.mark.parametrize(
        ("control", "more", "until"),
        [
            ("public, max-age=60", (), 60),
            ("public, max-age=60, s-maxage=30", (), 30),
            ("s-maxage=90, max-age=60", (), 90),
            ('public, max-age="60"', (), 60),
            ("public, max-age=60, max-age=90", (), 60),
            ("public", (DATE, ("expires", "Sun, 06 Nov 1994 08:50:37 GMT")), 60),
            ("public, max-age=10", (DATE, ("expires", "Sun, 06 Nov 1994 08:50:37 GMT")), 10),
            ("public, max-age=60", (("age", "20"),), 40),
            ("public, max-age=60", (("date", "Sun, 06 Nov 1994 08:49:07 GMT"),), 30),
            ("public, max-age=60", (("date", "Sun, 06 Nov 1994 08:49:07 GMT"), ("age", "45")), 15),
        ],
    )
    def test_freshness(self, control, more, until):
        kept = keep(control, *more)
        ages = [s for s in range(200) if httpcache.use(kept, (), 100.0 + s).fresh]
        assert (ages[-1] + 1 if ages else 0) == until

    @pytest.mark.parametrize("expires", ["0", "Sun, 06 Nov 1994 08:49:37 GMT", "soon", "-1"])
    def test_expires_that_is_past_or_unreadable_is_stale(self, expires):
        kept = keep("public", DATE, TAG, ("expires", expires))
        assert not httpcache.use(kept, (), 100.0).fresh

    def test_time_on_the_way_counts_as_age(self):
        kept = keep("public, max-age=60", now=100.0, asked_at=90.0)
        assert kept.age_s(100.0) == 10.0

    def test_life_is_bounded(self):
        assert keep("public, max-age=99999999999999").fresh_s == limits.CACHE_LIFE_MAX_S

    @pytest.mark.parametrize(
        ("asked", "fresh"),
        [
            ("no-cache", False),
            ("max-age=5", False),
            ("max-age=20", True),
            ("min-fresh=55", False),
            ("min-fresh=40", True),
            ("max-age=x", False),
            ("", True),
        ],
    )
    def test_request_may_want_a_fresher_one(self, asked, fresh):
        kept = keep("public, max-age=60")
        assert httpcache.use(kept, (("cache-control", asked),), 110.0).fresh is fresh
        assert not httpcache.use(kept, (("pragma", "no-cache"),), 110.0).fresh


class TestInError:
    def test_stale_if_error_serves_for_its_time(self):
        kept = keep("public, max-age=60, stale-if-error=30", TAG)
        assert [httpcache.use(kept, (), 100.0 + s) for s in (59, 60, 89, 91)] == [
            Use(True, True), Use(False, True), Use(False, True), Use(False, False),
        ]  # fmt: skip

    @pytest.mark.parametrize("strict", ["must-revalidate", "proxy-revalidate", "s-maxage=60", "no-cache"])
    def test_never_where_it_must_be_asked_for(self, strict):
        kept = keep(f"public, max-age=60, stale-if-error=600, {strict}", TAG)
        assert not httpcache.use(kept, (), 200.0).in_error

    def test_errors(self):
        assert [status for status in range(100, 600) if httpcache.is_error(status)] == [500, 502, 503, 504]


class TestVary:
    def test_kept_answer_fits_requests_with_the_same_fields(self):
        kept = keep("public, max-age=60", ("vary", "Accept-Language, X-A"), request=[("accept-language", "de")])
        assert kept.fits((("accept-language", "de"), ("x-b", "1")))
        assert not kept.fits((("accept-language", "en"),))
        assert not kept.fits((("accept-language", "de"), ("x-a", "1")))
        assert not kept.fits(())

    def test_coded_answer_fits_only_those_who_take_that_coding(self):
        kept = keep("public, max-age=60", ("content-encoding", "br"), request=[("accept-encoding", "br")])
        assert kept.fits((("accept-encoding", "br"),))
        assert not kept.fits(())


class TestValidation:
    def test_conditions_are_those_of_the_kept_answer(self):
        kept = keep("public, max-age=1", TAG, ("last-modified", "Sun, 06 Nov 1994 08:49:37 GMT"))
        assert httpcache.conditions(kept) == (
            ("if-none-match", '"v1"'),
            ("if-modified-since", "Sun, 06 Nov 1994 08:49:37 GMT"),
        )
        assert httpcache.unconditional((("if-none-match", "x"), ("accept", "y"))) == (("accept", "y"),)

    def test_304_makes_it_fresh_with_new_fields_and_the_old_body_s(self):
        kept = keep("public, max-age=60", TAG, DATE, ("content-length", "5"), ("x-a", "old"))
        fields = (("cache-control", "public, max-age=10"), ("x-a", "new"), ("content-length", "0"))
        again = httpcache.freshened(kept, (), fields, asked_at=500.0, now=500.0, wall_s=WALL + 400)
        assert httpcache.use(again, (), 509.0).fresh
        assert not httpcache.use(again, (), 511.0).fresh
        named = dict(again.headers)
        assert (named["content-length"], named["x-a"], named["etag"]) == ("5", "new", '"v1"')
        taken_back = (("cache-control", "private"),)
        assert httpcache.freshened(kept, (), taken_back, asked_at=500.0, now=500.0, wall_s=WALL) is None

    @pytest.mark.parametrize(
        ("condition", "unchanged"),
        [
            (("if-none-match", '"v1"'), True),
            (("if-none-match", 'W/"v1"'), True),
            (("if-none-match", '"v0", "v1"'), True),
            (("if-none-match", "*"), True),
            (("if-none-match", '"v2"'), False),
            (("if-modified-since", "Sun, 06 Nov 1994 08:49:37 GMT"), True),
            (("if-modified-since", "Sun, 06 Nov 1994 08:49:36 GMT"), False),
            (("if-modified-since", "yesterday"), False),
        ],
    )
    def test_a_request_s_own_condition(self, condition, unchanged):
        kept = keep("public, max-age=60", TAG, ("last-modified", "Sun, 06 Nov 1994 08:49:37 GMT"))
        assert httpcache.is_unchanged(kept, (condition,)) is unchanged

    def test_tag_goes_before_the_date(self):
        kept = keep("public, max-age=60", TAG, ("last-modified", "Sun, 06 Nov 1994 08:49:37 GMT"))
        fields = (("if-none-match", '"v2"'), ("if-modified-since", "Sun, 06 Nov 1994 08:49:37 GMT"))
        assert not httpcache.is_unchanged(kept, fields)


def test_writes_that_went_well_make_what_is_kept_worthless():
    done = {(method, status) for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "QUERY")
            for status in (200, 303, 404, 500) if httpcache.invalidates(method, status)}  # fmt: skip
    assert done == {(method, status) for method in ("POST", "PUT", "DELETE", "PATCH") for status in (200, 303)}


texts = st.text(string.printable, max_size=30)
names = st.sampled_from(
    ["cache-control", "vary", "date", "expires", "age", "etag", "last-modified", "pragma", "if-none-match", "x"]
)
controls = st.lists(
    st.sampled_from(
        ["public", "private", "no-store", "no-cache", "max-age=5", "s-maxage=9", "stale-if-error=3", "max-age", '"']
    ),
    max_size=4,
).map(",".join)
fields = st.lists(st.tuples(names, texts | controls), max_size=6).map(tuple)


@given(request=fields, response=fields, status=st.integers(100, 599), now=st.floats(0, 1e6), later=st.floats(0, 1e6))
def test_any_answer_is_judged_without_a_fault_and_never_kept_against_its_word(request, response, status, now, later):
    kept = httpcache.keep(request, status, response, asked_at=now, now=now, wall_s=WALL)
    said = httpcache.directives(httpcache.value(response, "cache-control"))
    if kept is None:
        return
    assert not said.keys() & {"no-store", "private"}
    assert said.keys() & {"public", "s-maxage"}
    assert kept.fits(request)
    use = httpcache.use(kept, request, now + later)
    assert not use.fresh or later < limits.CACHE_LIFE_MAX_S
    httpcache.is_unchanged(kept, request)
    again = httpcache.freshened(kept, request, response, asked_at=now, now=now + later, wall_s=WALL)
    assert again is None or again.status == status
