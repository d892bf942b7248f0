"""Weights changed in the running vLLM: log-probabilities beside those of transformers, and engines that are found out."""

import logging
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from drawn import as_drawn, generate, make_leases, make_sampling
from safetensors.torch import save
from vllm.platforms import current_platform
from vllm_engines import KINDS, LARGEST_GAP, gaps, make_gpt2, make_model, proven, snapshot

from echo2.errors import SnapshotError
from echo2.models.loading import Dtype, export_weights
from echo2.rollout.proof import WrongWeights, require_weights
from echo2.rollout.vllm_engine import VllmEngine

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"

pytest_plugins = ("vllm_engines",)


@KINDS
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probs_are_those_of_transformers(engines: dict[bool, VllmEngine], tied: bool, temperature: float) -> None:
    model, engine, leases = make_model(0, tied), engines[tied], make_leases()
    engine.load_weights(snapshot(model), 5)
    groups = generate(engine, leases, make_sampling(temperature=temperature))
    assert gaps(model, leases, groups, temperature).mean() <= LARGEST_GAP["float32"]
    assert {v for group in groups.values() for r in group.rollouts for v in r.versions.tolist()} == {5}


@KINDS
def test_after_ten_updates_a_running_engine_has_the_last_weights(engines: dict[bool, VllmEngine], tied: bool) -> None:
    engine, leases = engines[tied], make_leases()
    for version in range(10):
        model = make_model(version, tied)
        engine.load_weights(snapshot(model), version)
        require_weights(engine, proven(model, version), "float32")
    groups = generate(engine, leases, make_sampling())
    assert gaps(model, leases, groups).mean() <= LARGEST_GAP["float32"]
    assert {v for group in groups.values() for r in group.rollouts for v in r.versions.tolist()} == {9}


@KINDS
def test_after_ten_updates_in_flight_every_token_is_as_its_version_draws_it(flying: dict[bool, VllmEngine], tied: bool) -> None:
    engine, leases, groups = flying[tied], make_leases((3,) * 4, range(2)), {}
    sampling = make_sampling(max_completion_tokens=40, stop_token_ids=(2,))
    models = {version: make_model(version, tied) for version in range(1, 11)}
    for version, model in models.items():
        weights = snapshot(model)
        if version % 2:
            engine.stage(weights)
        if version == 1:
            engine.load_weights(weights, version)
            for lease in leases:
                engine.begin(lease, sampling)
            continue
        for _ in range(3):
            groups |= {group.group_id: group for group in engine.step()}
        engine.load_weights(weights, version)
        require_weights(engine, proven(model, version), "float32")
    while engine.under_way:
        groups |= {group.group_id: group for group in engine.step()}
    rollouts = [(lease, rollout) for lease in leases for rollout in groups[lease.group_id].rollouts]
    assert {v for _, rollout in rollouts for v in rollout.versions.tolist()} == set(models)
    for lease, rollout in rollouts:
        expected = as_drawn(models, lease, rollout)
        np.testing.assert_allclose(rollout.log_probs, expected, atol=LARGEST_GAP["float32"], rtol=0)
    assert gaps(model, leases, generate(engine, leases, make_sampling())).mean() <= LARGEST_GAP["float32"]


def test_the_proof_of_an_exchange_waits_for_no_member_to_end(start: Callable[..., VllmEngine]) -> None:
    model = make_model(0, tied=True)
    engine = start(model, update_mode="in_flight", slots=1)
    engine.load_weights(snapshot(model), 1)
    (lease,) = make_leases((3,), range(8))
    engine.begin(lease, make_sampling(max_completion_tokens=40, stop_token_ids=()))
    engine.step()
    engine.load_weights(snapshot(model), 2)
    require_weights(engine, proven(model, 2), "float32")
    (part,) = engine.parts([lease.group_id])
    assert max(len(rollout.token_ids) for rollout in part.rollouts) <= 3
    engine.drop_all()


