"""Checkpoints in an S3-compatible bucket, by way of this machine's disk.

    PREFIX/checkpoints/<run id>/version-00000010/{…, state.json}

Invariants: a checkpoint is whole on this machine before any of it travels, and leaves this machine once it is whole in the
bucket, where its `state.json` comes last and goes first; the learner waits for the bucket at the start and the end of a segment
alone; a bucket that fails is told of once, and what it did not take stays here, to travel with the next checkpoint.
"""

from __future__ import annotations

import logging
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from echo2.dissemination.object_store.bucket import Bucket, ObjectStoreError
from echo2.learning.checkpoint import (
    NAME,
    STATE,
    UNFINISHED,
    CheckpointFolder,
    CheckpointState,
    CheckpointStore,
    name_of,
    parse_state,
)

log = logging.getLogger(__name__)
LONGEST_STATE_BYTES = 1024 * 1024


class CheckpointBucket(CheckpointStore):
    """One run's checkpoints in a bucket; a thread of its own, which does one thing after the other, sends and removes them."""

    def __init__(self, bucket: Bucket, run_id: str, staging: Path, on_trouble: Callable[[str], None]) -> None:
        """`staging` is a folder of this machine; `on_trouble` is told once that checkpoints begin to stay there, and why."""
        self._bucket = bucket
        self._root = f"checkpoints/{run_id}/"
        self._staging = staging
        self._local = CheckpointFolder(staging)
        self._on_trouble = on_trouble
        self._troubled = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._jobs: deque[Future[None]] = deque()

    def states(self) -> dict[int, CheckpointState | None]:
        """As `CheckpointStore.states`, and forgets what an interruption left in the bucket. Raises ObjectStoreError."""
        versions: dict[int, bool] = {}
        for key in self._bucket.keys(self._root):
            name, _, file = key.removeprefix(self._root).partition("/")
            if match := NAME.fullmatch(name):
                versions[int(match[1])] = versions.get(int(match[1]), False) or file == STATE
        for version in (version for version, whole in versions.items() if not whole):
            self._submit(self._clear, version)
        return {version: self._state(version) for version, whole in versions.items() if whole} | self._local.states()

    def place(self, version: int) -> str:
        if version in self._local.versions():
            return self._local.place(version)
        return f"{self._bucket.location.rstrip('/')}/{self._root}{name_of(version)}"

    @contextmanager
    def writing(self, version: int) -> Iterator[Path]:
        with self._local.writing(version) as folder:
            yield folder
        self._submit(self._send_all)

    @contextmanager
    def reading(self, version: int) -> Iterator[Path]:
        """As `CheckpointStore.reading`; raises ObjectStoreError where the bucket cannot be read."""
        if version in self._local.versions():
            with self._local.reading(version) as folder:
                yield folder
            return
        self._staging.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=self._staging) as fetched:
            for key in self._bucket.keys(self._folder_of(version)):
                self._bucket.download(key, Path(fetched) / key.rsplit("/", 1)[-1])
            yield Path(fetched)

    def delete(self, version: int) -> None:
        self._submit(self._remove, version)

    def close(self) -> None:
        self._submit(self._send_all)
        self._thread.shutdown(wait=True)
        self._raise_failures()

    def _submit(self, job: Callable[..., None], *arguments: int) -> None:
        """Leave something to the thread; raises what an earlier job raised."""
        self._raise_failures()
        self._jobs.append(self._thread.submit(job, *arguments))

    def _raise_failures(self) -> None:
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()

    def _state(self, version: int) -> CheckpointState | None:
        with self._bucket.opened(self._folder_of(version) + STATE, 0, LONGEST_STATE_BYTES) as (_, body):
            content = body.read()
        try:
            return parse_state(content)
        except ValueError:
            return None

    def _send_all(self) -> None:
        """Send what lies here, the oldest first."""
        with self._telling(f"checkpoints stay in {self._staging}"):
            for version in self._local.versions():
                with self._local.reading(version) as folder:
                    for file in sorted(folder.iterdir(), key=lambda file: file.name == STATE):
                        with file.open("rb") as content:
                            self._bucket.upload(self._folder_of(version) + file.name, content, file.stat().st_size, {})
                self._local.delete(version)

    def _remove(self, version: int) -> None:
        if version in self._local.versions():
            self._local.delete(version)
        self._clear(version)

    def _clear(self, version: int) -> None:
        """Leave nothing of a checkpoint in the bucket."""
        with self._telling(f"old checkpoints stay in {self._bucket.location}"):
            keys = self._bucket.keys(self._folder_of(version))
            for key in sorted(keys, key=lambda key: not key.endswith(STATE)):
                self._bucket.delete(key)
            self._bucket.abort_uploads(self._folder_of(version))

    @contextmanager
    def _telling(self, consequence: str) -> Iterator[None]:
        try:
            yield
        except ObjectStoreError as error:
            if not self._troubled:
                self._on_trouble(f"{consequence}: {error}")
            self._troubled = True
        else:
            if self._troubled:
                log.warning("%s takes checkpoints again", self._bucket.location)
            self._troubled = False

    def _folder_of(self, version: int) -> str:
        return f"{self._root}{name_of(version)}/"
