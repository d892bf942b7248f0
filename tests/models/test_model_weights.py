"""Weights travel whole: tied or not, in either number format, or not at all."""

import pytest
import torch
from safetensors.torch import load, save
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2.errors import ConfigError, SnapshotError
from echo2.models.loading import build_model, export_weights, load_model, load_weights, resolve_device

CPU = torch.device("cpu")
HEAD = "lm_head.weight"


def qwen(tied, seed, hidden=16):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=12,
            hidden_size=hidden,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=tied,
        )
    ).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 5, 3, 7]])).logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_snapshot_carries_every_weight_and_tied_ones_once(tied):
    source, target = qwen(tied, seed=0), qwen(tied, seed=1)
    snapshot = export_weights(source, "float32")
    assert (HEAD in load(snapshot)) == (not tied)
    assert not torch.equal(logits(source), logits(target))
    load_weights(target, snapshot)
    assert torch.equal(logits(source), logits(target))
    assert (target.lm_head.weight is target.model.embed_tokens.weight) == tied
    assert export_weights(target, "float32") == snapshot


def test_tied_weights_stay_tied_under_training_after_a_load():
    model = qwen(tied=True, seed=0)
    load_weights(model, export_weights(qwen(tied=True, seed=1), "float32"))
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_bfloat16_travels_rounded_and_loads_into_either_format():
    source = qwen(tied=True, seed=0)
    snapshot = export_weights(source, "bfloat16")
    assert {weight.dtype for weight in load(snapshot).values()} == {torch.bfloat16}
    worker = qwen(tied=True, seed=1).to(torch.bfloat16)
    load_weights(worker, snapshot)
    assert export_weights(worker, "bfloat16") == snapshot
    load_weights(source, snapshot)
    assert source.model.embed_tokens.weight.dtype == torch.float32
    assert export_weights(source, "bfloat16") == snapshot


def damaged(change):
    weights = load(export_weights(qwen(tied=False, seed=0), "float32"))
    change(weights)
    return save(weights)


def reshape(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"].reshape(2, 8).contiguous()


@pytest.mark.parametrize(
    ("snapshot", "fault"),
    [
        (damaged(lambda weights: weights.pop(HEAD)), f"lacks the weight {HEAD}"),
        (damaged(lambda weights: weights.update({"model.extra": torch.zeros(2)})), "unknown weight model.extra"),
        (damaged(reshape), r"model\.norm\.weight has the shape \(2, 8\) instead of \(16,\)"),
        (damaged(lambda weights: None)[:-10], "not a complete safetensors message"),
        (export_weights(qwen(tied=True, seed=0), "float32"), f"lacks the weight {HEAD}"),
        (export_weights(qwen(tied=False, seed=0, hidden=32), "float32"), "has the shape"),
    ],
    ids=["missing", "extra", "shape", "truncated", "tied", "wider"],
)
def test_a_snapshot_of_another_model_is_refused_and_nothing_changes(snapshot, fault):
    model = qwen(tied=False, seed=1)
    before = export_weights(model, "float32")
    with pytest.raises(SnapshotError, match=fault):
        load_weights(model, snapshot)
    assert export_weights(model, "float32") == before


def test_an_untied_snapshot_does_not_fit_a_tied_model():
    with pytest.raises(SnapshotError, match=f"unknown weight {HEAD}"):
        load_weights(qwen(tied=True, seed=0), export_weights(qwen(tied=False, seed=0), "float32"))


def test_a_saved_model_is_loaded_for_inference_in_the_asked_format(tmp_path):
    source = qwen(tied=True, seed=0)
    source.save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", CPU)
    assert torch.equal(logits(model), logits(source))
    assert not model.training
    assert load_model(tmp_path, "bfloat16", CPU).dtype == torch.bfloat16
    built = build_model(tmp_path, "float32", CPU)
    load_weights(built, export_weights(source, "float32"))
    assert torch.equal(logits(built), logits(source))


def test_a_folder_that_lacks_a_weight_is_refused(tmp_path):
    source = qwen(tied=True, seed=0)
    source.save_pretrained(tmp_path)
    weights = load((tmp_path / "model.safetensors").read_bytes())
    del weights["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj"):
        load_model(tmp_path, "float32", CPU)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path, "float32", CPU)
    with pytest.raises(ConfigError, match="cannot be built"):
        build_model(tmp_path, "float32", CPU)


def test_devices_resolve_or_are_refused():
    assert resolve_device("cpu", "learner.device") == CPU
    assert resolve_device("auto", "learner.device").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="'warp9'"):
        resolve_device("warp9", "learner.device")
