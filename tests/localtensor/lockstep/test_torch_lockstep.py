"""The tool that runs torch's own tests of DTensor in lockstep, on a file written in their manner."""

import hashlib
import subprocess
import sys
import tarfile

import pytest

from tests.end_to_end.test_docs import ROOT
from tests.tools import torch_files

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


def packed(folder, monkeypatch, *, known):
    """Debian's package in small, as a file; its sum is the known one if `known`."""
    file, package = folder / "test_mesh.py", folder / "package.tar.xz"
    file.write_text("# a test")
    with tarfile.open(package, "w:xz") as out:
        out.add(file, "pytorch-v2.6.0/test/distributed/_tensor/test_mesh.py")
        out.add(file, "pytorch-v2.6.0/torch/mesh.py")
    monkeypatch.setattr(torch_files, "DEBIAN", package.as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    if known:
        monkeypatch.setattr(torch_files, "DEBIAN_SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    return package


def test_the_tests_of_debians_package_are_kept(tmp_path, monkeypatch):
    package = packed(tmp_path, monkeypatch, known=True)
    folder = torch_files.debian_sources()
    package.unlink()
    assert torch_files.debian_sources() == folder
    assert [path.relative_to(tmp_path / "cache/localtensor").as_posix() for path in tmp_path.glob("cache/**/*.py")] == [
        "torch-2.6.0/test/distributed/_tensor/test_mesh.py"
    ]
    assert (folder / "_tensor/test_mesh.py").read_text() == "# a test"


@pytest.mark.parametrize("there", [True, False])
def test_another_package_is_refused_and_nothing_kept(tmp_path, monkeypatch, there):
    package = packed(tmp_path, monkeypatch, known=False)
    if not there:
        package.unlink()
    with pytest.raises(SystemExit, match="its SHA-256 is" if there else "No such file"):
        torch_files.debian_sources()
    assert not list(tmp_path.glob("cache/localtensor/*"))
