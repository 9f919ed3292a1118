"""Tests as other people write them for torch's continuous bases.  Not collected by itself: see test_continuous.py."""

# ruff: noqa: PT009  # as other people write tests, for unittest

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcContinuousTest, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed._tensor import common_dtensor
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
    create_local_tensor_test_class,
    map_local_for_rank,
)


@instantiate_parametrized_tests
class Plain(MultiProcContinuousTest):
    world_size = 3

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_rank_is_on_the_class_too(self):
        self.assertEqual(type(self).rank, self.rank)
        self.assertEqual(dist.get_rank(self.pg), self.rank)
        self.assertEqual(type(self).pg, dist.group.WORLD)
        dist.barrier()
        self.assertEqual(type(self).rank, dist.get_rank())

    @parametrize("n", [1, 5])
    def test_collective(self, n):
        x = torch.full((n,), float(self.rank))
        dist.all_reduce(x)
        self.assertEqual(x, torch.full((n,), 3.0))

    @skip_if_lt_x_gpu(8)
    def test_wants_gpus(self):
        self.fail("there are not so many")

    def test_skip_inside(self):
        self.skipTest("not today")

    def test_exit_that_means_a_skip(self):
        sys.exit(TEST_SKIPS["no_cuda"].exit_code)


class BySize(MultiProcContinuousTest):
    @property
    def world_size(self):
        return 2

    @world_size.setter
    def world_size(self, value):
        assert value == 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_size_is_a_property(self):
        self.assertEqual(dist.get_world_size(), 2)


class Tensors(DTensorContinuousTestBase):
    world_size = 4

    def test_there_and_back(self):
        mesh = self.build_device_mesh()
        x = torch.arange(7.0)
        self.assertEqual(distribute_tensor(x, mesh, [Shard(0)]).full_tensor(), x)

    def test_numbers_by_rank(self):
        mesh = self.build_device_mesh()
        self.init_manual_seed_for_rank()
        local = map_local_for_rank(self.rank, lambda rank: torch.ones(1) * rank)
        self.assertEqual(mesh.size(), 4)
        dist.all_reduce(local)
        self.assertEqual(local, torch.full((1,), 6.0))


HAS_LOCAL_BASE = hasattr(common_dtensor, "LocalDTensorContinuousTestBase")  # since torch 2.12
if HAS_LOCAL_BASE:
    TensorsWithLocalTensor = create_local_tensor_test_class(
        Tensors, base_class=common_dtensor.LocalDTensorContinuousTestBase
    )


class ByDevice(MultiProcContinuousTest):
    world_size = 2

    def test_of_a_device(self, device):
        x = torch.ones(1, device=device)
        dist.all_reduce(x)
        self.assertEqual(x.item(), 2)
        self.assertEqual(self.device_type, "cpu")


instantiate_device_type_tests(ByDevice, globals(), only_for=("cpu",))

if __name__ == "__main__":
    run_tests()
