"""What a worker has under way, with the real engine and an outbox whose messages stay where they are."""

import pytest
import torch
from test_transformers_engine import make_leases, make_model, make_sampling

import echo2.rollout.transformers_engine as module
from echo2.config_sections import WorkerSection
from echo2.errors import UserError
from echo2.hub.client import HubClient
from echo2.models.loading import export_weights
from echo2.rollout.generation import Generation
from echo2.rollout.outbox import Outbox, _Post
from echo2.rollout.spool import Spool


@pytest.fixture
def outbox(tmp_path):
    """One that is never started."""
    return Outbox(HubClient("http://127.0.0.1:1", "token"), Spool(tmp_path, "run", "w"), "w")


@pytest.fixture
def engine(tmp_path):
    model = make_model(0)
    model.save_pretrained(tmp_path / "model")
    engine = module.TransformersEngine(tmp_path / "model", "float32", "cpu", threads=1)
    engine.load_weights(export_weights(model, "float32"), 5)
    return engine


@pytest.fixture
def start(engine, outbox):
    """Begins four groups of six members of 24 tokens."""

    def begin(**settings):
        generation = Generation(
            engine, make_sampling(max_completion_tokens=24, stop_token_ids=()), WorkerSection(**settings), outbox
        )
        generation.begin("w-1", make_leases())
        return generation

    return begin


def posted(outbox):
    return [message for message in outbox._messages if isinstance(message, _Post)]


def tokens_of(outbox):
    return sum(len(rollout.token_ids) for post in posted(outbox) for rollout in post.group.rollouts)


def test_long_generations_are_handed_in_every_so_many_tokens(start, outbox):
    generation = start(hand_in_tokens=5)
    for step in range(1, 24):
        generation.step()
        assert tokens_of(outbox) == step // 5 * 5 * 24
        figures = generation.figures()
        assert (figures["tokens"], figures["open_tokens"]) == (24 * step, step % 5 * 24)
        assert figures["latency_p50_s"] is figures["latency_p90_s"] is figures["latency_p99_s"] is None
    generation.step()
    assert tokens_of(outbox) == 24 * 24 == generation.figures()["tokens"]
    assert (generation.under_way, len(posted(outbox))) == (0, 4 * 5)
    figures = generation.figures()
    assert figures["groups"] == 4
    assert 0 < figures["latency_p50_s"] <= figures["latency_p90_s"] <= figures["latency_p99_s"]


def test_on_leaving_everything_is_handed_in_and_the_leases_go_back(start, outbox):
    generation = start()
    for _ in range(7):
        generation.step()
    generation.leave()
    assert tokens_of(outbox) == 7 * 24
    assert all(rollout.finish_reason is None for post in posted(outbox) for rollout in post.group.rollouts)
    assert len(outbox._messages) == 4 + 1, "parts of four groups, and one return"
    assert generation.under_way == 0


def test_what_the_hub_has_no_use_for_is_dropped(start, outbox):
    generation = start()
    generation.step()
    outbox._unwanted.extend([(101, 1), (102, 9), (500, 1)])
    generation.step()
    assert generation.under_way == 3
    for _ in range(30):
        generation.step()
    assert {post.group.group_id for post in posted(outbox)} == {100, 102, 103}


def test_memory_that_runs_out_costs_slots_and_no_token(start, outbox, monkeypatch, caplog):
    generation, forward = start(slots=4), module._Decoding._forward
    for _ in range(3):
        generation.step()

    def cramped(decoding, token_ids, positions):
        if len(token_ids) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(decoding, token_ids, positions)

    monkeypatch.setattr(module._Decoding, "_forward", cramped)
    generation.step()
    assert (generation.slots, generation.room, generation.under_way) == (2, 2, 0)
    assert tokens_of(outbox) == 3 * 24
    assert "memory ran out with 4 groups under way: 2 at a time from now on" in caplog.text
    generation.begin("w-1", make_leases()[:1])
    for _ in range(24):
        generation.step()
    assert generation.figures()["groups"] == 1
    monkeypatch.setattr(module._Decoding, "_forward", lambda *_: cramped(None, range(9), None))
    for slots in (1, 1):
        generation.begin("w-1", make_leases()[:1])
        if generation.slots == 1:
            with pytest.raises(UserError, match="one group at a time does not fit"):
                generation.step()
        else:
            generation.step()
        assert generation.slots == slots
