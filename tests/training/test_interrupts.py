"""An interrupt counts wherever it meets the process, and nothing else does."""

import os
import subprocess
import sys

import pytest

PREAMBLE = """
import asyncio
import signal
import threading
from types import SimpleNamespace
from flows.interrupts import interrupted, raise_if_lost, raise_on_signals

class InDestructor:
    def __init__(self, happen):
        self.happen = happen

    def __del__(self):
        self.happen()

class Termination(BaseException):
    pass

def terminate(*_):
    raise Termination

raise_on_signals()
"""
COMMANDS_OWN, A_LIBRARYS = "", "signal.signal(signal.{name}, terminate)"
RAISED = "signal.raise_signal(signal.{name})"
SWALLOWINGS = {
    "a destructor": f"del [InDestructor(lambda: {RAISED})][0]",
    "a clause": f"try: {RAISED}\nexcept BaseException: pass",
    "another error": f"try:\n try: {RAISED}\n except BaseException as e: raise OSError from e\nexcept OSError: pass",
}


def ran(code):
    return subprocess.run([sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("handler", [COMMANDS_OWN, A_LIBRARYS], ids=["the command's handler", "a library's handler"])
@pytest.mark.parametrize("swallowing", SWALLOWINGS)
def test_an_interrupt_that_was_swallowed_is_raised_again(name, handler, swallowing):
    lines = (
        handler,
        "raise_if_lost()",
        SWALLOWINGS[swallowing],
        "print('went on', flush=True)",
        "raise_if_lost()",
        "print('still')",
    )
    done = ran("\n".join(lines).format(name=name))
    assert done.stdout == "went on\n", done.stderr
    assert done.stderr.count("Traceback") == 1, "only of the one that is raised again"
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.returncode != 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_counts_though_an_event_loop_is_told_of_signals(name):
    done = ran(f"signal.set_wakeup_fd(-1)\n{SWALLOWINGS['a clause']}\nprint(interrupted())".format(name=name))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("error", ["asyncio.CancelledError", "SystemExit", "KeyboardInterrupt", "ValueError"])
def test_what_a_destructor_swallowed_without_a_signal_is_told_and_interrupts_nothing(error):
    done = ran(f"def fail(): raise {error}\ndel [InDestructor(fail)][0]\nraise_if_lost()\nprint(interrupted())")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_a_segment_answers_interrupts_nothing_else(name):
    segment = f"""
from flows.session import stoppable
session = SimpleNamespace(stop_requested=threading.Event())
with stoppable(session):
    {RAISED}
print(session.stop_requested.is_set(), interrupted(), flush=True)
with stoppable(SimpleNamespace(stop_requested=threading.Event())):
    pass
{A_LIBRARYS}
with stoppable(session):
    try: {RAISED}
    except BaseException: pass
print(interrupted())
"""
    done = ran(segment.format(name=name))
    assert done.stdout.splitlines()[-2:] == ["True False", "True"], done.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("loading", ["echo2.config", "pydantic", "flows.run", "flows.preflight"])
@pytest.mark.parametrize("how", ["{}", "exec({!r})"], ids=["plain", "code made from a string"])
def test_a_command_that_is_told_to_end_while_it_loads_says_so_in_one_line(name, loading, how, tmp_path):
    code = f"""
import sys

class Told:
    def find_spec(self, module, *_):
        if module == {loading!r}:
            {how.format(RAISED.format(name=name))}

sys.meta_path.insert(0, Told())
sys.argv = ["echo2", "train", "run.directory={tmp_path}/runs", "worker.engine=simulated", "learner.engine=simulated"]
from echo2.cli import main
main()
"""
    # As a module, since Python's own exit by SIGINT is for those.
    (tmp_path / "told.py").write_text(f"import signal{code}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "told"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "echo2: interrupted")
    assert not (tmp_path / "runs").exists()
