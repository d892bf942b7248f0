"""The learner that trains: one policy, one optimizer, one step per batch.

Invariants: a batch without tokens, or with a loss or gradient that is not finite, leaves weights and optimizer as they were;
the result of a step depends neither on how its batch is cut into micro-batches nor on how many ranks share it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo2.config import Config
from echo2.config_learner import LearnerSection
from echo2.dissemination.manifest import Probe
from echo2.learning.batch import MicroBatch, rank_share
from echo2.learning.learner import Learner, LearnerError, batch_metrics
from echo2.learning.log_probs import check_head, completion_log_probs, recompute_layers
from echo2.learning.mismatch import log_prob_differences, worker_metrics
from echo2.learning.objective import Figures, Objective, Tokens, step_metrics
from echo2.learning.packing import enable_packing
from echo2.learning.probe import probe_token_ids, prompt_log_probs
from echo2.learning.sharding import Shards, Whole, like, own_part, whole_weight
from echo2.learning.trained_weights import Adapters, AllWeights, TrainedWeights
from echo2.learning.weight_copy import WeightCopy
from echo2.models.loading import DTYPES, Dtype, load_model, matched_weights, resolve_device
from echo2.protocol import Batch

OPTIMIZER, RANDOM = "optimizer.pt", "random.pt"
ANOTHER_WAY = "lower learner.learning_rate and go on from an earlier checkpoint, or with another run.name if there is none"
ASKED_AGAIN_BYTES = 1 << 20
log = logging.getLogger(__name__)


class TorchLearner(Learner):
    """Float32 weights and AdamW's state at `version`, begun from the model in `model_folder`; of `shards`, this rank's part."""

    def __init__(
        self,
        whole: Whole,
        model_folder: Path,
        settings: LearnerSection,
        objective: Objective,
        temperature: float,
        export_dtype: Dtype,
        shards: Shards,
        trained: TrainedWeights,
        reference: Whole | None = None,
    ) -> None:
        self.model: Any = whole.model
        self._trained = trained
        self._whole = whole
        self._objective = objective
        self._reference = reference
        self.model_folder = model_folder
        self._settings = settings
        self._temperature = temperature
        self._export_dtype: Dtype = export_dtype
        self._shards = shards
        self._autocast = None if settings.compute_dtype == "float32" else DTYPES[settings.compute_dtype]
        self._packed = settings.packing and all(self._packs(each) for each in (whole, reference) if each is not None)
        self._copies: list[torch.cuda.Event] = []
        self._skipped = 0
        self.optimizer = torch.optim.AdamW(
            self._parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )

    @classmethod
    def create(cls, config: Config, model_folder: Path, shards: Shards | None = None) -> TorchLearner:
        """A learner at version 0 with the model in `model_folder`; sets the process's thread count.

        Without `shards` it has the device of the configuration for itself. Raises ConfigError if the model cannot be loaded or
        trained.
        """
        torch.set_num_threads(config.learner.threads)
        shards = shards or Shards(resolve_device(config.learner.device, "learner.device"))
        objective, reference = Objective.of(config), None
        model = load_model(model_folder, "float32", torch.device("cpu"))
        trained = Adapters(model, config.learner.lora, config.run.seed) if config.learner.lora.rank else AllWeights()
        if config.learner.gradient_checkpointing:
            recompute_layers(model)
        whole = shards.cut(model)
        shards.peek(whole, check_head)
        if objective.needs_reference:
            reference = shards.cut(load_model(model_folder, "float32", torch.device("cpu")).requires_grad_(False))
        temperature, dtype = config.sampling.temperature, config.model.dtype
        return cls(whole, model_folder, config.learner, objective, temperature, dtype, shards, trained, reference)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """As `Learner.train_step`; a loss or gradient that is not finite is refused, or skipped as `max_skipped_steps` allows.

        A skipped step has no metrics that are not finite. Refuses a batch that has no tokens.
        """
        self.check_step(batch)
        limit, shards = self._settings.micro_batch_tokens, self._shards
        share = rank_share(
            batch, limit, shards.device, self._objective, packed=self._packed, rank=shards.rank, ranks=shards.ranks
        )
        if share.tokens == 0:
            raise LearnerError(f"step {batch.step}: the batch has {len(batch.groups)} groups but no tokens to train")
        try:
            divisor = self._objective.divisor(share.tokens, share.sequences)
            found = [self._accumulate_gradients(part, divisor) for part in share.parts]
            figures = step_metrics(found, share.tokens, divisor, shards.table)
            norm = torch.nn.utils.clip_grad_norm_(self._parameters(), self._settings.max_grad_norm)
            figures["grad_norm"] = whole_weight(norm).item()
            if math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"]):
                self._update(batch.step)
            else:
                self._skip(batch.step, figures["loss"], figures["grad_norm"])
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        self.differences = log_prob_differences(share, [part.distances for part in found], shards.table)
        figures |= worker_metrics(self.differences) | batch_metrics(batch)
        figures |= {"learning_rate": self._learning_rate(batch.step), "tokens": float(share.tokens)}
        if self._settings.max_skipped_steps:
            figures["learner/skipped"] = float(self._skipped > 0)
        return {name: value for name, value in figures.items() if math.isfinite(value)}

    def begin_export(self) -> Callable[[], bytes]:
        self.require_finite()
        self.probe = self._probed()
        begun = WeightCopy(self._trained.of(self.model), self._export_dtype, self._shards)
        if begun.copied is not None:
            self._copies.append(begun.copied)
        return begun.payload

    def require_finite(self) -> None:
        weights = self._trained.of(self.model)
        faults = torch.stack([~own_part(weight).isfinite().all() for weight in weights.values()])
        found = self._shards.table(faults.float()).amax(0).nonzero().flatten().tolist()
        if found:
            name = list(weights)[found[0]]
            raise LearnerError(f"version {self.version}: weight {name} is not finite: {ANOTHER_WAY}")

    def write_state(self, folder: Path) -> None:
        """The trained weights in float32, and AdamW's state and that of torch's random numbers beside them.

        Whatever the number of ranks, the whole of it is in each file, and the rank that leads writes.
        """
        weights = self._gathered(self._trained.of(self.model))
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {number: self._gathered(state) for number, state in optimizer["state"].items()}
        if not self._shards.leads:
            return
        self._trained.write(weights, self.model_folder, folder)
        _save(optimizer, folder / OPTIMIZER)
        _save(_random_state(self._shards.device), folder / RANDOM)

    @torch.no_grad()
    def read_state(self, folder: Path) -> None:
        """As `Learner.read_state`; each rank takes its part of the files, and nothing travels between them."""
        optimizer = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        random = torch.load(folder / RANDOM, weights_only=True)
        matched = matched_weights(self._trained.of(self.model), self._trained.read(folder))
        parameters = self._parameters()
        for number, state in optimizer["state"].items():
            optimizer["state"][number] = {
                name: like(value, parameters[number]) if value.dim() else value.clone() for name, value in state.items()
            }
        self._hold_for_copies()
        for weight, wanted in matched:
            weight.copy_(like(wanted, weight))
        self.optimizer.load_state_dict(optimizer)
        _set_random_state(random, self._shards.device)

    def close(self) -> None:
        """Memory is all that it holds."""

    def _probed(self) -> Probe:
        token_ids = probe_token_ids(self.model.config.get_text_config().vocab_size)
        log_probs = self._shards.peek(self._whole, prompt_log_probs, token_ids).tolist()
        if not all(map(math.isfinite, log_probs)):
            raise LearnerError(f"version {self.version}: log-probabilities are not finite: {ANOTHER_WAY}")
        return Probe(token_ids=tuple(token_ids), log_probs=tuple(log_probs))

    def _parameters(self) -> list[Tensor]:
        """What the optimizer changes."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def _accumulate_gradients(self, part: MicroBatch, divisor: int) -> Figures:
        log_probs, entropies = self._whole(completion_log_probs, part, self._temperature, self._autocast)
        tokens = Tokens(
            log_probs=log_probs,
            behaviour_log_probs=part.behaviour_log_probs,
            advantages=part.advantages,
            lengths=part.lengths,
            entropies=entropies,
            reference_log_probs=self._reference_log_probs(part),
        )
        figures = self._objective.evaluate(tokens)
        if not part.counts:
            figures = figures.without_weight()
        (figures.loss / divisor).backward()
        return figures

    def _reference_log_probs(self, part: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        return self._shards.peek(self._reference, completion_log_probs, part, self._temperature, self._autocast)[0]

    def _update(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self._hold_for_copies()
        self.optimizer.step()
        self._skipped = 0

    def _skip(self, step: int, loss: float, norm: float) -> None:
        """Leave the weights as they are; raises LearnerError where that happened too often in a row."""
        fault = f"step {step}: loss {loss:g} with gradient norm {norm:g} is not finite, so the step was not taken"
        if self._skipped >= self._settings.max_skipped_steps:
            raise LearnerError(f"{fault}: {ANOTHER_WAY}")
        self._skipped += 1
        log.warning("%s, and the run goes on (%d of learner.max_skipped_steps in a row)", fault, self._skipped)

    def _hold_for_copies(self) -> None:
        """Let the device change the weights only when they are copied."""
        while self._copies:
            torch.cuda.current_stream(self._shards.device).wait_event(self._copies.pop())

    def _packs(self, whole: Whole) -> bool:
        """Whether the model is now ready for packed rows; one that cannot be is told of, and trained with padding."""
        with torch.autocast(self._shards.device.type, self._autocast, enabled=self._autocast is not None):
            fault = self._shards.peek(whole, enable_packing)
        if fault and self._shards.leads:
            log.warning("%s cannot be packed, so its sequences are padded: %s", type(whole.model).__name__, fault)
        return fault is None

    def _learning_rate(self, step: int) -> float:
        warmup_steps = max(1, self._settings.warmup_steps)
        return self._settings.learning_rate * min(1.0, (step + 1) / warmup_steps)

    @torch.no_grad()
    def _gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of all of these, in host memory, one after the other; on the other ranks nothing."""
        wholes = {}
        for name, tensor in tensors.items():
            whole = whole_weight(tensor)
            if self._shards.leads:
                wholes[name] = whole.detach().cpu().contiguous()
        return wholes


def _save(state: dict[str, Any], file: Path) -> None:
    try:
        torch.save(state, file)
    except RuntimeError:
        # Torch keeps to itself what the disk said; one that has no room says it again.
        with file.open("ab", buffering=0) as again:
            again.write(bytes(ASKED_AGAIN_BYTES))
        raise


def _random_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def _set_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """What another kind of device drew does not count here."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
