"""One case of a rule: one call, a number of ranks, one decomposition of partial values; and its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import error_in_one_line
from localtensor.layout import MAX_JUMP_SHARE, is_inexact, is_reducible, short
from localtensor.testing.hypothesis_strategies.values import print_repr
from strategies.model import rule as model
from strategies.model.call_signature import argument_text
from strategies.model.oracle import OracleResult, run_oracle
from strategies.validation.assertions.ops import REFUSALS, Op, materialized
from strategies.validation.assertions.rule import AssertedRule, shard_dim
from strategies.validation.difference import ResultDifference
from strategies.validation.probe import Probe


class CaseSkipped(Exception):
    """The call proves nothing about the rule, for this reason."""


class RuleMisfit(Exception):
    """The rule does not fit the call: it has another number of tensors or results."""


@dataclass(frozen=True, slots=True)
class CaseRun:
    """The run of one case: the call, its oracle, the pieces `held[i][rank]` of each tensor, and the difference."""

    sample: model.Sample
    oracle: OracleResult
    held: tuple[tuple[Tensor, ...], ...]
    wrong: ResultDifference | None


@dataclass(frozen=True, slots=True)
class RuleCase:
    """An op, a rule, one call and a number of ranks; `split` is the seed for the decomposition of partial values.

    Tensors among `args` and `kwargs` may be `Drawn`.  `check()` raises `WrongRule` if the rule is wrong here.

    >>> from localtensor.testing.hypothesis_strategies.values import Drawn
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

    def judged(self) -> CaseRun:
        """The run of the case.  Raises `CaseSkipped` and `RuleMisfit`."""
        return run_case(Op.of(self.op), AssertedRule.read(self.rule), self)

    @property
    def real(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with real tensors."""
        return materialized(tuple(self.args)), materialized(dict(self.kwargs))

    _repr_pretty_ = print_repr

    def __repr__(self) -> str:
        rest = f", uneven={self.uneven}" if not self.uneven else ""
        values = f"{argument_text(self.args)}, {argument_text(dict(self.kwargs))}"
        return f"RuleCase({self.op!r}, {self.rule!r}, {values}, ranks={self.ranks}, split={self.split}{rest})"


class _UserCall(model.Call):
    """A call of a user's op, whose arithmetic errors count as refusals."""

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        try:
            return model.Call.__call__(self, tensors)
        except ArithmeticError as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def run_case(op: Op, rule: AssertedRule, case: RuleCase) -> CaseRun:
    """Shard the inputs, run, assemble, compare.  Raises `CaseSkipped` and `RuleMisfit`."""
    found, tensors = model.call_of(op.overload, *case.real)
    call = _UserCall(found.op, found.args, found.kwargs)
    check_inputs(rule, tensors, case)
    sample = model.Sample(call, tuple(tensors), "")
    with torch.no_grad():
        try:
            oracle = run_oracle(sample)
        except REFUSALS as error:
            raise CaseSkipped(f"the op refuses it: {error_in_one_line(error)}") from None
        _fit_outputs(rule, oracle, len(model.written_leaves(call)))
        if oracle.unstable > MAX_JUMP_SHARE:
            raise CaseSkipped("its result jumps when the inputs move by one unit in the last place")
        probe = Probe(sample, oracle, case.ranks, seed=case.split)
        outputs = tuple(p or Replicate() for p in rule.outputs) if model.flat_results(oracle.raw) else ()
        shown = probe.difference(model.Claim(model.Rule(op.name, rule.inputs, outputs), "assert_rule"))
        draw, wrong = shown if shown is not None else (0, None)
        held = tuple(tuple(probe.held(i, p, draw)) for i, p in enumerate(rule.inputs))
    placed = [(p or Replicate(),) for p in result_placements(rule, len(oracle.outputs), model.written_leaves(call))]
    return CaseRun(sample, oracle, held, with_author_message(wrong, placed) if wrong is not None else None)


def check_inputs(rule: AssertedRule, tensors: Sequence[Tensor], case: RuleCase) -> None:
    """Check that the rule fits these tensors.  Raises `RuleMisfit` and `CaseSkipped`."""
    if len(tensors) != len(rule.inputs):
        raise RuleMisfit(f"the rule has {len(rule.inputs)} inputs, and the call {len(tensors)} tensors")
    for x, placement in zip(tensors, rule.inputs, strict=True):
        dim = shard_dim(placement)
        if dim is not None and dim >= x.ndim:
            raise CaseSkipped(f"{short(placement)} of a tensor of {x.ndim} dims")
        if dim is not None and not case.uneven and (x.shape[dim] % case.ranks or not x.shape[dim]):
            raise CaseSkipped("uneven shards were not asked for")
        if isinstance(placement, Partial) and not is_reducible(placement.reduce_op, x.dtype):
            raise CaseSkipped(f"{short(placement)} means nothing for {x.dtype}")
        if isinstance(placement, Partial) and placement.reduce_op == "avg" and not is_inexact(x):
            raise CaseSkipped(f"an average of {x.dtype} need not be one")


def result_placements(rule: AssertedRule, count: int, writes: Sequence[int]) -> tuple[Placement | None, ...]:
    """The placement of each of the `count` flat results; mutated arguments keep theirs."""
    nothing = count == len(writes) and rule.outputs == (None,)
    return (*(() if nothing else rule.outputs), *(rule.inputs[i] for i in writes))


def _fit_outputs(rule: AssertedRule, oracle: OracleResult, writes: int) -> None:
    results = oracle.outputs[: len(oracle.outputs) - writes]
    if len(results) != len(rule.outputs) and not (not results and rule.outputs == (None,)):
        raise RuleMisfit(f"the rule has {len(rule.outputs)} outputs, and the call {len(results)} results")
    for i, (placement, value) in enumerate(zip(rule.outputs, results)):
        if (placement is None) == isinstance(value, Tensor):
            what = "a tensor, and the rule has '-' for it" if placement is None else f"no tensor but {value!r}"
            raise RuleMisfit(f"result {i} is {what}")
        if isinstance(placement, Partial) and not is_reducible(placement.reduce_op, value.dtype):
            raise CaseSkipped(f"{short(placement)} means nothing for {value.dtype}")
        dim = shard_dim(placement)
        if dim is not None and dim >= value.ndim:
            raise CaseSkipped(f"{short(placement)} of a result of {value.ndim} dims")


def with_author_message(found: ResultDifference, placed: Sequence[Sequence[Placement]]) -> ResultDifference:
    """The same with a message for the rule's author; `placed` has a layout for each result."""
    i, rank, apart = found.output, found.rank, found.apart
    if i < 0:
        return found
    if found.bare:
        problem = f"result {i} is {found.got!r} on rank {rank}, the op gives {found.want!r}"
        return replace(found, problem=problem)
    problem = found.problem
    if apart is not None:
        who = "the ranks together have" if rank is None else f"rank {rank} has"
        where = f" at {apart.place}" if apart.place else ""
        problem = f"{who} {apart.got}{where}, the op gives {apart.want}; {apart.share}"
    return replace(found, problem=f"result {i} as {', '.join(map(short, placed[i]))}: {problem}")
