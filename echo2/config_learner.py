"""The learner's section of a configuration.

Invariants: as those of `echo2/config_sections.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from echo2.config_base import MOST_STEPS, S3_LOCATION, Device, Seconds, Section, Steps, Threads


class LoraSection(Section):
    """Low-rank adapters: the model's own weights stay as they are; adapters alone are trained, published and saved."""

    rank: Annotated[int, Field(ge=0, le=16384)] = 0
    """Rank of an adapter's two matrices; 0 trains the model's own weights. Above 0 the learner needs the extra `lora`."""
    alpha: Annotated[float, Field(gt=0.0, le=1e6)] = 32.0
    """What an adapter adds is scaled by this over its rank."""
    target_modules: list[str] = Field(default=[])
    """Linear layers that get an adapter, such as `["q_proj", "v_proj"]`; empty for all but the head."""


class LearnerSection(Section):
    """The learner's step."""

    engine: Literal["torch", "simulated"] = "torch"
    """What trains: `torch` on CPU or GPU, `simulated` for rehearsals without a model, with `simulated` workers."""
    learning_rate: Annotated[float, Field(gt=0.0, le=10.0)] = 3e-4
    """AdamW's step size after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 5
    """Steps over which the learning rate rises linearly from 0."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW's first-moment decay."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """AdamW's second-moment decay."""
    weight_decay: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0.0, le=1e12)] = 1.0
    """Gradients are scaled down to this norm."""
    max_skipped_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Steps in a row that leave the weights as they are because loss or gradient is not finite; one more ends the run."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=10**8)] = 16384
    """Most tokens (padding included) in one forward pass; the result does not depend on it, memory and speed do."""
    packing: bool = True
    """Sequences lie end to end in one row, where the model allows it; otherwise each is padded to the longest beside it."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the model's matrix products; weights, optimizer and the head's softmax stay in float32."""
    gradient_checkpointing: bool = False
    """Keep each layer's input alone and compute the rest again for the gradient: less memory, about a third more time."""
    lora: LoraSection = LoraSection()
    """Adapters instead of the model's own weights."""
    checkpoint_interval: Steps = 10
    """A checkpoint is written after every n-th step and at the end of a segment."""
    keep_checkpoints: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Newest checkpoints to keep, which a run goes on from."""
    keep_best: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Checkpoints to keep besides, as models: those with the highest mean of `best_metric` since the checkpoint before."""
    best_metric: str = "reward"
    """Metric of a step by which the best checkpoints are chosen; more is better."""
    checkpoints: str = ""
    """Where checkpoints lie: empty for the run's own folder, else another folder, or `s3://BUCKET/PREFIX` (extra `store`)."""
    device: Device = "auto"
    """`auto` takes CUDA where there is one, else the CPU."""
    devices: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices of this machine that share weights, gradients, optimizer and batch, with a process (rank) for each."""
    rank_timeout_s: Seconds = 600.0
    """Longest that one rank waits for another within a step; then the run ends and names it."""
    threads: Threads = 1
    """CPU threads of the learner's process; 1 is right where learner and workers share few cores."""
    simulated_step_s: Seconds = 0.5
    """`simulated` engine: seconds that a step takes."""
    simulated_snapshot_bytes: Annotated[int, Field(ge=4, le=10**12)] = 1_000_000
    """`simulated` engine: size of a snapshot's weights."""

    @model_validator(mode="after")
    def _devices_can_share(self) -> Self:
        if self.devices > 1 and self.engine == "simulated":
            raise ValueError(
                f"learner.devices = {self.devices} with learner.engine = 'simulated', which has nothing to share: "
                "set learner.devices=1"
            )
        if self.devices > 1 and self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"learner.device = {self.device!r} names one device for learner.devices = {self.devices}: set it to auto, cpu "
                f"or cuda, of which the first {self.devices} are taken"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_a_model(self) -> Self:
        if self.lora.rank and self.engine == "simulated":
            raise ValueError(
                f"learner.lora.rank = {self.lora.rank} with learner.engine = 'simulated', which has no layers: set rank to 0"
            )
        return self

    @model_validator(mode="after")
    def _checkpoints_have_a_place(self) -> Self:
        if "://" in self.checkpoints and not re.fullmatch(S3_LOCATION, self.checkpoints, re.ASCII):
            raise ValueError(
                f"learner.checkpoints = {self.checkpoints!r} is neither a folder nor of the form s3://BUCKET/PREFIX: "
                f"for example s3://weights/checkpoints"
            )
        return self
