"""The test of a function of DTensors on rank threads: its placements and values, and a script of a wrong case."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from localtensor import run
from localtensor.errors import LocalTensorError, ProgramFault, error_in_one_line, refusal_sentence
from localtensor.layout import (
    MAX_JUMP_SHARE,
    Layout,
    Mesh,
    Spec,
    assemble,
    has_one_meaning,
    is_inexact,
    local_shapes,
    shape_text,
    shorts,
)
from localtensor.testing.hypothesis_strategies.layouts import cut_pieces
from localtensor.testing.hypothesis_strategies.values import print_repr
from strategies.model import codec
from strategies.model.call_signature import argument_text
from strategies.model.oracle import OracleResult, equal_within, run_function_oracle
from strategies.model.rule import flat_results
from strategies.validation.assertions.case import CaseSkipped, RuleMisfit, with_author_message
from strategies.validation.assertions.ops import REFUSALS, materialized
from strategies.validation.assertions.rule import WrongRule, shard_dim
from strategies.validation.difference import (
    ElementDifference,
    ResultDifference,
    folding_error,
    shape_difference,
    tensor_text,
)

if TYPE_CHECKING:
    pass

_SCRIPT = (
    '''"""{what}

Run:  torchrun --nproc-per-node {ranks} wrong_sharding.py
It needs torch{and_more} only; exit code 1 as long as the claim is wrong.
"""

import sys
from math import inf, nan  # noqa: F401 (some values below are not finite)

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: F401
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: F401

{function}


{helpers}

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", {mesh}, mesh_dim_names={names})
{inputs}
wants = flat(fn({wholes}))
gots = flat(fn({given}))
wrong = False
for want, got, placements, atol in zip(wants, gots, {placements}, {slack}):
    print(f"rank {{rank}} is claimed to give {{placements}}", flush=True)
    wrong |= tuple(got.placements) != placements
    wrong |= differs(got, want, atol)
'''
    + codec.END_CODE
)


@dataclass(frozen=True, slots=True)
class ShardingCase:
    """Tensors for the function, and the mesh shape; `split` is the seed for the decomposition of partial values."""

    tensors: tuple[Any, ...]
    mesh: tuple[int, ...]
    split: int = 0
    empty: bool = True

    @property
    def whole(self) -> list[Tensor]:
        return list(materialized(self.tensors))

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    _repr_pretty_ = print_repr

    def __repr__(self) -> str:
        return f"ShardingCase({argument_text(tuple(self.tensors))}, mesh={self.mesh}, split={self.split}, empty={self.empty})"


@dataclass(frozen=True, slots=True)
class ShardingClaim:
    """`fn` takes DTensors with the layouts `inputs`, and returns DTensors with the layouts `outputs`."""

    fn: Callable[..., Any]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    @property
    def axes(self) -> int:
        return len(self.inputs[0])

    def __str__(self) -> str:
        name = getattr(self.fn, "__name__", repr(self.fn))
        shown = "({})" if self.axes > 1 else "{}"
        ins, outs = (", ".join(shown.format(shorts(p)) for p in side) for side in (self.inputs, self.outputs))
        return f"{name}: {ins} -> {outs}"


def run_sharding_case(
    claim: ShardingClaim, case: ShardingCase
) -> tuple[tuple[OracleResult, list[Any], ResultDifference | None], bool]:
    """The oracle, the ranks' pieces, the difference; and whether there is none.  Raises `CaseSkipped` and `RuleMisfit`."""
    whole, mesh = case.whole, Mesh.of(*case.mesh)
    if len(whole) != len(claim.inputs):
        raise RuleMisfit(f"there are placements for {len(claim.inputs)} tensors, and the call has {len(whole)}")
    for x, layout in zip(whole, claim.inputs, strict=True):
        if any((shard_dim(p) or 0) >= x.ndim and shard_dim(p) is not None for p in layout):
            raise CaseSkipped(f"{shorts(layout)} of a tensor of {x.ndim} dims")
        if not case.empty and _too_small(x, layout, case.mesh):
            raise CaseSkipped("a dim is smaller than the axes that cut it")
        if not has_one_meaning(layout, tuple(x.shape), x.dtype, case.mesh):
            raise CaseSkipped(f"{shorts(layout)} means nothing for {shape_text(x.shape, x.dtype)}")
    try:
        oracle = run_function_oracle(lambda given: flat_results(claim.fn(*given)), whole)
    except REFUSALS as error:
        raise CaseSkipped(f"the function refuses it: {error_in_one_line(error)}") from None
    if len(oracle.outputs) != len(claim.outputs) or not all(isinstance(v, Tensor) for v in oracle.outputs):
        problem = f"there are placements for {len(claim.outputs)} results, and it gives {len(oracle.outputs)} values"
        raise RuleMisfit(problem)
    if oracle.unstable > MAX_JUMP_SHARE:
        raise CaseSkipped("its result jumps when the inputs move by one unit in the last place")
    if not case.empty and any(_too_small(v, p, case.mesh) for v, p in zip(oracle.outputs, claim.outputs, strict=True)):
        raise CaseSkipped("a dim of a result is smaller than the axes that cut it")
    held = [
        cut_pieces(x, Spec(mesh, p, tuple(x.shape), x.dtype), case.split + 101 * i, exact=False)
        for i, (x, p) in enumerate(zip(whole, claim.inputs, strict=True))
    ]
    gave = _run(claim, case, whole, held)
    wrong = gave if isinstance(gave, ResultDifference) else _compared(claim, oracle, gave, mesh)
    return (oracle, held, wrong), wrong is None


