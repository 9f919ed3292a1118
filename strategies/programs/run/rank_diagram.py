"""Which ranks hold what, before and after, as text that one can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from localtensor.layout.spec import short
from strategies.model.oracle import Truth
from strategies.model.program import Program, held_text
from strategies.programs.run.local_inputs import held_of
from strategies.programs.run.rank_run import Heard
from strategies.validation.probe import Case


def text(x: Any, most: int = 24) -> str:
    """A tensor in one line: `[1, 2, ...] of shape (2, 4)`."""
    if not isinstance(x, Tensor):
        return repr(x)
    flat = [f"{v:.6g}" if not isinstance(v, bool) else str(v) for v in x.detach().flatten()[:most].tolist()]
    return f"[{', '.join(flat)}{', ...' if x.numel() > most else ''}] of shape {tuple(x.shape)}"


def picture(case: Case, heard: Sequence[Heard]) -> str:
    """Which ranks hold what, before and after."""
    return _drawn(list(map(short, case.rule.inputs)), case.held, heard, case.truth)


def program_picture(program: Program, truth: Truth, heard: Sequence[Heard]) -> str:
    """The same for a program, whose results are those of what follows the op."""
    return _drawn(list(map(held_text, program.inputs)), held_of(program), heard, truth)


def _drawn(placements: Sequence[str], held: Sequence[Sequence[Tensor]], heard: Sequence[Heard], truth: Truth) -> str:
    lines = []
    for i, column in enumerate(held):
        lines.append(f"argument {i}, {placements[i]}")
        lines += [f"  rank {rank}  {text(piece, 8)}" for rank, piece in enumerate(column)]
    for i, name in enumerate(heard[0].placements if heard and heard[0].pieces else ()):
        lines.append(f"result {i}, {name}")
        lines += [f"  rank {rank}  {text(one.pieces[i], 8)}" for rank, one in enumerate(heard)]
        lines.append(
            f"  together  {text(heard[0].whole[i], 8)}" if heard[0].whole else "  together  could not be assembled"
        )
    for i, want in enumerate(truth.outputs):
        lines.append(f"the op gives {text(want, 8)}" if i == 0 else f"  and        {text(want, 8)}")
    return "\n".join(lines)
