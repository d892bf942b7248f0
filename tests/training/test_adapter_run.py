"""A whole run that trains adapters: workers fetch the base once, and then adapters alone."""

import json
import sqlite3
from contextlib import closing

import pytest

ADAPTERS = ("learner.lora.rank=4", "staleness.bound=0", "fleet.workers=1")


def losses(run):
    with closing(sqlite3.connect(run / "ledger.db")) as database:
        rows = database.execute("SELECT metrics FROM steps ORDER BY step").fetchall()
    return [json.loads(metrics)["loss"] for (metrics,) in rows]


def test_adapters_travel_alone_and_a_run_goes_on_from_them(train):
    pytest.importorskip("peft")
    whole = train(*ADAPTERS, "run.steps=5", name="whole")
    assert whole.wait() == 0, whole.said
    (base,), published = (sorted(whole.run.glob(f"{place}/v*/weights.safetensors")) for place in ("base", "snapshots"))
    assert published and all(snapshot.stat().st_size < 0.1 * base.stat().st_size for snapshot in published)
    assert (whole.run / "checkpoints" / "version-00000005" / "adapter_model.safetensors").is_file()
    parts = train(*ADAPTERS, "run.steps=3", name="parts")
    assert parts.wait() == 0, parts.said
    parts = train(*ADAPTERS, "run.steps=5", "--resume", name="parts")
    assert parts.wait() == 0, parts.said
    assert losses(parts.run) == pytest.approx(losses(whole.run), abs=1e-6)
