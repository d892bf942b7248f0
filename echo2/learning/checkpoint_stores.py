"""The place for checkpoints that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from echo2.learning.checkpoint import CheckpointFolder, CheckpointStore
from echo2.run_directory import RunRecord


def open_store(run: RunRecord, on_trouble: Callable[[str], None]) -> CheckpointStore:
    """Where `learner.checkpoints` of the run says; imports boto3 only for a bucket.

    `on_trouble` is told of a bucket that does not take them. Raises UserError where the bucket cannot be opened.
    """
    location = run.config.learner.checkpoints
    if location.startswith("s3://"):
        from echo2.dissemination.object_store.bucket import Bucket
        from echo2.learning.checkpoint_bucket import CheckpointBucket

        bucket = Bucket(run.config.dissemination, location, "learner.checkpoints")
        return CheckpointBucket(bucket, run.run_id, run.checkpoints, on_trouble)
    return CheckpointFolder(Path(location).expanduser() / run.run_id if location else run.checkpoints)
