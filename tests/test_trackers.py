"""Metrics reach whoever shows them, whole and once, and nobody who fails to take them stops the run."""

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from echo2.config import load_config
from echo2.errors import UserError
from echo2.trackers import JsonLines, TensorBoard, Tracker, Trackers, WandB, check_trackers, make_trackers

REPOSITORY = Path(__file__).parent.parent


def metrics_of(step, shift=0.0):
    return {"loss": step / 8 + shift, "staleness/max": float(step % 3)}


def history(count, shift=0.0):
    """The metrics of `count` steps as the ledger gives them."""
    return [metrics_of(step, shift) | {"step": step} for step in range(count)]


def track(trackers, steps, numbers, shift=0.0):
    """One segment: it finds `steps` in the ledger and trains those with the given numbers."""
    tracked = Trackers(trackers, steps)
    for step in numbers:
        tracked.log(step, metrics_of(step, shift))
    tracked.close()


def scalars(folder, name="loss"):
    """(step, value) of one metric, as TensorBoard shows it."""
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    return [(event.step, event.value) for event in shown.Scalars(name)]


def lines(file):
    text = file.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def python(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def has_content(file):
    return file.exists() and file.stat().st_size > 0


def has_scalars(folder):
    return EventAccumulator(str(folder)).Reload().Tags()["scalars"]


class Recorder(Tracker):
    """Keeps what it is given; `behave` is called with the name of each event first and may raise or wait."""

    name = "the recorder"

    def __init__(self, behave=lambda event: None):
        self.taken, self._behave = [], behave

    def open(self, history):
        self._behave("open")
        self.taken += [step for step, _ in history]

    def log(self, step, metrics):
        self._behave("log")
        self.taken.append(step)

    def close(self):
        self._behave("close")
        self.taken.append("closed")


def failing_at(event):
    def behave(happening):
        if happening == event:
            raise RuntimeError("the service is down")

    return behave


def test_tensorboard_shows_every_metric_at_its_step(tmp_path):
    track([TensorBoard(tmp_path)], [], range(20))
    assert scalars(tmp_path) == [(step, step / 8) for step in range(20)]
    assert scalars(tmp_path, "staleness/max") == [(step, step % 3) for step in range(20)]


def test_json_lines_are_the_ledgers_own(tmp_path):
    file = tmp_path / "metrics.jsonl"
    track([JsonLines(file)], history(2), range(2, 5))
    assert lines(file) == history(5)


def test_a_step_is_there_as_soon_as_it_was_taken(tmp_path):
    file, folder = tmp_path / "metrics.jsonl", tmp_path / "events"
    tracked = Trackers([JsonLines(file), TensorBoard(folder)], [])
    tracked.log(0, metrics_of(0))
    wait_until(lambda: has_content(file) and any(has_scalars(there) for there in tmp_path.glob("events")))
    assert (lines(file), scalars(folder)) == (history(1), [(0, 0.0)])
    tracked.close()


@pytest.mark.parametrize("committed", [0, 3, 5, 7], ids=lambda count: f"{count} steps in the ledger")
def test_a_resumed_run_doubles_and_loses_no_step(tmp_path, committed):
    """Five steps were tracked; the ledger went back behind them, agrees, or knows two that died in the queue."""
    file, folder = tmp_path / "metrics.jsonl", tmp_path / "events"
    track([JsonLines(file), TensorBoard(folder)], [], range(5))
    track([JsonLines(file), TensorBoard(folder)], history(committed), range(committed, 9), shift=100.0)
    wanted = [(step, step / 8 + 100.0 * (step >= committed)) for step in range(9)]
    assert [(line["step"], line["loss"]) for line in lines(file)] == wanted
    assert scalars(folder) == wanted


def test_what_a_segment_withdrew_and_never_trained_again_is_filled_in_by_the_next(tmp_path):
    track([TensorBoard(tmp_path)], [], range(5))
    track([TensorBoard(tmp_path)], history(2), [])
    track([TensorBoard(tmp_path)], history(4), [4, 5])
    assert scalars(tmp_path) == [(step, step / 8) for step in range(6)]


@pytest.mark.parametrize("cut_bytes", [1, 30, 10_000])
def test_an_event_file_that_was_cut_short_costs_no_step(tmp_path, cut_bytes):
    track([TensorBoard(tmp_path)], [], range(5))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-cut_bytes])
    track([TensorBoard(tmp_path)], history(5), [5])
    assert scalars(tmp_path) == [(step, step / 8) for step in range(6)]


