"""What a difference looks like, in words: a missing reduction, a factor, a wrong group, slices, replicas, roundings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localtensor.layout.tolerance import max_abs
from localtensor.testing.compare.find_layout import Layout, find_layout, fits, permuted_layout
from localtensor.testing.compare.watch import Key

if TYPE_CHECKING:
    from localtensor.testing.compare.divergence import Findings, Sides

HELD_AS_PARAMETER = ("gradient", "parameter after the step")
HALF = (torch.bfloat16, torch.float16)


def explanations(
    sides: Sides, findings: Findings, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor
) -> Iterator[str]:
    """What the difference looks like, the likelier first; the last always holds."""
    sizes = sides.sizes
    if any(not bool(x.isfinite().all()) for x in held if x.is_floating_point()) and bool(want.isfinite().all()):
        yield "NaN or infinity where one device has numbers"
    if all(x.dtype != want.dtype for x in held) and held[0].is_floating_point() == want.is_floating_point():
        cast = [x.to(want.dtype) for x in held]
        loose = slack + 64 * torch.finfo(held[0].dtype).eps * float(want.abs().max()) if want.numel() else slack
        if want.is_floating_point() and find_layout(cast, sizes, want, loose) is not None:
            yield f"the dtype is {held[0].dtype} where one device has {want.dtype}".replace("torch.", "")
    yield from _scaled(sides, key, held, want, slack)
    yield from _counted_too_often(sides, key, held, want, slack)
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
    yield from _some_ranks(sides, held, want, slack)
    yield from _rounded(sides, held, want, slack)
    yield "wrong values"


def pending_source(sides: Sides, findings: Findings, key: Key) -> Key | None:
    """The value whose missing reduction makes this one wrong: the first of the pending sums right before it."""
    kinds = {"output": "output", "input": "output", "gradient of the output": "gradient of the output"}
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


def _is_pending_sum(sides: Sides, key: Key, layout: Layout) -> bool:
    declared = sides.ranks[0].seen[key].placements is not None
    return not declared and any(layout.axes[axis].op == "sum" for axis in layout.pending)


def _scaled(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """A factor that is a product of mesh sizes, or one over it."""
    if not want.is_floating_point() or not bool(want.any()):
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


def _counted_too_often(sides: Sides, key: Key, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """A parameter of the module that every rank adds, where one should: a bias before an all_reduce."""
    if key.kind != "output":
        return
    for name, one in ((k.name, x.value) for k, x in sides.reference.seen.items() if k.kind == "parameter"):
        if name.rpartition(".")[0] != key.name or one.dim() != 1 or want.shape[-1:] != one.shape:
            continue
        for axis, size in sides.mesh.items():
            layout = find_layout(held, sides.sizes, want + (size - 1) * one, slack) if size > 1 else None
            if layout is not None:
                over = [list(sides.mesh)[pending] for pending in layout.pending]
                missing = f"an all_reduce over {', '.join(over)} is missing, and " if over else ""
                yield f"{missing}{name} is added {size} times, once by each rank along {axis}"


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


def _rounded(sides: Sides, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """Right but for the roundings of a dtype of two bytes."""
    if not want.is_floating_point() or want.dtype in HALF:
        return
    for dtype in HALF[::-1]:
        loose = slack + 16 * torch.finfo(dtype).eps * float(max_abs(want))
        if find_layout([x.to(want.dtype) for x in held], sides.sizes, want, loose) is not None:
            yield f"its rounding is that of {dtype}: the dtype is lost on the way".replace("torch.", "")


def _some_ranks(sides: Sides, held: Sequence[Tensor], want: Tensor, slack: Tensor) -> Iterator[str]:
    """Right along one part of the mesh, and wrong elsewhere: replicas that differ."""
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
