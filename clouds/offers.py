"""What a run may expect of each offer.

Invariants: every offer is a candidate or is refused with the numbers; every figure names its source; nothing is fetched.

A machine runs a worker for every `activation.gpus_per_worker` of its GPUs. Their throughput was measured on the same kind of
accelerator, or is estimated by `echo2.capacity.roofline`, in which case L is too. Of each published version a worker receives a
snapshot, which it passes on once where workers do; of each token of a completion it sends 12 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clouds.history import Figure, History
from clouds.traffic import traffic_usd_per_hour
from echo2.capacity.offers import Candidate, Offer, Refusal, Rental
from echo2.capacity.roofline import ModelShape, estimate_throughput, find_gpu
from echo2.capacity.tables import number, percent, quantity
from echo2.config import Config
from echo2.config_activation import ActivationSection
from echo2.errors import UserError
from echo2.models.recipe import tiny_architecture
from echo2.tasks.tokenizer import character_tokenizer

ROLLOUT_BYTES_PER_TOKEN = 12
"""A token's id, its log-probability and its version."""

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0}


@dataclass(frozen=True, slots=True)
class Job:
    """What a run asks of its machines, and what it would measure on any of them."""

    shape: ModelShape
    prompt_tokens: int
    completion_tokens: int
    members: int
    """G."""
    worker_groups: int
    """Groups that a worker generates at a time at most."""
    publish_interval_s: float
    """κ·T."""
    snapshot: Figure
    """Bytes that a worker fetches of each published version."""
    dissemination: Figure
    """D, where a region's own is not known."""
    group_latency_s: float
    """L of workers whose throughput was measured."""
    passes_on: bool
    """Whether workers pass snapshots on to each other."""

    def estimate(self, gpu: str, gpus: int) -> tuple[Figure, float]:
        """μ and L of one worker by the roofline. Raises UserError where the model does not fit."""
        found = estimate_throughput(
            find_gpu(gpu),
            self.shape,
            self.prompt_tokens,
            self.completion_tokens,
            self.members,
            tensor_parallel=gpus,
            most_slots=self.worker_groups * self.members,
        )
        return Figure(found.groups_per_s, "roofline estimate"), found.group_latency_s


def read_shape(config: Config) -> ModelShape:
    """The shape of the run's model, the built-in one's or from its config.json.

    Raises UserError where there is none or it cannot be used.
    """
    if config.model.path == "tiny":
        content = {"model_type": "qwen3", "vocab_size": character_tokenizer().vocab_size, **tiny_architecture()}
    else:
        content = _read_config(Path(config.model.path) / "config.json")
    return ModelShape.from_config(content, weight_bytes=WEIGHT_BYTES[config.model.dtype])


def _read_config(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): model.path must name the folder of a model") from None
    except ValueError as error:
        raise UserError(f"{file} is no JSON ({error}): model.path must name the folder of a Hugging Face model") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object: model.path must name the folder of a Hugging Face model")
    return content


def appraise(
    offers: Sequence[Offer], job: Job, settings: ActivationSection, rentals: Sequence[Rental] = (), where: str = ""
) -> tuple[list[Candidate], list[Refusal]]:
    """Candidates and refusals, together every offer once; `rentals` were paid for in the run `where`.

    Raises UserError where a quota or place names what the catalog does not have, and where no offer can be used.
    """
    _check_names(offers, settings)
    history = History(offers, rentals, settings, where)
    found = [_appraise_one(offer, job, settings, history) for offer in offers]
    candidates = [each for each in found if isinstance(each, Candidate)]
    refusals = [each for each in found if isinstance(each, Refusal)]
    if not candidates:
        examples = {refusal.reason: refusal.sentence for refusal in reversed(refusals)}
        raise UserError(f"none of {len(offers)} offers can be used: {'; '.join(examples.values())}")
    return candidates, refusals


