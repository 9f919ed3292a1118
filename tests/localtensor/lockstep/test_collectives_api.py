"""The collectives on LocalTensors against the plain functions of localtensor.collectives.reference, gradients included."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import localtensor.collectives.reference as c
import localtensor.lockstep.collectives_api as lc
from localtensor.errors import (
    AnotherMode,
    BadGroup,
    ComplexNotGathered,
    DtypeNotCarried,
    NoMode,
    NoSuchDim,
    NotAPermutation,
    NotContiguous,
    NotHeld,
    NotInLockstep,
    RankOutside,
    ReadBeforeWait,
    ScalarTensor,
    ShapesDiffer,
    SplitsDisagree,
    UnevenDim,
    UnknownReduction,
    WrongListLength,
)
from localtensor.layout.reductions import PremulSum
from localtensor.lockstep.mode import LocalTensorMode, rank_map, tensor_map
from localtensor.lockstep.values.rank_int import rank_int

RANKS = 4
GROUPS = {
    "all": None,
    "in another order": [2, 0, 3, 1],
    "pairs": [[0, 2], [1, 3]],
    "some": [3, 0, 1],
    "two sizes": [[0, 1, 2], [3]],
    "one rank": [2],
}
FLOATS = ["sum", "avg", "product", "min", "max", PremulSum(0.5)]


def pieces_of(x, many):
    return [x[: i + 2] * (i + 1) for i in range(many)]


def table(many):
    rows = [[(i + j) % 3 + 1 for j in range(many - 1)] for i in range(many)]
    return [[*row, 12 - sum(row)] for row in rows]


def lists_at(root, held, many):
    return [[held[r] * (i + 1) for i in range(many)] if r == root else [] for r in range(len(held))]


# Name: on LocalTensors, (x, group, many); plainly, (held, many); whether ranks outside keep what they had.
CALLS = {
    **{
        f"all_reduce {op}": (
            lambda x, g, many, op=op: lc.all_reduce(x, op, g), lambda held, many, op=op: c.all_reduce(held, op), True,
        )
        for op in FLOATS
    },
    **{
        f"reduce {op}": (
            lambda x, g, many, op=op: lc.reduce(x, 0, op, g), lambda held, many, op=op: c.reduce(held, op, root=0), True,
        )
        for op in ("sum", "max")
    },
    **{
        f"reduce_scatter_tensor {op}": (
            lambda x, g, many, op=op: lc.reduce_scatter_tensor(x, op, g),
            lambda held, many, op=op: c.reduce_scatter_tensor(held, op), False,
        )
        for op in FLOATS
    },
    **{
        f"reduce_scatter_tensor, dim 1 {op}": (
            lambda x, g, many, op=op: lc.reduce_scatter_tensor(x, op, g, dim=1),
            lambda held, many, op=op: c.reduce_scatter_tensor(held, op, dim=1), False,
        )
        for op in ("avg", "min")
    },
    **{
        f"reduce_scatter {op}": (
            lambda x, g, many, op=op: lc.reduce_scatter(pieces_of(x, many), op, g),
            lambda held, many, op=op: c.reduce_scatter([pieces_of(x, many) for x in held], op), False,
        )
        for op in ("sum", "max")
    },
    "broadcast": (lambda x, g, many: lc.broadcast(x, many - 1, g), lambda held, many: c.broadcast(held, many - 1), True),
    "broadcast from the first": (lambda x, g, many: lc.broadcast(x, 0, g), lambda held, many: c.broadcast(held, 0), True),
    "all_gather": (lambda x, g, many: lc.all_gather(x, g)[0], lambda held, many: [y[0] for y in c.all_gather(held)], False),
    "all_gather_into_tensor": (
        lambda x, g, many: lc.all_gather_into_tensor(x, g), lambda held, many: c.all_gather_into_tensor(held), False),
    "all_gather_into_tensor, dim 1": (
        lambda x, g, many: lc.all_gather_into_tensor(x, g, 1), lambda held, many: c.all_gather_into_tensor(held, 1), False,
    ),
    "gather": (lambda x, g, many: lc.gather(x, many - 1, g)[0],
        lambda held, many: [y[0] if y else None for y in c.gather(held, many - 1)], False),
    "scatter": (lambda x, g, many: lc.scatter([x * (i + 1) for i in range(many)], 0, g),
        lambda held, many: c.scatter(lists_at(0, held, many), 0), False),
    "all_to_all": (lambda x, g, many: lc.all_to_all(pieces_of(x, many), g)[many - 1],
        lambda held, many: [y[many - 1] for y in c.all_to_all([pieces_of(x, many) for x in held])], False),
    "all_to_all_single": (
        lambda x, g, many: lc.all_to_all_single(x, g), lambda held, many: c.all_to_all_single(held), False),
    "all_to_all_single by splits": (lambda x, g, many: lc.all_to_all_single(x, g, table(many)),
        lambda held, many: c.all_to_all_single(
            held, input_splits=table(many), output_splits=[list(row) for row in zip(*table(many), strict=True)]
        ), False),
    "permute": (
        lambda x, g, many: lc.permute(x, [*range(1, many), 0], g), lambda held, many: c.permute(held, [*range(1, many), 0]),
        True),
    "shard_dim_alltoall": (lambda x, g, many: lc.shard_dim_alltoall(x, 1, 0, g),
        lambda held, many: c.shard_dim_alltoall(held, gather_dim=1, shard_dim=0), False),
}  # fmt: skip
# With groups of two sizes, lists would have two lengths.
OF_ONE_SIZE = ("broadcast", "all_gather", "gather", "scatter", "reduce_scatter sum", "reduce_scatter max", "all_to_all", "permute",
               "all_to_all_single by splits")  # fmt: skip


def lists_of(group):
    return [list(range(RANKS))] if group is None else group if isinstance(group[0], list) else [group]


def plainly(name, held, group):
    """What each rank holds, by the plain function of each group."""
    _, plain, keep = CALLS[name]
    found: dict[int, Tensor] = dict(enumerate(held)) if keep else {}
    for ranks in lists_of(group):
        done = plain([held[rank] for rank in ranks], len(ranks))
        found.update({rank: x for rank, x in zip(ranks, done, strict=True) if x is not None})
    return found


@pytest.mark.few(90)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_the_plain_functions(name, group):
    group = GROUPS[group]
    many = len(lists_of(group)[0])
    if name in OF_ONE_SIZE and len({len(ranks) for ranks in lists_of(group)}) > 1:
        pytest.skip("a list for each size of group")
    held = [torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
    if name.startswith("all_to_all_single by") and many == 1:
        pytest.skip("nothing to split")
    leaves = [x.clone().requires_grad_() for x in held]
    want = plainly(name, leaves, group)
    weights = {rank: torch.randn_like(x) for rank, x in want.items()}
    torch.autograd.backward([want[rank] for rank in want], [weights[rank] for rank in want])
    with LocalTensorMode(RANKS) as mode:
        leaf = rank_map(lambda rank: held[rank].clone()).requires_grad_()
        got = CALLS[name][0](leaf, group, many)
        (gradient,) = torch.autograd.grad(got, leaf, mode.gather(weights))
        quick = CALLS[name][0](leaf.detach(), group, many)
    assert set(got.ranks) == set(quick.ranks) == set(want)
    for rank, x in want.items():
        assert torch.equal(got.on(rank), x) and torch.equal(quick.on(rank), x)
        assert got.on(rank).is_contiguous()
    for rank, other in enumerate(leaves):
        wanted = torch.zeros(12, 12, dtype=torch.float64) if other.grad is None else other.grad
        torch.testing.assert_close(gradient.on(rank), wanted, msg=lambda text, rank=rank: f"rank {rank}: {text}")


@pytest.mark.parametrize(
    "name", ["all_reduce sum", "broadcast", "all_gather", "reduce_scatter_tensor avg", "all_to_all_single"]
)
def test_the_gradient_has_a_gradient(name):
    held = [torch.randn(12, 12, dtype=torch.float64) for _ in range(RANKS)]
    leaves = [x.clone().requires_grad_() for x in held]
    outs = list(plainly(name, leaves, None).values())
    first = torch.autograd.grad(sum((x**3).sum() for x in outs), leaves, create_graph=True, materialize_grads=True)
    want = torch.autograd.grad(sum((x**2).sum() for x in first), leaves, materialize_grads=True)
    with LocalTensorMode(RANKS):
        leaf = rank_map(lambda rank: held[rank].clone()).requires_grad_()
        (gradient,) = torch.autograd.grad((CALLS[name][0](leaf, None, RANKS) ** 3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((gradient**2).sum(), leaf)
    for rank, x in enumerate(want):
        torch.testing.assert_close(second.on(rank), x)
    assert len(want) == RANKS


def test_a_result_is_held_once_for_each_group():
    with LocalTensorMode(8) as mode:
        x = rank_map(lambda rank: torch.full((8,), rank))
        rows = [list(range(4)), list(range(4, 8))]
        counts = [
            lc.all_reduce(x)._partition.rows, lc.all_reduce(x, "sum", rows)._partition.rows,
            lc.all_gather_into_tensor(x, rows)._partition.rows, lc.broadcast(x, 2, rows)._partition.rows,
            lc.all_gather(x, rows)[1]._partition.rows, lc.all_reduce(x // 4, "max", rows)._partition.rows,
            lc.reduce_scatter_tensor(torch.arange(8), "sum", rows)._partition.rows, lc.all_reduce(x, "sum", [0, 1])._partition.rows,
        ]  # fmt: skip
        assert counts == [1, 2, 2, 2, 2, 2, 4, 7]
        assert lc.all_reduce(torch.ones(3))._partition is mode.everyone


def test_results_are_fresh_and_inputs_stay():
    with LocalTensorMode(4):
        x = rank_map(lambda rank: torch.full((4, 4), float(rank)))
        before = x.clone()
        for name, (call, _, _) in CALLS.items():
            many = 4
            if "splits" in name or "list" in name or name in ("reduce_scatter sum", "reduce_scatter max", "all_to_all"):
                continue
            call(x, None, many).add_(1)
        assert all(torch.equal(x.on(rank), before.on(rank)) for rank in range(4))


def test_every_way_to_name_a_group():
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = rank_map(lambda rank: torch.tensor(2**rank))
        found = [
            lc.all_reduce(x, "sum", group)
            for group in ([[0, 1], [2, 3]], mesh["b"], (mesh, "b"), (mesh, 1), mesh.get_group("b"))
        ]
        assert [[y.on(rank).item() for rank in range(4)] for y in found] == [[3, 3, 12, 12]] * 5
        assert lc.all_reduce(x, dist.ReduceOp.MAX).reconcile() == lc.all_reduce(x, "MAX").reconcile() == 8
        assert lc.barrier() is None and lc.barrier((mesh, "a")) is None


def test_plain_tensors_are_the_same_on_all_ranks():
    outside = torch.ones(2)
    with LocalTensorMode(4):
        assert lc.all_reduce(outside).reconcile().tolist() == [4, 4]
    assert outside.tolist() == [1, 1]


def test_outside_of_the_mode_the_tensor_knows_its_own():
    with LocalTensorMode(3):
        x = rank_map(torch.tensor)
    assert lc.all_reduce(x).reconcile() == 3 and lc.all_reduce(x, "sum", [[0, 2], [1]]).on(0) == 2
    with pytest.raises(NoMode, match=r"all_reduce: mode: called at test_collectives_api.py"):
        lc.all_reduce(torch.ones(2))
    with LocalTensorMode(3), pytest.raises(AnotherMode):
        lc.scatter([rank_map(torch.tensor), x, x], 0)


def test_scatter_needs_its_list_on_the_root_alone():
    with LocalTensorMode(4):
        pieces = [
            tensor_map(rank_map(lambda r, i=i: torch.tensor(10 * r + i)), lambda r, x: x if r in (1, 3) else None)
            for i in range(2)
        ]
        found = lc.scatter(pieces, 1, [[0, 1], [2, 3]])
        assert [found.on(rank).item() for rank in range(4)] == [10, 11, 30, 31]
        with pytest.raises(NotHeld, match="rank 0"):
            lc.scatter(pieces, 0, [[0, 1], [2, 3]])


def test_splits_that_differ_by_rank():
    with LocalTensorMode(2):
        x = rank_map(lambda rank: torch.arange(3) + 10 * rank)
        found = lc.all_to_all_single(x, None, [rank_int([1, 2]), rank_int([2, 1])])
        assert found.on(0).tolist() == [0, 10, 11] and found.on(1).tolist() == [1, 2, 12]
        again = lc.all_to_all_single(x, None, [rank_int([1, 2]), rank_int([2, 1])], [[1, 2], [2, 1]])
        assert torch.equal(again.on(1), found.on(1))
        with pytest.raises(SplitsDisagree):
            lc.all_to_all_single(x, None, [[1, 2], [2, 1]], [[2, 1], [2, 1]])


REFUSED = {
    "shapes": (ShapesDiffer, lambda: lc.all_reduce(rank_map(lambda r: torch.ones(r + 1)))),
    "shapes, permute": (ShapesDiffer, lambda: lc.permute(rank_map(lambda r: torch.ones(r + 1)), [1, 0, 2, 3])),
    "dtype": (DtypeNotCarried, lambda: lc.all_gather(torch.ones(2, dtype=torch.int16))),
    "op": (UnknownReduction, lambda: lc.all_reduce(torch.ones(2), "mean")),
    "root": (RankOutside, lambda: lc.broadcast(torch.ones(2), 4)),
    "root below": (RankOutside, lambda: lc.gather(torch.ones(2), -1)),
    "uneven": (UnevenDim, lambda: lc.reduce_scatter_tensor(torch.ones(6))),
    "dim": (NoSuchDim, lambda: lc.reduce_scatter_tensor(torch.ones(4), dim=1)),
    "dim of a gather": (NoSuchDim, lambda: lc.all_gather_into_tensor(torch.ones(4), dim=-1)),
    "scalar": (ScalarTensor, lambda: lc.all_gather_into_tensor(torch.ones(()))),
    "complex": (ComplexNotGathered, lambda: lc.gather(torch.ones(2, dtype=torch.complex64), 0)),
    "no list": (WrongListLength, lambda: lc.scatter(None, 0)),
    "a short list": (WrongListLength, lambda: lc.reduce_scatter([torch.ones(2)] * 3)),
    "a long list": (WrongListLength, lambda: lc.all_to_all([torch.ones(2)] * 5)),
    "turned pieces": (NotContiguous, lambda: lc.scatter([torch.ones(2, 3).t()] * 4, 0)),
    "turned": (NotContiguous, lambda: lc.all_to_all_single(rank_map(lambda r: torch.ones(4, 4)).t())),
    "no permutation": (NotAPermutation, lambda: lc.permute(torch.ones(2), [0, 0, 1, 2])),
    "two sizes": (NotInLockstep, lambda: lc.all_gather(torch.ones(2), [[0, 1, 2], [3]])),
    "group": (BadGroup, lambda: lc.all_reduce(torch.ones(2), "sum", [0, 4])),
    "not held": (NotHeld, lambda: lc.all_gather(tensor_map(rank_map(torch.tensor), lambda r, x: x if r else None))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    kind, call = REFUSED[name]
    with LocalTensorMode(4), pytest.raises(kind) as caught:
        call()
    assert len(str(caught.value)) > 30


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_begins_with_the_name_of_the_call(name):
    with LocalTensorMode(RANKS), pytest.raises(DtypeNotCarried) as refused:
        CALLS[name][0](torch.ones(RANKS, RANKS, dtype=torch.int16), None, RANKS)
    assert str(refused.value).partition(":")[0] == name.split()[0].rstrip(",")


def test_the_words_name_the_tensors_as_the_plain_functions_do():
    with LocalTensorMode(2), pytest.raises(ShapesDiffer) as caught:
        lc.all_reduce(rank_map(lambda rank: torch.ones(rank + 1)))
    with pytest.raises(ShapesDiffer) as plain:
        c.all_reduce([torch.ones(1), torch.ones(2)])
    assert str(caught.value) == str(plain.value)


def test_what_is_in_flight_is_not_read():
    with LocalTensorMode(2):
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(ReadBeforeWait):
            lc.all_reduce(x)
        work.wait()
        assert lc.all_reduce(x).reconcile().tolist() == [4, 4]
