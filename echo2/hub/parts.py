"""Members that are not finished: what workers handed in of them so far, for whoever goes on.

Invariants: the parts of a member follow each other without a gap, each as its worker sampled it, with its log-probabilities and
versions; only the newest attempt adds to them, so that an attempt that was overtaken never changes what a later one goes on
from; a member that is finished, or a group that is dropped, has none.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from dataclasses import replace

import numpy as np

from echo2.hub.database import Database
from echo2.protocol import Rollout, decode_rollout, encode_rollout


class Parts:
    """Every move is made inside a transaction of the caller's."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def fits(self, group_id: int, attempt: int, rollout: Rollout) -> bool:
        """Whether this goes on from what is there, as the attempt knows it; what the attempt sent before may be in it again."""
        last = self._last(group_id, rollout.member)
        if last is None:
            return rollout.start == 0
        length = last["start"] + last["tokens"]
        return rollout.start <= length if last["attempt"] == attempt else rollout.start == length and last["attempt"] < attempt

    def new_of(self, group_id: int, rollout: Rollout) -> Rollout | None:
        """What of a rollout that fits is not there yet."""
        last = self._last(group_id, rollout.member)
        known = max(0, last["start"] + last["tokens"] - rollout.start) if last else 0
        if known >= len(rollout.token_ids):
            return None
        arrays = (rollout.token_ids[known:], rollout.log_probs[known:], rollout.versions[known:])
        return Rollout(rollout.member, *arrays, rollout.finish_reason, rollout.start + known)

    def keep(self, group_id: int, attempt: int, part: Rollout) -> None:
        """Add what is new and not finished."""
        self._db.execute(
            "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                group_id,
                part.member,
                part.start,
                attempt,
                len(part.token_ids),
                int(part.versions.min()),
                encode_rollout(part),
            ),
        )

    def joined(self, group_id: int, end: Rollout) -> Rollout:
        """The whole member, of which this is the new end."""
        pieces = [*(decode_rollout(row["payload"]) for row in self._rows(group_id, end.member)), end]
        token_ids, log_probs, versions = (
            np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("token_ids", "log_probs", "versions")
        )
        return replace(end, token_ids=token_ids, log_probs=log_probs, versions=versions, start=0)

    def prefixes(self, group_id: int) -> dict[int, tuple[int, ...]]:
        """The token ids of every member of the group that has some, by member."""
        found: dict[int, list[int]] = defaultdict(list)
        for row in self._db.rows("SELECT * FROM parts WHERE group_id = ? ORDER BY member, start", group_id):
            found[row["member"]] += decode_rollout(row["payload"]).token_ids.tolist()
        return {member: tuple(token_ids) for member, token_ids in found.items()}

    def forget(self, group_id: int, member: int | None = None) -> dict[int, int]:
        """Let the parts go, of one member or of all; returns their tokens by attempt."""
        tokens: dict[int, int] = defaultdict(int)
        for row in self._db.rows("SELECT * FROM parts WHERE group_id = ? AND member = COALESCE(?, member)", group_id, member):
            tokens[row["attempt"]] += row["tokens"]
        self._db.execute("DELETE FROM parts WHERE group_id = ? AND member = COALESCE(?, member)", (group_id, member))
        return tokens

    def _rows(self, group_id: int, member: int) -> list[sqlite3.Row]:
        return self._db.rows("SELECT * FROM parts WHERE group_id = ? AND member = ? ORDER BY start", group_id, member)

    def _last(self, group_id: int, member: int) -> sqlite3.Row | None:
        rows = self._rows(group_id, member)
        return rows[-1] if rows else None
