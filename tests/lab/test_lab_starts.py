"""An app that is started again on a network it knows, in real namespaces: a small form of `stormline lab starts`."""

import pytest

from stormline.lab import starts
from stormline.lab.starts_networks import OFFICE

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module", name="visits")
def _visits(tmp_path_factory: pytest.TempPathFactory) -> list[starts.Visit]:
    """Start four apps on a network where HTTP/2 and one port do not pass, and again on their return."""
    folder = tmp_path_factory.mktemp("starts")
    return starts.run(1, folder, restarts=2, ways=("origin", "long"), networks=(OFFICE,))


@pytest.mark.parametrize(("way", "passes"), [("origin", "h1"), ("long", ":8080")])
def test_return_begins_with_what_passes(visits: list[starts.Visit], way: str, passes: str) -> None:
    learned, forgot = (
        [each for each in visits if each.way == way and each.learns is learns] for learns in (True, False)
    )
    for both in (learned, forgot):
        assert [each.visit for each in both] == [0, 1]
        assert all(each.ok and passes in each.told.where[0] for each in both)
        assert len({each.told.network for each in both}) == 1
    assert learned[1].straight
    assert not forgot[1].straight
    assert learned[1].told.first_s is not None
    assert forgot[1].told.first_s is not None
    assert learned[1].told.first_s < forgot[1].told.first_s
