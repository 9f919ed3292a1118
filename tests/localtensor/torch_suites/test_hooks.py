"""localtensor.torch_suites: `pytest -p localtensor.torch_suites FILE`, as a user types it."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.testing._internal.common_distributed import MultiProcessTestCase

from localtensor.torch_suites.hooks import pytest_configure, pytest_unconfigure
from tests.tools import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def pytest_on(*args, cwd, **environment):
    command = [sys.executable, "-m", "pytest", "-p", "localtensor.torch_suites", "-p", "no:cacheprovider", *args]
    around = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return warm.run(command, cwd=cwd, env=around, timeout=120)


def test_files_of_others_run_unchanged_and_a_failure_is_one(tmp_path):
    (tmp_path / "test_threads.py").write_text((HERE / "foreign_threads.py").read_text())
    (tmp_path / "test_fails.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms\n"
        "class Fails(DTensorTestBase):\n"
        "    @with_comms\n"
        "    def test_it(self):\n"
        "        x = torch.ones(1) * self.rank\n"
        "        dist.all_reduce(x)\n"
        "        self.assertEqual(x.item(), 6 + (self.rank == 2))\n"
    )
    ran = pytest_on("-q", ".", cwd=tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 failed, 8 passed, 2 skipped, 1 xfailed" in ran.stdout
    assert "test_fails.py:8: AssertionError" in ran.stdout or "test_fails.py:8" in ran.stdout
    if sys.version_info >= (3, 11):
        assert "First cause: rank 2 of 4" in ran.stdout
    assert "suites_ranks.py" not in ran.stdout and "threads.py" not in ran.stdout.replace("test_threads.py", "")


@pytest.mark.parametrize("said", ["soon", "1 2", "-1", "nan"])
def test_a_limit_that_is_no_number_is_a_usage_error(said):
    config = SimpleNamespace(getini=lambda name: said, getoption=lambda name, default: default, stash={})
    with pytest.raises(pytest.UsageError, match="suites_timeout and LOCALTENSOR_TIMEOUT are numbers of seconds"):
        pytest_configure(config)
    assert config.stash == {}


def test_the_bases_of_torch_are_as_before_when_the_session_is_over():
    before = MultiProcessTestCase._start_processes
    config = SimpleNamespace(getini=lambda name: "5", getoption=lambda name, default: default, stash={})
    pytest_configure(config)
    during = MultiProcessTestCase._start_processes
    pytest_unconfigure(config)
    assert during is not before and MultiProcessTestCase._start_processes is before
