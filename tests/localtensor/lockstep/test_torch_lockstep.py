"""The tool that runs torch's own tests of DTensor in lockstep, on a file written in their manner."""

import subprocess
import sys

import pytest

from tests.end_to_end.test_docs import ROOT

SUITE = """
import os
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase, create_local_tensor_test_class, map_local_for_rank, with_comms,
)


class Sharded(DTensorTestBase):
    @with_comms
    def test_right(self):
        mesh = self.build_device_mesh()
        x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        self.assertEqual(x.full_tensor(), torch.arange(6.0))
        mine = map_local_for_rank(self.rank, lambda rank: torch.arange(6.0).chunk(4)[rank] if rank < 3 else torch.zeros(0))
        self.assertEqual(x.to_local(), mine)

    @with_comms
    def test_branch(self):
        if self.rank == 0:
            return
        self.assertEqual(self.rank, self.rank)

    @with_comms
    def test_wrong(self):
        self.assertEqual(self.world_size, 7)

    @with_comms
    def test_crash(self):
        if self.rank == self.rank + 1 or type(self.rank) is not int:
            os.abort()


SharedWithLocalTensor = create_local_tensor_test_class(Sharded, skipped_tests=["test_branch", "test_crash"])


class Theirs(TestCase):
    def test_mode(self):
        dist.init_process_group("fake", rank=0, world_size=3)
        with LocalTensorMode(3) as mode:
            x = mode.rank_map(torch.tensor)
            dist.all_reduce(x)
            self.assertEqual(x, torch.tensor(3))
        dist.destroy_process_group()
"""
ENDS = {
    "Sharded::test_right": "",
    "Sharded::test_branch": "failed: RanksDiverge",
    "Sharded::test_crash": "crashed: the process ended",
    "Sharded::test_wrong": "",  # it passes in no way
    "SharedWithLocalTensor::test_right": "",
    "Theirs::test_mode": "",
}


def suite(*words):
    command = [sys.executable, "-m", "tests.tools.torch_lockstep", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


@pytest.mark.slow  # four processes, each with torch's test bases
def test_what_passes_torchs_way_and_not_in_lockstep_has_its_reason(tmp_path):
    (tmp_path / "test_sharded.py").write_text(SUITE)
    done = suite("tensor/test_sharded.py", "--from", str(tmp_path), "--reference", "threads")
    counts, _, listed = done.stdout.partition("of those that pass by the reference, ")[2].partition("\n")
    assert counts == "5 tests: {'crashed': 1, 'failed': 1, 'passed': 3}", done.stdout + done.stderr
    for test, end in ENDS.items():
        assert (f"  test_sharded::{test}: {end}" in listed) == bool(end), done.stdout


def test_a_folder_without_the_file_is_named(tmp_path):
    done = suite("tensor/test_none.py", "--from", str(tmp_path))
    assert done.returncode == 1
    assert "test_none.py" in done.stderr.splitlines()[-1]
