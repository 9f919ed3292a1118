"""One case of a rule: one call, so many ranks, one way to split; run, judged, and printed so that it can be run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import (
    GENEROUS,
    UNSTABLE,
    WIDER,
    Mesh,
    Spec,
    assemble,
    close,
    local_shapes,
    reducible,
    rounds,
    scale_of,
    shape_text,
    short,
    slack_of,
    widened,
)
from localtensor.testing.hypothesis_strategies.layouts import cut
from localtensor.testing.hypothesis_strategies.values import Drawn
from strategies.model.call_signature import text_of
from strategies.validation.assertions.ops import REFUSALS, Op, replaced, tensors_in, with_tensors
from strategies.validation.assertions.rule import Rule, shard_dim

# What a function gives for whole tensors, and how far from that a right answer may be (`localtensor.layout.tolerance`).
#
# It is asked again with noise of one ulp in its inputs, with gaps between their elements, for which torch takes other
# kernels, and for single precision in double.

Function = Callable[[Sequence[Tensor]], list[Any]]


@dataclass(frozen=True, slots=True)
class Truth:
    """The flat results on whole tensors; `slack[i]` is a number for result i, infinite for elements that jump."""

    values: tuple[Any, ...]
    slack: tuple[Tensor | None, ...]

    @property
    def stable(self) -> bool:
        """Whether enough of every result stands still to be compared."""
        shares = [float(s.isinf().double().mean()) for s in self.slack if s is not None and s.ndim and s.numel()]
        return max(shares, default=0.0) <= UNSTABLE


def tell(function: Function, tensors: Sequence[Tensor]) -> Truth:
    """The truth; the function gets copies.  Raises what the function raises."""
    values = function([x.clone() for x in tensors])
    others = [_again(function, [_apart(x) for x in tensors], len(values))]
    if any(map(rounds, tensors)):
        others += [_again(function, [_nudged(x, turn) for x in tensors], len(values)) for turn in (0, 1)]
    slack = [slack_of(value, [o[i] for o in others if o]) for i, value in enumerate(values)]
    if any(x.dtype in WIDER for x in tensors):
        best = _again(function, [x.to(WIDER.get(x.dtype, x.dtype)) for x in tensors], len(values))
        slack = [widened(s, v, best[i] if best else None) for i, (s, v) in enumerate(zip(slack, values, strict=True))]
    return Truth(tuple(values), tuple(slack))


def rounding(pieces: Sequence[Tensor]) -> float:
    """What it may cost to reduce these: parts can be far larger than their total."""
    if not rounds(pieces[0]):
        return 0.0
    largest = max(float(scale_of(piece)) for piece in pieces)
    return GENEROUS * torch.finfo(pieces[0].dtype).eps * largest


def _apart(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


def _nudged(x: Tensor, turn: int) -> Tensor:
    """Each element up or down by at most one unit in the last place; the other way round in the other turn."""
    if not rounds(x):
        return x.clone()
    place = torch.arange(x.numel()).reshape(x.shape)
    ways = ((place * (3 + turn) + place // 5 + turn) % 2 * 2 - 1).to(x.device, x.dtype)
    return x * (1 + torch.finfo(x.dtype).eps * ways)


def _again(function: Function, tensors: Sequence[Tensor], count: int) -> Sequence[Any]:
    """The results once more, or nothing where the moved inputs are refused: they have left its domain."""
    try:
        values = function(tensors)
    except REFUSALS:
        return ()
    return values if len(values) == count else ()


class Skipped(Exception):
    """The call says nothing about the rule, for this reason."""


class Misfit(Exception):
    """The rule does not fit the call: it speaks of other tensors, or of other results."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """What was wrong: result `output` under its placement, on `rank` or of all ranks together."""

    problem: str
    output: int = -1
    rank: int | None = None
    got: Any = None
    want: Any = None


@dataclass(frozen=True, slots=True)
class Ran:
    """One case as it was run: the whole tensors, `held[i][rank]` of each, `gave[rank]` (flat results, or the error), the truth."""

    inputs: tuple[Tensor, ...]
    truth: Truth
    held: tuple[tuple[Tensor, ...], ...]
    gave: tuple[Any, ...]
    wrong: Wrong | None


@dataclass(frozen=True, slots=True)
class RuleCase:
    """An op, a rule, one call and so many ranks; `split` is the seed by which partial values are decomposed.

    Tensors among `args` and `kwargs` may be `Drawn`.  `check()` raises `WrongRule` if the rule is wrong here.

    >>> case = RuleCase("aten.neg.default", "S(0) -> S(0)", (Drawn((3,), torch.float64, "arange", 0),), {}, 2)
    >>> case.judged().wrong is None
    True
    """

    op: str
    rule: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    split: int = 0
    uneven: bool = True

    def judged(self) -> Ran:
        """The case, run.  Raises `Skipped` and `Misfit`."""
        op, rule = Op.of(self.op), Rule.read(self.rule)
        return judge(op, rule, self)

    @property
    def real(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with tensors that are there."""
        return replaced(tuple(self.args), _made), replaced(dict(self.kwargs), _made)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis would else print the fields."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        rest = f", uneven={self.uneven}" if not self.uneven else ""
        values = f"{text_of(self.args)}, {text_of(dict(self.kwargs))}"
        return f"RuleCase({self.op!r}, {self.rule!r}, {values}, ranks={self.ranks}, split={self.split}{rest})"


