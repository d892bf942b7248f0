"""How a batch is dealt to ranks."""

import pytest
import torch
from learning_batches import group, random_batch, rollout

from echo2.learning.batch import rank_share
from echo2.protocol import Batch

CPU = torch.device("cpu")


def shares(batch, ranks, limit=40, packed=True):
    return [rank_share(batch, limit, CPU, packed=packed, rank=rank, ranks=ranks) for rank in range(ranks)]


def positions(parts):
    """Tokens that are computed and count."""
    return sum(part.token_ids.numel() for part in parts if part.counts)


@pytest.fixture
def batch(make_learner):
    return random_batch(make_learner().model, 0, seed=2, groups=6)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_token_counts_on_one_rank_with_its_own_advantage(batch, ranks, packed):
    def tokens(parts):
        rows = [
            (part.targets.tolist(), part.behaviour_log_probs.tolist(), part.advantages.tolist())
            for part in parts
            if part.counts
        ]
        return sorted(token for row in rows for token in zip(*row, strict=True))

    dealt = shares(batch, ranks, packed=packed)
    whole = rank_share(batch, 10_000, CPU).parts
    assert tokens(part for share in dealt for part in share.parts) == tokens(whole)
    assert {(share.tokens, share.sequences) for share in dealt} == {(len(tokens(whole)), 24)}


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_have_as_many_micro_batches_and_about_as_many_tokens(batch, ranks):
    dealt = shares(batch, ranks)
    assert len({len(share.parts) for share in dealt}) == 1
    loads = [positions(share.parts) for share in dealt]
    longest = max(len(g.prompt_token_ids) + len(m.rollout.token_ids) - 1 for g in batch.groups for m in g.members)
    assert max(loads) - min(loads) <= longest


def test_a_rank_without_a_sequence_of_its_own_repeats_the_shortest():
    lonely = Batch(0, (group(0, [5, 4], [(rollout(0, [9, 2], [-1.0, -1.0]), 1.0)]),))
    first, second = shares(lonely, 2)
    assert [part.counts for part in first.parts] == [True]
    assert [part.counts for part in second.parts] == [False]
    assert second.parts[0].targets.tolist() == first.parts[0].targets.tolist() == [9, 2]
    assert first.tokens == second.tokens == 2


def test_a_batch_without_tokens_gives_no_rank_anything_to_compute():
    assert [(share.parts, share.tokens) for share in shares(Batch(0, ()), 2)] == [([], 0), ([], 0)]
