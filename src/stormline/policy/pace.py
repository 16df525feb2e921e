"""How often a diagnosis may come by itself. Pure."""

from collections import OrderedDict, deque

from stormline.core import limits_diagnosis as limits

_HOUR_S = 3600.0


class DiagnosisPace:
    """Grants diagnoses: one in `DIAGNOSIS_PAUSE_S` on each network, `DIAGNOSIS_PER_HOUR` in an hour on all."""

    def __init__(self) -> None:
        self._latest: OrderedDict[str, float] = OrderedDict()
        self._granted: deque[float] = deque(maxlen=limits.DIAGNOSIS_PER_HOUR)

    def allows(self, network: str, now: float) -> bool:
        """Say whether one may be made now.

        Args:
            network: id of the network.
            now: monotonic seconds.
        """
        latest = self._latest.get(network)
        if latest is not None and now - latest < limits.DIAGNOSIS_PAUSE_S:
            return False
        return len(self._granted) < limits.DIAGNOSIS_PER_HOUR or now - self._granted[0] >= _HOUR_S

    def take(self, network: str, now: float) -> bool:
        """The same; and where it may be, count it as made."""
        if not self.allows(network, now):
            return False
        self._granted.append(now)
        self._latest[network] = now
        self._latest.move_to_end(network)
        while len(self._latest) > limits.DIAGNOSIS_NETWORKS_MAX:
            self._latest.popitem(last=False)
        return True
