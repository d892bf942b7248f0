"""Generation with the real vLLM: what is drawn, what fails alone, what is given in parts."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from drawn import generate, make_leases, make_sampling, teacher_forced, tokens
from vllm_engines import LARGEST_GAP, VOCABULARY, make_model, snapshot

from echo2.config_sections import WorkerSection
from echo2.errors import ConfigError
from echo2.protocol import GroupRollouts, Sampling
from echo2.rollout.engine import OutOfMemory
from echo2.rollout.vllm_engine import VllmEngine

pytest_plugins = ("vllm_engines",)


@pytest.fixture
def engine(engines: dict[bool, VllmEngine]) -> VllmEngine:
    """One that has the weights of `make_model(0)`."""
    engines[True].load_weights(snapshot(make_model(0, True)), 0)
    return engines[True]


def test_members_depend_on_seed_group_and_number_alone(engine: VllmEngine) -> None:
    leases, sampling = make_leases(), make_sampling()
    together = {group_id: tokens(group) for group_id, group in generate(engine, leases, sampling).items()}
    assert all(tokens(generate(engine, [lease], sampling)[lease.group_id]) == together[lease.group_id] for lease in leases)
    some = [leases[2].model_copy(update={"members": (4, 1), "attempt": 2})]
    assert tokens(generate(engine, some, sampling)[102]) == {member: together[102][member] for member in (4, 1)}
    assert len({tuple(ids) for ids in together[100].values()}) > 3
    same_prompt = leases[0].model_copy(update={"group_id": 999})
    assert tokens(generate(engine, [same_prompt], sampling)[999]) != together[100]
    assert tokens(generate(engine, leases[:1], make_sampling(seed=12))[100]) != together[100]


def test_completions_end_with_one_stop_token_or_have_none(engine: VllmEngine) -> None:
    stops = (2, 3, 4, 5)
    groups = generate(engine, make_leases((5, 6) * 5), make_sampling(stop_token_ids=stops))
    rollouts = [rollout for group in groups.values() for rollout in group.rollouts]
    for rollout in rollouts:
        ends = np.isin(rollout.token_ids, stops)
        assert not ends[:-1].any()
        assert ends[-1] == (rollout.finish_reason == "stop")
        assert len(rollout.token_ids) == 12 or rollout.finish_reason == "stop"
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    assert len({rollout.token_ids[-1] for rollout in rollouts if rollout.finish_reason == "stop"}) > 1


def test_tokens_are_drawn_as_often_as_their_probability(engine: VllmEngine) -> None:
    lease = make_leases((5,), range(3000))[0]
    group = generate(engine, [lease], make_sampling(max_completion_tokens=1, temperature=0.8))[lease.group_id]
    with torch.no_grad():
        logits = make_model(0, True)(input_ids=torch.tensor([lease.prompt_token_ids])).logits[0, -1]
    expected = torch.softmax(logits / 0.8, -1).numpy()
    shares = np.bincount([rollout.token_ids[0] for rollout in group.rollouts], minlength=VOCABULARY) / 3000
    assert (np.abs(shares - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / 3000) + 1e-3).all()


def test_temperature_0_takes_the_most_probable_token_with_certainty(engine: VllmEngine) -> None:
    lease = make_leases((5,))[0].model_copy(update={"temperature": 0.0})
    group = generate(engine, [lease], make_sampling())[lease.group_id]
    assert len({tuple(ids) for ids in tokens(group).values()}) == 1
    assert all(rollout.log_probs.tolist() == [0.0] * len(rollout.token_ids) for rollout in group.rollouts)
    first = list(lease.prompt_token_ids)
    with torch.no_grad():
        logits = make_model(0, True)(input_ids=torch.tensor([first])).logits[0, -1]
    assert group.rollouts[0].token_ids[0] == int(logits.argmax())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_token_ids": (7,) * 53}, "53 tokens and sampling.max_completion_tokens = 12 exceed the model's 64 positions"),
        ({"prompt_token_ids": ()}, "empty"),
        ({"prompt_token_ids": (7, VOCABULARY)}, "outside the model's vocabulary of 54"),
        ({"temperature": 0.005}, "does not sample at the temperature 0.005"),
    ],
)
def test_a_prompt_that_cannot_be_taken_fails_alone(engine: VllmEngine, change: dict, reason: str) -> None:
    leases = make_leases()
    expected = generate(engine, [*leases[:1], *leases[2:]], make_sampling())
    leases[1] = leases[1].model_copy(update=change)
    groups = generate(engine, leases, make_sampling())
    refused = groups.pop(101)
    assert refused.rollouts == ()
    assert [failure.member for failure in refused.failures] == list(range(6))
    assert all(reason in failure.reason for failure in refused.failures)
    assert {g: tokens(group) for g, group in groups.items()} == {g: tokens(group) for g, group in expected.items()}


def test_long_prompts_and_prefixes_need_not_fit_one_pass(start: Callable[..., VllmEngine]) -> None:
    model = make_model(0, True, positions=512)
    engine, leases = start(model, slots=8), make_leases((380,) * 8, range(2))
    engine.load_weights(snapshot(model), 0)
    sampling = make_sampling(max_completion_tokens=128, stop_token_ids=())
    leases = [lease.model_copy(update={"prefixes": {1: lease.prompt_token_ids[:120]}}) for lease in leases]
    for lease in leases:
        engine.begin(lease, sampling)
    groups = {group.group_id: group for _ in range(400) if engine.under_way for group in engine.step()}
    for lease in leases:
        first, second = groups[lease.group_id].rollouts
        assert (len(first.token_ids), len(second.token_ids), second.start) == (128, 8, 120)
        np.testing.assert_allclose(first.log_probs, teacher_forced(model, lease, first, 1.0), atol=1e-4, rtol=0)


def test_what_vllm_itself_refuses_fails_alone(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_max_positions", 1000)
    leases = make_leases()
    leases[2] = leases[2].model_copy(update={"prompt_token_ids": (7,) * 60})
    leases[3] = leases[3].model_copy(update={"prompt_token_ids": (7,) * 70})
    groups = generate(engine, leases, make_sampling(stop_token_ids=()))
    assert {group_id: len(group.rollouts) for group_id, group in groups.items()} == {100: 6, 101: 6, 102: 0, 103: 0}
    assert {failure.reason for failure in groups[102].failures} == {"vLLM ended it after 4 tokens: length"}
    assert "vLLM refused the prompt" in groups[103].failures[0].reason


def test_when_stopped_all_that_was_drawn_is_given(engine: VllmEngine) -> None:
    leases, sampling = make_leases((4,) * 4), make_sampling(stop_token_ids=tuple(range(8)))
    whole = generate(engine, leases, sampling)
    answers = iter([False] * 4 + [True])
    parts = list(engine.generate(leases, sampling, lambda: next(answers)))
    rollouts = {(group.group_id, r.member): r for group in parts for r in group.rollouts}
    expected = {(group_id, r.member): r for group_id, group in whole.items() for r in group.rollouts}
    assert rollouts.keys() == expected.keys()
    for member, rollout in rollouts.items():
        assert rollout.token_ids.tolist() == expected[member].token_ids.tolist()[:4]
        done = len(expected[member].token_ids) <= 4
        assert rollout.finish_reason == (expected[member].finish_reason if done else None)
    assert not engine._engine.has_unfinished_requests()
    assert engine._arrived == engine._requests == {}
    assert engine.under_way == 0
    assert {g: tokens(group) for g, group in generate(engine, leases, sampling).items()} == {
        g: tokens(group) for g, group in whole.items()
    }


def test_parts_are_given_once_and_groups_join_those_under_way(engine: VllmEngine) -> None:
    leases, sampling = make_leases(), make_sampling()
    whole, waiting = generate(engine, leases, sampling), list(leases)
    parts: list[GroupRollouts] = []
    while engine.under_way or waiting:
        if waiting:
            assert engine.room(4) == len(waiting)
            engine.begin(waiting.pop(), sampling)
        parts += engine.step()
        parts += engine.parts(sorted(engine._groups)[:2])
        assert engine.open_tokens <= 12 * 6 * 2
    for lease in leases:
        own = [rollout for part in parts if part.group_id == lease.group_id for rollout in part.rollouts]
        for rollout in whole[lease.group_id].rollouts:
            pieces = [piece for piece in own if piece.member == rollout.member]
            assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == rollout.token_ids.tolist()
            lengths = [len(piece.token_ids) for piece in pieces]
            assert [piece.start for piece in pieces] == np.cumsum([0, *lengths[:-1]]).tolist()
            assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [rollout.finish_reason]
    assert len(parts) > 8


def test_members_go_on_from_a_prefix_with_random_numbers_of_their_own(engine: VllmEngine) -> None:
    model, sampling = make_model(0, True), make_sampling(stop_token_ids=())
    lease = make_leases((5,))[0]
    first = generate(engine, [lease], sampling)[lease.group_id]
    prefixes = {member: tuple(ids[:4]) for member, ids in tokens(first).items() if member}
    second = generate(engine, [lease.model_copy(update={"prefixes": prefixes, "attempt": 2})], sampling)[lease.group_id]
    assert {r.member: (r.start, len(r.token_ids)) for r in second.rollouts} == {0: (0, 12)} | dict.fromkeys(range(1, 6), (4, 8))
    assert tokens(second)[0] == tokens(first)[0]
    assert sum(tokens(second)[member] == tokens(first)[member][4:] for member in prefixes) < 5
    for rollout in second.rollouts:
        longer = lease.model_copy(update={"prompt_token_ids": lease.prompt_token_ids + prefixes.get(rollout.member, ())})
        expected = teacher_forced(model, longer, rollout, 1.0).numpy()
        np.testing.assert_allclose(rollout.log_probs, expected, atol=LARGEST_GAP["float32"], rtol=0)


def test_an_engine_that_ran_out_of_memory_goes_on_with_less(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    leases, sampling = make_leases(), make_sampling()
    expected = generate(engine, leases, sampling)
    executor = engine._engine.model_executor
    execute, calls = executor.execute_model, itertools.count()

    def cramped(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return execute(*arguments, **named)

    monkeypatch.setattr(executor, "execute_model", cramped)
    for lease in leases:
        engine.begin(lease, sampling)
    with pytest.raises(OutOfMemory):
        [engine.step() for _ in range(9)]
    parts = {group.group_id: group for group in engine.parts([lease.group_id for lease in leases])}
    assert all(ids == tokens(expected[g])[m][: len(ids)] for g, group in parts.items() for m, ids in tokens(group).items())
    assert sum(len(r.token_ids) for group in parts.values() for r in group.rollouts) >= 2 * 24
    engine.drop_all()
    found = generate(engine, leases[:2], sampling)
    assert {g: tokens(group) for g, group in found.items()} == {g: tokens(expected[g]) for g in (100, 101)}


def test_no_more_groups_are_begun_than_the_cache_holds(start: Callable[..., VllmEngine]) -> None:
    model = make_model(0, True, positions=512)
    engine = start(model, cache_bytes=2**24, slots=8)
    cache = engine._engine.vllm_config.cache_config
    engine.load_weights(snapshot(model), 0)
    engine._lengths.append(engine._lengths.pop() * 100)
    assert engine.limit(8) == engine.room(8) == 1, "at their longest, not even one group"
    sampling = make_sampling(max_completion_tokens=6)
    for _ in range(4):
        generate(engine, make_leases(members=range(8)), sampling)
    expected = cache.num_gpu_blocks // (8 * (math.ceil(np.mean(engine._lengths) / cache.block_size) + 1))
    assert 1 < engine.limit(8) == min(8, expected)
    assert engine.limit(2) == 2


def test_a_device_that_vllm_was_not_built_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.device = 'xpu'"):
        VllmEngine(tmp_path, "float32", WorkerSection(device="xpu"), members=1, longest_tokens=1)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        VllmEngine(tmp_path, "float32", WorkerSection(), members=1, longest_tokens=1)


def test_sampling_is_the_runs(engine: VllmEngine) -> None:
    sampling: Sampling = make_sampling(max_completion_tokens=3, stop_token_ids=())
    lengths = {len(r.token_ids) for group in generate(engine, make_leases(), sampling).values() for r in group.rollouts}
    assert lengths == {3}
