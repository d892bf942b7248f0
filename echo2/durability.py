"""Files that are on the disk when a call returns, and never seen in part.

Invariants: what a failed write has left is removed, so that a disk that is full has the room again; a disk that fails is told
to the user with the name of what it did not take.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo2.errors import DiskError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a disk, or of a user's share of it, that is full."""


PARTIAL = ".partial"
"""How the name of a file ends whose writer has not come to its end yet, or was killed before."""


@contextmanager
def naming(place: Path) -> Iterator[None]:
    """A block that writes to `place` and nowhere else; raises DiskError, which names it, instead of OSError."""
    try:
        yield
    except OSError as error:
        raise unwritten(place, error.strerror or str(error), error.errno in FULL) from None


def unwritten(place: Path | str, reason: str, full: bool) -> DiskError:
    """What to say of something that could not be written for that `reason`; `full` tells that there was no room."""
    remedy = "make room on its disk" if full else "look to its disk and its permissions"
    return DiskError(f"{place} cannot be written ({reason}): {remedy}")


def sync(path: Path) -> None:
    """Put a file's content, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(file: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write `content` so that a reader sees the former one or the new one, never a part. Raises OSError for a full disk."""
    partial = file.with_name(f".{file.name}.{os.getpid()}{PARTIAL}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
        sync(partial)
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Make `folder`, whose files are on the disk once the block has ended, or are gone with it where that fails."""
    folder.mkdir()
    try:
        yield
        for file in folder.iterdir():
            sync(file)
        sync(folder)
    except OSError:
        shutil.rmtree(folder)
        raise
