"""Learners on several ranks, each a process on the CPU; there can be one at a time."""

import psutil

from echo2.config import load_config
from echo2.learning.learners import make_learner

# Several micro-batches for each rank, and not as many for one as for the other.
SETTINGS = ("learner.device=cpu", "learner.micro_batch_tokens=25", "learner.max_skipped_steps=1")


def spread(model_folder, log_folder, *settings, devices=2):
    return make_learner(load_config([], [*SETTINGS, f"learner.devices={devices}", *settings]), model_folder, log_folder)


def followers():
    """The ranks beside this process, in order."""
    return [child for child in psutil.Process().children() if "echo2.learning.follower" in child.cmdline()]
