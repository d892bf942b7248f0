"""The run directory: the contract between learner and hub.

    runs/<run>/{run.json, token, config.toml, ledger.db, snapshots/, checkpoints/, report/, tensorboard/, logs/, summary.json}

Invariants: everything in it is stamped with the run id; one learner at a time holds it; a directory of another run is refused.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from echo2 import __version__
from echo2.config import Config, dump_toml, load_config
from echo2.durability import naming, write_atomically
from echo2.errors import UserError
from echo2.holding import held

# A resumed run may change how long and how it runs, not what it learns from.
FIXED_SECTIONS = ("model", "task", "batch", "sampling", "staleness", "evaluation", "learner.lora")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run's place on disk, as far as it takes to look at it."""

    path: Path
    run_id: str
    config: Config

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.db"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def learner_lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def hub_lock(self) -> Path:
        return self.path / "hub.lock"

    @property
    def fleet_lock(self) -> Path:
        return self.path / "fleet.lock"

    @property
    def base(self) -> Path:
        """Weights that a run with adapters starts from and never changes, as a snapshot."""
        return self.path / "base"


@dataclass(frozen=True, slots=True)
class RunDirectory(RunRecord):
    """A run's place on disk, for those who take part in it. `token` is the secret that every request must carry."""

    token: str

    def held(self) -> AbstractContextManager[None]:
        """Hold the run for one learner; raises InUse if another process holds it."""
        return held(self.learner_lock, f"run {self.path} is in use by another learner: wait for it or stop it")


def read_run(path: Path) -> RunRecord:
    """Look up an existing run; raises UserError if there is none, or it may not be read."""
    try:
        stamp = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is not the directory of a run: check the path (echo2 train makes one)") from None
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read ({error.strerror}): change the run's permissions, or look as the user who trains"
        ) from None
    except ValueError:
        stamp = None
    if not isinstance(stamp, dict) or not isinstance(stamp.get("run_id"), str):
        raise UserError(f"{path / 'run.json'} is damaged: restore it or start another run")
    if not (path / "config.toml").exists():
        raise UserError(f"{path / 'config.toml'} is missing from the run: restore it or start another run")
    return RunRecord(path, stamp["run_id"], load_config([path / "config.toml"]))


def open_run(path: Path) -> RunDirectory:
    """Open an existing run to take part in it; raises UserError as `read_run` does, and without the run's token."""
    run = read_run(path)
    try:
        token = (path / "token").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    if not token:
        raise UserError(f"{path / 'token'} holds no token: restore it or start another run")
    return RunDirectory(path, run.run_id, run.config, token)


def find_run(config: Config, resume: bool) -> RunDirectory | None:
    """The run that `config` goes on with; None where its place is free.

    Raises UserError for a directory that holds a run when `resume` is false, one whose fixed settings differ, or foreign files.
    """
    path = config.run.directory.expanduser() / config.run.name
    if (path / "run.json").exists():
        if not resume:
            raise UserError(
                f"{path} already holds a run: add --resume to go on with it, or choose another run.name or run.directory"
            )
        return _take_up(path, config)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} holds files that are not of a run: choose another run.name or run.directory")
    return None


def create_run(config: Config, resume: bool) -> RunDirectory:
    """Make the run's directory, or with `resume` take up the one that is there. Raises UserError as `find_run` does.

    The same where it cannot be written.
    """
    found = find_run(config, resume)
    if found is not None:
        with naming(found.path / "config.toml"):
            write_atomically(found.path / "config.toml", dump_toml(config))
        return found
    path = config.run.directory.expanduser() / config.run.name
    run = RunDirectory(path, f"{config.run.name}-{secrets.token_hex(4)}", config, secrets.token_urlsafe(32))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as unfinished:
            _fill(run, Path(unfinished) / "run")
            (Path(unfinished) / "run").rename(path)
    except OSError as error:
        raise UserError(f"run directory {path} cannot be made ({error.strerror}): choose another run.directory") from None
    return run


def _fill(run: RunDirectory, folder: Path) -> None:
    """Make all that a run's directory begins with, in a folder that gets its name once it is whole."""
    folder.mkdir()
    for name in ("snapshots", "checkpoints", "report", "logs"):
        (folder / name).mkdir()
    write_atomically(folder / "config.toml", dump_toml(run.config))
    write_atomically(folder / "token", run.token + "\n", mode=0o600)
    stamp = {"run_id": run.run_id, "created_unix_s": time.time(), "echo2": __version__}
    write_atomically(folder / "run.json", json.dumps(stamp, indent=2) + "\n")


def _take_up(path: Path, config: Config) -> RunDirectory:
    run = open_run(path)
    for section in FIXED_SECTIONS:
        before, now = attrgetter(section)(run.config), attrgetter(section)(config)
        if before != now:
            raise UserError(
                f"{path} was made with another [{section}] ({_difference(before, now)}): "
                "a resumed run keeps it; restore the setting or choose another run.name"
            )
    if run.config.run.seed != config.run.seed:
        raise UserError(
            f"{path} was made with run.seed = {run.config.run.seed}, not {config.run.seed}: a resumed run keeps its seed"
        )
    return RunDirectory(path, run.run_id, config, run.token)


def _difference(before: object, now: object) -> str:
    if type(before) is not type(now):
        return f"{type(before).__name__}, now {type(now).__name__}"
    changed = [name for name, value in vars(before).items() if value != getattr(now, name)]
    return ", ".join(f"{name} = {getattr(before, name)}, now {getattr(now, name)}" for name in changed)
