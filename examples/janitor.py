"""Ends every hour what dead runs left at clouds, and keeps the fleet of a run when asked to: `python examples/janitor.py`.

Both are served by this process, beside a Prefect server, so they work where the directories of the runs are.
"""

from pathlib import Path

from prefect import serve

from flows.fleet import fleet, janitor

if __name__ == "__main__":
    serve(
        janitor.to_deployment("hourly", cron="0 * * * *", parameters={"directory": str(Path("runs").resolve())}),
        # prefect deployment run echo2-fleet/rented --param run="$PWD/runs/rented" --param hub_url=http://203.0.113.7:8700
        fleet.to_deployment("rented"),
    )
