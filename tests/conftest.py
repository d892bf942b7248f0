import os

# Read at the first import of the libraries concerned, so they are set before any test module is collected.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.config import load_config
from echo2.dissemination.store import SnapshotStore
from echo2.hub.address import listen
from echo2.hub.client import HubClient
from echo2.hub.process import HubProcess
from echo2.run_directory import create_run
from echo2.tasks.tokenizer import character_tokenizer

REPOSITORY = Path(__file__).parent.parent


def model_record(folder):
    """The small files of a model, which are all that hub and simulated workers need."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer()
    tokenizer.save(folder / "tokenizer.json")
    settings = {"eos_token_id": list(tokenizer.eos_token_ids), "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.fixture
def make_run(tmp_path):
    """Makes a run directory that a hub can serve, with `section.key=value` settings."""

    def make(*settings, resume=False):
        config = load_config([], [f"run.directory={tmp_path / 'runs'}", "worker.engine=simulated", *settings])
        run = create_run(config, resume)
        model_record(run.model)
        return run

    return make


@pytest.fixture
def serve():
    """Starts hubs as processes and ends them after the test; gives (HubProcess, HubClient)."""
    opened = []

    def start(run):
        listener = listen(run.config.hub.host, run.config.hub.port)
        process = HubProcess(run, listener)
        client = HubClient(process.url, run.token, patience_s=30.0)
        opened.append((process, client, listener))
        process.start()
        process.wait_ready()
        return process, client

    yield start
    for process, client, listener in opened:
        client.close()
        process.stop()
        listener.close()


@pytest.fixture
def publish():
    """Publishes a snapshot of stand-in weights, as the learner would."""

    def put(run, client, version, payload=None):
        store = SnapshotStore(run.snapshots, run.run_id, run.token)
        store.publish(
            version, payload or f"weights of version {version} ".encode() * 1000, run.config.dissemination.chunk_bytes
        )
        return client.announce(version)

    return put


@pytest.fixture
def start_worker(tmp_path):
    """Starts `echo2 worker` processes and kills what is left of them after the test."""
    processes = []

    def start(client, token, name="w", *settings):
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "echo2", "worker", "--hub", client.url, "--name", name, *settings],
                env=os.environ | {"ECHO2_TOKEN": token},
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
