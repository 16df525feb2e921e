"""The names of a client between its starts: one small file, read once and written behind the work."""

import ipaddress
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from stormline.core import limits_names
from stormline.core import limits_platform as limits
from stormline.net.files import write_atomic

_log = logging.getLogger("stormline.client")
_VERSION = 1


class StoredName(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of one name; times are of the wall clock, seconds.

    Attributes:
        host: the name, in lower case.
        addresses: its last answer.
        answered_at: when that came.
        source: who gave it.
        network: where it was learned.
        proven: addresses that have shown the right certificate, each with the time of the last time.
    """

    host: str
    addresses: tuple[str, ...] = ()
    answered_at: float = 0.0
    source: str = ""
    network: str = ""
    proven: tuple[tuple[str, float], ...] = ()


class _Content(msgspec.Struct):
    version: int
    names: list[StoredName]


class NamesFile:
    """One file, `<app>.names` in the client's folder, readable by its owner alone.

    Nothing here fails: a file that is missing is an empty one; one that cannot be read or written, or makes no sense,
    is told to the log, once, and is as good as empty. Where two processes share a folder, who writes last wins.

    Args:
        folder: the client's store; made where it is not there.
        app: names the file.
    """

    def __init__(self, folder: Path, app: str) -> None:
        self._path = folder / f"{app or 'direct'}.names"
        self._told = False
        self._writer: threading.Thread | None = None

    def load(self) -> list[StoredName]:
        """Give what the file holds, at most `limits_names.NAMES_STORED_MAX` names, the one used last at the end."""
        try:
            with self._path.open("rb") as file:
                data = file.read(limits_names.NAMES_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._tell(error.strerror or str(error))
            return []
        try:
            if len(data) > limits_names.NAMES_FILE_BYTES_MAX:
                raise ValueError(f"more than {limits_names.NAMES_FILE_BYTES_MAX} bytes")
            content = msgspec.json.decode(data, type=_Content)
            if content.version != _VERSION:
                raise ValueError(f"version {content.version}")
        except ValueError as error:  # msgspec's errors are such, and so is text that is no UTF-8
            self._tell(f"not a file of names: {error}")
            return []
        return [each for each in content.names if _makes_sense(each)][-limits_names.NAMES_STORED_MAX :]

    def save(self, names: list[StoredName]) -> None:
        """Put names into the file, in the place of those it holds; blocks for as long as the disk takes."""
        data = msgspec.json.encode(_Content(_VERSION, names[-limits_names.NAMES_STORED_MAX :]))
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(self._path, data, mode=0o600)
        except OSError as error:
            self._tell(error.strerror or str(error))

    @property
    def busy(self) -> bool:
        """A writing is under way."""
        return self._writer is not None and self._writer.is_alive()

    def save_behind(self, names: list[StoredName], done: Callable[[], None] = lambda: None) -> bool:
        """Do the same on a thread, after the writing under way if there is one, and call `done` there at its end.

        Returns:
            False where no thread could be started.
        """
        before = self._writer

        def write() -> None:
            if before is not None:
                before.join()
            self.save(names)
            done()

        writer = threading.Thread(target=write, name="stormline-names", daemon=True)
        try:
            writer.start()
        except RuntimeError:
            return False
        self._writer = writer
        return True

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            _log.warning("names are not kept in %s: %s", self._path, reason)


def _makes_sense(name: StoredName) -> bool:
    texts = (name.host, name.source, name.network)
    if not name.host or any(len(each) > limits.HOST_CHARS_MAX for each in texts):
        return False
    if len(name.addresses) > limits_names.DNS_ADDRESSES_MAX or len(name.proven) > limits_names.NAMES_PROVEN_MAX:
        return False
    return all(_is_ip(each) for each in (*name.addresses, *(address for address, _ in name.proven)))


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True
