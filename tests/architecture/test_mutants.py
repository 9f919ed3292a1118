"""The bugs planted by hand fit the code as it is, and the trial can tell a bug that is seen from one that is not."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tools.mutants import modules
from tests.tools.mutants.drawn import changed_lines
from tests.tools.mutants.planted import PLANTED
from tests.tools.mutants.values import Mutant, Planted

ROOT = Path(__file__).parents[2]


def spoilt(bug: Planted) -> str | None:
    """Why this bug cannot be planted, or None."""
    if not (ROOT / bug.path).is_file():
        return f"{bug.path} does not exist"
    try:
        ast.parse(bug.text())
    except (ValueError, SyntaxError) as wrong:
        return str(wrong)
    missing = [
        test for test in bug.tests or modules.tests_of(bug.path) if not (ROOT / test.partition("::")[0]).is_file()
    ]
    return f"{bug.path}: no such tests: {missing}" if missing else None


def test_each_planted_bug_fits_the_code():
    assert len(PLANTED) >= 60
    assert [told for bug in PLANTED if (told := spoilt(bug))] == []


def test_no_bug_is_planted_twice():
    assert [bug for bug, times in Counter((b.where, b.before, b.after) for b in PLANTED).items() if times > 1] == []


def test_a_bug_that_does_not_fit_is_reported():
    assert spoilt(Planted("localtensor/nowhere.py", "a", "b", "")) == "localtensor/nowhere.py does not exist"
    told = spoilt(Planted("localtensor/layout/spec.py", "no such line", "b", ""))
    assert told == "localtensor/layout/spec.py: 'no such line' stands there 0 times, not once"


def test_each_module_has_tests():
    assert [path for path in modules.modules([]) if not modules.tests_of(path)] == []


@pytest.mark.slow  # it imports all that `make mutants` needs
def test_a_bug_is_killed_and_a_comment_survives():
    """In a process of its own: the trial forks, and wants no threads."""
    script = (
        "from tests.tools.mutants.trying import Trials, warm\n"
        "from tests.tools.mutants.values import ROOT, Mutant\n"
        "warm()\n"
        "path = 'localtensor/lockstep/patches/shard_offsets.py'\n"
        "text = (ROOT / path).read_text()\n"
        "tests = ('tests/localtensor/lockstep/patches/test_shard_offsets.py',)\n"
        "with Trials() as trials:\n"
        "    for changed in (text + 'raise SystemExit(1)\\n', text + '# harmless\\n'):\n"
        "        print(trials.outcome(Mutant(path, changed, '', '', tests)).end)\n"
        "print(trials.at.exists())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["killed", "survived", "False"]


def test_a_change_is_shown_with_its_line():
    shown = changed_lines("a\nb\nc\n", "a\nB\nc\n")
    assert Mutant("x", "", shown, "", ()).change == "line 2\n-b\n+B"
