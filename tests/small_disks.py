"""Disks of a few megabytes, which a test can fill and make room on."""

import shutil
import subprocess

BLOCK_BYTES = 4096


class SmallDisk:
    """A file system in memory that is mounted at `path`; needs root."""

    def __init__(self, path, size_bytes):
        self.path = path
        self._filler = path / "filler"
        path.mkdir(parents=True)
        _call("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))

    @property
    def free_bytes(self):
        return shutil.disk_usage(self.path).free

    def fill(self, free_bytes=0):
        """Leave no more room than this, in whole blocks."""
        with self._filler.open("ab", buffering=0) as filler:
            while (left := self.free_bytes - free_bytes) > 0:
                filler.write(bytes(min(left, 1 << 20)))

    def make_room(self):
        self._filler.unlink()

    def close(self):
        # Lazily, since a process that is about to end may still have a file open.
        _call("umount", "--lazy", str(self.path))


def why_not():
    """Why this process can make none; empty where it can."""
    done = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    return done.stderr.strip()


def _call(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
