"""A probe tests rules on one sample and one mesh size: it splits the inputs, runs the op on each rank's, and compares.

All output placements of one tuple of input placements are tested on the same local results, so that a search costs runs
per input tuple and not per rule.  Ranks with equal inputs run once.  Partial inputs are decomposed in several
independent ways; a claim is sound only if it holds for all of them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import (
    RandomNumbers,
    all_finite,
    fold_partials,
    is_inexact,
    is_reducible,
    is_unambiguous,
    local_shape,
    partial_values,
    short,
    split_axis,
    within_slack,
)
from strategies.inputs.variants.all_variants import values_named
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.oracle import OracleResult, equal_within, ignoring_strides, mutates, strided_copies
from strategies.model.rule import SEARCHED_KINDS, Call, Claim, LocalRun, Rule, Sample, written_leaves
from strategies.model.verdict import UNDEFINED, Evidence, Instance, Verdict
from strategies.validation.difference import (
    NARROW,
    ElementDifference,
    ResultDifference,
    Shapes,
    assembled,
    coarsest_eps,
    concatenated_shapes,
    folding_error,
    has_dim,
    moves_as_much,
    near,
    non_arithmetic_partial,
    not_gathered,
    nudged,
    number_difference,
    raised_text,
    shape_difference,
    singular_slack,
    tensor_text,
    widened,
    wraps,
)

DRAWS = 2
"""Independent decompositions of partial inputs; every second one is sparse (see localtensor.layout.partial_splits)."""
ROUNDED = ("sum", "avg", "product")
"""Reductions whose folding rounds: the greatest or the least of some numbers is one of them."""
LocalCalls = tuple[Call, ...] | LocalRun | None  # of each rank, or all together; None for the sample's own call
LocalResults = list[tuple[Any, ...]] | str
"""The flat results of each rank, or the message of the rank that raised."""


@dataclass(frozen=True, slots=True)
class Case:
    """All that a real run of one rule needs: each rank's inputs, and the oracle."""

    rule: Rule
    ranks: int
    sample: Sample
    oracle: OracleResult
    held: tuple[tuple[Tensor, ...], ...]  # held[leaf][rank]


