"""The slow reference of lockstep: an op run rank by rank with plain tensors, and the comparison with a lockstep result.

The reference shares no code with stacked execution: it copies each rank's plain tensors, with their strides and shared
memory, and calls the op as that rank's process would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from localtensor._util.call_sites import Args, Fn, Kwargs
from localtensor.collectives.compare import difference_text, short_text
from localtensor.lockstep.dispatch.execute import equal_or_nan
from localtensor.lockstep.mode import LocalTensorMode, current_mode
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.rank_int import is_rank_int, on_rank
from localtensor.lockstep.values.stacks import dense_strides, is_in_blocks

T = TypeVar("T")

NOISE_DRAWS = 16


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """One rank's outcome: the result, or the error of the op, and its own arguments after the call."""

    result: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class LockstepDifference:
    """One place at which lockstep and the twin differ: `what` is "value", "stride", "shape", "dtype" or the like."""

    rank: int
    place: str
    what: str
    lockstep: object
    alone: object

    def __str__(self) -> str:
        far = difference_text(self.lockstep, self.alone)
        values = f"{short_text(self.lockstep)} in lockstep, {short_text(self.alone)} alone"
        return f"rank {self.rank}, {self.place}: {self.what}: {values}{far and ', '}{far}"


def check_op(op: Callable[..., T], *args: object, **kwargs: object) -> T:
    """The result of the op in lockstep, after a check that each rank alone gets the same.

    Compared are values, bit for bit or, of floating point, within the measured `envelope` of the op; shapes, strides
    and dtypes; and the arguments after the call.  Raises `AssertionError`, or the error of the op alone.

    >>> from localtensor import LocalTensorMode, rank_map
    >>> with LocalTensorMode(2):
    ...     check_op(torch.mul, rank_map(torch.tensor), 10)
    LocalTensor(2 ranks, 2 different values,
      rank 0: tensor(0),
      rank 1: tensor(10))
    """
    mode = current_mode("check_op")
    twin = rank_by_rank(op, *args, **kwargs)
    with mode.disable():
        before = {rank: rank_copy((args, kwargs), rank, {}) for rank in twin}
    result = op(*args, **kwargs)
    found = differences_from_reference(twin, result, args, kwargs)
    with mode.disable():
        far = [one for one in found if one.what != "value" or not within_envelope(one, envelope(op, *before[one.rank]))]
    if far:
        raise AssertionError("\n".join([f"{op} in lockstep is not what it is alone:", *map(str, far)]))
    return result


def rank_by_rank(op: Fn, *args: object, **kwargs: object) -> dict[int, RankOutcome]:
    """The outcome of the op on each rank that holds all operands, by a plain loop; the operands are not changed.

    >>> from localtensor import LocalTensorMode, rank_map
    >>> with LocalTensorMode(2):
    ...     {rank: alone.result for rank, alone in rank_by_rank(torch.neg, rank_map(torch.tensor)).items()}
    {0: tensor(0), 1: tensor(-1)}
    """
    mode = current_mode("rank_by_rank")
    held = set(mode.ranks).intersection(*(x.ranks for x in leaves((args, kwargs)) if isinstance(x, LocalTensor)))
    return {rank: _run_alone(mode, op, args, kwargs, rank) for rank in sorted(held)}


def _run_alone(mode: LocalTensorMode, op: Fn, args: Args, kwargs: Kwargs, rank: int) -> RankOutcome:
    with mode.disable():
        blocks: dict[Any, Tensor] = {}
        mine, named = rank_copy(args, rank, blocks), rank_copy(kwargs, rank, blocks)
        stream = mode.streams.of(kwargs.get("generator"))
        before = stream.generator.get_state()
        stream.generator.set_state(stream.state_on(rank))
        try:
            return RankOutcome(op(*mine, **named), mine, named)
        except Exception as error:  # why: any error of the op is the expected outcome of lockstep
            return RankOutcome(None, mine, named, error)
        finally:
            stream.generator.set_state(before)


def rank_copy(value: object, rank: int, blocks: dict[Any, Tensor]) -> Any:
    """A rank's value in private copies, which share memory where its tensors do."""
    if isinstance(value, Tensor):
        if id(value) not in blocks:  # a tensor passed twice stays one tensor
            blocks[id(value)] = _rank_copy(value, rank, blocks) if isinstance(value, LocalTensor) else value.clone()
        return blocks[id(value)]
    if isinstance(value, list | tuple):
        return type(value)([rank_copy(one, rank, blocks) for one in value])
    if isinstance(value, dict):
        return {name: rank_copy(one, rank, blocks) for name, one in value.items()}
    return on_rank(value, rank) if is_rank_int(value) else value


