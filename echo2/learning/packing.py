"""Several sequences in one row, without padding and with what they share held once: attention that keeps them apart, and the
proof that a model uses it.

Invariants: a token attends to its own sequence alone, since each is given to the attention kernel by itself; nothing of the
size of a row squared is made; a model is trained on packed rows only after it gave, on a row of several sequences, what it
gives for each alone, and after a change to one of them changed no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "echo2_packed"
UNSUPPORTED = ("softcap", "position_bias", "s_aux")
"""What some models' attention adds to the scores."""
PROBE_LENGTHS = (5, 9, 9, 24)
PROBE_SHARED = 3
"""Tokens with which the two middle sequences of the probe begin."""
LONGEST_WINDOW = 8192
"""Tokens; the probe takes a sequence that is longer than the model's sliding window."""
TOLERANCE, ROUGH_TOLERANCE = 1e-4, 5e-2
"""Of hidden states, relative to their largest; kernels differ by rounding, more so where products are in bfloat16."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the sequences lie in a row of T tokens; laid out one after the other, they have E ≥ T tokens."""

    runs: tuple[tuple[int, int], ...]
    """(sequences, length) of neighbours that are equally long: one call of the kernel each."""
    position_ids: Tensor
    """[1, T] int64: each token's place in its sequence."""
    bounds: Tensor
    """[sequences + 1] int32: where each begins among the E, and the end of the last."""
    places: Tensor | None
    """[E] int64: where each sequence's tokens lie in the row; None where they lie there as they come."""
    firsts: Tensor | None
    """[T] int64: of the E, the first that is each token of the row."""

    @property
    def longest(self) -> int:
        return max(length for _, length in self.runs)


def layout(sequences: list[np.ndarray], device: torch.device) -> Layout:
    """The layout of a row, each sequence given as the places of its tokens.

    A token that several sequences share must have the same tokens before it in each of them, since it is computed once.
    """
    lengths = [len(sequence) for sequence in sequences]
    places = np.concatenate(sequences)
    firsts = np.unique(places, return_index=True)[1]
    positions = np.concatenate([np.arange(length) for length in lengths])[firsts]
    runs = tuple((len(list(run)), length) for length, run in groupby(lengths) if length)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    in_order = np.array_equal(places, np.arange(len(firsts)))
    return Layout(
        runs,
        torch.from_numpy(positions)[None].to(device),
        bounds.to(device, torch.int32),
        None if in_order else torch.from_numpy(places).to(device),
        None if in_order else torch.from_numpy(firsts).to(device),
    )