def _made(value: Any) -> Any:
    return value.tensor() if isinstance(value, Drawn) else value


def judge(op: Op, rule: Rule, case: RuleCase) -> Ran:
    """Split, run, assemble, compare.  Raises `Skipped` and `Misfit`."""
    args, kwargs = case.real
    tensors = tensors_in((args, kwargs))
    fit_inputs(rule, tensors, case)
    writes = op.written(args, kwargs)

    def run(given: Sequence[Tensor]) -> list[Any]:
        return op.run(with_tensors(args, given), with_tensors(kwargs, given[len(tensors_in(args)) :]))

    with torch.no_grad():
        try:
            truth = tell(run, tensors)
        except REFUSALS as error:
            raise Skipped(f"the op refuses it: {type(error).__name__}: {_line(error)}") from None
        placed = placed_results(rule, len(truth.values), writes)
        _fit_outputs(rule, truth, len(writes))
        if not truth.stable:
            raise Skipped("its result jumps when the inputs move by one unit in the last place")
        held = tuple(
            tuple(cut(x, Spec(Mesh((case.ranks,), ("a",)), (p,), tuple(x.shape), x.dtype), case.split + 101 * i, exact=False))
            for i, (x, p) in enumerate(zip(tensors, rule.inputs, strict=True))
        )  # fmt: skip
        gave = tuple(_gave(run, [pieces[rank].clone() for pieces in held]) for rank in range(case.ranks))
        return Ran(
            tuple(tensors), truth, held, gave, compared(truth, placed, gave, rule.inputs, Mesh((case.ranks,), ("a",)))
        )


def fit_inputs(rule: Rule, tensors: Sequence[Tensor], case: RuleCase) -> None:
    """The rule speaks of these tensors.  Raises `Misfit` and `Skipped`."""
    if len(tensors) != len(rule.inputs):
        raise Misfit(f"the rule has {len(rule.inputs)} inputs, and the call {len(tensors)} tensors")
    for x, placement in zip(tensors, rule.inputs, strict=True):
        dim = shard_dim(placement)
        if dim is not None and dim >= x.ndim:
            raise Skipped(f"{short(placement)} of a tensor of {x.ndim} dims")
        if dim is not None and not case.uneven and (x.shape[dim] % case.ranks or not x.shape[dim]):
            raise Skipped("uneven shards were not asked for")
        if isinstance(placement, Partial) and not reducible(placement.reduce_op, x.dtype):
            raise Skipped(f"{short(placement)} means nothing for {x.dtype}")
        if isinstance(placement, Partial) and placement.reduce_op == "avg" and not rounds(x):
            raise Skipped(f"an average of {x.dtype} need not be one")


def placed_results(rule: Rule, count: int, writes: Sequence[int]) -> tuple[Placement | None, ...]:
    """The placement of each of the `count` flat results: what was written to stays as it came."""
    nothing = count == len(writes) and rule.outputs == (None,)
    return (*(() if nothing else rule.outputs), *(rule.inputs[i] for i in writes))


def _fit_outputs(rule: Rule, truth: Truth, writes: int) -> None:
    results = truth.values[: len(truth.values) - writes]
    if len(results) != len(rule.outputs) and not (not results and rule.outputs == (None,)):
        raise Misfit(f"the rule has {len(rule.outputs)} outputs, and the call {len(results)} results")
    for i, (placement, value) in enumerate(zip(rule.outputs, results)):
        if (placement is None) == isinstance(value, Tensor):
            what = "a tensor, and the rule has '-' for it" if placement is None else f"no tensor but {value!r}"
            raise Misfit(f"result {i} is {what}")
        if isinstance(placement, Partial) and not reducible(placement.reduce_op, value.dtype):
            raise Skipped(f"{short(placement)} means nothing for {value.dtype}")
        dim = shard_dim(placement)
        if dim is not None and dim >= value.ndim:
            raise Skipped(f"{short(placement)} of a result of {value.ndim} dims")


