"""Machines of any cloud that SkyPilot knows, one plain cluster each.

Invariants: those of `Cloud`; a cluster belongs to a run by its label, so that other clusters are never touched; the run's token
travels as a secret; a cluster ends itself when its workers have been gone for `IDLE_MINUTES`, should nobody be there to end it.

SkyPilot has no status for what was preempted: a cluster that is listed no more, without having been told to stop, was. When it
was there from and until is in SkyPilot's own records, which are as exact as the last time that it looked.

A catalog has AWS's ids of zones, the same for everybody; SkyPilot wants an account's own names for them, and knows which. Slurm
is a cloud to SkyPilot, a cluster its region and a partition its zone, that knows neither spot machines nor catalogs, opens no
ports and ends nothing by itself. Of which offer a machine is, and at what price where SkyPilot has none, is in its labels.
"""

from __future__ import annotations

import copy
import csv
import math
import re
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clouds.cloud import CloudMachine, CloudTrouble, LaunchFailed, MachineFailed, SetupFailed
from echo2.capacity.offers import Offer
from echo2.errors import UserError

RUN_LABEL, MACHINE_LABEL = "echo2-run", "echo2-machine"
OFFER_LABEL, PRICE_LABEL = "echo2-offer", "echo2-usd-per-hour"
SLURM, AWS = "slurm", "aws"
IDLE_MINUTES = 10
SETUP_TIMEOUT_S = 900.0
POLL_S = 5.0
DAYS_REMEMBERED = 7
QUEUE_TIMEOUT = ("slurm", "provision_timeout")
REFUSALS = (
    "ResourcesUnavailableError",
    "ResourcesMismatchError",
    "NoCloudAccessError",
    "NotSupportedError",
    "InvalidCloudCredentials",
    "InvalidClusterNameError",
    "CloudUserIdentityError",
)
"""SkyPilot's exceptions after which there is no machine."""

MACHINE_FAULTS = ("ClusterSetUpError", "CommandError")
"""Those after which there was one, which did not do what SkyPilot told it."""


