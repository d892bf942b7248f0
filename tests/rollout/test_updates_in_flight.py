"""Versions that arrive while a worker generates, with the engines that need no environment of their own."""

import sys

import pytest
from model_runs import check_versions_change_in_flight, versions
from patience import wait_until

ENGINE = ("worker.engine=simulated", "worker.simulated_group_latency_s=6")
FEW = (*ENGINE, "batch.groups=4", "batch.members=2", "batch.drop_zero_variance=false", "worker.slots=4", "run.steps=1")


def test_with_transformers_completions_go_on_with_the_new_version(make_run, serve, start_worker, tmp_path):
    settings = ("worker.engine=transformers", "worker.slots=4")
    check_versions_change_in_flight(make_run, serve, start_worker, tmp_path, sys.executable, *settings)


@pytest.mark.parametrize(("mode", "loads_amidst"), [("in_flight", True), ("drain", False)])
def test_a_simulated_worker_takes_a_version_amidst_its_groups_which_keep_the_former_one(
    make_run, serve, publish, start_worker, mode, loads_amidst
):
    run = make_run(*FEW, f"worker.update_mode={mode}")
    _, client = serve(run)
    publish(run, client, 0)
    start_worker(client, run.token)
    wait_until(lambda: client.status()["groups"]["leased"] == 4)
    publish(run, client, 1)
    loaded, _ = client.await_receivers(1, timeout_s=3.0)
    assert client.status()["groups"]["leased"] == 4, "they are under way still"
    assert bool(loaded) == loads_amidst
    assert versions(client.take_batch(0)) == {0}
    assert client.await_receivers(1, timeout_s=20.0)[0]
