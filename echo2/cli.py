"""The command line: `echo2 plan | train | fleet | simulate | worker | hub | status | completions | costs | down`.

Invariants: nothing heavy is imported before a command runs; an error that the user can mend is one line on standard error and
exit code 2; an interrupted run ends with exit code 130.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from echo2 import __version__
from echo2.errors import REFUSED, SPEAKER, UserError
from echo2.logs import drop_unwritten

if TYPE_CHECKING:
    from clouds.renting import Renting
    from echo2.capacity.plan import Plan
    from echo2.capacity.terms import Terms

# Whether a run may be read is said in one line when it is, not by click with the usage.
RUN_PATH = click.Path(path_type=Path, readable=False)
OVERRIDES_HELP = "CONFIG… are TOML files, read left to right; SECTION.KEY=VALUE overrides them."


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="echo2")
def echo2() -> None:
    """Reinforcement-learning post-training with one busy learner and cheap, scattered rollout workers."""


@echo2.command(epilog=OVERRIDES_HELP)
@click.argument("settings", nargs=-1, metavar="[CONFIG]… [SECTION.KEY=VALUE]…")
@click.option("--from-run", "run", type=RUN_PATH, help="Take the terms that the run in this directory measured.")
@click.option("--catalog", metavar="DIR", help="Choose machines from the SkyPilot catalog in this folder.")
@click.option("--plot", "plot_target", metavar="FILE", help="Draw utilisation against pool, S and D (.png).")
def plan(settings: tuple[str, ...], run: Path | None, catalog: str | None, plot_target: str | None) -> None:
    """Predict step time, learner utilisation, what binds, and the throughput that the learner needs.

    With --from-run the configuration is the run's own, unless a CONFIG is given. With --catalog, or activation.catalog, also
    which machines of which clouds give that throughput at the least cost.
    """
    from echo2.capacity.plan import make_plan, render_plan
    from echo2.capacity.plots import plot_plan

    plot_file = None if plot_target is None else _checked_plot_file(plot_target)
    if catalog is not None:
        settings = (*settings, f"activation.catalog={json.dumps(catalog)}")
    config, terms = (_load(settings), None) if run is None else _measured_terms(run, settings)
    made = make_plan(config, terms)
    click.echo(render_plan(made))
    _warn_of_cap(config)
    renting = _machines(config, made, run) if config.activation.catalog else None
    if renting is not None:
        from clouds.renting_text import render_renting

        click.echo(f"\n{render_renting(renting)}")
    if plot_file is not None:
        _write_plot(partial(plot_plan, made), plot_file)
        click.echo(f"\nUtilisation against pool, S and D is drawn in {plot_file}")
    if renting is not None and renting.activation.selection is None:
        raise UserError(f'no machines of {renting.catalog} can be rented for run {config.run.name}: see "No plan" above')


@echo2.command(epilog=OVERRIDES_HELP)
@click.argument("settings", nargs=-1, metavar="[CONFIG]… [SECTION.KEY=VALUE]…")
@click.option("--resume", is_flag=True, help="Go on with the run that is in the run's directory, or start it.")
@click.option("--dry-run", is_flag=True, help="Print the configuration and the plan, check this machine, start nothing.")
def train(settings: tuple[str, ...], resume: bool, dry_run: bool) -> None:
    """Train: start hub and workers, run the learner as Prefect flows, end with a summary."""
    from flows.interrupts import raise_on_signals

    # Before anything that takes long: one that is told to end while it starts is to say so.
    raise_on_signals()
    config = _load(settings)
    if dry_run:
        from echo2.capacity.plan import make_plan, render_plan
        from echo2.config import dump_toml

        click.echo(dump_toml(config))
        click.echo(render_plan(make_plan(config)))
        from flows.preflight import check_startable, unchecked

        check_startable(config, resume)
        left = "; ".join(unchecked(config)) or "nothing"
        click.echo(f"\nThis machine can start the run. Not checked before it does: {left}.")
        _warn_of_cap(config)
        return
    from flows.run import run_to_end

    run_to_end(config, resume)


@echo2.command()
@click.argument("run", type=RUN_PATH)
@click.option("--hub", "hub_url", required=True, help="Address of the run's hub as rented machines reach it.")
def fleet(run: Path, hub_url: str) -> None:
    """Rent machines for the run in directory RUN as `echo2 plan` would, and keep to the plan until the run is over.

    It may be stopped and started again at any time: the machines stay, and are taken up.
    """
    import logging

    from clouds.keeping import keep_fleet

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("httpx", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    keep_fleet(run, hub_url)


@echo2.command()
@click.argument("run", type=RUN_PATH)
@click.option("--now", is_flag=True, help="Kill at once, without a last checkpoint.")
@click.option("--timeout-s", type=click.FloatRange(min=0.0, min_open=True), default=300.0, help="For each process; 300 s.")
def down(run: Path, now: bool, timeout_s: float) -> None:
    """End all that works for the run in directory RUN on this node, and the machines that it has rented.

    `echo2 train --resume` goes on with the run. Workers that others started end once their hub has been away for
    worker.orphan_timeout_s.
    """
    from clouds.shutdown import end_run

    end_run(run, now, timeout_s, click.echo)


@echo2.command(epilog=OVERRIDES_HELP)
@click.argument("settings", nargs=-1, metavar="[CONFIG]… [SECTION.KEY=VALUE]…")
@click.option(
    "--spot-traces", "folder", type=RUN_PATH, metavar="DIR", help="Traces to replay; by default one set of those shipped."
)
@click.option("--catalog", metavar="DIR", help="Rent from the SkyPilot catalog in this folder.")
@click.option("--machine", default="", metavar="TYPE", help="Rent this instance type; by default the cheapest per rollout.")
@click.option("--machines-each", type=click.IntRange(min=1), default=1, help="Machines that stand behind each one traced.")
@click.option("--plot", "plot_target", metavar="FILE", help="Draw spot machines, fleet and utilisation over time (.png).")
@click.option("--json", "json_file", type=RUN_PATH, metavar="FILE", help="Write everything as JSON.")
def simulate(
    settings: tuple[str, ...],
    folder: Path | None,
    catalog: str | None,
    machine: str,
    machines_each: int,
    plot_target: str | None,
    json_file: Path | None,
) -> None:
    """Replay real spot availability and preemption against the run that is configured, as `echo2 fleet` would take it.

    Each set of traces in DIR is replayed on a virtual clock, with the catalog's prices.
    """
    import logging

    from clouds.comparison import compare, describe_comparison, plot_comparisons, render_comparison
    from clouds.replay_market import choose_kind
    from clouds.traces import DEFAULT_TRACES, read_traces
    from echo2.capacity.plan import make_plan

    plot_file = None if plot_target is None else _checked_plot_file(plot_target)
    if json_file is not None and (reason := _why_unwritable(json_file)):
        raise UserError(f"--json {json_file} cannot be written ({reason}): name a file that you may write")
    if catalog is not None:
        settings = (*settings, f"activation.catalog={json.dumps(catalog)}")
    config = _load(settings)
    if not config.activation.catalog:
        raise UserError("activation.catalog is empty: name a SkyPilot catalog with --catalog, such as ~/.sky/catalogs/v8")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sets, plan = read_traces(folder or DEFAULT_TRACES), make_plan(config)
    kind, found = choose_kind(config, plan, machine), []
    for traces in sets:
        found.append(compare(config, plan, traces, kind, machines_each))
        click.echo(f"{render_comparison(found[-1])}\n")
    if json_file is not None:
        json_file.write_text(json.dumps([describe_comparison(each) for each in found], indent=1) + "\n", encoding="utf-8")
    if plot_file is not None:
        _write_plot(partial(plot_comparisons, found), plot_file)
        click.echo(f"Spot machines, fleet and utilisation over time are drawn in {plot_file}")


@echo2.command(epilog="SECTION.KEY=VALUE changes this worker's own settings, for example worker.slots=64.")
@click.option("--hub", "hub_url", required=True, help="Address of the hub, for example http://10.0.0.5:8700.")
@click.option(
    "--name", default=None, help="Name that no other worker has; by default the host's name and the process's number."
)
@click.option("--parent", "parent_pid", type=int, hidden=True)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]…")
def worker(hub_url: str, name: str | None, parent_pid: int | None, overrides: tuple[str, ...]) -> None:
    """Generate rollouts for the hub until SIGTERM; the run's token is read from ECHO2_TOKEN."""
    from echo2.rollout.notice import Notice

    # Before anything that takes long: one that is told to leave while it starts is to leave in order.
    notice = Notice()
    from echo2.rollout.process import work

    token = os.environ.get("ECHO2_TOKEN", "").strip()
    if not token:
        raise UserError("ECHO2_TOKEN is not set: give it the content of the run's file `token`")
    work(hub_url, token, name or f"{socket.gethostname()}-{os.getpid()}"[-64:], list(overrides), parent_pid, notice)


