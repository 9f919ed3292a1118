"""The stages of shrinking in their fixed order, and the stage of smaller tensors.

| stage     | candidates                                                                               |
|-----------|------------------------------------------------------------------------------------------|
| dtypes    | every tensor in float32, every one but positions                                         |
| ranks     | an axis on 2 ranks, then 3, up to one less; sharded sizes cut accordingly                |
| axes      | an axis of the mesh left out; no flattened submesh                                       |
| operands  | no follow-up step; an optional tensor left out; fewer tensors of a list; R everywhere    |
| dims      | a dim left out; sizes cut to ranks, twice as many, 1, 2, ranks + 1, half, one less       |
| scalars   | an argument left out or at its default; numbers at 0, 1, 2, one decimal                  |
| values    | 1 2 3, 2 3 4, ones, zeros, whole numbers, one decimal, no NaN; then element by element   |

Each stage is a function from a program to candidates, the boldest first.  The op may refuse a candidate, or it may not
fail: the search checks that.  It rejects those whose shards are less even (see `unevenness`), too.  Dims and sizes change in all operands and size arguments at once where these agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import LocalTensorError
from localtensor.layout import local_shapes_on, shard_cut
from strategies.model import arguments
from strategies.model.arguments import counts_dims, repeats_sizes, scalar_arguments, trusts_caller
from strategies.model.rule import Leaf, Program, overload
from strategies.programs.run.follow_ups import shorter_chains
from strategies.programs.shrink.values import (
    has_numbers,
    in_float32,
    simpler_scalars,
    simpler_values,
    with_call,
    with_tensors,
    without_tensors,
)

Places = frozenset[tuple[int, int]]
"""Dims of tensors: (tensor, dim)."""
LARGEST_FLAG = 2
"""Numbers up to this are considered a mode or a flag: how a loss is reduced, how a transform is scaled."""


def unevenness(program: Program) -> int:
    """How uneven the shards are: 0 for shards of one size, 1 for uneven ones, 2 with a rank or a tensor that has no rows."""
    if any(not x.numel() for x in program.sample.tensors):
        return 2
    return max(
        map(_unevenness, program.sample.tensors, program.inputs, [program.mesh] * len(program.inputs)), default=0
    )


def _unevenness(x: Tensor, layout: tuple[Placement, ...], mesh: tuple[int, ...]) -> int:
    ranks: dict[int, int] = {}
    for placement, size in zip(layout, mesh, strict=True):
        if (cut := shard_cut(placement)) is not None:
            ranks[cut[0]] = ranks.get(cut[0], 1) * size
    if not any(dim < x.ndim and x.shape[dim] % many for dim, many in ranks.items()):
        return 0
    try:
        return 1 + any(not math.prod(shape) for shape in local_shapes_on(x.shape, layout, mesh))
    except LocalTensorError:  # a shard of no dim
        return 1


def fewer_dims(program: Program) -> Iterator[Program]:
    """The program without one of its dims, the last dims first.

    A dim at or before a sharded one stays, since the placement has its number.  An op that does not check its arguments
    keeps its dims.
    """
    if trusts_caller(program.sample.op):
        return
    shapes = [tuple(x.shape) for x in program.sample.tensors]
    most = max(map(len, shapes), default=0)
    for d in reversed(range(most)):
        right = {i: d - most + len(s) for i, s in enumerate(shapes) if d - most + len(s) >= 0}
        left = {i: d for i, s in enumerate(shapes) if d < len(s)}
        largest = {i: d for i in left if len(shapes[i]) == most}
        for dims in _unique([right, left, largest, *({i: d} for i in left)]):
            if all(not isinstance(p, Shard) or p.dim < at for i, at in dims.items() for p in program.inputs[i]):
                yield from _without_dims(program, dims, d, most)


def _unique(found: Sequence[Any]) -> list[Any]:
    return [x for i, x in enumerate(found) if x not in found[:i]]


def _without_dims(program: Program, dims: dict[int, int], d: int, ndim: int) -> Iterator[Program]:
    cut = with_tensors(program, {i: program.sample.tensors[i].select(at, 0).clone() for i, at in dims.items()})
    change = arguments.with_arguments_changed
    call = change(program.sample.call, lambda name, v: _renumbered(v, d, ndim) if counts_dims(name) else v)
    others = [change(call, _lists_without(d)), change(call, _lists_without(d - ndim))]
    for one in _unique([*others, call]):
        yield with_call(cut, one)


def _renumbered(value: object, d: int, ndim: int) -> object:
    """A dim, or a list of dims, renumbered for tensors without dim `d` of `ndim`."""
    if isinstance(value, (list, tuple)):
        kept = [v for v in value if not isinstance(v, int) or v % ndim != d]
        return type(value)([_renumbered(v, d, ndim) for v in kept])
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if value >= 0:
        return value - 1 if value > d or value == ndim - 1 > 0 else value
    return value + 1 if value % ndim < d or value == -ndim < -1 else value


def _lists_without(at: int) -> Callable[[str, Any], Any]:
    """A function that removes the element `at` from lists of sizes that have it."""

    def shorter(name: str, value: Any) -> object:
        sizes = isinstance(value, (list, tuple)) and all(type(v) is int for v in value)
        if not sizes or counts_dims(name) or not -len(value) <= at < len(value):
            return value
        return type(value)([v for i, v in enumerate(value) if i != at % len(value)])

    return shorter


def smaller_sizes(program: Program) -> Iterator[Program]:
    """The program with smaller sizes.

    All sizes of no sharded dim are cut first, then all dims of one size together, then dim by dim, then dims of two
    tensors.  Each is cut to the number of ranks, twice as many, and then, the smallest first, to 1, 2, one more than
    the ranks, half, one less, one less on each rank, and once and twice each number among the arguments.
    """
    loose, groups = _groups(program)
    for m in (1, 2):
        yield from resized(program, {n: m for n in loose if n > m}, None)
    for n, places in groups:
        ranks = program.ranks
        others = sorted({1, 2, ranks + 1, n // 2, n - ranks, n - 1, *_sizes_in_arguments(program)})
        for m in dict.fromkeys((ranks, 2 * ranks, *others) if n not in loose else (1, 2, ranks, *others)):
            if 0 < m < n:
                yield from resized(program, {n: m}, places)


def _unexplained(program: Program) -> list[float]:
    """Numbers among the arguments that may depend on sizes in an unknown way, neither dims nor flags.

    These are single numbers, elements of a list that is not of sizes, and ratios of sizes.  A single number may be half
    of a size and equal another by chance: if both are cut in `_fft_c2r(x, dim, norm, last_size)`, torch 2.13 writes
    past the end of the tensor.
    """
    sizes = {n for x in program.sample.tensors for n in x.shape}
    every = scalar_arguments(program.sample.call)
    ratios = [s.value for s in every if type(s.value) is float and repeats_sizes(s.name)]
    found = [s for s in every if type(s.value) is int and not counts_dims(s.name)]
    return ratios + [s.value for s in found if s.value > LARGEST_FLAG and (len(s.path) == 1 or s.value not in sizes)]


def _sizes_in_arguments(program: Program) -> set[int]:
    """Once and twice each integer argument that is no dim."""
    found = {s.value for s in scalar_arguments(program.sample.call) if type(s.value) is int and not counts_dims(s.name)}
    return {m for v in found for m in (v, 2 * v)}


def _alike(program: Program) -> bool:
    """Whether all tensors except scalar ones have the same shape, and no argument is a list of sizes."""
    lists = any(len(s.path) > 1 for s in scalar_arguments(program.sample.call))
    return len({tuple(x.shape) for x in program.sample.tensors if x.ndim}) == 1 and not lists


def _groups(program: Program) -> tuple[list[int], list[tuple[int, Places | None]]]:
    """The sizes of no sharded dim; and the groups that may be cut alone: a size, and the dims that have it (None: all)."""
    shapes = [tuple(x.shape) for x in program.sample.tensors]
    every = [(i, d, n) for i, s in enumerate(shapes) for d, n in enumerate(s) if n > 1]
    held = {n for i, d, n in every if any(isinstance(p, Shard) and p.dim == d for p in program.inputs[i])}
    sizes = sorted({n for *_, n in every}, reverse=True)
    found: list[tuple[int, Places | None]] = [(n, None) for n in sizes]
    if not trusts_caller(program.sample.op) or _alike(program):
        by_left = [(n, frozenset((i, d) for i, d, m in every if (m, d) == (n, e))) for _, e, n in every]
        last = [(i, d, n, d - len(shapes[i])) for i, d, n in every]
        by_right = [(n, frozenset((i, d) for i, d, m, c in last if (m, c) == (n, e))) for *_, n, e in last]
        alone = [(n, frozenset([(i, d)])) for i, d, n in every if not trusts_caller(program.sample.op)]
        pairs = [(n, frozenset([(i, d), (j, e)])) for i, d, n in every for j, e, m in every if i < j and m == n]
        pairs = [] if trusts_caller(program.sample.op) else pairs  # the inner dims of a product, say
        whole = [frozenset((i, d) for i, d, m in every if m == n) for n in sizes]
        found += [group for group in dict.fromkeys([*by_left, *by_right, *alone, *pairs]) if group[1] not in whole]
    return [n for n in sizes if n not in held], found


def resized(program: Program, to: dict[int, int], places: Places | None) -> Iterator[Program]:
    """The program with sizes cut by the mapping `to`, in all tensors or at these places.

    Equal numbers among the arguments are cut, too, then also multiples of the sizes, then neither.  A second form of
    each folds indices that are now out of range; it is the only one for an op that does not check its arguments.  Such
    an op keeps its sizes if another argument may depend on them.
    """
    if not to or (trusts_caller(program.sample.op) and _unexplained(program)):
        return
    tensors = {i: _narrowed(x, i, to, places) for i, x in enumerate(program.sample.tensors)}
    cut = with_tensors(program, tensors)
    # Integers beside other tensors may be indices into these.
    integers = {i: x for i, x in tensors.items() if x.dtype in (torch.int64, torch.int32) and len(tensors) > 1}
    indices = {i: _folded(x, min(to.values())) for i, x in integers.items()}
    inside = all(x is tensors[i] for i, x in indices.items())
    folded = with_tensors(cut, indices)
    call = program.sample.call
    if trusts_caller(call.op):
        yield with_call(folded, arguments.with_scalars_changed(call, _equal(to)))
        return
    for one in _unique(
        [arguments.with_scalars_changed(call, _equal(to)), arguments.with_scalars_changed(call, _scaled(to)), call]
    ):
        yield with_call(cut, one)
        if not inside:
            yield with_call(folded, one)


def _narrowed(x: Tensor, number: int, to: dict[int, int], places: Places | None) -> Tensor:
    made = x
    for d, n in enumerate(x.shape):
        if n in to and (places is None or (number, d) in places):
            kept = [i * n // to[n] for i in range(to[n])]  # spread, so that ranks still hold different rows
            if kept and has_numbers(made) and (wild := _rows_not_finite(made, d)) and not wild.intersection(kept):
                kept[min(wild) * to[n] // n] = min(wild)  # it may be what fails
            made = made.index_select(d, torch.tensor(kept, device=x.device))
    return made


def _rows_not_finite(x: Tensor, d: int) -> set[int]:
    """The numbers of the rows along dim `d` that hold NaN or infinity."""
    return set((~x.isfinite()).nonzero()[:, d].tolist())


def _folded(x: Tensor, below: int) -> Tensor:
    outside = (x >= below) | (x < -below)
    return torch.where(outside, x % below, x) if bool(outside.any()) else x


def _equal(to: dict[int, int]) -> Callable[[str, Any], Any]:
    return lambda name, v: to.get(v, v) if type(v) is int and not counts_dims(name) else v


def _scaled(to: dict[int, int]) -> Callable[[str, Any], Any]:
    """A function that turns a multiple of a size that is cut into the same multiple of the new size."""

    def scale(name: str, v: object) -> object:
        if type(v) is not int or counts_dims(name) or v < 1:
            return v
        n = next((n for n in sorted(to, reverse=True) if v % n == 0), None)
        return v if n is None else v // n * to[n]

    return scale


def on_fewer_ranks(program: Program, axis: int, ranks: int) -> Iterator[Program]:
    """The program on fewer ranks along an axis, with sharded sizes as they are and cut.

    Sizes are cut to one more than the ranks and to the number of ranks, and all multiples of the old number of ranks to
    the new number.  Integer arguments equal to the old number of ranks change, too.
    """
    before = program.mesh[axis]
    fewer = replace(program, mesh=(*program.mesh[:axis], ranks, *program.mesh[axis + 1 :]))
    tensors = program.sample.tensors
    held = {
        tensors[i].shape[p.dim]
        for i, column in enumerate(program.inputs)
        for p in column[axis : axis + 1]
        if isinstance(p, Shard) and p.dim < tensors[i].ndim
    }
    ranks_replaced = _equal({before: ranks})
    yield fewer
    yield with_call(fewer, arguments.with_scalars_changed(program.sample.call, ranks_replaced))
    for m in (ranks + 1, ranks):
        yield from resized(fewer, {n: m for n in sorted(held) if n > m}, None)
    multiples = sorted({n for x in tensors for n in x.shape if n % before == 0 and n > ranks})
    for one in resized(fewer, dict.fromkeys(multiples, ranks), None):
        yield with_call(one, arguments.with_scalars_changed(one.sample.call, ranks_replaced))


Stage = Callable[[Program], Iterator[Program]]
"""A function from a program to smaller candidates."""


def fewer_ranks(program: Program) -> Iterator[Program]:
    """The program with an axis on fewer ranks, 2 first."""
    for axis, size in enumerate(program.mesh):
        for ranks in range(2, size):
            yield from on_fewer_ranks(program, axis, ranks)


def fewer_axes(program: Program) -> Iterator[Program]:
    """The program with an axis of its mesh left out, and without a flattened submesh."""
    for axis in reversed(range(len(program.mesh))) if len(program.mesh) > 1 else ():
        mesh = (*program.mesh[:axis], *program.mesh[axis + 1 :])
        yield replace(program, mesh=mesh, inputs=tuple((*p[:axis], *p[axis + 1 :]) for p in program.inputs))
    if program.flattened:
        yield replace(program, flattened=False)


def fewer_operands(program: Program) -> Iterator[Program]:
    """The program without a follow-up step, without an optional tensor, with shorter lists, with more replicas."""
    for then in shorter_chains(program.then):
        yield replace(program, then=then)
    call = program.sample.call
    schema = {a.name: a for a in overload(call.op)._schema.arguments}
    for where, name, value in arguments.named_arguments(call):
        if isinstance(value, Leaf) and str(schema[name].type).startswith("Optional"):
            yield without_tensors(program, arguments.with_value_at(call, (where,), None), [value.index])
    yield from _shorter_lists(program)
    if len(program.mesh) == 1 and not program.then:
        return  # the finding is about a rule with these inputs
    yield from more_replicas(program)


def more_replicas(program: Program) -> Iterator[Program]:
    """The program with one input placement replaced by a replica."""
    for i, layout in enumerate(program.inputs):
        for axis, placement in enumerate(layout):
            if placement != Replicate():
                other = (*layout[:axis], Replicate(), *layout[axis + 1 :])
                yield replace(program, inputs=(*program.inputs[:i], other, *program.inputs[i + 1 :]))


def _shorter_lists(program: Program) -> Iterator[Program]:
    """All lists of tensors of one length lose the same element, or all but the first."""
    call = program.sample.call
    listed = [(where, v) for where, _, v in arguments.named_arguments(call) if isinstance(v, (list, tuple)) and v]
    lists = [(where, v) for where, v in listed if isinstance(v[0], Leaf)]
    for length in sorted({len(v) for _, v in lists if len(v) > 1}):
        for drop in ([*range(1, length)], *([i] for i in reversed(range(length)))):
            one, gone = call, []
            for where, value in lists:
                if len(value) == length and all(isinstance(v, Leaf) for v in value):
                    gone += [value[i].index for i in drop]
                    left = type(value)([v for i, v in enumerate(value) if i not in drop])
                    one = arguments.with_value_at(one, (where,), left)
            if gone:
                yield without_tensors(program, one, gone)


def smaller_dims(program: Program) -> Iterator[Program]:
    """The program without one of its dims, and with smaller sizes."""
    yield from fewer_dims(program)
    yield from smaller_sizes(program)


STAGES: tuple[tuple[str, Stage], ...] = (
    ("dtypes", in_float32),
    ("ranks", fewer_ranks),
    ("axes", fewer_axes),
    ("operands", fewer_operands),
    ("dims", smaller_dims),
    ("scalars", simpler_scalars),
    ("values", simpler_values),
)
"""The order is fixed, so that the same finding shrinks to the same case."""
