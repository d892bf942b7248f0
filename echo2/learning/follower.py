"""A follower among a learner's ranks: `python -m echo2.learning.follower`, started by `echo2/learning/ranks.py`.

Invariants: it does what rank 0 does with its own part of the weights, and decides nothing: what rank 0 is to raise about a
step, a weight or a batch, every rank finds by itself, and it waits for the next order. The others learn of its end when its
connections close, so an error that ends it closes these before anything else happens.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from echo2.config import Config
from echo2.learning.learner import LearnerError
from echo2.learning.ranks import broadcast, meet, open_store
from echo2.learning.torch_learner import TorchLearner
from echo2.lifeline import end_with_parent

log = logging.getLogger(__name__)


def main() -> None:
    """Read how to begin, then orders, a line of JSON each, until there are no more."""
    sys.excepthook = _end_at_once
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    start = json.loads(sys.stdin.readline())
    end_with_parent(start["parent"], lambda: os._exit(1))
    config = Config.model_validate_json(json.dumps(start["config"]))
    store = open_store(Path(start["store"]), config)
    store.set(f"ready-{start['rank']}", "")
    learner = TorchLearner.create(config, Path(start["model_folder"]), meet(store, config, start["rank"]))
    for line in sys.stdin:
        _obey(learner, json.loads(line))
    torch.distributed.destroy_process_group()


def _obey(learner: TorchLearner, order: dict[str, Any]) -> None:
    learner.version = order["version"]
    action = order["action"]
    try:
        if action == "train_step":
            learner.train_step(broadcast(None))
        elif action == "begin_export":
            learner.begin_export()
        elif action == "require_finite":
            learner.require_finite()
        elif action == "write_state":
            learner.write_state(Path(order["folder"]))
        elif action == "read_state":
            learner.read_state(Path(order["folder"]))
            torch.distributed.barrier()
        else:
            raise RuntimeError(f"there is no order {action!r}")
    except (LearnerError, ValueError) as error:
        log.warning("%s: %s", action, error)


def _end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
