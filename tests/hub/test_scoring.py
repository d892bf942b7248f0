"""Scoring in processes: what goes wrong with one completion is that completion's failure, never a reward of 0."""

import asyncio
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from patience import wait_until

from echo2.config_tasks import PythonTask
from echo2.hub.scoring import ScoringPool
from echo2.protocol import Rollout
from echo2.tasks.tokenizer import character_tokenizer, load_tokenizer

HERE = str(Path(__file__).parent)


@pytest.fixture
def model_folder(make_run):
    return make_run().model


@pytest.fixture
def make_pool(model_folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.setattr(sys, "path", [HERE, *sys.path])
    with ExitStack() as pools:

        def make(scorer, timeout_s):
            task = PythonTask(type="python", path=f"bad_scorers:{scorer}")
            made = ScoringPool(task, 0, model_folder, processes=1, timeout_s=timeout_s)
            pools.callback(made.close)
            return made

        yield make


@pytest.fixture
def pool(make_pool):
    return make_pool("BadScorer", 3.0)


def completions(model_folder, *texts):
    tokenizer = load_tokenizer(model_folder)
    return [
        Rollout(m, np.array([*tokenizer.encode(t), *tokenizer.eos_token_ids], np.int32), np.zeros(2), np.zeros(2), "stop")
        for m, t in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [("1", "raised ValueError: no"), ("2", "returned None"), ("3", "nan"), ("4", "longer than 3 s"), ("5", "exit code 7")],
)
def test_one_bad_completion_fails_alone(pool, model_folder, bad, reason):
    scores = asyncio.run(pool.score(0, completions(model_folder, "0", bad, "0")))
    assert [s.reward for s in scores] == [0.25, None, 0.25]
    assert reason in scores[1].reason
    assert asyncio.run(pool.score(1, completions(model_folder, "0")))[0].reward == 0.25, "the pool goes on"


def test_a_scoring_process_killed_between_two_completions_is_replaced(pool, model_folder):
    for _ in range(2):
        assert asyncio.run(pool.score(0, completions(model_folder, "0")))[0].reward == 0.25
        for process in psutil.Process(os.getpid()).children(recursive=True):
            if "spawn_main" in " ".join(process.cmdline()):
                process.kill()
                # Not psutil's wait: it would take the end of the process from the pool, which then holds it for alive.
                wait_until(lambda p=process: not p.is_running() or p.status() == psutil.STATUS_ZOMBIE)
    assert asyncio.run(pool.score(0, completions(model_folder, "0")))[0].reward == 0.25


def test_scoring_processes_are_gone_after_closing(pool, model_folder):
    asyncio.run(pool.score(0, completions(model_folder, "0")))
    started = [p for p in psutil.Process(os.getpid()).children(recursive=True) if "spawn" in " ".join(p.cmdline())]
    assert started
    pool.close()
    assert not [p for p in started if p.is_running() and "spawn_main" in " ".join(p.cmdline())]


def test_a_scoring_process_that_hangs_at_its_start_is_ended_and_replaced(make_pool, model_folder, monkeypatch, tmp_path):
    first = tmp_path / "first"
    monkeypatch.setenv("FIRST_START", str(first))
    assert asyncio.run(make_pool("HangsOnce", 0.5).score(0, completions(model_folder, "0")))[0].reward == 0.25
    wait_until(lambda: not psutil.pid_exists(int(first.read_text())))


def test_the_character_tokenizer_is_the_model_records(model_folder):
    assert load_tokenizer(model_folder).encode("12") == character_tokenizer().encode("12")
