"""Copies learned from vLLM's own loaders, beside what these do."""

import logging
from collections.abc import Callable, Iterable

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from drawn import generate, make_leases, make_sampling
from torch import Tensor, nn
from vllm_engines import KINDS, LARGEST_GAP, gaps, make_gpt2, make_model, proven, snapshot

from echo2.rollout.proof import require_weights
from echo2.rollout.vllm_engine import VllmEngine
from echo2.rollout.vllm_placement import learn_placement

pytest_plugins = ("vllm_engines",)
Loader = Callable[[nn.Module, dict[str, Tensor]], None]


class Fused(nn.Module):
    """Two matrices above one another in one parameter, and room for more rows, filled by `loader`."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.empty(8, 5))
        self.register_buffer("scale", torch.ones(()))
        self._loader = loader

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._loader(self, dict(weights))


def stack(model: nn.Module, weights: dict[str, Tensor]) -> None:
    model.both.data[:3] = weights["a"]
    model.both.data[3:7] = weights["b"].t()


def stack_scaled(model: nn.Module, weights: dict[str, Tensor]) -> None:
    model.both.data[:3] = 2 * weights["a"]
    model.both.data[3:7] = weights["b"].t()


def stack_and_note(model: nn.Module, weights: dict[str, Tensor]) -> None:
    stack(model, weights)
    model.scale.fill_(weights["a"].abs().max())


EXPECTED = {"a": torch.empty(3, 5, device="meta"), "b": torch.empty(5, 4, device="meta")}


def test_parts_and_transposed_ones_go_where_the_loader_puts_them() -> None:
    model = Fused(stack)
    placement = learn_placement(model, EXPECTED)
    weights = {name: torch.randn(weight.shape) for name, weight in EXPECTED.items()}
    model.both.data.zero_()
    placement.load(weights)
    assert torch.equal(model.both, torch.cat([weights["a"], weights["b"].t(), torch.zeros(1, 5)]))


@pytest.mark.parametrize("loader", [stack_scaled, stack_and_note])
def test_loaders_that_do_more_than_copy_are_not_imitated(loader: Loader) -> None:
    assert learn_placement(Fused(loader), EXPECTED) is None


def test_renamed_weights_and_learned_positions_are_placed_too(start: Callable[..., VllmEngine]) -> None:
    models = [make_gpt2(seed) for seed in (0, 1)]
    engine, leases = start(models[0], update_mode="in_flight"), make_leases()
    assert engine._spare._placement is not None
    for version, model in enumerate(models):
        engine.load_weights(snapshot(model), version)
        require_weights(engine, proven(model, version), "float32")
    assert gaps(model, leases, generate(engine, leases, make_sampling())).mean() <= LARGEST_GAP["float32"]


@KINDS
def test_a_model_that_is_not_plain_is_loaded_by_vllm_and_said_so_once(
    start: Callable[..., VllmEngine], tied: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("echo2.rollout.vllm_placement.PLAIN", ())
    with caplog.at_level(logging.WARNING, "echo2"):
        engine = start(make_model(0, tied), update_mode="in_flight")
        assert engine._spare._placement is None
        for version in (1, 2):
            model = make_model(version, tied)
            engine.load_weights(snapshot(model), version)
            require_weights(engine, proven(model, version), "float32")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "echo2.rollout.vllm_weights"]
    assert "places this model's weights itself" in said


@KINDS
def test_what_is_placed_is_bit_by_bit_what_vllm_would_have(start: Callable[..., VllmEngine], tied: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("echo2.rollout.vllm_placement.PLAIN", ())
        own = start(make_model(0, tied), update_mode="in_flight")
    placed = start(make_model(0, tied), update_mode="in_flight")
    leases, found = make_leases(), []
    for engine in (own, placed):
        for version in (1, 2):
            engine.load_weights(snapshot(make_model(version, tied)), version)
        groups = generate(engine, leases, make_sampling())
        found.append([rollout.log_probs.tolist() for group in sorted(groups) for rollout in groups[group].rollouts])
    assert found[0] == found[1]