@KINDS
def test_what_is_staged_and_what_runs_have_nothing_in_common(flying: dict[bool, VllmEngine], tied: bool) -> None:
    engine = flying[tied]
    (own,) = engine._engine.apply_model(lambda model: {id(part) for part in [*model.modules(), *model.parameters()]})
    spare = engine._spare._model
    assert not own & {id(part) for part in [*spare.modules(), *spare.parameters()]}


def test_weights_that_are_staged_do_not_show_before_they_are_loaded(flying: dict[bool, VllmEngine]) -> None:
    engine, model, leases = flying[True], make_model(1, True), make_leases()
    engine.load_weights(snapshot(model), 1)
    engine.stage(snapshot(make_model(2, True)))
    require_weights(engine, proven(model, 1), "float32")
    assert gaps(model, leases, generate(engine, leases, make_sampling())).mean() <= LARGEST_GAP["float32"]
    with pytest.raises(SnapshotError):
        engine.stage(b"no weights")
    engine.load_weights(snapshot(model), 3)
    require_weights(engine, proven(model, 3), "float32")


@KINDS
def test_layers_without_weights_of_their_own_are_not_said_to_have_failed(
    engines: dict[bool, VllmEngine], flying: dict[bool, VllmEngine], tied: bool, reload_log: list[str]
) -> None:
    for engine in (engines[tied], flying[tied]):
        for version in (1, 2):
            engine.load_weights(snapshot(make_model(version, tied)), version)
    assert [said for said in reload_log if "Failed" in said] == []
    told = ("QKVParallelLinear: Failed to load weights", "RotaryEmbedding: Excessive loading", "anything else")
    for said in told:
        logging.getLogger(RELOAD_LOGGER).warning(said)
    assert reload_log[-3:] == [*told]