def _appraise_one(offer: Offer, job: Job, settings: ActivationSection, history: History) -> Candidate | Refusal:
    gpus = settings.gpus_per_worker
    workers = int(offer.accelerators // gpus)
    if workers < 1:
        return Refusal(offer, "too few GPUs", f"a machine has {offer.hardware}, and a worker needs {gpus}")
    rate, latency_s = history.throughput(offer), job.group_latency_s
    if rate is None:
        if not offer.gpu:
            return Refusal(offer, "unknown GPU", f"{offer.accelerator} is not in echo2/capacity/gpus.toml and was not measured")
        try:
            rate, latency_s = job.estimate(offer.gpu, gpus)
        except UserError as refusal:
            return Refusal(offer, "model does not fit", str(refusal))
    traffic = _traffic(offer, job, settings, workers, rate.value * workers)
    dissemination = history.dissemination(offer) or job.dissemination
    preemptions, start_up = history.preemptions(offer), history.start_up(offer)
    candidate = Candidate(
        offer=offer,
        workers=workers,
        groups_per_s=rate.value * workers,
        group_latency_s=latency_s,
        dissemination_s=dissemination.value,
        preemptions_per_hour=preemptions.value,
        start_up_s=start_up.value,
        traffic_usd_per_hour=traffic.value,
        running=history.running(offer),
        provenance={
            "price": "catalog",
            "μ": rate.source,
            "preemptions": preemptions.source,
            "start-up": start_up.source,
            "D": dissemination.source,
            "traffic": f"{traffic.source}; snapshots: {job.snapshot.source}",
        },
    )
    return candidate if candidate.is_of_use else _preempted_too_often(candidate)


def _preempted_too_often(candidate: Candidate) -> Refusal:
    left, start = candidate.effective_groups_per_s / candidate.groups_per_s, quantity(candidate.start_up_s, "s")
    return Refusal(
        candidate.offer,
        "preempted too often",
        f"taken back {number(candidate.preemptions_per_hour)} times an hour it completes {percent(left)} of what it could, "
        f"with L = {quantity(candidate.group_latency_s, 's')} and {start} for each start",
    )


def _traffic(offer: Offer, job: Job, settings: ActivationSection, workers: int, groups_per_s: float) -> Figure:
    """USD per hour of one machine."""
    weights_gb = workers * job.snapshot.value * 3600 / job.publish_interval_s / 1e9
    rollouts_gb = groups_per_s * 3600 * job.members * job.completion_tokens * ROLLOUT_BYTES_PER_TOKEN / 1e9
    sent_gb = rollouts_gb + (weights_gb if job.passes_on else 0.0)
    return traffic_usd_per_hour(offer, settings.places, sent_gb, weights_gb)


def _check_names(offers: Sequence[Offer], settings: ActivationSection) -> None:
    """Quotas and places must be about something that is there, or they would silently do nothing."""
    clouds, accelerators = {offer.cloud for offer in offers}, {offer.accelerator for offer in offers}
    for key, entries in (("quotas", settings.quotas), ("places", settings.places)):
        for entry in entries:
            _check_name(key, "cloud", entry.cloud, clouds)
            regions = {offer.region for offer in offers if offer.cloud == entry.cloud}
            _check_name(key, f"region of {entry.cloud}", entry.region, regions | {""})
    for quota in settings.quotas:
        _check_name("quotas", "accelerator", quota.accelerator, accelerators | {""})


def check_learner_offer(offers: Sequence[Offer], settings: ActivationSection) -> None:
    """Raises UserError where `activation.learner_offer` names none of `offers`."""
    name = settings.learner_offer
    if name and all(offer.name != name for offer in offers):
        raise UserError(
            f"activation.learner_offer = {name!r} is no offer of catalog {settings.catalog}: name one like {offers[0].name}, "
            "or none"
        )


def _check_name(key: str, what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        there = ", ".join(sorted(filter(None, known)))
        raise UserError(f"activation.{key} names the {what} {name!r}, which the catalog does not have: take one of {there}")