def packed_hidden(model: Any, token_ids: Tensor, packed: Layout) -> Tensor:
    """Last hidden states [1, T, H] of the row `token_ids` [1, T]; the model's attention must be `PACKED_ATTENTION`."""
    # A mask of four dimensions is taken as it is, so that transformers makes none of [T, T]; no attention here looks at it.
    return model.base_model(
        input_ids=token_ids,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=token_ids.device),
        position_ids=packed.position_ids,
        use_cache=False,
        packed_layout=packed,
    ).last_hidden_state


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each sequence over itself, in the form that transformers asks of an attention function; without a
    layout, `sdpa` as ever. What sequences share is attended to by each, as if it were its own.

    `query` is [1, heads, T, size], `key` and `value` [1, key heads, T, size]; the first result is [1, T, heads, size]. Raises
    ValueError if the model asks for more than that.
    """
    if packed_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise ValueError(f"{name} in its attention")
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    query, key, value = (_laid_out(tensor.to(dtype), packed_layout.places) for tensor in (query, key, value))
    if query.is_cuda and dtype in (torch.bfloat16, torch.float16):
        output = _variable_length_attention(query, key, value, packed_layout, scaling, sliding_window)
    else:
        output = _run_by_run_attention(query, key, value, packed_layout, scaling, sliding_window)
    if packed_layout.firsts is not None:
        output = output.index_select(0, packed_layout.firsts)
    return output[None], None


def _laid_out(tensor: Tensor, places: Tensor | None) -> Tensor:
    """[1, heads, T, size] as [E, heads, size]."""
    tokens = tensor[0].transpose(0, 1)
    return tokens if places is None else tokens.index_select(0, places)


def _run_by_run_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: Layout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    outputs, start = [], 0
    for count, length in packed.runs:
        stop = start + count * length
        parts = (tensor[start:stop].unflatten(0, (count, length)).transpose(1, 2) for tensor in (query, key, value))
        window = _window_mask(length, sliding_window, query.device)
        output = nn.functional.scaled_dot_product_attention(
            *parts, attn_mask=window, is_causal=window is None, scale=scaling, enable_gqa=True
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(outputs)


@torch.no_grad()
def enable_packing(model: Any) -> str | None:
    """Switch `model` to packed attention, if the probe allows; otherwise leave it as it was and return why not."""
    settings = model.config
    kinds = set(getattr(settings, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of the kind {min(kinds)}"
    longest = getattr(settings, "max_position_embeddings", None) or 2 * LONGEST_WINDOW
    window = getattr(settings, "sliding_window", None) or 0
    if LONGEST_WINDOW < window < longest:
        return f"its sliding window of {window} tokens is too long to probe"
    reach = window + 8 if window < longest else 0
    lengths = [min(length, longest) for length in (*PROBE_LENGTHS[:-1], max(PROBE_LENGTHS[-1], reach))]
    former = settings._attn_implementation
    rows = [torch.arange(7 * i, 7 * i + length, device=model.device) % settings.vocab_size for i, length in enumerate(lengths)]
    rows[2][:PROBE_SHARED] = rows[1][:PROBE_SHARED]
    alone = [model.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows]
    try:
        model.set_attn_implementation(PACKED_ATTENTION)
        fault = _fault(model, rows, torch.cat(alone))
    except (TypeError, ValueError, RuntimeError) as error:
        fault = f"it does not take the attention that packing needs ({str(error).splitlines()[0]})"
    if fault:
        model.set_attn_implementation(former)
    return fault


def _fault(model: Any, rows: list[Tensor], alone: Tensor) -> str | None:
    if model.config._attn_implementation != PACKED_ATTENTION:
        return "it does not let its attention be replaced"
    first, second, third, fourth = np.split(np.arange(sum(map(len, rows))), np.cumsum([len(row) for row in rows])[:-1])
    third, fourth = third - PROBE_SHARED, fourth - PROBE_SHARED
    sequences = [first, second, np.concatenate([second[:PROBE_SHARED], third[PROBE_SHARED:]]), fourth]
    packed = layout(sequences, model.device)
    row = torch.cat([rows[0], rows[1], rows[2][PROBE_SHARED:], rows[3]])
    before = packed_hidden(model, row[None], packed)[0]
    error = ((before[np.concatenate(sequences)] - alone).abs().max() / alone.abs().max()).item()
    rough = torch.is_autocast_enabled(model.device.type) or model.dtype in (torch.bfloat16, torch.float16)
    if not error <= (ROUGH_TOLERANCE if rough else TOLERANCE):
        return f"packed and single sequences differ by {error:.1e} of the largest hidden state"
    own = torch.from_numpy(second[PROBE_SHARED:]).to(row.device)
    changed = row.index_copy(0, own, (row[own] + 1) % model.config.vocab_size)
    after = packed_hidden(model, changed[None], packed)[0]
    others = torch.ones(len(row), dtype=torch.bool, device=row.device).index_fill(0, own, False)
    if not torch.equal(before[others], after[others]):
        return "a change to one sequence of a row changes others"
    return None


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[length, length] bool: causal, and no further back than `window` tokens; None where causal alone says the same."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _variable_length_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: Layout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """All sequences in one call of torch's flash attention, which masks nothing that it need not compute."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    bounds, longest = packed.bounds, packed.longest
    return varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scaling, window_size=window, enable_gqa=True)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
