"""What a run may expect of an offer: from its own measurements, from the user, from datasheets and priors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clouds.history import Figure
from clouds.offers import Job, appraise, read_shape
from clouds.traffic import known_prices
from echo2.capacity.offers import Offer, Rental
from echo2.capacity.roofline import ModelShape, estimate_throughput, find_gpu
from echo2.config import load_config
from echo2.config_activation import ActivationSection, PlaceSection, QuotaSection
from echo2.errors import UserError

SHAPE = ModelShape(8_190_735_360, layers=36, attention_heads=32, kv_heads=8, head_dim=128)
JOB = Job(
    shape=SHAPE,
    prompt_tokens=512,
    completion_tokens=1000,
    members=8,
    worker_groups=20,
    publish_interval_s=100.0,
    snapshot=Figure(1e9, "a guess"),
    dissemination=Figure(12.0, "of the run"),
    group_latency_s=33.0,
    passes_on=True,
)
SETTINGS = ActivationSection(spot_preemptions_per_hour=0.5, prior_h=10.0, start_up_s=240.0)
SPOT = Offer("aws", 2.0, "us-east-1", "z1", "p5", "H100", 8, "H100 SXM", spot=True)
STABLE = replace(SPOT, price_usd_per_hour=5.0, spot=False)


def only(offer, job=JOB, settings=SETTINGS, rentals=(), others=()):
    """The candidate of one offer."""
    candidates, _ = appraise([offer, *others], job, settings, rentals, "runs/x")
    return next(candidate for candidate in candidates if candidate.offer == offer)


def rental(offer, hours=1.0, **figures):
    known = {"running": False, "lost": False, "start_up_s": None, "dissemination_s": None, "groups_per_s": None}
    return Rental(offer.name, hours, **(known | figures))


def test_without_measurements_figures_are_the_rooflines_and_priors_and_say_so():
    found = only(SPOT)
    estimate = estimate_throughput(find_gpu("H100 SXM"), SHAPE, 512, 1000, 8, most_slots=160)
    assert estimate.slots == 160, "as many as the engine takes"
    assert found.workers == 8 and found.groups_per_s == pytest.approx(8 * estimate.groups_per_s)
    assert found.group_latency_s == estimate.group_latency_s
    assert (found.preemptions_per_hour, found.start_up_s, found.dissemination_s) == (0.5, 240.0, 12.0)
    assert found.provenance["μ"] == "roofline estimate" and found.provenance["D"] == "of the run"
    assert "prior activation.spot_preemptions_per_hour = 0.5" in found.provenance["preemptions"]
    assert only(STABLE).preemptions_per_hour == 0.0


def test_traffic_counts_snapshots_in_both_directions_and_rollouts():
    snapshots_gb = 8 * 1.0 * 36
    found = only(SPOT)
    rollouts_gb = found.groups_per_s * 3600 * 8 * 1000 * 12 / 1e9
    aws = known_prices()["aws"]
    assert found.traffic_usd_per_hour == pytest.approx((snapshots_gb + rollouts_gb) * aws.egress_usd_per_gb)
    assert only(SPOT, replace(JOB, passes_on=False)).traffic_usd_per_hour == pytest.approx(rollouts_gb * aws.egress_usd_per_gb)
    assert aws.source in found.provenance["traffic"] and "a guess" in found.provenance["traffic"]
    host = replace(SPOT, cloud="vast")
    both = known_prices()["vast"]
    expected = (snapshots_gb + rollouts_gb) * both.egress_usd_per_gb + snapshots_gb * both.ingress_usd_per_gb
    assert only(host).traffic_usd_per_hour == pytest.approx(expected)
    assert "unknown price" in only(replace(SPOT, cloud="elsewhere")).provenance["traffic"]
    assert only(replace(SPOT, cloud="nebius")).traffic_usd_per_hour == 0.0


def test_what_rentals_showed_counts_instead():
    rentals = [
        rental(SPOT, 6.0, lost=True, start_up_s=100.0, dissemination_s=20.0, groups_per_s=0.2),
        rental(SPOT, 4.0, lost=True, start_up_s=140.0, dissemination_s=30.0, groups_per_s=0.4),
        rental(STABLE, 9.0, running=True),
        rental(Offer("gone", 1.0), 99.0, lost=True, groups_per_s=7.0),
    ]
    found = only(SPOT, rentals=rentals, others=[STABLE])
    assert found.groups_per_s == pytest.approx(8 * 0.3) and found.group_latency_s == JOB.group_latency_s
    assert found.preemptions_per_hour == pytest.approx((0.5 * 10 + 2) / (10 + 10))
    assert found.start_up_s == 120.0 and found.dissemination_s == 25.0
    assert found.running == 0 and only(STABLE, rentals=rentals, others=[SPOT]).running == 1
    assert "measured on 2 workers in runs/x" in found.provenance["μ"]
    assert "2 in 10.0 h in runs/x" in found.provenance["preemptions"]


def test_measurements_reach_as_far_as_they_mean_something():
    elsewhere = replace(SPOT, region="us-west-2", zone="z9")
    other = Offer("nebius", 2.0, "eu", "", "h", "H100", 1, "H100 SXM", spot=True)
    rentals = [rental(SPOT, 10.0, lost=True, start_up_s=100.0, dissemination_s=20.0, groups_per_s=0.3)]
    far = only(elsewhere, rentals=rentals, others=[SPOT, other])
    assert far.groups_per_s == pytest.approx(2.4) and far.start_up_s == 100.0, "the accelerator's, and the cloud's"
    assert far.preemptions_per_hour == 0.5 and far.dissemination_s == 12.0, "not the region's"
    cloud = only(other, rentals=rentals, others=[SPOT, elsewhere])
    assert cloud.groups_per_s == pytest.approx(0.3) and cloud.start_up_s == 240.0
    slower = Offer("aws", 2.0, "us-east-1", "z1", "g6", "L4", 1, "L4", spot=True)
    assert only(slower, rentals=rentals, others=[SPOT]).provenance["μ"] == "roofline estimate"


def test_a_machine_that_is_taken_back_before_it_finishes_anything_is_refused_with_the_numbers():
    often = SETTINGS.model_copy(update={"spot_preemptions_per_hour": 3600.0})
    candidates, (refused,) = appraise([SPOT, STABLE], JOB, often)
    assert [candidate.offer for candidate in candidates] == [STABLE]
    assert refused.reason == "preempted too often" and "3,600 times an hour" in refused.sentence
    gone = replace(only(SPOT), preemptions_per_hour=1e18)
    assert gone.effective_groups_per_s == 0 and not gone.is_of_use and only(SPOT).is_of_use
    with pytest.raises(ValueError, match="spot_preemptions_per_hour"):
        PlaceSection(cloud="aws", spot_preemptions_per_hour=1e18)


def test_an_accelerator_that_is_not_on_file_can_be_used_once_it_was_measured():
    new = Offer("aws", 1.0, "r", "", "m", "X9", 1)
    _, refusals = appraise([new, SPOT], JOB, SETTINGS)
    assert [(r.offer, r.reason) for r in refusals] == [(new, "unknown GPU")] and "X9" in refusals[0].sentence
    assert only(new, rentals=[rental(new, groups_per_s=0.7)], others=[SPOT]).groups_per_s == 0.7


def test_what_the_user_says_of_a_place_counts_for_the_narrowest():
    places = (
        PlaceSection(cloud="aws", egress_usd_per_gb=0.02, dissemination_s=40.0),
        PlaceSection(cloud="aws", region="us-east-1", dissemination_s=50.0, spot_preemptions_per_hour=2.0),
    )
    found = only(SPOT, settings=SETTINGS.model_copy(update={"places": places}), rentals=[rental(SPOT, dissemination_s=1.0)])
    assert found.dissemination_s == 50.0
    assert found.preemptions_per_hour == pytest.approx(2.0 * 10 / 11)
    assert found.traffic_usd_per_hour == pytest.approx(only(SPOT).traffic_usd_per_hour * 0.02 / 0.09)
    assert found.provenance["D"] == "activation.places"


def test_a_model_that_does_not_fit_and_a_machine_with_too_few_gpus_are_refused_with_the_numbers():
    small = Offer("aws", 1.0, "r", "", "g6", "L4", 1, "L4")
    job = replace(JOB, shape=replace(SHAPE, parameters=20_000_000_000))
    _, (refusal,) = appraise([small, SPOT], job, SETTINGS)
    assert refusal.reason == "model does not fit" and "37.25 GiB of weights" in refusal.sentence
    candidates, (refusal,) = appraise([small, SPOT], job, SETTINGS.model_copy(update={"gpus_per_worker": 4}))
    assert refusal.reason == "too few GPUs" and "1 × L4" in refusal.sentence
    assert candidates[0].workers == 2
    with pytest.raises(UserError, match=r"none of 1 offers can be used: the model does not fit on 1 × L4"):
        appraise([small], job, SETTINGS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quotas": (QuotaSection(cloud="awz", accelerators=1),)}, r"quotas names the cloud 'awz'.*aws"),
        ({"quotas": (QuotaSection(cloud="aws", region="mars", accelerators=1),)}, r"region of aws 'mars'.*us-east-1"),
        ({"quotas": (QuotaSection(cloud="aws", accelerator="H10O", accelerators=1),)}, r"accelerator 'H10O'.*H100"),
        ({"places": (PlaceSection(cloud="gcp"),)}, r"places names the cloud 'gcp'"),
    ],
)
def test_quotas_and_places_that_name_nothing_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        appraise([SPOT], JOB, SETTINGS.model_copy(update=settings))


def test_the_shape_is_read_from_the_models_folder(tmp_path):
    def read(path, *others):
        return read_shape(load_config([], [f"model.path={path}", *others]))

    shipped = Path(__file__).parent.parent.parent / "examples/Qwen3-8B"
    assert read(shipped, "model.dtype=bfloat16").weights_bytes == 2 * SHAPE.parameters
    assert read(shipped).weights_bytes == 4 * SHAPE.parameters
    assert read("tiny").parameters == 597_824, "the built-in model's is known"
    with pytest.raises(UserError, match=r"config\.json cannot be read \(No such file"):
        read(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json"):
            read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 8}))
    with pytest.raises(UserError, match="mixture of experts"):
        read(tmp_path)
