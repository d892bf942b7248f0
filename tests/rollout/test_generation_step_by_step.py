"""Generation that goes on step by step: weights change amidst it, parts are given and gone on from, groups come and go."""

import numpy as np
import pytest
import torch
from drawn import STOP, as_drawn, generate, make_leases, make_model, make_sampling, tokens
from torch import Tensor
from transformers import Qwen3ForCausalLM

import echo2.rollout.transformers_engine as module
from echo2.models.loading import export_weights
from echo2.protocol import GroupRollouts
from echo2.rollout.engine import OutOfMemory
from echo2.rollout.transformers_engine import TransformersEngine


def test_tokens_drawn_amidst_an_update_are_those_of_their_versions(engine: TransformersEngine, model: Qwen3ForCausalLM) -> None:
    models = {5: model, 6: make_model(1, model.config.tie_word_embeddings)}
    leases, sampling, results = make_leases((3,) * 8, range(2)), make_sampling(), {}
    for group in engine.generate(leases, sampling, lambda: False):
        results[group.group_id] = group
        if len(results) == 1:
            engine.load_weights(export_weights(models[6], "float32"), 6)
            drawn = max(len(rollout.token_ids) for rollout in group.rollouts)
    versions = [rollout.versions.tolist() for group in results.values() for rollout in group.rollouts]
    assert all(v == [5] * min(drawn, len(v)) + [6] * (len(v) - drawn) for v in versions)
    assert sum(6 in v for v in versions) > 3
    for lease in leases:
        for rollout in results[lease.group_id].rollouts:
            np.testing.assert_allclose(rollout.log_probs, as_drawn(models, lease, rollout), atol=1e-5, rtol=0)


