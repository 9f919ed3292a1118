"""A whole tensor and what each rank of a mesh holds of it, drawn.

`shards.assemble(Sharded(...).pieces, spec)` is the whole, to the last bit, for every pattern but "rough", on up to
eight ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement
from localtensor.layout.meaning import has_meaning
from localtensor.layout.partials import parts
from localtensor.layout.shards import by_rank, in_sequence, split_axis, spread
from localtensor.layout.spec import Spec, StridedShard, shorts
from localtensor.testing.hypothesis_strategies.drawn_parts import exact_parts
from localtensor.testing.hypothesis_strategies.spec_text import read_spec, spec_text
from localtensor.testing.hypothesis_strategies.values import Drawn


@dataclass(frozen=True, slots=True)
class Sharded:
    """A whole tensor and each rank's piece, made from a spec, a pattern and a seed; that is also its print.

    `pieces[rank]` are fresh, contiguous tensors that share no memory, so a test may write into them.  Two are equal
    if they were made alike.  Raises `BadDraw` for a pattern that there is not, `BadPlacement` for a layout that has
    no meaning, or two.

    >>> sharded = Sharded.of("i64[5] @ dp=2:S(0), tp=2:P(sum)", "arange", 1)
    >>> sharded.whole
    tensor([0, 1, 2, 3, 4])
    >>> sharded.pieces[0] + sharded.pieces[1]
    tensor([0, 1, 2])
    >>> sharded
    Sharded.of('i64[5] @ dp=2:S(0), tp=2:P(sum)', 'arange', 1)
    """

    spec: Spec
    pattern: str
    seed: int = 0
    whole: Tensor = field(init=False, compare=False)
    pieces: tuple[Tensor, ...] = field(init=False, compare=False)

    @classmethod
    def of(cls, text: str, pattern: str, seed: int = 0) -> Sharded:
        """From the text of a spec, as `read_spec` reads it."""
        return cls(read_spec(text), pattern, seed)

    def __post_init__(self) -> None:
        spec = self.spec
        turned = {axis for _, axes in spec.shard_order for axis in axes}
        both_ways = any(isinstance(spec.placements[axis], StridedShard) for axis in turned)
        if both_ways or not has_meaning(spec.placements, spec.shape, spec.dtype, spec.mesh.sizes):
            raise BadPlacement("draws.Sharded", shorts(spec.placements), "it has no meaning, or two, for this tensor")
        whole = Drawn(spec.shape, spec.dtype, self.pattern, self.seed).tensor()
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "pieces", tuple(cut(whole, spec, self.seed, exact=self.pattern != "rough")))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis would else print the fields."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        return f"Sharded.of({spec_text(self.spec)!r}, {self.pattern!r}, {self.seed})"


def cut(whole: Tensor, spec: Spec, seed: int, *, exact: bool = True) -> list[Tensor]:
    """Every rank's piece, by rank number, fresh.  Partial values come in their second form for odd seeds."""
    rng = torch.Generator().manual_seed(seed)
    make, sparse = exact_parts if exact else parts, seed % 2 == 1

    def deal(x: Tensor, placement: Placement, ranks: int) -> Sequence[Tensor]:
        if isinstance(placement, Partial):
            return make(x, placement.reduce_op, ranks, rng, sparse=sparse).unbind()
        return split_axis(x, placement, ranks)

    held = by_rank(spread(whole, *in_sequence(spec), deal), spec)
    return [piece.clone(memory_format=torch.contiguous_format) for piece in held]
