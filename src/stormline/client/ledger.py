"""The outbox's file: calls an app has left, in SQLite, whose writes survive a crash and whose readers never see half.

Everything here blocks and belongs to one thread. Several processes may use one file: an entry belongs to whoever holds
it, for a while.
"""

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from stormline.core import errors
from stormline.core import limits_outbox as limits

State = Literal["answered", "refused", "expired"]

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS entries(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, user TEXT NOT NULL, lane TEXT NOT NULL,
    method TEXT NOT NULL, body BLOB NOT NULL, size INTEGER NOT NULL, until_ms INTEGER NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0, holder TEXT NOT NULL DEFAULT '', held_until_ms INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT '', outcome BLOB NOT NULL DEFAULT x'', code INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS heads ON entries(state, user, lane, seq);
CREATE INDEX IF NOT EXISTS sizes ON entries(size);
"""
_VERSION: Final = 1
_COLUMNS: Final = "seq, id, user, lane, method, body, until_ms, tries"


@dataclass(frozen=True, slots=True)
class Entry:
    """A call that an app has left.

    Attributes:
        seq: its place.
        id: its id, the call's idempotency key.
        user: whose it is, empty where nobody was logged in.
        lane: calls of a lane are made one after the other.
        method: what is called.
        body: the parameters as JSON.
        until_ms: when it is worth nothing any more, milliseconds since 1970.
        tries: attempts that the service has answered with a fault.
    """

    seq: int
    id: str
    user: str
    lane: str
    method: str
    body: bytes
    until_ms: int
    tries: int


@dataclass(frozen=True, slots=True)
class Settled:
    """An entry that has come to its end.

    Attributes:
        entry: which.
        state: how it ended.
        outcome: the answer as JSON, or the reason.
        code: the code of a refusal, 0 for none.
    """

    entry: Entry
    state: State
    outcome: bytes
    code: int


class Ledger:
    """The file.

    Args:
        path: where, None: in memory. A file that is none of SQLite's, or damaged, is put aside as `.damaged`.
        holder: names this user of the file among others.
        alone: what others hold is free: this process has the device's lock, so whoever had it before is dead. A call
            that one without the lock has under way goes twice, under one key.

    Raises:
        OutboxError: it cannot be opened.
    """

    def __init__(self, path: Path | None, holder: str, *, alone: bool = False) -> None:
        self._holder = holder
        self.set_aside = False
        try:
            self._db = self._open(path)
        except sqlite3.DatabaseError as error:
            if path is None or isinstance(error, sqlite3.OperationalError):
                raise errors.OutboxError(f"outbox {path}: {error}") from error
            self.set_aside = True
            _put_aside(path)
            try:
                self._db = self._open(path)
            except sqlite3.Error as again:
                raise errors.OutboxError(f"outbox {path}: {again}") from again
        except OSError as error:
            raise errors.OutboxError(f"outbox {path}: {error.strerror or error}") from error
        if alone:
            with self._writing():
                self._db.execute("UPDATE entries SET holder='', held_until_ms=0 WHERE holder<>''")

    @staticmethod
    def _open(path: Path | None) -> sqlite3.Connection:
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's side files take its mode
        db = sqlite3.connect(path or ":memory:", timeout=limits.OUTBOX_BUSY_S, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")  # a commit is on the disk
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > _VERSION:
                raise errors.OutboxError(f"outbox {path}: written by a newer version ({version})")
            if version == 0:
                db.executescript(_SCHEMA)
                db.execute(f"PRAGMA user_version={_VERSION}")
            elif db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("damaged")
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        """Give back what is held, and close the file."""
        try:
            self._db.execute("UPDATE entries SET holder='', held_until_ms=0 WHERE holder=?", (self._holder,))
        except sqlite3.Error:
            pass  # it is free by itself after a while
        finally:
            self._db.close()

    def put(self, entry: Entry) -> bool:
        """Keep an entry (its `seq` and `tries` are not looked at); False where one of that id is here already.

        Raises:
            OutboxFull: there is no room.
            OutboxError: it cannot be written.
        """
        with self._writing():
            if self._db.execute("SELECT 1 FROM entries WHERE id=?", (entry.id,)).fetchone():
                return False
            count, size = self._db.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM entries").fetchone()
            if count >= limits.OUTBOX_ENTRIES_MAX:
                raise errors.OutboxFull(f"the outbox holds {count} calls, and no more")
            if size + len(entry.body) > limits.OUTBOX_BYTES_MAX:
                raise errors.OutboxFull(f"the outbox holds {size} bytes, at most {limits.OUTBOX_BYTES_MAX} in all")
            self._db.execute(
                "INSERT INTO entries(id, user, lane, method, body, size, until_ms) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (entry.id, entry.user, entry.lane, entry.method, entry.body, len(entry.body), entry.until_ms),
            )
            return True

    def claim(self, user: str, busy: set[str], room: int, now_ms: int) -> list[Entry]:
        """Take the first entries of lanes that are not in `busy`, at most `room`, in the order they were left.

        Raises:
            OutboxError: the file cannot be used.
        """
        with self._writing():
            heads = "seq IN (SELECT MIN(seq) FROM entries WHERE state='' AND user=? GROUP BY lane)"
            taken = [each.entry for each in self._free(heads, (user,), now_ms) if each.entry.lane not in busy][:room]
            self._db.executemany(
                "UPDATE entries SET holder=?, held_until_ms=? WHERE seq=?",
                [(self._holder, now_ms + _hold_ms(), entry.seq) for entry in taken],
            )
            return taken

    def free(self, entry: Entry, *, answered: bool) -> None:
        """Give an entry back that came to no end; `answered`: the service had a fault, and that is counted."""
        with self._writing():
            self._db.execute(
                "UPDATE entries SET holder='', held_until_ms=0, tries=tries+? WHERE seq=?", (int(answered), entry.seq)
            )

    def settle(self, entry: Entry, state: State, outcome: bytes, code: int, now_ms: int) -> Settled:
        """Write down how it ended; it stays here until `forget`."""
        with self._writing():
            self._db.execute(
                "UPDATE entries SET state=?, outcome=?, code=?, holder=?, held_until_ms=? WHERE seq=?",
                (state, outcome, code, self._holder, now_ms + _hold_ms(), entry.seq),
            )
        return Settled(entry, state, outcome, code)

    def expire(self, now_ms: int) -> list[Settled]:
        """Settle what is worth nothing any more, and give it."""
        with self._writing():
            expired = self._free("state='' AND until_ms<=?", (now_ms,), now_ms)
            self._db.executemany(
                "UPDATE entries SET state='expired', holder=?, held_until_ms=? WHERE seq=?",
                [(self._holder, now_ms + _hold_ms(), each.entry.seq) for each in expired],
            )
        return [Settled(each.entry, "expired", b"", 0) for each in expired]

    def untold(self, now_ms: int) -> list[Settled]:
        """Take over what has ended and was never forgotten: whoever ended it has died before."""
        with self._writing():
            untold = self._free("state<>''", (), now_ms)
            self._db.executemany(
                "UPDATE entries SET holder=?, held_until_ms=? WHERE seq=?",
                [(self._holder, now_ms + _hold_ms(), each.entry.seq) for each in untold],
            )
        return untold

    def _free(self, where: str, values: tuple[object, ...], now_ms: int) -> list[Settled]:
        """Give entries that nobody holds. A hold that lasts longer than any does is from before the clock went back."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS}, state, outcome, code FROM entries WHERE {where} "  # noqa: S608 - texts of ours
            "AND NOT (holder<>'' AND held_until_ms>? AND held_until_ms<=?) ORDER BY seq",
            (*values, now_ms, now_ms + _hold_ms()),
        ).fetchall()
        return [Settled(Entry(*row[:8]), *row[8:]) for row in rows]

    def forget(self, entry: Entry) -> None:
        """The app has taken over how it ended."""
        with self._writing():
            self._db.execute("DELETE FROM entries WHERE seq=?", (entry.seq,))

    def withdraw(self, id_: str, now_ms: int) -> bool:
        """Take an entry out that nobody has begun to send; False where there is none such."""
        with self._writing():
            done = self._db.execute(
                "DELETE FROM entries WHERE id=? AND state='' AND (holder='' OR held_until_ms<=?)", (id_, now_ms)
            )
            return done.rowcount == 1

    def waiting(self) -> list[Entry]:
        """Give what waits, in the order it was left."""
        with self._reading():
            return [
                Entry(*row)
                for row in self._db.execute(
                    f"SELECT {_COLUMNS} FROM entries WHERE state='' ORDER BY seq"  # noqa: S608 - names of ours
                )
            ]

    def _writing(self) -> "_Turn":
        return _Turn(self._db, "BEGIN IMMEDIATE")

    def _reading(self) -> "_Turn":
        return _Turn(self._db, "BEGIN")


class _Turn:
    """A transaction whose failures are of our tree."""

    def __init__(self, db: sqlite3.Connection, begin: str) -> None:
        self._db = db
        self._begin = begin

    def __enter__(self) -> None:
        try:
            self._db.execute(self._begin)
        except sqlite3.Error as error:
            raise errors.OutboxError(f"outbox: {error}") from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._db.execute("COMMIT" if error is None else "ROLLBACK")
        except sqlite3.Error as failed:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise errors.OutboxError(f"outbox: {failed}") from failed
        if isinstance(error, sqlite3.Error):
            raise errors.OutboxError(f"outbox: {error}") from error


def _hold_ms() -> int:
    return int(limits.OUTBOX_HOLD_S * 1000)


def _put_aside(path: Path) -> None:
    path.replace(path.with_name(f"{path.name}.damaged"))
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
