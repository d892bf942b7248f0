"""Replays of spot traces: the reconciler's own code decides, and what it does is what it would do to a fleet."""

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clouds import replay as replay_module
from clouds.comparison import compare, describe_comparison, machines_for, render_comparison
from clouds.replay import Replay
from clouds.replay_market import TracedMarket, choose_kind
from clouds.traces import TraceSet, ZoneTrace
from echo2.capacity.plan import make_plan
from echo2.config import load_config
from echo2.errors import UserError

REPOSITORY = Path(__file__).parent.parent.parent
PLACES = (f"activation.catalog={REPOSITORY / 'examples/catalog/v8'}", f"model.path={REPOSITORY / 'examples/Qwen3-8B'}")
RUN = ("batch.groups=32", "worker.engine=vllm", "worker.slots=12", "capacity.group_latency_s=200.0", "fleet.workers=9")
LONG = ("sampling.max_completion_tokens=16384", "activation.completion_tokens=8192", "capacity.worker_groups_per_s=0.05")
HOUR_S, MINUTES = 3600.0, 60
ZONES = ("us-east-1a", "us-east-1b", "us-west-2a")


@cache
def settings_of(*overrides):
    config = load_config(
        [REPOSITORY / "examples/rented.toml"], [*PLACES, *RUN, *LONG, "activation.max_domain_share=1.0", *overrides]
    )
    plan = make_plan(config)
    return config, plan, choose_kind(config, plan)


def traces(*runs, name="made"):
    """A set whose zones had these machines, each run of (machines, minutes)."""
    zones = tuple(ZoneTrace(zone, 60.0, tuple(each)) for zone, each in zip(ZONES, runs, strict=False))
    return TraceSet(name, "aws", zones)


def replay(found, *overrides, market="both", **options):
    config, plan, kind = settings_of(*overrides)
    return Replay(config, plan, found, TracedMarket(config, plan, found, kind, market), **options)


def test_a_long_replay_says_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr(replay_module, "TOLD_INTERVAL_S", 0.0)
    with caplog.at_level("INFO", logger=replay_module.__name__):
        replay(traces([(9, 60)])).run()
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("made: 0 % of 1 h 0 min") and told[250].startswith("made: 50 % of ")


def test_zones_that_always_have_machines_cost_a_spot_machines_price_and_one_start():
    done = replay(traces([(9, 24 * MINUTES)], [(9, 24 * MINUTES)])).run()
    assert done.utilisation > 0.98 and done.staleness_max <= 4
    assert (done.total.preempted, done.total.failed, done.total.launches) == (0, 0, 9)
    assert done.total.usd == pytest.approx((9 * 24 - 5 / 60) * 1.45), (
        "a day at the catalog's price; the ninth waits for a launch"
    )


def test_when_all_zones_run_dry_machines_on_demand_keep_the_learner_busy_and_spot_machines_take_over_again():
    dry = traces([(9, 12 * MINUTES), (0, 12 * MINUTES), (9, 24 * MINUTES)], [(0, 48 * MINUTES)])
    done = replay(dry).run()
    assert done.total.preempted == 9 and done.utilisation > 0.97
    on_demand = done.places["us-east-1"]
    assert 9 * 12 < on_demand.hours < 9 * 15, "the drought, and until the back-off lets somebody see that it is over"
    late = [sample for sample in done.samples if sample.at_s > 30 * HOUR_S]
    assert {(sample.spot, sample.on_demand) for sample in late} == {(9, 0)}


def test_a_lost_zone_is_replaced_from_the_other_one_within_minutes():
    done = replay(traces([(9, 6 * MINUTES), (0, 6 * MINUTES)], [(9, 12 * MINUTES)])).run()
    lost = done.places["us-east-1a"].preempted
    assert lost in (0, 9) and done.places["us-east-1b"].launches == 9
    assert "us-east-1" not in done.places and done.utilisation > 0.97


