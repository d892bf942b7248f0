"""The learner of rehearsals: time, sizes and versions instead of weights."""

import subprocess
import sys
import time

import numpy as np
import pytest
from checkpointing import restored, saved
from safetensors.numpy import load

from echo2.config import load_config
from echo2.learning.checkpoint import CheckpointError
from echo2.learning.learner import LearnerError
from echo2.learning.learners import make_learner
from echo2.learning.simulated_learner import SimulatedLearner
from echo2.protocol import Batch, Rollout, ScoredRollout, TrainingGroup

REHEARSAL = ("learner.engine=simulated", "worker.engine=simulated")


def batch(step, version, lengths=(2, 4), rewards=(0.0, 1.0)):
    """One group of members with so many tokens and such rewards."""
    members = []
    for member, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        tokens, versions = np.full(length, 7, np.int32), np.full(length, version, np.int32)
        rollout = Rollout(member, tokens, np.full(length, -1.0, np.float32), versions, "length")
        members.append(ScoredRollout(rollout, reward, "w"))
    return Batch(step, (TrainingGroup(0, (5,), tuple(members)),))


def test_a_step_takes_its_time_and_tells_what_the_batch_says():
    learner = SimulatedLearner(0.2, 1000)
    learner.version = 3
    began_s = time.monotonic()
    metrics = learner.train_step(batch(3, version=1))
    assert 0.2 <= time.monotonic() - began_s < 5.0
    assert learner.version == 4
    wanted = {"tokens": 6.0, "reward": 0.5, "completions/mean_length": 3.0, "completions/clipped_ratio": 1.0}
    wanted |= {"staleness/mean": 2.0, "staleness/max": 2.0, "reward_std": 0.5**0.5}
    assert metrics == pytest.approx(wanted)


def test_a_batch_of_another_step_or_without_tokens_leaves_the_version():
    learner = SimulatedLearner(0.001, 1000)
    with pytest.raises(LearnerError, match="step 5 but the learner is at step 0"):
        learner.train_step(batch(5, 0))
    with pytest.raises(LearnerError, match="no tokens"):
        learner.train_step(batch(0, 0, lengths=(), rewards=()))
    assert learner.version == 0


def test_a_snapshot_has_its_size_is_finite_and_depends_on_the_version_alone():
    def exported(version):
        learner = SimulatedLearner(0.001, 10_000)
        learner.version = version
        return learner.export()

    (weights,) = load(exported(1)).values()
    assert weights.nbytes == 10_000 and np.isfinite(weights).all()
    assert exported(1) == exported(1) != exported(2)
    assert 10_000 <= len(exported(1)) < 10_200


def test_a_rehearsal_goes_on_from_its_checkpoint(tmp_path):
    learner = SimulatedLearner(0.001, 1000)
    learner.train_step(batch(0, 0))
    saved(learner, tmp_path)
    again = restored(SimulatedLearner(0.001, 1000), tmp_path)
    assert again.version == 1
    assert again.export() == learner.export()


def test_a_rehearsal_refuses_a_checkpoint_of_trained_weights(make_learner, tmp_path):
    saved(make_learner(), tmp_path)
    with pytest.raises(CheckpointError, match=r"learner\.engine=torch"):
        restored(SimulatedLearner(0.001, 1000), tmp_path)


def test_a_learner_with_weights_refuses_a_rehearsals_checkpoint(make_learner, tmp_path):
    saved(SimulatedLearner(0.001, 1000), tmp_path)
    with pytest.raises(CheckpointError, match="version-00000000 cannot be restored"):
        restored(make_learner(), tmp_path)


def test_the_configured_learner_is_made(random_model_folder, tmp_path):
    settings = (*REHEARSAL, "learner.simulated_step_s=0.001", "learner.simulated_snapshot_bytes=4000")
    learner = make_learner(load_config([], settings), tmp_path, tmp_path)
    assert 4000 <= len(learner.export()) < 4200
    trained = make_learner(load_config([], ["learner.device=cpu"]), random_model_folder, tmp_path)
    assert len(trained.export()) > 1_000_000


def test_a_rehearsing_learner_and_its_flow_need_no_torch():
    program = (
        "import sys; from pathlib import Path; from echo2.config import load_config; import flows.train; "
        "from echo2.learning.learners import make_learner; "
        f"make_learner(load_config([], {REHEARSAL!r}), Path('.'), Path('.')).export(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
