"""The ledger's SQLite file.

Invariants: what a transaction committed survives kill −9; what was committed before a `durable` transaction ended survives
power loss too; a file of another run is refused; one process writes to it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from echo2.errors import UserError


class Database:
    """One connection with explicit transactions; to be used by one thread at a time."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Open or create the file at `path`; raises UserError if it belongs to another run or is damaged."""
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript((files("echo2.hub") / "schema.sql").read_text(encoding="utf-8"))
        except sqlite3.DatabaseError as error:
            raise UserError(f"ledger {path} cannot be opened ({error}): restore it or start another run") from None
        owner = self.get("run_id")
        if owner is None:
            self.set("run_id", run_id)
        elif owner != run_id:
            raise UserError(f"ledger {path} belongs to run {owner}, not to {run_id}: choose another run.name or run.directory")

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
