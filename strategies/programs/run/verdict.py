"""What a run of DTensor itself came to: each rank's own account, weighed against the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement, NoSuchDim
from localtensor.layout import shapes_on, short
from strategies.model.code_text import tensor_text
from strategies.model.oracle import Truth, agrees
from strategies.model.rule import Program, held_text, read_layout
from strategies.programs.run.local_inputs import held_of
from strategies.programs.run.rank_run import RankResult
from strategies.validation.difference import Apart, rounding
from strategies.validation.probe import Case

# Which ranks hold what, before and after, as text that one can read.


def picture(case: Case, heard: Sequence[RankResult]) -> str:
    """Which ranks hold what, before and after."""
    return _drawn(list(map(short, case.rule.inputs)), case.held, heard, case.truth)


def program_picture(program: Program, truth: Truth, heard: Sequence[RankResult]) -> str:
    """The same for a program, whose results are those of what follows the op."""
    return _drawn(list(map(held_text, program.inputs)), held_of(program), heard, truth)


def _drawn(
    placements: Sequence[str], held: Sequence[Sequence[Tensor]], heard: Sequence[RankResult], truth: Truth
) -> str:
    lines = []
    for i, column in enumerate(held):
        lines.append(f"argument {i}, {placements[i]}")
        lines += [f"  rank {rank}  {tensor_text(piece, 8)}" for rank, piece in enumerate(column)]
    for i, name in enumerate(heard[0].placements if heard and heard[0].pieces else ()):
        lines.append(f"result {i}, {name}")
        lines += [f"  rank {rank}  {tensor_text(one.pieces[i], 8)}" for rank, one in enumerate(heard)]
        lines.append(
            f"  together  {tensor_text(heard[0].whole[i], 8)}"
            if heard[0].whole
            else "  together  could not be assembled"
        )
    for i, want in enumerate(truth.outputs):
        lines.append(f"the op gives {tensor_text(want, 8)}" if i == 0 else f"  and        {tensor_text(want, 8)}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """`wrong` is the reason if the real run went wrong, else empty; `note` says what happened instead."""

    wrong: str
    note: str = ""
    got: str = ""
    want: str = ""
    heard: tuple[RankResult, ...] = ()
    failed: str = ""
    refused: str = ""
    """What every rank raised when it ran the op, if that is what happened."""


def judged(
    truth: Truth,
    mesh: tuple[int, ...],
    heard: Sequence[RankResult],
    claimed: Sequence[str] = (),
    *,
    coarse: float = 0.0,
) -> Confirmation:
    """The verdict on what the ranks of a mesh heard; `claimed` are the placements that the results should have.

    `coarse` is what splitting the inputs has lost (see `probe.coarsest`).
    """
    heard = tuple(heard)
    failed = next((h for h in heard if h.errors), None)
    shape = "" if failed and failed.failed == "op" else _misshapen(truth, mesh, heard)
    if shape:
        return Confirmation(shape, heard=heard)
    return _raised(failed, heard) if failed else _compared(truth, heard, claimed, coarse)


def _raised(failed: RankResult, heard: tuple[RankResult, ...]) -> Confirmation:
    who = [rank for rank, error in enumerate(failed.errors) if error]
    said = failed.errors[who[0]]
    if len(who) < len(failed.errors):
        names = ", ".join(map(str, who))
        return Confirmation(
            f"rank {names} raises {said}; its peers go on and wait for it at the next collective", heard=heard
        )
    where = "refuses this call" if failed.failed == "op" else "cannot assemble the result"
    refused = said if failed.failed == "op" else ""
    return Confirmation("", f"DTensor {where} on every rank: {said}", heard=heard, refused=refused)


def _misshapen(truth: Truth, mesh: tuple[int, ...], heard: Sequence[RankResult]) -> str:
    for i, want in enumerate(truth.outputs):
        if not isinstance(want, Tensor):
            continue
        for rank, one in enumerate(heard):
            placements = placements_of(one.placements[i]) if i < len(one.placements) else None
            if placements is None or len(placements) != len(mesh):
                continue
            try:
                asked = shapes_on(want.shape, placements, mesh)[rank]
            except NoSuchDim:
                continue
            if one.shapes[i] != asked:
                return f"rank {rank} holds shape {one.shapes[i]}, {one.placements[i]} of {tuple(want.shape)} is {asked}"
    return ""


def placements_of(text: str) -> tuple[Placement, ...] | None:
    """The placements, or None if one is DTensor's own, which has no arithmetic here: its values are compared."""
    try:
        return read_layout(text)
    except BadPlacement:
        return None


def _compared(truth: Truth, heard: tuple[RankResult, ...], claimed: Sequence[str], coarse: float) -> Confirmation:
    for i, want in enumerate(truth.outputs):
        slack = truth.slack[i]
        if truth.metadata_only:
            continue
        looked: list[Any] = []  # ranks of a simulation share what is the same
        for rank, one in enumerate(heard):
            got = one.whole[i] if i < len(one.whole) else None
            if any(got is other for other in looked):
                continue
            looked.append(got)
            placement = one.placements[i] if i < len(one.placements) else "-"
            pieces = [h.pieces[i] for h in heard if i < len(h.pieces)]
            lost = rounding(pieces, coarse) if "P(" in placement and isinstance(want, Tensor) else 0.0
            problem = _unlike(got, want, slack, lost)
            if problem:
                which = f"output {i}" if len(truth.outputs) > 1 else "the result"
                wrong = f"rank {rank} assembles {which} from {placement}: {problem}"
                return Confirmation(wrong, "", tensor_text(got), tensor_text(want), heard)
    took = heard[0].placements[: len(claimed)] if claimed else ()
    follows = tuple(claimed) == tuple(took)
    shown = ", ".join(took)
    note = "DTensor's own run is right" if follows else f"DTensor does not follow it: it gives {shown}, which is right"
    return Confirmation("", note, heard=heard)


def _unlike(got: Any, want: Any, slack: Tensor | None, lost: float) -> str:
    """How they differ by more than the slack and what putting the result together has lost; or empty."""
    if not isinstance(want, Tensor) or slack is None:
        return ""
    want, slack = want.cpu(), slack.cpu()
    if not isinstance(got, Tensor):
        return f"it is {got!r}, not a tensor"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"{got.dtype}, not {want.dtype}"
    slack = slack + lost
    if got.dtype == torch.int64:  # what a float beyond int64 becomes is not defined; torch gives the least int64
        least = torch.iinfo(torch.int64).min
        slack = torch.where((got == least) | (want == least), torch.inf, slack.to(torch.float64))
    if agrees(got, want, slack):
        return ""
    apart = Apart.of(got, want, slack)
    return f"{apart.got} at {apart.place} where the op gives {apart.want} ({apart.share})"
