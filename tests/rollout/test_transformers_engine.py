"""Generation with a real, small, random Qwen3: what is drawn, what is reported, what does not matter."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import echo2.rollout.transformers_engine as module
from echo2.errors import ConfigError, SnapshotError
from echo2.models.loading import export_weights
from echo2.protocol import GroupRollouts, Lease, Rollout, Sampling, decode_group, encode_group
from echo2.rollout.transformers_engine import TransformersEngine, sample

VOCABULARY = 54
STOP = 2


def make_model(seed: int, tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> Qwen3ForCausalLM:
    return make_model(0, request.param)


@pytest.fixture(scope="module")
def folder(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def engine(model: Qwen3ForCausalLM, folder: Path) -> TransformersEngine:
    engine = TransformersEngine(folder, "float32", "cpu", threads=1)
    engine.load_weights(export_weights(model, "float32"), 5)
    return engine


def make_sampling(**changes: object) -> Sampling:
    values = {"temperature": 1.0, "max_completion_tokens": 12, "stop_token_ids": (STOP, 3, 4), "seed": 11}
    return Sampling.model_validate(values | changes)


def make_leases(lengths: Sequence[int] = (5, 9, 1, 7), members: Sequence[int] = range(6)) -> list[Lease]:
    random = np.random.default_rng(3)
    return [
        Lease(
            group_id=100 + group,
            attempt=1,
            members=tuple(members),
            prompt_token_ids=tuple(random.integers(5, VOCABULARY, length).tolist()),
            timeout_s=10,
        )
        for group, length in enumerate(lengths)
    ]


def generate(
    engine: TransformersEngine, leases: Sequence[Lease], sampling: Sampling, should_stop: Callable[[], bool] = lambda: False
) -> dict[int, GroupRollouts]:
    groups = list(engine.generate(leases, sampling, should_stop))
    assert len({group.group_id for group in groups}) == len(groups)
    return {group.group_id: group for group in groups}


def tokens(group: GroupRollouts) -> dict[int, list[int]]:
    return {rollout.member: rollout.token_ids.tolist() for rollout in group.rollouts}


def teacher_forced(model: PreTrainedModel, lease: Lease, rollout: Rollout, temperature: float) -> Tensor:
    """log_softmax(logits / temperature) of the completion's tokens, from one unpadded forward pass over everything."""
    prompt = list(lease.prompt_token_ids)
    token_ids = torch.tensor([[*prompt, *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=token_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(-1, token_ids[0, len(prompt) :, None])[:, 0]


def assert_log_probs_are(
    model: PreTrainedModel, leases: Sequence[Lease], groups: dict[int, GroupRollouts], temperature: float = 1.0
) -> None:
    for lease in leases:
        for rollout in groups[lease.group_id].rollouts:
            expected = teacher_forced(model, lease, rollout, temperature)
            np.testing.assert_allclose(rollout.log_probs, expected.numpy(), atol=1e-5, rtol=0)


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


def test_tokens_carry_the_version_that_drew_them(engine: TransformersEngine, model: Qwen3ForCausalLM) -> None:
    other = make_model(1, model.config.tie_word_embeddings)
    results = []
    for group in engine.generate(make_leases((3,) * 8, range(2)), make_sampling(), lambda: False):
        results.append(group)
        if len(results) == 1:
            engine.load_weights(export_weights(other, "float32"), 6)
            drawn = max(len(rollout.token_ids) for rollout in group.rollouts)
    versions = [rollout.versions.tolist() for group in results for rollout in group.rollouts]
    assert all(v == [5] * min(drawn, len(v)) + [6] * (len(v) - drawn) for v in versions)
    assert any(6 in v for v in versions)


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


def test_when_stopped_finished_members_are_yielded_and_the_rest_left(engine: TransformersEngine) -> None:
    leases, sampling = make_leases((4,) * 8), make_sampling(stop_token_ids=tuple(range(8)))
    whole = generate(engine, leases, sampling)
    for steps in range(5):
        answers = iter([False] * steps + [True])
        groups = generate(engine, leases, sampling, lambda: next(answers))  # noqa: B023
        expected = {
            group_id: done
            for group_id, group in whole.items()
            if (done := {member: ids for member, ids in tokens(group).items() if len(ids) <= steps})
        }
        assert {group_id: tokens(group) for group_id, group in groups.items()} == expected
        assert all(not group.failures for group in groups.values())
    assert 0 < sum(map(len, expected.values())) < 48


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
