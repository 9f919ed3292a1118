"""Are the labels of the blind pairs true?  By splitting, running and joining tensors here, with nothing of the product."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Shard

from tests.tools.bench.blind_form import Pair, Row, bind

RANKS = (2, 3, 4)
RIGHT_CALLS = 12
WRONG_CALLS = 400
DTYPES = (torch.float64, torch.float64, torch.float64, torch.int64)


class Source:
    """Random calls: halves between -3 and 3, so that ties are frequent and sums exact."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def of(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        drawn = torch.randint(-6, 7, shape, generator=self.generator)
        return drawn.to(dtype) / 2 if dtype.is_floating_point else drawn.to(dtype)

    def shape(self, ndim: int | None = None) -> list[int]:
        return [self.random.choice((2, 3, 4, 5, 6, 8)) for _ in range(ndim or self.random.randint(1, 3))]

    def t(self, ndim: int | None = None, *, integers: bool = True) -> Tensor:
        return self.of(*self.shape(ndim), dtype=self.random.choice(DTYPES) if integers else torch.float64)

    def f(self, ndim: int | None = None) -> Tensor:
        return self.t(ndim, integers=False)

    def nans(self, ndim: int | None = None) -> Tensor:
        """Every second time with some NaN."""
        x = self.f(ndim)
        share = self.random.choice((0.0, 0.4))
        return torch.where(torch.rand(x.shape, generator=self.generator) < share, torch.nan, x)

    def strided(self, ndim: int) -> Tensor:
        x = self.f(ndim)
        return x.transpose(0, -1) if self.random.random() < 0.5 else x

    def like(self, x: Tensor) -> Tensor:
        return self.of(*x.shape, dtype=x.dtype)

    def dim(self, x: Tensor) -> int:
        return self.random.randrange(-x.ndim, x.ndim)

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)


