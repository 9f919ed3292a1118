"""A whole tensor and what each rank of a mesh holds of it; and the whole again, from what the ranks hold.

As `localtensor.shards`, but for strided shards too: such a cut makes `split_factor` blocks of a dim first, and a
rank holds a chunk of each.  `assemble(Sharded(...).pieces, spec)` is the whole, to the last bit, for every pattern
but "rough", on up to eight ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from localtensor.errors import BadPlacement, WrongPieces
from localtensor.partials import parts
from localtensor.placement import Spec, StridedShard, shorts
from localtensor.shards import assemble_axis, bounds, split_axis
from localtensor.testing.drawn_layouts import has_meaning
from localtensor.testing.drawn_parts import exact_parts
from localtensor.testing.drawn_texts import read_spec, spec_text
from localtensor.testing.drawn_values import Drawn


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
        if not has_meaning(spec.placements, spec.shape, spec.dtype, spec.mesh.sizes):
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
    held = [whole]
    for size, placement in zip(spec.mesh.sizes, spec.placements, strict=True):
        known: dict[int, Sequence[Tensor]] = {}  # replicas are one object, and stay replicas when they are cut again
        for x in held:
            if id(x) in known:
                continue
            if isinstance(placement, Partial):
                make = exact_parts if exact else parts
                known[id(x)] = make(x, placement.reduce_op, size, rng, sparse=seed % 2 == 1).unbind()
            elif isinstance(placement, StridedShard):
                known[id(x)] = _strided(x, placement.dim, int(placement.split_factor), size)
            else:
                known[id(x)] = split_axis(x, placement, size)
        held = [piece for x in held for piece in known[id(x)]]
    return [piece.clone(memory_format=torch.contiguous_format) for piece in held]


def assemble(pieces: Sequence[Tensor], spec: Spec) -> Tensor:
    """The tensor that the ranks hold together, of the dtype of the pieces; a replica is the first rank's.

    Of the spec, the mesh and the placements count, and the shape.  Raises `WrongPieces` if the pieces are not as
    many as the ranks, or do not have the shapes that the spec gives them.

    >>> from localtensor.testing.draws import read_spec
    >>> assemble([torch.tensor([0, 2]), torch.tensor([1])], read_spec("i64[3] @ a=2:SS(0,2)"))
    tensor([0, 1, 2])
    """
    want, got = local_shapes(spec), [tuple(piece.shape) for piece in pieces]
    if got != want:
        raise WrongPieces("draws.assemble", got, want)
    level, shapes = list(pieces), _levels(spec)
    for axis in reversed(range(len(spec.mesh.sizes))):
        size, placement = spec.mesh.sizes[axis], spec.placements[axis]
        groups = [level[i : i + size] for i in range(0, len(level), size)]
        if isinstance(placement, StridedShard):
            dim, factor = placement.dim, int(placement.split_factor)
            wholes = shapes[axis]
            level = [_joined(held, dim, factor, whole[dim]) for held, whole in zip(groups, wholes, strict=True)]
        else:
            level = [assemble_axis(held, placement) for held in groups]
    return level[0]


def local_shapes(spec: Spec) -> list[tuple[int, ...]]:
    """Each rank's local shape, by rank number."""
    return _levels(spec)[-1]


def _levels(spec: Spec) -> list[list[tuple[int, ...]]]:
    """The shapes before the first axis has cut, after it, after the second, and so on."""
    levels = [[tuple(spec.shape)]]
    for size, placement in zip(spec.mesh.sizes, spec.placements, strict=True):
        levels.append([_local(shape, placement, size, place) for shape in levels[-1] for place in range(size)])
    return levels


def _local(shape: tuple[int, ...], placement: object, ranks: int, place: int) -> tuple[int, ...]:
    dim = getattr(placement, "dim", None)
    if dim is None:
        return shape
    factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
    size = sum(bounds(block, ranks)[place][1] for _, block in bounds(shape[dim], factor))
    return (*shape[:dim], size, *shape[dim + 1 :])


def _strided(x: Tensor, dim: int, factor: int, ranks: int) -> list[Tensor]:
    blocks = [x.narrow(dim, *block) for block in bounds(x.shape[dim], factor)]
    chunks = [[block.narrow(dim, *chunk) for chunk in bounds(block.shape[dim], ranks)] for block in blocks]
    return [torch.cat([block[rank] for block in chunks], dim) for rank in range(ranks)]


def _joined(held: Sequence[Tensor], dim: int, factor: int, size: int) -> Tensor:
    """What `_strided` has cut, of a dim that was `size` long."""
    lengths = [[length for _, length in bounds(block, len(held))] for _, block in bounds(size, factor)]
    chunks = [x.split([block[rank] for block in lengths], dim) for rank, x in enumerate(held)]
    return torch.cat([chunks[rank][block] for block in range(factor) for rank in range(len(held))], dim)