def test_without_replacement_the_learner_stands_still_once_the_spot_machines_are_gone():
    some = traces([(9, 6 * MINUTES), (0, 18 * MINUTES)], [(0, 1), (9, 24 * MINUTES)])
    done = replay(some, market="spot", replaces=False).run()
    assert done.total.launches == 9 and done.total.preempted == 9
    assert 0.2 < done.utilisation < 0.3, "a quarter of the time and what was in the queue"
    assert replay(some).run().utilisation > 0.97


@st.composite
def weathers(draw):
    run = st.tuples(st.sampled_from([0, 1, 3, 9]), st.integers(5, 120))
    return traces(*(draw(st.lists(run, min_size=4, max_size=8)) for _ in range(draw(st.integers(1, 3)))))


@settings(derandomize=True, deadline=None, max_examples=8)
@given(weathers(), st.integers(1, 3))
def test_no_zone_ever_has_more_than_its_trace_and_the_money_is_the_machines_hours(found, each):
    class Watched(Replay):
        def _launch(self, action, candidate):
            super()._launch(action, candidate)
            self._check()

        def _take_back(self, zone):
            super()._take_back(zone)
            self._check()

        def _check(self):
            for zone, most in self._capacity.items():
                assert len(self._in_zone(zone)) <= most

    config, plan, kind = settings_of()
    market = TracedMarket(config, plan, found, kind)
    done = Watched(config, plan, found, market, machines_each=each).run()
    price = {candidate.offer.zone or candidate.offer.region: candidate.usd_per_hour for candidate in market.look(math.inf)}
    for place, tally in done.places.items():
        assert tally.usd == pytest.approx(tally.hours * price[place])
        assert tally.preempted <= tally.launches and 0.0 <= tally.idle_share <= 1.0
    assert done.utilisation <= 1.0 and done.staleness_max <= 4
    again = replay(found, machines_each=each).run()
    assert again == done, "the same arguments give the same result"


def test_the_reconciler_itself_decides(monkeypatch):
    asked = []

    def idle(memory, *arguments):
        asked.append(arguments[4])
        return memory, []

    monkeypatch.setattr(replay_module, "reconcile", idle)
    done = replay(traces([(9, 60)])).run()
    assert done.total.launches == done.steps == 0 and done.usd_per_step == math.inf
    assert asked == [60.0 * minute for minute in range(60)], "every period, and never for the past"


def test_the_back_off_of_the_configuration_is_the_replays():
    barren = traces([(0, 8 * MINUTES)])
    patient, hasty = (
        replay(barren, f"activation.pace.longest_block_s={longest_s}").run().total.failed for longest_s in (3600.0, 120.0)
    )
    assert patient < hasty / 2


def test_what_is_taken_back_raises_the_rate_that_the_next_plans_expect():
    found = traces([(9, 60)], [(9, 60)])
    config, plan, kind = settings_of()
    market = TracedMarket(config, plan, found, kind)
    prior = [each.preemptions_per_hour for each in market.look(0.0)]
    market.count(market.spot[0].offer, 24.0, 0)
    for _ in range(36):
        market.count(market.spot[0].offer, 0.0, 1)
    assert [each.preemptions_per_hour for each in market.look(60.0)] == prior, "figures stand for a while"
    learned = [each.preemptions_per_hour for each in market.look(600.0)]
    assert learned[:2] == [pytest.approx((0.47 * 24 + 36) / 48)] * 2 and learned[2:] == prior[2:] == [0.0]


def test_a_region_costs_what_the_catalog_says_of_it_and_else_the_mean():
    config, plan, _ = settings_of()
    kind = choose_kind(config, plan, "p5.48xlarge")
    here = [each.offer.price_usd_per_hour for each in kind.spot if each.offer.region == "us-east-2"]
    moved = kind.moved(True, "us-east-2", "us-east-2b")
    assert moved.offer.name == "aws/us-east-2/us-east-2b/p5.48xlarge/spot"
    assert moved.offer.price_usd_per_hour == pytest.approx(sum(here) / 3)
    elsewhere = kind.moved(True, "us-central1", "us-central1-a").offer.price_usd_per_hour
    assert min(here) - 1 < elsewhere == pytest.approx(sum(each.offer.price_usd_per_hour for each in kind.spot) / len(kind.spot))
    with pytest.raises(UserError, match=r"no machine p9\.huge"):
        choose_kind(config, plan, "p9.huge")


