"""A run among whose workers is one whose weights are not what it says."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from train_command import REPOSITORY, free_port

LYING_WORKER = Path(__file__).with_name("lying_worker.py")
SETTINGS = ("batch.groups=16", "worker.slots=8", "fleet.workers=1", "run.steps=30", "tracking.tensorboard=false")


def test_a_worker_that_keeps_old_weights_is_named_once_with_figures_and_goes_into_the_ledger(train):
    port = free_port()
    command = train(*SETTINGS, f"hub.port={port}")
    command.wait_until(lambda: (command.run / "token").exists())
    environment = os.environ | {
        "ECHO2_TOKEN": (command.run / "token").read_text().strip(),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    liar = subprocess.Popen([sys.executable, LYING_WORKER, f"http://127.0.0.1:{port}", "liar"], env=environment, cwd=REPOSITORY)
    try:
        assert command.wait() == 0, command.said
        assert liar.wait(30) == 0
    finally:
        liar.kill()
    with closing(sqlite3.connect(command.run / "ledger.db")) as ledger:
        events = ledger.execute("SELECT subject, detail FROM events WHERE kind = 'worker stands out'").fetchall()
    ((subject, detail),) = events
    assert subject.startswith("liar-") and "its weights are not those of the versions that it claims" in detail
    assert command.said.count("standard deviations apart") == 1 and detail in command.said
    report = (command.run / "report" / "report.md").read_text()
    assert "| worker stands out | liar-" in report and "difference of ln p" in report