def _too_small(x: Tensor, layout: Layout, mesh: Sequence[int]) -> bool:
    """Whether some rank's shard is empty."""
    dims = [shard_dim(p) for p in layout]
    return any(
        d is not None and d < x.ndim and x.shape[d] < math.prod(n for n, e in zip(mesh, dims, strict=True) if e == d)
        for d in dims
    )


def _run(
    claim: ShardingClaim, case: ShardingCase, whole: Sequence[Tensor], held: Sequence[Sequence[Tensor]]
) -> Sequence[list[Any]] | ResultDifference:
    """Each rank's results, as pairs of placements and local tensor; or the difference for an error of a rank."""

    def body() -> list[Any]:
        mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=Mesh.of(*case.mesh).names)
        given = []
        for x, pieces, layout in zip(whole, held, claim.inputs, strict=True):
            piece, stride = pieces[dist.get_rank()].clone(), x.contiguous().stride()
            given.append(DTensor.from_local(piece, mesh, layout, run_check=False, shape=x.shape, stride=stride))
        out = flat_results(claim.fn(*given))
        return [(tuple(x.placements), x.to_local()) if isinstance(x, DTensor) else (None, x) for x in out]

    try:
        return run(body, ranks=case.ranks, leftovers="ignore").values
    except ProgramFault as fault:
        cause = fault.__cause__
        if isinstance(cause, LocalTensorError) and not isinstance(cause, ProgramFault):
            raise  # a limit of rank threads, which proves nothing about the rule
        return ResultDifference(f"it does not run on DTensors: {str(fault).splitlines()[0]}")


def _compared(claim: ShardingClaim, oracle: OracleResult, gave: Sequence[Any], mesh: Mesh) -> ResultDifference | None:
    for rank, out in enumerate(gave):
        if len(out) != len(claim.outputs):
            return ResultDifference(f"rank {rank} gives {len(out)} results, not {len(claim.outputs)}", rank=rank)
        for i, (placements, local) in enumerate(out):
            if placements is None:
                problem = f"result {i} on rank {rank} is no DTensor but {type(local).__name__}"
                return ResultDifference(problem, i, rank, local)
            if placements != claim.outputs[i]:
                problem = f"result {i} has placements {shorts(placements)}, claimed are {shorts(claim.outputs[i])}"
                return ResultDifference(problem, i, rank)
    for i, want in enumerate(oracle.outputs):
        pieces = [out[i][1] for out in gave]
        parts = any(isinstance(p, Partial) for layout in claim.inputs for p in layout)
        if not has_one_meaning(claim.outputs[i], tuple(want.shape), want.dtype, mesh.sizes):
            problem = f"{shorts(claim.outputs[i])} means nothing for {shape_text(want.shape, want.dtype)}"
            return ResultDifference(f"result {i}: {problem}", i)
        found = result_difference(pieces, want, oracle.slack[i], claim.outputs[i], mesh, i, parts)
        if found:
            return with_author_message(found, claim.outputs)
    return None


def result_difference(
    pieces: Sequence[Any], want: Tensor, slack: Tensor | None, placed: Layout, mesh: Mesh, i: int, split: bool
) -> ResultDifference | None:
    """The difference of one result's pieces from the oracle: in local shapes and dtypes, then in values."""
    spec = Spec(mesh, placed, tuple(want.shape), want.dtype)
    found = shape_difference(pieces, want, local_shapes(spec), i)
    if found:
        return found
    allowed = slack if slack is not None else torch.zeros(())
    parts = any(isinstance(p, Partial) for p in placed)
    if parts:
        allowed = allowed + folding_error(pieces)
    if (parts or split) and is_inexact(want):  # inf - inf, 0 * inf, and x / 0 of parts of both signs
        tame = want.isfinite()
        for piece in pieces if parts else ():
            tame = tame & ~piece.isinf()
        allowed = torch.where(tame, allowed, torch.inf)
    wholes: list[tuple[int | None, Tensor]] = [(None, assemble(pieces, spec))]
    if all(isinstance(p, Replicate) for p in placed):
        wholes = [(rank, piece) for rank, piece in enumerate(pieces)]  # a list of another type than enumerate's
    for who, got in wholes:
        if not equal_within(got, want, allowed):
            return ResultDifference("", i, who, got, want, ElementDifference.of(got, want, allowed))
    return None


