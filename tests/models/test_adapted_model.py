"""Adapters are merged into a base that stays as it is."""

import pytest
import torch
from safetensors.torch import load, save
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from echo2.errors import SnapshotError
from echo2.models.adapted import AdaptedModel
from echo2.models.loading import export_weights

Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
SCALE = 2.0


def qwen(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config).eval().to(dtype)


def adapters(model, names, rank=3, seed=1):
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in names:
        rows, columns = model.get_submodule(name).weight.shape
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=random)
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=random)
    return tensors


def change(tensors, name):
    return SCALE * tensors[f"{name}.lora_B.weight"].float() @ tensors[f"{name}.lora_A.weight"].float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_is_the_base_and_its_own_adapters_alone(dtype):
    kind = getattr(torch, dtype)
    source, model = qwen(seed=0, dtype=kind), qwen(seed=5, dtype=kind)
    adapted = AdaptedModel(model, export_weights(source, dtype), SCALE)
    first, second = (adapters(model, [Q, V], seed=seed) for seed in (1, 2))
    adapted.load(save(first))
    adapted.load(save(second))
    wanted = load(export_weights(source, dtype))
    for name in (Q, V):
        wanted[f"{name}.weight"] = (wanted[f"{name}.weight"].float() + change(second, name)).to(kind)
    found = load(export_weights(model, dtype))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def test_layers_that_hold_their_weight_the_other_way_round_are_adapted_too():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=16, n_embd=8, n_layer=1, n_head=2)).eval()
    name = "transformer.h.0.attn.c_proj"  # square, so that a mix-up would fit
    before = model.get_submodule(name).weight.clone()
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    adapted = AdaptedModel(model, export_weights(model, "float32"), SCALE)
    adapted.load(save({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}))
    inputs = torch.randn(1, 8)
    module = model.get_submodule(name)
    assert torch.allclose(module(inputs), inputs @ before + module.bias + SCALE * (inputs @ a.T) @ b.T, atol=1e-6)


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda t: b"half a message", "not a complete safetensors message"),
        (lambda t: save(without(t, f"{Q}.lora_B.weight")), "does not hold the run's adapters"),
        (lambda t: save({key: tensor for key, tensor in t.items() if key.startswith(Q)}), "does not hold the run's adapters"),
        (lambda t: save({**t, f"{V}.lora_A.weight": torch.zeros(3, 7)}), "does not have the shape"),
        (lambda t: save({**t, f"{V}.lora_B.weight": torch.zeros(8, 5)}), "does not have the shape"),
        (lambda t: export_weights(qwen(), "float32"), "does not hold the run's adapters"),
    ],
)
def test_what_does_not_fit_leaves_the_model_as_it_was(made, reason):
    model = qwen()
    adapted = AdaptedModel(model, export_weights(model, "float32"), SCALE)
    fitting = adapters(model, [Q, V])
    adapted.load(save(fitting))
    before = export_weights(model, "float32")
    with pytest.raises(SnapshotError, match=reason):
        adapted.load(made(fitting))
    assert export_weights(model, "float32") == before


def test_adapters_of_a_layer_that_is_not_there_are_refused():
    model = qwen()
    adapted = AdaptedModel(model, export_weights(model, "float32"), SCALE)
    stray = {f"model.layers.7.mlp.{half}.weight": torch.zeros(3, 3) for half in ("lora_A", "lora_B")}
    with pytest.raises(SnapshotError, match=r"adapts model\.layers\.7\.mlp, which the model does not have"):
        adapted.load(save(stray))


def test_the_base_of_another_model_is_refused():
    torch.manual_seed(0)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(SnapshotError, match="it is of another model"):
        AdaptedModel(qwen(), export_weights(other, "float32"), SCALE)
