"""What `make branches` follows is what a process ran, even where the process imports the tool itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.branches import __main__ as branches
from tests.branches.each import sitecustomize as each

pytest.importorskip("slipcover", reason="only the trial extra brings it: see `make branches`")
RUN = """
from localtensor.mesh import Mesh
import tests.branches.__main__
Mesh((2, 2), ("dp", "tp"))
"""


@pytest.mark.skipif(each.TO in os.environ, reason="under `make branches` this test would take the lines from it")
def test_a_process_that_imports_the_tool_is_followed_all_the_same(tmp_path, monkeypatch):
    environ = {**os.environ, each.TO: str(tmp_path), "PYTHONPATH": str(Path(each.__file__).parent)}
    subprocess.run([sys.executable, "-c", RUN], cwd=each.ROOT, env=environ, check=True, timeout=120)
    monkeypatch.chdir(tmp_path)  # puts back where we were: the tool goes to the root
    found = {file.name: file for file in branches.files(tmp_path.glob("*.json"))}
    assert found["localtensor/mesh.py"].branches_taken
    assert found["localtensor/mesh.py"].branches_taken < found["localtensor/mesh.py"].branches
    assert not found["localtensor/shards.py"].branches_taken
