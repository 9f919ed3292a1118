"""`assert_same_on_all_ranks`, and comparisons of values: where two differ, and by how much."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.call_sites import origin
from localtensor._util.events import Place
from localtensor.collectives.rendezvous import Contribution
from localtensor.errors import CollectiveFailed, RanksDisagree
from localtensor.layout.spec import shape_text
from localtensor.layout.tolerance import is_float8


def assert_same_on_all_ranks(value: object, what: str = "value", *, group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank of the group passes the same value; a collective call, like a barrier.

    Tensors are compared bit for bit (NaN equals NaN), modules by their state, containers item by item, anything else
    by ==.  Works in rank threads and in real processes.  Raises `RanksDisagree` on all ranks.

    >>> from localtensor import run
    >>> run(lambda: assert_same_on_all_ranks(torch.ones(2)), ranks=2).values
    (None, None)
    """
    simulation = simulation_of_this_rank()
    place = origin(sys._getframe(1)).place
    mine = _copied(value)
    if simulation is None:
        held: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(held, (dist.get_rank(), mine, place), group=group)
        _compare(what, {rank: theirs for rank, theirs, _ in held}, {rank: where for rank, _, where in held})
        return
    rank = simulation.rank()
    world: Any = dist.distributed_c10d._world
    ours = world.groups[group or dist.group.WORLD]
    kind = "assert_same_on_all_ranks"
    line = None if place is None else (place.file, place.line, place.function)
    part = Contribution(rank, kind, ours, mine, (), None, (kind, 0, None, None, (), None, None, None), line=line)
    simulation.wait(
        simulation.contribute(part, lambda parts: _compare_parts(what, parts), lambda result: None, returns_work=False)
    )


def _compare_parts(what: str, parts: Sequence[Contribution]) -> list[None]:
    try:
        _compare(what, {part.rank: part.inputs for part in parts}, {part.rank: part.place for part in parts})
    except RanksDisagree:
        raise
    except Exception as problem:  # why: the == of a user's class may raise anything
        raise CollectiveFailed([part.call() for part in parts], f"{type(problem).__name__}: {problem}") from problem
    return [None for _ in parts]


def _compare(what: str, values: Mapping[int, Any], places: Mapping[int, Place | None]) -> None:
    first = min(values)
    for rank, value in values.items():
        for path, a, b in differences(values[first], value):
            texts = {one: short_text(_value_at(theirs, path)) for one, theirs in values.items()}
            where = what + "".join(f"[{key!r}]" for key in path)
            raise RanksDisagree(where, texts, places, f"rank {rank} from rank {first} {difference_text(a, b)}".strip())


def _copied(value: object) -> Any:
    """A private copy: plain containers of tensors and values."""
    if isinstance(value, torch.nn.Module):
        return {name: _copied(x) for name, x in value.state_dict().items()}
    if isinstance(value, Tensor):
        return getattr(value, "_local_tensor", value).detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(x) for key, x in value.items()}
    return [_copied(x) for x in value] if isinstance(value, list | tuple) else value


def differences(a: object, b: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Each place at which two values differ: the keys that lead to it, and both values there."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if not same_bits(a, b):
            yield path, a, b
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            yield path, a, b
        else:
            for key in a:
                yield from differences(a[key], b[key], (*path, key))
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            yield path, a, b
        else:
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                yield from differences(x, y, (*path, i))
    elif type(a) is not type(b) or not _equal(a, b):
        yield path, a, b


def _equal(a: Any, b: Any) -> bool:
    if hasattr(a, "__array__") and hasattr(b, "__array__"):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  # an element unlike itself is NaN
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype, layout and elements are equal; NaN counts as equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    a, b = comparable(a), comparable(b)
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return not _differing(a, b).any()


def comparable(x: Tensor) -> Tensor:
    """The same elements in a layout and dtype that torch can compare: sparse tensors, float8 and complex32 have no ==."""
    dense = x if x.layout == torch.strided else x.to_dense()
    if dense.dtype == torch.complex32:
        return dense.to(torch.complex64)
    return dense.float() if is_float8(dense.dtype) else dense


def _differing(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


def _value_at(value: Any, path: Sequence[Any]) -> object:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return value
    return value


def short_text(value: object) -> str:
    """A value in short form."""
    if isinstance(value, Tensor):
        text = shape_text(value.shape, value.dtype)
        value = comparable(value)
        return f"{text} {value.tolist()}" if value.numel() <= 8 else f"{text} {value.flatten()[:6].tolist()}..."
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def difference_text(a: object, b: object) -> str:
    """By how much two tensors of one shape and dtype differ; empty for other values."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype and a.numel():
        a, b = comparable(a), comparable(b)
        differ = int(_differing(a, b).sum())
        far = f", by up to {(a.double() - b.double()).abs().max().item():.3g}" if a.is_floating_point() else ""
        return f"in {differ} of {a.numel()} elements{far}"
    return ""
