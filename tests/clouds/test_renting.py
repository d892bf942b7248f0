"""What to rent for a run, from configuration and catalog to the text that `echo2 plan` prints."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from clouds.renting import Measured, choose_machines
from clouds.renting_text import render_renting
from echo2.capacity.model import required_throughput
from echo2.capacity.offers import Rental
from echo2.capacity.plan import make_plan
from echo2.config import load_config

REPOSITORY = Path(__file__).parent.parent.parent
PLACES = (f"activation.catalog={REPOSITORY / 'examples/catalog/v8'}", f"model.path={REPOSITORY / 'examples/Qwen3-8B'}")
EASY_TERMS = (
    "capacity.learner_step_s=1",
    "capacity.group_latency_s=1",
    "capacity.transfer_s=0.1",
    "capacity.dissemination_fixed_s=0.2",
)
H200 = "nebius/eu-north1/gpu-h200-sxm_1gpu-16vcpu-200gb/spot"


def renting(*settings, rentals=(), snapshot_bytes=None):
    config = load_config([REPOSITORY / "examples/rented.toml"], [*PLACES, *settings])
    return choose_machines(config, make_plan(config), Measured("runs/x", rentals, snapshot_bytes))


def echo2(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "echo2", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )


def refusal(*arguments):
    done = echo2("plan", "examples/rented.toml", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_the_machines_chosen_keep_the_learner_as_busy_as_asked():
    made = renting()
    selection = made.activation.selection
    assert selection.violations(made.activation.demand.needed_groups_per_s) == [] and selection.gap == 0.0
    assert made.simulated.utilisation >= made.plan.target_utilisation
    assert len(made.activation.choices) + len(made.activation.refusals) == made.offers == 113
    assert max(selection.domain_loads.values()) <= 0.5 * selection.groups_per_s * (1 + 1e-6)


def test_the_need_is_that_of_the_machines_own_latency():
    guesses = [renting(f"capacity.group_latency_s={guess}") for guess in (20.0, 100.0)]
    needs = [guess.activation.demand.groups_per_s for guess in guesses]
    assert needs[0] == pytest.approx(needs[1], rel=1e-6), "the guess of [capacity] plays no part"
    longer = renting("activation.completion_tokens=4096", "capacity.learner_step_s=200.0")
    assert longer.activation.selection.violations(longer.activation.demand.needed_groups_per_s) == []


def test_machines_that_are_far_faster_than_the_learner_needs_do_not_raise_the_need():
    made = renting("model.path=tiny", "batch.groups=4", "staleness.bound=2", "activation.completion_tokens=8", *EASY_TERMS)
    least = required_throughput(made.plan.workload)
    assert least < made.activation.demand.groups_per_s < 1.5 * least
    rates = [candidate.effective_groups_per_s for candidate, _ in made.activation.selection.chosen]
    assert min(rates) > 100 * least and sum(count for _, count in made.activation.selection.chosen) == 2, "one in each zone"
    assert made.simulated.utilisation >= made.plan.target_utilisation


def test_every_limit_of_the_configuration_reaches_the_choice():
    narrow = "{cloud='runpod', region='CA', accelerator='A100-80GB', market='spot', accelerators=1}"
    made = renting(
        f"activation.quotas=[{{cloud='nebius', accelerators=2}}, {narrow}]",
        "activation.min_on_demand_share=0.25",
        "activation.failure_domain=cloud",
        "activation.max_domain_share=0.7",
        "activation.budget_usd_per_hour=40.0",
        "activation.switching_horizon_h=3.0",
    )
    selection, need = made.activation.selection, made.activation.demand.needed_groups_per_s
    assert selection.violations(need) == []
    assert sum(n * c.offer.accelerators for c, n in selection.chosen if c.offer.cloud == "nebius") <= 2
    assert selection.on_demand_groups_per_s >= 0.25 * need * (1 - 1e-6)
    by_cloud = Counter()
    for c, n in selection.chosen:
        by_cloud[c.offer.cloud] += n * c.effective_groups_per_s
    assert max(by_cloud.values()) <= 0.7 * selection.groups_per_s * (1 + 1e-6)
    limits = selection.limits
    assert (limits.budget_usd_per_hour, limits.switching_horizon_h, len(limits.quotas)) == (40.0, 3.0, 2)
    assert limits.quotas[1].spot is True and limits.quotas[1].region == "CA"


def test_what_runs_is_kept_let_go_or_said_to_run_beside():
    def running(offer):
        return Rental(offer, 1.0, True, False, None, None, None)

    rentals = [*[running(H200)] * 2, running("vast/France, FR, EU/1x-H200-32-65536"), running("local")]
    made = renting(rentals=rentals)
    text = render_renting(made)
    shown = {line.split("  ")[0]: line for line in text.splitlines()}
    assert shown["kept"].split()[1] == "2" and H200 in shown["kept"]
    assert shown["let go"].split()[2] == "1" and "vast/France, FR, EU/1x-H200-32-65536" in shown["let go"]
    assert "local, which is no candidate" in text
    prices = [c.offer.price_usd_per_hour * (n - c.running) for c, n in made.activation.selection.chosen]
    assert made.activation.selection.start_usd == pytest.approx(sum(prices) * 300 / 3600)


def test_a_measured_snapshot_decides_the_traffic():
    light, heavy = renting(snapshot_bytes=1e8), renting(snapshot_bytes=1e10)

    def cost(made):
        (aws,) = (c for c in made.activation.selection.candidates if c.offer.name == "aws/us-east-1/use1-az1/p5.4xlarge")
        return aws.traffic_usd_per_hour

    assert cost(heavy) - cost(light) == pytest.approx(9.9 * 3600 / 109.0 * 0.09)


def test_the_text_has_the_figures_their_sources_and_every_refusal():
    made = renting()
    text = render_renting(made)
    assert "113 offers of 5 clouds" in text and H200 in text
    assert "μ: roofline estimate" in text and "price: catalog" in text
    by_reason = Counter(refusal.reason for refusal in made.activation.refusals)
    for reason, number in by_reason.items():
        assert any(line.startswith(reason) and f"  {number} " in line for line in text.splitlines()), reason


def test_an_impossible_plan_says_what_stands_in_the_way_and_what_would_help():
    text = render_renting(renting("activation.budget_usd_per_hour=4.0"))
    assert "No plan: no choice among 112 offers gives" in text and "within 4 USD/h, 50 % in one zone" in text
    assert "USD/h in place of 4" in text and "groups/s in place of" in text
    assert text.count("no choice among 112 offers") == 1, "once, and not for each offer"


def test_where_no_pool_reaches_the_target_the_need_says_what_it_is_for_and_what_is_short():
    made = renting("capacity.learner_step_s=20")
    text = " ".join(render_renting(made).split())
    assert not made.need.reachable and made.need.prediction.binding.name == "freshness"
    assert "97 % is out of reach of any pool with their latency; this gives the best, " in text
    assert "target 97 % is missed: freshness is short, and more machines do not help" in text
    assert "groups/s for 97 % utilisation, and 5 % more" in " ".join(render_renting(renting()).split())


def test_a_narrow_share_of_one_zone_is_relaxed_until_the_plan_is_of_the_size_of_the_need():
    # With time for the whole search on a busy machine.
    activation = renting("activation.max_domain_share=0.02", "activation.time_limit_s=100").activation
    (relaxation,) = (each for each in activation.relaxations if each.name == "the share of one zone")
    assert relaxation.selection.groups_per_s <= 2 * activation.demand.needed_groups_per_s


def test_no_plan_is_exit_code_2_after_all_tables():
    done = echo2("plan", "examples/rented.toml", "activation.budget_usd_per_hour=4.0")
    assert done.returncode == 2 and "No plan: " in done.stdout and "no plan keeps to the limits  112" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("echo2: no machines of examples/catalog/v8 can be rented for run rented")


def test_the_command_prints_plan_and_machines_and_names_the_catalog_by_option_too():
    done = echo2("plan", "examples/rented.toml", "activation.catalog=", "--catalog", "examples/catalog/v8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Plan of run rented" in done.stdout
    assert "Machines for run rented: 113 offers of 5 clouds in examples/catalog/v8" in done.stdout
    assert "Machines" not in echo2("plan", "examples/rented.toml", "activation.catalog=").stdout


def test_bad_input_is_refused_in_one_line(tmp_path):
    assert "no folder" in refusal("--catalog", str(tmp_path / "none"))
    assert "no CLOUD/vms.csv" in refusal("--catalog", str(tmp_path))
    assert "'nosuch/offer' is no offer of catalog" in refusal("activation.learner_offer=nosuch/offer")
    assert "accelerator 'H10O'" in refusal("activation.quotas=[{cloud='aws', accelerator='H10O', accelerators=1}]")
    assert "activation.quotas.0.accelerators" in refusal("activation.quotas=[{cloud='aws', accelerators=-1}]")
    assert "config.json cannot be read" in refusal(f"model.path={tmp_path}")
    folder = tmp_path / "catalog/here"
    folder.mkdir(parents=True)
    (folder / "vms.csv").write_text(
        "InstanceType,AcceleratorName,AcceleratorCount,Price,Region\nm,X9000,1,1.0,r\n", encoding="utf-8"
    )
    assert "none of 1 offers can be used: X9000 is not in" in refusal("--catalog", str(tmp_path / "catalog"))