def _rank_copy(x: LocalTensor, rank: int, blocks: dict[Any, Tensor]) -> Tensor:
    row = x.__localtensor_on__(rank)
    if row.layout is not torch.strided or row.is_meta or not row.numel():
        return row.clone()
    cell, _ = x._partition.place(rank)
    whole, rows = x._cells[cell], x._partition.sizes[cell]
    if rows > 1 and not is_in_blocks(whole):
        return _strided_copy(row)
    key = "memory", id(x if x._memory is None else x._memory)
    if key not in blocks:
        step = whole.untyped_storage().nbytes() // rows
        start = (row.storage_offset() - whole.storage_offset()) * row.element_size()
        blocks[key] = torch.tensor([], dtype=torch.uint8).set_(row.untyped_storage())[start : start + step].clone()
    found: Tensor = torch.tensor([], dtype=row.dtype).set_(
        blocks[key].untyped_storage(), whole.storage_offset(), row.shape, row.stride()
    )
    return _with_bits_of(row, found)


def _with_bits_of(row: Tensor, fresh: Tensor) -> Tensor:
    fresh = torch._conj(fresh) if row.is_conj() else fresh
    return torch._neg_view(fresh) if row.is_neg() else fresh


def _strided_copy(x: Tensor) -> Tensor:
    """A copy with the same strides, also those of 0."""
    fresh = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    once = [1 if step == 0 else size for size, step in zip(x.shape, x.stride(), strict=True)]
    fresh.as_strided(once, x.stride()).copy_(x.as_strided(once, x.stride()))
    return _with_bits_of(x, fresh)


def differences_from_reference(
    twin: Mapping[int, RankOutcome], result: object, args: Args | None = None, kwargs: Kwargs | None = None
) -> list[LockstepDifference]:
    """The differences of lockstep from the reference: in the result, and in the arguments after the call.

    Compared are values bit for bit (all NaN are equal), shape, dtype, layout and strides, and which returned tensors
    are arguments.  Without `args`, only the result is compared.
    """
    with current_mode("against").disable():
        return list(_differences(twin, result, args, kwargs or {}))


def _differences(
    twin: Mapping[int, RankOutcome], result: object, args: Args | None, kwargs: Kwargs
) -> Iterator[LockstepDifference]:
    for rank, alone in twin.items():
        if alone.error is not None:
            raise alone.error
        yield from value_differences(rank, "result", result, alone.result)
        if args is None:
            continue
        yield from value_differences(rank, "argument", tuple(args), tuple(alone.args))
        yield from value_differences(rank, "argument", kwargs, alone.kwargs)
        mine = _returned_arguments(result, args, kwargs)
        theirs = _returned_arguments(alone.result, alone.args, alone.kwargs)
        if mine != theirs:
            yield LockstepDifference(rank, "result", "identity", mine, theirs)


