"""ECHO-2: reinforcement-learning post-training with one busy learner and cheap, scattered rollout workers."""

__version__ = "0.1.0"
