"""Environments of their own for what a benchmark compares with, made on first use under ~/.cache/echo2/peers."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path("~/.cache/echo2/peers").expanduser()


def peer_python(peer: str, needs: Sequence[str] = ()) -> str | None:
    """The interpreter of the environment of `peer`, NAME-VERSION, with `needs` besides it, as pip writes requirements.

    None, and said so in one line, where the environment is not there and cannot be made.
    """
    folder = FOLDER / peer
    program, complete = folder / "bin" / "python", folder / "complete"
    name, _, version = peer.rpartition("-")
    wanted = [f"{name}=={version}", *needs]
    if not complete.exists():
        print(f"making {folder} …", flush=True)
        venv.create(folder, with_pip=True, clear=True)
    if not complete.exists() or complete.read_text(encoding="utf-8").split() != wanted:
        done = subprocess.run([program, "-m", "pip", "install", "--quiet", *wanted], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip() or "no reason told").splitlines()[-1]
            print(f"no peer: {name} cannot be installed, so its figures are left out ({reason})", flush=True)
            return None
        complete.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    return str(program)
