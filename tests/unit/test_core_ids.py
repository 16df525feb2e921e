"""Identifiers: what may enter a subject, and what may not."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors, ids, limits

NAMES = st.text(min_size=1, max_size=40).filter(
    lambda text: not any("\ud800" <= char <= "\udfff" for char in text) and len(text.encode()) <= limits.NAME_BYTES_MAX
)


class FixedRng:
    """Gives bytes that can be foreseen."""

    def random(self) -> float:
        return 0.0

    def token_bytes(self, size: int) -> bytes:
        return bytes(range(size))


class TestSubjectToken:
    @given(NAMES)
    def test_token_of_any_name_is_one_plain_token_and_gives_the_name_back(self, name: str) -> None:
        token = ids.subject_token(name)
        assert set(token) <= set("abcdefghijklmnopqrstuvwxyz234567")
        assert ids.from_subject_token(token) == name
        assert token == base64.b32encode(name.encode()).decode().rstrip("=").lower()

    @given(NAMES, NAMES)
    def test_token_is_different_for_different_names(self, first: str, second: str) -> None:
        assert (ids.subject_token(first) == ids.subject_token(second)) is (first == second)

    @pytest.mark.parametrize("name", [">", "*", ".", "a.b", "a b", "$SYS", "u.>"])
    def test_token_of_a_name_with_meaning_to_the_engine_has_none(self, name: str) -> None:
        assert not set(ids.subject_token(name)) & set("*>.$ ")

    @pytest.mark.parametrize("name", ["", "x" * (limits.NAME_BYTES_MAX + 1), "ä" * 65, "\ud800"])
    def test_token_of_an_impossible_name_is_refused(self, name: str) -> None:
        with pytest.raises(errors.ConfigError):
            ids.subject_token(name)

    @pytest.mark.parametrize("token", ["A", "me======", "1", "mf", "mfrq=", "77777777", "me me"])
    def test_token_not_made_by_us_is_refused(self, token: str) -> None:
        with pytest.raises(errors.ConfigError):
            ids.from_subject_token(token)


class TestMethod:
    @pytest.mark.parametrize("method", ["orders.create", "a.b", "a-b.c_d.e2"])
    def test_method_of_dotted_labels_is_taken(self, method: str) -> None:
        assert ids.check_method(method) == method

    @pytest.mark.parametrize(
        "method",
        ["orders", "", ".", "a.", ".a", "a..b", "A.b", "a.*", "a.>", "a b.c", "a.b\n", "é.a", "a." + "b" * 200],
    )
    def test_method_that_could_mean_something_else_is_refused(self, method: str) -> None:
        with pytest.raises(errors.ConfigError, match="method"):
            ids.check_method(method)


class TestLabel:
    @pytest.mark.parametrize("label", ["u1", "a", "eu-west-1", "0"])
    def test_label_is_taken(self, label: str) -> None:
        assert ids.check_label(label, "unit") == label

    @pytest.mark.parametrize("label", ["", "-a", "a-", "A", "a_b", "a.b", "x" * 33, "a\n"])
    def test_label_that_is_none_names_what_it_was_for(self, label: str) -> None:
        with pytest.raises(errors.ConfigError, match=r"^unit "):
            ids.check_label(label, "unit")


def test_new_id_is_lower_case_base32_of_the_bytes_drawn() -> None:
    assert ids.new_id(FixedRng()) == "aaaqeayeaudaocajbifqydiob4"
    assert len(ids.new_id(FixedRng(), 8)) == 13
