"""The ledger's SQLite file.

Invariants: what a transaction committed survives kill −9; what was committed before a `durable` transaction ended survives
power loss too; a file of another run is refused; one process writes to it; who only looks changes nothing in the run.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from echo2.errors import UserError


class Database:
    """One connection with explicit transactions; to be used by one thread at a time."""

    def __init__(self, path: Path, run_id: str, read_only: bool = False) -> None:
        """Open the file at `path`; unless `read_only`, it is created if it is not there.

        Raises UserError if it belongs to another run, is damaged or empty, or may not be read.
        """
        self._connection = _open_for_reading(path) if read_only else _open_for_writing(path)
        try:
            owner = self.get("run_id")
            if owner is None and not read_only:
                self.set("run_id", owner := run_id)
        except sqlite3.DatabaseError as error:
            self.close()
            raise damaged(path, error) from None
        if owner != run_id:
            self.close()
            told = "names no run" if owner is None else f"belongs to run {owner}"
            raise UserError(f"ledger {path} {told}, not {run_id}: restore it, or choose another run.name or run.directory")

    @contextmanager
    def transaction(self, durable: bool = False) -> Iterator[None]:
        """All or nothing: commits at the end of the block, rolls back if it raises.

        A `durable` one waits until it and all before it are on the disk: a millisecond, too long for every rollout.
        """
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

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


def _open_for_writing(path: Path) -> sqlite3.Connection:
    try:
        connection = _connect(str(path), uri=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript((files("echo2.hub") / "schema.sql").read_text(encoding="utf-8"))
    except sqlite3.DatabaseError as error:
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UserError(f"ledger {path} may not be written by this user ({error}): change its permissions") from None
        raise damaged(path, error) from None
    return connection


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
        if isinstance(error, sqlite3.OperationalError) and not os.access(path.parent, os.W_OK):
            raise UserError(
                f"ledger {path} cannot be read with its journal {journal.name} where this user may not write ({error}): "
                "copy the run and look at the copy"
            ) from None
        raise damaged(path, error) from None
    return connection


def _connect(place: str, uri: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(place, uri=uri, isolation_level=None, check_same_thread=False, timeout=30.0)
    connection.row_factory = sqlite3.Row
    return connection


def damaged(path: Path, error: sqlite3.DatabaseError) -> UserError:
    """What to say of a file that SQLite cannot read, or that is no ledger."""
    return UserError(f"ledger {path} is damaged or not the ledger of a run ({error}): restore it or start another run")