class SkyCloud:
    """Rents through SkyPilot's API server, which it starts where none runs."""

    def __init__(
        self,
        task_file: Path,
        hub_url: str,
        token: str,
        gpus_per_worker: int,
        ports: tuple[int, ...] = (),
        queue_timeout_s: float = 300.0,
        engine: str = "transformers",
    ) -> None:
        """`task_file` says how a worker with this `engine` is set up and run; `ports` are to be open for other workers; a
        launch waits at most `queue_timeout_s` in Slurm's queue, unless SkyPilot's own configuration says otherwise.

        Raises UserError where SkyPilot is not installed or the file is not a task's.
        """
        try:
            import sky
        except ImportError:
            raise UserError("activation.cloud = 'sky' needs SkyPilot: pip install '.[clouds]' on the learner's node") from None
        self._sky = sky
        self._task = read_task(task_file)
        self._environment = {
            "ECHO2_HUB": hub_url,
            "ECHO2_GPUS_PER_WORKER": str(gpus_per_worker),
            "ECHO2_ENGINE": engine,
        }
        self._token, self._ports = token, ports
        self._launching, self._refused = set[str](), set[str]()
        if sky.skypilot_config.get_nested(QUEUE_TIMEOUT, None) is None:
            # Else SkyPilot would wait a day for a partition that is full.
            sky.skypilot_config.apply_cli_config([f"{'.'.join(QUEUE_TIMEOUT)}={math.ceil(queue_timeout_s)}"])

    def launch(self, run_id: str, name: str, offer: Offer, workers: int) -> None:
        self._launching.add(name)
        try:
            self._launch(name, self.task(run_id, name, offer, workers), None if offer.cloud == SLURM else IDLE_MINUTES)
        except LaunchFailed as error:
            if not isinstance(error, SetupFailed | MachineFailed):
                self._refused.add(name)
            raise
        finally:
            self._launching.discard(name)

    def _launch(self, name: str, task: Any, autostop: int | None) -> None:
        sky = self._sky
        with _told_apart(name):
            if sky.get(sky.status([name])):
                # SkyPilot's server goes on with a launch whose caller is gone; to launch again would run the workers twice.
                raise CloudTrouble("it is on its way already")
            request = sky.launch(
                task, cluster_name=name, fast=True, down=autostop is not None, idle_minutes_to_autostop=autostop
            )
            job, _ = sky.get(request)
            self._await_setup(name, job)

    def machines(self, run_id: str) -> list[CloudMachine]:
        sky, label = self._sky, label_of(run_id)
        with _told_apart(f"run {run_id}"):
            there = {
                found["name"]
                for found in sky.get(sky.status())
                if _run_of(getattr(found["handle"], "launched_resources", None)) == label
            }
            # To look at the cloud for one that is being launched waits until it is.
            settled = sorted(there - self._launching)
            if settled:
                found = sky.get(sky.status(settled, refresh=sky.StatusRefreshMode.FORCE))
                there -= set(settled) - {entry["name"] for entry in found}
            history = sky.get(sky.cost_report(days=DAYS_REMEMBERED))
        ours = [entry for entry in history if _run_of(entry["resources"]) == label]
        return [machine for entry in ours for machine in _intervals(entry, there, entry["name"] not in self._refused)]

    def stop(self, run_id: str, name: str) -> None:
        with _told_apart(name):
            try:
                self._sky.get(self._sky.down(name))
            except self._sky.exceptions.ClusterDoesNotExist:
                return

    def task(self, run_id: str, name: str, offer: Offer, workers: int) -> Any:
        """What is to be launched, as SkyPilot's Task. Raises UserError for a file that SkyPilot refuses."""
        resources = self._task.get("resources", {}) | self._resources(run_id, name, offer)
        resources = {key: value for key, value in resources.items() if value is not None}
        # SkyPilot changes what it is given.
        described = copy.deepcopy(self._task | {"name": name, "resources": resources})
        environment = self._environment | {"ECHO2_NAME": name, "ECHO2_WORKERS": str(workers)}
        given = {key: value for key, value in environment.items() if key in described.get("envs", {})}
        try:
            return self._sky.Task.from_yaml_config(described, list(given.items()), [("ECHO2_TOKEN", self._token)])
        except ValueError as error:
            raise UserError(f"SkyPilot refuses activation.worker_task: {error}") from None

    def _resources(self, run_id: str, name: str, offer: Offer) -> dict[str, Any]:
        slurm, labels = offer.cloud == SLURM, {RUN_LABEL: label_of(run_id), MACHINE_LABEL: label_of(name)}
        if offer.cloud in (SLURM, AWS):
            labels[OFFER_LABEL] = offer.name
        if slurm:
            labels[PRICE_LABEL] = str(offer.price_usd_per_hour)
        zone = self._account_zone(offer) if offer.cloud == AWS and offer.zone else offer.zone
        return {
            "infra": "/".join(part for part in (offer.cloud, offer.region, zone) if part),
            "instance_type": offer.instance_type,
            "accelerators": None,
            "use_spot": offer.spot and not slurm,
            "labels": labels,
            "ports": [str(port) for port in self._ports] if self._ports and not slurm else None,
        }

    def _account_zone(self, offer: Offer) -> str:
        """What the AWS account calls the offer's zone. Raises LaunchFailed for one that it has not."""
        from sky.catalog import common

        def known() -> list[Path]:
            return sorted(Path(common.get_catalog_path("aws")).glob("az_mappings-*.csv"), key=lambda file: file.stat().st_mtime)

        if not known():
            # SkyPilot asks AWS, and writes down what it said.
            self._sky.catalog.get_region_zones_for_instance_type(offer.instance_type, offer.spot, AWS)
        with known()[-1].open(encoding="utf-8", newline="") as lines:
            names = {row["AvailabilityZone"]: row["AvailabilityZoneName"] for row in csv.DictReader(lines)}
        if offer.zone not in names:
            raise LaunchFailed(f"the AWS account has no zone {offer.zone}")
        return names[offer.zone]

    def _await_setup(self, name: str, job: int | None) -> None:
        """Until the workers run. Raises SetupFailed, CloudTrouble."""
        deadline = time.monotonic() + SETUP_TIMEOUT_S
        while job is not None and time.monotonic() < deadline:
            status = self._sky.get(self._sky.job_status(name, [job])).get(job)
            state = getattr(status, "value", None)
            if state == "FAILED_DRIVER":
                raise MachineFailed(f"its job ended as {state}: see `sky logs {name}`")
            if state in ("FAILED_SETUP", "FAILED"):
                raise SetupFailed(f"its job ended as {state}: see `sky logs {name}`")
            if state not in (None, "INIT", "PENDING", "SETTING_UP"):
                return
            time.sleep(POLL_S)
        raise CloudTrouble(f"{name} was not set up in {SETUP_TIMEOUT_S:g} s")


