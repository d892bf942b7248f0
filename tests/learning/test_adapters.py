"""Low-rank adapters: what is trained, published and saved, and that workers get the learner's policy from them."""

import importlib.util

import pytest
import torch
from checkpointing import restored, saved
from learning_batches import oracle_log_probs, random_batch
from safetensors.torch import load
from spread import followers, spread
from transformers import AutoModelForCausalLM

from echo2.config import load_config
from echo2.errors import ConfigError
from echo2.learning import lora
from echo2.learning.checkpoint import CheckpointError
from echo2.models.loading import export_weights
from echo2.rollout.engines import make_engine

LORA = ("learner.lora.rank=4", "learner.lora.alpha=8", "learner.warmup_steps=0", "learner.learning_rate=1e-2")


def trained(learner, steps=3, first=0):
    return [learner.train_step(random_batch(learner.model, step, seed=step, noise=0.1)) for step in range(first, first + steps)]


def frozen(learner):
    return {name: weight.clone() for name, weight in learner.model.named_parameters() if not weight.requires_grad}


def engine_of(folder, *settings):
    """A worker's engine that has the base, as fetched from the hub."""
    config = load_config([], [*LORA, "worker.device=cpu", *settings])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.model.dtype))
    return make_engine(config, folder, export_weights(base, config.model.dtype))


def test_without_peft_adapters_are_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lora.check_adapters(load_config([], []).learner.lora)
    with pytest.raises(ConfigError, match=r"learner\.lora\.rank = 4 needs peft.*pip install"):
        lora.check_adapters(load_config([], LORA).learner.lora)


@pytest.fixture
def make_adapted(make_learner):
    pytest.importorskip("peft")
    return lambda *settings: make_learner(*LORA, *settings)


def test_adapters_change_nothing_before_they_are_trained(make_adapted, make_learner):
    adapted, plain = make_adapted(), make_learner()
    assert oracle_log_probs(adapted.model, [4, 5], [6, 7]).tolist() == oracle_log_probs(plain.model, [4, 5], [6, 7]).tolist()


def test_adapters_alone_are_trained_and_published(make_adapted):
    learner = make_adapted()
    base, before = frozen(learner), load(learner.export())
    trained(learner)
    after = load(learner.export())
    assert before.keys() == after.keys() and len(after) == 2 * 7 * 3
    assert {name.rsplit(".", 2)[1] for name in after} == {"lora_A", "lora_B"}
    assert all(weight.abs().max() == 0 for name, weight in before.items() if ".lora_B." in name)
    assert all(not torch.equal(before[name], weight) for name, weight in after.items())
    kept = frozen(learner)
    assert all(torch.equal(kept[name], weight) for name, weight in base.items())
    assert len(learner.export()) < 0.1 * sum(weight.nbytes for weight in base.values())


def test_adapters_are_drawn_from_the_runs_seed(make_adapted):
    before = torch.get_rng_state()
    first, same, other = (make_adapted(f"run.seed={seed}") for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.export() == same.export() != other.export()


def test_named_layers_alone_get_adapters(make_adapted):
    learner = make_adapted('learner.lora.target_modules=["q_proj", "v_proj"]')
    assert {name.split(".")[4] for name in load(learner.export())} == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("target", "reason"),
    [("nonsense", "not found"), ("lm_head", "is the head or no linear layer"), ("embed_tokens", "is the head or no linear")],
)
def test_targets_that_cannot_be_adapted_are_refused(make_adapted, target, reason):
    with pytest.raises(ConfigError, match=rf"learner\.lora\.target_modules = \['{target}'\].*{reason}"):
        make_adapted(f'learner.lora.target_modules=["{target}"]')


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_with_the_base_has_the_learners_policy(make_adapted, random_model_folder, dtype):
    learner, engine = make_adapted(f"model.dtype={dtype}"), engine_of(random_model_folder, f"model.dtype={dtype}")
    for steps in range(1, 3):
        trained(learner, steps=1, first=steps - 1)
        engine.load_weights(learner.export(), steps)
    first = AutoModelForCausalLM.from_pretrained(random_model_folder)
    before, wanted, found = (
        oracle_log_probs(model, [4, 5], [6, 7, 2]) for model in (first, learner.model, engine._model.float())
    )
    assert found == pytest.approx(wanted, abs=1e-5 if dtype == "float32" else 0.03)
    assert before != pytest.approx(wanted, abs=0.05)


def test_a_run_with_adapters_goes_on_exactly(make_adapted, tmp_path):
    uninterrupted, first = make_adapted(), make_adapted()
    wanted = trained(uninterrupted, 5)
    trained(first)
    checkpoint = saved(first, tmp_path)
    assert not (checkpoint / "model.safetensors").exists()
    second = restored(make_adapted("run.seed=9"), tmp_path)
    found = trained(second, 2, first=3)
    assert [step["loss"] for step in found] == pytest.approx([step["loss"] for step in wanted[3:]], abs=1e-6)


def test_peft_loads_a_checkpoint(make_adapted, random_model_folder, tmp_path):
    from peft import PeftModel

    learner = make_adapted()
    trained(learner)
    base = AutoModelForCausalLM.from_pretrained(random_model_folder)
    model = PeftModel.from_pretrained(base, saved(learner, tmp_path)).eval()
    assert oracle_log_probs(model, [4, 5], [6, 7]) == pytest.approx(oracle_log_probs(learner.model, [4, 5], [6, 7]), abs=1e-5)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "version-00000003") is not None


def test_checkpoints_with_and_without_adapters_are_not_mixed_up(make_adapted, make_learner, tmp_path):
    saved(make_adapted(), tmp_path / "adapters")
    saved(make_learner(), tmp_path / "all")
    with pytest.raises(CheckpointError):
        restored(make_learner(), tmp_path / "adapters")
    with pytest.raises(CheckpointError):
        restored(make_adapted(), tmp_path / "all")


def test_recomputed_layers_and_micro_batches_change_nothing(make_adapted):
    plain, saving = make_adapted(), make_adapted("learner.gradient_checkpointing=true", "learner.micro_batch_tokens=25")
    for one, other in zip(trained(plain), trained(saving), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_two_ranks_train_the_adapters_of_one(make_adapted, random_model_folder, tmp_path):
    # Adam makes a whole step of a gradient that is hardly more than its rounding.
    gently = ("learner.learning_rate=1e-4",)
    one = make_adapted(*gently)
    batches = [random_batch(one.model, step, seed=step, noise=0.1) for step in range(3)]
    two = spread(random_model_folder, tmp_path, *LORA, *gently)
    try:
        for batch in batches:
            wanted, found = one.train_step(batch), two.train_step(batch)
            assert found == pytest.approx(wanted | {"learner/skipped": 0.0}, rel=1e-5, abs=1e-5)
        wanted, found = load(one.export()), load(two.export())
        saved(two, tmp_path / "kept")
    finally:
        two.close()
    assert followers() == []
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], weight, rtol=0.0, atol=1e-5) for name, weight in wanted.items())
    assert load(restored(make_adapted("run.seed=9"), tmp_path / "kept").export()).keys() == wanted.keys()
