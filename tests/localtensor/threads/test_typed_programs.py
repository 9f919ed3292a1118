"""Programs whose ranks check types by `spmd_types`, which patches torch while a block of `typecheck()` runs."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import localtensor as lt
from localtensor.errors import RankRaised
from localtensor.threads.isolation.isolate import write_rule
from localtensor.threads.isolation.namespaces import ELSEWHERE, FOR_ALL, OWN
from localtensor.threads.isolation.sharing import SharedRoots
from localtensor.threads.state import swap

spmd = pytest.importorskip("spmd_types")
rules, checker = spmd.rules, pytest.importorskip("spmd_types.checker")


class SumOverRanks(torch.autograd.Function):
    """Without its hook, the checker does not know what it does."""

    @staticmethod
    def spmd_typecheck(*, x, group):
        return rules.all_reduce(rules.einsum("n->", x, linear_in=(0,)), group, src=spmd.P, dst=spmd.I)

    @staticmethod
    def forward(_, x, group):
        total = x.sum()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_, grad):
        return grad.expand(2), None


def typed(x, types):
    spmd.assert_type(x, types)
    return x


def summed(early):
    """The types of sums of parts over the axis tp, and the last sum; the ranks `early` leave the block before the second one."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    found, axis = [], spmd.MeshAxis.of(tp)
    with spmd.set_current_mesh(mesh):
        x = typed(torch.full((2,), 1.0 + rank), {dp: spmd.R, tp: spmd.P})
        for _ in range(2):
            with checker.typecheck(local=True):
                found.append(repr(spmd.get_local_type(SumOverRanks.apply(x, tp))[axis]))
                dist.barrier()
                if rank not in early:
                    found.append(repr(spmd.get_local_type(SumOverRanks.apply(x, tp))[axis]))
            if rank in early:
                SumOverRanks.apply(x, tp)
        return found, SumOverRanks.apply(x, tp).item()


def gathered(x, mesh):
    """A sum over tp and the rows of all ranks along dp, with the type and the layout of the sum."""
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(x, {dp: spmd.S(0), tp: spmd.P})
        with checker.typecheck(local=False):
            total = torch.relu(spmd.all_reduce(x, tp, src=spmd.P, dst=spmd.R))
            rows = spmd.all_gather(total, dp, src=spmd.S(0), dst=spmd.R)
            shown = repr(rows)
    return rows, shown, f"{spmd.get_local_type(total)} {spmd.get_partition_spec(total)}"


def on_a_rank():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, _, types = gathered(torch.full((1, 3), 1.0 + dist.get_rank()), mesh)
    return rows, types


def mixed():
    """Rank 1 adds parts to a replicated tensor."""
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tp = axis.get_group("tp")
    with spmd.set_current_mesh(axis):
        x = typed(torch.ones(2), {tp: spmd.R})
        y = typed(torch.ones(2), {tp: spmd.P if dist.get_rank() else spmd.R})
        with checker.typecheck(local=True):
            dist.barrier()
            return (x + y).sum().item()


PATCHED = (
    lambda: torch.autograd.Function.__dict__["apply"],
    lambda: torch._functorch.vmap._flat_vmap,
    lambda: torch.utils.hooks.BackwardHook.setup_input_hook,
    lambda: torch.utils.hooks.BackwardHook.setup_output_hook,
)


@pytest.mark.parametrize("early", [(), (0,), (1, 2)])
def test_each_rank_checks_its_own_types(early):
    before = [look() for look in PATCHED]
    results = lt.run(summed, early, ranks=4)
    for rank, (found, value) in enumerate(results):
        assert found == ["I"] * (2 if rank in early else 4)
        assert value == (6.0 if rank < 2 else 14.0)
    assert [look() for look in PATCHED] == before


def test_a_type_that_is_wrong_on_one_rank_is_its_error():
    with pytest.raises(RankRaised, match="rank 1: SpmdTypeError") as caught:
        lt.run(mixed, ranks=2)
    assert "rank 0: SpmdTypeError" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*all_gather_tensor.*is deprecated:FutureWarning")
def test_lockstep_gives_the_values_and_types_of_rank_threads():
    each = lt.run(on_a_rank, ranks=4)
    with lt.LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rows, shown, types = gathered(lt.rank_map(lambda rank: torch.full((1, 3), 1.0 + rank)), mesh)
        assert "the same on all" in shown
        for rank, (want, claimed) in enumerate(each):
            assert torch.equal(rows.on(rank), want)
            assert types == claimed == "{mesh_dp: V, mesh_tp: R} PartitionSpec(mesh_dp, None)"


def test_what_the_checker_keeps_is_swapped_in_one_place():
    """Else a hand-over would put two values there, one after the other."""
    slot = swap.SLOTS["typecheck"]
    slot.save()
    for module, name in slot.kept:
        assert swap.is_swapped(sys.modules[module], name) and not slot.waiting
        assert write_rule(sys.modules[module], name, None) == ELSEWHERE


def test_what_the_package_registers_on_torch_is_there_for_all_ranks():
    registered = staticmethod(checker.typecheck.__wrapped__)
    assert write_rule(torch.autograd.Function, "typecheck_forward", registered) == FOR_ALL
    assert write_rule(torch.autograd.Function, "typecheck_forward", staticmethod(on_a_rank)) == OWN


def test_ranks_share_the_package_since_torch_imports_it():
    shared = SharedRoots()
    assert shared.reason("spmd_types") == "imported by torch" and "spmd_types._checker" in shared
    assert not shared.reason("torchtitan")
