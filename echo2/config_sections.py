"""The sections of a configuration, each a table of its TOML file.

Invariants: nothing here imports torch or network code; unknown keys and values of another type are refused; every name carries
its unit; every field says what it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from echo2.config_base import (
    GREATEST_TEMPERATURE,
    LEAST_TEMPERATURE,
    MOST_BYTES_PER_S,
    MOST_MEMBERS,
    MOST_ROLLOUTS,
    S3_LOCATION,
    Bytes,
    BytesPerS,
    Device,
    Seconds,
    Section,
    Share,
    Steps,
    Threads,
    Tokens,
    Usd,
)

FolderPath = Annotated[Path, Field(strict=False)]

AdvantageEstimator = Literal["grpo", "mean_only", "batch", "rloo"]
LossType = Literal["grpo", "gspo", "cispo", "decoupled_ppo"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo"]
ImportanceSamplingMode = Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
KLEstimator = Literal["k1", "k2", "k3"]


class RunSection(Section):
    """What this run is called, where its record lies, how long it goes on."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "demo"
    """Folder name of the run; letters, digits, dot, dash, underscore."""
    directory: FolderPath = Path("runs")
    """Folder that holds the runs; the record of this one lies in `directory/name`."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of everything random; sampling derives from (seed, group, member)."""
    steps: Steps = 100
    """Learner steps in the whole run, over all its segments."""


class ModelSection(Section):
    """The policy."""

    path: str = "tiny"
    """`tiny` for the built-in Qwen3-architecture model with a character tokenizer, else the folder of a Hugging Face model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format that workers compute in and snapshots travel in; the learner keeps float32 master weights."""
    warm_start_exact_match: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    """Tiny model only: supervised steps go on until this share of sampled completions is right; 0 leaves random weights."""
    cache_directory: FolderPath = Path("~/.cache/echo2")
    """Where the tiny model is kept once made."""


class BatchSection(Section):
    """What one learner step consumes."""

    groups: Annotated[int, Field(ge=1, le=65536)] = 32
    """B: groups (prompts) in a batch."""
    members: Annotated[int, Field(ge=1, le=MOST_MEMBERS)] = 8
    """G: completions sampled for each prompt."""
    drop_zero_variance: bool = True
    """Drop a group whose members all earn the same reward: its advantages are all 0, so it teaches nothing."""

    @model_validator(mode="after")
    def _rollouts_have_room(self) -> Self:
        if self.groups * self.members > MOST_ROLLOUTS:
            raise ValueError(
                f"batch.groups = {self.groups} with batch.members = {self.members} makes {self.groups * self.members} "
                f"completions in one batch, over {MOST_ROLLOUTS}: lower one of them"
            )
        return self


class SamplingSection(Section):
    """How completions are sampled; log-probabilities are those of the distribution that was sampled from."""

    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=GREATEST_TEMPERATURE)] = 1.0
    """Divides the logits before sampling."""
    max_completion_tokens: Tokens = 8
    """A completion that reaches this length ends with finish reason `length`."""


class StalenessSection(Section):
    """How old a policy's rollouts may be, and how often it is published."""

    bound: Annotated[int, Field(ge=0, le=256)] = 2
    """S: a group made by version v may be trained at step t only if t − v ≤ S; unit: learner steps."""
    publish_interval: Annotated[int, Field(ge=1, le=257)] = 1
    """κ: a snapshot is published after every κ-th step; κ ≤ S + 1."""


