"""Generation with a real, small, random Qwen3: what is drawn, what is reported, what does not matter."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import (
    STOP,
    VOCABULARY,
    assert_log_probs_are,
    generate,
    make_leases,
    make_model,
    make_sampling,
    teacher_forced,
    tokens,
)
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3ForCausalLM

import echo2.rollout.transformers_engine as module
from echo2.errors import ConfigError, SnapshotError
from echo2.models.loading import export_weights
from echo2.protocol import decode_group, encode_group
from echo2.rollout.transformers_engine import TransformersEngine, sample


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probs_are_those_of_the_distribution_sampled_from(
    engine: TransformersEngine, model: Qwen3ForCausalLM, temperature: float
) -> None:
    leases = make_leases()
    groups = generate(engine, leases, make_sampling(temperature=temperature))
    assert sum(len(group.rollouts) for group in groups.values()) == 24
    assert_log_probs_are(model, leases, groups, temperature)


def test_a_group_comes_out_the_same_alone_or_left_padded_in_a_batch(engine: TransformersEngine) -> None:
    leases, sampling = make_leases((5, 12, 1, 7)), make_sampling()
    together = generate(engine, leases, sampling)
    for lease in leases:
        alone = generate(engine, [lease], sampling)[lease.group_id]
        assert tokens(alone) == tokens(together[lease.group_id])
        for one, other in zip(alone.rollouts, together[lease.group_id].rollouts, strict=True):
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("compact_below", [0.0, 0.5, 2.0])
def test_dropping_finished_rows_changes_nothing(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, compact_below: float
) -> None:
    leases, sampling = make_leases(), make_sampling(stop_token_ids=tuple(range(10)))
    expected = generate(engine, leases, sampling)
    assert len({len(r.token_ids) for group in expected.values() for r in group.rollouts}) > 4
    monkeypatch.setattr(module, "COMPACT_BELOW", compact_below)
    changed = generate(engine, leases, sampling)
    assert {g: tokens(group) for g, group in changed.items()} == {g: tokens(group) for g, group in expected.items()}


def test_some_members_of_a_group_come_out_as_in_the_whole(engine: TransformersEngine) -> None:
    whole = tokens(generate(engine, make_leases(), make_sampling())[102])
    some = tokens(generate(engine, make_leases(members=(4, 1)), make_sampling())[102])
    assert some == {member: whole[member] for member in (4, 1)}


def test_a_later_attempt_repeats_the_first(engine: TransformersEngine) -> None:
    leases = make_leases()
    again = [lease.model_copy(update={"attempt": 2}) for lease in leases]
    first, second = generate(engine, leases, make_sampling()), generate(engine, again, make_sampling())
    assert {group.attempt for group in second.values()} == {2}
    assert all(tokens(first[group_id]) == tokens(second[group_id]) for group_id in first)


def test_members_groups_and_seeds_differ(engine: TransformersEngine) -> None:
    lease = make_leases()[0]
    same_prompt = [lease, lease.model_copy(update={"group_id": 999})]
    groups = generate(engine, same_prompt, make_sampling())
    assert len({tuple(t) for t in tokens(groups[100]).values()}) > 3
    assert tokens(groups[100]) != tokens(groups[999])
    assert tokens(generate(engine, [lease], make_sampling(seed=12))[100]) != tokens(groups[100])


def test_completions_end_with_one_stop_token_or_have_none(engine: TransformersEngine) -> None:
    stops = (STOP, 3, 4, 5)
    groups = generate(engine, make_leases((5, 6) * 5), make_sampling(stop_token_ids=stops))
    rollouts = [rollout for group in groups.values() for rollout in group.rollouts]
    for rollout in rollouts:
        ends = np.isin(rollout.token_ids, stops)
        assert not ends[:-1].any()
        assert ends[-1] == (rollout.finish_reason == "stop")
        assert len(rollout.token_ids) == 12 or rollout.finish_reason == "stop"
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    assert len({rollout.token_ids[-1] for rollout in rollouts if rollout.finish_reason == "stop"}) > 1


def test_a_stop_token_in_the_last_place_is_a_stop(engine: TransformersEngine) -> None:
    groups = generate(engine, make_leases(), make_sampling(max_completion_tokens=1, stop_token_ids=tuple(range(VOCABULARY))))
    assert {(r.finish_reason, len(r.token_ids)) for group in groups.values() for r in group.rollouts} == {("stop", 1)}


def test_results_can_cross_the_wire(engine: TransformersEngine) -> None:
    for group in generate(engine, make_leases(), make_sampling()).values():
        received = decode_group(encode_group(group))
        assert tokens(received) == tokens(group)
        for rollout in received.rollouts:
            assert rollout.log_probs.dtype == np.float32
            assert rollout.versions.tolist() == [5] * len(rollout.token_ids)


def test_new_weights_are_used_from_the_next_call_on(engine: TransformersEngine, model: Qwen3ForCausalLM) -> None:
    leases, sampling = make_leases(), make_sampling()
    before = generate(engine, leases, sampling)
    other = make_model(1, model.config.tie_word_embeddings)
    engine.load_weights(export_weights(other, "float32"), 6)
    after = generate(engine, leases, sampling)
    assert_log_probs_are(other, leases, after)
    assert {v for group in after.values() for r in group.rollouts for v in r.versions.tolist()} == {6}
    assert any(tokens(after[group_id]) != tokens(before[group_id]) for group_id in after)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ((7,) * 53, "53 tokens and sampling.max_completion_tokens = 12 exceed the model's 64 positions"),
        ((), "empty"),
        ((7, VOCABULARY), "outside the model's vocabulary of 54"),
        ((-1, 7), "outside the model's vocabulary of 54"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_fails_alone(
    engine: TransformersEngine, prompt: tuple[int, ...], reason: str
) -> None:
    leases = make_leases()
    expected = generate(engine, [*leases[:1], *leases[2:]], make_sampling())
    leases[1] = leases[1].model_copy(update={"prompt_token_ids": prompt})
    groups = generate(engine, leases, make_sampling())
    refused = groups.pop(101)
    assert refused.rollouts == ()
    assert [failure.member for failure in refused.failures] == list(range(6))
    assert all(reason in failure.reason for failure in refused.failures)
    assert {g: tokens(group) for g, group in groups.items()} == {g: tokens(group) for g, group in expected.items()}


def test_the_longest_possible_prompt_is_taken(engine: TransformersEngine, model: Qwen3ForCausalLM) -> None:
    leases = make_leases((52, 3))
    groups = generate(engine, leases, make_sampling(stop_token_ids=()))
    assert_log_probs_are(model, leases, groups)


def test_left_padding_does_not_shift_absolute_positions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    engine = TransformersEngine(tmp_path, "float32", "cpu", 1)
    engine.load_weights(export_weights(model, "float32"), 0)
    leases = make_leases((5, 12, 1, 7))
    assert_log_probs_are(model, leases, generate(engine, leases, make_sampling(stop_token_ids=())))


def test_bad_weights_are_failures_not_rollouts(engine: TransformersEngine, model: Qwen3ForCausalLM) -> None:
    broken = make_model(0, model.config.tie_word_embeddings)
    with torch.no_grad():
        broken.model.norm.weight[0] = math.nan
    engine.load_weights(export_weights(broken, "float32"), 6)
    for group in generate(engine, make_leases(), make_sampling()).values():
        assert group.rollouts == ()
        assert [failure.member for failure in group.failures] == list(range(6))
        assert "version 6 has bad weights" in group.failures[0].reason


def test_no_leases_give_no_groups(engine: TransformersEngine) -> None:
    assert generate(engine, [], make_sampling()) == {}
    assert [g.rollouts for g in generate(engine, make_leases((4,), ()), make_sampling()).values()] == [()]


def test_generating_before_the_first_load_is_refused(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="load_weights"):
        next(TransformersEngine(folder, "float32", "cpu", 1).generate(make_leases(), make_sampling(), lambda: False))


def test_weights_of_another_model_are_refused_and_the_old_ones_kept(
    engine: TransformersEngine, model: Qwen3ForCausalLM
) -> None:
    leases = make_leases()
    with pytest.raises(SnapshotError):
        engine.load_weights(b"no weights", 6)
    with pytest.raises(SnapshotError):
        engine.load_weights(export_weights(model.model, "float32"), 6)
    assert engine.version == 5
    assert_log_probs_are(model, leases, generate(engine, leases, make_sampling()))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        TransformersEngine(tmp_path, "float32", "cpu", 1)


def test_bfloat16_reports_float32_log_probs_of_what_it_drew(folder: Path, model: Qwen3ForCausalLM) -> None:
    engine = TransformersEngine(folder, "bfloat16", "cpu", 1)
    engine.load_weights(export_weights(model, "bfloat16"), 0)
    leases = make_leases()
    groups = generate(engine, leases, make_sampling())
    gaps = [
        np.abs(rollout.log_probs - teacher_forced(model, lease, rollout, 1.0).numpy())
        for lease in leases
        for rollout in groups[lease.group_id].rollouts
    ]
    assert 0.0 < float(np.concatenate(gaps).mean()) < 0.05


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_sampling_draws_tokens_as_often_as_their_probability(temperature: float) -> None:
    draws = 20_000
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2
    uniforms = torch.arange(draws, dtype=torch.float64) / draws
    token_ids, log_probs = sample(logits.expand(draws, -1), torch.full((draws,), temperature), uniforms)
    shares = torch.bincount(token_ids, minlength=VOCABULARY) / draws
    probabilities = torch.softmax(logits / temperature, -1)
    assert (shares - probabilities).abs().max() <= 1.01 / draws
    torch.testing.assert_close(log_probs, probabilities.log()[token_ids])


def test_uniform_logits_have_the_log_probability_of_one_in_the_vocabulary() -> None:
    token_ids, log_probs = sample(torch.zeros(8, 1000), torch.full((8,), 0.7), torch.linspace(0, 0.999, 8, dtype=torch.float64))
    assert all(a < b for a, b in pairwise(token_ids.tolist()))
    torch.testing.assert_close(log_probs, torch.full((8,), -math.log(1000)))


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf]).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.5, 0.5 - 1e-12, 1 - 1e-12], dtype=torch.float64)
    token_ids, log_probs = sample(logits, torch.ones(4), uniforms)
    assert token_ids.tolist() == [1, 3, 1, 3]
    assert torch.isfinite(log_probs).all()
