"""The search for the layout under which the ranks' tensors are one tensor: each kind, two axes, fused blocks, no layout."""

from itertools import product

import pytest
import torch

from localtensor.testing.compare.find_layout import AxisLayout, MeshLayout, find_layout, permuted_layout

EXACT = torch.zeros(())
S, R = (lambda dim, blocks=1: AxisLayout("S", dim, (1,) * blocks)), AxisLayout("R")


def tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(x, sizes, axes):
    """What each rank holds: the first axis cuts first, the last one is innermost."""
    held = [x]
    for size, axis in zip(sizes, axes, strict=True):
        pieces = []
        for one in held:
            if axis.kind == "R":
                pieces += [one] * size
            elif axis.kind == "P":
                parts = [tensor(*one.shape, seed=len(pieces) + i + 1) for i in range(size - 1)]
                total = one * size if axis.op == "avg" else one
                pieces += [*parts, total - sum(parts)]
            else:
                blocks = [block.chunk(size, axis.dim) for block in one.chunk(len(axis.blocks), axis.dim)]
                pieces += [torch.cat([block[i] for block in blocks], axis.dim) for i in range(size)]
        held = pieces
    return held


AXES = [R, S(0), S(1), S(0, 3), AxisLayout("P", op="sum"), AxisLayout("P", op="avg")]


@pytest.mark.parametrize("axes", list(product(AXES, repeat=2)), ids=lambda axes: " ".join(map(str, axes)))
def test_what_was_cut_is_found_again(axes):
    x = tensor(12, 8)
    if (
        [len(axis.blocks) for axis in axes].count(3)
        and axes[0].kind == axes[1].kind == "S"
        and axes[0].dim == axes[1].dim == 0
    ):
        pytest.skip("blocks of a shard are cut otherwise")
    found = find_layout(cut(x, (2, 2), axes), (2, 2), x, EXACT + 1e-12)
    assert found is not None
    kinds = [(a.kind, a.dim, a.blocks) for a in found.axes]
    assert kinds == [(a.kind, a.dim, a.blocks) for a in axes]
    if {a.op for a in axes} != {"", "avg"}:  # a sum of averages is an average of sums
        assert sorted(a.op for a in found.axes) == sorted(a.op for a in axes)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 4), (2, 5)])
def test_where_the_last_axis_has_cut_first_the_layout_has_its_blocks(sizes):
    """As FSDP cuts what tensor parallelism has cut: rank (i, j) holds piece i of piece j."""
    x = tensor(sizes[0] * sizes[1] * 2, 2)
    held = [x.chunk(sizes[1])[j].chunk(sizes[0])[i] for i, j in product(*map(range, sizes))]
    assert find_layout(held, sizes, x, EXACT) == MeshLayout((S(0, sizes[1]), S(0)))


def test_uneven_shards_and_scalars():
    x = tensor(5, 3)
    assert str(find_layout(list(x.tensor_split(3)), [3], x, EXACT)) == "S(0)"
    assert str(find_layout([torch.tensor(1.0)] * 2, [2], torch.tensor(1.0), EXACT)) == "R"
    assert str(find_layout([torch.tensor(1.0), torch.tensor(3.0)], [2], torch.tensor(2.0), EXACT)) == "P(avg)"


def test_no_layout_fits_what_is_wrong():
    x = tensor(4, 4)
    assert find_layout([x + 1, x + 1], [2], x, EXACT) is None
    assert find_layout([x[:2], x[:2]], [2], x, EXACT) is None
    assert find_layout([x[:2].float(), x[2:].float()], [2], x, EXACT) is None  # the dtype counts
    assert find_layout([x.flatten(), x.flatten()], [2], x, EXACT) is None


def test_a_factor_is_found_only_where_it_is_allowed():
    x = tensor(4, 4)
    assert find_layout([x * 2, x * 2], [2], x, EXACT) is None
    assert str(find_layout([x * 2, x * 2], [2], x, EXACT, factors=(1.0, 2.0))) == "R, times 2"


def test_replicas_that_differ_by_more_than_rounding_are_no_replicas():
    x = tensor(4, 4)
    assert find_layout([x, x * (1 + 1e-15)], [2], x, EXACT + 1e-6) == MeshLayout((R,))
    assert find_layout([x, x + 1e-3], [2], x, EXACT + 1e-6) is None


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)])
def test_slices_in_another_order_are_reported(order):
    x = tensor(6, 2)
    pieces = x.chunk(3)
    layout, found = permuted_layout([pieces[order.index(i)] for i in range(3)], [3], x, EXACT)
    assert str(layout) == "S(0)" and found == order
    assert permuted_layout([x + 1] * 3, [3], x, EXACT) is None
