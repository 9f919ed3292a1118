"""Calls rewritten as other calls: out= as the op and a copy; lists of tensors in groups of one partition; operators that take functions."""

from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _python_dispatch

from localtensor._util.call_sites import Args, Fn, Kwargs
from localtensor.errors import NotInLockstep
from localtensor.lockstep.values.local_tensor import Mode
from localtensor.lockstep.values.partition import Partition, refinement

aten = torch.ops.aten
# Ops on lists of tensors that treat each place of the lists alike and by itself.
LIST_OP_PREFIXES = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")


def rewrite_function(op: OpOverload) -> Callable[..., Any] | None:
    """The function that rewrites calls of this overload; None if there is none.

    It returns `NotImplemented` for a call that has to run as it is.
    """
    functional = functional_overload(op)
    if functional is not None:
        return lambda mode, func, traits, args, kwargs: _run_functional(mode, func, functional, args, kwargs)
    if op.overloadpacket.__name__.startswith(LIST_OP_PREFIXES) and len(op._schema.returns) < 2:
        return _run_by_partition
    return None


def functional_overload(op: OpOverload) -> OpOverload | None:
    """The overload that computes the same without out=; None if there is none.

    >>> functional_overload(torch.ops.aten.add.out)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    if not any(argument.is_out for argument in op._schema.arguments):
        return None
    wanted = _input_types(op)
    packet = op.overloadpacket
    for name in packet.overloads():
        other: OpOverload = getattr(packet, name)
        if not any(argument.is_out for argument in other._schema.arguments) and _input_types(other) == wanted:
            return other
    return None


def _input_types(op: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments if not argument.is_out]


# -- ops of programs


_ONE_RANK = "it has the tensors of one rank, and no other comes to it"
_communicating: set[str] = set()
"""The names of custom ops that were found to communicate."""


def run_custom_op(run_op: Fn) -> Fn:
    """The function that runs an op that is defined in Python: by `run_op`, on each different value, or where it communicates as it is written."""

    def run(mode: Mode, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        name = func._schema.name
        if name not in _communicating:
            try:
                return run_op(mode, func, args, kwargs)
            except RuntimeError as error:
                if not is_lost_collective(error):
                    raise
            if func._schema.is_mutable:
                raise NotInLockstep(str(func), "it communicates, and may have written to tensors of one rank before")
            _communicating.add(name)
        return OPDEFS[name]._init_fn(*args, **kwargs)

    return run


def is_lost_collective(error: BaseException) -> bool:
    """Whether a collective has come to the backend of a group in lockstep, which has the tensors of one rank and would move nothing."""
    return "error_on_collective" in str(error)


def refuse_lost_collective(error: RuntimeError, call: str) -> None:
    """Raises `NotInLockstep` if the error is that of a collective in a function that runs for one rank at a time."""
    if is_lost_collective(error):
        raise NotInLockstep(call, _ONE_RANK) from error


def _run_functional(mode: Mode, func: OpOverload, functional: OpOverload, args: Args, kwargs: Kwargs) -> object:
    given = [argument.name for argument in func._schema.arguments if argument.is_out]
    outs = list(_tensors([kwargs[name] for name in given]))
    try:
        values = list(_tensors(mode.run(functional, args, {k: v for k, v in kwargs.items() if k not in given})))
    except RuntimeError:  # the op itself raises, or runs what the other cannot
        return NotImplemented
    if len(values) != len(outs) or not all(
        torch.can_cast(v.dtype, out.dtype) for v, out in zip(values, outs, strict=True)
    ):
        return NotImplemented
    for value, out in zip(values, outs, strict=True):
        if _shapes_differ(value.shape, out.shape):
            mode.run(aten.resize_.default, (out, value.shape), {})
    if any(value.dtype != out.dtype for value, out in zip(values, outs, strict=True)):
        return NotImplemented  # the op converts by itself: a sum accumulates in the dtype of its out
    for value, out in zip(values, outs, strict=True):
        mode.run(aten.copy_.default, (out, value), {})
    if not func._schema.returns:
        return None
    return outs[0] if len(func._schema.returns) == 1 else tuple(outs)


def _shapes_differ(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes differ on some rank."""
    return len(one) != len(other) or any(
        type(a) is not type(b) or (a != b if type(a) is int else (a.node.values != b.node.values).any())
        for a, b in zip(one, other, strict=True)
    )


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Tensor):
        yield value


def _run_by_partition(mode: Mode, func: OpOverload, traits: Any, args: Args, kwargs: Kwargs) -> object:
    """Places whose tensors refine to one partition run together, so that a tensor that ranks share stays shared."""
    length = len(args[0])
    parallel = [isinstance(value, list | tuple) and len(value) == length for value in args]
    groups: dict[Partition | None, list[int]] = {}
    for place in range(length):
        key = None
        for value, is_parallel in zip(args, parallel, strict=True):
            held = getattr(value[place], "_partition", None) if is_parallel else None
            if held is not None:
                key = held if key is None else refinement(key, held)
        groups.setdefault(key, []).append(place)
    if len(groups) < 2:
        return NotImplemented
    results: list[Any] = [None] * length
    for places in groups.values():
        some = [[value[i] for i in places] if own else value for value, own in zip(args, parallel, strict=True)]
        done = mode.run(func, tuple(some), kwargs)
        if done is not None:
            for place, result in zip(places, done, strict=True):
                results[place] = result
    return results if traits.returns else None


# -- operators that take functions, such as FlexAttention's


def run_as_written(mode: Mode, func: HigherOrderOperator, args: Args, kwargs: Kwargs) -> Any:
    """An operator that takes functions, by torch's eager kernel, whose ops run on every rank.

    Raises `NotInLockstep` if it has none, `RanksDiverge` where the ranks differ in the function to run.
    """
    kernel = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    if kernel is None:
        raise NotInLockstep(f"torch.ops.higher_order.{func.name()}", "torch has no eager kernel of it")
    code = getattr(kernel, "__code__", None)
    if code is None or _CHECK not in code.co_names:
        return _under(mode, kernel)(*args, **kwargs)
    if _CHECK not in kernel.__globals__:  # imported within; the kernel calls a function, and makes no tensor
        return kernel(*(_under(mode, one) if callable(one) else one for one in args), **kwargs)
    unchecked = FunctionType(code, {**kernel.__globals__, _CHECK: lambda: None}, argdefs=kernel.__defaults__)
    unchecked.__kwdefaults__ = kernel.__kwdefaults__
    return _under(mode, unchecked)(*args, **kwargs)


_CHECK = "_get_current_dispatch_mode"  # by which a kernel sees that it runs below all modes


def _under(mode: Any, function: Fn) -> Fn:
    """The function, called under the mode."""

    def called(*args: Any, **kwargs: Any) -> Any:
        _python_dispatch._push_mode(mode)
        try:
            return function(*args, **kwargs)
        finally:
            _python_dispatch._pop_mode()

    called._boxed_call = getattr(function, "_boxed_call", False)  # type: ignore[attr-defined]
    return called
