"""Specs, and a short notation of torch's placements that is also accepted as input.

`R`, `S(0)`, `SS(0,2)` (strided shard: dim, split factor), `P(sum)`; a spec prints as
`f32[8,4] @ dp:S(0), tp:R`.

| torch part                                              | read on     | run on |
|---------------------------------------------------------|-------------|--------|
| torch.distributed.tensor.placement_types._StridedShard  | 2.11 - 2.15 | 2.13   |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from localtensor.errors import BadPlacement, BadShardOrder, NoSuchDim, WrongType
from localtensor.layout.mesh import Mesh, Printer

StridedShard = _StridedShard
"""torch's `_StridedShard` under a public name."""
PARTIAL_KINDS = ("sum", "avg", "min", "max", "product")
"""The reductions of a Partial."""

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_WRITTEN = re.compile(r"(R)|S\((\d{1,18})\)|SS\((\d{1,18}), ?(\d{1,18})\)|P\((\w+)\)")  # torch's numbers have 63 bits


def parse(text: str) -> Placement:
    """The placement of a short notation, such as "S(0)".

    Raises `BadPlacement` for any other text, also for a negative dim.

    >>> [parse(p) for p in ("R", "S(1)", "P(max)")]
    [Replicate(), Shard(dim=1), Partial(max)]
    """
    found = _WRITTEN.fullmatch(text.strip()) if isinstance(text, str) else None
    if not found:
        raise BadPlacement("placement.parse", text, "this is no placement")
    whole, dim, strided, factor, kind = found.groups()
    if whole:
        return Replicate()
    if dim is not None:
        return Shard(int(dim))
    if strided is not None:
        return _StridedShard(int(strided), split_factor=int(factor))
    if kind not in PARTIAL_KINDS:
        raise BadPlacement("placement.parse", text, f"no reduction is called {kind}")
    return Partial(kind)


def is_standard(placement: Placement | None) -> bool:
    """Whether it is R, S(dim) or one of the five Partials, and of no subclass."""
    if type(placement) is Partial:
        return placement.reduce_op in PARTIAL_KINDS
    return type(placement) in (Replicate, Shard)


def is_supported(placement: Placement | None) -> bool:
    """Whether this package defines it: it is plain, or a strided shard with a positive split factor."""
    return is_standard(placement) or (type(placement) is _StridedShard and placement.split_factor > 0)


_WHOLE = frozenset({Replicate, Partial, type(None)})  # that shard no dim; isinstance() of torch's placements is slow


def shard_cut(placement: Placement | None) -> tuple[int, int] | None:
    """The dim that a placement shards and its split factor, 1 unless strided; None if it shards none.

    >>> shard_cut(Shard(1)), shard_cut(parse("SS(0,3)")), shard_cut(Partial())
    ((1, 1), (0, 3), None)
    """
    kind = type(placement)
    if kind is Shard:
        return placement.dim, 1  # type: ignore[union-attr]
    if kind in _WHOLE:
        return None
    if isinstance(placement, _StridedShard):
        return placement.dim, int(placement.split_factor)
    return (placement.dim, 1) if isinstance(placement, Shard) else None


def short(placement: Placement | None) -> str:
    """The short notation.  A Partial subclass is shown by its class name: a norm partial is not a sum.

    >>> short(Shard(0)), short(Partial("avg")), short(None)
    ('S(0)', 'P(avg)', '-')
    """
    if placement is None:
        return "-"
    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    if isinstance(placement, _StridedShard):
        return f"SS({placement.dim},{placement.split_factor})"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        own = type(placement).__name__.strip("_").removesuffix("Partial").lower()
        return f"P({own or placement.reduce_op})"
    return "R" if isinstance(placement, Replicate) else str(placement)


def shorts(placements: Sequence[Placement | None]) -> str:
    """The short notations, separated by commas."""
    return ", ".join(map(short, placements))


