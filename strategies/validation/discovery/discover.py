"""The discovery of an overload's missing rules, and the calls that they were found on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from localtensor.errors import Refusal
from localtensor.layout import MAX_JUMP_SHARE
from strategies.inputs import opinfo_samples, schema_samples
from strategies.model.arguments import trusts_caller
from strategies.model.call_signature import diverse_subset
from strategies.model.oracle import REJECTIONS, run_oracle
from strategies.model.rule import Rule, Sample, overload
from strategies.model.settings import DTYPES as SAMPLE_DTYPES
from strategies.torch_api import dtensor
from strategies.validation.claim_sources import claims
from strategies.validation.missing_rules import MissingRuleSearch, Survey, search_placements, survey_kinds

CALL = "localtensor discover"
DTYPES = ("float64", "int64", "complex64")
"""Dtypes of the samples: a rule should hold for real numbers, for integers, and for numbers without an order."""
MOST = 24
"""Samples of an overload that are searched."""


class NoSuchOp(Refusal):
    """A name of no overload of torch."""

    def __init__(self, name: str, near: Sequence[str]) -> None:
        remedy = f"Did you mean {' or '.join(near)}?" if near else "Name an overload, such as aten.add.Tensor."
        super().__init__(CALL, "OP", repr(name), "no op and no overload has this name", remedy)


@dataclass(frozen=True, slots=True)
class Discovery:
    """`missing` are the valid rules of `op` that DTensor does not register; `surveys` hold their calls and evidence.

    `source` is the kind of rule that DTensor has for the op, "" for none; `samples` are the calls searched.
    """

    op: str
    source: str
    missing: tuple[Rule, ...]
    surveys: tuple[Survey, ...]
    samples: tuple[str, ...]
    combinations: int
    seed: int


def resolve_overloads(name: str) -> list[str]:
    """The overloads of a name such as `aten.add.Tensor`, `add.Tensor`, `aten.add` or `add`.

    Of a packet those with a rule in DTensor, or all if none has one.  Raises `NoSuchOp`.
    """
    parts = name.split(".")
    readings = [parts] if len(parts) > 1 else []
    readings += [["aten", *parts]] if len(parts) < 3 else []
    for namespace, packet, *which in readings:
        home = getattr(torch.ops, namespace)
        if not hasattr(home, packet):
            continue
        found = [op for op in _of_tensors(getattr(home, packet)) if which in ([], [op.split(".")[2]])]
        if found:
            return sorted([op for op in found if dtensor.registry_of(overload(op))] or found)
    known = {str(op).split(".")[1] for op in dtensor.registered_overloads()}
    raise NoSuchOp(name, difflib.get_close_matches(parts[-1], sorted(known), n=3, cutoff=0.6))


def _of_tensors(packet: torch._ops.OpOverloadPacket) -> list[str]:
    """The overloads that take a tensor, without those for `out=`: their rules are those of the op without it."""
    found = []
    for op in (getattr(packet, which) for which in packet.overloads()):
        tensors = [a for a in op._schema.arguments if "Tensor" in str(a.type)]
        if tensors and not any(a.is_out for a in tensors):
            found.append(str(op))
    return found


def discover(op: str, ranks: Sequence[int] = (2, 3), seed: int = 0, given: Sequence[Sample] | None = None) -> Discovery:
    """The missing rules of one overload.

    `given` are calls of it; by default they are OpInfo's samples, or drawn from the schema.  A sample for which the op
    or its own rule raises is left out.  Raises `NoSuchOp`.
    """
    (target,) = resolve_overloads(op)[:1]
    found, searched, combinations = [], [], 0
    for sample in samples_of(target, seed) if given is None else given:
        by_ranks = _searched(sample, ranks, seed)
        if by_ranks:
            found.append((sample, by_ranks))
            searched.append(f"{', '.join(sample.arguments())} from {sample.origin}")
            combinations += sum(seen.combinations for seen in by_ranks.values())
    surveys = survey_kinds(found, seed)
    rules = {str(rule): rule for one in surveys for rule in one.missing()}
    source = dtensor.registry_of(overload(target))
    return Discovery(target, source, tuple(rules.values()), tuple(surveys), tuple(searched), combinations, seed)


def _searched(sample: Sample, ranks: Sequence[int], seed: int) -> dict[int, MissingRuleSearch]:
    """The result of the search on each mesh size; empty where the op or its rule raises, or nothing was tried."""
    try:
        truth = run_oracle(sample, seed=seed)
        if truth.unstable > MAX_JUMP_SHARE:
            return {}
        alone = dtensor.PropagatorQuery(sample, 1, truth.raw)
        seen = {n: search_placements(sample, truth, n, claims(sample, n, truth.raw, alone), seed) for n in ranks}
    except (*REJECTIONS, AttributeError):
        return {}
    return seen if any(one.combinations for one in seen.values()) else {}


def samples_of(op: str, seed: int) -> list[Sample]:
    """Calls of one overload from the OpInfos of its name, else drawn from its schema.

    None are drawn for an op that does not check its arguments: inconsistent sizes would end the process.
    """
    packet = op.split(".")[1]
    met: list[Sample] = []
    for info in (
        info for info in opinfo_samples.database() if {packet, packet.strip("_")} & opinfo_samples.plain_names(info)
    ):
        for name in DTYPES:
            if SAMPLE_DTYPES[name] in info.supported_dtypes("cpu"):
                for which in opinfo_samples.SIZES:
                    met += opinfo_samples.capture_calls(
                        info, SAMPLE_DTYPES[name], which, device="cpu", seed=seed, wanted=lambda func: str(func) == op
                    )[0]
    if not met and not trusts_caller(op):
        met = schema_samples.schema_calls(overload(op), [SAMPLE_DTYPES[name] for name in DTYPES], seed)
    return diverse_subset(met, MOST)
