import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _local_tensor as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed._tensor import common_dtensor

from localtensor.errors import RanksDiverge
from localtensor.lockstep import LocalTensor, in_place_of_torch
from localtensor.lockstep.mode import LocalTensorMode


def test_their_mode_is_ours_inside_and_theirs_again_after():
    program = ModuleType("their_program")
    program.Mode, program.Tensor = theirs.LocalTensorMode, theirs.LocalTensor
    sys.modules["their_program"] = program
    own = (theirs.LocalTensorMode, theirs.LocalTensor, theirs.LocalIntNode, dist.init_process_group)
    try:
        with in_place_of_torch():
            dist.init_process_group("fake", rank=0, world_size=3)
            with program.Mode(3) as mode:
                assert isinstance(mode, LocalTensorMode)
                x = mode.rank_map(lambda rank: torch.full((rank + 1,), rank))
                y = program.Tensor({rank: torch.tensor(rank) for rank in range(3)})
            assert type(x) is LocalTensor and isinstance(y, program.Tensor) and not isinstance(1, program.Tensor)
            assert [len(piece) for piece in x._local_tensors.values()] == [1, 2, 3]  # uneven
            dist.destroy_process_group()
            late = ModuleType("late_program")
            sys.modules["late_program"] = late
            exec("from torch.distributed._local_tensor import LocalTensorMode, LocalTensor", vars(late))
            assert late.LocalTensorMode is program.Mode
        assert (theirs.LocalTensorMode, theirs.LocalTensor, theirs.LocalIntNode, dist.init_process_group) == own
        assert (program.Mode, program.Tensor) == (late.LocalTensorMode, late.LocalTensor) == own[:2]
        assert not dist.is_initialized()
    finally:
        del sys.modules["their_program"], sys.modules["late_program"]


def test_ranks_as_their_node_gives_them_take_part():
    with in_place_of_torch():
        dist.init_process_group("fake", rank=0, world_size=2)
        with theirs.LocalTensorMode(2) as mode:
            rank = torch.SymInt(theirs.LocalIntNode({0: 0, 1: 1}))
            x = mode.rank_map(lambda _: torch.arange(6)).narrow(0, 3 * rank, 3)
            dist.all_reduce(x)
        dist.destroy_process_group()
    assert x.reconcile().tolist() == [3, 5, 7]


def test_a_group_that_is_made_by_an_imported_name_opens_the_mode_too():
    early, late = ModuleType("early_program"), ModuleType("late_program")
    early.begin, early.end = dist.init_process_group, dist.destroy_process_group
    sys.modules["early_program"] = early
    try:
        with in_place_of_torch():
            exec("from torch.distributed.distributed_c10d import init_process_group as begin", vars(late))
            for begin in (early.begin, late.begin):
                begin("fake", rank=0, world_size=3)
                x = torch.ones(2) * dist.get_rank()
                assert [x.on(rank)[0].item() for rank in range(3)] == [0, 1, 2]
                early.end()
        assert (early.begin, early.end) == (dist.init_process_group, dist.destroy_process_group)
    finally:
        del sys.modules["early_program"]


def test_their_tests_know_the_type_of_a_tensor():
    own = common_dtensor.LocalTensor
    with in_place_of_torch():
        with LocalTensorMode(2):
            x, mesh = torch.arange(4.0), init_device_mesh("cpu", (2,))
            converter = common_dtensor.DTensorConverter(mesh, (x,), {})
            placed = [given[0].placements for given, _ in converter]
        assert converter.successful()
    assert placed == [(Replicate(),), (Shard(0),)]
    assert common_dtensor.LocalTensor is own


def test_what_an_error_leaves_open_is_closed():
    def fail():
        with in_place_of_torch():
            dist.init_process_group("fake", rank=0, world_size=2)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert not dist.is_initialized()
    with theirs.LocalTensorMode(2) as mode:
        assert type(mode.rank_map(torch.tensor)) is theirs.LocalTensor


def test_without_a_group_the_mode_is_one_of_its_own():
    with in_place_of_torch(), theirs.LocalTensorMode(2) as mode:
        x = mode.rank_map(torch.tensor)
        dist.all_reduce(x)
    assert x.reconcile() == 1


