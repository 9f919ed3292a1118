"""Two runs of one program compared, rank by rank: a simulation against real processes, two schedules, two seeds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from localtensor.collectives.compare import difference_text, differences, short_text

MOST_SHOWN = 12  # differences that are listed; of the others only the number


def assert_same(sim: Sequence[Any], real: Sequence[Any], *, rtol: float = 0, atol: float = 0) -> None:
    """Raises `AssertionError` with the places and distances where two runs have different results on a rank.

    Tensors must have the same shape, dtype and elements (NaN equals NaN), or elements within `rtol` and `atol` as in
    `torch.testing.assert_close`; a DTensor is compared by its local part, containers item by item, floats as tensors
    are, anything else by ==.  `sim` and `real` are results of `run`, or any two sequences by rank.

    >>> assert_same([torch.ones(2), 1], [torch.ones(2), 1])
    >>> assert_same([{"loss": 1.0}], [{"loss": 1.5}])
    Traceback (most recent call last):
    AssertionError: the runs differ on rank 0 of 1:
      rank 0, ['loss']: 1.0 in the first, 1.5 in the second, by 0.5
    """
    _check(sim, real, rtol, atol)
    found = [
        (rank, path, first, second)
        for rank, (one, other) in enumerate(zip(sim, real, strict=True))
        for path, first, second in differences(_plain(one), _plain(other))
        if not _close(first, second, rtol, atol)
    ]
    if found:
        raise AssertionError(_report(found, len(sim)))


def _check(sim: Sequence[object], real: Sequence[object], rtol: float, atol: float) -> None:
    for name, run in (("first", sim), ("second", real)):
        by_rank = isinstance(run, Sequence) and not isinstance(run, str)
        if not by_rank:
            raise AssertionError(f"the {name} is a {type(run).__name__}: compare what run returned, or lists by rank")
    if not (rtol >= 0 and atol >= 0):
        raise AssertionError(f"rtol={rtol}, atol={atol}: a tolerance is 0 or more")
    if len(sim) != len(real):
        raise AssertionError(f"the first run has {len(sim)} ranks, and the second {len(real)}")


def _plain(value: object) -> object:
    """The value in plain containers, with the local part of a DTensor and the state of a module."""
    if isinstance(value, torch.nn.Module):
        return _plain(value.state_dict())
    if isinstance(value, Tensor):
        local = getattr(value, "_local_tensor", value)
        return (local.to_dense() if local.layout != torch.strided else local).detach().cpu()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _close(first: object, second: object, rtol: float, atol: float) -> bool:
    """Whether two values that differ are equal within the tolerances."""
    if not (rtol or atol):
        return False
    if isinstance(first, float | complex) and isinstance(second, float | complex):
        first, second = torch.tensor(first, dtype=torch.complex128), torch.tensor(second, dtype=torch.complex128)
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    wide = torch.complex128 if first.is_complex() else torch.float64  # torch has no such comparison of float8
    return torch.allclose(first.to(wide), second.to(wide), rtol=rtol, atol=atol, equal_nan=True)


def _report(found: Sequence[tuple[int, tuple[Any, ...], Any, Any]], ranks: int) -> str:
    from localtensor.errors.base import rank_names

    lines = [f"the runs differ on {rank_names({rank for rank, *_ in found})} of {ranks}:"]
    for rank, path, first, second in found[:MOST_SHOWN]:
        where = "".join(f"[{key!r}]" for key in path)
        lines.append(f"  rank {rank}{where and ', '}{where}: {'; '.join(_difference_texts(first, second))}")
    if len(found) > MOST_SHOWN:
        lines.append(f"  and {len(found) - MOST_SHOWN} differences more")
    return "\n".join(lines)


def _difference_texts(first: object, second: object) -> Iterator[str]:
    far = difference_text(first, second)
    if isinstance(first, float) and isinstance(second, float):
        far = f"by {abs(first - second):.3g}"
    yield f"{short_text(first)} in the first, {short_text(second)} in the second{far and ', '}{far}"
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.shape == second.shape:
        yield from _largest_difference(first, second)


def _largest_difference(first: Tensor, second: Tensor) -> Iterator[str]:
    """The place and values of the largest difference of two tensors; none for those that are printed whole."""
    if first.dtype != second.dtype or first.numel() <= 8 or first.is_complex():
        return
    apart = (first.double() - second.double()).abs().nan_to_num(nan=float("inf"))
    apart[(first == second) | (first.isnan() & second.isnan())] = 0
    place = [int(index) for index in torch.unravel_index(apart.argmax(), apart.shape)]
    yield f"farthest at {place}: {first[tuple(place)].item()} and {second[tuple(place)].item()}"
