"""What is rented, and by which rules: the section [activation] of a configuration.

Invariants: nothing here imports torch or network code; every name carries its unit; every field says what it is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from echo2.config_base import MOST_TOKENS, Hours, Seconds, Section, Share, Tokens, Usd

PerHour = Annotated[float, Field(ge=0.0, le=3600.0)]
CloudName = Annotated[str, Field(min_length=1)]


class QuotaSection(Section):
    """How many accelerators may be rented of those that it covers."""

    cloud: CloudName
    """Cloud that grants the quota, as the catalog names its folder, such as `aws`."""
    region: str = ""
    """Region that it holds in; empty for all of them together."""
    accelerator: str = ""
    """Accelerator that it is about, such as `H100`; empty for all together."""
    market: Literal["both", "spot", "on-demand"] = "both"
    """Whether it is about spot machines, those on demand, or both together."""
    accelerators: Annotated[int, Field(ge=0, le=1_000_000)]
    """Most accelerators; 0 leaves these offers out."""


class PlaceSection(Section):
    """What is known of a cloud or region beside its catalog; the narrowest table counts."""

    cloud: CloudName
    """Cloud, as the catalog names its folder."""
    region: str = ""
    """Region; empty for the whole cloud."""
    egress_usd_per_gb: Usd | None = None
    """What a gigabyte sent from there to elsewhere costs."""
    ingress_usd_per_gb: Usd | None = None
    """What a gigabyte received there costs."""
    dissemination_s: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """D of workers there, in seconds."""
    spot_preemptions_per_hour: PerHour | None = None
    """How often a spot machine there is taken back."""


class PaceSection(Section):
    """How fast the fleet of rented machines follows plans, prices and faults."""

    period_s: Seconds = 60.0
    """Time between two looks at the fleet; a worker that comes, goes or falls silent is an occasion for one too."""
    least_saving: Share = 0.1
    """Share of a plan's cost that another one must save to take its place."""
    change_interval_s: Seconds = 600.0
    """How long a plan that can be kept to stands before a cheaper one is looked for, with figures measured anew."""
    settled_s: Seconds = 600.0
    """Age at which a machine has shown that its offer can be had, and may be given up because others are enough."""
    first_block_s: Seconds = 60.0
    """How long the first setback blocks an offer."""
    longest_block_s: Seconds = 3600.0
    """How long any number of setbacks blocks it."""
    start_timeout_s: Seconds = 900.0
    """Longest wait for a launched machine to be ready."""
    queue_timeout_s: Seconds = 300.0
    """Longest wait of a launch in Slurm's queue; then its offer is blocked for a while, and another one is tried."""
    silence_timeout_s: Seconds = 120.0
    """A machine whose workers have all been silent for this long is given up as lost."""
    drain_timeout_s: Seconds = 120.0
    """Longest wait for a machine to hand in what it has under way."""
    most_launches: Annotated[int, Field(ge=1, le=1000)] = 8
    """Launches under way at a time."""


class ActivationSection(Section):
    """Which offers `echo2 plan` chooses from, and what the choice must keep to."""

    catalog: str = ""
    """Folder of a SkyPilot catalog, with `CLOUD/vms.csv` for each cloud, such as `~/.sky/catalogs/v8`; empty for none."""
    throughput_margin: Annotated[float, Field(ge=0.0, le=10.0)] = 0.05
    """Share by which the rented throughput exceeds what the learner needs."""
    budget_usd_per_hour: Usd = 0.0
    """Most that all workers may cost per hour, traffic included; 0 sets no budget."""
    budget_usd: Usd = 0.0
    """Most rent of all workers over the whole run, by the ledger; the fleet ends before it is exceeded. 0 sets no budget."""
    learner_offer: str = ""
    """Offer of the catalog that the learner's machine is, for `echo2 costs` to compare with; empty where that is not known."""
    failure_domain: Literal["zone", "region", "cloud"] = "zone"
    """What is taken to fail as a whole; a cloud without zones fails by region."""
    max_domain_share: Share = 1.0
    """Greatest share of the throughput in one failure domain."""
    min_on_demand_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the needed throughput that machines on demand must give."""
    quotas: Annotated[tuple[QuotaSection, ...], Field(strict=False)] = ()
    """Quotas, each a table `[[activation.quotas]]`."""
    places: Annotated[tuple[PlaceSection, ...], Field(strict=False)] = ()
    """What is known of places, each a table `[[activation.places]]`."""
    switching_horizon_h: Hours = 1.0
    """Hours over which the rent of a start counts; the fewer, the sooner what runs is kept."""
    start_up_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 300.0
    """From launch until a worker takes leases, where no run has measured it in that cloud."""
    spot_preemptions_per_hour: PerHour = 0.47
    """Prior of spot machines: 202 preemptions in 431 hours of V100 in four AWS zones, April 2023 (SkyPilot's spot-traces)."""
    prior_h: Hours = 24.0
    """Hours of rent that the prior weighs as much as."""
    gpus_per_worker: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that one worker's engine spans; a machine runs as many workers as that gives."""
    prompt_tokens: Tokens = 512
    """Mean length of a prompt, for the roofline."""
    completion_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """Mean length of a completion, for the roofline; 0 takes `sampling.max_completion_tokens`."""
    time_limit_s: Seconds = 10.0
    """Longest search for the cheapest plan; then the best one found is taken, and how far it may be off is said."""
    cloud: Literal["sky", "processes"] = "sky"
    """Who rents for `echo2 fleet`: SkyPilot, or in its stead `processes` on this machine, to rehearse."""
    worker_task: str = "examples/worker.sky.yaml"
    """SkyPilot task that sets up and runs the workers of a machine, as the file in `examples` does."""
    pace: PaceSection = PaceSection()
    """How fast the fleet follows."""
