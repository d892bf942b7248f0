"""Whether a worker can run in this environment: `python -m echo2.rollout.environment ENGINE DEVICE`, asked from another one.

Invariants: what is printed is `READY`, or one reason why not, with exit code `LACKING`; torch is imported only where a device
is asked for by name.
"""

from __future__ import annotations

import importlib
import sys

from echo2.errors import ConfigError
from echo2.packages import missing_packages

READY, LACKING = "ready", 3
ENGINE_PACKAGES = {"transformers": ("torch", "transformers"), "vllm": ("vllm",), "simulated": ()}


def why_no_worker(engine: str, device: str) -> str:
    """Why no worker with this `worker.engine` and `worker.device` can run here; empty where nothing is known against it."""
    try:
        importlib.import_module("echo2.rollout.process")
    except ImportError as error:
        return f"echo2 cannot be imported whole ({error}): pip install it there anew"
    if missing := missing_packages(ENGINE_PACKAGES[engine]):
        return (
            f"worker.engine = {engine!r} needs {', '.join(missing)}, not installed there: pip install '.[{engine}]' into an "
            "environment for fleet.python, or choose another worker.engine"
        )
    if engine == "transformers" and device not in ("auto", "cpu"):
        from echo2.models.loading import resolve_device

        try:
            resolve_device(device, "worker.device")
        except ConfigError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    reason = why_no_worker(*sys.argv[1:])
    print(reason or READY)
    sys.exit(LACKING if reason else 0)
