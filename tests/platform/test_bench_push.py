"""The bench that follows a changed plan to its clients, on a small scale."""

import pytest

from stormline.bench import push

pytestmark = pytest.mark.platform


def test_every_session_gets_every_change() -> None:
    waits = push.waits_s(sessions=3, changes=2)
    assert len(waits) == 6
    assert waits == sorted(waits)
    assert waits[0] > 0
