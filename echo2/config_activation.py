"""What is rented, and by which rules: the section [activation] of a configuration.

Invariants: nothing here imports torch or network code; every name carries its unit; every field says what it is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from echo2.config_base import Section

Usd = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
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
    accelerators: Annotated[int, Field(ge=0)]
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
    dissemination_s: Annotated[float, Field(ge=0.0)] | None = None
    """D of workers there, in seconds."""
    spot_preemptions_per_hour: Annotated[float, Field(ge=0.0)] | None = None
    """How often a spot machine there is taken back."""


class ActivationSection(Section):
    """Which offers `echo2 plan` chooses from, and what the choice must keep to."""

    catalog: str = ""
    """Folder of a SkyPilot catalog, with `CLOUD/vms.csv` for each cloud, such as `~/.sky/catalogs/v8`; empty for none."""
    throughput_margin: Annotated[float, Field(ge=0.0, le=10.0)] = 0.05
    """Share by which the rented throughput exceeds what the learner needs."""
    budget_usd_per_hour: Usd = 0.0
    """Most that all workers may cost per hour, traffic included; 0 sets no budget."""
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
    switching_horizon_h: PositiveFloat = 1.0
    """Hours over which the rent of a start counts; the fewer, the sooner what runs is kept."""
    start_up_s: Annotated[float, Field(ge=0.0)] = 300.0
    """From launch until a worker takes leases, where no run has measured it in that cloud."""
    spot_preemptions_per_hour: Annotated[float, Field(ge=0.0)] = 0.47
    """Prior of spot machines: 202 preemptions in 431 hours of V100 in four AWS zones, April 2023 (SkyPilot's spot-traces)."""
    prior_h: PositiveFloat = 24.0
    """Hours of rent that the prior weighs as much as."""
    gpus_per_worker: PositiveInt = 1
    """GPUs that one worker's engine spans; a machine runs as many workers as that gives."""
    prompt_tokens: PositiveInt = 512
    """Mean length of a prompt, for the roofline."""
    completion_tokens: Annotated[int, Field(ge=0)] = 0
    """Mean length of a completion, for the roofline; 0 takes `sampling.max_completion_tokens`."""
    time_limit_s: PositiveFloat = 10.0
    """Longest search for the cheapest plan; then the best one found is taken, and how far it may be off is said."""