def wrong_sharding(
    claim: ShardingClaim,
    case: ShardingCase,
    oracle: OracleResult,
    held: Sequence[Sequence[Tensor]],
    wrong: ResultDifference,
    judged: int,
) -> WrongRule:
    """The error for that case."""
    remedy = "Correct the placements, the function, or the rule of the op that it calls."
    problem = f"on a mesh of {case.mesh}, {wrong.problem}"
    sentence = refusal_sentence("assert_sharding", "out_placements", str(claim), problem, remedy)
    name = getattr(claim.fn, "__name__", "fn")
    name = f"torch.{name}" if getattr(torch, name, None) is claim.fn else name
    sides = ", ".join(f"[{', '.join(map(_layout_code, side))}]" for side in (claim.inputs, claim.outputs))
    repeat = f"assert_sharding({name}, {sides}, inputs=[{argument_text(tuple(case.tensors))}], meshes=[{case.mesh}], splits=({case.split},), empty={case.empty})"
    text = sharding_script(claim, case, oracle, held, wrong)
    lines = [sentence, "", f"  the smallest of {judged} tried, on a mesh of {case.mesh}:"]
    for i, (x, layout) in enumerate(zip(case.whole, claim.inputs, strict=True)):
        lines.append(f"  tensor {i}  {shorts(layout)}  {tensor_text(x)}")
    if wrong.shown:
        lines += [f"  got   {tensor_text(wrong.got)}", f"  want  {tensor_text(wrong.want)}"]
    lines += [
        "",
        "  again:",
        f"    {repeat}",
        "",
        "  the same in plain torch, to be saved as wrong_sharding.py and run:",
        "",
        textwrap.indent(text, "    "),
    ]
    return WrongRule("\n".join(lines), case=case, script=text, example=f"@example(case={case!r})", repeat=repeat)


def _layout_code(layout: Layout) -> str:
    return f"({', '.join(repr(s) for s in shorts(layout).split(', '))},)" if len(layout) > 1 else repr(shorts(layout))


def sharding_script(
    claim: ShardingClaim,
    case: ShardingCase,
    oracle: OracleResult,
    held: Sequence[Sequence[Tensor]],
    wrong: ResultDifference,
) -> str:
    """A program for torchrun, of torch and of the function alone."""
    function, and_more = _function(claim.fn)
    inputs = []
    for i, (x, layout) in enumerate(zip(case.whole, claim.inputs, strict=True)):
        pieces = ", ".join(map(codec.tensor_literal, held[i]))
        inputs += [f"x{i} = {codec.tensor_literal(x)}", f"held{i} = [{pieces}]  # {shorts(layout)}"]
        placed = f"mesh, {_torch_code(layout)}, run_check=False, shape=x{i}.shape, stride=x{i}.stride()"
        inputs.append(f"d{i} = DTensor.from_local(held{i}[rank], {placed})")
    slack = [codec.slack_text(want, s) for want, s in zip(oracle.outputs, oracle.slack, strict=True)]
    return _SCRIPT.format(
        what=f"{claim}\n\nThis is wrong on a mesh of {case.mesh}: {wrong.problem}", ranks=case.ranks, mesh=case.mesh,
        helpers=f"{codec.FLATTEN_FUNCTION}\n\n{codec.COMPARISON_FUNCTION}", names=Mesh.of(*case.mesh).names, function=function, and_more=and_more, inputs="\n".join(inputs),
        wholes=", ".join(f"x{i}" for i in range(len(held))), given=", ".join(f"d{i}" for i in range(len(held))),
        placements=f"[{', '.join(map(_torch_code, claim.outputs))}]", slack=f"[{', '.join(slack)}]",
    )  # fmt: skip


def _torch_code(layout: Layout) -> str:
    return f"({', '.join(map(codec.placement_code, layout))},)"


def _function(fn: Callable[..., Any]) -> tuple[str, str]:
    """The lines that define `fn` in the script: torch's own by name, a user's by its source, where that is complete."""
    module, name = getattr(fn, "__module__", "") or "", getattr(fn, "__name__", "")
    if getattr(torch, name, None) is fn or module.split(".")[0] == "torch":
        return f"fn = {'torch' if getattr(torch, name, None) is fn else module}.{name}", ""
    try:
        source = textwrap.dedent(inspect.getsource(fn))
    except (OSError, TypeError):
        source = ""
    if source.startswith("def "):
        return f"\n{source.rstrip()}\n\n\nfn = {fn.__name__}", ""
    if name.isidentifier() and module:
        return f"from {module} import {name} as fn  # noqa: E402", f" and {module}"
    return f"fn = ...  # put {name or 'the function'} of {module or 'yours'} here", " and your function"
