"""The picture of a plan as text: for each stage a grid of ranks, each with the tensor and the part that it holds.

Two dims of the tensor are drawn, preferably sharded ones. Of a long mesh axis only some ranks are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial

from localtensor.layout import RowIntervals, Spec, cuts_by_dim, rows_at, short


@dataclass(frozen=True, slots=True)
class PlanStage:
    """The layout after a step; the first stage of a plan has no step."""

    spec: Spec
    step: str = ""
    axes: tuple[int, ...] = ()
    """The axes whose ranks communicate in that step; empty for a local step."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's share: its rows of each of the two drawn dims."""

    down: RowIntervals
    across: RowIntervals
    part: bool
    """Whether it is a partial value, still to be reduced."""


def layout_text(spec: Spec) -> str:
    """The placements with the names of their axes.

    >>> import torch
    >>> from localtensor.layout import Mesh, parse
    >>> layout_text(Spec(Mesh.of(dp=2), (parse("S(0)"),), (8,), torch.float32))
    'dp:S(0)'
    """
    return repr(spec).partition(" @ ")[2]


def drawn_indices(size: int, most: int) -> list[int | None]:
    """The indices along an axis that are drawn: the first ones and the last; None for those left out.

    >>> drawn_indices(3, 4), drawn_indices(16, 4)
    ([0, 1, 2], [0, 1, None, 15])
    """
    return [*range(size)] if size <= most else [*range(max(1, most - 2)), None, size - 1]