class Probe:
    """A sample on `ranks` ranks.

    `variant` names the input values and the way to decompose partial ones (see
    `strategies.inputs.variants.adversarial`), "" for the sample's own.  `oracle` is the oracle for those values.
    """

    def __init__(self, sample: Sample, oracle: OracleResult, ranks: int, *, seed: int, variant: str = "") -> None:
        self.sample, self.oracle, self.ranks = sample, oracle, ranks
        self.seed, self.variant, self.kind = seed, variant, values_named(variant)
        self.writes, self.written = mutates(sample.op), written_leaves(sample.call)
        self._blind = ignoring_strides(sample.call, oracle.inputs)
        self._held: dict[tuple[int, Placement | None, int], Sequence[Tensor]] = {}
        self._local_results: dict[tuple[object, ...], LocalResults] = {}
        self._shapes_known: dict[tuple[int, Placement], Sequence[tuple[int, ...] | None]] = {}

    @functools.cached_property
    def _finite(self) -> bool:
        return self.kind.wild or all(all_finite(x) for x in self.oracle.inputs)

    def held(self, leaf: int, placement: Placement | None, draw: int) -> Sequence[Tensor]:
        """Each rank's piece of one input.  The same seed gives the same split, in any order of calls."""
        key = (leaf, placement, draw if isinstance(placement, Partial) else 0)
        if key not in self._held:
            self._held[key] = self._split(leaf, placement or Replicate(), draw)
        return self._held[key]

    def _split(self, leaf: int, placement: Placement, draw: int) -> Sequence[Tensor]:
        x = self.oracle.inputs[leaf]
        if not isinstance(placement, Partial):
            pieces = split_axis(x, placement, self.ranks)
            return [piece.contiguous() for piece in pieces] if leaf in self._blind else pieces
        name = f"{self.seed} {self.sample.op} {leaf} {short(placement)} {self.ranks} {draw}"
        rng = RandomNumbers(zlib.crc32(name.encode()))
        far = self.kind.split == "far"
        return partial_values(x, placement.reduce_op, self.ranks, rng, sparse=draw % 2 == 1, far=far).unbind()

    def local(self, inputs: Sequence[Placement | None], draw: int, calls: LocalCalls = None) -> LocalResults:
        """Each rank's flat results.  Ranks with the same inputs run once."""
        if calls is not None:
            return self._run(inputs, draw, calls)
        key = (tuple(inputs), draw)
        if key not in self._local_results:
            self._local_results[key] = self._run(inputs, draw, None)
        return self._local_results[key]

    def _run(self, inputs: Sequence[Placement | None], draw: int, calls: LocalCalls) -> LocalResults:
        columns = [self.held(i, p, draw) for i, p in enumerate(inputs)]
        once = calls is None and all(p is None or isinstance(p, Replicate) for p in inputs)
        out = self._on(columns, calls, 1 if once else self.ranks)
        return out * self.ranks if once and not isinstance(out, str) else out

    def _on(
        self, columns: Sequence[Sequence[Tensor]], calls: LocalCalls, ranks: int, *, fresh: bool = False
    ) -> LocalResults:
        """Each rank's flat results; a mutating op gets clones, unless the columns are `fresh` already."""
        if callable(calls):
            try:
                return calls(columns, ranks)
            except REJECTIONS as error:
                return raised_text("the ranks raise", error)
        out: list[tuple[Any, ...]] = []
        for rank in range(ranks):
            call = calls[rank] if calls else self.sample.call
            try:
                _, flat = run_call(call, [column[rank] for column in columns], mutates=self.writes and not fresh)
            except REJECTIONS as error:
                return raised_text(f"rank {rank} raises", error)
            out.append(tuple(flat))
        return out

    def draws(self, inputs: Sequence[Placement | None]) -> range:
        """The decompositions to try: several of the sample's own values, one of each variant."""
        return range(DRAWS if not self.variant and any(isinstance(p, Partial) for p in inputs) else 1)

    def judge(self, claim: Claim) -> Evidence | None:
        """The evidence against a claim, or None if it stands."""
        first = self.difference(claim)
        if first is None:
            return None
        draw, found = first
        reason = self.reason(found, self._expected(claim))
        got, want = (tensor_text(x, 16) if isinstance(x, Tensor) else str(x) for x in (found.got, found.want))
        return Evidence(reason, self.variant, draw, got, want)

    def difference(self, claim: Claim) -> tuple[int, ResultDifference] | None:
        """The first decomposition for which the claim is wrong, and the difference."""
        for draw in self.draws(claim.rule.inputs):
            local = self.local(claim.rule.inputs, draw, claim.run or claim.local)
            given, sizes = claim.rule.inputs, claim.concatenated
            found = self.against(local, self._expected(claim), given, parts=claim.parts, concatenated=sizes)
            found = None if self._rounds(claim, draw, local, found) else found
            if found and not self._kernels_disagree(claim, draw, local) and not self._wraps(claim, draw, local):
                return draw, found
        return None

    def reason(self, found: ResultDifference, outputs: Sequence[Placement | None]) -> str:
        """The message of the difference, with the placement of its result."""
        if found.output < 0 or found.bare:
            return found.problem
        which = f"output {found.output} as" if len(outputs) > 1 else "as"
        return f"{which} {short(outputs[found.output])}: {found.problem}"

    def _expected(self, claim: Claim) -> tuple[Placement | None, ...]:
        """The placements of the results, and of the arguments that the op mutates, which keep theirs."""
        return (*claim.rule.outputs, *(claim.rule.inputs[leaf] for leaf in self.written))

    def _kernels_disagree(self, claim: Claim, draw: int, local: LocalResults) -> bool:
        """Whether the same pieces with gaps between their elements give other results: then torch's vectorised and scalar
        kernels differ on these values, and the rule is right.  False where no values are compared, as for a random op."""
        if isinstance(local, str) or self.oracle.metadata_only:
            return False
        call = self.sample.call
        pieces = zip(*(self.held(i, p, draw) for i, p in enumerate(claim.rule.inputs)), strict=True)
        columns = list(zip(*(strided_copies(call, mine) for mine in pieces), strict=True))
        again = self._on(columns, claim.run or claim.local, self.ranks, fresh=True)
        if isinstance(again, str):
            return False
        pairs = [(a, b) for one, two in zip(local, again, strict=True) for a, b in zip(one, two, strict=True)]
        return any(isinstance(a, Tensor) and a.shape == b.shape and not near(a, b) for a, b in pairs)

    def _wraps(self, claim: Claim, draw: int, local: LocalResults) -> bool:
        """Whether parts of small integers leave their dtype's range, in their sum or in a result: int64 gives others."""
        inputs, whole = claim.rule.inputs, self.oracle.inputs
        split = [i for i, p in enumerate(inputs) if isinstance(p, Partial)]
        if isinstance(local, str) or not split or not any(x.dtype in NARROW for x in whole):
            return False
        columns = [widened(self.held(i, p, draw)) for i, p in enumerate(inputs)]
        sums = [(whole[i], fold_partials(torch.stack(columns[i]), inputs[i].reduce_op)) for i in split]  # type: ignore[union-attr]
        if any(x.dtype in NARROW and bool((total != x).any()) for x, total in sums):
            return True
        again = self._on(columns, claim.run or claim.local, self.ranks, fresh=True)
        return not isinstance(again, str) and wraps(local, again)

    def _rounds(self, claim: Claim, draw: int, local: LocalResults, found: ResultDifference | None) -> bool:
        """Whether ranks that add up parts themselves differ by rounding: parts moved by one ulp change the results as much."""
        placed = claim.rule.inputs
        parts = [isinstance(p, Partial) and is_inexact(x) for p, x in zip(placed, self.oracle.inputs, strict=True)]
        if found is None or claim.run is None or isinstance(local, str) or not any(parts):
            return False
        columns = [self.held(i, p, draw) for i, p in enumerate(placed)]
        moved = [[nudged(x, rank) for rank, x in enumerate(c)] if p else c for c, p in zip(columns, parts, strict=True)]
        again = self._on(moved, claim.run, self.ranks)
        return not isinstance(again, str) and moves_as_much(found, local, again)

    def against(
        self, local: LocalResults, outputs: Sequence[Placement | None], inputs: Sequence[Placement | None] = (),
        *, parts: bool = False, concatenated: bool = False,
    ) -> ResultDifference | None:  # fmt: skip
        """The first difference of the local results from the oracle under these placements, or None.

        `inputs` are the placements of the inputs; with `parts` the ranks have taken parts of sums beside these.  That an op refuses parts of values other than the sample's own is no
        difference: the parts may be outside of its domain.
        """
        split = parts or any(isinstance(p, Partial) for p in inputs)
        if isinstance(local, str):
            kernel = "not implemented for '" in local  # of this layout and dtype: no statement on the rule
            return None if kernel or (split and self.variant) else ResultDifference(local)
        for rank, out in enumerate(local):
            if len(out) != len(self.oracle.outputs):
                return ResultDifference(f"rank {rank} gives {len(out)} results, the op {len(self.oracle.outputs)}")
        for i, placement in enumerate(outputs):
            want = self.oracle.outputs[i]
            found = None
            if isinstance(want, (bool, int, float)) and placement is not None:
                found = number_difference([out[i] for out in local], want, i)
            elif placement is not None and isinstance(want, Tensor):
                held = [out[i] for out in local]
                sizes = concatenated_shapes(held, want, placement) if concatenated else None
                found = self._wrong(held, i, placement, inputs, split, sizes)
            if found:
                return found
        return None

    def _wrong(
        self, held: Sequence[Any], i: int, placement: Placement, inputs: Sequence[Placement | None], excused: bool,
        sizes: Shapes | None,
    ) -> ResultDifference | None:  # fmt: skip
        """The difference of one result; `excused`: elements that are not finite may differ (see `singular_slack`).  `sizes` are the
        shapes of the pieces if not those of torch.chunk."""
        want = self.oracle.outputs[i]
        kind = placement.reduce_op if isinstance(placement, Partial) else ""
        if kind and not is_reducible(kind, want.dtype):
            return ResultDifference(f"{kind} of {want.dtype}{UNDEFINED}", i)
        found = shape_difference(held, want, sizes or self._shapes(i, placement), i)
        if found:
            return found
        slack = self.oracle.slack[i]
        # A cast of NaN to an integer is not defined.
        has_wild_values = want.dtype.is_floating_point or want.dtype == torch.bool
        if self.oracle.metadata_only or slack is None or (self.kind.wild and not has_wild_values):
            return None
        if self.variant and kind == "avg" and not is_inexact(want):
            return None  # the sum of integers near the ends of their dtype wraps, and divided is no average
        for rank, got in assembled(held, placement):
            if equal_within(got, want, slack):
                continue  # most results; what follows makes the slack larger only
            if kind in ROUNDED:
                slack = slack + folding_error(held, coarsest_eps(self.oracle.inputs, [(p,) for p in inputs]))
            slack = singular_slack(got, want, slack, self.kind) if excused and self._finite else slack
            if not equal_within(got, want, slack):
                apart = ElementDifference.of(got, want, slack)
                who = f"rank {rank} makes" if rank is not None else "the parts make" if kind else "the shards make"
                problem = f"{who} {apart.got} at {apart.place}, the op gives {apart.want} ({apart.share})"
                return ResultDifference(problem, i, rank, got, want, apart)
        return None

    def _shapes(self, i: int, placement: Placement) -> Sequence[tuple[int, ...] | None]:
        """The shape of each rank's piece of result i; None where it has no such dim."""
        known = self._shapes_known.get((i, placement))
        if known is None:
            want = self.oracle.outputs[i]
            there = has_dim(placement, want)
            known = self._shapes_known[i, placement] = [
                local_shape(want.shape, placement, self.ranks, rank) if there else None for rank in range(self.ranks)
            ]
        return known

    def placements(self, inputs: Sequence[Placement | None], i: int, draws: Iterable[int]) -> list[Placement]:
        """Every placement that output i may have, by the local results of all draws; R alone, if it is among them."""
        want = self.oracle.outputs[i]
        left: list[Placement] | None = None
        for draw in draws:
            local = self.local(inputs, draw)
            held = [] if isinstance(local, str) else [out[i] for out in local]
            if not held or any(not isinstance(h, Tensor) or h.dtype != want.dtype for h in held):
                return []
            whole = all(h.shape == want.shape for h in held)
            coarse = coarsest_eps(self.oracle.inputs, [(p,) for p in inputs])
            here = self._held_whole(held, i, coarse) if whole else self._held_cut(held, i)
            left = here if left is None else [p for p in left if p in here]
            if not left:
                return []
        return left[:1] if left and isinstance(left[0], Replicate) else left or []

    def _held_whole(self, held: Sequence[Tensor], i: int, coarse: float) -> list[Placement]:
        """R and the Partials that pieces of the whole shape may be, all compared at once."""
        want, slack = self.oracle.outputs[i], self.oracle.slack[i]
        if slack is None:
            return []
        stack = torch.stack(list(held))
        searched = () if want.dtype == torch.bool else SEARCHED_KINDS
        kinds = [k for k in searched if is_unambiguous(k, want.dtype)]
        folded = torch.stack([want, *(fold_partials(stack, k) for k in kinds)])
        same = within_slack(stack, want, slack).flatten().all()
        errors = [folding_error(held, coarse) if k in ROUNDED else 0.0 for k in (ROUNDED[0], *kinds)]
        lost = torch.tensor(errors, dtype=torch.float64)
        allowed = slack + lost.to(slack).view(-1, *(1 for _ in want.shape))
        right = within_slack(folded, want, allowed).unsqueeze(-1).flatten(1).all(1).tolist()[1:]
        if not is_inexact(want) and want.dtype != torch.bool and torch.equal(stack.sum(0), want * self.ranks):
            kinds, right = [*kinds, "avg"], [*right, True]
        partials: list[Placement] = [Partial(k) for k, holds in zip(kinds, right, strict=True) if holds]
        return [Replicate(), *partials] if bool(same) else partials

    def _held_cut(self, held: Sequence[Tensor], i: int) -> list[Placement]:
        """The Shards that these pieces may be."""
        want, slack, found = self.oracle.outputs[i], self.oracle.slack[i], list[Placement]()
        for dim in range(want.ndim):
            shapes = [local_shape(want.shape, Shard(dim), self.ranks, rank) for rank in range(self.ranks)]
            fits = shapes == [tuple(h.shape) for h in held]
            if slack is not None and fits and equal_within(torch.cat(list(held), dim), want, slack):
                found.append(Shard(dim))
        return found

    def case(self, rule: Rule, draw: int) -> Case:
        """The case of a rule, with the inputs of that decomposition."""
        held = tuple(tuple(self.held(i, p, draw)) for i, p in enumerate(rule.inputs))
        return Case(rule, self.ranks, self.sample, self.oracle, held)


