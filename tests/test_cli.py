"""The command line as a user meets it: processes, exit codes, and what is printed where."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.config import load_config
from echo2.run_directory import create_run

REPOSITORY = Path(__file__).parent.parent
COMMANDS = ("plan", "train", "fleet", "simulate", "worker", "hub", "status", "costs")


def echo2(*arguments, token=None, timeout_s=60.0):
    """Run a command to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "ECHO2_TOKEN"}
    if token is not None:
        environment["ECHO2_TOKEN"] = token
    return subprocess.run(
        [sys.executable, "-m", "echo2", *map(str, arguments)],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def refusal(*arguments, token=None):
    """The one line that a command is refused with."""
    done = echo2(*arguments, token=token)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("echo2: "), done.stderr
    return lines[0]


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["staleness.bond=2"], ("staleness.bond", "2")),
        (["none.toml"], ("none.toml", "does not exist")),
        (["staleness.bound=-1"], ("staleness.bound", "-1")),
        (["staleness.publish_interval=4"], ("4", "3")),
        (["configs/demo.toml", "batch.members=1"], ("batch.members = 1",)),
        (["staleness.bound"], ("staleness.bound",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_setting_that_cannot_work_is_one_line_and_exit_code_2(command, settings, parts):
    sentence = refusal(command, *settings)
    assert [part for part in parts if part not in sentence] == [], sentence


def test_a_command_or_option_that_does_not_exist_is_exit_code_2():
    for arguments in (["trian"], ["train", "--dry"], ["worker"], ["status"], ["hub"]):
        done = echo2(*arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = echo2(command, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Usage:") and len(done.stdout.splitlines()) > 4
    assert command in echo2("--help").stdout


def test_a_dry_run_prints_the_whole_configuration_and_the_plan_and_makes_nothing(tmp_path):
    settings = [f"run.directory={tmp_path / 'runs'}", "staleness.bound=3", "task.type=arithmetic"]
    done = echo2("train", "--dry-run", "configs/demo.toml", *settings)
    assert (done.returncode, done.stderr) == (0, "")
    resolved, plan = done.stdout.split("Plan of run", 1)
    file = tmp_path / "resolved.toml"
    file.write_text(resolved)
    assert load_config([file]) == load_config([REPOSITORY / "configs/demo.toml"], settings)
    assert "S = 3" in plan and "learner utilisation" in plan
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["plan"]])
def test_a_cap_under_which_snapshots_come_too_late_is_told_with_the_plan(command):
    def last_line(cap_bytes_per_s):
        done = echo2(*command, "configs/demo.toml", f"dissemination.uplink_bytes_per_s={cap_bytes_per_s}")
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()[-1]

    warning = last_line(1000)
    assert warning.startswith("warning: dissemination.uplink_bytes_per_s = 1000 lets a snapshot in full, about 2.4 MB,")
    assert "after 40 min" in warning and "dissemination.timeout_s = 120" in warning and "20 kB/s" in warning
    assert "warning" not in last_line(1_000_000)


def test_plan_prints_the_plan_of_a_dry_run(tmp_path):
    plan = echo2("plan", "configs/demo.toml").stdout
    assert plan.startswith("Plan of run demo")
    assert plan in echo2("train", "--dry-run", "configs/demo.toml", f"run.directory={tmp_path}").stdout


def test_a_plan_can_be_made_where_only_the_configuration_can_be_read():
    blocker = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'httpx', 'numpy', 'prefect', 'fastapi', 'safetensors'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "sys.argv[1:] = ['plan', 'configs/demo.toml']\n"
        "from echo2.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", blocker], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == echo2("plan", "configs/demo.toml").stdout


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_named(make_run, taken_port):
    assert str(taken_port) in refusal("hub", make_run(f"hub.port={taken_port}").path)


def test_training_where_another_run_lies_is_refused(tmp_path):
    settings = [f"run.directory={tmp_path}", "run.name=mine", "model.warm_start_exact_match=0"]
    create_run(load_config([], settings), resume=False)
    assert "--resume" in refusal("train", *settings)
    assert "batch" in refusal("train", "--resume", *settings, "batch.groups=3")
    assert "seed" in refusal("train", "--resume", *settings, "run.seed=3")


def test_training_into_foreign_files_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    assert str(tmp_path / "mine") in refusal("train", f"run.directory={tmp_path}", "run.name=mine")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_training_on_a_taken_port_is_refused_and_leaves_no_run_behind(tmp_path, taken_port):
    sentence = refusal("train", f"run.directory={tmp_path}", "model.warm_start_exact_match=0", f"hub.port={taken_port}")
    assert str(taken_port) in sentence
    assert list(tmp_path.iterdir()) == []


def test_training_with_a_python_for_workers_that_is_none_is_refused_and_leaves_no_run_behind(tmp_path):
    plain = tmp_path / "plain"
    plain.touch(mode=0o644)
    settings = (f"run.directory={tmp_path / 'runs'}", "model.warm_start_exact_match=0")
    for python in (tmp_path / "none", plain, tmp_path):
        assert f"fleet.python = '{python}' is no program" in refusal("train", *settings, f"fleet.python={python}")
    assert not (tmp_path / "runs").exists()


def test_what_is_not_a_run_has_no_status_and_no_hub(tmp_path):
    for path in (tmp_path, tmp_path / "none", REPOSITORY / "pyproject.toml"):
        for command in ("status", "hub"):
            assert str(path) in refusal(command, path)


def test_a_run_whose_stamp_is_damaged_is_named(make_run):
    run = make_run()
    for content in ("{", "{}", "[]", '"run"'):
        (run.path / "run.json").write_text(content)
        assert "run.json" in refusal("status", run.path)


def test_a_run_whose_token_is_gone_is_named(make_run):
    run = make_run()
    for content in (b"", b"\xff\xfe"):
        (run.path / "token").write_bytes(content)
        assert str(run.path / "token") in refusal("hub", run.path)


def test_a_run_without_a_ledger_says_so(make_run):
    assert "no ledger yet" in refusal("status", make_run().path)


def test_status_shows_a_run_as_text_and_as_json(make_run, serve):
    run = make_run("run.steps=6")
    serve(run)
    shown = echo2("status", run.path)
    assert shown.returncode == 0 and run.run_id in shown.stdout and "Step 0 of 6" in shown.stdout
    assert json.loads(echo2("status", run.path, "--json").stdout)["run_id"] == run.run_id


def test_a_worker_needs_the_token():
    assert "ECHO2_TOKEN" in refusal("worker", "--hub", "http://127.0.0.1:1")
    assert "ECHO2_TOKEN" in refusal("worker", "--hub", "http://127.0.0.1:1", token="")


@pytest.mark.parametrize("token", ["two\nlines", "two\r\nlines", "a\tb", "a\x7fb", "\x01", "tokén", "a\u2028b"])
def test_a_token_that_cannot_be_sent_is_refused_at_once(token):
    sentence = refusal("worker", "--hub", "http://127.0.0.1:1", token=token)
    assert "its token cannot be sent" in sentence and "check both" in sentence and token not in sentence


@pytest.mark.parametrize("address", ["nonsense", "10.0.0.5:8700", "", "ftp://10.0.0.5:8700", "http://", "http://[::1"])
def test_a_hub_address_that_cannot_be_one_is_refused_at_once(address):
    assert repr(address) in refusal("worker", "--hub", address, token="t")


def test_a_worker_with_a_bad_override_is_refused_and_not_counted_as_alive(make_run, serve):
    run = make_run()
    _, client = serve(run)
    for setting in ("worker.slots=0", "worker.slot=4", "worker.slots", "worker.snapshot_source=object_store"):
        done = echo2("worker", "--hub", client.url, setting, token=run.token)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("echo2: ") and setting.split("=")[0] in done.stderr
    assert client.live_workers() == []
