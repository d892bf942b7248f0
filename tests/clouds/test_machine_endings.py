"""Why a machine is gone: taken back, which counts against its offer, or for a reason of the run's own."""

from __future__ import annotations

import pytest
from test_rented_fleet import CHEAP, PERIOD_S, RUN, world

from echo2.hub.intervals import read_intervals
from echo2.hub.roster import DISMISSED


@pytest.mark.parametrize("machines_go", [False, True])
@pytest.mark.parametrize("hub_comes_back", [False, True])
def test_whose_workers_ended_while_the_hub_was_away_is_replaced_but_was_not_taken_back(machines_go, hub_comes_back) -> None:
    with world() as made:
        made.run(1200.0)
        names = {machine.name for machine in made.cloud.live(RUN)}
        made.cloud.silent.update(names)
        made.clock.now_s += 300.0
        if machines_go:
            for name in names:
                made.cloud._end((RUN, name), "its workers have ended")
        if hub_comes_back:
            made.roster.forgive_silence()
            made.run(600.0)
            assert made.counts() == {CHEAP.offer.name: 3} and made.fleet._memory.setbacks == {}
            assert not names & {machine.name for machine in made.cloud.live(RUN)}
        else:
            made.fleet.close("the learner is gone", without_hub=True)
            while not made.fleet.is_over:
                made.fleet.tick()
                made.clock.now_s += 1.0
        assert [interval.name for interval in read_intervals(made.database) if interval.lost] == []
        made.end()
        made.assert_paid()


def test_who_fell_silent_while_the_hub_was_there_is_lost_though_the_hub_is_gone_since() -> None:
    with world() as made:
        made.run(1200.0)
        (lost, *_) = [machine.name for machine in made.cloud.live(RUN)]
        made.cloud._end((RUN, lost), "taken back")
        made.cloud.pass_time(PERIOD_S, made.roster, RUN)
        made.fleet.close("the learner is gone", without_hub=True)
        made.run(2 * PERIOD_S)
        assert [interval.name for interval in read_intervals(made.database) if interval.lost] == [lost]


@pytest.mark.parametrize("dismissed", [False, True])
def test_a_machine_that_goes_when_its_worker_left_is_lost_unless_the_worker_was_told_to_leave(dismissed) -> None:
    with world() as made:
        made.run(1200.0)
        (machine, *_) = made.cloud.live(RUN)
        (worker_id,) = [worker.worker_id for worker in made.roster.live_workers() if worker.name == machine.name]
        made.roster.leave(worker_id, DISMISSED if dismissed else "")
        made.cloud._end((RUN, machine.name), "gone")
        made.tick()
        lost = [interval.name for interval in read_intervals(made.database) if interval.lost]
        assert lost == ([] if dismissed else [machine.name]), "a notice of a spot market makes a worker leave too"
