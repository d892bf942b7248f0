"""An interrupt counts wherever it meets the process."""

import subprocess
import sys

SWALLOWED = """
import signal
from flows.interrupts import raise_if_lost, raise_on_signals

class Swallows:
    def __del__(self):
        signal.raise_signal(signal.{name})

raise_on_signals()
raise_if_lost()
del [Swallows()][0]
print("went on", flush=True)
raise_if_lost()
print("went on still")
"""


def test_an_interrupt_that_a_destructor_swallowed_is_raised_again():
    for name in ("SIGINT", "SIGTERM"):
        code = SWALLOWED.format(name=name)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout == "went on\n", done.stderr
        assert done.stderr.count("Traceback") == 1, "only of the one that is raised again"
        assert done.stderr.rstrip().endswith("KeyboardInterrupt")
        assert done.returncode != 0
