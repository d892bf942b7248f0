"""Groups on the worker's disk while its hub is away.

Invariants: a group that is kept survives the worker's death, and is there for the next worker of the same run and name; a file
is there whole or not at all; it stays until the hub has taken or refused what it holds; a directory that cannot hold groups is
refused before there are any. Two workers of one name may share a folder for a while, and what one has handed in the other
has not.
"""

from __future__ import annotations

import errno
import itertools
import tempfile
from pathlib import Path

from echo2.durability import PARTIAL, write_atomically
from echo2.errors import ConfigError
from echo2.protocol import GroupRollouts, decode_group, encode_group

SUFFIX = ".group"
IN_USE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
"""What the system says of a folder that another one still fills, or has removed."""


class Spool:
    """A folder of one worker; the file names say the order and the worker id that the groups were leased to."""

    def __init__(self, directory: Path, run_id: str, name: str) -> None:
        """`directory` is made if it is not there. Raises ConfigError if no groups could be kept in it."""
        try:
            self.folder = directory.expanduser() / run_id / name
            _try_out(directory.expanduser(), self.folder)
        except (OSError, RuntimeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"worker.spool_directory = {str(directory)!r} cannot keep the groups that wait while the hub is away "
                f"({reason}): name a folder that this worker may write"
            ) from None
        newest = max((int(path.name.partition("-")[0]) for path in self.left()), default=-1)
        self._numbers = itertools.count(newest + 1)

    def left(self) -> list[Path]:
        """The files of groups that wait, oldest first."""
        return sorted(self.folder.glob(f"*{SUFFIX}"))

    def keep(self, worker_id: str, group: GroupRollouts) -> Path:
        """Write a group to the disk. Raises OSError where it has no room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{next(self._numbers):09d}-{worker_id}{SUFFIX}"
        write_atomically(path, encode_group(group))
        return path

    def read(self, path: Path) -> tuple[str, GroupRollouts] | None:
        """The worker id and the group of a file; None if another worker of this name has handed it in.

        Raises BodyError if it is damaged.
        """
        worker_id = path.name.removesuffix(SUFFIX).partition("-")[2]
        try:
            return worker_id, decode_group(path.read_bytes())
        except FileNotFoundError:
            return None

    def forget(self, path: Path) -> None:
        """The hub has it, or will not have it; the folder goes with the last one, and what a killed writer left in it."""
        path.unlink(missing_ok=True)
        if self.left():
            return
        for cut_off in self.folder.glob(f".*{PARTIAL}"):
            cut_off.unlink(missing_ok=True)
        try:
            self.folder.rmdir()
        except OSError as error:
            if error.errno not in IN_USE:
                raise


def _try_out(directory: Path, folder: Path) -> None:
    """Make `directory` and write where `folder` in it is or would be. Raises OSError, RuntimeError or ValueError."""
    directory.mkdir(parents=True, exist_ok=True)
    # Not the folder itself is made: most workers never need it, and nobody would remove it.
    place = next((place for place in (folder, folder.parent) if place.exists()), directory)
    with tempfile.TemporaryFile(dir=place):
        pass
