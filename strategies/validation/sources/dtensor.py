"""DTensor's registry as a source: torch's rules, our own that are laid over them, and those that a user's module registers.

A claim is a rule that DTensor would apply to a sample on a mesh of some ranks.

A row of a single-dim strategy is a claim as it stands.  Where DTensor may rewrite the arguments of the local call, and
for op strategies, decompositions and prop rules, the claim is the propagator's answer to the inputs of the row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import PARTIAL_KINDS, is_reducible, is_standard
from strategies.model.oracle import OracleResult
from strategies.model.rule import SEARCHED_KINDS, Call, Claim, Rule, Sample, flat_results, out_leaves, overload
from strategies.torch_api import dtensor, foreach

MOST_TUPLES = 4096
"""Input-placement tuples that a search tries for one sample."""
MOST_TRACES = 130
"""Tuples of placements that one query of a decomposition traces; DTensor traces all of them."""
PARTIALS = 4
"""Samples of one decomposition that are also traced with partial inputs: each kind is a trace of its own."""


class DTensorSource:
    """The claims of DTensor, rule by rule as its propagator applies them."""

    name, title, varied = "dtensor", "DTensor", True

    def about(self, sample: Sample, oracle: OracleResult, number: int) -> DTensorClaims:
        return DTensorClaims(sample, oracle, number)


class DTensorClaims:
    """DTensor's claims about one sample.  One query on one rank serves the calls for all mesh sizes."""

    def __init__(self, sample: Sample, oracle: OracleResult, number: int) -> None:
        self.sample, self.raw = sample, oracle.raw
        self.query = dtensor.PropagatorQuery(sample, 1, oracle.raw)
        self.query.partials = number < PARTIALS
        self.failures = ()

    @property
    def drawn(self) -> tuple[int, int] | None:
        return self.query.drawn or None

    def claims(self, ranks: int) -> list[Claim]:
        return claims(self.sample, ranks, self.raw, self.query)


def placement_options(x: Tensor, ranks: int, kinds: Sequence[str] = SEARCHED_KINDS) -> list[Placement]:
    """The placements that a tensor can have along one axis so that each rank has something to do."""
    shards: list[Placement] = [Shard(d) for d, size in enumerate(x.shape) if size >= ranks]
    if x.dtype == torch.bool and kinds == SEARCHED_KINDS:
        kinds = ()  # "or" and "and" of few values may hold by chance
    return [Replicate(), *shards, *(Partial(k) for k in kinds if is_reducible(k, x.dtype))]


def input_tuples(sample: Sample, ranks: int) -> tuple[list[tuple[Placement, ...]], int]:
    """The tuples of input placements to try, those with the most replicas first, and how many there are.

    Of more than MOST_TUPLES the first so many are tried: those that leave most inputs replicated.
    """
    choices = [placement_options(t, ranks) for t in sample.tensors]
    found: list[tuple[Placement, ...]] = []
    for many in range(len(choices) + 1):
        for spots in itertools.combinations(range(len(choices)), many):
            parts = [choices[i][1:] if i in spots else choices[i][:1] for i in range(len(choices))]
            found += itertools.islice(itertools.product(*parts), MOST_TUPLES - len(found))
    return found, math.prod(map(len, choices))


def claims(sample: Sample, ranks: int, oracle: object, alone: dtensor.PropagatorQuery | None = None) -> list[Claim]:
    """DTensor's claims about this call; `oracle` is the op's own result on the whole tensors.

    `alone` is the same sample's query on one rank; it can be shared by calls for several mesh sizes.  Raises whatever a
    strategy function raises.
    """
    op = overload(sample.op)
    source = dtensor.registry_of(op)
    if not source or not sample.tensors:
        return []
    query = dtensor.PropagatorQuery(sample, ranks, oracle, alone)
    count = len(flat_results(oracle))
    direct = source == "decomposition" or (source == "single-dim strategy" and not dtensor.rewrites_arguments(op))
    whole = dtensor.special_dispatch_reason(op)
    found = (
        _claim(query, source, row, count, whole, direct and _keeps_outs(sample, row))
        for row in _rows(query, sample, ranks, source)
    )
    unique = {str(claim.rule): claim for claim in found if claim is not None}
    return list(unique.values())


def _rows(query: dtensor.PropagatorQuery, sample: Sample, ranks: int, source: str) -> list[dtensor.LineRow]:
    seeds = [] if source == "single-dim strategy" else _seeds(sample, ranks)
    if dtensor.is_foreach(sample):
        return foreach.foreach_rows(query, seeds)
    if source == "single-dim strategy":
        return query.single_dim_rows()
    if source == "rule" or dtensor.returns_no_tensor(overload(sample.op)):
        return [(seed, ()) for seed in seeds]
    rows = query.strategy_rows(seeds) if source == "op strategy" else _traced(query)
    rows = [_with_outs(sample, row) for row in rows]
    return [row for row in rows if all(p is None or isinstance(p, (Replicate, Shard, Partial)) for p in row[0])]