def test_a_prompt_is_computed_once_for_all_members(engine: TransformersEngine) -> None:
    shapes = []
    engine._model.register_forward_pre_hook(
        lambda _, __, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    generate(engine, make_leases(), make_sampling(stop_token_ids=()))
    assert shapes == [(4, 9)] + [(24, 1)] * 11


def test_groups_are_yielded_as_soon_as_all_members_are_done(engine: TransformersEngine) -> None:
    steps = 0

    def count_steps() -> bool:
        nonlocal steps
        steps += 1
        return False

    ends = []
    leases = make_leases((4,) * 8, range(2))
    for group in engine.generate(leases, make_sampling(stop_token_ids=tuple(range(15))), count_steps):
        ends.append(steps)
        assert max(len(rollout.token_ids) for rollout in group.rollouts) == steps
    assert len(ends) == 8
    assert ends[0] < ends[-1]


def test_when_stopped_all_that_was_drawn_is_given(engine: TransformersEngine) -> None:
    leases, sampling = make_leases((4,) * 8), make_sampling(stop_token_ids=tuple(range(8)))
    whole = generate(engine, leases, sampling)
    assert [*generate(engine, leases, sampling, lambda: True)] == []
    for steps in range(1, 5):
        answers = iter([False] * steps + [True])
        parts = list(engine.generate(leases, sampling, lambda: next(answers)))  # noqa: B023
        assert all(not group.failures for group in parts)
        rollouts = {(group.group_id, r.member): r for group in parts for r in group.rollouts}
        expected = {(group_id, r.member): r for group_id, group in whole.items() for r in group.rollouts}
        assert rollouts.keys() == expected.keys()
        for member, rollout in rollouts.items():
            assert rollout.token_ids.tolist() == expected[member].token_ids.tolist()[:steps]
            done = len(expected[member].token_ids) <= steps
            assert rollout.finish_reason == (expected[member].finish_reason if done else None)
    assert engine.under_way == 0


def test_parts_are_given_once_and_make_up_the_whole(engine: TransformersEngine) -> None:
    leases, sampling = make_leases(), make_sampling()
    whole = generate(engine, leases, sampling)
    assert [engine.begin(lease, sampling) for lease in leases] == [None] * 4
    parts: list[GroupRollouts] = []
    while engine.under_way:
        parts += engine.step()
        parts += engine.parts([lease.group_id for lease in leases if lease.group_id in engine._groups][:2])
        assert engine.open_tokens <= 12 * sum(len(lease.members) for lease in leases[2:])
    for lease in leases:
        own = [rollout for part in parts if part.group_id == lease.group_id for rollout in part.rollouts]
        for rollout in whole[lease.group_id].rollouts:
            pieces = [piece for piece in own if piece.member == rollout.member]
            assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == rollout.token_ids.tolist()
            lengths = [len(piece.token_ids) for piece in pieces]
            assert [piece.start for piece in pieces] == np.cumsum([0, *lengths[:-1]]).tolist()
            assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [rollout.finish_reason]
    assert len(parts) > 8


def test_members_that_go_on_from_a_prefix_end_like_those_that_were_left_in_peace(
    engine: TransformersEngine, model: Qwen3ForCausalLM
) -> None:
    leases, sampling = make_leases(), make_sampling(stop_token_ids=(STOP,))
    whole = generate(engine, leases, sampling)
    resumed = []
    for lease in leases:
        ids = tokens(whole[lease.group_id])
        # The first member has nothing, the others more and more, and those that are finished are not asked for.
        members = tuple(member for member in lease.members if len(ids[member]) > 2 * member)
        prefixes = {member: tuple(ids[member][: 2 * member]) for member in members if member}
        resumed.append(lease.model_copy(update={"members": members, "prefixes": prefixes, "attempt": 2}))
    assert sum(len(lease.prefixes) for lease in resumed) > 10
    ends = generate(engine, resumed, sampling)
    for lease in resumed:
        for rollout in ends[lease.group_id].rollouts:
            full = next(r for r in whole[lease.group_id].rollouts if r.member == rollout.member)
            assert rollout.start == len(lease.prefixes.get(rollout.member, ()))
            assert rollout.token_ids.tolist() == full.token_ids.tolist()[rollout.start :]
            assert rollout.finish_reason == full.finish_reason
            np.testing.assert_allclose(rollout.log_probs, full.log_probs[rollout.start :], atol=1e-5, rtol=0)


def test_what_is_begun_meanwhile_waits_for_the_next_set(engine: TransformersEngine) -> None:
    leases, sampling = make_leases(), make_sampling(stop_token_ids=())
    expected = generate(engine, leases, sampling)
    assert engine.room(7) == 7
    engine.begin(leases[0], sampling)
    found = {group.group_id: group for group in engine.step()}
    assert engine.room(7) == 0
    for lease in leases[1:]:
        engine.begin(lease, sampling)
    while engine.under_way:
        found |= {group.group_id: group for group in engine.step()}
    assert {g: tokens(group) for g, group in found.items()} == {g: tokens(group) for g, group in expected.items()}


def test_dropped_groups_leave_the_others_as_they_are(engine: TransformersEngine) -> None:
    leases, sampling = make_leases(), make_sampling()
    expected = generate(engine, leases, sampling)
    for lease in leases[:3]:
        engine.begin(lease, sampling)
    engine.step()
    engine.begin(leases[3], sampling)
    engine.drop([leases[1].group_id, leases[3].group_id])
    found = {}
    while engine.under_way:
        found |= {group.group_id: group for group in engine.step()}
    for group_id in (100, 102):
        assert tokens(found[group_id]) == tokens(expected[group_id])
    assert found.keys() == {100, 102}


def test_a_set_that_does_not_fit_the_memory_says_so_and_smaller_ones_go_on(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases, sampling = make_leases(), make_sampling()
    expected = generate(engine, leases, sampling)
    forward = module._Decoding._forward

    def cramped(decoding: module._Decoding, token_ids: Tensor, positions: Tensor) -> Tensor:
        if len(token_ids) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(decoding, token_ids, positions)

    monkeypatch.setattr(module._Decoding, "_forward", cramped)
    for lease in leases:
        engine.begin(lease, sampling)
    with pytest.raises(OutOfMemory):
        [engine.step() for _ in range(9)]
    parts = engine.parts([lease.group_id for lease in leases])
    assert all(r.token_ids.tolist() == [tokens(expected[g.group_id])[r.member][0]] for g in parts for r in g.rollouts)
    engine.drop_all()
    assert engine.under_way == engine.open_tokens == 0
    found = generate(engine, leases[:2], sampling)
    assert {g: tokens(group) for g, group in found.items()} == {g: tokens(expected[g]) for g in (100, 101)}
