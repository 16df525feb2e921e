"""Frames of a session that its peer has not confirmed, kept to be sent again over another connection."""

from itertools import accumulate

from stormline.core import limits


class Room:
    """What all kept frames of one process may take together.

    Attributes:
        size: bytes they take now.
        size_max: bytes they may take.
    """

    __slots__ = ("size", "size_max")

    def __init__(self, size_max: int) -> None:
        self.size = 0
        self.size_max = size_max


class Kept:
    """The frames of one session, numbered from 1 in each direction.

    Attributes:
        first: number of the oldest frame of ours that is kept; where none is, of the next one.
        received: frames of the peer received so far.
        told: how many of them were confirmed to it.
        size: bytes that are kept.
    """

    __slots__ = ("_frames", "_room", "_untold_bytes", "first", "received", "size", "told")

    def __init__(self, room: Room) -> None:
        self._room = room
        self._frames: list[bytes] | None = None  # made at first use: most sessions are idle
        self._untold_bytes = 0
        self.first = 1
        self.received = self.told = 0
        self.size = 0

    @property
    def sent(self) -> int:
        """Frames of ours so far."""
        return self.first - 1 + (len(self._frames) if self._frames else 0)

    def add(self, frame: bytes) -> None:
        """Keep a frame of ours; where there is no room the oldest give way."""
        if self._frames is None:
            self._frames = [frame]
        else:
            self._frames.append(frame)
        self.size += len(frame)
        self._room.size += len(frame)
        while self._frames and (
            self.size > limits.KEPT_BYTES_MAX
            or len(self._frames) > limits.KEPT_FRAMES_MAX
            or self._room.size > self._room.size_max
        ):
            self._drop(1)

    def take(self, size: int) -> bool:
        """Count a frame of the peer; give True where it is time to confirm."""
        self.received += 1
        self._untold_bytes += size
        return (
            self._untold_bytes >= limits.RECEIVED_EVERY_BYTES
            or self.received - self.told >= limits.RECEIVED_EVERY_FRAMES
        )

    def tell(self) -> int:
        """Give the count to confirm now."""
        self.told, self._untold_bytes = self.received, 0
        return self.received

    def confirmed(self, count: int) -> bool:
        """The peer has received `count` frames of ours; give False where there never were so many."""
        if not 0 <= count <= self.sent:
            return False
        self._drop(max(0, count - self.first + 1))
        return True

    def after(self, count: int) -> list[bytes] | None:
        """Give the frames behind the first `count`, None where some of them are kept no more or never were."""
        if not self.first - 1 <= count <= self.sent:
            return None
        return self._frames[count - self.first + 1 :] if self._frames else []

    def replace(self, frames: list[bytes]) -> None:
        """Keep these instead of all that are kept, none of which the peer has received; they take their numbers."""
        first = self.first
        self.release()
        self.first = first
        for frame in frames:
            self.add(frame)

    def restore(self, first: int, received: int, frames: list[bytes]) -> None:
        """Take over what was kept elsewhere."""
        self.first, self.received, self.told = first, received, received
        for frame in frames:
            self.add(frame)

    def release(self) -> None:
        """Keep nothing any more."""
        if self._frames:
            self._drop(len(self._frames))

    def _drop(self, count: int) -> None:
        if count == 0 or self._frames is None:
            return
        size = sum(map(len, self._frames[:count]))
        del self._frames[:count]
        self.first += count
        self.size -= size
        self._room.size -= size
        if not self._frames:
            self._frames = None


def offsets(begin: int, frames: list[bytes]) -> list[int]:
    """Give where each frame begins in a stream of bytes in which the first begins at `begin`."""
    return list(accumulate(map(len, frames[:-1]), initial=begin)) if frames else []
