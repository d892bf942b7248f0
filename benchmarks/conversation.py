"""A process that is spoken to in lines of JSON, on its standard input and output."""

from __future__ import annotations

import json
import subprocess
from typing import Any


class Conversation:
    """One process started with pipes; every line is one JSON object."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def tell(self, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next line. Raises RuntimeError if the process died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark died, its error is above: {self.process.args!r}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def ask(self, **fields: Any) -> dict[str, Any]:
        self.tell(**fields)
        return self.hear()
