"""The verdict on a run of DTensor: each rank's results compared with the oracle, and a diagram of what ranks hold."""

from __future__ import annotations

import cmath
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement, NoSuchDim
from localtensor.layout import local_shapes_on, short
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.oracle import OracleResult, equal_within, mutates
from strategies.model.rule import Program, Sample, overload, placements_text, read_layout
from strategies.programs.run.program_oracle import tensors_made
from strategies.programs.run.rank_run import ProgramRankResult, WrongPieceShape
from strategies.programs.run.step_functions import local_inputs_of
from strategies.torch_api.code_places import refusal_text
from strategies.torch_api.rank_runs import some_raise_text
from strategies.validation.difference import SPLIT_ULPS, ElementDifference, excerpt, folding_error, tensor_text
from strategies.validation.finding import Candidate
from strategies.validation.probe import Case


def rank_diagram(case: Case, results: Sequence[ProgramRankResult]) -> str:
    """The ranks' pieces of the arguments and the results of a case, as text."""
    return _diagram(list(map(short, case.rule.inputs)), case.held, results, case.oracle)


def program_rank_diagram(program: Program, oracle: OracleResult, results: Sequence[ProgramRankResult]) -> str:
    """The same for a program, whose results are those of its follow-up step."""
    given = list(map(placements_text, program.inputs))
    return _diagram(given, local_inputs_of(program), results, oracle, tensors_made(program))


def _diagram(
    placements: Sequence[str],
    held: Sequence[Sequence[Tensor]],
    results: Sequence[ProgramRankResult],
    oracle: OracleResult,
    made: Sequence[tuple[str, Tensor, tuple[Placement, ...]]] = (),
) -> str:
    lines = []
    for i, column in enumerate(held):
        lines.append(f"argument {i}, {placements[i]}")
        lines += [f"  rank {rank}  {tensor_text(piece, 8)}" for rank, piece in enumerate(column)]
    for i, (kind, x, layout) in enumerate(made, len(held)):
        lines += [f"{kind} {i}, {placements_text(layout)}", f"  whole   {tensor_text(x, 8)}"]
    for i, name in enumerate(results[0].placements if results and results[0].pieces else ()):
        lines.append(f"result {i}, {name}")
        lines += [f"  rank {rank}  {tensor_text(one.pieces[i], 8)}" for rank, one in enumerate(results)]
        whole = tensor_text(results[0].whole[i], 8) if results[0].whole else "could not be assembled"
        lines.append(f"  together  {whole}")
    for i, want in enumerate(oracle.outputs):
        lines.append(f"the op gives {tensor_text(want, 8)}" if i == 0 else f"  and        {tensor_text(want, 8)}")
    return "\n".join(lines)


LOCAL_REFUSAL = "plain torch refuses the local call"
"""Part of the reason of a finding whose local call, such as an FFT of an empty piece, raises without DTensor, too."""


def local_refusal(case: Case) -> str:
    """The first local call that plain torch refuses, for the reason of a finding; empty if it takes all of them."""
    call = case.sample.call
    for rank in range(case.ranks):
        pieces = tuple(column[rank] for column in case.held)
        try:
            run_call(call, pieces, mutates=mutates(call.op))
        except REJECTIONS:
            local = ", ".join(Sample(call, pieces, "").arguments())
            return f"; {LOCAL_REFUSAL} of rank {rank}, {call.op.split('.')[1]}({local}), by itself"
    return ""


META_KERNEL = "the op's own meta kernel"
"""Part of the reason of a finding whose op has other results on the meta device than on real tensors, without DTensor."""


