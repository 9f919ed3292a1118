"""Reductions of many ranks' tensors in their own dtype.

The dtypes of each reduction are those of gloo, tried on gloo processes of torch 2.13.0 and checked by tests/real.  So is
the order in which up to eight ranks' floats are added, averaged and multiplied: results equal gloo's to the last bit.
More ranks are folded in pairs of neighbours, which many groups can share.  There are three differences from gloo, on
purpose:

* min and max let NaN through, whichever rank holds it.  In gloo it depends on the order of the ranks.
* `PremulSum` exists, though gloo refuses it: NCCL has it (ReduceOp.PREMUL_SUM, ProcessGroupNCCL.cpp).
* torch.complex32 is refused, though gloo adds it: torch calls it experimental and cannot divide it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from localtensor.errors import DtypeNotReducible, NotReducible, UnknownReduction
from localtensor.layout.tolerance import is_float8

T = TypeVar("T")
MAX_SEQUENTIAL = 8  # at most so many ranks are folded one after the other, floats in gloo's ring


def fold_in_pairs(pair: Callable[[T, T], T], held: Sequence[T]) -> T:
    """The fold of all items by `pair`: passes over pairs of neighbours while there are more than eight, then in sequence.

    In this order many groups can be folded together (lockstep/comms/stacked_collectives.py).

    >>> fold_in_pairs(lambda a, b: f"({a}{b})", "abcde"), fold_in_pairs(lambda a, b: a + b, range(10))
    ('((((ab)c)d)e)', 45)
    """
    while len(held) > MAX_SEQUENTIAL:
        even = len(held) // 2 * 2
        held = [*map(pair, held[0:even:2], held[1:even:2]), *held[even:]]
    return reduce(pair, held)


# The dtypes of gloo's collectives, which raise "Invalid scalar type" for others; send and recv take any.
GLOO_DTYPES = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip
_WIDER = {torch.uint32: torch.int64, torch.uint64: torch.int64, torch.complex32: torch.complex64}


@dataclass(frozen=True, slots=True)
class PremulSum:
    """The sum of each rank's tensor times one factor, which is rounded to the tensors' dtype first.

    >>> fold([torch.tensor([2.0]), torch.tensor([4.0])], PremulSum(0.5))
    tensor([3.])
    """

    factor: float

    def times(self, x: Tensor) -> Tensor:
        """One rank's tensor times the factor."""
        return x * torch.tensor(self.factor, dtype=x.dtype, device=x.device)


ReductionOp: TypeAlias = str | PremulSum


def divide(x: Tensor, count: int) -> Tensor:
    """x / count, of complex numbers each part by itself as in gloo: torch's complex 49 / 7 is 7.000000477.

    >>> divide(torch.tensor([49 + 14j]), 7)
    tensor([7.+2.j])
    """
    return torch.view_as_complex(torch.view_as_real(x.resolve_conj()) / count) if x.is_complex() else x / count


# The function of two tensors that each reduction folds by.  Integers wrap around and a sum of bools is their "or"; an
# average divides the sum by the number of ranks: it overflows where the sum does.  All of it as in gloo.
PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

# The kinds of number that each reduction has in gloo; for premul_sum, in NCCL.
REDUCIBLE_KINDS: dict[str, tuple[str, ...]] = {
    "sum": ("bool", "integer", "float", "complex"),
    "avg": ("float", "complex"),
    "product": ("bool", "integer", "float"),
    "min": ("bool", "integer", "float"),
    "max": ("bool", "integer", "float"),
    "band": ("bool", "integer"),
    "bor": ("bool", "integer"),
    "bxor": ("bool", "integer"),
    "premul_sum": ("float", "complex"),
}


def reduction_name(op: ReductionOp) -> str:
    """The name of a reduction in tables and messages."""
    return "premul_sum" if isinstance(op, PremulSum) else op


def dtype_kind(dtype: torch.dtype) -> str:
    """One of bool, integer, float, complex.

    >>> dtype_kind(torch.bfloat16)
    'float'
    """
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def carrier_dtype(dtype: torch.dtype) -> torch.dtype:
    """The narrowest carried dtype that holds every value of this one (of uint64: every bit).

    >>> carrier_dtype(torch.int16), carrier_dtype(torch.float8_e5m2), carrier_dtype(torch.bool)
    (torch.int32, torch.float32, torch.bool)
    """
    if dtype in GLOO_DTYPES:
        return dtype
    return _WIDER.get(dtype, torch.float32 if dtype.is_floating_point else torch.int32)