def shape_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A dtype and a shape as `f32[8,4]`."""
    return f"{_SHORT.get(dtype, str(dtype).removeprefix('torch.'))}[{','.join(map(str, shape))}]"


ShardOrder = tuple[tuple[int, tuple[int, ...]], ...]
"""(dim, axes in the order in which they cut it) for dims that several axes cut, as torch's `DTensorSpec.shard_order`."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The layout of a tensor on a mesh: a placement for each axis, and the global shape and dtype.

    Axes cut a dim from left to right unless `shard_order` has another order for it; it is stored sorted, without dims
    whose order is from left to right.  Each cut divides the pieces of the cuts before it.
    `localtensor.layout.shard_order` converts shard orders to strided shards and back.

    Raises `BadPlacement` or `NoSuchDim` for placements that do not fit the mesh or the shape, and `BadShardOrder` for
    an order of other axes than those that cut the dim.

    >>> Spec(Mesh.of(dp=2), (Shard(0),), (8, 4), torch.float32)
    f32[8,4] @ dp:S(0)
    >>> Spec(Mesh.of(dp=2, tp=2), (Shard(0), Shard(0)), (8, 4), torch.float32, ((0, (1, 0)),))
    f32[8,4] @ dp:S(0)[1], tp:S(0)[0]
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard_order: ShardOrder = ()

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.sizes):
            count = f"{len(self.placements)} placements for {len(self.mesh.sizes)} mesh axes"
            raise BadPlacement("Spec", shorts(self.placements), count)
        for cut in map(shard_cut, self.placements):
            if cut is not None and not 0 <= cut[0] < len(self.shape):
                raise NoSuchDim("Spec", cut[0], self.shape)
            if cut is not None and cut[1] < 1:
                raise BadPlacement("Spec", shorts(self.placements), "a split factor is 1 or more")
        if self.shard_order != ():
            object.__setattr__(self, "shard_order", self._reordered())

    def cut_by(self, dim: int) -> tuple[int, ...]:
        """The axes that cut this dim, in their order.

        >>> Spec(Mesh.of(2, 2), (Shard(0), Shard(0)), (8,), torch.float32, ((0, (1, 0)),)).cut_by(0)
        (1, 0)
        """
        for ordered, axes in self.shard_order:
            if ordered == dim:
                return axes
        return tuple(
            axis for axis, cut in enumerate(map(shard_cut, self.placements)) if cut is not None and cut[0] == dim
        )

    @property
    def sequence(self) -> tuple[int, ...]:
        """All axes in an order in which they can be applied: from left to right except for the dims of `shard_order`."""
        order = list(range(len(self.placements)))
        for _, axes in self.shard_order:
            for place, axis in zip(sorted(axes), axes, strict=True):
                order[place] = axis
        return tuple(order)

    def _reordered(self) -> ShardOrder:
        cutting: dict[int, list[int]] = {}
        for axis, cut in enumerate(map(shard_cut, self.placements)):
            if cut is not None:
                cutting.setdefault(cut[0], []).append(axis)
        found: dict[int, tuple[int, ...]] = {}
        if not isinstance(self.shard_order, tuple | list):
            raise self._no_order("it is no tuple of dims with their axes")
        for entry in self.shard_order:
            try:
                dim, axes = index(entry[0]), tuple(map(index, entry[1]))
                paired = isinstance(entry, tuple) and len(entry) == 2
            except (TypeError, IndexError, KeyError):
                paired = False
            if not paired:
                raise self._no_order(f"{entry!r} is no pair of a dim and its axes")
            if dim in found:
                raise self._no_order(f"it names dim {dim} twice")
            if sorted(axes) != cutting.get(dim, []):
                raise self._no_order(f"dim {dim} is cut by the axes {cutting.get(dim, [])}, and not by {list(axes)}")
            found[dim] = axes
        return tuple(sorted((dim, axes) for dim, axes in found.items() if list(axes) != cutting[dim]))

    def _no_order(self, problem: str) -> BadShardOrder:
        return BadShardOrder(f"{self.shard_order} of {shorts(self.placements)}", problem)

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        """Print a call that makes this spec, for failing examples of Hypothesis."""
        mesh = f"Mesh({self.mesh.sizes}, {self.mesh.names})"
        placements = ", ".join(f"parse({short(placement)!r})" for placement in self.placements)
        order = f", {self.shard_order}" if self.shard_order else ""
        printer.text(f"Spec({mesh}, ({placements},), {self.shape}, {self.dtype}{order})")

    def __repr__(self) -> str:
        turns = {axis: f"[{turn}]" for _, axes in self.shard_order for turn, axis in enumerate(axes)}
        named = zip(self.mesh.names, self.placements, strict=True)
        placed = ", ".join(f"{n}:{short(p)}{turns.get(axis, '')}" for axis, (n, p) in enumerate(named))
        return f"{shape_text(self.shape, self.dtype)} @ {placed}"


def check_spec(call: str, spec: object) -> None:
    """Raises `WrongType` for what is no Spec."""
    if not isinstance(spec, Spec):
        remedy = "Pass Spec(mesh, placements, shape, dtype)."
        raise WrongType(call, "spec", spec, "it is no Spec, which has the mesh and the shape as well", remedy)
