"""Where the metrics of each step go: JSON lines, TensorBoard, Weights & Biases.

Invariants: the learner hands a step over and goes on at once, whatever a tracker does; a tracker that fails or falls behind is
told once, and the run goes on without it; a step that is trained again after a crash appears once; a tracker's package is
imported when its record is opened, and torch never is.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from echo2.config_sections import TrackingSection
from echo2.durability import naming, write_atomically
from echo2.errors import UserError, reason_of
from echo2.packages import missing_packages
from echo2.run_directory import RunDirectory

log = logging.getLogger(__name__)
QUEUED_STEPS = 1000
"""Steps that a tracker may be behind before it is given up."""
CLOSE_TIMEOUT_S = 20.0
"""How long the end of a segment waits for its trackers, all together."""
WANDB_TIMEOUT_S = 15.0
"""How long Weights & Biases may take to begin and to end; less than the wait for it, so that it can say what is wrong."""
WANDB_WITHOUT_LOGIN = ("offline", "dryrun", "disabled")
BUFFER_BYTES = 1 << 20
"""Above the size of any record, so that each goes to the system in one piece and survives a kill whole."""
EXTRAS = {"tensorboard": "learner", "wandb": "wandb"}
"""Packages of trackers, each called like its setting, and the extras that install them."""

Metrics = Mapping[str, float]
Entry = tuple[int, Metrics]


class Tracker(ABC):
    """A record of metrics by step. One thread uses it; whatever it raises ends the record, not the run."""

    name: ClassVar[str]
    """What a message calls it."""

    @abstractmethod
    def open(self, history: Sequence[Entry]) -> None:
        """Begin the record or go on with it: afterwards it holds the steps of `history`, which the ledger has, and no other."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Add the step that follows."""

    @abstractmethod
    def close(self) -> None:
        """End the record; called once, if nothing failed."""


class JsonLines(Tracker):
    """One JSON object per line, the step's metrics and its number as `step`."""

    name = "report/metrics.jsonl"

    def __init__(self, file: Path) -> None:
        self._file = file

    def open(self, history: Sequence[Entry]) -> None:
        with naming(self._file):
            write_atomically(self._file, "".join(_line(*entry) for entry in history))
            self._stream = self._file.open("ab", buffering=BUFFER_BYTES)

    def log(self, step: int, metrics: Metrics) -> None:
        with naming(self._file):
            self._stream.write(_line(step, metrics).encode())
            self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _line(step: int, metrics: Metrics) -> str:
    return json.dumps({**metrics, "step": step}) + "\n"


class TensorBoard(Tracker):
    """Scalars in an event file per segment, each of which begins by withdrawing the steps that are trained again."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, history: Sequence[Entry]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        with naming(self._folder):
            self._folder.mkdir(exist_ok=True)
            first = min(self._recorded_steps(), len(history))
            # TensorBoard reads the files of a folder in the order of their names.
            file = self._folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
            self._records = RecordWriter(file.open("wb", buffering=BUFFER_BYTES))
        self._write(file_version="brain.Event:2")
        self._write(step=first, session_log=SessionLog(status=SessionLog.START))
        for entry in history[first:]:
            self.log(*entry)

    def log(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        with naming(self._folder):
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
            self._records.flush()

    def _recorded_steps(self) -> int:
        """How many steps from 0 on the event files hold; one that a kill cut short is read as far as it goes."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for file in sorted(self._folder.glob("events.out.tfevents.*"), reverse=True):
            events = LegacyEventFileLoader(str(file)).Load()
            # The start of a file counts as well, since it withdraws what came before.
            ends = [e.step + e.HasField("summary") for e in events if e.HasField("summary") or e.HasField("session_log")]
            if ends:
                return ends[-1]
        return 0