class ObjectiveSection(Section):
    """What a learner step minimises; see `docs/learning.md` for the formulas."""

    adv_estimator: AdvantageEstimator = "grpo"
    """Advantages: `grpo` (group's mean and deviation), `mean_only`, `batch` (the batch's deviation), `rloo` (leave one out)."""
    loss_type: LossType = "grpo"
    """Policy loss: `grpo` (clipped ratio per token), `gspo` (per sequence), `cispo` (clipped weight), `decoupled_ppo`."""
    loss_agg_mode: Aggregation = "token_mean"
    """How tokens add up: `token_mean`, `seq_mean_token_mean`, `seq_mean_token_sum`, `dr_grpo` (constant length)."""
    clip_ratio_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The ratio is clipped below at 1 − this; `cispo` has no lower bound. `gspo` needs far smaller bounds, about 3e-4."""
    clip_ratio_high: Annotated[float, Field(gt=0.0, le=1e6)] = 0.28
    """… and above at 1 + this."""
    clip_ratio_c: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """Dual clip: a negative advantage's loss stays below this times its size; 0 sets no such bound."""
    importance_sampling_mode: ImportanceSamplingMode = "off"
    """`decoupled_ppo` only: weights from the behaviour to the proximal policy, by token or sequence, truncated or masked."""
    importance_sampling_clip_min: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """Weights below are raised to this (`…_truncate`) or made 0 (`…_mask`)."""
    importance_sampling_clip_max: Annotated[float, Field(gt=0.0, le=1e9)] = 2.0
    """Weights above are lowered to this (`…_truncate`) or made 0 (`…_mask`)."""
    beta: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Coefficient of the KL divergence from the run's first policy, which is then kept in memory; 0 leaves it out."""
    kl_estimator: KLEstimator = "k3"
    """How that divergence is estimated from sampled tokens."""
    entropy_coef: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Coefficient of the entropy bonus; 0 leaves it out."""
    overlong: Literal["keep", "mask", "soft"] = "keep"
    """Completions cut off by length: `keep` trains them like others, `mask` not at all; `soft` lowers rewards of long ones."""
    overlong_buffer_tokens: Tokens = 2
    """`soft`: the last tokens before `sampling.max_completion_tokens`, over which the penalty rises from 0."""
    overlong_penalty_factor: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    """`soft`: what the reward of a completion of full length loses."""

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        if self.loss_type == "gspo" and self.loss_agg_mode != "seq_mean_token_mean":
            raise ValueError(
                f"objective.loss_type = 'gspo' with objective.loss_agg_mode = {self.loss_agg_mode!r} weighs a ratio that "
                f"belongs to the whole sequence by its length: set objective.loss_agg_mode=seq_mean_token_mean"
            )
        if self.loss_type == "cispo" and self.clip_ratio_c > 0.0:
            raise ValueError(
                f"objective.clip_ratio_c = {self.clip_ratio_c:g} means nothing with objective.loss_type = 'cispo', whose "
                f"weights are bounded already: set it to 0"
            )
        if 0.0 < self.clip_ratio_c <= 1.0 + self.clip_ratio_high:
            raise ValueError(
                f"objective.clip_ratio_c = {self.clip_ratio_c:g} must exceed 1 + objective.clip_ratio_high = "
                f"{1.0 + self.clip_ratio_high:g} (3 is usual), or be 0 for no dual clip"
            )
        return self

    @model_validator(mode="after")
    def _corrected_once(self) -> Self:
        mode = self.importance_sampling_mode
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if self.loss_type == "decoupled_ppo" and mode == "off":
            raise ValueError(
                "objective.loss_type = 'decoupled_ppo' with objective.importance_sampling_mode = 'off' takes stale rollouts "
                "for fresh ones: set objective.importance_sampling_mode=token_truncate, or objective.loss_type=grpo"
            )
        if self.loss_type != "decoupled_ppo" and mode != "off":
            raise ValueError(
                f"objective.importance_sampling_mode = {mode!r} with objective.loss_type = {self.loss_type!r} corrects twice, "
                f"since its ratio is against the behaviour policy already: set "
                "objective.importance_sampling_mode=off, or objective.loss_type=decoupled_ppo"
            )
        if low >= high:
            raise ValueError(
                f"objective.importance_sampling_clip_min = {low:g} is not below objective.importance_sampling_clip_max = "
                f"{high:g}: lower the first"
            )
        return self


class HubSection(Section):
    """The service between learner and workers."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 lets the system choose a free one."""
    lease_timeout_s: Seconds = 120.0
    """A lease of which nothing is handed in within this time, or again within it, is given to another worker."""
    max_attempts: Annotated[int, Field(ge=1, le=1000)] = 5
    """A group whose leases or members failed this often is given up as `failed`."""
    heartbeat_timeout_s: Seconds = 15.0
    """A worker that was silent for this long is lost; its leases are given to others."""
    scoring_processes: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that score completions."""
    scoring_timeout_s: Seconds = 10.0
    """Longest time for scoring one completion; over it, scoring has failed (which is not a reward of 0)."""
    max_body_bytes: Annotated[int, Field(ge=1000, le=10**10)] = 256 * 1024 * 1024
    """Largest request body that is accepted."""
    start_timeout_s: Seconds = 90.0
    """Longest wait for the hub to answer after it was started."""


class WorkerSection(Section):
    """A rollout worker."""

    engine: Literal["transformers", "vllm", "simulated"] = "transformers"
    """What generates: `transformers` on CPU or GPU, `vllm` faster, `simulated` for rehearsals without a model."""
    slots: Annotated[int, Field(ge=1, le=65536)] = 16
    """Most groups that one worker has under way; its memory may hold fewer."""
    update_mode: Literal["drain", "in_flight"] = "drain"
    """New weights are loaded once what is under way is finished (`drain`), or amidst it (`in_flight`), with any engine."""
    hand_in_tokens: Tokens = 512
    """Tokens of a completion after which they are handed in, so that a worker that dies loses no more, and then again."""
    threads: Threads = 1
    """CPU threads of a worker's process."""
    device: Device = "auto"
    """`auto` takes CUDA where there is one, else the CPU."""
    memory_share: Share = 0.9
    """`vllm` engine: share of a GPU's memory for weights, keys and values."""
    cache_bytes: Bytes = 0
    """`vllm` engine: memory for keys and values; 0 for the rest of that share, or 256 MiB on a CPU."""
    heartbeat_interval_s: Annotated[float, Field(ge=1e-3, le=3600.0)] = 2.0
    """Time between heartbeats."""
    orphan_timeout_s: Seconds = 120.0
    """A worker that cannot reach its hub for this long ends itself."""
    preemption_notice: Literal["auto", "none", "aws", "gcp", "azure"] = "auto"
    """Whose metadata service is asked whether this machine is about to be taken back; `auto` goes by the machine's maker."""
    spool_directory: FolderPath = Path("~/.cache/echo2/spool")
    """Where generated groups wait while the hub is away, also for the next worker of the same run and name."""
    request_timeout_s: Seconds = 30.0
    """Time-out of one request to the hub, long-polls excepted by the time they ask for."""
    peer_host: str = ""
    """Address on which other workers may connect to pass snapshots on; empty for all, or 127.0.0.1 where the hub is there."""
    peer_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port for that; 0 lets the system choose a free one."""
    peer_advertised_host: str = ""
    """Address that the others are told; empty for the one from which this worker reaches the hub."""
    snapshot_source: Literal["auto", "object_store"] = "auto"
    """`auto`: the broadcast, else the hub, else the run's object store; `object_store`: that store, else the hub."""
    simulated_group_latency_s: Seconds = 0.2
    """`simulated` engine: seconds that a group takes, on average."""
    simulated_latency_cv: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """`simulated` engine: standard deviation of these seconds over their mean, lognormal; 0 makes all groups alike."""


