"""The processes of a learner that is spread over several devices of one machine: rank 0 leads, the others follow it.

Invariants: a follower does what it is told, in order, and nothing else; it ends with the process that leads, even by kill −9;
one that dies, or does not keep up for `learner.rank_timeout_s`, is named in one error, and nobody waits for it any longer.
Orders go through a pipe, since a follower may wait for the next one as long as the run waits for a batch; bulk goes through
torch.distributed: gloo between CPUs, NCCL between CUDA devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from echo2.config import Config
from echo2.errors import ConfigError
from echo2.learning.learner import LearnerError
from echo2.learning.sharding import Shards
from echo2.logs import ending_of, open_log

POLL_S = 0.1
START_TIMEOUT_S = 180.0
STOP_S = 10.0
GRACE_S = 5.0
"""How long after an error among ranks the one that caused it is waited for."""
STORE = "store"
Thing = TypeVar("Thing")


class Ranks:
    """Ranks 1 to `learner.devices` − 1 as processes of their own, from their start to `close`."""

    def __init__(self, config: Config, model_folder: Path, log_folder: Path) -> None:
        """Starts them; they write to `log_folder/rank-N.log`. Raises ConfigError where there are fewer devices than ranks."""
        check_devices(config)
        self._config = config
        self._logs = {rank: log_folder / f"rank-{rank}.log" for rank in range(1, config.learner.devices)}
        self._meeting = tempfile.TemporaryDirectory(prefix="echo2-ranks-")
        self._closing = False
        self._joined = False
        self._ended: list[int] = []
        start = {
            "config": config.model_dump(mode="json"),
            "model_folder": str(model_folder.absolute()),
            "store": str(self._store),
            "parent": os.getpid(),
        }
        self._processes = {rank: _launch(log) for rank, log in self._logs.items()}
        for rank, process in self._processes.items():
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
            self._tell(rank, start | {"rank": rank})

    @property
    def _store(self) -> Path:
        return Path(self._meeting.name) / STORE

    def join(self) -> Shards:
        """Meet the others; raises LearnerError for one that ends before."""
        store = open_store(self._store, self._config)
        deadline = time.monotonic() + START_TIMEOUT_S
        while missing := [rank for rank in self._logs if not store.check([f"ready-{rank}"])]:
            self.raise_if_lost("at its start")
            if time.monotonic() > deadline:
                raise LearnerError(
                    f"rank {missing[0]} of the learner's {self._config.learner.devices} was not ready within "
                    f"{START_TIMEOUT_S:g} s: look into {self._logs[missing[0]]}"
                )
            time.sleep(POLL_S)
        with self.together("at its start"):
            shards = meet(store, self._config, rank=0)
            self._joined = True
        return shards

    def order(self, action: str, **details: Any) -> None:
        """Tell all followers what to do next."""
        for rank in self._logs:
            self._tell(rank, {"action": action} | details)

    @contextmanager
    def together(self, when: str) -> Iterator[None]:
        """What all ranks do at the same time; raises LearnerError if one of them is lost meanwhile."""
        try:
            yield
        except RuntimeError as error:
            self._explain(error, when)
            raise
        self.raise_if_lost(when)

    def raise_if_lost(self, when: str) -> None:
        """Raises LearnerError if a rank has ended."""
        if self._ended:
            first = self._ended[0]
            ending = ending_of(self._processes[first].wait(), self._logs[first])
            raise LearnerError(
                f"rank {first} of the learner's {self._config.learner.devices} ended {when} ({ending}): look into "
                f"{self._logs[first]}, then go on from the last checkpoint with --resume"
            )

    def close(self) -> None:
        """End the followers, kindly at first; when this returns they are gone."""
        self._closing = True
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + (0.0 if self._ended else STOP_S)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._joined:
            distributed.destroy_process_group()
            self._joined = False
        self._meeting.cleanup()

    def _explain(self, error: RuntimeError, when: str) -> None:
        """Raises LearnerError if a rank is the cause of an error among them; those that end in consequence end after it.

        When one stalls, all others give up waiting and end, so it is the one that is left.
        """
        # torch has no class of its own for what took too long.
        overdue = any(words in str(error).lower() for words in ("timed out", "timeout"))
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and (overdue or not self._ended):
            time.sleep(POLL_S)
        if overdue:
            raise self._silent([rank for rank, process in self._processes.items() if process.poll() is None], when) from error
        try:
            self.raise_if_lost(when)
        except LearnerError as lost:
            raise lost from error

    def _silent(self, ranks: list[int], when: str) -> LearnerError:
        named = ", ".join(f"rank {rank}" for rank in ranks) or "a rank"
        return LearnerError(
            f"{named} of the learner's {self._config.learner.devices} did not keep up {when} within learner.rank_timeout_s = "
            f"{self._config.learner.rank_timeout_s:g}: look into {self._logs[1].parent}, or raise it"
        )

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self._closing:
            self._ended.append(rank)
            if self._joined:
                # NCCL would wait for the lost rank; gloo has noticed by itself.
                distributed.group.WORLD.abort()

    def _tell(self, rank: int, order: dict[str, Any]) -> None:
        stream = self._processes[rank].stdin
        assert stream is not None
        try:
            stream.write(json.dumps(order).encode() + b"\n")
            stream.flush()
        except BrokenPipeError:
            # Its end is told where it is waited for.
            return


def check_devices(config: Config) -> None:
    """Raises ConfigError if there are fewer CUDA devices than the learner is to have."""
    devices, there = config.learner.devices, torch.cuda.device_count()
    if _on_cuda(config) and there < devices:
        instead = f"lower it to {there}" if there else "set learner.device=cpu"
        raise ConfigError(f"learner.devices = {devices}, but this machine has {there} CUDA devices: {instead}")


def open_store(file: Path, config: Config) -> distributed.FileStore:
    """Where the ranks find each other: a file that only this user can read."""
    store = distributed.FileStore(str(file), config.learner.devices)
    store.set_timeout(timedelta(seconds=config.learner.rank_timeout_s))
    return store


def meet(store: distributed.FileStore, config: Config, rank: int) -> Shards:
    """Join the ranks, which all have to call this; returns this one's part."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cuda, devices = _on_cuda(config), config.learner.devices
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=devices,
        timeout=timedelta(seconds=config.learner.rank_timeout_s),
    )
    return Shards(device, init_device_mesh(device.type, (devices,)))


def broadcast(thing: Thing | None) -> Thing:
    """What rank 0 gives, on every rank; it must not be None there."""
    things = [thing]
    distributed.broadcast_object_list(things, src=0, device=torch.device("cpu"))
    assert things[0] is not None
    return things[0]


def _on_cuda(config: Config) -> bool:
    return config.learner.device == "cuda" or (config.learner.device == "auto" and torch.cuda.is_available())


def _launch(log: Path) -> subprocess.Popen[bytes]:
    with open_log(log) as output:
        # A session of its own, so that Ctrl-C reaches only the process that leads.
        return subprocess.Popen(
            [sys.executable, "-m", "echo2.learning.follower"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
