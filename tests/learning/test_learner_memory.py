"""What saves memory or time in a step changes nothing in its result."""

import threading

import pytest
import torch
from learning_batches import random_batch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BloomConfig, BloomForCausalLM

from echo2.errors import ConfigError
from echo2.learning.log_probs import recompute_layers
from echo2.models.loading import export_weights


def trained(learner, steps=2):
    return [learner.train_step(random_batch(learner.model, step, seed=step, noise=0.1)) for step in range(steps)]


@pytest.mark.parametrize("packing", ["true", "false"])
def test_layers_that_are_computed_again_give_the_same_step(make_learner, packing):
    plain = make_learner(f"learner.packing={packing}")
    saving = make_learner(f"learner.packing={packing}", "learner.gradient_checkpointing=true")
    assert trained(plain) == trained(saving)
    assert export_weights(plain.model, "float32") == export_weights(saving.model, "float32")


def test_layers_that_are_computed_again_keep_less(make_learner):
    def kept(learner):
        """Elements that autograd saves in one forward pass."""
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda x: x):
            learner.model.base_model(input_ids=torch.arange(50)[None], use_cache=False)
        return sum(sizes)

    assert kept(make_learner("learner.gradient_checkpointing=true")) < 0.5 * kept(make_learner())


def test_a_model_without_marked_layers_is_refused():
    model = BloomForCausalLM(BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2))
    recompute_layers(model)
    with pytest.raises(ConfigError, match=r"learner\.gradient_checkpointing: Linear has no layers"):
        recompute_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("packing", ["true", "false"])
def test_bfloat16_products_stay_near_float32_and_leave_the_weights_in_float32(make_learner, packing, caplog):
    plain = make_learner()
    rough = make_learner("learner.compute_dtype=bfloat16", f"learner.packing={packing}")
    assert caplog.records == []
    products = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if "mm" in str(function):
                products.append(result.dtype)
            return result

    with Watch():
        (found,) = trained(rough, steps=1)
    (wanted,) = trained(plain, steps=1)
    assert torch.bfloat16 in products
    assert {weight.dtype for weight in rough.model.parameters()} == {torch.float32}
    assert found["loss"] == pytest.approx(wanted["loss"], abs=0.01)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.05)
    assert found["grad_norm"] != wanted["grad_norm"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_that_was_begun_holds_the_weights_of_that_moment(make_learner, dtype):
    learner = make_learner(f"model.dtype={dtype}", "learner.warmup_steps=0")
    wanted = learner.export()
    begun = learner.begin_export()
    trained(learner, steps=1)
    found = []
    thread = threading.Thread(target=lambda: found.append(begun()))
    thread.start()
    thread.join()
    assert found == [wanted]
    assert learner.export() != wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_too(make_learner):
    learner = make_learner("learner.device=cuda", "learner.warmup_steps=0")
    wanted = learner.export()
    begun = learner.begin_export()
    trained(learner, steps=1)
    assert begun() == wanted
