"""Tests as other people write them for torch's multi-process bases.  Not collected by itself: see test_processes.py."""

# ruff: noqa: PT009, PT027, SIM105  # as other people write tests, for unittest

import os
import sys
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_distributed import (
    TEST_SKIPS,
    DistributedTestBase,
    MultiProcessTestCase,
    requires_gloo,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    create_local_tensor_test_class,
    map_local_for_rank,
    with_comms,
)


class Plain(MultiProcessTestCase):
    """A test starts its own group, over a file or a store."""

    @property
    def world_size(self):
        return 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        try:
            os.remove(self.file_name)
        except OSError:
            pass

    def _init(self, **kwargs):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, **kwargs)

    @requires_gloo()
    def test_group_over_a_file_store(self):
        self.assertFalse(dist.is_initialized())
        self._init()
        total = torch.tensor([self.rank + 1])
        dist.all_reduce(total)
        self.assertEqual(total.item(), 6)
        self.assertEqual(dist.get_backend(), "gloo")

    def test_group_is_left_behind(self):
        self._init()
        dist.barrier()
        dist.all_reduce(torch.ones(2), async_op=True)  # nobody waits for it

    def test_store_without_a_group(self):
        store = dist.PrefixStore("mine", dist.FileStore(self.file_name, self.world_size))
        store.set(f"from {self.rank}", str(self.rank))
        found = [int(store.get(f"from {other}")) for other in reversed(range(self.world_size))]
        self.assertEqual(found, [2, 1, 0])

    def test_key_that_never_comes(self):
        store = dist.FileStore(self.file_name, self.world_size)
        with self.assertRaisesRegex(RuntimeError, "(?i)timeout"):
            store.wait(["nobody"], timedelta(milliseconds=50))

    def test_server_whose_port_is_passed_on(self):
        note = self.file_name + ".port"
        if self.rank == 0:
            server = dist.TCPStore("127.0.0.1", 0, self.world_size, is_master=True, wait_for_workers=False)
            with open(note + ".new", "w") as file:
                file.write(str(server.port))
            os.replace(note + ".new", note)
        else:
            while not os.path.exists(note):
                time.sleep(0.001)
            with open(note) as file:
                server = dist.TCPStore(
                    "127.0.0.1", int(file.read()), self.world_size, is_master=False, wait_for_workers=False
                )
        server.add("arrived", 1)
        server.set(f"rank {self.rank}", "here")
        self.assertEqual(server.get(f"rank {(self.rank + 1) % 3}"), b"here")
        self._init()
        dist.barrier()
        if self.rank == 0:
            os.remove(note)

    def test_only_one_rank_expects_an_error(self):
        self._init()
        if self.rank == 1:
            with self.assertRaises(ValueError):
                int("x")
        dist.barrier()

    @skip_if_lt_x_gpu(4096 // 1024 + 4)
    def test_wants_gpus(self):
        self.fail("there are not so many")

    def test_all_ranks_skip(self):
        self.skipTest("not today")

    @unittest.skip("a skip that no rank sees")
    def test_skipped_outside(self):
        self.fail("never")

    def test_ranks_end_by_exit(self):
        sys.exit(0)

    def test_ranks_end_by_a_code_that_means_a_skip(self):
        sys.exit(TEST_SKIPS["small_worldsize"].exit_code)

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        self.assertEqual(self.rank, -5)

    def test_environment_and_process_are_its_own(self):
        os.environ["MINE"] = str(self.rank)
        self._init()
        dist.barrier()
        pids = [None] * self.world_size
        dist.all_gather_object(pids, os.getpid())
        self.assertEqual(len(set(pids)), self.world_size)
        self.assertEqual(os.environ["MINE"], str(self.rank))

    def test_random_numbers_are_alike(self):
        self._init()
        mine = torch.rand(3)
        theirs = [torch.empty(3) for _ in range(self.world_size)]
        dist.all_gather(theirs, mine)
        self.assertEqual(theirs[0], theirs[2])

    def test_fake_group_instead(self):
        dist.init_process_group("fake", rank=0, world_size=16)
        mesh = DeviceMesh("cpu", torch.arange(16).reshape(4, 4))
        self.assertEqual(mesh.get_coordinate(), [0, 0])
        self.assertEqual(dist.get_backend(), "fake")

    def test_debug_level_detail(self):
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
        self._init()
        dist.barrier()


class WithOwnExit(MultiProcessTestCase):
    """The exit codes of the ranks are what the test is about."""

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _check_return_codes(self, fn, elapsed_time):
        codes = [process.exitcode for process in self.processes]
        if self._testMethodName == "test_dies":
            self.assertEqual(codes, [7, 7, 7, 7])
            return
        super()._check_return_codes(fn, elapsed_time)

    def test_dies(self):
        os._exit(7)


class OverBackends(DistributedTestBase):
    @property
    def world_size(self):
        return 2

    def test_group_for_a_device(self):
        self.create_pg("cpu")
        out = torch.full((2,), float(self.rank))
        dist.all_reduce(out, dist.ReduceOp.MAX)
        self.assertEqual(out, torch.ones(2))
        self.assertEqual(os.environ["WORLD_SIZE"], "2")


@instantiate_parametrized_tests
class Tensors(DTensorTestBase):
    @with_comms
    def test_product(self):
        mesh = self.build_device_mesh()
        a = distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [Shard(0)])
        b = distribute_tensor(torch.eye(4), mesh, [Replicate()])
        with CommDebugMode() as counted:
            out = a @ b
        self.assertEqual(counted.get_total_counts(), 0)
        self.assertEqual(out.full_tensor(), torch.arange(20.0).reshape(5, 4))

    @with_comms(eager_init=True)
    def test_group_is_begun_at_once(self):
        self.assertEqual(dist.get_world_size(), self.world_size)

    @with_comms(backend="gloo")
    def test_backend_by_name(self):
        self.assertEqual(dist.get_backend(), "gloo")

    @with_comms(backend="fake")
    def test_fake_backend_by_name(self):
        self.assertEqual(dist.get_backend(), "fake")

    @parametrize("placement", [Shard(0), Shard(1), Replicate()])
    @parametrize("n", [3, 8])
    @with_comms
    def test_there_and_back(self, placement, n):
        mesh = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
        full = torch.randn(n, n)
        spread = distribute_tensor(full, mesh["tp"], [placement])
        self.assertEqual(spread.full_tensor(), full)
        self.assertEqual(mesh["tp"].get_local_rank(), self.rank % 2)

    @with_comms
    def test_partial_and_seed_of_its_own(self):
        self.init_manual_seed_for_rank()
        mesh = self.build_device_mesh()
        local = torch.randn(4)
        out = DTensor.from_local(local, mesh, [Partial()]).full_tensor()
        everyone = [torch.empty(4) for _ in range(self.world_size)]
        dist.all_gather(everyone, local)
        self.assertEqual(out, sum(everyone))
        if self.rank:
            self.assertNotEqual(everyone[0], everyone[1])

    @with_comms
    @skip_if_lt_x_gpu(8)
    def test_skips_inside_its_group(self):
        self.fail("never")


class Wide(DTensorTestBase):
    @property
    def world_size(self):
        return 8

    @with_comms
    def test_three_axes(self):
        mesh = init_device_mesh(self.device_type, (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        x = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Replicate(), Shard(0)])
        self.assertEqual((x * 2).full_tensor().sum().item(), 56.0)
        self.assertEqual(mesh.get_rank(), self.rank)

    def test_group_by_a_mesh(self):
        self.assertFalse(dist.is_initialized())
        mesh = DeviceMesh(self.device_type, torch.arange(8).reshape(2, 4))
        self.assertTrue(dist.is_initialized())
        self.assertEqual(mesh.size(1), 4)
        self.destroy_pg()


class Rankwise(DTensorTestBase):
    """Written so that torch can run it in lockstep as well."""

    @with_comms
    def test_sum_over_ranks(self):
        mesh = self.build_device_mesh()
        local = map_local_for_rank(self.rank, lambda rank: torch.ones(2) * rank)
        self.assertEqual(DTensor.from_local(local, mesh, [Partial()]).full_tensor(), torch.full((2,), 6.0))


RankwiseWithLocalTensor = create_local_tensor_test_class(Rankwise)

if __name__ == "__main__":
    run_tests()