@echo2.command()
@click.argument("run", type=RUN_PATH)
@click.option("--fd", "listening_fd", type=int, hidden=True)
@click.option("--parent", "parent_pid", type=int, hidden=True)
def hub(run: Path, listening_fd: int | None, parent_pid: int | None) -> None:
    """Serve the run in directory RUN until SIGTERM; `echo2 train` does this by itself."""
    from echo2.hub.server import serve

    serve(run, listening_fd, parent_pid)


@echo2.command()
@click.argument("run", type=RUN_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def status(run: Path, as_json: bool) -> None:
    """Show how the run in directory RUN stands, from its ledger; the run may be going on or over."""
    from echo2.hub.inspection import inspect_run
    from echo2.report import render_status

    found: dict[str, Any] = inspect_run(run)
    click.echo(json.dumps(found, indent=2) if as_json else render_status(found), nl=False)


@echo2.command()
@click.argument("run", type=RUN_PATH)
@click.option("--step", type=click.IntRange(min=0), help="Of groups that were trained or filtered at this step.")
@click.option("--evaluation", type=click.IntRange(min=0), metavar="VERSION", help="Of the evaluation of this version.")
@click.option("--groups", type=click.IntRange(min=1), default=4, show_default=True, help="How many groups, the newest first.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per line, with the whole texts.")
def completions(run: Path, step: int | None, evaluation: int | None, groups: int, as_json: bool) -> None:
    """Show what the policy of the run in directory RUN writes: prompts, completions, rewards.

    Those of trained groups are kept as long as a checkpoint may ask for them again; of groups that were evaluated, and of
    those that were dropped, the newest 64.
    """
    from echo2.hub.completions import as_json_lines, render_completions
    from echo2.hub.inspection import completions_of
    from echo2.run_directory import read_run

    found = completions_of(read_run(run), groups, step, evaluation)
    click.echo(as_json_lines(found) if as_json else render_completions(found), nl=False)


@echo2.command()
@click.argument("run", type=RUN_PATH)
@click.option("--catalog", metavar="DIR", help="Compare with the prices of the SkyPilot catalog in this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def costs(run: Path, catalog: str | None, as_json: bool) -> None:
    """Show what the workers of the run in directory RUN cost: by offer, per step, rollout and token, and what was wasted.

    With --catalog, or activation.catalog of the run, also what the same rollouts would have cost on demand.
    """
    from clouds.costs import alternatives, describe_costs, render_costs
    from clouds.renting import Measured
    from echo2.config import override
    from echo2.hub.inspection import costs_of, rentals_of, snapshot_bytes_of
    from echo2.run_directory import read_run

    record = read_run(run)
    config = record.config
    if catalog is not None:
        config = override(config, [f"activation.catalog={json.dumps(catalog)}"])
    found = costs_of(record)
    others = alternatives(found, config, Measured(str(run), rentals_of(record), snapshot_bytes_of(record)))
    told = (record.run_id, found, others, config.activation.budget_usd)
    click.echo(json.dumps(describe_costs(*told), indent=2) if as_json else render_costs(*told))


def _measured_terms(path: Path, settings: tuple[str, ...]) -> tuple[Any, Terms]:
    """What the run in `path` measured, and the configuration to plan with; raises UserError where a term was not measured."""
    from echo2.capacity.calibration import calibrate
    from echo2.capacity.terms import what_if
    from echo2.config import override
    from echo2.hub.inspection import observe_run
    from echo2.run_directory import read_run

    measured = read_run(path)
    named = [setting for setting in settings if "=" not in setting]
    config = _load(settings if named else (str(measured.path / "config.toml"), *settings))
    terms = calibrate(observe_run(measured)).terms(str(path))
    given = {setting.partition("=")[0].strip() for setting in settings}
    if not (named or "fleet.workers" in given) or not config.fleet.workers:
        config = override(config, [f"fleet.workers={terms.workers}"])
    return config, what_if(terms, measured.config, config, given)


def _machines(config: Any, made: Plan, run: Path | None) -> Renting:
    """Which machines to rent; raises UserError where the catalog or the model cannot be used."""
    from clouds.renting import NOTHING_MEASURED, Measured, choose_machines
    from echo2.hub.inspection import rentals_of, snapshot_bytes_of
    from echo2.run_directory import read_run

    measured = NOTHING_MEASURED
    if run is not None:
        record = read_run(run)
        measured = Measured(str(run), rentals_of(record), snapshot_bytes_of(record))
    return choose_machines(config, made, measured)


def _checked_plot_file(target: str) -> Path:
    """The file to draw into, checked before anything is computed; raises UserError where it could not be written."""
    file = Path(target)
    # Path forgets a slash at the end, which asks for a folder.
    if file.suffix.lower() != ".png" or not target.lower().endswith(".png"):
        raise UserError(f"--plot {target!r} does not end in .png: the plot is a PNG picture, so name it like one")
    if reason := _why_unwritable(file):
        raise _cannot_be_drawn(file, reason)
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib, which is not installed: pip install '.[learner]'")
    return file


def _why_unwritable(file: Path) -> str:
    """Why the file could not be written, checked before anything is computed; empty where it could."""
    if file.is_dir():
        return os.strerror(errno.EISDIR)
    if not file.parent.is_dir():
        return os.strerror(errno.ENOENT)
    return "" if os.access(file if file.exists() else file.parent, os.W_OK) else os.strerror(errno.EACCES)


def _write_plot(draw: Callable[[Any], None], file: Path) -> None:
    """`draw` is given a figure of matplotlib. Raises UserError where `file` cannot be written after all."""
    from matplotlib.figure import Figure

    figure, picture = Figure(), io.BytesIO()
    draw(figure)
    figure.savefig(picture, format="png", dpi=120)
    try:
        file.write_bytes(picture.getvalue())
    except OSError as error:
        raise _cannot_be_drawn(file, str(error.strerror)) from error


def _cannot_be_drawn(file: Path, reason: str) -> UserError:
    return UserError(f"--plot {file} cannot be written ({reason}): name a file that you may write")


def _warn_of_cap(config: Any) -> None:
    from echo2.models.sizes import warning_of_cap

    if warning := warning_of_cap(config):
        click.echo(f"\n{warning}")


def _load(settings: tuple[str, ...]) -> Any:
    from echo2.config import load_config

    files = [Path(setting) for setting in settings if "=" not in setting]
    return load_config(files, [setting for setting in settings if "=" in setting])


def main() -> None:
    """Run a command; the exit code tells how it ended."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        echo2.main(standalone_mode=False)
    except UserError as error:
        _fail(str(error), REFUSED)
    except click.ClickException as error:
        error.show()
        sys.exit(REFUSED)
    except (KeyboardInterrupt, click.Abort):
        _leave_interrupted()
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'the output'}: {error.strerror}", REFUSED)
    finally:
        drop_unwritten()


def _leave_interrupted() -> None:
    _say("interrupted")
    drop_unwritten()
    # Python would end by SIGINT, whatever exit code it is given, if the interrupt met code that was made from a string.
    os._exit(130)


def _fail(sentence: str, code: int) -> None:
    _say(sentence)
    sys.exit(code)


def _say(sentence: str) -> None:
    # Where the output is on a disk that is full, the exit code is all that can be told.
    with contextlib.suppress(OSError):
        click.echo(f"{SPEAKER}{sentence}", err=True)
