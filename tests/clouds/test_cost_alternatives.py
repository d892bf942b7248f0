"""What the same rollouts would have cost elsewhere, and how a run's money is told."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clouds.costs import alternatives, render_costs
from clouds.renting import NOTHING_MEASURED
from echo2.config import load_config
from echo2.hub.costs import Costs, OfferCost

REPOSITORY = Path(__file__).parent.parent.parent
SPOT = "aws/ap-south-1/aps1-az2/p5.4xlarge/spot"
COLUMNS = "InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region,AvailabilityZone\n"
AWS = (
    "p5.4xlarge,H100,1,8.0,2.0,ap-south-1,aps1-az2\np5.4xlarge,H100,1,6.0,2.5,eu-west-2,z\n"
    "p5.48xlarge,H100,8,40.0,,us-east-1,z\n"
)


@pytest.fixture
def catalog(tmp_path):
    (tmp_path / "aws").mkdir()
    (tmp_path / "aws/vms.csv").write_text(COLUMNS + AWS)
    return tmp_path


def costs_on(*offers, scored_groups=3600):
    costs = [OfferCost(offer, 1, 0, 0, 10.0, 20.0, scored_groups, 8 * scored_groups) for offer in offers]
    usd, hours = 20.0 * len(offers), 10.0 * len(offers)
    rollouts = 8 * scored_groups
    return Costs(usd, hours, 0, tuple(costs), {"trained": usd}, 5, scored_groups, rollouts, rollouts, 10**6, 10**6)


def config_with(catalog, *settings):
    places = (f"activation.catalog={catalog}", f"model.path={REPOSITORY / 'examples/Qwen3-8B'}")
    return load_config([REPOSITORY / "examples/rented.toml"], [*places, *settings])


def test_the_same_hours_are_priced_on_demand_in_place_and_where_the_accelerators_are_cheapest(catalog):
    here, anywhere, learner = alternatives(costs_on(SPOT), config_with(catalog), NOTHING_MEASURED)
    assert here.usd == pytest.approx(10.0 * 8.0), "in its own zone, though another one is cheaper"
    assert anywhere.usd == pytest.approx(10.0 * 5.0), "an eighth of the machine with eight"
    assert learner.usd is None and "activation.learner_offer" in learner.sentence


def test_the_learners_own_machine_works_as_long_as_it_needs_for_as_many_groups(catalog):
    name = "aws/us-east-1/z/p5.48xlarge"
    learner = alternatives(costs_on(SPOT), config_with(catalog, f"activation.learner_offer={name}"), NOTHING_MEASURED)[2]
    twice = costs_on(SPOT, scored_groups=7200)
    longer = alternatives(twice, config_with(catalog, f"activation.learner_offer={name}"), NOTHING_MEASURED)[2]
    rate = float(learner.sentence.split(", ")[1].split(" groups/s")[0])
    assert rate > 0.3 and learner.usd == pytest.approx(40.0 / rate, rel=1e-3) and "roofline" in learner.sentence
    assert longer.usd == pytest.approx(2 * learner.usd)


def test_what_cannot_be_compared_is_said_and_no_catalog_compares_nothing(catalog):
    for other in alternatives(costs_on("local"), config_with(catalog), NOTHING_MEASURED)[:2]:
        assert other.usd is None and other.sentence == "local is not in the catalog"
    assert alternatives(costs_on(SPOT), config_with(catalog, "activation.catalog="), NOTHING_MEASURED) == []


def test_the_text_has_every_figure(catalog):
    costs = costs_on(SPOT)
    text = render_costs("run-1", costs, alternatives(costs, config_with(catalog), NOTHING_MEASURED), 50.0)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "4 USD" in rows["per step"] and "0.6944 USD" in rows["per 1,000 rollouts"] and "20 USD" in rows["per million tokens"]
    assert "30.00 USD are left" in rows["budget"] and "25 %" in rows["same machines on demand"]
    assert rows[SPOT].split()[1:] == ["1", "0", "0", "10", "20.00", "28800", "0.6944"]


def test_cents_and_less_are_told_in_digits_and_a_run_that_cost_nothing_has_no_shares(catalog):
    costs = replace(costs_on(SPOT), usd=0.02, uses={"trained": 0.0155, "idle": 0.0045})
    rows = {line.split("  ")[0]: line.split() for line in render_costs("run-1", costs, [], 0.0).splitlines()}
    assert rows["trained"][1:3] == ["0.0155", "77.5"] and rows["idle"][1:3] == ["0.0045", "22.5"]
    free = replace(costs, usd=0.0, uses={"trained": 0.0})
    rows = {line.split("  ")[0]: line.split() for line in render_costs("run-1", free, [], 0.0).splitlines()}
    assert rows["waste"] == ["waste", "0.00", "USD", "nothing", "was", "paid"] and rows["trained"] == ["trained", "0.00", "–"]


def test_the_command_reads_a_run_and_prints_text_or_json(make_run, tmp_path):
    run = make_run("model.path=examples/Qwen3-8B", "model.dtype=bfloat16", "activation.budget_usd=9.0")
    from echo2.hub.database import Database
    from echo2.hub.roster import Roster

    database = Database(run.ledger, run.run_id)
    roster = Roster(database, lambda: 1000.0)
    roster.open_interval("m", SPOT, 2.0)
    roster._clock = lambda: 4600.0
    roster.close_interval("m")
    database.close()

    def costs(*options):
        line = [sys.executable, "-m", "echo2", "costs", str(run.path), *options]
        done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "2.00 USD of rent for 1 machine hours" in costs() and "on demand" not in costs()
    found = json.loads(costs("--json", "--catalog", "examples/catalog/v8"))
    assert (found["usd"], found["budget_usd"], found["uses"]) == (2.0, 9.0, {"never came up": 2.0})
    assert found["alternatives"][0]["usd"] == pytest.approx(8.256) and found["rates"]["usd_per_step"] is None