def drawn_coordinates(sizes: Sequence[int], most: int) -> list[tuple[int, ...] | None]:
    """The coordinates on several axes that are drawn below each other; None for those left out.

    >>> drawn_coordinates((2, 2), 8), drawn_coordinates((), 4), drawn_coordinates((100,), 3)
    ([(0, 0), (0, 1), (1, 0), (1, 1)], [()], [(0,), None, (99,)])
    """
    found: list[tuple[int, ...] | None] = []
    for number in drawn_indices(math.prod(sizes), most):
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        found.append(None if number is None else tuple(number // s % n for s, n in zip(strides, sizes, strict=True)))
    return found


def rank_label(names: Sequence[str], sizes: Sequence[int], place: Sequence[int] | None, most: int) -> str:
    """A rank's coordinates on some axes, with the names of the axes unless the longest label exceeds `most` characters.

    >>> rank_label(("dp", "tp"), (2, 16), (1, 3), 10), rank_label(("dp", "tp"), (2, 101), (1, 3), 10), rank_label((), (), None, 10)
    ('dp 1 tp 3', '1 3', '')
    """
    longest = " ".join(f"{name} {size - 1}" for name, size in zip(names, sizes, strict=True))
    named = len(longest) <= most
    return " ".join(f"{name} {at}" if named else str(at) for name, at in zip(names, place or (), strict=bool(place)))


def dims_drawn(stages: Sequence[PlanStage]) -> tuple[int, ...]:
    """At most two dims, ascending: those sharded in most stages, and then the first ones."""
    spec = stages[0].spec
    often = {dim: sum(bool(cuts_by_dim(stage.spec)[dim]) for stage in stages) for dim in range(len(spec.shape))}
    return tuple(sorted(sorted(often, key=lambda dim: (-often[dim], dim))[:2]))


def share_of_rank(spec: Spec, where: Sequence[int], dims: Sequence[int]) -> RankShare:
    """The share of the rank with these coordinates."""
    held = [_rows_held(spec, where, dim) for dim in dims]
    part = any(isinstance(placement, Partial) for placement in spec.placements)
    down, across = (((0, 1),), *held) if len(held) == 1 else held or [((0, 1),), ((0, 1),)]
    return RankShare(down, across, part)


def drawn_sizes(spec: Spec, dims: Sequence[int]) -> tuple[int, int]:
    """The sizes of the two drawn dims: 1 for one that the tensor does not have."""
    sizes = [spec.shape[dim] for dim in dims]
    return (1, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1]) if sizes else (1, 1)


def share_text(spec: Spec) -> str:
    """The share of the first rank in words; no rank holds more.

    >>> import torch
    >>> from localtensor.layout import Mesh, parse
    >>> share_text(Spec(Mesh.of(dp=3), (parse("S(0)"),), (8, 4), torch.float32))
    'at most 3 x 4 on a rank'
    >>> share_text(Spec(Mesh.of(dp=2), (parse("P(sum)"),), (8,), torch.float32))
    'parts of 8 on a rank, P(sum) over dp'
    """
    first = (0,) * len(spec.mesh.sizes)
    counts = [sum(length for _, length in _rows_held(spec, first, dim)) for dim in range(len(spec.shape))]
    cut = [math.prod(spec.mesh.sizes[axis] for axis, _ in axes) for axes in cuts_by_dim(spec)]
    even = all(size % ranks == 0 for size, ranks in zip(spec.shape, cut, strict=True))
    size = " x ".join(map(str, counts)) or "a number"
    named = zip(spec.placements, spec.mesh.names, strict=True)
    pending = [(short(p), name) for p, name in named if isinstance(p, Partial)]
    kinds = " and ".join(f"{kind} over {', '.join(n for k, n in pending if k == kind)}" for kind in dict(pending))
    return f"{'parts of ' * bool(pending)}{'' if even else 'at most '}{size} on a rank{', ' * bool(pending)}{kinds}"


def undrawn_text(spec: Spec, dims: Sequence[int]) -> str:
    """Which dims are sharded but not drawn; empty if none."""
    others = [f"dim {dim}" for dim in range(len(spec.shape)) if dim not in dims and cuts_by_dim(spec)[dim]]
    return f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'} cut, too, and not drawn" if others else ""


def _rows_held(spec: Spec, where: Sequence[int], dim: int) -> RowIntervals:
    return rows_at(spec.shape[dim], cuts_by_dim(spec)[dim], spec.mesh.sizes, where)


WIDTH = 60
MOST_CELLS = (4, 8)
"""The most cells that a tensor is drawn with, down and across."""
MOST_LINES = 4
"""The most rows of ranks that are drawn."""
SIGNS, ASCII = ("█", "▒", "·", "┊"), ("#", "%", ".", "~")
"""For a value, a partial value, what the rank does not hold, and ranks left out."""


def ascii_picture(stages: Sequence[PlanStage], *, width: int = WIDTH, signs: Sequence[str] = SIGNS) -> str:
    """All stages below each other, and a legend. No line but text is wider than `width`.

    >>> import torch
    >>> from localtensor.layout import Mesh, parse
    >>> made = [Spec(Mesh.of(dp=2), (parse(p),), (2, 6), torch.float32) for p in ("S(0)", "S(1)")]
    >>> print(ascii_picture([PlanStage(made[0]), PlanStage(made[1], "dp: all-to-all S(0) -> S(1)")], signs=ASCII))
    dp:S(0)   1 x 6 on a rank
      dp 0    dp 1
      ######  ......
      ......  ######
    <BLANKLINE>
    dp: all-to-all S(0) -> S(1)
    dp:S(1)   2 x 3 on a rank
      dp 0    dp 1
      ###...  ...###
      ###...  ...###
    <BLANKLINE>
    # a value   % a part of one, to be reduced   . not here
    """
    dims = dims_drawn(stages)
    blocks = ["\n".join(_stage_lines(stage, dims, width, signs)) for stage in stages]
    value, part, none, out = signs
    known = f"{value} a value   {part} a part of one, to be reduced   {none} not here"
    if any(out in block for block in blocks):
        known += f"\n{out} more ranks"
    return "\n\n".join([*blocks, known])


def _stage_lines(stage: PlanStage, dims: Sequence[int], width: int, signs: Sequence[str]) -> list[str]:
    spec, names, sizes = stage.spec, stage.spec.mesh.names, stage.spec.mesh.sizes
    notes = [layout_text(spec), share_text(spec), undrawn_text(spec, dims)]
    lines = [stage.step] if stage.step else []
    head = "   ".join(note for note in notes if note)
    lines += [head] if len(head) <= width else [note for note in notes if note]
    leading = drawn_coordinates(sizes[:-1], MOST_LINES)
    labels = [rank_label(names[:-1], sizes[:-1], line, width // 2 - 2) for line in leading]
    indent = max(map(len, labels)) + 2
    long, broad = drawn_sizes(spec, dims)
    down, across = _cell_count(long, MOST_CELLS[0]), _cell_count(broad, MOST_CELLS[1])
    space = (width - indent - 5) // 2
    wide = max(across, len(rank_label(names[-1:], sizes[-1:], (sizes[-1] - 1,), space)))
    columns = drawn_indices(sizes[-1], max(2, (width - indent + 2) // (wide + 2)))
    above = [signs[3] if at is None else rank_label(names[-1:], sizes[-1:], (at,), space).ljust(wide) for at in columns]
    lines.append(" " * indent + "  ".join(above).rstrip())
    for line, words in zip(leading, labels, strict=True):
        if line is None:
            lines.append(" " * indent + signs[3])
            continue
        shares = [None if at is None else share_of_rank(spec, (*line, at), dims) for at in columns]
        cells = [None if one is None else _cell_lines(one, (down, long), (across, broad), signs) for one in shares]
        for row in range(down):
            shown = "  ".join(signs[3] if cell is None else cell[row].ljust(wide) for cell in cells).rstrip()
            lines.append((words if row == 0 else "").ljust(indent) + shown)
    return lines


def _cell_lines(share: RankShare, down: tuple[int, int], across: tuple[int, int], signs: Sequence[str]) -> list[str]:
    """The lines of a box. `down` and `across` are each a number of cells and the size of the dim."""
    rows, columns = _marked_cells(share.down, *down), _marked_cells(share.across, *across)
    held = signs[1] if share.part else signs[0]
    return ["".join(held if row and column else signs[2] for column in columns) for row in rows]


def _cell_count(size: int, most: int) -> int:
    """The number of cells of a dim: its size, or the largest number above half of `most` that divides it, or `most`.

    >>> [_cell_count(size, 8) for size in (0, 5, 12, 13, 4096)]
    [1, 5, 6, 8, 8]
    """
    if size <= most:
        return max(1, size)
    return next((cells for cells in range(most, most // 2, -1) if size % cells == 0), most)


def _marked_cells(runs: RowIntervals, cells: int, size: int) -> list[bool]:
    """Which of so many equal cells hold some of these rows.

    >>> _marked_cells(((0, 2), (6, 2)), 4, 8)
    [True, False, False, True]
    """
    found = [False] * cells
    for start, length in runs:
        for cell in range(start * cells // size, ((start + length) * cells - 1) // size + 1):
            found[cell] = True
    return found
