"""Search for the layout under which the ranks' local tensors assemble to one tensor, without annotations.

Each mesh axis is replicated (R), sharded along a dim (S(0)), sharded within each of several equal blocks of a dim, as
fused projections are (S(0) in 3 blocks), or a pending reduction (P(sum), P(avg)).  A dim that a later axis has cut first, as
FSDP cuts what tensor parallelism has cut, is sharded in as many blocks as that axis has ranks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from localtensor.layout.tolerance import all_within_slack, within_slack

if TYPE_CHECKING:
    from localtensor.testing.compare.divergence import Sides
    from localtensor.testing.compare.watch import Key, Observation

BLOCKS = (2, 3)
"""Equal blocks of a fused tensor: gate and up, or query, key and value."""
MOST_LAYOUTS = 4000
"""Layouts that are tried for one tensor."""


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """The layout along one mesh axis: `kind` is "R", "S" or "P"; `dim` and `blocks` belong to S, `op` to P.

    `blocks` are the shares of the blocks within each of which the dim is sharded: (1,) if it is so as a whole.
    """

    kind: str
    dim: int = 0
    blocks: tuple[int, ...] = (1,)
    op: str = ""
    halo: bool = False  # the shards overlap, as those of a convolution do

    def __str__(self) -> str:
        if self.kind == "P":
            return f"P({self.op})"
        shares = f" of {':'.join(map(str, self.blocks))}" if len({*self.blocks}) > 1 else ""
        blocks = f" in {len(self.blocks)} blocks{shares}" if len(self.blocks) > 1 else ""
        return f"S({self.dim}){blocks}{' with halo' * self.halo}" if self.kind == "S" else "R"


REPLICATED = AxisLayout("R")
PENDING = (AxisLayout("P", op="avg"), AxisLayout("P", op="sum"))


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """The layout along each mesh axis, and the factor by which the assembled tensor is too large."""

    axes: tuple[AxisLayout, ...]
    factor: float = 1.0

    def __str__(self) -> str:
        text = ", ".join(map(str, self.axes))
        return text if self.factor == 1 else f"{text}, times {self.factor:g}"

    @property
    def pending(self) -> tuple[int, ...]:
        """The mesh axes along which a reduction is pending."""
        return tuple(axis for axis, layout in enumerate(self.axes) if layout.kind == "P")


def find_layout(
    held: Sequence[Tensor],
    sizes: Sequence[int],
    want: Tensor,
    slack: Tensor,
    first: Sequence[MeshLayout] = (),
    factors: Sequence[float] = (1.0,),
    blocks: Sequence[int] = (),
) -> MeshLayout | None:
    """The first layout under which the ranks' tensors assemble to `want` within `slack`; None if no layout does.

    `held` has the local tensor of each rank in the order of the mesh, whose axes have these sizes.  `first` are tried
    before all others; `factors` are those by which the assembled tensor may be too large.  `blocks` are the shares of the
    parts of a fused tensor, which may be unequal, beside two or three equal ones.

    >>> x = torch.arange(4.0)
    >>> str(find_layout([x[:2], x[2:]], [2], x, torch.zeros(())))
    'S(0)'
    >>> str(find_layout([x / 2, x / 2], [2], x, torch.zeros(())))
    'P(sum)'
    """
    candidates = itertools.chain(
        first, (MeshLayout(axes, factor) for factor in factors for axes in _layouts(held, sizes, want, blocks))
    )
    for layout in itertools.islice(candidates, MOST_LAYOUTS):
        made = assemble_layout(held, sizes, layout)
        if made is not None and fits(made, want, slack):
            return layout
    return None


def fits(made: Tensor, want: Tensor, slack: Tensor) -> bool:
    """Whether a tensor has the shape and dtype of another, and its elements within the slack."""
    on = made.device  # a counter of an optimizer may lie on the CPU on one side alone
    alike = made.shape == want.shape and made.dtype == want.dtype
    return alike and all_within_slack(made, want.to(on), slack.to(on))


def assemble_layout(held: Sequence[Tensor], sizes: Sequence[int], layout: MeshLayout) -> Tensor | None:
    """The tensor of which these are the pieces under a layout; None if they cannot be."""
    pieces = list(held)
    for size, axis in zip(reversed(sizes), reversed(layout.axes), strict=True):  # the last axis is the innermost
        grouped = [pieces[i : i + size] for i in range(0, len(pieces), size)]
        made = [_assemble_axis(group, axis) for group in grouped]
        if any(one is None for one in made):
            return None
        pieces = [one for one in made if one is not None]
    whole = pieces[0]
    if layout.factor == 1:
        return whole
    return whole / layout.factor if whole.is_floating_point() or whole.is_complex() else None


def _assemble_axis(group: Sequence[Tensor], axis: AxisLayout) -> Tensor | None:
    one = group[0]
    if axis.kind == "S":
        if any(x.dim() <= axis.dim or x.dim() != one.dim() for x in group):
            return None
        rest = one.shape[: axis.dim] + one.shape[axis.dim + 1 :]
        if any(x.shape[: axis.dim] + x.shape[axis.dim + 1 :] != rest for x in group):
            return None
        if len(axis.blocks) == 1:
            return torch.cat(list(group), axis.dim)
        whole = sum(axis.blocks)
        if any(x.shape[axis.dim] * share % whole for x in group for share in axis.blocks):
            return None
        cut = [x.split([x.shape[axis.dim] * share // whole for share in axis.blocks], axis.dim) for x in group]
        return torch.cat([piece for block in zip(*cut, strict=True) for piece in block], axis.dim)
    if any(x.shape != one.shape or x.dtype != one.dtype for x in group):
        return None
    if axis.kind == "R":
        return one if all(torch.equal(x, one) or equal_but_rounding(x, one) for x in group[1:]) else None
    total = torch.stack(list(group)).sum(0, dtype=one.dtype)
    return total / len(group) if axis.op == "avg" else total


def equal_but_rounding(x: Tensor, y: Tensor) -> bool:
    """Whether two replicas are equal but for rounding, NaN equal to NaN."""
    if not (x.is_floating_point() or x.is_complex()):
        return False
    eps = torch.finfo(x.dtype).eps
    return torch.allclose(
        x,
        y,
        rtol=16 * eps,
        atol=16 * eps * float(y.abs().nan_to_num(0.0, 0.0).max()) if y.numel() else 0,
        equal_nan=True,
    )


def _layouts(
    held: Sequence[Tensor], sizes: Sequence[int], want: Tensor, parts: Sequence[int] = ()
) -> Iterator[tuple[AxisLayout, ...]]:
    """The layouts whose pieces could have these shapes, in the order in which they are likelier."""
    dims = [
        dim
        for dim in range(want.dim())
        if all(x.dim() == want.dim() for x in held) and any(x.shape[dim] != want.shape[dim] for x in held)
    ]
    whole = [REPLICATED, *(PENDING if want.is_floating_point() or want.is_complex() else ())]
    shards = [AxisLayout("S", dim) for dim in dims]
    strided = sorted({size for size in sizes if size > max(BLOCKS)}) if len(sizes) > 1 else []  # as _StridedShard
    known = [(1,) * count for count in (*BLOCKS, *strided)]
    known += [tuple(parts)] if len({*parts}) > 1 or len(parts) > max(BLOCKS) else []
    blocks = [AxisLayout("S", dim, shares) for dim in dims for shares in known]
    every = itertools.product(*([*shards, *whole, *blocks] if size > 1 else [REPLICATED] for size in sizes))
    for axes in sorted(
        every, key=lambda axes: sum(axis.kind == "P" for axis in axes)
    ):  # a sum of averages is one of equals
        if {axis.dim for axis in axes if axis.kind == "S"} == set(dims):  # what is smaller is sharded, and only that
            yield axes


def layout_of_placements(one: Observation, axes: int) -> list[MeshLayout]:
    """The layout that a DTensor on the whole mesh says of itself."""
    if one.placements is None or len(one.placements) != axes:
        return []
    said = []
    for placement in one.placements:
        if isinstance(placement, Partial):
            said.append(AxisLayout("P", op=placement.reduce_op))
        elif isinstance(placement, Shard) or hasattr(placement, "split_factor"):
            said.append(AxisLayout("S", placement.dim, (1,) * getattr(placement, "split_factor", 1)))
        else:
            said.append(AxisLayout("R"))
    return [MeshLayout(tuple(said))] if all(a.op in ("", "sum", "avg") for a in said) else []


@dataclass(frozen=True, slots=True)
class Expected:
    """The layout that a value should have: all of it; by axis, what was found in its place; and why."""

    layout: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}, {self.reason}"


def expected_layout(sides: Sides, layouts: Mapping[Key, MeshLayout], key: Key, found: MeshLayout) -> Expected | None:
    """The layout that was expected of a value that has another; None if it is the expected one.

    `layouts` are those of the values before it.
    """
    names = list(sides.mesh)
    for layout, reason in _expectations(sides, layouts, key, found):
        other = [i for i, (a, b) in enumerate(zip(found.axes, layout.axes, strict=True)) if a != b]
        if other and not layout.pending:
            has = ", ".join(f"{found.axes[i]} on {names[i]}" for i in other)
            where = f"{has} where {', '.join(str(layout.axes[i]) for i in other)} was expected"
            return Expected(", ".join(map(str, layout.axes)), where, reason)
    return None


def _expectations(
    sides: Sides, layouts: Mapping[Key, MeshLayout], key: Key, found: MeshLayout
) -> Iterator[tuple[MeshLayout, str]]:
    """Layouts that may be expected, those that say most first: of the value itself, of its parameter, of its like."""
    held = next((rank.seen[key] for rank in (*sides.ranks, *sides.others) if key in rank.seen), None)
    if held is not None:
        yield from ((one, "as its placements say") for one in layout_of_placements(held, len(sides.sizes)))
    start = key._replace(step=0, kind="parameter")
    if key.kind != "parameter" and start in layouts:
        yield layouts[start], "as the parameter is"
    for step in reversed(range(key.step)):
        if (before := key._replace(step=step)) in layouts:
            yield layouts[before], f"as in step {step}"
    like = re.sub(r"\d+", "#", key.name)
    same = [k for k in layouts if k != key and k._replace(name="") == key._replace(name="")]
    siblings = [k for k in same if re.sub(r"\d+", "#", k.name) == like and len(layouts[k].axes) == len(found.axes)]
    if siblings and len({layouts[k].axes for k in siblings}) == 1:
        yield layouts[siblings[0]], f"as that of {siblings[0].name}"
    if found.pending:
        axes = (REPLICATED if axis.kind == "P" else axis for axis in found.axes)
        yield MeshLayout(tuple(axes)), "as what reads it takes it for whole"


def permuted_layout(
    held: Sequence[Tensor], sizes: Sequence[int], want: Tensor, slack: Tensor
) -> tuple[MeshLayout, tuple[int, ...]] | None:
    """A layout that fits when ranks along one mesh axis change places, and whose place each takes; None if none does.

    >>> x = torch.arange(4.0)
    >>> layout, order = permuted_layout([x[2:], x[:2]], [2], x, torch.zeros(()))
    >>> str(layout), order
    ('S(0)', (1, 0))
    """
    ranks = torch.arange(len(held)).reshape(tuple(sizes))
    for axis, size in enumerate(sizes):
        if not 2 <= size <= 4:
            continue
        for order in list(itertools.permutations(range(size)))[1:]:
            moved = ranks.index_select(axis, torch.tensor(order)).reshape(-1).tolist()
            layout = find_layout([held[rank] for rank in moved], sizes, want, slack)
            if layout is not None and layout.axes[axis].kind == "S":
                return layout, tuple(moved)
    return None


def values_text(sides: Sides, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> str:
    """The first element that differs, and the ranks that hold such, if not all do; or the shapes.

    By their shapes the ranks' tensors are shards along some mesh axes; along the others each row of ranks is taken by itself.
    """
    fewest, found = None, None
    for axes in itertools.product(
        (REPLICATED, *(AxisLayout("S", dim) for dim in range(want.dim()))), repeat=len(sides.sizes)
    ):
        rows = _rows_of_ranks(sides.sizes, axes)
        cut = [i for i, axis in enumerate(axes) if axis.kind == "S"]
        sizes, layout = [sides.sizes[i] for i in cut], MeshLayout(tuple(axes[i] for i in cut))
        made = [assemble_layout([held[rank] for rank in row], sizes, layout) for row in rows]
        whole = [x for x in made if x is not None and x.shape == want.shape]
        if len(whole) < len(rows):
            continue
        if whole[0].dtype != want.dtype:
            return f"{whole[0].dtype} where {sides.name} has {want.dtype}".replace("torch.", "")
        wrong = [~within_slack(x, want, slack) for x in whole]
        count = sum(int(one.sum()) for one in wrong) / len(rows)
        if fewest is None or count < fewest:  # the layout that is meant is likely that of the fewest differences
            fewest, found = count, (rows, sizes, layout, whole, wrong)
    if found is None:
        shapes = sorted({tuple(x.shape) for x in held})
        return f"shapes {', '.join(map(str, shapes))} where {sides.name} has {tuple(want.shape)}"
    rows, sizes, layout, whole, wrong = found
    first = next((i for i, one in enumerate(wrong) if bool(one.any())), None)
    if first is None:
        return "each rank is right by itself"
    at = tuple(int(i) for i in wrong[first].nonzero()[0])
    bound = slack if slack.dim() == 0 else slack.expand_as(want)[at]
    ranks = sorted(
        rank
        for row, one in zip(rows, wrong, strict=True)
        for number, rank in enumerate(row)
        if bool((_part_of([held[other] for other in row], sizes, layout, number) & one).any())
    )
    on = f", on {ranks_text(sides, ranks)}" if len(ranks) < len(held) else ""
    got = f"{whole[first][at].item():.6g} where {sides.name} gives {want[at].item():.6g} at {list(at)}{on}"
    return f"{got}; {int(wrong[first].sum())} of {want.numel()} elements differ, by more than {float(bound):.2g}"


def _rows_of_ranks(sizes: Sequence[int], axes: Sequence[AxisLayout]) -> list[list[int]]:
    """The ranks that differ only along axes of shards, in the order of the mesh, for each place along the others."""
    ranks = torch.arange(torch.Size(sizes).numel()).reshape(tuple(sizes))
    whole = [i for i, axis in enumerate(axes) if axis.kind == "R"]
    count = torch.Size([sizes[i] for i in whole]).numel()
    rows: list[list[int]] = ranks.movedim(whole, list(range(len(whole)))).reshape(count, -1).tolist()
    return rows


def _part_of(held: Sequence[Tensor], sizes: Sequence[int], layout: MeshLayout, number: int) -> Tensor:
    """Which elements of the whole tensor one of these ranks has, under a layout of shards."""
    found = assemble_layout([torch.full(x.shape, other == number) for other, x in enumerate(held)], sizes, layout)
    return torch.zeros((), dtype=torch.bool) if found is None else found


def ranks_text(sides: Sides, ranks: Sequence[int]) -> str:
    """Ranks by their numbers, with the coordinates that all of them have, as in `ranks 1, 3 (tp=1)`."""
    numbers = sides.numbers or tuple(range(len(sides.ranks)))
    at = torch.arange(len(sides.ranks)).reshape(sides.sizes)
    places = torch.stack([(at == rank).nonzero()[0] for rank in ranks])
    shared = [
        f"{name}={int(column[0])}"
        for (name, size), column in zip(sides.mesh.items(), places.T, strict=True)
        if size > 1 and len(column.unique()) == 1
    ]
    where = f" ({', '.join(shared)})" if shared else ""
    named = ", ".join(str(numbers[rank]) for rank in ranks)
    return f"rank{'s' * (len(ranks) > 1)} {named}{where}"
