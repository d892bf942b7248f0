"""The ledger's SQLite file.

Invariants: what a transaction committed survives kill −9; what was committed before a `durable` transaction ended survives
power loss too; a file of another run is refused; one process writes to it; who only looks changes nothing in the run, and finds
either no file or a whole one; a write that the disk did not take leaves the file as it was, and is told.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path

from echo2.durability import FULL, sync, unwritten, write_atomically
from echo2.errors import DiskError, UserError

log = logging.getLogger(__name__)
PATIENCE_S = 30.0
"""Longest wait for another process that has locked the file."""
IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
OUT_OF_REACH = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)


class Database:
    """One connection with explicit transactions; to be used by one thread at a time."""

    def __init__(self, path: Path, run_id: str, read_only: bool = False) -> None:
        """Open the file at `path`; unless `read_only`, it is created if it is not there.

        Raises UserError if it belongs to another run, is damaged, empty, locked or no file, or may not be read.
        """
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"
            raise UserError(f"ledger {path} is {kind}: restore it or start another run")
        self._path = path
        self.failure: DiskError | None = None
        """What kept the last change from the disk; None once one is there again."""
        self._connection = _open_for_reading(path) if read_only else _open_for_writing(path, run_id)
        try:
            owner = self.get("run_id")
            if owner is None and not read_only:
                self.set("run_id", owner := run_id)
        except sqlite3.DatabaseError as error:
            self.close()
            raise unreadable(path, error) from None
        if owner != run_id:
            self.close()
            told = "names no run" if owner is None else f"belongs to run {owner}"
            raise UserError(f"ledger {path} {told}, not {run_id}: restore it, or choose another run.name or run.directory")

    @contextmanager
    def transaction(self, durable: bool = False) -> Iterator[None]:
        """All or nothing: commits at the end of the block, rolls back if it raises.

        A `durable` one waits until it and all before it are on the disk: a millisecond, too long for every rollout. Raises
        DiskError where the disk does not take it.
        """
        connection, changes = self._connection, self._connection.total_changes
        try:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself where the disk was full.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            if _kind(error) not in OUT_OF_REACH:
                raise
            known, self.failure = self.failure, _out_of_reach(self._path, error)
            if known is None:
                log.error("%s", self.failure)
            raise self.failure from None
        if connection.total_changes != changes:
            self.failure = None

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> sqlite3.Cursor:
        return self._connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        self._connection.executemany(sql, parameters)

    def rows(self, sql: str, *parameters: object) -> list[sqlite3.Row]:
        return self._connection.execute(sql, parameters).fetchall()

    def row(self, sql: str, *parameters: object) -> sqlite3.Row | None:
        return self._connection.execute(sql, parameters).fetchone()

    def value(self, sql: str, *parameters: object) -> int:
        """The single number that a query gives; 0 for NULL."""
        found = self._connection.execute(sql, parameters).fetchone()
        return found[0] or 0

    def get(self, key: str) -> str | None:
        found = self.row("SELECT value FROM run WHERE key = ?", key)
        return found["value"] if found else None

    def set(self, key: str, value: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, value))

    def close(self) -> None:
        self._connection.close()


def _open_for_writing(path: Path, run_id: str) -> sqlite3.Connection:
    schema = (files("echo2.hub") / "schema.sql").read_text(encoding="utf-8")
    try:
        if not path.exists():
            _create(path, run_id, schema)
        connection = _connect(str(path), uri=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(schema)
    except (sqlite3.DatabaseError, OSError) as error:
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UserError(f"ledger {path} may not be written by this user ({error}): change its permissions") from None
        raise unreadable(path, error) from None
    return connection


def _create(path: Path, run_id: str, schema: str) -> None:
    """Make the file elsewhere, since SQLite would show it to who looks while it has no tables yet."""
    with closing(_connect(":memory:", uri=False)) as draft:
        draft.executescript(schema)
        draft.execute("INSERT INTO run VALUES ('run_id', ?)", (run_id,))
        write_atomically(path, draft.serialize())
    sync(path.parent)


def _open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that writes nothing: neither to the ledger nor, where no hub has it open, beside it."""
    # The file itself must not be opened here to look into it: closing it would drop the locks that this process holds on it.
    if not os.access(path, os.R_OK):
        raise UserError(f"ledger {path} may not be read by this user: change its permissions, or look as the user who trains")
    if path.stat().st_size == 0:
        raise UserError(f"ledger {path} is empty: restore it or start another run")
    journal = path.with_name(path.name + "-wal")
    # Without a journal nobody writes, and SQLite would make one if it were not told so.
    mode = "mode=ro" if journal.exists() else "mode=ro&immutable=1"
    try:
        connection = _connect(f"{path.absolute().as_uri()}?{mode}", uri=True)
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        locked = _kind(error) in IN_USE
        if isinstance(error, sqlite3.OperationalError) and not locked and not os.access(path.parent, os.W_OK):
            raise UserError(
                f"ledger {path} cannot be read with its journal {journal.name} where this user may not write ({error}): "
                "copy the run and look at the copy"
            ) from None
        raise unreadable(path, error) from None
    return connection


def _connect(place: str, uri: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(place, uri=uri, isolation_level=None, check_same_thread=False, timeout=PATIENCE_S)
    connection.row_factory = sqlite3.Row
    return connection


def unreadable(path: Path, error: sqlite3.DatabaseError | OSError) -> UserError:
    """What to say of a file that SQLite cannot read, or that is no ledger."""
    kind = _kind(error)
    if kind in IN_USE:
        return UserError(f"ledger {path} is in use by another process ({error}): try again")
    if kind in OUT_OF_REACH or isinstance(error, OSError):
        return _out_of_reach(path, error)
    return UserError(f"ledger {path} is damaged or not the ledger of a run ({error}): restore it or start another run")


def _out_of_reach(path: Path, error: sqlite3.DatabaseError | OSError) -> DiskError:
    if _kind(error) == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in FULL):
        return unwritten(f"ledger {path}", getattr(error, "strerror", None) or str(error), full=True)
    return DiskError(f"ledger {path} cannot be read or written ({error}): look after its disk and try again")


def _kind(error: Exception) -> int:
    """The code of the error without what details it; 0 for one that did not come from SQLite."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
