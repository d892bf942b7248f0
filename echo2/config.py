"""The configuration of a run: TOML files, dotted overrides, checks across sections.

Invariants: nothing here imports torch or network code; a configuration that validates can start; later files and overrides win
over earlier ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError, model_validator

from echo2.config_activation import ActivationSection
from echo2.config_base import Section
from echo2.config_evaluation import EvaluationSection
from echo2.config_learner import LearnerSection
from echo2.config_sections import (
    BatchSection,
    CapacitySection,
    DisseminationSection,
    FleetSection,
    FlowSection,
    HubSection,
    ModelSection,
    ObjectiveSection,
    RunSection,
    SamplingSection,
    StalenessSection,
    TrackingSection,
    WorkerSection,
)
from echo2.config_tasks import DEFAULT_TASK, TaskSection
from echo2.errors import ConfigError


class Config(Section):
    """Everything that a run is made from."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = DEFAULT_TASK
    batch: BatchSection = BatchSection()
    sampling: SamplingSection = SamplingSection()
    staleness: StalenessSection = StalenessSection()
    evaluation: EvaluationSection = EvaluationSection()
    learner: LearnerSection = LearnerSection()
    objective: ObjectiveSection = ObjectiveSection()
    hub: HubSection = HubSection()
    worker: WorkerSection = WorkerSection()
    fleet: FleetSection = FleetSection()
    dissemination: DisseminationSection = DisseminationSection()
    capacity: CapacitySection = CapacitySection()
    activation: ActivationSection = ActivationSection()
    tracking: TrackingSection = TrackingSection()
    flow: FlowSection = FlowSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        bound, interval = self.staleness.bound, self.staleness.publish_interval
        if interval > bound + 1:
            raise ValueError(
                f"staleness.publish_interval = {interval} exceeds staleness.bound + 1 = {bound + 1}: no snapshot could be "
                f"fresh enough for every step; lower publish_interval to {bound + 1} or raise bound to {interval - 1}"
            )
        if self.evaluation.every_steps % interval:
            raise ValueError(
                f"evaluation.every_steps = {self.evaluation.every_steps} is not a multiple of staleness.publish_interval = "
                f"{interval}, so workers never hold some of the versions to evaluate: choose a multiple of {interval}"
            )
        if self.dissemination.retain_snapshots < bound + interval:
            raise ValueError(
                f"dissemination.retain_snapshots = {self.dissemination.retain_snapshots} is below staleness.bound "
                f"+ publish_interval = {bound + interval}: a snapshot in use would be deleted; raise it to {bound + interval}"
            )
        if self.batch.drop_zero_variance and self.batch.members == 1:
            raise ValueError(
                "batch.members = 1 with batch.drop_zero_variance = true drops every group, since one member has no variance; "
                "raise members to 2 or more"
            )
        buffer_tokens, limit = self.objective.overlong_buffer_tokens, self.sampling.max_completion_tokens
        if self.objective.overlong == "soft" and buffer_tokens > limit:
            raise ValueError(
                f"objective.overlong_buffer_tokens = {buffer_tokens} exceeds sampling.max_completion_tokens = {limit}, so that "
                f"every completion would be punished: lower it (a fifth of the limit is usual)"
            )
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Config:
        if self.dissemination.peers and self.hub.port and self.hub.port == self.dissemination.port:
            raise ValueError(
                f"hub.port = dissemination.port = {self.hub.port}, and the hub needs a port for each: choose another one, or 0 "
                "to let the system choose"
            )
        return self

    @model_validator(mode="after")
    def _workers_can_be(self) -> Config:
        if self.worker.peer_port and self.fleet.workers > 1:
            raise ValueError(
                f"worker.peer_port = {self.worker.peer_port} is one port, and fleet.workers = {self.fleet.workers} share a "
                f"machine: leave worker.peer_port at 0, or start the workers yourself with a port for each (fleet.workers=0)"
            )
        if self.learner.engine == "simulated" and self.worker.engine != "simulated":
            raise ValueError(
                f"learner.engine = 'simulated' makes no weights that worker.engine = {self.worker.engine!r} could load: set "
                f"worker.engine=simulated as well, or learner.engine=torch"
            )
        if self.worker.snapshot_source == "object_store" and not self.dissemination.object_store:
            raise ValueError(
                "worker.snapshot_source = 'object_store' without a store to read from: set "
                "dissemination.object_store=s3://BUCKET/PREFIX, or worker.snapshot_source=auto"
            )
        if self.worker.heartbeat_interval_s * 3 > self.hub.heartbeat_timeout_s:
            raise ValueError(
                f"hub.heartbeat_timeout_s = {self.hub.heartbeat_timeout_s:g} leaves room for fewer than three heartbeats of "
                f"worker.heartbeat_interval_s = {self.worker.heartbeat_interval_s:g}: raise it to at least "
                f"{3 * self.worker.heartbeat_interval_s:g}"
            )
        return self


class WorkerConfig(Section):
    """What a worker may set for itself."""

    worker: WorkerSection = WorkerSection()


Validated = TypeVar("Validated", bound=Section)


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Read TOML files left to right, then `section.key=value` overrides, and validate the result.

    Raises ConfigError with one line per problem.
    """
    values: dict[str, Any] = {}
    for file in files:
        _merge(values, _read_toml(file))
    return _validated(Config, values, overrides)


def override(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with `section.key=value` overrides; raises ConfigError as `load_config` does."""
    return _validated(Config, config.model_dump(mode="json"), overrides)


def worker_settings(overrides: Sequence[str]) -> WorkerSection:
    """A worker's own settings, before it knows the run's, which they may need; raises ConfigError as `load_config` does."""
    return _validated(WorkerConfig, {}, overrides).worker


def _validated(model: type[Validated], values: dict[str, Any], overrides: Sequence[str]) -> Validated:
    for text in overrides:
        _merge(values, _parse_override(text))
    if isinstance(task := values.get("task"), dict):
        task.setdefault("type", DEFAULT_TASK.type)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML text that `load_config` reads back to an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {file} does not exist: check the path") from None
    except OSError as error:
        raise ConfigError(f"configuration file {file} cannot be read ({error.strerror}): check the path") from None
    except ValueError as error:  # of TOML, UTF-8, or a number of thousands of digits
        raise ConfigError(f"configuration file {file} is not valid TOML: {error}") from None


def _parse_override(setting: str) -> dict[str, Any]:
    path, separator, text = setting.partition("=")
    keys = path.strip().split(".")
    if not separator or len(keys) < 2 or not all(keys):
        raise ConfigError(f"override {setting!r} is not of the form section.key=value, for example staleness.bound=2")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # no TOML, or a number of thousands of digits
        value = text
    for key in reversed(keys):
        value = {key: value}
    return value


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    """Merge nested tables; a task of another type replaces the former one whole, since its options are others."""
    for key, value in values.items():
        former = into.get(key)
        if isinstance(former, dict) and isinstance(value, dict) and former.get("type") == value.get("type", former.get("type")):
            _merge(former, value)
        else:
            into[key] = value


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        # Within the task, pydantic names the type as well, which is no part of the key.
        place = problem["loc"]
        name = ".".join(str(part) for part in (place[:1] + place[2:] if place[:1] == ("task",) else place))
        if problem["type"] == "extra_forbidden":
            lines.append(
                f"unknown key {name} = {problem['input']!r}: check its spelling (echo2 train --dry-run prints every key)"
            )
        elif problem["type"] == "value_error":
            lines.append(str(problem["ctx"]["error"]))
        else:
            lines.append(f"{name} = {problem['input']!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}")
    return "; ".join(lines)
