"""Files that are on the disk when a call returns, and never seen in part."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Put a file's content, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(file: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` so that a reader sees the former content or the new one, never a part."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    sync(partial)
    partial.replace(file)
