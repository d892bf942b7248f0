"""Training on rollouts of exactly S versions ago: learner, engine, task and scoring of a real run, in one process without hub.

Invariants: the batch of step t is sampled by version max(0, t − S) alone; a rollout depends on (run seed, group, member) and
those weights, so a run repeats itself; prompts come in the run's order, none is skipped and none comes twice; with S = 0 this
is plain synchronous training.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from echo2.config import Config
from echo2.hub.evaluation_figures import PromptResult, figures_of
from echo2.hub.evaluation_groups import EvaluationGroups, is_evaluation
from echo2.learning.torch_learner import TorchLearner
from echo2.protocol import Batch, Lease, Rollout, Sampling, ScoredRollout, TrainingGroup
from echo2.rollout.transformers_engine import TransformersEngine
from echo2.tasks import checked_prompt, checked_score
from echo2.tasks.catalog import make_task
from echo2.tasks.order import PromptOrder
from echo2.tasks.tokenizer import load_tokenizer


class StalenessLoop:
    """A learner at version 0 of the model in `model_folder`, fed by an engine that stays `staleness.bound` versions behind."""

    def __init__(self, config: Config, model_folder: Path) -> None:
        self._config = config
        self._task = make_task(config.task, config.run.seed)
        self._order = PromptOrder(self._task.size, config.run.seed, config.evaluation.held_out_prompts)
        self._tokenizer = load_tokenizer(model_folder)
        self._evaluation = EvaluationGroups(config.evaluation.prompts, config.evaluation.samples, config.batch.members)
        self._sampling = Sampling(
            temperature=config.sampling.temperature,
            max_completion_tokens=config.sampling.max_completion_tokens,
            stop_token_ids=self._tokenizer.eos_token_ids,
            seed=config.run.seed,
        )
        self._learner = TorchLearner.create(config, model_folder)
        self._engine = TransformersEngine(model_folder, config.model.dtype, config.worker.device, config.worker.threads)
        self._snapshots: deque[tuple[int, bytes]] = deque(maxlen=config.staleness.bound + 1)
        self._next_group_id = 0

    def step(self) -> tuple[Batch, dict[str, float]]:
        """Publish the current version, sample a batch with the oldest one that is kept, train on it; the batch and its metrics.

        `reward` is the mean over all groups that were sampled, dropped ones included, as in a run.
        """
        self._snapshots.append((self._learner.version, self._learner.export()))
        version, snapshot = self._snapshots[0]
        self._engine.load_weights(snapshot, version)
        batch = self._next_batch()
        return batch, self._learner.train_step(batch) | batch.scored

    def evaluate(self) -> dict[str, float]:
        """The current version on held-out prompts; figures under the names of a run's evaluation."""
        version = self._learner.version
        self._engine.load_weights(self._learner.export(), version)
        rewards: dict[int, list[float]] = defaultdict(list)
        for group in self._sample(self._evaluation.of_version(version)):
            rewards[self._evaluation.place(group.group_id)] += [member.reward for member in group.members]
        results = [PromptResult(of_prompt, {"reward": fmean(of_prompt)}) for of_prompt in rewards.values()]
        return figures_of(results, self._config.evaluation)

    def _next_batch(self) -> Batch:
        wanted, kept, sampled = self._config.batch.groups, list[TrainingGroup](), list[TrainingGroup]()
        while len(kept) < wanted:
            first = self._next_group_id
            self._next_group_id += wanted - len(kept)
            made = self._sample(range(first, self._next_group_id))
            sampled += made
            kept += [group for group in made if not self._is_dropped(group)]
        reward = fmean(member.reward for group in sampled for member in group.members)
        return Batch(self._learner.version, tuple(kept), {"reward": reward})

    def _is_dropped(self, group: TrainingGroup) -> bool:
        return self._config.batch.drop_zero_variance and len({member.reward for member in group.members}) == 1

    def _sample(self, group_ids: Iterable[int]) -> list[TrainingGroup]:
        """Groups in the order of their ids, generated with the engine's weights and scored."""
        leases = {group_id: self._lease(group_id) for group_id in group_ids}
        made = {each.group_id: each for each in self._engine.generate([*leases.values()], self._sampling, lambda: False)}
        groups = []
        for group_id, lease in leases.items():
            scored = [ScoredRollout(each, self._reward(group_id, each), "worker-1") for each in made[group_id].rollouts]
            groups.append(TrainingGroup(group_id, lease.prompt_token_ids, tuple(scored)))
        return groups

    def _lease(self, group_id: int) -> Lease:
        evaluated = is_evaluation(group_id)
        return Lease(
            group_id=group_id,
            attempt=1,
            members=tuple(range(self._evaluation.size(group_id) if evaluated else self._config.batch.members)),
            prompt_token_ids=tuple(self._tokenizer.encode(checked_prompt(self._task, self._index(group_id)))),
            timeout_s=self._config.hub.lease_timeout_s,
            temperature=self._config.evaluation.temperature if evaluated else None,
        )

    def _index(self, group_id: int) -> int:
        """The index of the group's prompt in the task."""
        if is_evaluation(group_id):
            return self._order.held_out(self._evaluation.place(group_id))
        return self._order.trained(group_id)

    def _reward(self, group_id: int, rollout: Rollout) -> float:
        text = self._tokenizer.decode([t for t in rollout.token_ids.tolist() if t not in self._tokenizer.eos_token_ids])
        return checked_score(self._task, self._index(group_id), text, rollout.finish_reason == "stop").reward
