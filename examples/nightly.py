"""Goes on with one run every night at two, a segment at a time: `python examples/nightly.py` beside a Prefect server.

The deployment is served by this process, so the learner runs where it does.
"""

from pathlib import Path

from echo2.config import load_config
from flows.train import train

if __name__ == "__main__":
    config = load_config([Path("configs/demo.toml")], ["run.name=nightly", "run.steps=1000", "flow.segment_steps=200"])
    train.serve(
        name="nightly",
        cron="0 2 * * *",
        # The first night makes the run; later ones resume it.
        parameters={"config": config.model_dump(mode="json"), "resume": True},
        limit=1,
    )
