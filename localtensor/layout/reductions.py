"""Reductions as arithmetic: the tensor that many ranks' tensors fold into, in rank order, in their own dtype.

What may be reduced is what gloo reduces, tried on gloo processes of torch 2.13.0; the tests in tests/real
hold it there.  In three places this room differs from gloo, on purpose:

* min and max let NaN through, whichever rank holds it.  In gloo it depends on the order of the ranks.
* `PremulSum` exists, though gloo refuses it: NCCL has it (ReduceOp.PREMUL_SUM, ProcessGroupNCCL.cpp).
* torch.complex32 is refused, though gloo adds it: torch itself calls it experimental and cannot divide it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from localtensor.errors import DtypeNotReducible, UnknownReduction
from localtensor.layout.fold_order import by_pairs

Fold: TypeAlias = Callable[[Sequence[Tensor]], Tensor]

# What gloo's collectives take ("Invalid scalar type" is its word for the rest); send and recv take anything.
CARRIED = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip
_WIDER = {torch.uint32: torch.int64, torch.uint64: torch.int64, torch.complex32: torch.complex64}


@dataclass(frozen=True, slots=True)
class PremulSum:
    """The sum of each rank's tensor times one factor, which is first rounded to the tensors' dtype.

    >>> PremulSum(0.5)([torch.tensor([2.0]), torch.tensor([4.0])])
    tensor([3.])
    """

    factor: float

    def __call__(self, held: Sequence[Tensor]) -> Tensor:
        return total([self.times(x) for x in held])

    def times(self, x: Tensor) -> Tensor:
        """What one rank brings, times the factor."""
        return x * torch.tensor(self.factor, dtype=x.dtype, device=x.device)


Op: TypeAlias = str | PremulSum


def total(held: Sequence[Tensor]) -> Tensor:
    """The sum.  Integers wrap around, a sum of bools is their 'or'; both as in gloo."""
    return by_pairs(torch.add, held)


def mean(held: Sequence[Tensor]) -> Tensor:
    """The sum, then divided: so it overflows where the sum does, as in gloo."""
    return divided(total(held), len(held))


def divided(x: Tensor, count: int) -> Tensor:
    """x / count; of complex numbers each part by itself, as gloo does: torch divides 49 by 7 so that 7.000000477 is left.

    >>> divided(torch.tensor([49 + 14j]), 7)
    tensor([7.+2.j])
    """
    return torch.view_as_complex(torch.view_as_real(x.resolve_conj()) / count) if x.is_complex() else x / count


def _folding(pair: Callable[[Tensor, Tensor], Tensor]) -> Fold:
    return lambda held: by_pairs(pair, held)


FOLDS: dict[str, Fold] = {
    "sum": total,
    "avg": mean,
    "product": _folding(torch.mul),
    "min": _folding(torch.minimum),
    "max": _folding(torch.maximum),
    "band": _folding(torch.bitwise_and),
    "bor": _folding(torch.bitwise_or),
    "bxor": _folding(torch.bitwise_xor),
}

# The kinds of number that each reduction has in gloo; for premul_sum, in NCCL.
TAKES: dict[str, tuple[str, ...]] = {
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


def name_of(op: Op) -> str:
    """The name by which tables and messages call a reduction."""
    return "premul_sum" if isinstance(op, PremulSum) else op


def kind_of(dtype: torch.dtype) -> str:
    """One of bool, integer, float, complex.

    >>> kind_of(torch.bfloat16)
    'float'
    """
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def carrier(dtype: torch.dtype) -> torch.dtype:
    """The narrowest carried dtype that holds every value of this one (of uint64: every bit).

    >>> carrier(torch.int16), carrier(torch.float8_e5m2), carrier(torch.bool)
    (torch.int32, torch.float32, torch.bool)
    """
    if dtype in CARRIED:
        return dtype
    return _WIDER.get(dtype, torch.float32 if dtype.is_floating_point else torch.int32)


def check_reducible(call: str, op: Op, dtype: torch.dtype) -> None:
    """Nothing happens if a collective can reduce this dtype so.

    Raises `UnknownReduction` for a name that is not in `FOLDS`, `DtypeNotReducible` for a kind of
    number that is not in `TAKES`.
    """
    if not isinstance(op, PremulSum) and (not isinstance(op, str) or op not in FOLDS):
        raise UnknownReduction(call, op, list(FOLDS))
    if kind_of(dtype) not in TAKES[name_of(op)]:
        raise DtypeNotReducible(call, name_of(op), dtype, kind_of(dtype))


def fold(held: Sequence[Tensor], op: Op) -> Tensor:
    """What the ranks' tensors fold into: equal shapes and dtypes in, one such tensor out.

    With one rank, the result may be that rank's tensor itself.

    >>> fold([torch.tensor([1, 6]), torch.tensor([3, 3])], "band")
    tensor([1, 2])
    """
    return op(held) if isinstance(op, PremulSum) else FOLDS[op](held)


def premultiplied(op: Op, x: Tensor) -> tuple[str, Tensor]:
    """The reduction without its factor, which has gone into what the ranks bring."""
    return ("sum", op.times(x)) if isinstance(op, PremulSum) else (op, x)
