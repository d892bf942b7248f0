"""Checkpoints: whole or absent, finite, and enough to go on exactly."""

import math
import shutil

import pytest
import torch
from learning_batches import oracle_log_probs, random_batch
from transformers import AutoModelForCausalLM

from echo2.learning import torch_learner
from echo2.learning.checkpoint import CheckpointError, checkpoint_versions, newest_checkpoint, restore, save_checkpoint
from echo2.learning.learner import LearnerError
from echo2.models.loading import export_weights
from echo2.models.preparation import check_model_folder
from echo2.tasks.tokenizer import load_tokenizer


def train(learner, batches):
    return [learner.train_step(batch)["loss"] for batch in batches]


@pytest.fixture
def batches(make_learner):
    model = make_learner().model
    return [random_batch(model, step, seed=step, noise=0.1) for step in range(7)]


def test_a_run_that_was_interrupted_goes_on_exactly(make_learner, batches, tmp_path):
    uninterrupted = make_learner()
    losses = train(uninterrupted, batches)
    first = make_learner()
    before = train(first, batches[:3])
    second = make_learner()
    restore(second, save_checkpoint(first, tmp_path, "run-1", keep=2))
    assert second.version == 3
    assert before + train(second, batches[3:]) == pytest.approx(losses, abs=1e-6)
    assert torch.allclose(
        torch.nn.utils.parameters_to_vector(second.model.parameters()),
        torch.nn.utils.parameters_to_vector(uninterrupted.model.parameters()),
        rtol=0.0,
        atol=1e-6,
    )


def test_without_the_optimizer_it_would_not(make_learner, batches, tmp_path):
    learner = make_learner()
    train(learner, batches[:3])
    forgetful = make_learner()
    fresh_state = forgetful.optimizer.state_dict()
    restore(forgetful, save_checkpoint(learner, tmp_path, "run-1", keep=2))
    forgetful.optimizer.load_state_dict(fresh_state)
    assert train(learner, batches[3:]) != pytest.approx(train(forgetful, batches[3:]), abs=1e-6)


def test_the_newest_checkpoints_are_kept(make_learner, batches, tmp_path):
    learner = make_learner()
    assert (newest_checkpoint(tmp_path / "none"), checkpoint_versions(tmp_path / "none")) == (None, [])
    for batch in batches[:4]:
        train(learner, [batch])
        save_checkpoint(learner, tmp_path, "run-1", keep=2)
    assert checkpoint_versions(tmp_path) == [3, 4]
    assert newest_checkpoint(tmp_path).name == "version-00000004"


def test_a_version_is_written_once(make_learner, tmp_path):
    learner = make_learner()
    checkpoint = save_checkpoint(learner, tmp_path, "run-1", keep=1)
    written_at = (checkpoint / "optimizer.pt").stat().st_mtime_ns
    assert save_checkpoint(learner, tmp_path, "run-1", keep=1) == checkpoint
    assert (checkpoint / "optimizer.pt").stat().st_mtime_ns == written_at


def test_an_interrupted_save_is_ignored_and_swept_by_the_next(make_learner, batches, tmp_path, monkeypatch):
    learner = make_learner()
    save_checkpoint(learner, tmp_path, "run-1", keep=3)
    train(learner, batches[:1])

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(torch_learner.torch, "save", full_disk)
        save_checkpoint(learner, tmp_path, "run-1", keep=3)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("unfinished")] != []
    assert checkpoint_versions(tmp_path) == [0]
    save_checkpoint(learner, tmp_path, "run-1", keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000000", "version-00000001"]


def test_weights_that_are_not_finite_are_never_saved_and_drop_no_good_checkpoint(make_learner, batches, tmp_path):
    learner = make_learner()
    save_checkpoint(learner, tmp_path, "run-1", keep=1)
    train(learner, batches[:1])
    with torch.no_grad():
        learner.model.model.norm.weight[0] = math.inf
    with pytest.raises(LearnerError, match="version 1: weight"):
        save_checkpoint(learner, tmp_path, "run-1", keep=1)
    assert checkpoint_versions(tmp_path) == [0]


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json"])
@pytest.mark.parametrize("damage", [truncate, lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_a_damaged_checkpoint_is_named(make_learner, tmp_path, name, damage):
    learner = make_learner()
    checkpoint = save_checkpoint(learner, tmp_path, "run-1", keep=1)
    damage(checkpoint / name)
    with pytest.raises(CheckpointError, match=r"version-00000000 cannot be restored .* delete it"):
        restore(learner, checkpoint)


def test_a_checkpoint_is_an_ordinary_model_folder(make_learner, batches, tmp_path):
    learner = make_learner("model.dtype=bfloat16")
    train(learner, batches[:2])
    folder = tmp_path / "exported"
    shutil.copytree(save_checkpoint(learner, tmp_path / "checkpoints", "run-1", keep=1), folder)
    check_model_folder(folder)
    assert load_tokenizer(folder).eos_token_ids == (2,)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert export_weights(model, "float32") == export_weights(learner.model, "float32")
    assert oracle_log_probs(model, [4, 5], [6, 2]).tolist() == oracle_log_probs(learner.model, [4, 5], [6, 2]).tolist()
