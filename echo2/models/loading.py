"""Models from Hugging Face folders, and their weights as safetensors bytes.

Invariants: nothing is fetched from a network; weights that share memory (tied embeddings) travel once and stay tied; weights
are taken whole or not at all, so a model never mixes two versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from echo2.dissemination.manifest import Content
from echo2.errors import ConfigError, SnapshotError
from echo2.models.tensors import tensors_in

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str, setting: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. Raises ConfigError, naming `setting`, for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{setting} = {name!r} cannot be used ({str(error).splitlines()[0]}): set it to auto or cpu"
        ) from None
    return device


def load_model(folder: Path, dtype: Dtype, device: torch.device) -> Any:
    """The causal language model in `folder`, in evaluation mode, since dropout would part the learner from the workers.

    Raises ConfigError if the folder holds no such model or lacks some of its weights.
    """
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=DTYPES[dtype], attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model {folder} cannot be loaded ({error}): model.path must hold a causal language model") from error
    if report["missing_keys"] or report["mismatched_keys"]:
        problem = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))[0]
        raise ConfigError(f"model {folder} lacks fitting weights for {problem}: fetch the model again")
    return model.to(device).eval()


def build_model(folder: Path, dtype: Dtype, device: torch.device) -> Any:
    """The model that `folder/config.json` describes, in evaluation mode, with arbitrary weights: for one that is to be loaded.

    Raises ConfigError if the description is missing or of no causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {folder} cannot be built ({error}): config.json must describe a causal language model"
        ) from error
    return model.eval()


def export_weights(model: nn.Module, dtype: Dtype) -> bytes:
    """All weights as one safetensors message in `dtype`; of weights that share memory only the first name is kept."""
    weights = {}
    for name, weight in untied_weights(model).items():
        weight = weight.detach()
        weights[name] = (weight.to(DTYPES[dtype]) if weight.is_floating_point() else weight).cpu().contiguous()
    return save(weights, metadata={"format": "pt"})


def load_weights(model: nn.Module, snapshot: Content) -> None:
    """Copy the weights of a safetensors message into `model`, in place, cast to the model's own number format.

    Raises SnapshotError, with the model unchanged, unless names and shapes are exactly those of `export_weights`.
    """
    with torch.no_grad():
        for weight, wanted in matched_weights(untied_weights(model), tensors_in(snapshot)):
            weight.copy_(wanted)


def matched_weights(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each of a model's own weights with what it is to be. Raises SnapshotError unless names and shapes are the same."""
    for name in sorted(weights.keys() ^ expected.keys()):
        fault = "lacks the weight" if name in expected else "has an unknown weight"
        raise SnapshotError(f"snapshot {fault} {name}: it is of another model")
    for name, weight in sorted(expected.items()):
        if weights[name].shape != weight.shape:
            shapes = f"{tuple(weights[name].shape)} instead of {tuple(weight.shape)}"
            raise SnapshotError(f"snapshot's weight {name} has the shape {shapes}: it is of another model")
    return [(weight, weights[name]) for name, weight in expected.items()]


def untied_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, each object under its first name only."""
    first_names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: weight for name, weight in state.items() if first_names.setdefault(id(weight), name) == name}
