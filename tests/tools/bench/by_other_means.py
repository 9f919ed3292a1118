"""A second judge of rules that a search calls missing: plain torch, other sizes, other values, every rank a loop.

It shares no line with the probe, nor with the adversaries: `cut`, `shapes` and `together` are those of the slow twin.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from strategies.model.rule import Call, Rule, Sample, overload
from tests.tools.bench.by_hand import cut, shapes, together

RANKS = (2, 3, 5)
TRIALS = 4


def refuted(rule: Rule, samples: Sequence[Sample]) -> str:
    """What is wrong with the rule, or empty: on these calls with other values, on 2, 3 and 5 ranks."""
    for number, sample in enumerate(samples):
        for trial in range(TRIALS):
            rng = torch.Generator().manual_seed(zlib.crc32(f"other means {rule} {number} {trial}".encode()))
            tensors = [_other(t, rng) if trial else t for t in sample.tensors]
            asked = replace(sample, call=_other_numbers(sample, trial)) if trial > 1 else sample
            for ranks in RANKS:
                found = _wrong(rule, asked, tensors, ranks, rng)
                if found:
                    return f"{found} on {ranks} ranks, {', '.join(asked.arguments())}"
    return ""


def _other_numbers(sample: Sample, number: int) -> Call:
    """Whole numbers of the same sign in the place of those that the op computes with."""
    known = {a.name: str(a.type) for a in overload(sample.op)._schema.arguments}
    names = list(known)

    def put(name: str, value: Any) -> Any:
        computes = type(value) in (int, float) and known[name] in ("number", "float", "Optional[number]")
        return type(value)(number if value > 0 else -number) if computes and value else value

    args = tuple(put(name, value) for name, value in zip(names, sample.call.args))
    return replace(sample.call, args=args, kwargs=tuple((n, put(n, v)) for n, v in sample.call.kwargs))


def _other(x: Tensor, rng: torch.Generator) -> Tensor:
    """The same numbers at other places; of a fraction, another size."""
    if x.numel() < 2:
        return x * 1.25 if x.dtype.is_floating_point else x
    moved = x.flatten()[torch.randperm(x.numel(), generator=rng)].view(x.shape)
    return moved * (0.5 + torch.rand(x.shape, generator=rng).to(x.dtype)) if x.dtype.is_floating_point else moved


def _wrong(rule: Rule, sample: Sample, tensors: Sequence[Tensor], ranks: int, rng: torch.Generator) -> str:
    if any(isinstance(p, Shard) and t.shape[p.dim] < ranks for p, t in zip(rule.inputs, tensors, strict=True)):
        return ""
    if any(
        not (t.dtype.is_floating_point or t.dtype == torch.int64) and str(p).startswith("P")
        for p, t in zip(rule.inputs, tensors)
    ):
        return ""
    try:
        want = _flat(sample.call([t.clone() for t in tensors]))
    except (RuntimeError, IndexError, ValueError):
        return ""
    columns = [cut(t, p, ranks, rng) for t, p in zip(tensors, rule.inputs, strict=True)]
    try:
        held = [_flat(sample.call([column[rank].clone() for column in columns])) for rank in range(ranks)]
    except (RuntimeError, IndexError, ValueError) as error:
        return f"refused: {str(error).splitlines()[0]}"
    for i, placement in enumerate(rule.outputs):
        pieces = [out[i] for out in held]
        if [tuple(p.shape) for p in pieces] != shapes(want[i], placement, ranks):
            return "other shapes"
        for got in together(pieces, placement):
            if not torch.allclose(got.double(), want[i].double(), rtol=1e-6, atol=1e-6, equal_nan=True):
                return "other values"
    return ""


def _flat(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)]
