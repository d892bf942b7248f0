"""What cannot work is refused before anything is made, by a dry run as by the run itself."""

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from echo2.config import load_config
from echo2.errors import UserError
from echo2.models.preparation import tiny_folder
from echo2.run_directory import create_run
from echo2.tasks.catalog import make_task
from flows.preflight import check_startable, unchecked
from flows.train import train

REPOSITORY = Path(__file__).parent.parent
REHEARSAL = ("learner.engine=simulated", "worker.engine=simulated")
ONE = "fleet.workers=1"


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """The sentence that a run with such settings is refused with, after which nothing is there that was not before."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def refuse(*settings, resume=False):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError) as raised:
            check_startable(load_config([], [f"run.directory={tmp_path / 'runs'}", "fleet.workers=0", *settings]), resume)
        assert sorted(tmp_path.rglob("*")) == before
        return str(raised.value)

    return refuse


@pytest.fixture
def program(tmp_path):
    """Makes an executable shell script."""

    def make(*lines):
        file = tmp_path / "python"
        file.write_text("\n".join(("#!/bin/sh", *lines)))
        file.chmod(stat.S_IRWXU)
        return file

    return make


def dry_run(*settings):
    return subprocess.run(
        [sys.executable, "-m", "echo2", "train", "--dry-run", *settings], cwd=REPOSITORY, capture_output=True, text=True
    )


def test_a_dry_run_says_that_the_machine_is_ready_and_what_is_not_known(tmp_path):
    done = dry_run("configs/demo.toml", f"run.directory={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("This machine can start the run. Not checked before it does: whether")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_refused_as_the_run_is_with_every_reason_and_makes_nothing(tmp_path):
    settings = (f"run.directory={tmp_path / 'runs'}", f"fleet.python={tmp_path / 'none'}", "learner.best_metric=rewrad")
    done = dry_run(*settings)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("echo2: ") and "fleet.python = " in line and "best_metric = 'rewrad'" in line
    assert "Plan of run demo" in done.stdout
    with pytest.raises(UserError) as raised:
        train.fn(load_config([], settings))
    assert f"echo2: {raised.value}" == line
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_a_run_that_is_there_asks_for_resume(tmp_path):
    settings = [f"run.directory={tmp_path}", *REHEARSAL]
    create_run(load_config([], settings), resume=False)
    assert "--resume" in dry_run(*settings).stderr
    done = dry_run("--resume", *settings)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (("model.path=docs",), ("model.path", "docs lacks config.json")),
        (("model.path=nowhere",), ("model.path", "nowhere is not a folder")),
        (("model.path=Qwen/Qwen3-0.6B",), ("model.path", "hf download Qwen/Qwen3-0.6B --local-dir")),
        (("activation.catalog=nowhere",), ("activation.catalog", "nowhere is no folder")),
        (("activation.catalog=docs",), ("activation.catalog", "docs has no CLOUD/vms.csv")),
        (("run.directory=README.md/runs",), ("run.directory", "README.md is none")),
        (("model.cache_directory=README.md",), ("model.cache_directory", "README.md is none")),
        (("learner.checkpoints=README.md/kept",), ("learner.checkpoints", "README.md is none")),
        (("worker.spool_directory=README.md", ONE), ("worker.spool_directory", "README.md is none")),
        (("run.directory=~nobody-of-that-name/runs",), ("run.directory", "in full")),
        (("learner.checkpoints=s3://bucket/kept",), ("learner.checkpoints = 's3://bucket/kept'", "no credentials")),
        (("dissemination.object_store=s3://bucket",), ("dissemination.object_store = 's3://bucket'", "no credentials")),
        (("fleet.python=/bin/true", ONE), ("fleet.python = '/bin/true'", "'nothing'")),
        (("fleet.python=/bin/false", ONE), ("fleet.python = '/bin/false'", "does not run echo2")),
        (("worker.device=cuda:99", ONE), ("fleet.python", "worker.device = 'cuda:99'")),
        (("learner.device=cuda:99",), ("learner.device = 'cuda:99'", "set it to auto or cpu")),
        (("learner.devices=64", "learner.device=cuda"), ("learner.devices = 64", "CUDA devices")),
        (("sampling.max_completion_tokens=512",), ("sampling.max_completion_tokens = 512", "512 positions")),
        (("learner.simulated_snapshot_bytes=1000000000000", *REHEARSAL), ("simulated_snapshot_bytes", "memory")),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_this_machine_lacks_is_refused_by_setting_and_value(refusal, settings, parts):
    sentence = refusal(*settings)
    assert [part for part in parts if part not in sentence] == [], sentence


def test_an_environment_that_lacks_echo2_or_the_engine_is_refused(refusal, program, tmp_path, monkeypatch):
    assert "worker.engine = 'vllm' needs vllm" in refusal("worker.engine=vllm", ONE)
    stranger = program(f'cd /; unset PYTHONPATH; exec {sys.executable} -I -S "$@"')
    sentence = refusal(f"fleet.python={stranger}", ONE)
    assert f"fleet.python = '{stranger}'" in sentence and "No module named" in sentence
    assert "does not run as a Python" in refusal(f"fleet.python={_script_without_interpreter(tmp_path)}", ONE)
    check_startable(load_config([], [f"run.directory={tmp_path}", "worker.engine=vllm", "fleet.workers=0"]), False)


def _script_without_interpreter(folder):
    file = folder / "nothing"
    file.write_bytes(b"\x00\x01")
    file.chmod(stat.S_IRWXU)
    return file


@pytest.mark.parametrize(
    ("mode", "said"), [(0o755, "cannot be written, since"), (0o700, "cannot be reached (Permission denied)")]
)
def test_a_folder_that_only_others_may_write_or_enter_is_refused(mode, said):
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from flows.preflight import _check_writable\n"
        "if os.getuid() == 0:\n"
        "    os.setuid(65534)\n"
        "else:\n"
        "    Path(sys.argv[1]).chmod(0o555 if sys.argv[2] == '755' else 0)\n"
        "_check_writable('run.directory', Path(sys.argv[1]) / 'deep' / 'runs')\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(mode)
        command = [sys.executable, "-c", code, folder, f"{mode:o}"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        Path(folder).chmod(0o755)
    last = done.stderr.splitlines()[-1]
    assert f"ConfigError: run.directory: {folder}/deep/runs {said}" in last


def test_a_cache_that_holds_the_model_need_not_be_writable(tmp_path, monkeypatch):
    settings = [f"run.directory={tmp_path}", f"model.cache_directory={tmp_path / 'cache'}", "fleet.workers=0"]
    config = load_config([], settings)
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "cache")
    with pytest.raises(UserError, match=r"model\.cache_directory"):
        check_startable(config, False)
    tiny_folder(config, make_task(config.task, 0)).mkdir()
    check_startable(config, False)


def test_one_port_for_both_services_and_one_that_is_taken_are_refused(refusal, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"dissemination.port = {port}" in refusal(f"dissemination.port={port}")
        assert f"hub.port = {port}" in refusal(f"hub.port={port}")
        alone = (f"dissemination.port={port}", "dissemination.peers=false", "fleet.workers=0")
        check_startable(load_config([], [f"run.directory={tmp_path}", *alone]), False)
    assert f"dissemination.port = {port}" in refusal(f"hub.port={port}", f"dissemination.port={port}")


def test_a_model_that_does_not_say_its_kind_is_refused(refusal, make_run, tmp_path):
    folder = make_run("run.name=other").model
    (folder / "model.safetensors").touch()
    settings = (f"model.path={folder}", "fleet.workers=0")
    assert "config.json names no model_type" in refusal(*settings)
    described = json.loads((folder / "config.json").read_text())
    inner = {"max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "qwen3", "text_config": inner}))
    assert "32 positions" in refusal(*settings, "sampling.max_completion_tokens=32")
    check_startable(load_config([], [f"run.directory={tmp_path}", *settings, "sampling.max_completion_tokens=31"]), False)


def test_what_is_not_checked_is_said():
    def left(*settings):
        return " ".join(unchecked(load_config([], settings)))

    assert "weights" in left() and "weights" not in left(*REHEARSAL)
    assert "s3://bucket" in left("learner.checkpoints=s3://bucket")
    assert "vLLM" in left("worker.engine=vllm") and "vLLM" not in left("worker.engine=vllm", "fleet.workers=0")
    assert "which others start" in left("fleet.workers=0")
    assert ("Prefect" in left()) == ("PREFECT_API_URL" in os.environ)
