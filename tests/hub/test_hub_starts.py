"""What keeps a hub from starting is one sentence, on its own console and where its parent waits for it."""

import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from patience import wait_until

from echo2.dissemination.store import SnapshotStore
from echo2.errors import UserError
from echo2.hub.address import listen
from echo2.hub.client import HubClient
from echo2.hub.process import HubProcess
from echo2.logs import refusal_in
from echo2.rollout.worker import _peer_host

REPOSITORY = Path(__file__).parent.parent.parent
FEW = ("batch.groups=2", "batch.members=2", "run.steps=6")


def hub_command(run):
    return [sys.executable, "-m", "echo2", "hub", str(run.path)]


@pytest.fixture(scope="module")
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def damaged_manifest(run):
    SnapshotStore(run.snapshots, run.run_id, run.token).publish(3, b"weights" * 1000, 1024)
    next(run.snapshots.glob("*/manifest.json")).write_text("{")


def shortened_weights(run):
    SnapshotStore(run.snapshots, run.run_id, run.token).publish(3, b"weights" * 1000, 1024)
    next(run.snapshots.glob("*/weights.safetensors")).write_bytes(b"")


def damaged_ledger(run):
    run.ledger.write_text("no ledger")


def missing_tokenizer(run):
    (run.model / "tokenizer.json").unlink()


ENDS = [
    ("hub.port={port}", None, r"hub\.port = {port}: cannot listen there \(Address already in use\); set hub\.port = 0"),
    (
        "dissemination.port={port}",
        None,
        r"dissemination\.port = {port}: cannot listen there \(Address already in use\); set diss",
    ),
    ("hub.host=192.0.2.1", None, r"hub\.host = '192\.0\.2\.1'.+; set hub\.host to an address of this machine"),
    ("hub.host=ü..x", None, r"hub\.host = 'ü\.\.x'.+; set hub\.host to an address of this machine"),
    ("task.type=python task.path=nothing:Here", None, r"task\.path = 'nothing:Here'"),
    ("", damaged_manifest, r"v00000003\S+/manifest\.json: manifest is damaged"),
    ("", shortened_weights, r"v00000003\S+/weights\.safetensors has 0 of 7000 bytes"),
    ("", damaged_ledger, r"ledger \S+ is damaged"),
    ("", missing_tokenizer, r"tokenizer\.json cannot be read"),
]


@pytest.mark.parametrize(("settings", "damage", "told"), ENDS)
def test_a_hub_that_cannot_start_says_why_in_one_line(make_run, taken_port, settings, damage, told):
    run = make_run(*FEW, *settings.format(port=taken_port).split())
    if damage is not None:
        damage(run)
    ended = subprocess.run(hub_command(run), cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("echo2: ") and re.search(told.format(port=taken_port), line)


def test_who_waits_for_a_hub_that_refuses_to_start_is_told_its_sentence(make_run, taken_port):
    run = make_run(*FEW, f"dissemination.port={taken_port}")
    with closing(listen("127.0.0.1", 0)) as listener:
        process = HubProcess(run, listener)
        process.start()
        with pytest.raises(UserError, match=rf"^hub\.host = '127\.0\.0\.1', dissemination\.port = {taken_port}: cannot listen"):
            process.wait_ready()


def test_only_a_refusal_is_taken_for_one(tmp_path):
    log = tmp_path / "log"
    log.write_text("began\necho2: first\nechoed\necho2: second,\nin two lines\n")
    assert refusal_in(2, log) == "second,\nin two lines"
    assert refusal_in(1, log) is None
    log.write_text("echoed\n")
    assert refusal_in(2, log) is None
    assert refusal_in(2, tmp_path / "none") is None


def test_a_hub_that_ends_in_order_closes_its_ledger(make_run):
    run = make_run(*FEW)
    process = subprocess.Popen(hub_command(run), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().split()[-1]
    with closing(HubClient(url, run.token, patience_s=30.0)) as client:
        client.register("w")
        assert run.ledger.with_name("ledger.db-wal").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    assert not run.ledger.with_name("ledger.db-wal").exists()


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine knows no IPv6")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_hub_and_workers_broadcast_over_ipv6(make_run, serve, publish, start_worker, host):
    run = make_run(*FEW, f"hub.host={host}", "fleet.workers=0")
    _, client = serve(run)
    start_worker(client, run.token, "first", "worker.heartbeat_interval_s=0.2")
    wait_until(client.live_workers)
    publish(run, client, 0)

    def arrived():
        record = client.broadcast_record(0)
        return record and record.arrivals

    assert wait_until(arrived)


@pytest.mark.parametrize(
    ("hub_host", "peers_at"),
    [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("10.0.0.5", "0.0.0.0"), ("2001:db8::5", "::")],
)
def test_a_worker_listens_for_others_in_the_family_of_its_hub(hub_host, peers_at):
    assert _peer_host(hub_host) == peers_at