def meta_difference(sample: Sample) -> str:
    """How the op's results on the meta device differ from its real ones, for the reason of a finding; empty if in nothing.

    DTensor takes shapes and dtypes of whole results from there: a rule cannot be right where they are wrong.
    """
    call = sample.call
    try:
        _, real = run_call(call, sample.tensors, mutates=mutates(call.op))
        _, meta = run_call(call, [x.to("meta") for x in sample.tensors], mutates=mutates(call.op))
    except Exception:  # why: a meta kernel that is missing or depends on values raises anything, and shows nothing here
        return ""
    pairs = [(a, b) for a, b in zip(real, meta, strict=False) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    for i, (a, b) in enumerate(pairs):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            gives, has = (f"{x.dtype} of shape {tuple(x.shape)}" for x in (b, a))
            return f"; {META_KERNEL} gives {gives} for result {i}, which is {has}, also without DTensor"
    return ""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The result of a run: `wrong` is why it is wrong, or empty; `note` describes a run that is not wrong.

    `got` and `want` are the values that differ, `rank_results` the ranks' results, `failed` the traceback of an error of ours.
    """

    wrong: str
    note: str = ""
    got: str = ""
    want: str = ""
    rank_results: tuple[ProgramRankResult, ...] = ()
    failed: str = ""
    refused: str = ""
    """The error that every rank raised, if they did: in the op, or when the result was gathered."""
    after_others: bool = False
    """Whether it raised in processes that had run other calls before, and not in fresh ones."""


def raises(reason: str) -> bool:
    """Whether the fault is an error on some rank, or a hang, by its reason in words; else it is silent."""
    return bool(
        re.search(r"\braises? |refuses this call|cannot assemble|^stops|^hangs|\bdies\b|^no rank returns", reason)
    )


NOT_ASSEMBLED = "DTensor cannot assemble the result"
"""The start of the note of a program whose result, as DTensor has placed it, cannot be gathered."""
MISFIT = "DTensor's result does not fit its own placement"
"""The start of the reason of a result whose pieces have other shapes than its own shape and placements ask for."""


STATED_LIMIT = re.compile(
    r"not supported with DTensor|on DTensors does(n't| not) support|for tensor parallel convolution"
)
"""How DTensor states what it does not support: as_strided, an argument of `_scaled_mm`, a dilation where an image is cut in its width.

Each speaks of DTensor.  A step within a call that is `not supported`, such as a redistribution of its own choice, is no such limit.
"""


def is_claimed(error: str) -> bool:
    """Whether DTensor raises this error for a call that a rule of it has claimed: it has a rule for each op in it.

    DTensor raises NotImplementedError for an op without a rule, the name of an op whose result has no known size, and states limits.
    """
    unknown = error.startswith("NotImplementedError") or re.fullmatch(r"\w+: \w+\.\w+\.\w+", error)
    return not unknown and not STATED_LIMIT.search(error)


def _is_view_to_redistribute(candidate: Candidate, error: str) -> bool:
    """Whether the call itself is a view, before which DTensor asks for a redistribution: torch means it, since a view moves nothing."""
    if "Please redistribute" not in error or (candidate.program and candidate.program.then):
        return False
    returns = overload(candidate.instance.rule.op)._schema.returns
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def with_refusal(candidate: Candidate, outcome: Confirmation, suspected: bool) -> Confirmation:
    """Wrong, where every rank raises for a call that plain torch takes: such a rule is as wrong as one of wrong numbers.

    A rule that the probe did not find wrong is right where only its result cannot be gathered: gloo has no averages.
    """
    if not outcome.refused or not is_claimed(outcome.refused) or _is_view_to_redistribute(candidate, outcome.refused):
        return outcome
    gathered = bool(outcome.rank_results and outcome.rank_results[0].failed == "full_tensor")
    if gathered and not suspected:
        return outcome
    seen = candidate.instance.evidence.reason
    if outcome.refused.startswith(f"{WrongPieceShape.__name__}: "):  # found by us: gloo would end the process
        text = outcome.refused.partition(": ")[2]
        why = "" if WrongPieceShape.__name__ in seen else f"; {seen}"  # of a larger sample, if it has
        return replace(outcome, refused="", wrong=f"{MISFIT}: {text}{why}")
    why = f"; {seen}" if gathered and " raises " not in seen else ""
    return replace(outcome, wrong=refusal_text(outcome.refused) + why)


def confirmation_of(
    oracle: OracleResult,
    mesh: tuple[int, ...],
    results: Sequence[ProgramRankResult],
    claimed: Sequence[str] = (),
    *,
    coarse: float = 0.0,
) -> Confirmation:
    """The verdict on the results of the ranks of a mesh; `claimed` are the placements that the results should have.

    `coarse` is the rounding error of splitting the inputs (see `difference.coarsest`).
    """
    results = tuple(results)
    failed = next((result for result in results if result.errors), None)
    shape = "" if failed and failed.failed == "op" else _misshapen(oracle, mesh, results)
    if shape:
        return Confirmation(shape, rank_results=results)
    return _raised(failed, results) if failed else _compared(oracle, results, claimed, coarse)


UNMOVED = "Invalid scalar type"
"""What gloo says of a dtype that it cannot send, such as float8 (torch 2.13, ProcessGroupGloo.cpp)."""


def _raised(failed: ProgramRankResult, results: tuple[ProgramRankResult, ...]) -> Confirmation:
    who = [rank for rank, error in enumerate(failed.errors) if error]
    error = failed.errors[who[0]]
    if len(who) < len(failed.errors):
        return Confirmation(some_raise_text(who, error), rank_results=results)
    if UNMOVED in error:
        return Confirmation("", f"gloo does not move this dtype, whatever the rule: {error}", rank_results=results)
    where = "DTensor refuses this call" if failed.failed == "op" else NOT_ASSEMBLED
    return Confirmation("", f"{where} on every rank: {error}", rank_results=results, refused=error)


def _misshapen(oracle: OracleResult, mesh: tuple[int, ...], results: Sequence[ProgramRankResult]) -> str:
    for i, want in enumerate(oracle.outputs):
        if not isinstance(want, Tensor):
            continue
        for rank, one in enumerate(results):
            placements = layout_or_none(one.placements[i]) if i < len(one.placements) else None
            if placements is None or len(placements) != len(mesh):
                continue
            try:
                shape = local_shapes_on(want.shape, placements, mesh)[rank]
            except NoSuchDim:
                continue
            if one.shapes[i] != shape:
                return f"rank {rank} holds shape {one.shapes[i]}, {one.placements[i]} of {tuple(want.shape)} is {shape}"
    return ""


def layout_or_none(text: str) -> tuple[Placement, ...] | None:
    """The placements of the text, or None if one is of a class of DTensor's own, for which only values are compared."""
    try:
        return read_layout(text)
    except BadPlacement:
        return None


def _compared(
    oracle: OracleResult, results: tuple[ProgramRankResult, ...], claimed: Sequence[str], coarse: float
) -> Confirmation:
    for i, want in enumerate(oracle.outputs if not oracle.metadata_only else ()):
        slack = oracle.slack[i]
        compared: list[Any] = []  # simulated ranks share equal values
        for rank, one in enumerate(results):
            got = one.whole[i] if i < len(one.whole) else None
            if any(got is other for other in compared):
                continue
            compared.append(got)
            placement = one.placements[i] if i < len(one.placements) else "-"
            pieces = [other.pieces[i] for other in results if i < len(other.pieces)]
            lost = folding_error(pieces, coarse) if "P(" in placement and isinstance(want, Tensor) else 0.0
            which = f"output {i}" if len(oracle.outputs) > 1 else "result"
            if isinstance(want, NUMBER):
                problem = "" if _same_number(got, want, coarse) else f"is no tensor: got {got}, expected {want}"
            else:
                problem = _difference(got, want, slack, lost)
                which += "" if isinstance(want, str) else f" gathered from {placement}"
            if problem:
                wrong = f"rank {rank}: {which} {problem}"
                return Confirmation(wrong, "", tensor_text(got), tensor_text(want), results)
    took = results[0].placements[: len(claimed)] if claimed else ()
    follows = tuple(claimed) == tuple(took)
    shown = ", ".join(took)
    note = "DTensor's own run is right" if follows else f"DTensor does not follow it: it gives {shown}, which is right"
    return Confirmation("", note, rank_results=results)


NUMBER = (bool, int, float, complex)


def _same_number(got: object, want: Any, coarse: float) -> bool:
    """Whether a rank returns the number that the op gives.  `coarse` is the rounding error of splitting the inputs."""
    if not isinstance(got, NUMBER) or isinstance(got, bool) is not isinstance(want, bool):
        return False
    lost = SPLIT_ULPS * coarse * max(abs(got), abs(want)) if isinstance(want, (float, complex)) else 0.0
    return got == want or (cmath.isnan(got) and cmath.isnan(want)) or abs(got - want) <= lost


def _difference(got: object, want: object, slack: Tensor | None, lost: float) -> str:
    """How they differ by more than the slack and `lost`, the rounding error of gathering the result; or empty."""
    if isinstance(want, str) and slack is not None and got != want:
        return f"is {excerpt(str(got), want)!r}, expected {excerpt(want, str(got))!r}"
    if not isinstance(want, Tensor) or slack is None:
        return ""
    want, slack = want.cpu(), slack.cpu()
    if not isinstance(got, Tensor):
        return f"is {got!r}, expected a tensor"
    if got.shape != want.shape:
        return f"has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"has dtype {got.dtype}, expected {want.dtype}"
    slack = slack + lost
    if got.dtype == torch.int64:  # the cast of a float beyond int64 is not defined; torch returns the least int64
        least = torch.iinfo(torch.int64).min
        slack = torch.where((got == least) | (want == least), torch.inf, slack.to(torch.float64))
    if equal_within(got, want, slack):
        return ""
    apart = ElementDifference.of(got, want, slack)
    return f"differs at {apart.place}: got {apart.got}, expected {apart.want} ({apart.share})"


def error_text(reason: str) -> str:
    """The error in a reason, without numbers and names of ops: of equal ones the cause is one."""
    said = re.sub(r".*?: (?=\w+(Error|Exception): )", "", reason.splitlines()[0])
    return re.sub(r"\w+\.\w+\.\w+", "an op", re.sub(r"[0-9]+", "#", said))[:100]
