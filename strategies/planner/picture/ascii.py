"""The picture of a plan as text: a grid of ranks for each stage, and in each the tensor, with what the rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from localtensor.layout.row_intervals import Runs
from strategies.planner.picture.grid import (
    Box,
    Stage,
    box,
    dims_drawn,
    extents,
    label,
    layout_text,
    lines_of,
    places,
    share_text,
    undrawn,
)

WIDTH = 60
CELLS = (4, 8)
"""How many cells a tensor is drawn with at most, down and across."""
LINES = 4
"""How many rows of ranks are drawn at most."""
SIGNS, ASCII = ("█", "▒", "·", "┊"), ("#", "%", ".", "~")
"""For a value, a part of one, what the rank does not have, and ranks that are left out."""


def drawn(stages: Sequence[Stage], *, width: int = WIDTH, signs: Sequence[str] = SIGNS) -> str:
    """All stages below each other, and what the signs mean.  No line is wider than `width`, but for words.

    >>> import torch
    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import Spec, parse
    >>> made = [Spec(Mesh.of(dp=2), (parse(p),), (2, 6), torch.float32) for p in ("S(0)", "S(1)")]
    >>> print(drawn([Stage(made[0]), Stage(made[1], "dp: all-to-all S(0) -> S(1)")], signs=ASCII))
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
    blocks = ["\n".join(_stage(stage, dims, width, signs)) for stage in stages]
    value, part, none, out = signs
    known = f"{value} a value   {part} a part of one, to be reduced   {none} not here"
    if any(out in block for block in blocks):
        known += f"\n{out} more ranks"
    return "\n\n".join([*blocks, known])


def _stage(stage: Stage, dims: Sequence[int], width: int, signs: Sequence[str]) -> list[str]:
    spec, names, sizes = stage.spec, stage.spec.mesh.names, stage.spec.mesh.sizes
    notes = [layout_text(spec), share_text(spec), undrawn(spec, dims)]
    lines = [stage.step] if stage.step else []
    head = "   ".join(note for note in notes if note)
    lines += [head] if len(head) <= width else [note for note in notes if note]
    leading = lines_of(sizes[:-1], LINES)
    labels = [label(names[:-1], sizes[:-1], line, width // 2 - 2) for line in leading]
    indent = max(map(len, labels)) + 2
    long, broad = extents(spec, dims)
    down, across = _count(long, CELLS[0]), _count(broad, CELLS[1])
    room = (width - indent - 5) // 2
    wide = max(across, len(label(names[-1:], sizes[-1:], (sizes[-1] - 1,), room)))
    columns = places(sizes[-1], max(2, (width - indent + 2) // (wide + 2)))
    above = [signs[3] if at is None else label(names[-1:], sizes[-1:], (at,), room).ljust(wide) for at in columns]
    lines.append(" " * indent + "  ".join(above).rstrip())
    for line, words in zip(leading, labels, strict=True):
        if line is None:
            lines.append(" " * indent + signs[3])
            continue
        shares = [None if at is None else box(spec, (*line, at), dims) for at in columns]
        cells = [None if one is None else _cells(one, (down, long), (across, broad), signs) for one in shares]
        for row in range(down):
            shown = "  ".join(signs[3] if cell is None else cell[row].ljust(wide) for cell in cells).rstrip()
            lines.append((words if row == 0 else "").ljust(indent) + shown)
    return lines


def _cells(share: Box, down: tuple[int, int], across: tuple[int, int], signs: Sequence[str]) -> list[str]:
    """The lines of a box; for each direction so many cells, for so many rows of the tensor."""
    rows, columns = _marked(share.down, *down), _marked(share.across, *across)
    held = signs[1] if share.part else signs[0]
    return ["".join(held if row and column else signs[2] for column in columns) for row in rows]


def _count(size: int, most: int) -> int:
    """How many cells a dim has: as many as it has rows, or so few that each has as many rows, or the most.

    >>> [_count(size, 8) for size in (0, 5, 12, 13, 4096)]
    [1, 5, 6, 8, 8]
    """
    return (
        next((cells for cells in range(most, most // 2, -1) if size % cells == 0), most)
        if size > most
        else max(1, size)
    )


def _marked(runs: Runs, cells: int, size: int) -> list[bool]:
    """Which of so many equal cells have some of these rows in them.

    >>> _marked(((0, 2), (6, 2)), 4, 8)
    [True, False, False, True]
    """
    found = [False] * cells
    for start, length in runs:
        for cell in range(start * cells // size, ((start + length) * cells - 1) // size + 1):
            found[cell] = True
    return found
