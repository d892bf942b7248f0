"""The learner that trains: one policy, one optimizer, one step per batch.

Invariants: a batch without tokens, or with a loss or gradient that is not finite, leaves weights and optimizer as they were;
the result of a step does not depend on how its batch is cut into micro-batches.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo2.config import Config
from echo2.config_sections import LearnerSection
from echo2.learning.batch import MicroBatch, micro_batches
from echo2.learning.learner import Learner, LearnerError, batch_metrics
from echo2.learning.log_probs import check_head, completion_log_probs, recompute_layers
from echo2.learning.mismatch import log_prob_differences, worker_metrics
from echo2.learning.objective import Figures, Objective, Tokens, step_metrics
from echo2.learning.packing import enable_packing
from echo2.learning.weight_copy import WeightCopy
from echo2.models.loading import DTYPES, Dtype, export_weights, load_model, load_weights, resolve_device
from echo2.protocol import Batch

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"
log = logging.getLogger(__name__)

MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class TorchLearner(Learner):
    """Float32 weights and AdamW's state at `version`, begun from the model in `model_folder`."""

    def __init__(
        self,
        model: Any,
        model_folder: Path,
        settings: LearnerSection,
        objective: Objective,
        temperature: float,
        export_dtype: Dtype,
        reference: Any = None,
    ) -> None:
        self.model = model
        self._objective = objective
        self._reference = reference
        self.model_folder = model_folder
        self._settings = settings
        self._temperature = temperature
        self._export_dtype: Dtype = export_dtype
        self._autocast = None if settings.compute_dtype == "float32" else DTYPES[settings.compute_dtype]
        self._packed = settings.packing and all(self._packs(each) for each in (model, reference) if each is not None)
        self._copies: list[torch.cuda.Event] = []
        if settings.gradient_checkpointing:
            recompute_layers(model)
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
        objective, reference = Objective.of(config), None
        if objective.needs_reference:
            reference = load_model(model_folder, "float32", resolve_device(config.learner.device)).requires_grad_(False)
        temperature, dtype = config.sampling.temperature, config.model.dtype
        return cls(model, model_folder, config.learner, objective, temperature, dtype, reference)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """As `Learner.train_step`; refuses a batch that has no tokens or gives a loss or gradient that is not finite."""
        self.check_step(batch)
        limit, device = self._settings.micro_batch_tokens, self.model.device
        parts = micro_batches(batch, limit, device, self._objective, packed=self._packed)
        tokens, sequences = sum(len(part.targets) for part in parts), sum(len(part.lengths) for part in parts)
        if tokens == 0:
            raise LearnerError(f"step {batch.step}: the batch has {len(batch.groups)} groups but no tokens to train")
        try:
            divisor = self._objective.divisor(tokens, sequences)
            made = [self._accumulate_gradients(part, divisor) for part in parts]
            figures = step_metrics(made, tokens, divisor)
            figures["grad_norm"] = self._step(batch.step, figures["loss"])
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        self.differences = log_prob_differences(parts, [part.distances for part in made])
        figures |= worker_metrics(self.differences) | batch_metrics(batch)
        return figures | {"learning_rate": self._learning_rate(batch.step), "tokens": float(tokens)}

    def begin_export(self) -> Callable[[], bytes]:
        self.require_finite()
        begun = WeightCopy(self.model, self._export_dtype)
        if begun.copied is not None:
            self._copies.append(begun.copied)
        return begun.payload

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
        self._hold_for_copies()
        load_weights(self.model, (folder / WEIGHTS).read_bytes())
        self.optimizer.load_state_dict(optimizer)

    def _accumulate_gradients(self, part: MicroBatch, divisor: int) -> Figures:
        log_probs, entropies = completion_log_probs(self.model, part, self._temperature, self._autocast)
        tokens = Tokens(
            log_probs=log_probs,
            behaviour_log_probs=part.behaviour_log_probs,
            advantages=part.advantages,
            lengths=part.lengths,
            entropies=entropies,
            reference_log_probs=self._reference_log_probs(part),
        )
        figures = self._objective.evaluate(tokens)
        (figures.loss / divisor).backward()
        return figures

    @torch.no_grad()
    def _reference_log_probs(self, part: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        return completion_log_probs(self._reference, part, self._temperature, self._autocast)[0]

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
        self._hold_for_copies()
        self.optimizer.step()
        return norm

    def _hold_for_copies(self) -> None:
        """Let the device change the weights only when they are copied."""
        while self._copies:
            torch.cuda.current_stream(self.model.device).wait_event(self._copies.pop())

    def _packs(self, model: Any) -> bool:
        """Whether the model is now ready for packed rows; one that cannot be is told of, and trained with padding."""
        device = model.device.type
        with torch.autocast(device, self._autocast, enabled=self._autocast is not None):
            fault = enable_packing(model)
        if fault:
            log.warning("%s cannot be packed, so its sequences are padded: %s", type(model).__name__, fault)
        return fault is None

    def _learning_rate(self, step: int) -> float:
        warmup_steps = max(1, self._settings.warmup_steps)
        return self._settings.learning_rate * min(1.0, (step + 1) / warmup_steps)