def read_task(file: Path) -> dict[str, Any]:
    """A task's YAML. Raises UserError for one that takes no hub or no token."""
    import yaml

    try:
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(
            f"activation.worker_task = {str(file)!r} cannot be read ({error}): name a task like examples/worker.sky.yaml"
        ) from None
    if (
        not isinstance(task, dict)
        or "ECHO2_HUB" not in (task.get("envs") or {})
        or "ECHO2_TOKEN" not in (task.get("secrets") or {})
    ):
        raise UserError(
            f"activation.worker_task = {str(file)!r} lacks env ECHO2_HUB or secret ECHO2_TOKEN: see examples/worker.sky.yaml"
        )
    return task


def label_of(text: str) -> str:
    """As every cloud allows it for a label's value.

    >>> label_of("Run.A_1-0f3c")
    'run-a_1-0f3c'
    """
    return re.sub(r"[^a-z0-9_-]", "-", text.lower())[-63:].strip("-_")


@contextmanager
def _told_apart(what: str) -> Iterator[None]:
    """SkyPilot's errors as ours: what found no machine, what found one that failed, what may have happened or not."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kind, sentence = type(error).__name__, _sentence(error)
        if kind in REFUSALS:
            raise LaunchFailed(f"{kind}: {sentence}") from None
        if kind in MACHINE_FAULTS:
            raise MachineFailed(f"{kind}: {sentence}") from None
        raise CloudTrouble(f"SkyPilot about {what}: {kind}: {sentence}") from error


def _sentence(error: Exception) -> str:
    """What SkyPilot says, without its colours: of a launch that failed over, the reason of the last attempt."""
    last = [error, *getattr(error, "failover_history", ())][-1]
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(last)).strip().splitlines()
    return lines[0] if lines else ""


def _resources_of(cluster: Mapping[str, Any]) -> Any:
    return getattr(cluster["handle"], "launched_resources", None)


def _run_of(resources: Any) -> str | None:
    """The label of the run that a cluster was launched for; None for others'."""
    return (getattr(resources, "labels", None) or {}).get(RUN_LABEL)


def _intervals(entry: Mapping[str, Any], there: Container[str], paid: bool) -> Iterator[CloudMachine]:
    """A cluster of SkyPilot's history, each time that it was there; SkyPilot counts a launch that found no machine too."""
    name, resources = entry["name"], entry["resources"]
    price = (resources.labels or {}).get(PRICE_LABEL)
    price_usd_per_hour = resources.get_cost(3600) if price is None else float(price)
    for launched_at_s, ended_at_s in entry["usage_intervals"]:
        if name not in there and (ended_at_s is None or not paid):
            ended_at_s = launched_at_s
        yield CloudMachine(name, offer_name(resources), price_usd_per_hour, launched_at_s, ended_at_s)


def offer_name(resources: Any) -> str:
    """The name that the offer of launched resources has in a catalog."""
    name = (resources.labels or {}).get(OFFER_LABEL)
    if name is not None:
        return name
    cloud = str(resources.cloud).lower()
    spot = bool(resources.use_spot)
    return Offer(cloud, 0.0, resources.region or "", resources.zone or "", resources.instance_type or "", spot=spot).name
