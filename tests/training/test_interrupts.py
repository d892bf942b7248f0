"""An interrupt counts wherever it meets the process."""

import subprocess
import sys

import pytest

SWALLOWED = """
import signal
from flows.interrupts import raise_if_lost, raise_on_signals

class Swallows:
    def __del__(self):
        signal.raise_signal(signal.{name})

class Termination(BaseException):
    pass

def terminate(*_):
    raise Termination

raise_on_signals()
{replaced}
raise_if_lost()
del [Swallows()][0]
print("went on", flush=True)
raise_if_lost()
print("went on still")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("replaced", [False, True], ids=["by the command", "by a library's own handler"])
def test_an_interrupt_that_a_destructor_swallowed_is_raised_again(name, replaced):
    code = SWALLOWED.format(name=name, replaced=f"signal.signal(signal.{name}, terminate)" if replaced else "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "went on\n", done.stderr
    assert done.stderr.count("Traceback") == 1, "only of the one that is raised again"
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.returncode != 0
