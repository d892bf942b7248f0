"""The learner that trains: one policy, one optimizer, one step per batch.

Invariants: a batch without tokens, or with a loss or gradient that is not finite, leaves weights and optimizer as they were;
the result of a step does not depend on how its batch is cut into micro-batches.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo2.config import Config
from echo2.config_sections import LearnerSection
from echo2.learning.batch import MicroBatch, micro_batches
from echo2.learning.learner import Learner, LearnerError, batch_metrics
from echo2.learning.log_probs import check_head, completion_log_probs
from echo2.learning.losses import TokenSums, clipped_policy_loss
from echo2.models.loading import Dtype, export_weights, load_model, load_weights, resolve_device
from echo2.protocol import Batch

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class TorchLearner(Learner):
    """Float32 weights and AdamW's state at `version`, begun from the model in `model_folder`."""

    def __init__(
        self, model: Any, model_folder: Path, settings: LearnerSection, temperature: float, export_dtype: Dtype
    ) -> None:
        self.model = model
        self.model_folder = model_folder
        self._settings = settings
        self._temperature = temperature
        self._export_dtype: Dtype = export_dtype
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )

    @classmethod
    def create(cls, config: Config, model_folder: Path) -> TorchLearner:
        """A learner at version 0 with the model in `model_folder`; sets the process's thread count.

        Raises ConfigError if the model cannot be loaded or trained.
        """
        torch.set_num_threads(config.learner.threads)
        model = load_model(model_folder, "float32", resolve_device(config.learner.device))
        check_head(model)
        return cls(model, model_folder, config.learner, config.sampling.temperature, config.model.dtype)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """As `Learner.train_step`; refuses a batch that has no tokens or gives a loss or gradient that is not finite."""
        self.check_step(batch)
        parts = micro_batches(batch, self._settings.micro_batch_tokens, self.model.device)
        tokens = sum(len(part.targets) for part in parts)
        if tokens == 0:
            raise LearnerError(f"step {batch.step}: the batch has {len(batch.groups)} groups but no tokens to train")
        try:
            sums = [self._accumulate_gradients(part, tokens) for part in parts]
            figures = _means(sums, tokens)
            figures["grad_norm"] = self._step(batch.step, figures["loss"])
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return figures | {"learning_rate": self._learning_rate(batch.step), "tokens": float(tokens)} | batch_metrics(batch)

    def export(self) -> bytes:
        self.require_finite()
        return export_weights(self.model, self._export_dtype)

    def require_finite(self) -> None:
        for name, weight in self.model.named_parameters():
            if not weight.isfinite().all():
                raise LearnerError(f"version {self.version}: weight {name} is not finite: go on from an earlier checkpoint")

    def write_state(self, folder: Path) -> None:
        """An ordinary Hugging Face model folder with the learner's float32 weights, and AdamW's state."""
        (folder / WEIGHTS).write_bytes(export_weights(self.model, "float32"))
        torch.save(self.optimizer.state_dict(), folder / OPTIMIZER)
        for name in MODEL_FILES:
            if (self.model_folder / name).is_file():
                shutil.copyfile(self.model_folder / name, folder / name)

    def read_state(self, folder: Path) -> None:
        optimizer = torch.load(folder / OPTIMIZER, map_location=self.model.device, weights_only=True)
        load_weights(self.model, (folder / WEIGHTS).read_bytes())
        self.optimizer.load_state_dict(optimizer)

    def _accumulate_gradients(self, part: MicroBatch, tokens: int) -> tuple[TokenSums, Tensor]:
        log_probs, entropies = completion_log_probs(self.model, part, self._temperature)
        low, high = self._settings.clip_ratio_low, self._settings.clip_ratio_high
        sums = clipped_policy_loss(log_probs, part.behaviour_log_probs, part.advantages, low, high)
        (sums.loss / tokens).backward()
        return sums, entropies.sum()

    def _step(self, step: int, loss: float) -> float:
        """Apply the gradients if they are finite; returns their norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise LearnerError(
                f"step {step}: loss {loss:g} with gradient norm {norm:g} is not finite, so the step was not taken: lower "
                f"learner.learning_rate and go on from the last checkpoint"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.step()
        return norm

    def _learning_rate(self, step: int) -> float:
        warmup_steps = max(1, self._settings.warmup_steps)
        return self._settings.learning_rate * min(1.0, (step + 1) / warmup_steps)


def _means(parts: list[tuple[TokenSums, Tensor]], tokens: int) -> dict[str, float]:
    """Token means over the whole batch, fetched from the device at once."""
    rows = [
        torch.stack([s.loss.detach(), s.clipped_low, s.clipped_high, s.kl, s.ratio, entropy, s.max_ratio])
        for s, entropy in parts
    ]
    table = torch.stack(rows).double()
    loss, low, high, kl, ratio, entropy = (table[:, :-1].sum(0) / tokens).tolist()
    return {
        "loss": loss,
        "entropy": entropy,
        "kl": kl,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "sampling/importance_sampling_ratio/mean": ratio,
        "sampling/importance_sampling_ratio/max": table[:, -1].max().item(),
    }