def chunks(x: Tensor, dim: int, ranks: int) -> list[Tensor]:
    """As torch.chunk splits, empty pieces for the ranks that get none."""
    step = -(-x.shape[dim] // ranks)
    return [
        x.narrow(dim, min(i * step, x.shape[dim]), max(0, min(step, x.shape[dim] - i * step))).contiguous()
        for i in range(ranks)
    ]


def split(x: Tensor, placement: Placement, ranks: int, source: Source) -> list[Tensor]:
    if isinstance(placement, Shard):
        return chunks(x, placement.dim, ranks)
    if not isinstance(placement, Partial):
        return [x.clone() for _ in range(ranks)]
    if placement.reduce_op in ("sum", "avg"):
        pieces = [source.like(x) for _ in range(ranks - 1)]
        total = x * ranks if placement.reduce_op == "avg" else x
        last = total - sum(pieces, torch.zeros_like(x))
        where = source.random.randrange(ranks)
        return [*pieces[:where], last, *pieces[where:]]
    owner = torch.randint(0, ranks, x.shape, generator=source.generator)
    sign = -1 if placement.reduce_op == "max" else 1
    return [torch.where(owner == i, x, x + sign * source.like(x).abs()).to(x.dtype) for i in range(ranks)]


def join(pieces: Sequence[Tensor], placement: Placement) -> Tensor:
    if isinstance(placement, Shard):
        return torch.cat(list(pieces), placement.dim)
    if not isinstance(placement, Partial):
        return pieces[0]
    stacked = torch.stack(list(pieces))
    if placement.reduce_op == "avg":
        return stacked.sum(0) / len(pieces) if stacked.is_floating_point() else stacked.sum(0) // len(pieces)
    if placement.reduce_op in ("max", "min"):
        return getattr(stacked, f"a{placement.reduce_op}")(0)
    return stacked.prod(0) if placement.reduce_op == "product" else stacked.sum(0)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


def shardable(tensors: list[Tensor], placements: Sequence[Placement], ranks: int) -> bool:
    """Whether DTensor takes the row: it passes over shards that would leave a rank nothing."""
    return all(
        not isinstance(p, Shard) or (p.dim < t.ndim and t.shape[p.dim] >= ranks)
        for t, p in zip(tensors, placements, strict=True)
    )


def broken(op: torch._ops.OpOverload, args: Sequence[Any], row: Row, ranks: int, source: Source) -> str:
    """What is wrong with a row on one call, or nothing.  The local calls run `op` itself."""
    outs, ins = row
    inputs = tensors_of(args)
    pieces = [split(t, p, ranks, source) for t, p in zip(inputs, ins, strict=True)]
    whole = _filled(
        args,
        [join(p, at) if isinstance(at, Partial) else t.clone() for t, p, at in zip(inputs, pieces, ins, strict=True)],
    )
    expected = tensors_of(_call(op, whole))
    local: list[list[Tensor]] = []
    for rank in range(ranks):
        mine = _filled(args, [p[rank].clone() for p in pieces])
        try:
            results = tensors_of(_call(op, mine))
        except (RuntimeError, IndexError, ValueError) as error:
            return f"rank {rank} raises {str(error).splitlines()[0]}"
        local.append(results + tensors_of(mine))
    for at, (wanted, placement) in enumerate(zip(expected + tensors_of(whole), (*outs, *ins), strict=True)):
        if problem := _differs([results[at] for results in local], wanted, placement):
            return f"{'output' if at < len(outs) else 'argument'} {at if at < len(outs) else at - len(outs)} {placement}: {problem}"
    return ""


def _differs(pieces: list[Tensor], wanted: Tensor, placement: Placement) -> str:
    if isinstance(placement, Shard):
        if placement.dim >= wanted.ndim:
            return f"no dim {placement.dim}"
        sizes = [tuple(c.shape) for c in chunks(wanted, placement.dim, len(pieces))]
    else:
        sizes = [tuple(wanted.shape)] * len(pieces)
    if [tuple(p.shape) for p in pieces] != sizes:
        return f"shapes {[tuple(p.shape) for p in pieces]}, not {sizes}"
    got = join(pieces, placement)
    close = torch.allclose(got.double(), wanted.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
    return "" if close else f"{got.tolist()}, not {wanted.tolist()}"


def _call(op: torch._ops.OpOverload, args: Sequence[Any]) -> Any:
    """By position, what must be named by name."""
    named = [a.name for a in op._schema.arguments if a.kwarg_only]
    cut = len(args) - len(named) if named else len(args)
    return op(*args[:cut], **dict(zip(named, args[cut:], strict=True)))


def _filled(value: Any, tensors: list[Tensor]) -> Any:
    """The call with other tensors, taken from the front of the list."""
    if isinstance(value, Tensor):
        return tensors.pop(0)
    return [_filled(v, tensors) for v in value] if isinstance(value, (list, tuple)) else value


def counterexample(pair: Pair, side: str, calls: int) -> str:
    """The first of so many drawn calls on which a rule of the pair is wrong, in words; empty if none is."""
    op = pair.overload(side)
    rule = pair.right if side == "right" else pair.wrong
    for seed in range(calls):
        source = Source(seed)
        args = pair.draw(source)
        assert len(bind(op, args, {})) == len(args), f"{pair.name}: a draw gives every argument"
        for ranks in RANKS:
            inputs = tensors_of(args)
            try:
                rows = pair.rows(rule, op, args, {}, ranks)
            except (IndexError, TypeError, ValueError) as error:
                return f"{_shown(args)}: the rule raises {error!r}"
            for one in rows:
                if shardable(inputs, one[1], ranks) and (problem := broken(op, args, one, ranks, source)):
                    return f"{_shown(args)} on {ranks}: {one[1]} -> {one[0]}: {problem}"
    return ""


def _shown(args: Any) -> str:
    shown = [
        f"{a.dtype}{a.tolist()}" if isinstance(a, Tensor) else _shown(a) if isinstance(a, (list, tuple)) else repr(a)
        for a in args
    ]
    return f"({', '.join(shown)})"


def labels(pairs: Sequence[Pair]) -> list[str]:
    """The false labels: a right rule with a counterexample, a wrong one without."""
    false = []
    for pair in pairs:
        if pair.expected == "finding" and not counterexample(pair, "wrong", WRONG_CALLS):
            false.append(f"{pair.named('wrong')}: no counterexample in {WRONG_CALLS} calls")
        if problem := counterexample(pair, "right", RIGHT_CALLS):
            false.append(f"{pair.named('right')}: {problem}")
    return false