def _keeps_outs(sample: Sample, row: dtensor.LineRow) -> bool:
    """Whether each `out=` has the placement of its result.  DTensor never redistributes an `out=`; its propagator
    decides on other rows."""
    outs = out_leaves(sample.call)
    return all(row[0][leaf] == row[1][i] for i, leaf in enumerate(outs) if i < len(row[1]))


def _with_outs(sample: Sample, row: dtensor.LineRow) -> dtensor.LineRow:
    """The row with placements for each `out=`, those of the results: an op strategy has none for them."""
    outs = out_leaves(sample.call)
    if not outs or len(row[0]) != len(sample.tensors) - len(outs):
        return row
    inputs = list(row[0])
    goes = row[1] * len(outs) if len(row[1]) == 1 else row[1]  # one placement of several results is that of each
    for leaf, placement in sorted(zip(outs, goes, strict=False), key=lambda pair: pair[0]):
        inputs.insert(leaf, placement)
    return tuple(inputs), row[1]


def _seeds(sample: Sample, ranks: int) -> list[tuple[Placement, ...]]:
    """Input tuples to query: the same placement for all, and each placement of one input with the others replicated."""
    choices = [placement_options(t, ranks, PARTIAL_KINDS) for t in sample.tensors]
    together = [p for p in choices[0] if all(p in row for row in choices)]
    found = [(p,) * len(choices) for p in together]
    for i, row in enumerate(choices):
        found += [tuple(p if j == i else Replicate() for j in range(len(choices))) for p in row]
    return list(dict.fromkeys(found))


def _traced(query: dtensor.PropagatorQuery) -> list[dtensor.LineRow]:
    """The rows of a decomposition.  DTensor traces it on a mesh of one rank for any mesh, so that one trace serves all
    mesh sizes; only the selection of rows depends on the size."""
    alone = query.alone()
    if alone.traced is None:
        alone.trace_at_most(MOST_TRACES)
        seeds = [s for s in _seeds(query.sample, 1) if alone.partials or not any(isinstance(p, Partial) for p in s)]
        alone.traced = alone.strategy_rows(_spread(seeds))
    return [row for row in alone.traced if query.fits(row)]


def _spread(seeds: Sequence[tuple[Placement, ...]]) -> list[tuple[Placement, ...]]:
    """One seed for all shards, since a decomposition is queried about all dims at once, and one for each Partial."""
    first: dict[str, tuple[Placement, ...]] = {}
    for seed in seeds:
        kind = next((p for p in seed if not isinstance(p, Replicate)), Replicate())
        first.setdefault("S" if isinstance(kind, Shard) else str(kind), seed)
    return list(first.values())


def _claim(
    query: dtensor.PropagatorQuery, source: str, row: dtensor.LineRow, count: int, whole: str, direct: bool
) -> Claim | None:
    inputs, outputs = row

    def made(outputs: dtensor.Outputs, local: tuple[Call, ...] | None, whole: str) -> Claim:
        every = outputs * count if len(outputs) == 1 and count != 1 else outputs
        return Claim(Rule(query.sample.op, tuple(inputs), every), source, local, whole)

    special = "" if all(p is None or is_standard(p) for p in (*inputs, *outputs)) else "a placement of DTensor's own"
    if special and not direct:
        return made(outputs, None, special) if _answers(query, inputs) else None
    if direct:
        return made(outputs, None, whole or special)
    answers = _answers(query, inputs)
    if not answers:
        return None
    outputs = answers[0][0]
    own = tuple(call for _, call in answers if call is not None)
    special = "" if all(p is None or is_standard(p) for p in outputs) else "a placement of DTensor's own"
    return made(outputs, own or None, whole or special)


def _answers(
    query: dtensor.PropagatorQuery, inputs: Sequence[Placement | None]
) -> list[tuple[dtensor.Outputs, Call | None]]:
    """The answer for every rank; empty if DTensor would redistribute, or raises."""
    try:
        first = query.propagate(inputs)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError, IndexError, KeyError):
        return []
    if first is None or first[1] is None:
        return [first] if first else []
    rest = [query.propagate(inputs, rank) for rank in range(1, query.ranks)]
    answers = [first, *(answer for answer in rest if answer is not None)]
    return answers if len(answers) == query.ranks else []
