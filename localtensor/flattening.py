"""Several axes of a mesh as one, and one as several, where every rank keeps what it holds.

A nested uneven shard is not a flat one: of 5 rows, 2 times 2 ranks have 2, 1, 1 and 1, and four in one row 2, 2, 1 and
0.  So the rows of all ranks are compared.

| from                                | to                  | by            |
|-------------------------------------|---------------------|---------------|
| the same placement on adjacent axes | it, on one axis     | `flattened`   |
| a placement on one axis             | it, on several axes | `unflattened` |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from localtensor.errors import OtherRows
from localtensor.layout.mesh import Mesh
from localtensor.layout.row_intervals import runs_text
from localtensor.layout.shard_order import check_sizes, first_unlike_rank, remedy_of, rows_by_dim
from localtensor.layout.spec import Spec, is_defined, short


def flattened(spec: Spec, axes: Sequence[str], name: str) -> Spec:
    """The spec on the mesh whose adjacent axes are one axis of that name; rank numbers stay.

    Raises `OtherRows` where the axes are not adjacent or hold different placements, for sizes that are symbols, or where
    the flat axis would deal other rows: of 5 rows, 2 times 2 ranks have 2, 1, 1 and 1, and four have 2, 2, 1 and 0.

    >>> import torch
    >>> from torch.distributed.tensor import Shard
    >>> flattened(Spec(Mesh.of(dp=2, tp=3), (Shard(0), Shard(0)), (12,), torch.float32), ("dp", "tp"), "all")
    f32[12] @ all:S(0)
    """
    mesh = spec.mesh
    first, count = mesh.axis(axes[0]) if axes else 0, len(axes)
    if not axes or tuple(axes) != mesh.names[first : first + count]:
        problem = "these axes do not stand side by side in this order, so their ranks are not numbered in it"
        raise OtherRows("flattening.flattened", f"{tuple(axes)} of {mesh}", problem, "Name axes that do.", "axes")
    held = spec.placements[first : first + count]
    many = [p for p, size in zip(held, mesh.sizes[first : first + count], strict=True) if size > 1] or held[:1]
    one = many[0]
    if not is_defined(one):
        problem = f"what {short(one)} stands for on {axes[0]} is known to its own class only"
        raise OtherRows(
            "flattening.flattened", repr(spec), problem, "Redistribute it to R, S, SS or a plain Partial first."
        )
    if any(type(p) is not type(one) or p != one for p in many):
        raise OtherRows("flattening.flattened", repr(spec), f"{' and '.join(axes)} hold different placements",
                        "Redistribute to one placement on all of them first.")  # fmt: skip
    sizes = (*mesh.sizes[:first], math.prod(mesh.sizes[first : first + count]), *mesh.sizes[first + count :])
    flat = Mesh(sizes, (*mesh.names[:first], name, *mesh.names[first + count :]))
    placements = (*spec.placements[:first], one, *spec.placements[first + count :])
    made = Spec(flat, placements, spec.shape, spec.dtype)
    orders = []
    for dim in range(len(spec.shape)):  # the flat axis cuts when the first of them does
        turns = [axis if axis < first else max(first, axis - count + 1) for axis in spec.cut_by(dim)]
        orders.append((dim, tuple(axis for axis in dict.fromkeys(turns) if axis in made.cut_by(dim))))
    made = replace(made, shard_order=tuple((dim, order) for dim, order in orders if order))
    return _same_rows("flattened", spec, made, "on one axis", "keep the axes apart")


def unflattened(spec: Spec, axis: str, into: Mesh) -> Spec:
    """The spec on the mesh in which several axes stand for one, each with its placement; rank numbers stay.

    Raises `OtherRows` as `flattened` does, and for axes whose ranks are not as many.

    >>> import torch
    >>> from torch.distributed.tensor import Shard
    >>> unflattened(Spec(Mesh.of(all=6), (Shard(0),), (12,), torch.float32), "all", Mesh.of(dp=2, tp=3))
    f32[12] @ dp:S(0), tp:S(0)
    """
    mesh, at = spec.mesh, spec.mesh.axis(axis)
    if into.ranks != mesh.sizes[at]:
        problem = f"it has {into.ranks} ranks, and {axis} has {mesh.sizes[at]}"
        raise OtherRows(
            "flattening.unflattened", repr(into), problem, f"Give sizes whose product is {mesh.sizes[at]}.", "into"
        )
    count = len(into.sizes)
    wide = Mesh(
        (*mesh.sizes[:at], *into.sizes, *mesh.sizes[at + 1 :]), (*mesh.names[:at], *into.names, *mesh.names[at + 1 :])
    )
    placements = (*spec.placements[:at], *[spec.placements[at]] * count, *spec.placements[at + 1 :])
    orders = []
    for dim, axes in spec.shard_order:
        turns = [range(at, at + count) if one == at else (one if one < at else one + count - 1,) for one in axes]
        orders.append((dim, tuple(turn for some in turns for turn in some)))
    made = Spec(wide, placements, spec.shape, spec.dtype, tuple(orders))
    return _same_rows("unflattened", spec, made, f"on {' and '.join(into.names)}", f"keep {axis} in one")


def _same_rows(call: str, spec: Spec, made: Spec, how: str, keep: str) -> Spec:
    """What was made, if every rank of its mesh holds the rows that the rank of this number held."""
    check_sizes(f"flattening.{call}", spec)
    rank = first_unlike_rank(spec, made)
    if rank is None:
        return made
    for dim, (was, now) in enumerate(zip(rows_by_dim(spec), rows_by_dim(made), strict=True)):
        if was[rank] != now[rank]:
            problem = f"rank {rank} holds {runs_text(was[rank])} of dim {dim}, and {how} it would hold "
            problem += runs_text(now[rank])
            raise OtherRows(f"flattening.{call}", repr(spec), problem, remedy_of(spec, made, dim, keep))
    raise AssertionError("rows differ in no dim")