def test_their_tests_enter_the_mode_first_and_make_the_group_inside():
    with in_place_of_torch():
        from torch.testing._internal.distributed._tensor import common_dtensor

        @theirs.maybe_run_for_local_tensor
        def halves(x, rank):
            return x[:rank], rank // 2

        with theirs.LocalTensorMode(4) as mode:
            dist.init_process_group("fake", rank=0, world_size=4)
            group = dist.distributed_c10d._get_default_group()
            rank = torch.SymInt(theirs.LocalIntNode({rank: rank for rank in range(4)}))
            assert isinstance(rank.node, theirs.LocalIntNode)
            assert common_dtensor.reduce_local_int(rank, lambda ints: sum(ints.values())) == 6
            x = common_dtensor.map_local_for_rank(rank, lambda each: torch.full((2,), each))
            y = common_dtensor.map_local_tensor_for_rank([x, x * 2], rank, lambda each, r: each[r % 2])
            pieces, places = halves(x, rank)
            assert theirs.enabled_local_tensor_mode() is mode
            with theirs.maybe_disable_local_tensor_mode():
                assert theirs.enabled_local_tensor_mode() is None
                assert theirs.local_tensor_mode() is mode
                assert halves([3, 4], 1) == ([3], 0)
            if hasattr(theirs, "rank_map"):  # since torch 2.12
                assert torch.equal(theirs.rank_map(torch.tensor), theirs.tensor_map(x, lambda rank, x: x[0]))
            dist.destroy_process_group(group)
            assert not dist.is_initialized()
    assert x._ranks == frozenset(range(4))
    assert [y.on(rank)[0].item() for rank in range(4)] == [0, 2, 2, 6]
    assert [len(pieces.on(rank)) for rank in range(4)] == [0, 1, 2, 2]
    assert [places.node.values[rank] for rank in range(4)] == [0, 0, 1, 1]
    assert not hasattr(rank.node, "_local_ints")


def test_results_that_differ_and_are_no_numbers_are_refused():
    with in_place_of_torch(), theirs.LocalTensorMode(2) as mode, pytest.raises(RanksDiverge):
        theirs.maybe_run_for_local_tensor(str)(mode.rank())


def test_rulecheck_of_spmd_types_runs_on_it(monkeypatch):
    pytest.importorskip("spmd_types")
    from spmd_types import rules
    from spmd_types.rulecheck import RuleCheckError, rulecheck

    from tests.tools.hooks import corpus, late

    class WholeOfParts(late.ToParts):
        @staticmethod
        def spmd_typecheck(*, x):
            return rules.einsum("...->...", x)

    monkeypatch.setitem(sys.modules, "torch.func._random", None)  # torch 2.13 has its random numbers for CUDA alone
    hooks = [hook for hook in (*corpus.collectives(), *late.every()) if hook.args[-1:] == ("tp",)]
    right = [hook for hook in hooks if not hook.mistake]
    assert len(right) > 12
    with in_place_of_torch():
        for hook in right:
            assert rulecheck(hook.function, hook.args, mesh={"tp": 2}, local_tensor_mode=True).checked
        with pytest.raises(RuleCheckError, match="differs from the reference"):
            rulecheck(WholeOfParts, (torch.ones(4, 2), "tp"), mesh={"tp": 2}, local_tensor_mode=True)


def test_the_test_case_of_spmd_types_runs_on_it():
    spmd = pytest.importorskip("spmd_types")
    from spmd_types import _test_utils

    class Case(_test_utils.SpmdTypeCheckedTestCase):
        def runTest(self):
            from spmd_types import P, R, S

            x = self._generate_inputs((4,), self.pg, P)
            y = spmd.all_reduce(x, self.pg, src=P, dst=R)
            self._assert_all_ranks_equal(y)
            assert type(y) is LocalTensor and spmd.get_local_type(y) == {spmd.normalize_axis(self.pg): R}
            with spmd.no_typecheck():
                self.spmd_gradcheck(lambda x: spmd.convert(x, self.pg, src=R, dst=S(0)), self._generate_inputs((6,), self.pg, R), self.pg, R, S(0))  # fmt: skip

    with in_place_of_torch():
        Case.setUpClass()
        try:
            case = Case()
            case.setUp()
            case.runTest()
            case.tearDown()
        finally:
            Case.tearDownClass()
