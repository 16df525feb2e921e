"""How often a diagnosis may come by itself."""

from stormline.core import limits_diagnosis as limits
from stormline.policy.pace import DiagnosisPace


def test_one_network_gets_one_in_its_pause() -> None:
    pace = DiagnosisPace()
    assert pace.allows("home", 1000.0)
    assert pace.take("home", 1000.0)
    assert not pace.allows("home", 1001.0)
    assert not pace.take("home", 1000.0 + limits.DIAGNOSIS_PAUSE_S - 1)
    assert pace.take("home", 1000.0 + limits.DIAGNOSIS_PAUSE_S)


def test_other_network_gets_its_own_within_the_hour_s_share() -> None:
    pace = DiagnosisPace()
    granted = [pace.take(f"network-{number}", 10.0 * number) for number in range(limits.DIAGNOSIS_PER_HOUR + 2)]
    assert granted == [True] * limits.DIAGNOSIS_PER_HOUR + [False, False]
    assert pace.take("later", 3600.0)
    assert not pace.take("later still", 3601.0)


def test_networks_that_are_remembered_are_few() -> None:
    pace = DiagnosisPace()
    for number in range(10 * limits.DIAGNOSIS_NETWORKS_MAX):
        pace.take(str(number), 3600.0 * number)
    assert len(pace._latest) == limits.DIAGNOSIS_NETWORKS_MAX