ENDLESS = """
import sys, time
from pathlib import Path
from echo2.trackers import JsonLines, TensorBoard, Trackers
folder = Path(sys.argv[1])
tracked = Trackers([JsonLines(folder / "metrics.jsonl"), TensorBoard(folder / "events")], [], queued_steps=10**9)
for step in range(10**9):
    tracked.log(step, {f"metric/{n}": float(step) for n in range(40)})
    time.sleep(0.0005)
    if step % 50 == 0:
        print(step, flush=True)
"""


def enough_written(folder):
    """Each tracker has written a while; TensorBoard's file begins with a header and takes events in blocks."""
    files = [folder / "metrics.jsonl", *(folder / "events").glob("*")]
    return len(files) == 2 and all(file.is_file() and file.stat().st_size > 100_000 for file in files)


def test_records_are_whole_after_kill_9(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, tmp_path], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: process.stdout.readline() and enough_written(tmp_path))
        process.send_signal(signal.SIGKILL)
    steps = [line["step"] for line in lines(tmp_path / "metrics.jsonl")]
    assert steps == list(range(len(steps))) and len(steps) > 50
    shown = [step for step, _ in scalars(tmp_path / "events", "metric/39")]
    assert shown == list(range(len(shown))) and shown


LIMITED = """
import logging, resource, sys
from pathlib import Path
from echo2.trackers import JsonLines, TensorBoard, Trackers
logging.basicConfig()
folder = Path(sys.argv[1])
tracked = Trackers([JsonLines(folder / "metrics.jsonl"), TensorBoard(folder / "events")], [])
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
for step in range(500):
    tracked.log(step, {"loss": 0.5})
tracked.close()
print("went on")
"""


def test_a_disk_that_takes_no_more_is_told_once_for_each_record(tmp_path):
    done = python(LIMITED, tmp_path)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    told = done.stderr.splitlines()
    assert len(told) == 2, done.stderr
    for name in ("report/metrics.jsonl", "TensorBoard"):
        (line,) = [line for line in told if f"metrics no longer go to {name} ({tmp_path}/" in line]
        assert "cannot be written (File too large): look to its disk and its permissions); the run goes on without it" in line


@pytest.mark.parametrize("event", ["open", "log", "close"])
def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(event, caplog):
    # A console that takes its time: the end of the segment waits until the failure was told.
    caplog.handler.addFilter(lambda record: not time.sleep(0.1))
    good = Recorder()
    track([Recorder(failing_at(event)), good], history(2), range(2, 6))
    assert good.taken == [0, 1, 2, 3, 4, 5, "closed"]
    assert [record.getMessage() for record in caplog.records] == [
        "metrics no longer go to the recorder (RuntimeError: the service is down); the run goes on without it"
    ]
    assert caplog.records[0].levelno == logging.ERROR


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_for_long_the_end(caplog):
    released = threading.Event()
    good = Recorder()
    tracked = Trackers([Recorder(lambda event: released.wait(60)), good], [], close_timeout_s=0.5)
    began = time.monotonic()
    for step in range(50):
        tracked.log(step, metrics_of(step))
    assert time.monotonic() - began < 0.4
    tracked.close()
    assert 0.4 < time.monotonic() - began < 5
    released.set()
    assert good.taken == [*range(50), "closed"], "a late tracker leaves the others' time alone"
    (told,) = caplog.records
    assert "the recorder" in told.getMessage() and "within 0.5 s" in told.getMessage()


def test_a_tracker_that_falls_behind_is_given_up_and_named(caplog):
    released = threading.Event()
    hung = Recorder(lambda event: released.wait(60))
    tracked = Trackers([hung], [], queued_steps=3)
    for step in range(50):
        tracked.log(step, metrics_of(step))
    began = time.monotonic()
    tracked.close()
    assert time.monotonic() - began < 1, "nobody waits for a tracker that was given up"
    released.set()
    (told,) = caplog.records
    assert "the recorder (it is 3 steps behind)" in told.getMessage()


def test_json_lines_come_always_the_others_as_configured(make_run):
    kinds = [type(tracker) for tracker in make_trackers(make_run("tracking.tensorboard=false"))]
    assert kinds == [JsonLines]
    assert [type(tracker) for tracker in make_trackers(make_run("run.name=b", "tracking.wandb=true"))] == [
        JsonLines,
        TensorBoard,
        WandB,
    ]


