"""A command that is forked from a process with torch does what a process of its own does."""

import os
import subprocess
import sys

import pytest

from tests.tools import warm

LOOK = """
import os, pickle, sys
class Here: pass
assert type(pickle.loads(pickle.dumps(Here()))) is Here
print(__name__, globals().get("__file__"), sys.argv, os.getcwd(), os.environ.get("LT_A"), sys.stdin.read(), [m for m in sys.modules if "localtensor" in m])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("how", ["-c", "-m", "file"])
def test_it_is_as_in_a_process_of_its_own_but_torch_is_there(how, tmp_path):
    (tmp_path / "look.py").write_text(LOOK)
    words = {"-c": ["-c", LOOK], "-m": ["-m", "look"], "file": ["look.py"]}[how]
    command = [sys.executable, *words, "3", "a b"]
    around = {"cwd": tmp_path, "env": {**os.environ, "LT_A": "a"}}
    done = warm.run(command, **around)
    fresh = subprocess.run(command, **around, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert (done.returncode, done.stdout) == (fresh.returncode, fresh.stdout) and done.returncode == 3
    assert (done.stderr, fresh.stderr) == ("True\n", "False\n")


def test_a_signal_a_traceback_and_a_limit_end_it():
    assert warm.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -9
    assert warm.run([sys.executable, "-c", "1 / 0"]).stderr.endswith("ZeroDivisionError: division by zero\n")
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([sys.executable, "-c", "while True: pass"], timeout=0.5)
    assert warm.run(["python", "-c", "print(1)"], check=True).stdout == "1\n"
    with pytest.raises(subprocess.CalledProcessError):
        warm.run(["python", "-c", "raise SystemExit(2)"], check=True)
