import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.base import signals

ROOT = Path(__file__).parents[3]
HEAD = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.{before})
from strategies.base import signals
signals.install_handlers()
signals.begin_command("; more")
def stop(number=signal.SIGINT):
    signal.raise_signal(number)
"""
SENTENCE = "localtensor: stopped by Ctrl-C; more.\n"


def ended(body, folder, before="default_int_handler"):
    """Exit code, what it printed, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD.format(before=before) + body], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("number", "code", "name"), [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM")])
def test_a_signal_ends_the_process_at_once_with_one_sentence(number, code, name, tmp_path):
    body = f"try:\n    stop(signal.{number})\nfinally:\n    print('late', flush=True)"
    assert ended(body, tmp_path) == (code, "", f"localtensor: stopped by {name}; more.\n")


def test_it_says_what_was_last_told_to_say(tmp_path):
    assert ended("signals.set_stop_note('; all is written'); stop()", tmp_path) == (
        130, "", "localtensor: stopped by Ctrl-C; all is written.\n"
    )  # fmt: skip


def test_nothing_is_said_twice(tmp_path):
    assert ended("print(signals.stop_message(), flush=True); stop()", tmp_path) == (130, SENTENCE, "")


def test_whoever_started_us_may_have_had_ctrl_c_ignored(tmp_path):
    assert ended("stop(); print('on')", tmp_path, before="SIG_IGN") == (0, "on\n", "")


def test_what_must_not_stay_is_removed(tmp_path):
    body = (
        "open('half', 'w').close(); signals.CLEANUPS['half'] = os.unlink; signals.CLEANUPS['none'] = os.unlink; stop()"
    )
    assert ended(body, tmp_path) == (130, "", SENTENCE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_folders_of_ranks_that_have_not_begun_are_removed(tmp_path):
    body = (
        "from localtensor.processes import worker_group as _crew\nfolder = _crew.WorkerGroup(1, 'gloo').folder\n"
        "print(folder, flush=True)\nassert os.path.isdir(folder)\nstop()"
    )
    code, folder, said = ended(body, tmp_path)
    assert (code, said) == (130, SENTENCE)
    assert not Path(folder.strip()).exists()


def test_the_folder_of_a_fork_server_is_removed(tmp_path):
    body = "from multiprocessing import util\nprint(util.get_temp_dir(), flush=True)\nstop()"
    code, folder, said = ended(body, tmp_path)
    assert (code, said) == (130, SENTENCE)
    assert not Path(folder.strip()).exists(), (
        "multiprocessing.process._current_process._config has no tempdir any longer"
    )


ENDINGS = {
    "Python's resource tracker cleans up and is left alone": ("""
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
print(signals._children(), resource_tracker._resource_tracker._pid > 0)
""", (0, "[] True\n", "")),
    "gently the first is an exception and the second the end": ("""
with signals.interruptible():
    try:
        stop()
    except KeyboardInterrupt:
        print("first", signals.received_signal(), flush=True)
        stop()
""", (130, "first 2\n", SENTENCE)),
    "what somebody took for his own is raised again": ("""
try:
    with signals.interruptible():
        try:
            stop()
        except BaseException:
            pass
        try:
            signals.raise_if_stopped()
        except KeyboardInterrupt:
            print("checked", flush=True)
except KeyboardInterrupt:
    print("again", flush=True)
""", (0, "checked\nagain\n", "")),
    "what it was made into on the way is an interruption still": ("""
try:
    with signals.interruptible():
        try:
            stop()
        except KeyboardInterrupt:
            raise ImportError from None
except KeyboardInterrupt:
    print("interrupted", flush=True)
""", (0, "interrupted\n", "")),
    "what is raised where nobody can catch it ends the process": ("""
class Gone:
    def __del__(self):
        stop()
with signals.interruptible():
    Gone()
    print("late", flush=True)
""", (130, "", SENTENCE)),
    "too long a way out is not waited for": ("""
signals.STOP_SECONDS = 0.1
with signals.interruptible():
    try:
        stop()
    finally:
        while True:
            time.sleep(0.01)
""", (130, "", SENTENCE)),
    "nor is the end of Python": ("""
signals.EXIT_SECONDS = 0.1
signals.stop_message()
signals.limit_exit_time()
while True:
    time.sleep(0.01)
""", (130, "", "")),
    "the end may come before the watch over it has begun": ("""
import _thread, types
class Lock:
    def __init__(self):
        self.real = _thread.allocate_lock()
        self.acquire = self.real.acquire
    def release(self):
        print("begun", flush=True)
        self.real.release()
signals._thread = types.SimpleNamespace(allocate_lock=Lock, start_new_thread=_thread.start_new_thread)
signals.limit_exit_time()
print("on")
""", (0, "begun\non\n", "")),
    "held within gently is an exception afterwards": ("""
try:
    with signals.interruptible(), signals.uninterrupted():
        stop()
        print("whole", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
""", (0, "whole\ninterrupted\n", "")),
    "a copy of the process dies in silence": ("""
pid = os.fork()
if not pid:
    stop()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""", (0, "-2\n", "")),
}  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ENDINGS)
def test_a_process_that_is_stopped_ends_so(name, tmp_path):
    body, code_and_output = ENDINGS[name]
    assert ended(body, tmp_path) == code_and_output


def test_children_are_ended_too(tmp_path):
    body = (
        "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\nstop()"
    )
    code, _, said = ended(body, tmp_path)  # returns when nobody holds its output any longer: not while a child lives
    assert (code, said) == (130, SENTENCE)


@pytest.mark.parametrize(("times", "done"), [(1, "whole\n"), (2, "")])
def test_what_is_held_is_done_whole_but_for_a_second_signal(times, done, tmp_path):
    body = f"with signals.uninterrupted():\n    for _ in range({times}):\n        stop()\n    print('whole', flush=True)\nprint('late')"
    assert ended(body, tmp_path) == (130, done, SENTENCE)


def test_nothing_changes_where_no_one_watches():
    before = signal.getsignal(signal.SIGINT)
    with signals.interruptible(), signals.uninterrupted():
        signals.raise_if_stopped()
    assert (signal.getsignal(signal.SIGINT), signals.received_signal()) == (before, 0)
