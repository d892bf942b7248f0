"""The fused head against the plain formula: values, gradients, tiles and number formats."""

import pytest
import torch

from echo2.learning import fused
from echo2.learning.fused import head_log_probs


def inputs(rows, size, vocabulary, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, size, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocabulary, size, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head, torch.randint(vocabulary, (rows,), generator=draw)


def plain(hidden, head, targets, temperature):
    log_probs = ((hidden @ head.T) / temperature).log_softmax(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def weighted_gradients(function, hidden, head, targets, temperature, with_entropies):
    log_probs, entropies = function(hidden, head, targets, temperature)
    weights = torch.linspace(-1.0, 1.0, len(targets), dtype=log_probs.dtype)
    total = (log_probs * weights).sum() + ((entropies * weights.flip(0)).sum() if with_entropies else 0.0)
    return torch.autograd.grad(total, (hidden, head))


@pytest.fixture(params=[(1 << 22, 2048), (20, 5), (7, 7), (1, 1)], ids=["one tile", "tiles", "odd tiles", "single logits"])
def tiles(request, monkeypatch):
    """Tiles that do and do not divide the sizes used here."""
    monkeypatch.setattr(fused, "TILE_LOGITS", request.param[0])
    monkeypatch.setattr(fused, "TILE_VOCABULARY", request.param[1])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("with_entropies", [False, True])
def test_values_and_gradients_are_those_of_the_plain_formula(tiles, temperature, with_entropies):
    hidden, head, targets = inputs(11, 6, 23)
    for found, wanted in zip(
        head_log_probs(hidden, head, targets, temperature), plain(hidden, head, targets, temperature), strict=True
    ):
        assert torch.allclose(found, wanted, rtol=0.0, atol=1e-12)
    found = weighted_gradients(head_log_probs, hidden, head, targets, temperature, with_entropies)
    wanted = weighted_gradients(plain, hidden, head, targets, temperature, with_entropies)
    assert all(torch.allclose(one, other, rtol=0.0, atol=1e-12) for one, other in zip(found, wanted, strict=True))


def test_a_frozen_head_changes_nothing_for_the_hidden_states(tiles):
    hidden, head, targets = inputs(11, 6, 23)
    wanted, _ = weighted_gradients(head_log_probs, hidden, head, targets, 0.7, True)
    log_probs, entropies = head_log_probs(hidden, head.detach(), targets, 0.7)
    weights = torch.linspace(-1.0, 1.0, len(targets), dtype=log_probs.dtype)
    (found,) = torch.autograd.grad((log_probs * weights).sum() + (entropies * weights.flip(0)).sum(), (hidden,))
    assert torch.equal(found, wanted)


def test_gradients_are_those_of_finite_differences(tiles):
    hidden, head, targets = inputs(4, 3, 9)
    assert torch.autograd.gradcheck(lambda h, w: head_log_probs(h, w, targets, 0.7), (hidden, head))
    assert torch.autograd.gradcheck(lambda h, w: head_log_probs(h, w, targets, 0.7)[1], (hidden, head))


def test_float32_stays_within_1e_5_of_float64_at_a_large_vocabulary():
    hidden, head, targets = inputs(40, 16, 30_000)
    wanted = weighted_gradients(plain, hidden, head, targets, 1.0, False)
    single = [tensor.detach().float().requires_grad_() for tensor in (hidden, head)]
    assert torch.allclose(
        head_log_probs(*single, targets, 1.0)[0].double(), plain(hidden, head, targets, 1.0)[0], rtol=0.0, atol=1e-5
    )
    found = weighted_gradients(head_log_probs, *single, targets, 1.0, False)
    assert all(torch.allclose(one.double(), other, rtol=0.0, atol=1e-5) for one, other in zip(found, wanted, strict=True))


def test_bfloat16_weights_are_summed_in_float32():
    hidden, head, targets = inputs(40, 16, 30_000, torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, head)]
    log_probs, entropies = head_log_probs(hidden, head, targets, 1.0)
    assert log_probs.dtype == entropies.dtype == torch.float32
    for found, wanted in zip((log_probs, entropies), plain(*exact, targets, 1.0), strict=True):
        assert torch.allclose(found.double(), wanted, rtol=0.0, atol=1e-4)
    gradients = weighted_gradients(head_log_probs, hidden, head, targets, 1.0, False)
    for found, wanted in zip(gradients, weighted_gradients(plain, *exact, targets, 1.0, False), strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.double(), wanted, rtol=2**-8, atol=1e-5)


def test_huge_logits_stay_finite(tiles):
    hidden, head, targets = inputs(5, 4, 12)
    log_probs, entropies = head_log_probs(hidden * 1e4, head, targets, 1.0)
    wanted, _ = plain(hidden * 1e4, head, targets, 1.0)
    assert torch.allclose(log_probs, wanted)
    assert entropies.isfinite().all()


def test_no_more_than_tiles_of_the_logits_exist():
    """The largest tensor that is made, forward or backward, has as many elements as a tile or the head."""
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    hidden, head, targets = inputs(3000, 8, 20_000, torch.float32)
    with Sizes():
        head_log_probs(hidden, head, targets, 1.0)[0].sum().backward()
    assert max(head.numel(), fused.TILE_LOGITS) >= largest > 0
    assert 10 * fused.TILE_LOGITS < 3000 * 20_000
