import os

# Read at the first import of the libraries concerned, so they are set before any test module is collected.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import small_disks
from small_disks import SmallDisk

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


@pytest.fixture(scope="session")
def can_mount():
    if reason := small_disks.why_not():
        pytest.skip(f"a small disk needs root and the right to mount: {reason}")


@pytest.fixture
def small_disk(can_mount, tmp_path):
    """Makes disks of so many bytes, and takes them away after the test."""
    made = []

    def make(size_bytes):
        made.append(SmallDisk(tmp_path / f"disk-{len(made)}", size_bytes))
        return made[-1]

    yield make
    for disk in made:
        disk.close()


@pytest.fixture
def make_run(tmp_path):
    """Makes a run directory that a hub can serve, with `section.key=value` settings."""

    def make(*settings, resume=False, runs=tmp_path / "runs"):
        config = load_config([], [f"run.directory={runs}", "worker.engine=simulated", *settings])
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
        payload = payload or f"weights of version {version} ".encode() * 1000
        store.publish(version, payload, run.config.dissemination.chunk_bytes or 256 * 1024)
        return client.announce(version)

    return put


@pytest.fixture
def start_worker(tmp_path):
    """Starts `echo2 worker` processes, in this environment or that of another `python`, and kills what is left of them."""
    processes = []

    def start(client, token, name="w", *settings, python=sys.executable):
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [python, "-m", "echo2", "worker", "--hub", client.url, "--name", name, *settings],
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


@pytest.fixture(scope="session")
def s3_server():
    """Address of a real S3 API server on loopback."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def surroundings(monkeypatch, tmp_path):
    """Credentials as the environment has them, none of the machine's own, and little patience."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "word"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", str(tmp_path / "none")),
        ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("echo2.dissemination.object_store.bucket.TRIES", 1)
    monkeypatch.setattr("echo2.dissemination.object_store.mirror.PAUSE_S", 0.0)


@pytest.fixture
def server(s3_server, surroundings):
    """Address of the server, which holds nothing."""
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/moto-api/reset", method="POST")).close()
    return s3_server


@pytest.fixture
def s3(server):
    """A client of the test's own; there is a bucket `weights`."""
    import boto3

    client = boto3.client("s3", endpoint_url=server)
    client.create_bucket(Bucket="weights")
    return client