def check_reducible(call: str, op: ReductionOp, dtype: torch.dtype) -> None:
    """Check that a collective can reduce this dtype.

    Raises `UnknownReduction` for a name that is not in `PAIRS`, and `DtypeNotReducible` for a kind of number that is
    not in `REDUCIBLE_KINDS`.
    """
    if not isinstance(op, PremulSum) and (not isinstance(op, str) or op not in PAIRS):
        raise UnknownReduction(call, op, f"{', '.join(map(repr, PAIRS))}, or pass PremulSum(factor)")
    if dtype_kind(dtype) not in REDUCIBLE_KINDS[reduction_name(op)]:
        raise DtypeNotReducible(call, reduction_name(op), dtype, dtype_kind(dtype))


def fold(held: Sequence[Tensor], op: ReductionOp, *, rooted: bool = False) -> Tensor:
    """The reduction of the ranks' tensors, which have one shape and dtype, as does the result.

    `rooted` is for `reduce`, which gloo cuts in another way than the others where tensors are large.  With one rank, the
    result may be that rank's tensor itself.

    >>> fold([torch.tensor([1, 6]), torch.tensor([3, 3])], "band")
    tensor([1, 2])
    """
    if isinstance(op, PremulSum):
        held, op = [op.times(x) for x in held], "sum"
    if depends_on_order(op, held[0].dtype, len(held)):
        done = fold_in_ring(PAIRS[op], [x.reshape(-1) for x in held], rooted=rooted).view(held[0].shape)
    else:
        done = fold_in_pairs(PAIRS[op], held)
    return divide(done, len(held)) if op == "avg" else done


@lru_cache(256)
def depends_on_order(op: str, dtype: torch.dtype, ranks: int) -> bool:
    """Whether so many ranks are folded in gloo's ring: the order of more is ours, and that of others makes no difference.

    >>> depends_on_order("sum", torch.float32, 4), depends_on_order("sum", torch.float32, 2)
    (True, False)
    """
    return 2 < ranks <= MAX_SEQUENTIAL and op in ("sum", "avg", "product") and _is_inexact(dtype)


