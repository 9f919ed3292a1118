"""Tries mutants: a copy of the tree, the changed file in it, and the tests of its module in a fork of this process.

torch and pytest are imported once, before the first fork, and nothing of ours is: so a trial costs the
import of Hypothesis and of the modules themselves, and every trial starts from the same clean process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from tests.tools.mutants.values import ROOT, Mutant, Outcome

PATIENCE = 20.0
"""Seconds that a trial may take beyond three times what its tests take without a mutant."""
LONGEST = 240.0
"""Seconds for tests without a mutant, before which a module is called untested."""


class Trials:
    """A copy of the tree in a temporary folder, in which one mutant after the other is tried; use it as a context manager."""

    def __init__(self) -> None:
        self.at = Path(tempfile.mkdtemp(prefix="mutants-"))
        self._usual: dict[tuple[str, ...], tuple[int, float, str]] = {}
        for name in _tracked():
            (self.at / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, self.at / name)

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *raised: object) -> None:
        shutil.rmtree(self.at, ignore_errors=True)

    def usual(self, tests: tuple[str, ...]) -> tuple[int, float, str]:
        """Exit code, seconds and summary of these tests without a mutant, run once."""
        if tests not in self._usual:
            self._usual[tests] = self._run(tests, LONGEST)
        return self._usual[tests]

    def outcome(self, mutant: Mutant) -> Outcome:
        if not mutant.tests:
            return Outcome(mutant, "untested", 0.0, "no test file names this module")
        code, seconds, summary = self.usual(mutant.tests)
        if code != 0:
            return Outcome(mutant, "red before", seconds, summary)
        place = self.at / mutant.path
        original = place.read_text()
        place.write_text(mutant.text)
        try:
            code, taken, summary = self._run(mutant.tests, PATIENCE + 3 * seconds)
        finally:
            place.write_text(original)
        return Outcome(mutant, {0: "survived", -1: "slow"}.get(code, "killed"), taken, summary)

    def _run(self, tests: Iterable[str], limit: float) -> tuple[int, float, str]:
        started = time.monotonic()
        with tempfile.TemporaryFile("w+") as out:
            child = os.fork()
            if not child:
                _pytest(self.at, list(tests), out.fileno())
            code = _ended(child, started + limit)
            out.seek(0)
            said = out.read()
        return code, time.monotonic() - started, _summary(said)


def warm() -> None:
    """Imports what every trial needs and no mutant changes."""
    import expecttest  # noqa: F401
    import numpy  # noqa: F401, ICN001
    import pytest  # noqa: F401
    import torch
    import torch.distributed.tensor

    torch.set_num_threads(1)


def _tracked() -> list[str]:
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


def _pytest(at: Path, tests: list[str], out: int) -> None:
    """In the fork: pytest on these tests, in the copy; never returns."""
    code = 70
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(at)
        _forget_ours()
        import pytest

        sys.path.insert(0, str(at))
        os.environ |= {
            "PYTHONPATH": str(at),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": f"{at}/.h",
        }
        sys.dont_write_bytecode = True
        code = int(pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]))
    except BaseException:  # why: the fork must end here, and say what of ours went wrong
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_ours() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("localtensor", "strategies", "tests")]:
        del sys.modules[name]


def _ended(child: int, until: float) -> int:
    """The exit code of a fork, or -1 where it had to be killed; what it started goes with it."""
    try:
        while time.monotonic() < until:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else 128 + os.WTERMSIG(status)
            time.sleep(0.02)
        return -1
    finally:
        _kill(child)


def _kill(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        os.waitpid(child, 0)
    except ChildProcessError:
        return


def _summary(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else (said.strip().splitlines() or ["nothing was printed"])[-1]
