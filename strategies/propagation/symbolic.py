"""Symbolic sizes in a propagation: a rule answers once for all sizes on which it would answer alike.

While `torch.compile` or `make_fx` records a graph with dynamic shapes, sizes are SymInts.  A rule asks its questions about them
(is it even, is it 1, are these two equal) to a `SymbolicSize`, which torch answers for the example at hand, and remembers as a guard of
the graph: for other sizes with the same answers the plan is the same.  Costs are those of the example, and make no guard.

Where a rule needs a number (to hash, to count up to), the size is made concrete, which is a guard for this size alone; `why_concrete`
of the log `localtensor.propagation` says for which op and why.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.utils import _pytree as pytree

from strategies.model.rule import Call, flat_results
from strategies.propagation.meta_run import no_caller_modes
from strategies.torch_api.dtensor import meta_of

_LOG = logging.getLogger("localtensor.propagation")


def _of(value: Any) -> Any:
    return value.number if isinstance(value, SymbolicSize) else value


def _arithmetic(do: Callable[[Any, Any], Any]) -> Callable[[SymbolicSize, Any], Any]:
    def method(self: SymbolicSize, other: Any) -> Any:
        return symbolic(do(self.number, _of(other)))

    return method


def _reversed(do: Callable[[Any, Any], Any]) -> Callable[[SymbolicSize, Any], Any]:
    def method(self: SymbolicSize, other: Any) -> Any:
        return symbolic(do(_of(other), self.number))

    return method


def _comparison(do: Callable[[Any, Any], Any]) -> Any:
    def method(self: SymbolicSize, other: Any) -> bool:
        return bool(do(self.number, _of(other)))

    return method


class SymbolicSize:
    """A SymInt that can be hashed, by the size of the example; comparisons are guards, and so is its use as a number."""

    __slots__ = ("example", "number")

    def __init__(self, number: torch.SymInt) -> None:
        self.number, self.example = number, number.node.hint

    __add__, __radd__ = _arithmetic(operator.add), _reversed(operator.add)
    __sub__, __rsub__ = _arithmetic(operator.sub), _reversed(operator.sub)
    __mul__, __rmul__ = _arithmetic(operator.mul), _reversed(operator.mul)
    __floordiv__, __rfloordiv__ = _arithmetic(operator.floordiv), _reversed(operator.floordiv)
    __mod__, __rmod__ = _arithmetic(operator.mod), _reversed(operator.mod)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)

    def __hash__(self) -> int:
        return hash(self.example)  # equal ones have equal examples

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __neg__(self) -> Any:
        return symbolic(-self.number)

    def __bool__(self) -> bool:
        return bool(self.number != 0)

    def __index__(self) -> int:
        return int(self.number)

    __int__ = __index__

    def __repr__(self) -> str:
        return str(self.number)


def symbolic(size: Any) -> Any:
    """A SymInt as a `SymbolicSize`; any other size as it is."""
    return SymbolicSize(size) if isinstance(size, torch.SymInt) else size


def all_symbolic(value: Any) -> Any:
    """An argument, or the sizes of a tensor, with a `SymbolicSize` for each SymInt."""
    return pytree.tree_map_only(torch.SymInt, SymbolicSize, value)


def all_numbers(value: Any) -> Any:
    """An argument, or sizes, with the SymInt of each `SymbolicSize`."""
    return pytree.tree_map_only(SymbolicSize, lambda size: size.number, value)


def in_numbers(call: Call) -> Call:
    """The call with the SymInt of each `SymbolicSize` among its arguments."""
    return Call(call.op, all_numbers(call.args), all_numbers(call.kwargs))


def contiguous(shape: Sequence[Any], dtype: torch.dtype) -> TensorMeta:
    """The metadata of a contiguous tensor with these sizes."""
    return TensorMeta(torch.Size(shape), tuple(make_contiguous_strides_for(tuple(shape))), dtype)


def examples(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Sizes as integers: those of the example, without a guard."""
    return tuple(size.example if isinstance(size, SymbolicSize) else size for size in sizes)


def has_symbols(sizes: Iterable[Any]) -> bool:
    """Whether a size is a SymInt with an example."""
    return any(isinstance(size, torch.SymInt) and size.node.has_hint() for size in sizes)


def why_concrete(op: str, reason: Exception) -> None:
    """Log that a call is planned for its very sizes, and why."""
    _LOG.info("%s is planned for these sizes alone: %s: %s", op, type(reason).__name__, reason)


def symbolic_metas(call: Call, given: Sequence[TensorMeta]) -> tuple[TensorMeta | None, ...]:
    """Shape, strides and dtype of each result of the call on whole tensors, in the symbols of the graph that is recorded.

    Raises RuntimeError for sizes that are no symbols.
    """
    fakes = detect_fake_mode([size for meta in given for size in meta.shape]) or _fakes_of(given)
    if fakes is None:
        raise RuntimeError("sizes without a symbol, and no graph is recorded")
    with no_caller_modes(), fakes:
        made = [torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="cpu") for m in given]
        return tuple(meta_of(x) if isinstance(x, Tensor) else None for x in flat_results(call(made)))


def _fakes_of(given: Sequence[TensorMeta]) -> FakeTensorMode | None:
    """A mode of fake tensors with the symbols of these sizes."""
    sizes: list[Any] = [size for meta in given for size in meta.shape]
    known = [size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)]
    return FakeTensorMode(shape_env=known[0], allow_non_fake_inputs=True) if known else None