def fold_in_ring(pair: Callable[[Tensor, Tensor], Tensor], held: Sequence[Tensor], *, rooted: bool = False) -> Tensor:
    """The fold of the ranks' tensors of shape [..., elements] in the order of gloo's ring.

    The elements are cut into as many chunks as there are ranks.  Chunk k starts at rank k - 1 and passes ranks k - 2,
    k - 3, ... until it ends at rank k (gloo/allreduce.cc, gloo/reduce.cc; tests/real compares with gloo processes).

    >>> tens = [torch.full([4], 10.0**n) for n in range(3)]
    >>> fold_in_ring(lambda a, b: a * 2 + b, tens)
    tensor([421., 421., 214., 214.])
    """
    if held[0].is_complex():  # gloo adds them as pairs of floats, and cuts between the two
        flat = [torch.view_as_real(x.resolve_conj()).flatten(-2) for x in held]
        return torch.view_as_complex(fold_in_ring(pair, flat, rooted=rooted).unflatten(-1, (-1, 2)))
    ranks = len(held)
    elements = held[0].shape[-1]
    chunk = _ring_chunk(elements, ranks, held[0].element_size(), rooted)
    count = -(-elements // chunk)
    if count <= 1:
        return reduce(pair, held[::-1])
    if elements <= MAX_COPIED:
        return _fold_chunks_at_once(pair, held, chunk, count)
    chunks = zip(*[x.split(chunk, -1) for x in held], strict=True)
    return torch.cat([reduce(pair, (*chunk[:k][::-1], *chunk[k:][::-1])) for k, chunk in enumerate(chunks)], -1)


MAX_COPIED = 8192
"""Elements up to which one op serves all chunks: it copies each rank's tensor twice, and of four ranks or more takes less time."""


def _fold_chunks_at_once(
    pair: Callable[[Tensor, Tensor], Tensor], held: Sequence[Tensor], chunk: int, count: int
) -> Tensor:
    """As `fold_in_ring`, by `ranks - 1` calls of `pair` in all.

    The ranks' tensors lie twice below each other, from the last rank to the first, so that the parts of chunk k begin in
    row `ranks - k`.  Counted from the last chunk, each begins one row below the one before, and one chunk to the left.
    """
    ranks, elements = len(held), held[0].shape[-1]
    rows = torch.stack((*held[::-1], *held[::-1]))
    if elements != count * chunk:
        rows = torch.nn.functional.pad(rows, (0, count * chunk - elements))
    row, *others, _ = rows.stride()
    steps = rows.as_strided(
        (ranks, *held[0].shape[:-1], count, chunk),
        (row, *others, row - chunk, 1),
        (ranks - count + 1) * row + (count - 1) * chunk,
    )
    return reduce(pair, steps.unbind()).flip(-2).flatten(-2)[..., :elements]


MAX_SEGMENT = 1 << 20  # bytes: gloo's kMaxSegmentSize


@lru_cache(1024)
def _ring_chunk(elements: int, ranks: int, itemsize: int, rooted: bool) -> int:
    """The elements of each chunk, whose two or more segments have whole elements and at most `MAX_SEGMENT` bytes.

    >>> _ring_chunk(1001, 4, 4, False), _ring_chunk(5_000_001, 4, 4, False), _ring_chunk(5_000_001, 4, 4, True)
    (252, 1250005, 1310720)
    """
    size, least = elements * itemsize, 2 * ranks
    if rooted:
        segment = min(-(-size // least), MAX_SEGMENT)
        segment = max(1, -(-segment // itemsize))
        count = -(-elements // segment)
    else:
        count = -(-size // MAX_SEGMENT)
    each = -(-max(count, least) // ranks)
    return each * (segment if rooted else max(1, -(-size // (each * ranks * itemsize))))


# -- partial values


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


AND_KINDS = ("min", "product")
"""The reductions of bools that are "and"; the others are "or"."""


def is_reducible(kind: str, dtype: torch.dtype) -> bool:
    """Whether partial values of this dtype are defined for this reduction.

    Booleans add and multiply as "or" and "and", as gloo and nccl reduce them.
    """
    if dtype == torch.bool:
        return kind != "avg"
    if dtype == torch.complex32 or is_float8(dtype):
        return False  # torch cannot add these on a CPU
    if kind == "avg" and dtype in (torch.uint8, torch.int8, torch.int16):
        return False  # their sums wrap, and a wrapped sum divided is no average
    return not (dtype.is_complex and kind in ("min", "max"))


def is_unambiguous(kind: str, dtype: torch.dtype) -> bool:
    """Whether all backends agree on the reduction: `is_reducible`, and no average of integers, whose rounding differs."""
    return is_reducible(kind, dtype) and (kind != "avg" or _is_inexact(dtype))


def is_arithmetic(kind: str, dtype: torch.dtype) -> bool:
    """Whether a partial value is one to compute with: `is_unambiguous`, no sum or product of booleans, no complex product.

    True + True is True: a sum of booleans is their "or", and twice it is no sum of twice the parts.  No backend multiplies
    complex numbers.  DTensor cannot gather an average of integers over gloo: the division gives floats.
    """
    if dtype == torch.bool or (dtype.is_complex and kind == "product"):
        return kind in ("min", "max")
    return is_unambiguous(kind, dtype)


def fold_partials(held: Tensor, kind: str) -> Tensor:
    """The value of all ranks' partial values: `held` has shape [ranks, *shape], the result has `shape`.

    min and max let NaN through, as torch.minimum and torch.maximum do.  An average of integers is float64, so that a
    sum that does not divide differs from one that does.  Raises `NotReducible` unless `is_reducible`.
    """
    if not is_reducible(kind, held.dtype):
        raise NotReducible("partials.fold", kind, held.dtype)
    if held.dtype == torch.bool:
        return held.all(0) if kind in AND_KINDS else held.any(0)
    if kind in ("min", "max"):
        return held.amin(0) if kind == "min" else held.amax(0)
    if kind == "product":
        return held.prod(0, dtype=held.dtype)
    total = held.sum(0, dtype=held.dtype)
    return total if kind == "sum" else divide(total if _is_inexact(held.dtype) else total.double(), held.shape[0])