def check_claims(
    sample: Sample,
    oracle: OracleResult,
    ranks: int,
    claims: Sequence[Claim],
    *,
    seed: int,
    variants: Mapping[str, OracleResult] | None = None,
    by_dtensor: bool = False,
) -> list[Instance]:
    """The verdict on every claim about one sample.

    `variants` are other values for it, by name, each with its oracle (see `strategies.inputs.variants.all_variants`).
    Claims that only DTensor's own dispatch can judge are SUSPECT, with the reason.  With `by_dtensor`, those of values that DTensor cannot
    gather are UNTESTABLE.
    """
    probes = [Probe(sample, oracle, ranks, seed=seed)]
    probes += [Probe(sample, values, ranks, seed=seed, variant=name) for name, values in (variants or {}).items()]
    return [_instance(probes, claim, by_dtensor) for claim in claims]


def _instance(probes: Sequence[Probe], claim: Claim, by_dtensor: bool) -> Instance:
    first = probes[0]

    def made(verdict: Verdict, evidence: Evidence) -> Instance:
        return Instance(claim.rule, first.ranks, first.sample, verdict, claim.source, evidence)

    if claim.whole:
        return made(Verdict.SUSPECT, Evidence(claim.whole))
    partial = any(isinstance(p, Partial) for p in claim.rule.inputs)
    if unclear := not_gathered(claim.rule, first.oracle.inputs, by_dtensor=by_dtensor):
        return made(Verdict.UNTESTABLE, Evidence(f"{unclear} means nothing for this dtype"))
    if nowhere := [p for p, t in zip(claim.rule.inputs, first.oracle.inputs, strict=True) if p and not has_dim(p, t)]:
        return made(Verdict.UNTESTABLE, Evidence(f"{short(nowhere[0])} of a tensor that has no such dim"))
    for probe in probes:
        if not probe.kind.asks(partial):
            continue
        evidence = probe.judge(claim)
        if evidence:
            other = non_arithmetic_partial(claim.rule, first.oracle.inputs, first.oracle.outputs)
            if other:
                return made(Verdict.UNTESTABLE, Evidence(f"{other} is no value to compute with"))
            return made(Verdict.UNSOUND, evidence)
    return made(Verdict.SOUND, Evidence(first.oracle.metadata_only))