class FleetSection(Section):
    """The workers that ECHO-2 starts and watches."""

    workers: Annotated[int, Field(ge=0, le=4096)] = 2
    """Workers to keep running; 0 leaves starting them to you (`echo2 worker`)."""
    start_timeout_s: Seconds = 180.0
    """Longest wait for the first worker to register."""
    restart_backoff_s: Seconds = 1.0
    """Pause before a worker that died is replaced; doubles with each early death, up to a minute."""
    price_usd_per_hour: Usd = 0.0
    """What one local worker is taken to cost."""
    python: str = ""
    """Python program of another environment for these workers, such as `.venv-vllm/bin/python`; empty for the learner's own."""


class DisseminationSection(Section):
    """How snapshots reach the workers."""

    chunk_bytes: Annotated[int, Field(ge=0, le=64 * 1024 * 1024)] = 0
    """Size of the pieces that are sent and checked one by one; 0 for what fits the uplinks of the last broadcast."""
    peers: bool = True
    """Workers pass snapshots on to each other, over sockets of their own; False has each of them fetch from the hub."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the hub's host for the broadcast among peers; 0 lets the system choose a free one."""
    deltas: bool = True
    """Send workers the lossless difference from the version that they hold, where that is smaller than the whole."""
    retain_snapshots: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Newest snapshots to keep; at least S + κ, so that none in use is deleted."""
    timeout_s: Seconds = 120.0
    """Longest wait for all live workers to hold a new snapshot; who is late is named, and the run goes on."""
    uplink_bytes_per_s: BytesPerS = 0.0
    """Most that the hub sends of snapshots, by broadcast and HTTP together; 0 sets no cap."""
    object_store: str = ""
    """`s3://BUCKET/PREFIX` of a bucket that the learner copies snapshots to and workers read from; empty for none."""
    object_store_endpoint_url: str = ""
    """Where the bucket's server is, such as `https://minio.example:9000`; empty for AWS."""
    object_store_concurrency: Annotated[int, Field(ge=1, le=64)] = 8
    """Parts or ranges of one snapshot that travel to or from the bucket at the same time."""
    object_store_anchor_interval: Annotated[int, Field(ge=1, le=10_000)] = 8
    """After so many versions as deltas one is copied to the bucket in full as well, or sooner if they come to as many bytes."""

    @field_validator("chunk_bytes")
    @classmethod
    def _not_mere_headers(cls, chunk_bytes: int) -> int:
        if 0 < chunk_bytes < 1024:
            raise ValueError(
                f"dissemination.chunk_bytes = {chunk_bytes} makes chunks that are mostly headers: choose 1024 or more, or 0 "
                "for what fits"
            )
        return chunk_bytes

    @model_validator(mode="after")
    def _object_store_can_be(self) -> Self:
        store, endpoint = self.object_store, self.object_store_endpoint_url
        if store and not re.fullmatch(S3_LOCATION, store, re.ASCII):
            raise ValueError(
                f"dissemination.object_store = {store!r} is not of the form s3://BUCKET/PREFIX: for example s3://weights/echo2"
            )
        if endpoint and not re.fullmatch(r"https?://[^/?#\s@]+/?", endpoint):
            raise ValueError(
                f"dissemination.object_store_endpoint_url = {endpoint!r} is not of the form https://HOST:PORT: credentials and "
                f"paths do not belong there"
            )
        return self