def _returned_arguments(result: object, args: Args, kwargs: Kwargs) -> list[int]:
    """For each tensor of the result, the index of the argument that it is, or -1."""
    given = [id(x) for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    return [given.index(id(x)) if id(x) in given else -1 for x in leaves(result) if isinstance(x, Tensor)]


def value_differences(rank: int, place: str, mine: object, alone: object) -> Iterator[LockstepDifference]:
    """The differences of a value in lockstep from the value of one rank."""
    if isinstance(mine, LocalTensor):
        mine = mine.__localtensor_on__(rank)
    if isinstance(mine, Tensor) and isinstance(alone, Tensor):
        yield from _tensor_differences(rank, place, mine.detach(), alone.detach())
    elif isinstance(mine, dict) and isinstance(alone, dict):
        for name in alone:
            yield from value_differences(rank, f"{place} {name}", mine[name], alone[name])
    elif isinstance(mine, list | tuple) and isinstance(alone, list | tuple):
        if type(mine) is not type(alone) or len(mine) != len(alone):
            yield LockstepDifference(rank, place, "structure", mine, alone)
            return
        for number, (one, other) in enumerate(zip(mine, alone, strict=True)):
            yield from value_differences(rank, f"{place} {number}", one, other)
    elif not same_value(on_rank(mine, rank) if is_rank_int(mine) else mine, alone):
        yield LockstepDifference(rank, place, "value", mine, alone)


def same_value(one: object, other: object) -> bool:
    """Equal and of one type, or both not a number."""
    return type(one) is type(other) and (one is other or equal_or_nan(one, other))


def _tensor_differences(rank: int, place: str, mine: Tensor, alone: Tensor) -> Iterator[LockstepDifference]:
    for what in ("dtype", "layout", "device", "shape"):
        if getattr(mine, what) != getattr(alone, what):
            yield LockstepDifference(rank, place, what, getattr(mine, what), getattr(alone, what))
            return
    differ = mine.layout is torch.strided and significant_strides(mine) != significant_strides(alone)
    if differ and list(mine.stride()) != list(dense_strides(alone.shape, alone.stride())[0]):
        # Not only in gaps between elements, which a stack of fresh results does not have.
        yield LockstepDifference(rank, place, "stride", mine.stride(), alone.stride())
    if not same_to_the_bit(mine, alone):
        yield LockstepDifference(rank, place, "value", mine, alone)


def significant_strides(x: Tensor) -> list[int | None]:
    """The significant strides: None for a dim of one element, and for an empty tensor."""
    return [step if size > 1 and x.numel() else None for size, step in zip(x.shape, x.stride(), strict=True)]


def same_to_the_bit(one: Tensor, other: Tensor) -> bool:
    """Whether all elements and signs are equal, also signs of zeros; all NaN are equal."""
    if one.is_meta:
        return True
    one, other = _comparable(one), _comparable(other)
    if not one.is_floating_point():
        return torch.equal(one, other)
    alike = (one == other) & (one.signbit() == other.signbit()) | one.isnan() & other.isnan()
    return bool(alike.all())


def _comparable(x: Tensor) -> Tensor:
    x = (x if x.layout is torch.strided else x.to_dense()).resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def leaves(value: object) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def within_envelope(difference: LockstepDifference, envelope_size: float) -> bool:
    """Whether two floating-point values differ by at most `envelope_size`, with equal places of NaN and infinities."""
    mine, alone = difference.lockstep, difference.alone
    if difference.what != "value" or not isinstance(mine, Tensor) or not isinstance(alone, Tensor):
        return False
    if mine.shape != alone.shape or not (mine.is_floating_point() or mine.is_complex()):
        return False
    return bool(_apart(mine, alone) <= envelope_size)


def envelope(op: Fn, args: Args, kwargs: Kwargs) -> float:
    """The measured rounding error of the op for plain arguments, which are not changed.

    It is the larger of two numbers: the change of the results when arguments move by one unit in the last place with
    random signs, and twice the distance to the same op in double precision, since two results may err in opposite
    directions.  If both are 0, because all arguments are ints, it is measured with these in single precision.
    """
    envelope_size = _envelope(op, tuple(args), dict(kwargs))
    try:
        return envelope_size or _envelope(op, _in_single_precision(tuple(args)), _in_single_precision(dict(kwargs)))
    except (RuntimeError, TypeError, IndexError):  # an index must be an int
        return envelope_size


def _envelope(op: Fn, args: Args, kwargs: Kwargs) -> float:
    results, given, left = _outcome(op, args, kwargs, lambda x: x)
    written = [not same_to_the_bit(one, other) for one, other in zip(given, left, strict=True)]
    before = [*results, *(x for x, is_written in zip(left, written, strict=True) if is_written)]

    def apart(change: Callable[[Tensor], Tensor]) -> float:
        results, _, left = _outcome(op, args, kwargs, change)
        after = [*results, *(x for x, is_written in zip(left, written, strict=True) if is_written)]
        return max((_apart(one, other) for one, other in zip(before, after, strict=True)), default=0.0)

    envelope_size = max(apart(partial(_nudged, torch.Generator().manual_seed(draw))) for draw in range(NOISE_DRAWS))
    try:
        return max(envelope_size, 2 * apart(_doubled))
    except (RuntimeError, TypeError):  # the op does not support double precision
        return envelope_size


def _outcome(op: Fn, args: Args, kwargs: Kwargs, change: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], ...]:
    """The op's results for changed arguments, these arguments before the call, and after it."""

    def changed(value: object) -> Any:
        if isinstance(value, Tensor):
            copy = _strided_copy(value) if value.layout is torch.strided else value.clone()
            return change(copy) if value.is_floating_point() or value.is_complex() else copy
        if isinstance(value, list | tuple):
            return type(value)([changed(one) for one in value])
        return value

    mine = changed(tuple(args)), {name: changed(value) for name, value in kwargs.items()}
    given = [x.clone() for x in _floating_tensors(mine)]
    state = torch.default_generator.get_state()
    result = op(*mine[0], **mine[1])
    torch.default_generator.set_state(state)
    return _floating_tensors(result), given, _floating_tensors(mine)


def _in_single_precision(value: object) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() or value.is_complex() else value.float()
    if isinstance(value, dict):
        return {name: _in_single_precision(one) for name, one in value.items()}
    return type(value)([_in_single_precision(one) for one in value]) if isinstance(value, list | tuple) else value


def _floating_tensors(value: object) -> list[Tensor]:
    """The floating-point and complex tensors of a value."""
    found = [x for x in leaves(value) if isinstance(x, Tensor)]
    return [x for x in found if x.is_floating_point() or x.is_complex()]


def _nudged(generator: torch.Generator, x: Tensor) -> Tensor:
    if x.is_complex():
        pairs = torch.view_as_real(x.resolve_conj().resolve_neg()).contiguous()
        return torch.view_as_complex(_nudged(generator, pairs))
    if x.element_size() < 2 or x.layout is not torch.strided:
        return x
    towards = torch.randint(0, 2, x.shape, generator=generator) * 2.0 - 1
    moved = torch.nextafter(x, (towards * float("inf")).to(x.dtype))
    return moved.where(x.isfinite(), x)


def _doubled(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest distance of two elements; infinite where one is finite, and the other not."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    one, other = _comparable(one).double(), _comparable(other).double()
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0).max())
