"""The fleet of rented machines as a Prefect flow, and a janitor to be scheduled.

Invariant: both may be killed and started again at any time; see `clouds/keeping.py`.
"""

# Annotations stay real types: a deployment sends the flow to another process without this module's names.
from pathlib import Path

from prefect import flow

from clouds.keeping import Cleared, clear_up, keep_fleet
from echo2.errors import UserError


@flow(name="echo2-fleet", flow_run_name="{run}")
def fleet(run: Path, hub_url: str) -> None:
    """Rent machines for the run in directory `run`, whose hub they reach at `hub_url`, until it is over."""
    keep_fleet(run, hub_url)


@flow(name="echo2-janitor", flow_run_name="{directory}")
def janitor(directory: Path = Path("runs")) -> dict[str, Cleared]:
    """End the machines that dead runs in `directory` left; returns what was done, by run.

    Raises UserError where `directory` is no folder of runs or, once all runs were looked at, where something may be left.
    """
    cleared = clear_up(directory)
    troubles = [f"{run}: {done.trouble}" for run, done in cleared.items() if done.trouble]
    if troubles:
        raise UserError(f"machines of runs in {directory} may be left, look after them: {'; '.join(troubles)}")
    return cleared
