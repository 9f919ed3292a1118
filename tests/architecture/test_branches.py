"""What `make branches` follows is what a process ran, even where the process imports the tool itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.branches import __main__
from tests.tools.branches.each import sitecustomize

RUN = """
from localtensor.layout.mesh import Mesh
import tests.tools.branches.__main__
Mesh((2, 2), ("dp", "tp"))
"""


@pytest.mark.skipif(
    sitecustomize.TO in os.environ, reason="under `make branches` this test would take the lines from it"
)
def test_a_process_that_imports_the_tool_is_followed_all_the_same(tmp_path, monkeypatch):
    pytest.importorskip("slipcover", reason="only the trial extra brings it: see `make branches`")
    environ = {**os.environ, sitecustomize.TO: str(tmp_path), "PYTHONPATH": str(Path(sitecustomize.__file__).parent)}
    subprocess.run([sys.executable, "-c", RUN], cwd=sitecustomize.ROOT, env=environ, check=True, timeout=120)
    monkeypatch.chdir(tmp_path)  # puts back where we were: the tool goes to the root
    found = {file.name: file for file in __main__.files(tmp_path.glob("*.json"))}
    assert found["localtensor/layout/spec.py"].branches_taken
    assert found["localtensor/layout/spec.py"].branches_taken < found["localtensor/layout/spec.py"].branches
    assert not found["localtensor/layout/shards.py"].branches_taken


def test_what_stays_below_is_named_with_the_lines_that_no_test_ran(capsys):
    lines, branches_there = frozenset({1, 3, 4, 5, 7}), frozenset({(3, 4), (3, 7)})
    half = __main__.File("localtensor/half.py", lines, branches_there, frozenset({1, 5}), frozenset({(3, 4)}))
    all_of_it = __main__.File("localtensor/whole.py", lines, branches_there, lines, branches_there)
    __main__.show([all_of_it, half], below=80)
    *_, total, last = capsys.readouterr().out.splitlines()
    assert total.split() == ["all", "2", "4", "75.0", "%", "10", "70.0", "%"]
    assert last == " 50.0 %  localtensor/half.py  without lines 3-4, 7"
