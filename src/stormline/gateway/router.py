"""Which application gateway serves a call."""

from collections.abc import Iterable

from stormline.appgw.port import Gate
from stormline.core import errors
from stormline.core.codes import Code


class Router:
    """Gates by name.

    Raises:
        ConfigError: two gates have one name.
    """

    def __init__(self, gates: Iterable[Gate]) -> None:
        self._gates: dict[str, Gate] = {}
        for gate in gates:
            if gate.name in self._gates:
                raise errors.ConfigError(f"two application gateways are named {gate.name!r}")
            self._gates[gate.name] = gate

    def route(self, name: str) -> Gate:
        """Give the gate that calls name.

        Raises:
            CallError: there is none (CALL_NOT_FOUND).
        """
        gate = self._gates.get(name)
        if gate is None:
            raise errors.CallError(Code.CALL_NOT_FOUND, f"no application gateway named {name[:64]!r} here")
        return gate
