"""What a difference looks like, in words: a missing reduction, a factor, a wrong group, slices, replicas, roundings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from localtensor.layout.tolerance import is_inexact, within_slack
from localtensor.testing.compare.find_layout import (
    AxisLayout,
    MeshLayout,
    assemble_layout,
    find_layout,
    fits,
    permuted_layout,
)
from localtensor.testing.compare.watch import AFTER, IN_STEP, Key

if TYPE_CHECKING:
    from localtensor.testing.compare.divergence import Findings, Sides

HELD_AS_PARAMETER = ("gradient", IN_STEP, AFTER)
HALF = (torch.bfloat16, torch.float16)
WRONG_VALUES = "wrong values"
MOST_TIMES = 16  # the largest whole number that is tried as a factor
MOST_WINDOWS = 512  # places along a dim at which a slice is looked for


def explanations(
    sides: Sides, findings: Findings, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor
) -> Iterator[str]:
    """What the difference looks like, the likelier first; the last always holds."""
    sizes = sides.sizes
    if any(not bool(x.isfinite().all()) for x in held if x.is_floating_point()) and bool(want.isfinite().all()):
        yield f"NaN or infinity where {sides.name} has numbers"
    if all(x.dtype != want.dtype for x in held) and held[0].is_floating_point() == want.is_floating_point():
        cast = [x.to(want.dtype) for x in held]
        loose = slack + 64 * torch.finfo(held[0].dtype).eps * float(want.abs().max()) if want.numel() else slack
        if want.is_floating_point() and find_layout(cast, sizes, want, loose) is not None:
            yield f"the dtype is {held[0].dtype} where {sides.name} has {want.dtype}".replace("torch.", "")
    yield from _other_sizes(sides, key, held, want)
    yield from counted_too_often(sides, key, held, want, slack)
    yield from _scaled(sides, key, held, want, slack)
    yield from _tied(sides, key, held, want, slack)
    permuted = permuted_layout(held, sizes, want, slack)
    if permuted is not None:
        rank = next(rank for rank, other in enumerate(permuted[1]) if rank != other)
        yield f"the wrong slice: rank {permuted[1][rank]} holds that of rank {rank}"
    yield from _slices(sides, held, want, slack)
    for earlier in (
        Key(step, key.kind, key.name, call, key.leaf) for step in range(key.step + 1) for call in range(key.call + 1)
    ):
        if earlier != key and earlier in findings.layouts:
            old = sides.reference.seen[earlier].value
            if old.shape == want.shape and find_layout(held, sizes, old, sides.slack(earlier)) is not None:
                yield f"it is a stale value, that of {earlier}"
    yield from _mean_of_means(sides, key, held, want, slack)
    yield from _not_updated(sides, findings, key, held, want, slack)
    yield from _some_ranks(sides, key, held, want, slack)
    yield from _rounded(held, want)
    if not _counts(key, want):
        yield from _multiple(sides, held, want, slack)
    slices = [windows(x, want, slack, range(want.dim())) for x in held]
    if all(one is not None for one in slices):
        yield windows_text([one for one in slices if one is not None])
    yield from _other_order(sides, held, want, slack)
    yield from _unmatched(sides)
    yield WRONG_VALUES


def _unmatched(sides: Sides) -> Iterator[str]:
    """No parameter of the reference is on any rank, which have others."""
    mine, theirs = (
        {key.name for one in some for key in one.seen if key.kind == "parameter"}
        for some in ([sides.reference], [*sides.ranks, *sides.others])
    )
    if mine and theirs and not mine & theirs:
        yield f"the parameters cannot be matched: the ranks have none of {sides.name}, by name or by value"


def _other_sizes(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor) -> Iterator[str]:
    """A parameter, or the batch, whose parts have other sizes together than the one device's."""
    one, is_batch = held[0], (key.kind, key.name) == ("input", "")
    if not is_batch and (key.kind, key.step) != ("parameter", 0):
        return
    if one.dim() != want.dim() or not want.dim() or any(x.shape[1:] != want.shape[1:] for x in held if is_batch):
        yield f"its shape is {tuple(one.shape)} where {sides.name} has {tuple(want.shape)}: they cannot be matched"
        return
    ranks, totals = torch.arange(len(held)).reshape(sides.sizes), set()
    for count in range(len(sides.sizes) + 1):
        for axes in itertools.combinations(range(len(sides.sizes)), count):
            some = ranks[tuple(slice(None) if axis in axes else 0 for axis in range(ranks.dim()))].reshape(-1).tolist()
            rest = [axis for axis in range(ranks.dim()) if axis not in axes and sides.sizes[axis] > 1]
            if not is_batch or not rest or equal_along(sides, held, rest):
                totals |= {sum(held[rank].shape[0] if is_batch else held[rank].numel() for rank in some)}
    if is_batch and want.shape[0] not in totals:
        rows = max(totals)
        yield f"the batches have different sizes: {rows} rows on all ranks together, and {want.shape[0]} on {sides.name}"
    elif not is_batch and want.numel() not in totals:
        shapes = ", ".join(map(str, sorted({tuple(x.shape) for x in held})))
        yield f"it has shape {shapes} where {sides.name} has {tuple(want.shape)}: the parameters cannot be matched"