@pytest.fixture
def reload_log() -> Iterator[list[str]]:
    """What vLLM says while weights are exchanged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(RELOAD_LOGGER).addHandler(handler)
    yield said
    logging.getLogger(RELOAD_LOGGER).removeHandler(handler)


def test_adapters_are_staged_with_their_base(start: Callable[..., VllmEngine]) -> None:
    base, merged = make_model(0, True), make_model(0, True)
    engine, name = start(base, update_mode="in_flight"), "model.layers.0.mlp.down_proj"
    engine.adapt(snapshot(base), 0.5)
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((4, 128), (64, 4)))
    engine.load_weights(save({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}), 1)
    with torch.no_grad():
        merged.get_submodule(name).weight += 0.5 * b @ a
    require_weights(engine, proven(merged, 1), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_is_staged_too(start: Callable[..., VllmEngine], dtype: Dtype) -> None:
    engine, leases = start(make_model(0, True), dtype, update_mode="in_flight"), make_leases()
    for version in range(2):
        model = make_model(version, True)
        weights = export_weights(model, dtype)
        engine.stage(weights)
        engine.load_weights(weights, version)
        require_weights(engine, proven(model, version), dtype)
    assert gaps(model, leases, generate(engine, leases, make_sampling())).mean() <= LARGEST_GAP[dtype]


def test_members_share_their_prompt_and_no_version_reads_what_another_computed(
    start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cached = start(make_model(0, True, positions=512)), []
    step = engine._step

    def watched() -> None:
        step()
        cached.extend(output.num_cached_tokens for output in engine._arrived.values())

    monkeypatch.setattr(engine, "_step", watched)
    # Whole blocks of keys and values are shared.
    block = engine._engine.vllm_config.cache_config.block_size
    lease, sampling = make_leases((block + 3,))[0], make_sampling(max_completion_tokens=2, stop_token_ids=())
    for version in range(2):
        cached.clear()
        engine.load_weights(snapshot(make_model(version, True, positions=512)), version)
        generate(engine, [lease], sampling)
        assert sorted(cached) == [0] + [block] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_renamed_weights_and_learned_positions_arrive_too(start: Callable[..., VllmEngine], dtype: Dtype) -> None:
    models = [make_gpt2(seed) for seed in (0, 1)]
    engine, leases = start(models[0], dtype), make_leases()
    for version, model in enumerate(models):
        engine.load_weights(export_weights(model, dtype), version)
        require_weights(engine, proven(model, version), dtype)
    assert gaps(model, leases, generate(engine, leases, make_sampling())).mean() <= LARGEST_GAP[dtype]


def test_adapters_are_merged_with_their_base(start: Callable[..., VllmEngine]) -> None:
    base, merged = make_model(0, True), make_model(0, True)
    engine, leases = start(base), make_leases()
    engine.adapt(snapshot(base), 0.5)
    name, adapters = "model.layers.0.mlp.down_proj", {}
    for version in (1, 2):
        random = torch.Generator().manual_seed(version)
        adapters = {
            f"{name}.lora_A.weight": torch.randn(4, 128, generator=random),
            f"{name}.lora_B.weight": torch.randn(64, 4, generator=random),
        }
        engine.load_weights(save(adapters), version)
    with torch.no_grad():
        a, b = adapters.values()
        merged.get_submodule(name).weight += 0.5 * b @ a
    require_weights(engine, proven(merged, 2), "float32")
    with pytest.raises(WrongWeights):
        require_weights(engine, proven(base, 2), "float32")
    assert gaps(merged, leases, generate(engine, leases, make_sampling())).mean() <= LARGEST_GAP["float32"]


@KINDS
def test_an_engine_with_other_weights_than_the_manifests_is_found_out(engines: dict[bool, VllmEngine], tied: bool) -> None:
    engine, model, other = engines[tied], make_model(3, tied), make_model(3, tied)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[5] *= 1.5
    engine.load_weights(snapshot(other), 3)
    require_weights(engine, proven(other, 3), "float32")
    with pytest.raises(WrongWeights, match="version 3"):
        require_weights(engine, proven(model, 3), "float32")


def test_output_embeddings_that_stay_behind_are_found_out(
    engines: dict[bool, VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not current_platform.is_cpu():
        pytest.skip("only on CPUs has vLLM a copy of the output embeddings")
    engine = engines[True]
    engine.load_weights(snapshot(make_model(1, True)), 1)
    monkeypatch.setattr("echo2.rollout.vllm_engine.pack_heads", lambda model: None)
    engine.load_weights(snapshot(make_model(2, True)), 2)
    with pytest.raises(WrongWeights, match="version 2"):
        require_weights(engine, proven(make_model(2, True), 2), "float32")


@KINDS
def test_another_models_weights_are_refused_and_the_old_ones_kept(engines: dict[bool, VllmEngine], tied: bool) -> None:
    engine, model, leases = engines[tied], make_model(4, tied), make_leases()
    engine.load_weights(snapshot(model), 4)
    with pytest.raises(SnapshotError):
        engine.load_weights(b"no weights", 5)
    with pytest.raises(SnapshotError):
        engine.load_weights(export_weights(model.model, "float32"), 5)
    assert engine.version == 4
    assert gaps(model, leases, generate(engine, leases, make_sampling())).mean() <= LARGEST_GAP["float32"]


def test_weights_that_were_not_taken_whole_leave_no_version(
    engines: dict[bool, VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = engines[False], make_model(6, False)
    engine.load_weights(snapshot(model), 6)

    def fail(_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr("echo2.rollout.vllm_engine.pack_heads", fail)
        engine.load_weights(snapshot(make_model(7, False)), 7)
    assert engine.version is None
    with pytest.raises(RuntimeError, match="load_weights"):
        next(engine.generate(make_leases(), make_sampling(), lambda: False))
    engine.load_weights(snapshot(model), 8)
    require_weights(engine, proven(model, 8), "float32")


def test_bad_weights_are_failures_not_rollouts(engines: dict[bool, VllmEngine]) -> None:
    engine, broken = engines[False], make_model(0, False)
    with torch.no_grad():
        broken.model.norm.weight[0] = math.nan
    engine.load_weights(snapshot(broken), 6)
    for group in generate(engine, make_leases(), make_sampling()).values():
        assert group.rollouts == ()
        assert [failure.member for failure in group.failures] == list(range(6))
        assert "version 6 has bad weights" in group.failures[0].reason
    with pytest.raises(WrongWeights):
        require_weights(engine, proven(make_model(0, False), 6), "float32")
