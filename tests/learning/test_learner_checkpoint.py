"""Checkpoints: whole or absent, finite, and enough to go on exactly."""

import json
import math
import shutil

import pytest
import torch
from checkpointing import checkpoints_in, restored, saved
from learning_batches import oracle_log_probs, random_batch
from transformers import AutoModelForCausalLM

from echo2.learning import torch_learner
from echo2.learning.checkpoint import CheckpointError
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
    saved(first, tmp_path)
    second = restored(make_learner(), tmp_path)
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
    saved(learner, tmp_path)
    forgetful = make_learner()
    fresh_state = forgetful.optimizer.state_dict()
    restored(forgetful, tmp_path).optimizer.load_state_dict(fresh_state)
    assert train(learner, batches[3:]) != pytest.approx(train(forgetful, batches[3:]), abs=1e-6)


def test_random_numbers_go_on_too(make_learner, tmp_path):
    learner = make_learner()
    saved(learner, tmp_path)
    wanted = torch.rand(4)
    assert not torch.equal(torch.rand(4), wanted)
    restored(learner, tmp_path)
    assert torch.equal(torch.rand(4), wanted)


def test_the_schedule_goes_on_where_it_was(make_learner, batches, tmp_path):
    settings = ("learner.warmup_steps=5", "learner.learning_rate=5e-4")
    learner = make_learner(*settings)
    train(learner, batches[:2])
    saved(learner, tmp_path)
    again = restored(make_learner(*settings), tmp_path)
    assert again.train_step(batches[2])["learning_rate"] == pytest.approx(3e-4)


def test_a_checkpoint_names_its_run_and_its_place_in_the_order_of_prompts(make_learner, batches, tmp_path):
    learner = make_learner()
    train(learner, batches[:1])
    checkpoint = saved(learner, tmp_path, cursor=37)
    state = json.loads((checkpoint / "state.json").read_text())
    assert state == {"run_id": "run-1", "version": 1, "cursor": 37, "metrics": {}}
    assert checkpoints_in(tmp_path).restore_newest(make_learner()).cursor == 37


def test_a_checkpoint_of_another_run_is_refused(make_learner, tmp_path):
    learner = make_learner()
    saved(learner, tmp_path, run_id="run-2")
    with pytest.raises(CheckpointError, match="it is of the run run-2, not of run-1"):
        restored(learner, tmp_path)


def test_without_a_checkpoint_a_run_begins_at_the_beginning(make_learner, tmp_path):
    checkpoints = checkpoints_in(tmp_path / "none")
    assert (checkpoints.versions, checkpoints.oldest, checkpoints.restore_newest(make_learner())) == ([], 0, None)


def test_the_newest_checkpoints_are_kept(make_learner, batches, tmp_path):
    learner = make_learner()
    checkpoints = checkpoints_in(tmp_path, "learner.keep_checkpoints=2")
    for batch in batches[:4]:
        train(learner, [batch])
        checkpoints.save(learner, cursor=0)
    assert checkpoints.versions == checkpoints_in(tmp_path).versions == [3, 4]
    assert checkpoints.oldest == 3


def test_a_version_is_written_once(make_learner, tmp_path):
    learner = make_learner()
    checkpoint = saved(learner, tmp_path)
    written_at = (checkpoint / "optimizer.pt").stat().st_mtime_ns
    assert saved(learner, tmp_path) == checkpoint
    assert (checkpoint / "optimizer.pt").stat().st_mtime_ns == written_at


def test_an_interrupted_save_is_ignored_and_swept_by_the_next(make_learner, batches, tmp_path, monkeypatch):
    learner = make_learner()
    saved(learner, tmp_path)
    train(learner, batches[:1])

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch_learner.torch, "save", interrupt)
        saved(learner, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("unfinished")] != []
    assert checkpoints_in(tmp_path).versions == [0]
    saved(learner, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000000", "version-00000001"]


def test_weights_that_are_not_finite_are_never_saved_and_drop_no_good_checkpoint(make_learner, batches, tmp_path):
    learner = make_learner()
    saved(learner, tmp_path, "learner.keep_checkpoints=1")
    train(learner, batches[:1])
    with torch.no_grad():
        learner.model.model.norm.weight[0] = math.inf
    with pytest.raises(LearnerError, match="version 1: weight"):
        saved(learner, tmp_path, "learner.keep_checkpoints=1")
    assert checkpoints_in(tmp_path).versions == [0]


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "random.pt", "state.json"])
@pytest.mark.parametrize("damage", [truncate, lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_a_damaged_checkpoint_is_named(make_learner, tmp_path, name, damage):
    learner = make_learner()
    checkpoint = saved(learner, tmp_path)
    damage(checkpoint / name)
    with pytest.raises(CheckpointError, match=r"version-00000000 cannot be restored .* delete it"):
        restored(learner, tmp_path)


def test_a_checkpoint_is_an_ordinary_model_folder(make_learner, batches, tmp_path):
    learner = make_learner("model.dtype=bfloat16")
    train(learner, batches[:2])
    folder = tmp_path / "exported"
    shutil.copytree(saved(learner, tmp_path / "checkpoints"), folder)
    check_model_folder(folder)
    assert load_tokenizer(folder).eos_token_ids == (2,)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert export_weights(model, "float32") == export_weights(learner.model, "float32")
    assert oracle_log_probs(model, [4, 5], [6, 2]).tolist() == oracle_log_probs(learner.model, [4, 5], [6, 2]).tolist()
