"""The layouts of drawn tensors: placements for one axis, sizes of meshes, specs as text, and sharded values.

Placements and sizes come the simplest first; a value that stands in a table several times is drawn more often, and is
as simple as its first occurrence.  The ranks of a mesh are drawn first, and the last axis has as many as are left; so
any axis can be dropped, and one rank after the other, without a change of meaning of the other drawn numbers.

A spec is one line of text with the sizes of its mesh: `f32[5,3] @ dp=2:S(0), tp=4:R`.  Where axes do not cut a dim from
left to right, each has its turn: `f32[8] @ dp=2:S(0)[1], tp=2:S(0)[0]`.  `localtensor.layout.shards` defines layouts.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement
from localtensor.layout import shards
from localtensor.layout.mesh import Mesh
from localtensor.layout.partial_splits import partial_values
from localtensor.layout.reductions import is_unambiguous
from localtensor.layout.spec import PARTIAL_KINDS as REDUCTIONS
from localtensor.layout.spec import ShardOrder, Spec, StridedShard, parse, shape_text, shard_cut, short, shorts
from localtensor.testing.hypothesis_strategies.values import (
    DTYPES,
    BadDraw,
    Drawn,
    exact_bound,
    exact_unit,
    print_repr,
    real_dtype,
)

FACTORS = (2, 3)
"""The split factors of a strided shard that stands alone."""


@functools.lru_cache(1024)
def placement_options(ndim: int, dtype: torch.dtype | None, kinds: tuple[str, ...], pending: str = "") -> shards.Layout:
    """All placements of a tensor of `ndim` dims on one axis, the simplest first; `pending` is its reduction on others.

    Reductions that have no agreed meaning for the dtype are left out.
    """
    found: list[Placement] = [Replicate()] if "R" in kinds else []
    if "S" in kinds:
        found += map(Shard, range(ndim))
    wanted = [kind for kind in REDUCTIONS if "P" in kinds or f"P({kind})" in kinds]
    beside = shards.COMMUTING_KINDS if pending in shards.COMMUTING_KINDS else frozenset({pending})
    defined = [kind for kind in wanted if dtype is None or is_unambiguous(kind, dtype)]
    found += [Partial(kind) for kind in defined if not pending or kind in beside]
    if "SS" in kinds:
        found += [StridedShard(dim, split_factor=factor) for dim in range(ndim) for factor in FACTORS]
    return tuple(found)


@functools.lru_cache(1024)
def aligned_options(
    ndim: int, dtype: torch.dtype | None, kinds: tuple[str, ...], pending: str, most: int
) -> shards.Layout:
    """The options, each at its index among those of a tensor of `most` dims and any dtype.

    A missing option is replaced by the one before it.  So an index keeps its meaning if the tensor loses a dim, or gets
    another dtype, and counterexamples shrink one number at a time.

    >>> aligned_options(1, torch.float32, ("R", "S", "P(max)"), "", 3)
    (Replicate(), Shard(dim=0), Shard(dim=0), Shard(dim=0), Partial(max))
    """
    here, found = placement_options(ndim, dtype, kinds, pending), list[Placement]()
    for option in placement_options(most, None, kinds):
        found += [option] if option in here else found[-1:]
    return tuple(found)


def other_cut_orders(layout: Sequence[Placement]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Each order except left to right in which several axes may cut the dim that they share, as (dim, axes).

    >>> other_cut_orders((Shard(0), Replicate(), Shard(0)))
    ((0, (2, 0)),)
    """
    shared: dict[int, list[int]] = {}
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard) and not isinstance(placement, StridedShard):
            shared.setdefault(placement.dim, []).append(axis)
    return tuple((dim, order) for dim, axes in shared.items() for order in list(itertools.permutations(axes))[1:])


def unambiguous_layout(
    layout: shards.Layout, shape: Sequence[int], dtype: torch.dtype, mesh: Sequence[int]
) -> shards.Layout:
    """The layout itself, or with plain shards in place of strided ones if it would have two meanings."""
    if shards.has_one_meaning(layout, shape, dtype, mesh):
        return layout
    return tuple(Shard(p.dim) if isinstance(p, StridedShard) else p for p in layout)


AXES = "abcdefgh"
"""The default names of axes."""
HALVES = ("lower", "lower", "lower", "lower", "lower", "lower", "lower", "upper")
"""An axis seldom takes more than half of the remaining ranks, since then no axis of two ranks can follow."""


@functools.lru_cache(256)
def ranks_between(least: int, most: int) -> tuple[int, ...]:
    """The numbers of ranks; those that allow two axes of two ranks or more come more often.

    >>> ranks_between(2, 5)
    (2, 3, 4, 4, 4, 5, 5, 5)
    """
    return tuple(ranks for ranks in range(least, most + 1) for _ in range(3 if ranks > 3 else 1))


