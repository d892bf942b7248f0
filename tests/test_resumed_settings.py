"""What a run that is gone on with keeps of its configuration, and what may change."""

import pytest

from echo2.config import load_config
from echo2.errors import UserError
from echo2.run_directory import create_run

CHANGES = {
    "model": "model.dtype=bfloat16",
    "task": "task.max_digits=7",
    "batch": "batch.groups=7",
    "sampling": "sampling.temperature=0.9",
    "staleness": "staleness.bound=3",
    "evaluation": "evaluation.every_steps=5",
    "learner.lora": "learner.lora.alpha=8.0",
}


@pytest.mark.parametrize("section", CHANGES)
def test_a_run_keeps_what_it_learns_from_and_what_it_trains(tmp_path, section):
    where = [f"run.directory={tmp_path}", "run.name=r"]
    create_run(load_config([], where), resume=False)
    with pytest.raises(UserError, match=rf"another \[{section}\] \(.* = .*, now .*\): a resumed run keeps it"):
        create_run(load_config([], [*where, CHANGES[section]]), resume=True)


def test_how_long_and_how_it_runs_may_change(tmp_path):
    where = [f"run.directory={tmp_path}", "run.name=r"]
    create_run(load_config([], where), resume=False)
    changed = load_config([], [*where, "run.steps=7", "learner.learning_rate=1e-5", "worker.slots=3"])
    assert create_run(changed, resume=True).config == changed
