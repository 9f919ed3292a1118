"""Tests as other people write them for torch's multi-threaded bases.  Not collected by itself: see test_threads.py."""

# ruff: noqa: PT009  # as other people write tests, for unittest

import unittest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import (
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
    spawn_threads_and_init_comms,
)
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter, DTensorOpTestBase, with_comms


class Plain(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self):
        self.ready = dist.get_rank()

    def perThreadTearDown(self):
        assert not dist.is_initialized()

    def test_each_thread_is_set_up(self):
        self.assertEqual(self.ready, self.rank)
        self.assertEqual(dist.get_world_size(), self.world_size)

    def test_collectives(self):
        inputs = [torch.full((2,), float(self.rank * 10 + other)) for other in range(3)]
        outputs = [torch.empty(2) for _ in range(3)]
        dist.all_to_all(outputs, inputs)
        self.assertEqual(outputs, [torch.full((2,), float(other * 10 + self.rank)) for other in range(3)])

    def test_minimum_is_scattered(self):
        out = torch.empty(1)
        dist.reduce_scatter(out, [torch.tensor([float(self.rank + part)]) for part in range(3)], dist.ReduceOp.MIN)
        self.assertEqual(out.item(), self.rank)

    def test_random_numbers_on_rank_0(self):
        x = torch.rand(2)
        y = x.clone()
        dist.broadcast(y, 0)
        self.assertEqualOnRank(x, y)
        self.assertNotEqualOnRank(x, y + 1, rank=1)

    def test_skip_on_one_rank(self):
        if self.rank == 2:
            raise unittest.SkipTest("rank 2 does not want to")
        dist.barrier()

    @skip_if_lt_x_gpu(8)
    def test_wants_gpus(self):
        self.fail("there are not so many")

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        dist.barrier()
        self.assertNotEqual(self.rank, 1)


class Decorated(TestCase):
    @spawn_threads_and_init_comms(world_size=4)
    def test_of_an_ordinary_class(self):
        x = torch.ones(1) * dist.get_rank()
        dist.all_reduce(x)
        self.assertEqual(x.item(), 6)

    @spawn_threads_and_init_comms
    def test_as_many_as_torch_takes(self):
        self.assertEqual(dist.get_world_size(), 4)


class Ops(DTensorOpTestBase):
    @property
    def world_size(self):
        return 4

    @with_comms  # does nothing there
    def test_every_way_to_shard(self):
        mesh = self.build_device_mesh()
        torch.manual_seed(0)
        a, b = torch.randn(4, 8), torch.randn(4, 8)
        converter = DTensorConverter(mesh, (a, b), {})
        seen = 0
        for args, kwargs in converter:
            if converter.successful():
                self.assertEqual(torch.add(*args, **kwargs).full_tensor(), a + b)
                seen += 1
        self.assertGreater(seen, 3)

    def test_two_axes_and_a_gradient(self):
        mesh = init_device_mesh(self.device_type, (2, 2))
        x = torch.arange(10.0).reshape(5, 2)
        spread = distribute_tensor(x, mesh, [Shard(0), Replicate()]).requires_grad_()
        (spread * spread).sum().redistribute(mesh, [Replicate(), Replicate()]).to_local().backward()
        self.assertEqual(spread.grad.full_tensor(), 2 * x)
        self.assertTrue(Partial("sum").is_partial())


if __name__ == "__main__":
    run_tests()