@functools.lru_cache(4096)
def sizes_left(least: int, ranks: int, before: int, half: str) -> tuple[int, ...]:
    """The sizes of the next axis but the last, after axes of `before` ranks in all, on a mesh of up to `ranks`.

    Each leaves a last axis with which the mesh has `least` ranks.

    >>> sizes_left(1, 8, 1, "lower"), sizes_left(1, 8, 1, "upper"), sizes_left(1, 8, 3, "lower")
    ((1, 2, 2, 3, 3, 4, 4), (5, 6, 7, 8), (1,))
    >>> sizes_left(6, 6, 1, "lower")
    (1, 2, 2, 3, 3)
    """
    left = ranks // before
    fit = tuple(size for size in range(1, left + 1) if before * size * (left // size) >= least)
    lower = tuple(size for size in fit if size <= left // 2 for _ in range(2 if size > 1 else 1))
    upper = tuple(size for size in fit if size > left // 2)
    return (lower or upper) if half == "lower" else (upper or lower)


LONGEST = 2_000
"""Letters of the line of a spec, as of a text of `localtensor plan`."""
_WHOLE = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\] @ (.+)")
_AXIS = re.compile(r"([^\W\d]\w*)=(\d+):(\w+(?:\([^)]*\))?)(?:\[(\d+)\])?(?:, (?=.)|$)")
_DTYPE = {shape_text((), dtype).partition("[")[0]: dtype for dtype in DTYPES}


def spec_text(spec: Spec) -> str:
    """The line that `read_spec` reads.

    >>> import torch
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> spec_text(Spec(Mesh.of(dp=2, tp=4), (Shard(0), Replicate()), (5, 3), torch.float32))
    'f32[5,3] @ dp=2:S(0), tp=4:R'
    """
    turns = {axis: f"[{turn}]" for _, axes in spec.shard_order for turn, axis in enumerate(axes)}
    axes = enumerate(zip(spec.mesh.names, spec.mesh.sizes, spec.placements, strict=True))
    placed = ", ".join(f"{name}={size}:{short(placed)}{turns.get(axis, '')}" for axis, (name, size, placed) in axes)
    return f"{shape_text(spec.shape, spec.dtype)} @ {placed}"


def read_spec(text: str) -> Spec:
    """The spec of a line.

    Raises `BadDraw` for an invalid line, and the errors of `Mesh`, `parse` and `Spec`.  Of a dim either no axis has a
    turn, or each that cuts it has its own, from 0 up.

    >>> read_spec("bf16[7] @ a=3:SS(0,2)"), read_spec("bf16[7] @ a=3:S(0)[1], b=2:S(0)[0]").shard_order
    (bf16[7] @ a:SS(0,2), ((0, (1, 0)),))
    """
    whole = _WHOLE.fullmatch(text) if isinstance(text, str) and len(text) <= LONGEST else None
    axes = list(_AXIS.finditer(whole[3])) if whole else []
    if whole is None or "".join(axis[0] for axis in axes) != whole[3] or whole[1] not in _DTYPE:
        remedy = "Write it as 'f32[5,3] @ dp=2:S(0), tp=4:R'."
        raise BadDraw("read_spec", "text", text, "this is no spec", remedy)
    mesh = Mesh(tuple(int(axis[2]) for axis in axes), tuple(axis[1] for axis in axes))
    shape = tuple(int(size) for size in whole[2].split(",") if size)
    placements = tuple(parse(axis[3]) for axis in axes)
    order = _order(text, placements, [None if axis[4] is None else int(axis[4]) for axis in axes])
    return Spec(mesh, placements, shape, _DTYPE[whole[1]], order)


def _order(text: str, placements: Sequence[Placement], turns: Sequence[int | None]) -> ShardOrder:
    """The shard order by the turns of the axes."""
    found: dict[int | None, list[tuple[int | None, int]]] = {}
    for axis, (cut, turn) in enumerate(zip(map(shard_cut, placements), turns, strict=True)):
        found.setdefault(None if cut is None else cut[0], []).append((turn, axis))
    orders = []
    for dim, taken in found.items():
        given = {turn: axis for turn, axis in taken if turn is not None}
        if given and (dim is None or sorted(given) != list(range(len(taken)))):
            problem = "these turns do not say in which order the axes cut a dim"
            remedy = "Number all axes that cut the dim from 0 up, as in 'f32[8] @ dp=2:S(0)[1], tp=2:S(0)[0]'."
            raise BadDraw("read_spec", "text", text, problem, remedy)
        if given and dim is not None:
            orders.append((dim, tuple(given[turn] for turn in sorted(given))))
    return tuple(orders)


def exact_parts(x: Tensor, kind: str, ranks: int, rng: torch.Generator, *, sparse: bool = False) -> Tensor:
    """`ranks` partial values of x, stacked as [ranks, *x.shape], that fold to x bit for bit in any order of the ranks.

    The parts cancel, change sign, tie, and are zero where the total is not, as those of `partial_values`; but every
    number of a sum or an average is a multiple of the unit of the dtype, where the total is one, so that no sum is
    rounded.  Where the total is no multiple of it, infinite or NaN, one rank alone holds it.  `sparse` is the second
    form: zeros of the parts that are not zeros of the total (sum, avg), ties (min, max), ones (product).  An average of
    a number that is near the end of its dtype has no exact parts, nor has one of integers.  Raises `NotReducible` where
    the reduction has no meaning for the dtype.
    """
    if kind in ("min", "max") or not (x.dtype.is_floating_point or x.dtype.is_complex):
        return partial_values(x, kind, ranks, rng, sparse=sparse)
    if kind == "product":
        return _factors(x, ranks, rng, sparse)
    if x.is_complex():
        both = exact_parts(torch.view_as_real(x.resolve_conj()), kind, ranks, rng, sparse=sparse)
        return torch.view_as_complex(both)
    return _addends(x * ranks if kind == "avg" else x, ranks, rng, sparse)


def _addends(x: Tensor, ranks: int, rng: torch.Generator, sparse: bool) -> Tensor:
    step = exact_unit(x.dtype)
    units = (x.double() / step).nan_to_num(0.5, 0.5, 0.5)
    tame = (units == units.round()) & (units.abs() <= exact_bound(x.dtype) * ranks / step)
    stack = partial_values(units.where(tame, 0).long(), "sum", ranks, rng, sparse=sparse, far=step == 2.0**-10)
    stack = (stack * step).to(x.dtype)
    if bool(tame.all()):
        return stack
    alone = torch.arange(ranks).reshape(ranks, *[1] * x.ndim) == torch.randint(0, ranks, x.shape, generator=rng)
    return torch.where(tame, stack, torch.where(alone, x, 0).to(x.dtype))


def _factors(x: Tensor, ranks: int, rng: torch.Generator, sparse: bool) -> Tensor:
    """Signs, and powers of two where no number can leave its range by them; one rank holds the rest of x."""
    shape = (ranks - 1, *x.shape)
    minus = torch.rand(shape, generator=rng) < 0.5
    powers = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[torch.randint(0, 3, shape, generator=rng)]
    size = torch.view_as_real(x).abs().amax(-1) if x.is_complex() else x.abs()
    fits = (size <= exact_bound(x.dtype)) & ((size == 0) | (size >= exact_unit(x.dtype))) & (not sparse) & (ranks <= 8)
    powers = torch.where(fits, powers, 1.0)
    others = torch.where(minus, -powers, powers)
    left = (1 / powers.prod(0)).to(real_dtype(x.dtype))
    signed = torch.where(minus.sum(0) % 2 == 1, -x, x)
    stack = torch.cat([others.to(x.dtype), (signed * left)[None]])
    order = torch.rand(stack.shape, generator=rng).argsort(0)
    return stack.gather(0, order)


@dataclass(frozen=True, slots=True)
class Sharded:
    """A whole tensor and each rank's piece, made from a spec, a pattern and a seed, which are also its repr.

    `pieces[rank]` are fresh, contiguous tensors that share no memory, so a test may write into them.
    `assemble(x.pieces, x.spec)` is `x.whole` bit for bit, except for "rough", on up to eight ranks.  Two are equal if
    spec, pattern and seed are.  Raises `BadDraw` for an unknown pattern, `BadPlacement` for a layout without a meaning,
    or with two.

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
        if both_ways or not shards.has_one_meaning(spec.placements, spec.shape, spec.dtype, spec.mesh.sizes):
            raise BadPlacement("draws.Sharded", shorts(spec.placements), "it has no meaning, or two, for this tensor")
        whole = Drawn(spec.shape, spec.dtype, self.pattern, self.seed).tensor()
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "pieces", tuple(cut_pieces(whole, spec, self.seed, exact=self.pattern != "rough")))

    _repr_pretty_ = print_repr

    def __repr__(self) -> str:
        return f"Sharded.of({spec_text(self.spec)!r}, {self.pattern!r}, {self.seed})"


def cut_pieces(whole: Tensor, spec: Spec, seed: int, *, exact: bool = True) -> list[Tensor]:
    """Every rank's piece, by rank, in fresh memory.  Partial values are sparse for odd seeds."""
    rng = torch.Generator().manual_seed(seed)
    make, sparse = exact_parts if exact else partial_values, seed % 2 == 1

    def deal(x: Tensor, placement: Placement, ranks: int) -> Sequence[Tensor]:
        if isinstance(placement, Partial):
            return make(x, placement.reduce_op, ranks, rng, sparse=sparse).unbind()
        return shards.split_axis(x, placement, ranks)

    held = shards.in_rank_order(shards.split_by_axes(whole, *shards.in_axis_order(spec), deal), spec)
    return [piece.clone(memory_format=torch.contiguous_format) for piece in held]