class WandbModule:
    """What `wandb` is to this tracker: a run that takes each step once, in order, and remembers across processes."""

    __spec__ = ModuleSpec("wandb", None, origin="stand-in")
    Error = RuntimeError

    def __init__(self, mode="offline", has_login=False):
        self.opened, self.logged, self.finished = [], {}, 0
        self._mode, self._has_login = mode, has_login

    def setup(self):
        if self._mode == "sometimes":
            raise ValueError("1 error\nmode: 'sometimes'")
        return SimpleNamespace(settings=SimpleNamespace(mode=self._mode))

    def login(self, prompt, verify):
        assert not prompt and not verify
        return self._has_login

    def init(self, **arguments):
        self.opened.append(arguments)
        run = SimpleNamespace(step=len(self.logged))

        def log(metrics, step, commit):
            assert step == run.step and commit
            self.logged[step] = metrics
            run.step += 1

        def finish():
            self.finished += 1

        run.log, run.finish = log, finish
        return run

    def Settings(self, **arguments):
        return arguments


def test_wandb_gets_the_run_under_its_own_id_and_each_step_once(make_run, monkeypatch):
    module = WandbModule()
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = make_run("tracking.wandb=true", "tracking.wandb_project=digits")
    track([WandB(run)], [], range(5))
    track([WandB(run)], history(3), range(3, 7), shift=100.0)
    opened = module.opened[1]
    assert (opened["project"], opened["name"], opened["id"], opened["resume"]) == ("digits", "demo", run.run_id, "allow")
    assert opened["dir"] == run.path and opened["config"]["staleness"]["bound"] == run.config.staleness.bound
    assert run.token not in repr(module.opened)
    assert module.finished == 2
    assert module.logged == {step: metrics_of(step, 100.0 * (step >= 5)) for step in range(7)}


def test_what_wandb_missed_is_sent_when_the_run_goes_on(make_run, monkeypatch, caplog):
    module = WandbModule()
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = make_run("tracking.wandb=true")
    track([WandB(run)], history(4), [4])
    assert list(module.logged) == [0, 1, 2, 3, 4] and not caplog.records


@pytest.mark.parametrize(("package", "extra"), [("tensorboard", "learner"), ("wandb", "wandb")])
def test_a_missing_package_is_refused_with_how_to_install_it(package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    others = [f"tracking.{name}=false" for name in ("tensorboard", "wandb") if name != package]
    check_trackers(load_config([], [*others, f"tracking.{package}=false"]).tracking)
    with pytest.raises(UserError) as refused:
        check_trackers(load_config([], [*others, f"tracking.{package}=true"]).tracking)
    for part in (f"tracking.{package} = true", f"pip install '.[{extra}]'", f"tracking.{package}=false"):
        assert part in str(refused.value)


@pytest.mark.parametrize(("mode", "has_login"), [("offline", False), ("disabled", False), ("online", True)])
def test_wandb_may_start_offline_or_with_a_login(mode, has_login, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", WandbModule(mode, has_login))
    check_trackers(load_config([], ["tracking.wandb=true"]).tracking)


@pytest.mark.parametrize(
    ("mode", "parts"), [("online", ("wandb login", "WANDB_MODE=offline")), ("sometimes", ("'sometimes'",))]
)
def test_wandb_that_would_ask_for_a_login_midway_is_refused(mode, parts, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", WandbModule(mode))
    with pytest.raises(UserError) as refused:
        check_trackers(load_config([], ["tracking.wandb=true"]).tracking)
    assert "\n" not in str(refused.value)
    for part in ("tracking.wandb = true", "tracking.wandb=false", *parts):
        assert part in str(refused.value)


TRAIN_WITHOUT_WANDB = """
import sys
sys.modules["wandb"] = None
simulated = ["worker.engine=simulated", "learner.engine=simulated"]
sys.argv[1:] = ["train", *simulated, "tracking.wandb=true", f"run.directory={sys.argv[1]}"]
from echo2.cli import main
main()
"""


def test_a_run_that_asks_for_wandb_without_it_ends_at_once_with_exit_code_2(tmp_path):
    done = python(TRAIN_WITHOUT_WANDB, tmp_path / "runs")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "needs the package wandb" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_folder_called_like_the_package_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match=r"tracking\.wandb = true"):
        check_trackers(load_config([], ["tracking.tensorboard=false", "tracking.wandb=true"]).tracking)


WITHOUT_TORCH = """
import sys
from pathlib import Path
from echo2.trackers import TensorBoard, Trackers
assert not {"tensorboard", "wandb"} & sys.modules.keys()
tracked = Trackers([TensorBoard(Path(sys.argv[1]))], [{"loss": 1.0, "step": 0}])
tracked.close()
assert "tensorboard" in sys.modules
print(sorted({"torch", "tensorflow", "transformers"} & sys.modules.keys()))
"""


def test_tensorboard_is_written_without_torch(tmp_path):
    done = python(WITHOUT_TORCH, tmp_path)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert scalars(tmp_path) == [(0, 1.0)]
