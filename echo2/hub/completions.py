"""What a run's policy wrote: prompts, completions and rewards, from the ledger.

Invariants: a completion's text is the one that was scored; only groups whose tokens are still in the ledger are shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from echo2.hub.database import Database
from echo2.hub.prompts import Prompts
from echo2.protocol import decode_rollout

LONGEST_TEXT = 400
"""Characters of a text after which its middle is left out for people; the answer tends to be at the end."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One member of a group."""

    group: int
    index: int
    """Of the prompt in the task."""
    state: str
    """The group's."""
    step: int | None
    """That trained it, or that it was filtered at; None before, and in an evaluation."""
    evaluation: int | None
    """The version that it evaluates, if it does."""
    member: int
    version: int
    """The oldest one among its tokens."""
    reward: float | None
    """None where it could not be scored."""
    finish_reason: str | None
    tokens: int
    prompt: str
    completion: str


def read_completions(
    database: Database, prompts: Prompts, groups: int, step: int | None, evaluation: int | None
) -> list[Completion]:
    """Of so many groups, the newest first; with `step` or `evaluation` of those that were scored for it alone."""
    rows = database.rows(
        "SELECT group_id, state, step, evaluation FROM groups"
        " WHERE state NOT IN ('leased', 'generated') AND step IS COALESCE(?, step) AND evaluation IS COALESCE(?, evaluation)"
        " AND EXISTS (SELECT 1 FROM rollouts WHERE rollouts.group_id = groups.group_id AND payload IS NOT NULL)"
        " ORDER BY COALESCE(scored_at_s, leased_at_s) DESC, group_id LIMIT ?",
        step,
        evaluation,
        groups,
    )
    found = []
    for row in rows:
        group_id = row["group_id"]
        prompt, index = prompts.text_of(group_id), prompts.index_of(group_id)
        kept = "SELECT * FROM rollouts WHERE group_id = ? AND payload IS NOT NULL ORDER BY member"
        for member in database.rows(kept, group_id):
            rollout = decode_rollout(member["payload"])
            found.append(
                Completion(
                    group=group_id,
                    index=index,
                    state=row["state"],
                    step=row["step"],
                    evaluation=row["evaluation"],
                    member=member["member"],
                    version=member["oldest_version"],
                    reward=member["reward"],
                    finish_reason=rollout.finish_reason,
                    tokens=member["tokens"],
                    prompt=prompt,
                    completion=prompts.completion_of(rollout.token_ids.tolist()),
                )
            )
    return found


def as_json_lines(completions: Sequence[Completion]) -> str:
    """One object per line."""
    return "".join(f"{json.dumps(asdict(each), ensure_ascii=False)}\n" for each in completions)


def render_completions(completions: Sequence[Completion]) -> str:
    """For people: each prompt, and below it what was written, with its reward."""
    return "".join(f"{line}\n" for line in _lines(completions)) or "no completions are kept of that\n"


def _lines(completions: Sequence[Completion]) -> Iterator[str]:
    shown = None
    for each in completions:
        if each.group != shown:
            if shown is not None:
                yield ""
            shown = each.group
            yield f"group {each.group}, {_whereabouts(each)}, prompt {each.index}: {_quoted(each.prompt)}"
        reward = "unscored" if each.reward is None else f"{each.reward:.4g}"
        end = "" if each.finish_reason == "stop" else f", cut off after {each.tokens} tokens"
        yield f"  reward {reward}, version {each.version}{end}: {_quoted(each.completion)}"


def _whereabouts(completion: Completion) -> str:
    if completion.evaluation is not None:
        return f"evaluation of version {completion.evaluation}"
    return completion.state if completion.step is None else f"{completion.state} at step {completion.step}"


def _quoted(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        text = f"{text[: LONGEST_TEXT // 2]} … {text[-LONGEST_TEXT // 2 :]}"
    return json.dumps(text, ensure_ascii=False)
