"""Training as a Prefect flow: one flow run is one segment, which goes on from the newest checkpoint.

Invariants: the model stays in this process's memory; dissemination never holds up the learner; a Prefect server that goes away
does not stop it; a step that a crash cut off is trained again from the same batch; a checkpoint is whole or absent.
"""

# Annotations stay real types: a deployment sends the flow to another process without this module's names.
import logging
from collections.abc import Callable
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.annotations import quote

from echo2.config import Config
from echo2.learning.learner import Learner
from echo2.protocol import Batch
from echo2.report import write_report
from flows.artifacts import reporting
from flows.capacity import CapacityWatch, watched_capacity
from flows.dissemination import Disseminator
from flows.session import Session, Stopped, open_session, stoppable
from flows.stopwatch import Stopwatch

log = logging.getLogger(__name__)


@flow(name="echo2-train", flow_run_name="{config.run.name}", task_runner=ThreadPoolTaskRunner(max_workers=4))
def train(config: Config, resume: bool = False) -> dict[str, Any]:
    """Train up to `flow.segment_steps` steps of the run and return its summary; `resume` goes on with a run that is there."""
    with (
        open_session(config, resume) as session,
        reporting(session),
        stoppable(session),
        watched_capacity(session) as watch,
        Disseminator(session) as dissemination,
    ):
        try:
            train_segment(session, watch, dissemination)
        except Stopped:
            session.checkpoint()
        hub, stopped = session.hub, session.stop_requested.is_set()
        return write_report(session.run, hub.status(), hub.steps(), stopped, hub.broadcast_record(session.learner.version))


def train_segment(session: Session, watch: CapacityWatch, dissemination: Disseminator) -> None:
    """The loop: take the oldest batch that is fresh enough, train, publish, commit."""
    config, learner, hub = session.config, session.learner, session.hub
    dissemination.publish()
    last = min(config.run.steps, learner.version + config.flow.segment_steps)
    stopwatch = Stopwatch()

    def keep_waiting() -> None:
        dissemination.check()
        session.check_supply()

    while learner.version < last:
        session.check_stop()
        step = learner.version
        with stopwatch.waiting():
            batch = hub.take_batch(step, keep_waiting)
        metrics = learner_step(learner, quote(batch))
        ended = learner.version == config.run.steps
        if learner.version % config.staleness.publish_interval == 0 or (ended and config.evaluation.every_steps):
            metrics |= dissemination.publish()
        metrics |= stopwatch.lap() | watch.metrics
        if ended:
            metrics |= last_evaluation(session, keep_waiting)
            session.fleet.let_go()
        for warning in hub.commit(step, metrics, session.checkpoints.oldest, learner.differences):
            log.warning("%s", warning)
        session.trackers.log(step, metrics)
        if missing := session.checkpoints.observe(metrics):
            log.warning("%s", missing)
            hub.note("best metric", config.learner.best_metric, missing)
        # After the commit, so that no checkpoint is ever ahead of the ledger.
        if learner.version % config.learner.checkpoint_interval == 0 or learner.version == last:
            session.checkpoint()
    dissemination.finish()


@task(name="learner-step", task_run_name="step-{learner.version}", cache_policy=NO_CACHE, persist_result=False)
def learner_step(learner: Learner, batch: Batch) -> dict[str, float]:
    """Train version `batch.step` into the next one. The rewards are means over all groups scored for the step."""
    metrics = learner.train_step(batch)
    del metrics["reward"]
    return scored_metrics(batch) | metrics


def last_evaluation(session: Session, keep_waiting: Callable[[], None]) -> dict[str, float]:
    """The figures of the run's last version, for which its workers stay; empty without evaluations, or if asked to stop.

    `keep_waiting` as with `HubClient.take_batch`.
    """
    if not session.config.evaluation.every_steps:
        return {}
    try:
        return session.hub.take_evaluation(session.learner.version, keep_waiting)
    except Stopped:
        log.warning("the run's last version is not evaluated, since the run was asked to stop")
        return {}


def scored_metrics(batch: Batch) -> dict[str, float]:
    """What all groups scored for a step say, the filtered ones included; `frac_reward_zero_std` is the share of those."""
    scored = dict(batch.scored)
    groups, filtered = scored.pop("groups"), scored.pop("filtered")
    return scored | {"groups": groups, "frac_reward_zero_std": filtered / groups}
