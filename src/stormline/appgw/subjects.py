"""Names of the subjects on which the nodes of a unit speak to each other."""

from stormline.core.ids import subject_token


def of_unit(unit: str, what: str) -> str:
    """Give the subject on which the nodes of a unit take messages of one kind.

    Args:
        unit: the unit.
        what: a `.`-joined name of our own, never one from outside.

    Raises:
        ConfigError: the unit's name is empty or too long.
    """
    return f"u.{subject_token(unit)}.{what}"


def of_node(unit: str, node: str, what: str) -> str:
    """Give the subject on which one node takes messages of one kind.

    Raises:
        ConfigError: a name is empty or too long.
    """
    return f"u.{subject_token(unit)}.node.{subject_token(node)}.{what}"
