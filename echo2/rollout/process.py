"""The worker's process: from an address and a token to a running worker."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial

from echo2.config import Config, override, worker_settings
from echo2.errors import ConfigError
from echo2.hub.client import HubClient
from echo2.lifeline import end_with_parent
from echo2.rollout.worker import Worker

PARENTLESS_NOTICE_S = 3.0
"""The learner that started this worker is gone, and most likely its hub with it: there is nobody to hand much to."""


def work(hub_url: str, token: str, name: str, overrides: list[str], parent_pid: int | None) -> None:
    """Register with the hub and work until the run ends, or until SIGTERM or SIGINT.

    `overrides` change this worker's own settings. Raises UserError if they are not, or if the hub cannot be reached.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    foreign = [text for text in overrides if not text.startswith("worker.")]
    if foreign:
        raise ConfigError(f"{foreign[0]} is not a worker's own setting: only worker.KEY=VALUE can be changed here")
    own = worker_settings(overrides)
    client = HubClient(hub_url, token, request_timeout_s=own.request_timeout_s, patience_s=own.orphan_timeout_s)
    print(f"worker {name} joins hub {client.url}", flush=True)
    welcome = client.register(name)
    try:
        config = override(Config.model_validate(welcome.config), overrides)
    except ConfigError:
        client.leave(welcome.worker_id)
        raise
    client.request_timeout_s = config.worker.request_timeout_s
    os.environ.setdefault("OMP_NUM_THREADS", str(config.worker.threads))
    worker = Worker(client, name, config, welcome, token)
    for notice in (signal.SIGTERM, signal.SIGINT):
        signal.signal(notice, lambda *_: worker.stop())
    if parent_pid is not None:
        end_with_parent(parent_pid, partial(worker.stop, PARENTLESS_NOTICE_S))
    print(f"worker {welcome.worker_id} serves run {welcome.run_id}", flush=True)
    try:
        worker.run()
    finally:
        client.close()
    print(f"worker {welcome.worker_id} left" + (": the run has ended" if worker.run_ended else ""), flush=True)
