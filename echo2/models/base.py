"""The weights that a run with adapters starts from, as workers get them: once, before their first snapshot.

Invariant: they are published before the run's hub starts, and never change.
"""

from __future__ import annotations

from pathlib import Path

from echo2.dissemination.broadcast.record import chunk_bytes_after
from echo2.dissemination.store import SnapshotStore
from echo2.run_directory import RunDirectory


def publish_base(run: RunDirectory, model_folder: Path) -> None:
    """Put the weights in `model_folder` into the run, in the format that workers compute in, unless they are there already.

    Raises ConfigError if the model cannot be loaded.
    """
    store = SnapshotStore(run.base, run.run_id, run.token)
    if store.versions():
        return
    import torch

    from echo2.models.loading import export_weights, load_model

    dtype = run.config.model.dtype
    weights = export_weights(load_model(model_folder, dtype, torch.device("cpu")), dtype)
    chunk_bytes = run.config.dissemination.chunk_bytes or chunk_bytes_after(None, len(weights))
    store.publish(0, weights, chunk_bytes)
