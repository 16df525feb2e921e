"""The laboratory measures itself. Margins are five times the aims: the machine may be busy with other tests."""

import json

import pytest

from stormline.lab.validate import Figure, Validation, validate

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]


def test_validation_measures_delay_loss_rate_and_packets() -> None:
    seen: list[Figure] = []
    result: Validation = validate(on_figure=seen.append, effort=0.2)
    assert tuple(seen) == result.figures
    assert [figure.unit for figure in seen] == ["ms", "points", "%", "%", "%", "ms", "packets/s"]
    for figure in seen:
        if figure.better == "lower":
            assert figure.value <= 5 * figure.target, figure
        else:
            assert figure.value >= figure.target / 5, figure
    data = json.loads(json.dumps(result.data()))
    assert data["ok"] == all(figure["ok"] for figure in data["figures"])
