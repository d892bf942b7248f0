"""A learner on two ranks, processes on the CPU, against the same on one."""

import math
from dataclasses import replace

import pytest
import torch
from checkpointing import checkpoints_in, restored, saved
from learning_batches import group, oracle_log_probs, random_batch, rollout
from safetensors.torch import load
from spread import SETTINGS, spread

from echo2.learning.learner import LearnerError
from echo2.learning.sharding import own_part
from echo2.protocol import Batch

STEPS = 3


def train(learner, batches):
    return [learner.train_step(batch) for batch in batches]


def by_two_workers(batch):
    """The same batch, with the members of each group made by one worker and the other in turn."""
    groups = []
    for made in batch.groups:
        members = tuple(replace(member, worker_id=f"w{place % 2}") for place, member in enumerate(made.members))
        groups.append(replace(made, members=members))
    return replace(batch, groups=tuple(groups))


def assert_same_weights(found, wanted, tolerance=1e-6):
    found, wanted = load(found), load(wanted)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        difference = (found[name] - weight).abs()
        # AdamW divides a gradient by its own size, so rounding shows in a weight whose gradient is next to nothing.
        assert difference.quantile(0.999) <= tolerance and difference.max() <= 5 * tolerance, name


@pytest.fixture(scope="module")
def pair_on_ranks(random_model_folder, tmp_path_factory):
    learner = spread(random_model_folder, tmp_path_factory.mktemp("logs"))
    yield learner
    learner.close()


@pytest.fixture
def single(make_learner):
    return make_learner(*SETTINGS)


@pytest.fixture
def pair(pair_on_ranks, make_learner, tmp_path):
    """The learner on two ranks, at version 0 with the weights of `single`."""
    saved(make_learner(*SETTINGS), tmp_path / "first")
    return restored(pair_on_ranks, tmp_path / "first")


@pytest.fixture
def batches(single):
    return [random_batch(single.model, step, seed=step, noise=0.1) for step in range(2 * STEPS)]


def test_two_ranks_give_the_numbers_of_one(single, pair, batches):
    wanted, found = train(single, batches[:STEPS]), train(pair, batches[:STEPS])
    assert pair.version == STEPS
    for step in range(STEPS):
        assert found[step] == pytest.approx(wanted[step], rel=1e-6, abs=1e-6)
    assert_same_weights(pair.export(), single.export())


def test_each_worker_answers_for_all_its_tokens_whatever_rank_trained_them(single, pair):
    def figures(learner):
        return {(d.group_id, d.worker_id): (d.tokens, d.oldest_version, d.newest_version) for d in learner.differences}

    def distances(learner):
        return {(d.group_id, d.worker_id, name): getattr(d, name) for d in learner.differences for name in ("mean", "max")}

    log_probs = oracle_log_probs(single.model, [5, 4], [9, 2])
    lonely = Batch(0, (group(0, [5, 4], [(rollout(0, [9, 2], log_probs - 0.5), 1.0)]),))
    mixed = by_two_workers(random_batch(single.model, 1, seed=1, noise=0.1))
    for batch in (lonely, mixed):
        single.train_step(batch)
        pair.train_step(batch)
        assert figures(pair) == figures(single)
        assert distances(pair) == pytest.approx(distances(single), abs=1e-5)
    tokens = sum(len(member.rollout.token_ids) for made in mixed.groups for member in made.members)
    assert sum(d.tokens for d in pair.differences) == tokens
    assert len(pair.differences) == 2 * len(mixed.groups)


def test_each_rank_holds_its_part_of_weights_and_optimizer(pair, batches):
    train(pair, batches[:1])
    own = pair._own
    states = [tensor for state in own.optimizer.state.values() for tensor in state.values() if tensor.dim()]
    for tensors in (list(own.model.parameters()), states):
        held, whole = sum(own_part(tensor).numel() for tensor in tensors), sum(tensor.numel() for tensor in tensors)
        assert 0.49 * whole < held < 0.51 * whole


