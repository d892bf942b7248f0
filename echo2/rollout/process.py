"""The worker's process: from an address and a token to a running worker."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial

from echo2.config import Config, override, worker_settings
from echo2.errors import ConfigError, UserError, reason_of
from echo2.hub.client import HubClient
from echo2.lifeline import end_with_parent
from echo2.logs import say
from echo2.rollout.notice import Interrupted, Notice
from echo2.rollout.preemption import NoticeReader, board_of
from echo2.rollout.worker import Worker

log = logging.getLogger(__name__)
PARENTLESS_NOTICE_S = 3.0
"""The learner that started this worker is gone, and most likely its hub with it: there is nobody to hand much to."""


def work(hub_url: str, token: str, name: str, overrides: list[str], parent_pid: int | None, notice: Notice) -> None:
    """Register with the hub and work until the run ends, or until a `notice`.

    `overrides` change this worker's own settings. Raises UserError if they are not or cannot work here, or if the hub cannot be
    reached.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    foreign = [text for text in overrides if not text.startswith("worker.")]
    if foreign:
        raise ConfigError(f"{foreign[0]} is not a worker's own setting: only worker.KEY=VALUE can be changed here")
    own = worker_settings(overrides)
    client = HubClient(hub_url, token, request_timeout_s=own.request_timeout_s, patience_s=own.orphan_timeout_s)
    say(f"worker {name} joins hub {client.url}")
    try:
        with notice.interrupting():
            welcome = client.register(name)
    except Interrupted:
        say(f"worker {name} left before it had joined hub {client.url}")
        return
    try:
        config = override(Config.model_validate(welcome.config), overrides)
        client.request_timeout_s = config.worker.request_timeout_s
        os.environ.setdefault("OMP_NUM_THREADS", str(config.worker.threads))
        worker = Worker(client, name, config, welcome, token, notice.given)
    except BaseException as error:
        with contextlib.suppress(UserError):
            client.leave(welcome.worker_id, reason_of(error))
        raise
    if parent_pid is not None:
        end_with_parent(parent_pid, partial(worker.stop, PARENTLESS_NOTICE_S))
    _heed_notices(worker, config.worker.preemption_notice)
    say(f"worker {welcome.worker_id} serves run {welcome.run_id}")
    try:
        worker.run()
    finally:
        client.close()
    say(f"worker {welcome.worker_id} left" + (": the hub has no more for it to do" if worker.dismissed else ""))


def _heed_notices(worker: Worker, setting: str) -> None:
    """Have the worker leave when its cloud says that it takes the machine back."""

    def leave(notice: str) -> None:
        log.warning("this machine is taken back: %s; the worker hands in and leaves", notice)
        worker.stop(reason=f"its machine is taken back: {notice}")

    board = board_of(setting)
    if board is not None:
        NoticeReader(board, leave).start()
