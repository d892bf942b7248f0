"""What is known to fail before a run begins, for `echo2 train`, its dry run and every flow run alike.

Invariants: nothing is created, started or sent; each refusal names the setting, its value and what to do, and all of them are
told at once; torch is imported only where the learner's device is named or there are several.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from clouds.catalog import catalog_files
from clouds.local import check_workers
from echo2.config import Config
from echo2.errors import ConfigError, UserError
from echo2.hub.address import listen
from echo2.learning.lora import check_adapters
from echo2.metric_names import check_best_metric
from echo2.models.preparation import check_model_and_task, tiny_folder
from echo2.packages import missing_packages
from echo2.run_directory import find_run
from echo2.tasks.base import Task
from echo2.tasks.catalog import make_task
from echo2.trackers import check_trackers

PACKAGES = ("prefect", "fastapi", "uvicorn", "pebble", "prometheus_client", "matplotlib")
"""What the processes of this node import beyond the core, whatever the engines."""
LEARNER_PACKAGES = ("torch", "transformers")


def check_startable(config: Config, resume: bool) -> None:
    """Raises UserError, with every reason, where the run cannot start or go on with this configuration on this machine."""
    _check_folders(config)
    _check_all(
        partial(_check_run, config, resume),
        partial(_check_packages, config),
        partial(_check_ports, config),
        partial(_check_task, config),
        partial(check_workers, config),
        partial(check_trackers, config.tracking),
        partial(check_adapters, config.learner.lora),
        partial(_check_learner, config),
        partial(_check_buckets, config),
        partial(_check_catalog, config),
    )


def _check_all(*checks: Callable[[], None]) -> None:
    """Make every check; raises the UserError of the one that fails, or one with the reasons of all that do."""
    reasons: list[UserError] = []
    for check in checks:
        try:
            check()
        except UserError as reason:
            reasons.append(reason)
    if len(reasons) == 1:
        raise reasons[0]
    if reasons:
        raise UserError("; ".join(map(str, reasons)))


def unchecked(config: Config) -> list[str]:
    """What may still fail at the start, though `check_startable` has nothing against it."""
    left = ["whether the model's weights load, and fit into memory with a batch"] if _trains(config) else []
    if config.worker.engine == "vllm" and config.fleet.workers:
        left.append("whether vLLM takes the model and finds its device")
    if buckets := list(dict.fromkeys(_buckets(config).values())):
        left.append(f"whether {' and '.join(buckets)} can be reached and written")
    if "PREFECT_API_URL" in os.environ:
        left.append(f"whether Prefect's server answers at {os.environ['PREFECT_API_URL']}")
    if not config.fleet.workers:
        left.append("the machines of the workers, which others start")
    return left


def _trains(config: Config) -> bool:
    return config.learner.engine == "torch"


def _check_folders(config: Config) -> None:
    _check_writable("run.directory", config.run.directory / config.run.name)
    if config.learner.checkpoints and "learner.checkpoints" not in _buckets(config):
        _check_writable("learner.checkpoints", Path(config.learner.checkpoints))
    if config.fleet.workers:
        _check_writable("worker.spool_directory", config.worker.spool_directory)


def _check_writable(setting: str, folder: Path) -> None:
    """Raises ConfigError unless `folder` is one that can be written, or can be made."""
    try:
        there = folder.expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{setting}: {folder} cannot be found ({error}): name the folder in full") from None
    try:
        while not there.exists() and not there.is_symlink():
            there = there.parent
        is_folder = there.is_dir()
    except OSError as error:
        raise ConfigError(f"{setting}: {folder} cannot be reached ({error.strerror}): name another one") from None
    if not is_folder:
        raise ConfigError(f"{setting}: {folder} cannot be a folder, since {there} is none: name another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{setting}: {folder} cannot be written, since {there} is not writable: change its permissions, or name another one"
        )


def _check_run(config: Config, resume: bool) -> None:
    found = find_run(config, resume)
    if found is not None:
        with found.held():
            pass


def _check_packages(config: Config) -> None:
    needed = (*PACKAGES, *LEARNER_PACKAGES) if _trains(config) else PACKAGES
    if missing := missing_packages(needed):
        raise ConfigError(
            f"learner.engine = {config.learner.engine!r}: a run needs {', '.join(missing)}, not installed here: "
            "pip install '.[learner,flows]'"
        )


def _check_ports(config: Config) -> None:
    """Both at once, so that one port for both is refused as well."""
    host, port = config.hub.host, config.dissemination.port
    with ExitStack() as opened:
        opened.callback(listen(host, config.hub.port).close)
        if config.dissemination.peers and port:
            opened.callback(listen(host, port, "dissemination.port").close)


def _check_task(config: Config) -> None:
    task = make_task(config.task, config.run.seed)
    _check_all(
        partial(check_model_and_task, config, task),
        partial(check_best_metric, config, task),
        partial(_check_cache, config, task),
    )


def _check_cache(config: Config, task: Task) -> None:
    """Whether the tiny model is there, or can be put there once it is made."""
    if config.model.path == "tiny" and _trains(config) and not (folder := tiny_folder(config, task)).is_dir():
        _check_writable("model.cache_directory", folder.parent)


def _check_learner(config: Config) -> None:
    """Whether the learner's devices are there, or the memory that a simulated one asks for."""
    settings = config.learner
    if not _trains(config):
        here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if settings.simulated_snapshot_bytes > here:
            raise ConfigError(
                f"learner.simulated_snapshot_bytes = {settings.simulated_snapshot_bytes} exceeds this machine's memory of "
                f"{here} bytes: lower it"
            )
    elif missing_packages(LEARNER_PACKAGES):
        return
    elif settings.devices > 1:
        from echo2.learning.ranks import check_devices

        check_devices(config)
    elif settings.device not in ("auto", "cpu"):
        from echo2.models.loading import resolve_device

        resolve_device(settings.device, "learner.device")


def _buckets(config: Config) -> dict[str, str]:
    """Settings that name a bucket, with their values."""
    named = {"learner.checkpoints": config.learner.checkpoints, "dissemination.object_store": config.dissemination.object_store}
    return {setting: location for setting, location in named.items() if location.startswith("s3://")}


def _check_buckets(config: Config) -> None:
    for setting, location in _buckets(config).items():
        from echo2.dissemination.object_store.bucket import Bucket

        Bucket(config.dissemination, location, setting).require_credentials()


def _check_catalog(config: Config) -> None:
    if config.activation.catalog:
        catalog_files(Path(config.activation.catalog))