def test_a_batch_with_fewer_sequences_than_ranks_gives_the_same(single, pair):
    log_probs = oracle_log_probs(single.model, [5, 4], [9, 2])
    lonely = Batch(0, (group(0, [5, 4], [(rollout(0, [9, 2], log_probs), 1.0)]),))
    mixed = random_batch(single.model, 1, seed=1, noise=0.1)
    for batch in (lonely, mixed):
        assert pair.train_step(batch) == pytest.approx(single.train_step(batch), rel=1e-6, abs=1e-6)
    assert_same_weights(pair.export(), single.export())


def test_a_checkpoint_of_two_ranks_goes_on_with_one(make_learner, pair, batches, tmp_path):
    train(pair, batches[:STEPS])
    saved(pair, tmp_path)
    one = restored(make_learner(*SETTINGS), tmp_path)
    assert one.version == STEPS
    assert_same_weights(one.export(), pair.export(), tolerance=0.0)
    wanted = train(pair, batches[STEPS:])
    for found, step in zip(train(one, batches[STEPS:]), wanted, strict=True):
        assert found == pytest.approx(step, rel=1e-6, abs=1e-6)
    assert_same_weights(one.export(), pair.export())


def test_a_checkpoint_of_one_rank_goes_on_with_two(single, pair, batches, tmp_path):
    train(single, batches[:STEPS])
    saved(single, tmp_path)
    checkpoints_in(tmp_path).restore_newest(pair)
    assert pair.version == STEPS
    assert_same_weights(pair.export(), single.export(), tolerance=0.0)
    wanted = train(single, batches[STEPS:])
    for found, step in zip(train(pair, batches[STEPS:]), wanted, strict=True):
        assert found == pytest.approx(step, rel=1e-6, abs=1e-6)
    assert_same_weights(pair.export(), single.export())


def test_an_export_that_was_begun_holds_the_weights_of_that_moment(pair, batches):
    wanted = pair.export()
    begun = pair.begin_export()
    train(pair, batches[:1])
    assert begun() == wanted != pair.export()


def test_the_probe_of_two_ranks_is_that_of_one(single, pair, batches):
    train(single, batches[:1])
    train(pair, batches[:1])
    for learner in (single, pair):
        learner.export()
    assert pair.probe.token_ids == single.probe.token_ids
    assert pair.probe.log_probs == pytest.approx(single.probe.log_probs, abs=1e-5)


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks_and_then_ends_the_run(pair, batches):
    before = pair.export()
    first, *others = batches[0].groups
    member = first.members[0].rollout
    bad = rollout(0, member.token_ids, [math.nan] * len(member.token_ids))
    poisoned = [Batch(step, (group(0, [5], [(bad, 1.0), (bad, 0.0)]), first, *others)) for step in range(2)]
    assert pair.train_step(poisoned[0])["learner/skipped"] == 1.0
    with pytest.raises(LearnerError, match="step 1: loss nan"):
        pair.train_step(poisoned[1])
    assert (pair.version, pair.export()) == (1, before)
    assert math.isfinite(pair.train_step(batches[1])["loss"])


def test_a_batch_that_one_device_refuses_is_refused_and_the_ranks_go_on(pair, batches):
    with pytest.raises(LearnerError, match="no tokens"):
        pair.train_step(Batch(0, ()))
    with pytest.raises(LearnerError, match="batch is for step 1"):
        pair.train_step(batches[1])
    assert math.isfinite(pair.train_step(batches[0])["loss"])


def test_weights_that_are_not_finite_on_another_rank_are_neither_published_nor_saved(make_learner, pair, tmp_path):
    broken = make_learner(*SETTINGS)
    with torch.no_grad():
        broken.model.model.layers[1].mlp.up_proj.weight[-1, 0] = math.inf
    folder = tmp_path / "version-00000000"
    folder.mkdir()
    broken.write_state(folder)
    pair.read_state(folder)
    for refused in (pair.export, lambda: saved(pair, tmp_path / "kept")):
        with pytest.raises(LearnerError, match=r"weight model\.layers\.1\.mlp\.up_proj\.weight is not finite"):
            refused()
    assert not (tmp_path / "kept").exists()