def _mean_of_means(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """A loss that is right if each rank's counts by the number of its rows."""
    inputs = [rank.seen.get(Key(key.step, "input", "")) for rank in sides.ranks]
    rows = [one.value.shape[0] for one in inputs if one is not None and one.value.dim()]
    if key.kind != "loss" or len(rows) < len(held) or len({*rows}) < 2 or any(x.shape != want.shape for x in held):
        return
    weighted = sum((x * n for x, n in zip(held, rows, strict=True)), torch.zeros_like(want)) / sum(rows)
    if fits(weighted, want, slack):
        counts = ", ".join(map(str, rows[:8])) + ", ..." * (len(rows) > 8)
        yield (
            f"the ranks have {counts} rows, and each takes the mean of its own: the mean of these is not that of all rows"
        )


def _not_updated(
    sides: Sides, findings: Findings, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor
) -> Iterator[str]:
    """Elements of a parameter that are after the step what they were before it."""
    start = Key(0, "parameter", key.name)
    before = start if key.step == 0 else key._replace(step=key.step - 1)
    layout = findings.layouts.get(start)
    if key.kind != AFTER or layout is None or any(before not in rank.seen for rank in sides.ranks):
        return
    now = assemble_layout(held, sides.sizes, layout)
    old = assemble_layout([rank.seen[before].value for rank in sides.ranks], sides.sizes, layout)
    if now is None or old is None or now.shape != want.shape:
        return
    wrong = ~within_slack(now, want, slack)
    if bool(wrong.any()) and torch.equal(now[wrong], old[wrong]):
        count = "it is" if bool(wrong.all()) else f"{int(wrong.sum())} of {wrong.numel()} elements are"
        yield f"{count} stale: the step has not updated {'it' if bool(wrong.all()) else 'them'}"


def pending_source(sides: Sides, findings: Findings, key: Key) -> Key | None:
    """The value whose missing reduction makes this one wrong: the first of the pending sums right before it."""
    kinds = {
        "output": "output",
        "input": "output",
        "loss": "output",
        "gradient of the output": "gradient of the output",
    }
    kind = kinds.get(key.kind)
    before = [(k, x) for k, x in findings.layouts.items() if k.kind == kind and k.step == key.step]
    run = list(itertools.takewhile(lambda item: _is_pending_sum(sides, *item), reversed(before)))
    if not run:
        own = [
            x
            for k, x in findings.layouts.items()
            if k[:4] == (key.step, "input", *key[2:4]) and _is_pending_sum(sides, k, x)
        ]
        run = [item for item in reversed(before) if own and _is_pending_sum(sides, *item)][:1]
    return run[-1][0] if run else None


def _is_pending_sum(sides: Sides, key: Key, layout: MeshLayout) -> bool:
    one = next((rank.seen[key] for rank in (*sides.ranks, *sides.others) if key in rank.seen), None)
    declared = one is not None and any(isinstance(placement, Partial) for placement in one.placements or ())
    return not declared and any(layout.axes[axis].op == "sum" for axis in layout.pending)


def _scaled(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """A factor that is a product of mesh sizes, or one over it."""
    if not want.is_floating_point() or not bool(want.any()) or _counts(key, want):
        return
    for count in range(1, len(sides.sizes) + 1):
        for axes in itertools.combinations(sides.mesh.items(), count):
            number = torch.Size([size for _, size in axes]).numel()
            over = ", ".join(name for name, _ in axes)
            for factor in (float(number), 1.0 / number):
                if number == 1:
                    continue
                layout = find_layout([x / factor for x in held], sides.sizes, want, slack)
                if layout is None:
                    continue
                pending = [list(sides.mesh)[axis] for axis in layout.pending]
                if any(name in pending for name, _ in axes):
                    continue  # another axis of the same size is meant
                if pending and key.kind in HELD_AS_PARAMETER:
                    yield f"it is reduced over {over} instead of {', '.join(pending)}: the wrong group"
                elif factor > 1:
                    how = "summed and not averaged" if key.kind in HELD_AS_PARAMETER else "added once too often"
                    yield f"it is {number} times too large, the number of ranks along {over}: {how}"
                else:
                    yield f"it is {number} times too small, the number of ranks along {over}: divided once too often"


def counted_too_often(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """What every rank adds, where one should: a bias before an all_reduce, or a residual."""
    if key.kind not in ("output", "input") or not want.is_floating_point():
        return
    for k, one in sides.reference.seen.items():
        value, is_bias = (
            one.value,
            k.kind == "parameter" and k.name.rpartition(".")[0] == key.name and one.value.dim() == 1,
        )
        is_residual = (
            k.kind in ("output", "input") and k.step == key.step and value.shape == want.shape and k.name != key.name
        )
        if not (is_bias and want.shape[-1:] == value.shape) and not (is_residual and not torch.equal(value, want)):
            continue  # the value itself, of which a factor says more
        for axis, size in sides.mesh.items():
            layout = (
                find_layout(held, sides.sizes, want + (size - 1) * value, slack)
                if size > 1 and bool(value.any())
                else None
            )
            if layout is not None and (is_bias or not layout.pending):
                over = names_of(sides, layout.pending)
                lost = f"an all_reduce over {over} is missing, and " if over else ""
                yield f"{lost}{k.name if is_bias else k} is added {size} times, once by each rank along {axis}"


def names_of(sides: Sides, axes: Iterable[int]) -> str:
    """The names of mesh axes, by their numbers."""
    return ", ".join(list(sides.mesh)[axis] for axis in sorted(axes))


def _tied(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """A parameter that one device uses in several places, and the ranks have as several."""
    tied = sides.reference.tied
    if not key.kind.startswith("gradient"):
        return
    for other in [name for name, first in tied.items() if first == key.name]:
        if sides.ranks[0].tied.get(other) == key.name:
            continue
        there = [rank.seen.get(key._replace(name=other)) for rank in (*sides.ranks, *sides.others)]
        values = [x.value for x in there if x is not None][: len(held)]
        words = f"{key.name} and {other} are one parameter on {sides.name}, and not on the ranks"
        if len(values) == len(held) and all(a.shape == b.shape for a, b in zip(values, held, strict=True)):
            both = [a + b for a, b in zip(held, values, strict=True)]
            words += f": the gradient that comes by {other} is missing" * (
                find_layout(both, sides.sizes, want, slack) is not None
            )
        yield words


def _counts(key: Key, want: Tensor) -> bool:
    """Whether a value counts something, as the steps that an optimizer has done: a factor says nothing of it."""
    return key.kind.startswith("optimizer's") and want.numel() == 1


def _multiple(sides: Sides, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """A whole number, or one over it, as a factor."""
    if not want.is_floating_point() or not bool(want.any()):
        return
    for number in range(2, MOST_TIMES + 1):
        for factor, how in ((1 / number, "large"), (number, "small")):
            layout = find_layout([x * factor for x in held], sides.sizes, want, slack)
            if layout is not None and not equal_along(sides, held, layout.pending):  # equal ones are no parts of a sum
                yield f"it is {number} times too {how}"


def windows(x: Tensor, want: Tensor, slack: Tensor, dims: Sequence[int]) -> tuple[int, int, int] | None:
    """The one place at which a tensor is a slice of another along one of these dims: dim, start and end; or None."""
    if x.dim() != want.dim() or x.dtype != want.dtype:
        return None
    cut = [dim for dim in range(want.dim()) if x.shape[dim] != want.shape[dim]]
    if len(cut) != 1 or cut[0] not in dims or not 0 < x.shape[cut[0]] < want.shape[cut[0]]:
        return None
    dim, length, bound = cut[0], x.shape[cut[0]], slack.max() if slack.dim() else slack
    places = range(min(want.shape[dim] - length + 1, MOST_WINDOWS))
    found = list(itertools.islice((at for at in places if fits(x, want.narrow(dim, at, length), bound)), 2))
    return (dim, found[0], found[0] + length) if len(found) == 1 else None


def halo_layout(sides: Sides, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> MeshLayout | None:
    """Shards of one dim along one mesh axis that overlap, in their order, and leave nothing out; None if it is otherwise."""
    ranks = torch.arange(len(held)).reshape(sides.sizes)
    for axis, size in enumerate(sides.sizes):
        groups = ranks.movedim(axis, 0).reshape(size, -1)
        found = [windows(held[rank], want, slack, range(want.dim())) for rank in groups[:, 0].tolist()]
        places = [one for one in found if one is not None]
        if size < 2 or len(places) < size or len({one[0] for one in places}) > 1:
            continue
        whole = places[0][1] == 0 and places[-1][2] == want.shape[places[0][0]]
        ordered = all(a[1] < b[1] <= a[2] < b[2] for a, b in itertools.pairwise(places))
        alike = equal_along(sides, held, [other for other in range(len(sides.sizes)) if other != axis])
        if whole and ordered and (groups.shape[1] == 1 or alike):
            shard = AxisLayout("S", places[0][0], halo=True)
            return MeshLayout(tuple(shard if other == axis else AxisLayout("R") for other in range(len(sides.sizes))))
    return None


def equal_along(sides: Sides, held: Sequence[Tensor], axes: Sequence[int]) -> bool:
    """Whether the ranks along these mesh axes hold equal tensors."""
    ranks = torch.arange(len(held)).reshape(sides.sizes)
    pairs = (
        (ranks.select(axis, 0), ranks.select(axis, place)) for axis in axes for place in range(1, sides.sizes[axis])
    )
    each = (
        (held[int(a)], held[int(b)])
        for one, other in pairs
        for a, b in zip(one.flatten(), other.flatten(), strict=True)
    )
    return bool(axes) and all(a.shape == b.shape and torch.equal(a, b) for a, b in each)


def windows_text(found: Sequence[tuple[int, int, int]]) -> str:
    """The slices that ranks have, in words.

    >>> windows_text([(1, 0, 4), (1, 3, 7)])
    'the wrong slice: along dim 1 the ranks hold 0:4, 3:7'
    """
    return f"the wrong slice: along dim {found[0][0]} the ranks hold {', '.join(f'{a}:{b}' for _, a, b in found[:8])}"


def _other_order(sides: Sides, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """All elements are there, and some in another place."""
    if (
        not is_inexact(want)
        or want.numel() < 8
        or len(want.unique()) < want.numel() // 2
        or any(x.dtype != want.dtype for x in held)
    ):
        return
    ordered, bound = want.flatten().sort().values, slack.max() if slack.dim() else slack
    if not bool(bound.isfinite()):
        return
    ranks = torch.arange(len(held)).reshape(sides.sizes)
    for axis in (None, *range(ranks.dim())):
        groups = (
            [[rank] for rank in range(len(held))]
            if axis is None
            else ranks.movedim(axis, -1).reshape(-1, sides.sizes[axis]).tolist()
        )
        whole = [torch.cat([held[rank].flatten() for rank in group]) for group in groups]
        if all(x.numel() == want.numel() and bool(within_slack(x.sort().values, ordered, bound).all()) for x in whole):
            yield "the elements are right and their order is not: the wrong slice, dim or order of ranks"


def _slices(sides: Sides, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """Each rank has some slice along one mesh axis, and one of them another's: the slice of the first rank on all, say."""
    ranks = torch.arange(len(held)).reshape(sides.sizes)
    places = {name: [int(i) for i in _places(ranks, axis)] for axis, name in enumerate(sides.mesh)}
    for (name, size), dim in itertools.product(sides.mesh.items(), range(want.dim())):
        if size < 2 or want.shape[dim] < size:
            continue
        bounds = slack if slack.dim() == 0 else slack.expand_as(want)
        slices = want.tensor_split(size, dim)
        limits = bounds.tensor_split(size, dim) if bounds.dim() else [bounds] * size
        found = [next((i for i in range(size) if fits(x, slices[i], limits[i])), None) for x in held]
        wrong = [rank for rank, i in enumerate(found) if i != places[name][rank]]
        if None not in found and wrong:
            yield f"the wrong slice along {name}: rank {wrong[0]} holds number {found[wrong[0]]} and not {places[name][wrong[0]]}"


def _places(ranks: Tensor, axis: int) -> Tensor:
    """The coordinate along this axis of each rank, in the order of the ranks."""
    shape = [1] * ranks.dim()
    shape[axis] = -1
    return torch.arange(ranks.shape[axis]).reshape(shape).expand_as(ranks).reshape(-1)


def _rounded(held: Sequence[Tensor], want: Tensor) -> Iterator[str]:
    """Values of a dtype of two bytes, in one of more."""
    if not want.is_floating_point() or want.dtype.itemsize <= 2 or any(x.dtype != want.dtype for x in held):
        return
    if any(len(x.unique()) <= min(2, x.numel() - 1) or not x.any() for x in held):
        return  # a constant says nothing
    for dtype in HALF:  # a number of bfloat16 is mostly one of float16, too, and not the other way round
        if all(torch.equal(x.to(dtype).to(x.dtype), x) for x in held) and not torch.equal(
            want.to(dtype).to(want.dtype), want
        ):
            yield f"its elements are numbers of {dtype}: the dtype is lost on the way".replace("torch.", "")
            return


def _some_ranks(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """Right along one part of the mesh, and wrong elsewhere: replicas that differ."""
    kept = key.kind in ("parameter", "buffer") and all(x.shape == want.shape for x in held)
    ranks = torch.arange(len(held)).reshape(sides.sizes)
    for axis, (name, size) in enumerate(sides.mesh.items()):
        rest = [s for i, s in enumerate(sides.sizes) if i != axis]
        right = []
        for place in range(size):
            some = ranks.select(axis, place).reshape(-1).tolist()
            if find_layout([held[rank] for rank in some], rest, want, slack) is not None:
                right.append(place)
        if right and len(right) < size:
            wrong = ", ".join(str(place) for place in range(size) if place not in right)
            yield f"replicas along {name} differ: right at {', '.join(map(str, right))}, wrong at {wrong}"
        firsts = [held[int(ranks.select(axis, place).reshape(-1)[0])] for place in range(size)]
        if kept and not right and any(not torch.equal(x, firsts[0]) for x in firsts[1:]):
            yield f"replicas along {name} differ, and none is right"
