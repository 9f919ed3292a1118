"""The tool that runs torch's own tests of symmetric memory, on a file written in their manner."""

import subprocess
import sys

import pytest

from tests.end_to_end.test_docs import ROOT
from tests.tools.symmetric.torch_suite import on_cpu

SUITE = """
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.testing._internal.common_distributed import MultiProcContinuousTest, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import TestCase, requires_cuda, requires_cuda_p2p_access, run_tests


@requires_cuda_p2p_access()
class Shared(MultiProcContinuousTest):
    def share(self):
        x = symm_mem.empty(4, device="cuda").fill_(self.rank)
        return x, symm_mem.rendezvous(x, dist.group.WORLD)

    @skip_if_lt_x_gpu(2)
    def test_right(self):
        torch.cuda.set_device(torch.device("cuda", self.rank))
        x, handle = self.share()
        handle.barrier()
        peer = (self.rank + 1) % self.world_size
        self.assertEqual(handle.get_buffer(peer, (4,), x.dtype), torch.full((4,), float(peer), device="cuda:0"))

    def test_wrong(self):
        self.assertEqual(self.world_size, 7)

    def test_race(self):
        x, handle = self.share()
        handle.get_buffer(0, (4,), x.dtype).add_(1)

    def test_pointers(self):
        self.share()[1].buffer_ptrs

    @skip_if_lt_x_gpu(3)
    def test_three(self):
        pass


class Alone(TestCase):
    @requires_cuda
    def test_alone(self):
        self.assertEqual(symm_mem.empty(2, device="cuda").fill_(3).tolist(), [3, 3])
"""
ENDS = {
    "Alone::test_alone": "",
    "Shared::test_right": "",
    "Shared::test_pointers": "refused: NotServed",
    "Shared::test_race": "reported: SymmetricRace",
    "Shared::test_three": "skipped: needs 3 ranks",
    "Shared::test_wrong": "failed: AssertionError",
}


def suite(*words):
    command = [sys.executable, "-m", "tests.tools.symmetric.torch_suite", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


@pytest.mark.slow
def test_each_test_is_counted_and_what_does_not_pass_has_its_reason(tmp_path):
    file = tmp_path / "suite.py"
    file.write_text(SUITE)
    done = suite(str(file), "--ranks", "2")
    counts, _, listed = done.stdout.partition("2 ranks, 6 tests: ")[2].partition("\n")
    assert counts == "{'failed': 1, 'passed': 2, 'refused': 1, 'reported': 1, 'skipped': 1}", done.stdout
    for test, end in ENDS.items():
        assert (f"  {test}: {end}" in listed) == bool(end), done.stdout


@pytest.mark.slow
def test_a_file_that_is_not_there_is_named(tmp_path):
    done = suite(str(tmp_path / "none.py"))
    assert done.returncode == 1
    assert "none.py" in done.stderr.splitlines()[-1]
    assert "Name the file of torch's sources" in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('device="cuda"', 'device="cpu"'),
        ("device='cuda:3'", "device='cpu'"),
        ('backend="nccl"; torch.cuda', 'backend="nccl"; torch.cuda'),
    ],
)
def test_names_of_the_device_are_replaced(text, expected):
    assert on_cpu(text) == expected