class WandB(Tracker):
    """A run at Weights & Biases under this run's id; `WANDB_MODE` and its like count as they do elsewhere."""

    name = "Weights & Biases"

    def __init__(self, run: RunDirectory) -> None:
        self._place = run

    def open(self, history: Sequence[Entry]) -> None:
        import wandb

        config = self._place.config
        self._run = wandb.init(
            project=config.tracking.wandb_project,
            name=config.run.name,
            id=self._place.run_id,
            resume="allow",
            dir=self._place.path,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(
                console="off",
                init_timeout=WANDB_TIMEOUT_S,
                finish_timeout=WANDB_TIMEOUT_S,
                finish_timeout_raises=True,
            ),
        )
        for entry in history:
            self.log(*entry)

    def log(self, step: int, metrics: Metrics) -> None:
        # What is there cannot be changed; a step that is trained again comes from the same batch.
        if step >= self._run.step:
            self._run.log(dict(metrics), step=step, commit=True)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of a segment, each behind a queue and a thread of its own."""

    def __init__(
        self,
        trackers: Iterable[Tracker],
        steps: Sequence[Metrics],
        queued_steps: int = QUEUED_STEPS,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        """`steps` are the metrics of the committed steps from 0 on, each with its number as `step`."""
        history = [(int(step["step"]), {name: step[name] for name in step if name != "step"}) for step in steps]
        self._close_timeout_s = close_timeout_s
        self._lanes = [_Lane(tracker, history, queued_steps) for tracker in trackers]

    def log(self, step: int, metrics: Metrics) -> None:
        """Hand over a committed step; never waits."""
        for lane in self._lanes:
            lane.put((step, dict(metrics)))

    def close(self) -> None:
        """Wait until all is taken, or say which tracker did not get there in time."""
        deadline = time.monotonic() + self._close_timeout_s
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            if not lane.has_ended(deadline):
                lane.give_up(f"it did not take the last of them within {self._close_timeout_s:g} s")


class _Lane:
    """The way from the learner to one tracker."""

    def __init__(self, tracker: Tracker, history: Sequence[Entry], queued_steps: int) -> None:
        self._tracker = tracker
        self._history = history
        self._queued_steps = queued_steps
        self._entries: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._giving_up = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker {tracker.name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        if self._given_up.is_set():
            return
        if self._entries.qsize() >= self._queued_steps:
            self.give_up(f"it is {self._queued_steps} steps behind")
        else:
            self._entries.put(entry)

    def end(self) -> None:
        self._entries.put(None)

    def has_ended(self, deadline: float) -> bool:
        """Wait until `deadline` on the monotonic clock; a tracker that was given up is not waited for."""
        if not self._given_up.is_set():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._given_up.is_set() or not self._thread.is_alive()

    def give_up(self, reason: str) -> None:
        with self._giving_up:
            if not self._given_up.is_set():
                log.error("metrics no longer go to %s (%s); the run goes on without it", self._tracker.name, reason)
                # After it was said, since the end of the run does not wait for one that was given up.
                self._given_up.set()

    def _work(self) -> None:
        try:
            self._tracker.open(self._history)
            while not self._given_up.is_set() and (entry := self._entries.get()) is not None:
                self._tracker.log(*entry)
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - a tracker is others' code and may raise anything; the user is told what
            self.give_up(reason_of(error))


def check_trackers(settings: TrackingSection) -> None:
    """Raises UserError where the package of a tracker that is asked for is not installed, or its login is missing."""
    for package, extra in EXTRAS.items():
        if getattr(settings, package) and missing_packages([package]):
            raise UserError(
                f"tracking.{package} = true needs the package {package}, which is not installed: "
                f"pip install '.[{extra}]', or set tracking.{package}=false"
            )
    if settings.wandb:
        _check_wandb_login()


def _check_wandb_login() -> None:
    """Raises UserError where Weights & Biases would ask for a login in the midst of the run."""
    import wandb

    try:
        ready = wandb.setup().settings.mode in WANDB_WITHOUT_LOGIN or wandb.login(prompt=False, verify=False)
    except (ValueError, wandb.Error) as error:
        raise UserError(
            f"tracking.wandb = true, but Weights & Biases does not start ({' '.join(str(error).split())}): "
            f"mend its settings, or set tracking.wandb=false"
        ) from None
    if not ready:
        raise UserError(
            "tracking.wandb = true, but there is no login to Weights & Biases: run `wandb login`, or set WANDB_API_KEY, "
            "WANDB_MODE=offline or tracking.wandb=false"
        )


def make_trackers(run: RunDirectory) -> list[Tracker]:
    """The trackers that the run's configuration asks for, not yet opened; JSON lines always."""
    settings = run.config.tracking
    made: list[Tracker] = [JsonLines(run.report / "metrics.jsonl")]
    if settings.tensorboard:
        made.append(TensorBoard(run.path / "tensorboard"))
    if settings.wandb:
        made.append(WandB(run))
    return made