def _gave(run: Any, given: Sequence[Tensor]) -> Any:
    try:
        return run(given)
    except REFUSALS as error:
        return error


def compared(
    truth: Truth, placed: Sequence[Placement | None], gave: Sequence[Any], inputs: Sequence[Placement], mesh: Mesh
) -> Wrong | None:
    """What is wrong with what the ranks gave, under these placements on one axis, or None."""
    for rank, flat in enumerate(gave):
        if isinstance(flat, Exception):
            return Wrong(f"rank {rank} raises {type(flat).__name__}: {_line(flat)}", rank=rank, got=flat)
        if len(flat) != len(truth.values):
            problem = f"rank {rank} gives {len(flat)} results, the op {len(truth.values)}"
            return Wrong(problem, rank=rank, got=len(flat), want=len(truth.values))
    split = any(isinstance(p, Partial) for p in inputs)
    for i, want in enumerate(truth.values):
        pieces = [flat[i] for flat in gave]
        if isinstance(want, Tensor):
            found = differs(pieces, want, truth.slack[i], (placed[i] or Replicate(),), mesh, i, split)
        else:
            found = _odd(pieces, want, i)
        if found:
            return found
    return None


def _odd(pieces: Sequence[Any], want: Any, i: int) -> Wrong | None:
    """What is wrong with results that are no tensors; NaN is the same as NaN."""
    for rank, piece in enumerate(pieces):
        if piece != want and not (isinstance(piece, float) and math.isnan(piece) and math.isnan(want)):
            return Wrong(f"result {i} is {piece!r} on rank {rank}, the op gives {want!r}", i, rank, piece, want)
    return None


def differs(
    pieces: Sequence[Any], want: Tensor, slack: Tensor | None, placed: Sequence[Placement], mesh: Mesh, i: int,
    split: bool = False,
) -> Wrong | None:  # fmt: skip
    """What is wrong with the pieces of one result: its local shapes and dtypes, then its values."""
    spec = Spec(mesh, tuple(placed), tuple(want.shape), want.dtype)
    name = f"result {i} as {', '.join(map(short, placed))}"
    for rank, (piece, shape) in enumerate(zip(pieces, local_shapes(spec), strict=True)):
        if not isinstance(piece, Tensor):
            return Wrong(f"{name}: rank {rank} has no tensor", i, rank, piece, want)
        if tuple(piece.shape) != shape:
            problem = f"{name}: rank {rank} has shape {tuple(piece.shape)}, the placement asks for {shape}"
            return Wrong(problem, i, rank, piece, want)
        if piece.dtype != want.dtype:
            return Wrong(f"{name}: rank {rank} has {piece.dtype}, not {want.dtype}", i, rank, piece, want)
    room = slack if slack is not None else torch.zeros(())
    parts = any(isinstance(p, Partial) for p in placed)
    if parts:
        room = room + rounding(pieces)
    if (parts or split) and rounds(want):  # inf - inf, 0 * inf, and x / 0 of parts of both signs
        tame = want.isfinite()
        for piece in pieces if parts else ():
            tame = tame & ~piece.isinf()
        room = torch.where(tame, room, torch.inf)
    alike = all(isinstance(p, Replicate) for p in placed)
    wholes: list[tuple[int | None, Tensor]] = [(None, assemble(pieces, spec))]
    if alike:
        wholes = [(rank, piece) for rank, piece in enumerate(pieces)]  # a list of another type than enumerate's
    for who, got in wholes:
        right = close(got, want, room)
        if not bool(right.all()):
            return _value(name, i, who, got, want, right)
    return None


def _value(name: str, i: int, rank: int | None, got: Tensor, want: Tensor, right: Tensor) -> Wrong:
    place = tuple((~right).nonzero()[0].tolist())
    share = f"{int((~right).sum())} of {right.numel()} elements differ"
    who = "the ranks together have" if rank is None else f"rank {rank} has"
    where = f" at {list(place)}" if place else ""
    problem = f"{name}: {who} {got[place].item():.6g}{where}, the op gives {want[place].item():.6g}; {share}"
    return Wrong(problem, i, rank, got, want)


def _line(error: BaseException) -> str:
    return (str(error).strip() or "without a word").splitlines()[0]


def call_text(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], placed: Sequence[Placement]) -> str:
    """The call in short: `mylib.scale.default(f64[3] S(0), 2.0)`."""
    left = iter(placed)

    def say(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{shape_text(value.shape, value.dtype)} {short(next(left))}"
        if type(value) in (list, tuple):
            return f"[{', '.join(map(say, value))}]"
        return repr(value)

    return f"{op}({', '.join([*map(say, args), *(f'{k}={say(v)}' for k, v in kwargs.items())])})"
