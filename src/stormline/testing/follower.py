"""Who follows a request for a test: what the pool and the connection told, kept in order."""

from collections.abc import Callable

from stormline.core.phase import Phase
from stormline.outbound.held import Held, Unfollowed


class Notebook(Unfollowed):
    """`outbound.held.Follower` that keeps what it is told.

    Args:
        on_stage: told each stage as well.

    Attributes:
        stages, notes, held: what was told so far.
    """

    def __init__(self, on_stage: Callable[[Phase], object] = lambda stage: None) -> None:
        super().__init__()
        self._told = on_stage
        self.stages: list[Phase] = []
        self.notes: list[str] = []
        self.held: list[Held] = []

    def stage(self, stage: Phase) -> None:
        """See `Follower.stage`."""
        super().stage(stage)
        self.stages.append(stage)
        self._told(stage)

    def note(self, line: str) -> None:
        """See `Follower.note`."""
        self.notes.append(line)

    def on_held(self, held: Held) -> None:
        """See `Follower.on_held`."""
        self.held.append(held)