def test_a_comparison_says_what_hindsight_would_have_cost_and_holds_all_in_json():
    config, plan, kind = settings_of()
    found = traces([(3, 6 * MINUTES), (0, 6 * MINUTES)])
    made = compare(config, plan, found, kind, machines_for(found, 9), without_replacement=True)
    assert (made.fleet, made.machines_each) == (9, 3)
    assert (made.enough_share, made.none_share) == (0.5, 0.5)
    assert made.hindsight_share == pytest.approx(0.5 * 1.45 / 3.5 + 0.5)
    assert made.hindsight_share < made.cost_share(made.reconciler) < 1.0
    told = json.loads(json.dumps(describe_comparison(made), allow_nan=False))
    assert told["reconciler"]["places"]["us-east-1a"]["preempted"] == 9 and told["unreplaced"]["utilisation"] < 0.6
    text = " ".join(render_comparison(made).split())
    assert "us-east-1 on demand" in text and "had the fleet 50 % of the time, and no machine 50 % of it" in text


@pytest.mark.parametrize(
    ("found", "overrides", "words"),
    [
        (traces([(9, 24 * MINUTES)]), ("activation.budget_usd_per_hour=0.01",), "nothing was rented.*within 0.01 USD/h"),
        (traces([(9, 24 * MINUTES)]), ("activation.max_domain_share=0.5",), "nothing was rented.*50 % in one zone"),
        (traces([(9, 1)]), (), "no learner step ended.*lasts 1 min 0 s.*T = 109 s"),
    ],
)
def test_a_replay_in_which_nothing_comes_about_is_refused_with_the_reason(found, overrides, words):
    config, plan, kind = settings_of(*overrides)
    with pytest.raises(UserError, match=words):
        compare(config, plan, found, kind)


def simulate(*arguments, timeout_s=120):
    return subprocess.run(
        [sys.executable, "-m", "echo2", "simulate", *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_the_command_replays_a_folder_and_writes_table_figures_and_picture(tmp_path):
    folder = tmp_path / "aws-test"
    folder.mkdir()
    for zone, data in (("us-east-1a", [6] * 9 + [0] * 9), ("us-west-2b", [6] * 18)):
        content = {"metadata": {"gap_seconds": 600}, "data": data}
        (folder / f"{zone}_v100_1.json").write_text(json.dumps(content))
    outputs = ("--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    done = simulate("examples/rented.toml", "--spot-traces", tmp_path, *outputs)
    assert done.returncode == 0, done.stderr
    assert "Replay of aws-test v100_1: 3 h 0 min in 2 zones" in done.stdout and "us-west-2b" in done.stdout
    (told,) = json.loads((tmp_path / "out.json").read_text())
    assert told["fleet"] == 6 and told["reconciler"]["utilisation"] > 0.9
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["examples/rented.toml", "--spot-traces", "nowhere"], "nowhere is no folder"),
        (["examples/rented.toml", "--spot-traces", "docs"], "docs has no .json files"),
        (["examples/rented.toml", "--machine", "p9.huge"], "p9.huge"),
        (["examples/rented.toml", "--catalog", "nowhere"], "activation.catalog: nowhere is no folder"),
        (["examples/rented.toml", "--json", "nowhere/x.json"], "--json nowhere/x.json cannot be written"),
        (["examples/rented.toml", "--plot", "x.pdf"], "--plot 'x.pdf' does not end in .png"),
        (["examples/gpu.toml"], "activation.catalog is empty"),
        (["none.toml"], "none.toml"),
    ],
)
def test_what_cannot_be_replayed_is_one_line_and_exit_code_2(arguments, part):
    done = simulate(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("echo2: ") and part in line, line
