"""What holds and nobody claims: every tuple of input placements of a sample, and the rules that are missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from localtensor.placement import shorts
from strategies import torch_dtensor as dtensor
from strategies.probe import Probe
from strategies.rules import Claim, Rule, Sample, overload, written
from strategies.sources import tuples
from strategies.truth import Truth, mutates
from strategies.verdicts import Evidence, Instance, Verdict


@dataclass(slots=True)
class Seen:
    """What a search saw on one mesh size: the tuples tried, what holds, and what is claimed."""

    tried: set[str] = field(default_factory=set)
    holds: dict[str, Rule] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    combinations: int = 0
    untried: str = ""


def search(sample: Sample, truth: Truth, ranks: int, claimed: Sequence[Claim], seed: int) -> Seen:
    """Every tuple of input placements, and the output placements that hold for it."""
    seen = Seen(claimed={str(c.rule) for c in claimed})
    if truth.metadata_only or dtensor.rewrites(overload(sample.op)) or not _tells(sample, truth):
        return seen
    if written(sample.call):  # what it writes to must keep its placement, which leaves nothing to look for
        return seen
    probe = Probe(sample, truth, ranks, seed=seed)
    writes = mutates(sample.op)
    todo, every = tuples(sample, ranks)
    if len(todo) < every:
        seen.untried = f"a search tries {len(todo)} of the {every} tuples of input placements"
    for inputs in todo:
        seen.tried.add(shorts(inputs))
        if all(isinstance(p, Replicate) for p in inputs):
            continue
        per_output = [probe.placements(inputs, i, probe.draws(inputs)) for i in range(len(truth.outputs))]
        seen.combinations += sum(3 + out.ndim + 2 for out in truth.outputs)
        for outputs in product(*per_output) if all(per_output) else ():
            if not writes or outputs[0] == inputs[0]:  # what an op writes to keeps its placement
                rule = Rule(sample.op, inputs, outputs)
                seen.holds[str(rule)] = rule
    return seen


def _tells(sample: Sample, truth: Truth) -> bool:
    """Whether what holds on this sample says anything: results of one element, all alike, or of
    booleans make nearly every placement hold."""
    if not truth.outputs or not all(isinstance(o, Tensor) for o in truth.outputs):
        return False
    real = any(t.dtype != torch.bool for t in sample.tensors)
    return real and all(o.numel() > 1 and bool((o != o.flatten()[0]).any()) for o in truth.outputs)


def missing(found: Sequence[tuple[Sample, dict[int, Seen]]]) -> list[Instance]:
    """Rules that hold on every sample of one kind of arguments, on all mesh sizes, claimed on none of them."""
    groups: dict[str, list[tuple[Sample, int, Seen]]] = defaultdict(list)
    for sample, by_ranks in found:
        for ranks, seen in by_ranks.items():
            groups[_family(sample)].append((sample, ranks, seen))
    lacking: dict[str, Instance] = {}
    for members in groups.values():
        claimed = set().union(*(seen.claimed for _, _, seen in members))
        candidates = {name: rule for _, _, seen in members for name, rule in seen.holds.items() if name not in claimed}
        for name, rule in candidates.items():
            inputs = shorts(rule.inputs)
            where = [(s, r, name in seen.holds) for s, r, seen in members if inputs in seen.tried]
            if len(where) >= 2 and all(holds for _, _, holds in where) and name not in lacking:
                sample, ranks, _ = min(where, key=lambda w: (w[1], w[0].size))
                why = Evidence(f"holds on all {len(where)} trials of such arguments, and nobody claims it")
                lacking[name] = Instance(rule, ranks, sample, Verdict.MISSING, "search", why)
    return list(lacking.values())


def _family(sample: Sample) -> str:
    """Arguments alike in all but sizes and values."""
    dims = [t.ndim for t in sample.tensors]
    values = (*sample.call.args, *(value for _, value in sample.call.kwargs))
    scalars: Any = [v for v in values if isinstance(v, (bool, int, str, type(None)))]
    return f"{dims} {scalars} {[str(t.dtype) for t in sample.tensors]}"
