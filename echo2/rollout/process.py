"""The worker's process: from an address and a token to a running worker."""

from __future__ import annotations

import logging
import os
import signal

from echo2.config import Config, override
from echo2.errors import ConfigError
from echo2.hub.client import HubClient
from echo2.lifeline import end_with_parent
from echo2.rollout.worker import Worker


def work(hub_url: str, token: str, name: str, overrides: list[str], parent_pid: int | None) -> None:
    """Register with the hub and work until SIGTERM or SIGINT. `overrides` change this worker's own settings."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    client = HubClient(hub_url, token)
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
        end_with_parent(parent_pid, worker.stop)
    print(f"worker {welcome.worker_id} of run {welcome.run_id} serves hub {client.url}", flush=True)
    try:
        worker.run()
    finally:
        client.close()
    print(f"worker {welcome.worker_id} left", flush=True)