class CapacitySection(Section):
    """What the capacity model takes for its terms before a run has measured them."""

    learner_step_s: Annotated[float, Field(ge=1e-3, le=1e5)] = 1.0
    """T: seconds of learner work per step."""
    group_latency_s: Annotated[float, Field(ge=1e-3, le=1e5)] = 1.0
    """L: seconds from a lease to its scored group, the mean; the slow end of a batch follows from it."""
    group_latency_cv: Annotated[float, Field(ge=0.0, le=10.0)] = 0.25
    """Standard deviation of L over its mean; 0 where all groups take as long."""
    worker_groups_per_s: Annotated[float, Field(ge=1e-4, le=1e5)] = 20.0
    """Groups per second that one busy worker completes; μ is this times the number of workers, and μ·L groups are under way."""
    accepted_share: Annotated[float, Field(ge=0.02, le=1.0)] = 0.8
    """α: share of the scored groups that are trained, the others being filtered; what expires comes out of the model."""
    transfer_s: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """D_tx: seconds that one snapshot occupies the links. Left out, it follows from the bytes and links, or is 0.1 s."""
    snapshot_bytes: Bytes = 0
    """F: bytes of a snapshot in full; 0 where that is not known (a simulated learner's is)."""
    delta_share: Share = 0.05
    """Bytes of a delta over those of the snapshot in full; where `model.dtype` is float32 deltas save little."""
    worker_uplink_bytes_per_s: BytesPerS | None = None
    """What a worker passes on of a snapshot, on average, 0 where nobody can connect to it. Left out: not known."""
    worker_downlink_bytes_per_s: Annotated[float, Field(gt=0.0, le=MOST_BYTES_PER_S)] | None = None
    """What the slowest worker can receive of a snapshot. Left out: more than it is sent."""
    dissemination_fixed_s: Annotated[float, Field(ge=0.0, le=1e6)] = 0.2
    """D_fix: export, encoding, latency and loading, in seconds."""
    target_utilisation: Share = 0.97
    """Learner utilisation that a plan aims at."""


class TrackingSection(Section):
    """Where the metrics of each step go, besides `report/metrics.jsonl`."""

    tensorboard: bool = True
    """Event files for TensorBoard in the run's folder `tensorboard/`."""
    wandb: bool = False
    """A run at Weights & Biases (extra `wandb`); its own variables count, such as `WANDB_MODE=offline`."""
    wandb_project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "echo2"
    """Project that this run belongs to there."""


class FlowSection(Section):
    """How the run appears in Prefect."""

    segment_steps: Steps = 500
    """Learner steps in one flow run; the next one goes on from the checkpoint (Prefect slows beyond some 5,000 task runs)."""
    artifact_interval_s: Seconds = 10.0
    """Time between updates of the progress, table and report artifacts."""
