"""Two runs of one program compared, rank by rank: a simulation against real processes, two schedules, two seeds."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from localtensor.collectives.compare import differences, how_far, said
from localtensor.concurrency import schedule as policies
from localtensor.concurrency.schedule import LONGEST, Schedule
from localtensor.errors import LocalTensorError

MOST_SHOWN = 12  # differences that are listed; how many more there are is said


def assert_same(sim: Sequence[Any], real: Sequence[Any], *, rtol: float = 0, atol: float = 0) -> None:
    """Nothing happens if both runs left the same on each rank; else `AssertionError` says where and how far.

    Tensors have the same shape, dtype and elements (NaN is the same as NaN), or elements within `rtol` and `atol`
    as `torch.testing.assert_close` means them; a DTensor is compared by its local part, containers item by item,
    floats as tensors are, anything else by ==.  Takes what `run` returns, or any two sequences by rank.

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


def _check(sim: Any, real: Any, rtol: float, atol: float) -> None:
    for name, run in (("first", sim), ("second", real)):
        by_rank = isinstance(run, Sequence) and not isinstance(run, str)
        if not by_rank:
            raise AssertionError(f"the {name} is a {type(run).__name__}: compare what run returned, or lists by rank")
    if rtol < 0 or atol < 0:
        raise AssertionError(f"rtol={rtol}, atol={atol}: a tolerance is 0 or more")
    if len(sim) != len(real):
        raise AssertionError(f"the first run has {len(sim)} ranks, and the second {len(real)}")


def _plain(value: Any) -> Any:
    """Plain containers; of a DTensor its local part, of a module its state."""
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


def _close(first: Any, second: Any, rtol: float, atol: float) -> bool:
    """Whether two values that differ are as good as the same."""
    if not (rtol or atol):
        return False
    if isinstance(first, float | complex) and isinstance(second, float | complex):
        first, second = torch.tensor(first, dtype=torch.complex128), torch.tensor(second, dtype=torch.complex128)
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not (first.is_floating_point() or first.is_complex()):
        first, second = first.double(), second.double()
    return torch.allclose(first, second, rtol=rtol, atol=atol, equal_nan=True)


def _report(found: Sequence[tuple[int, tuple[Any, ...], Any, Any]], ranks: int) -> str:
    from localtensor.errors.base import rank_names

    lines = [f"the runs differ on {rank_names({rank for rank, *_ in found})} of {ranks}:"]
    for rank, path, first, second in found[:MOST_SHOWN]:
        where = "".join(f"[{key!r}]" for key in path)
        lines.append(f"  rank {rank}{where and ', '}{where}: {'; '.join(_told(first, second))}")
    if len(found) > MOST_SHOWN:
        lines.append(f"  and {len(found) - MOST_SHOWN} differences more")
    return "\n".join(lines)


def _told(first: Any, second: Any) -> Iterator[str]:
    far = how_far(first, second)
    if isinstance(first, float) and isinstance(second, float):
        far = f"by {abs(first - second):.3g}"
    yield f"{said(first)} in the first, {said(second)} in the second{far and ', '}{far}"
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.shape == second.shape:
        worst = _worst(first, second)
        if worst:
            yield worst


def _worst(first: Tensor, second: Tensor) -> str:
    """Where two tensors are farthest from each other, for those that are too long to be seen whole."""
    if first.dtype != second.dtype or first.numel() <= 8 or first.is_complex():
        return ""
    apart = (first.double() - second.double()).abs().nan_to_num(nan=float("inf"))
    apart[(first == second) | (first.isnan() & second.isnan())] = 0
    at = torch.unravel_index(apart.argmax(), apart.shape)
    place = [int(index) for index in at]
    return f"farthest at {place}: {first[tuple(place)].item()} and {second[tuple(place)].item()}"


# The full examination of a `Schedule`: bring a maker, learn the first promise that it breaks.

_RUNS = [(1, 3), (2, 12), (5, 60), (64, 700)]  # ranks, answers: from texts that list all to those that cannot


def check_schedule(
    make: Callable[[], Schedule],
    *,
    patience: int | None = 1000,
    replay: Callable[[str], Schedule] = policies.replay,
) -> None:
    """The schedules that `make` makes keep every promise of `Schedule`; else an `AssertionError` says which not.

    A rank that can run may be passed over `patience` times in a row; None is for policies that starve ranks, as
    `pct` does.  `replay` reads the texts, in case they are of a form of your own.

    >>> check_schedule(lambda: policies.shuffled(42))
    >>> check_schedule(policies.round_robin, patience=5)
    Traceback (most recent call last):
    AssertionError: check_schedule: 'round_robin': rank 3 could run, and was passed over 5 times in a row
    """
    for program, (ranks, answers) in enumerate(_RUNS):
        schedule = make()
        first = _run(schedule, ranks, answers, program, read=True)
        _run(schedule, ranks + 1, answers // 2, program)  # another run, left half way, to be forgotten
        _check_same(
            schedule,
            "begin does not repeat the run, or reading the text changed it",
            first,
            _run(schedule, ranks, answers, program),
        )
        for so_far in (0, 1, answers // 2, answers):
            want = _run(schedule, ranks, so_far, program)
            _check_replay(schedule, replay, ranks, program, want)
    if patience is not None:
        _run(make(), 5, 4 * patience + 100, 0, patience=patience)


def _run(
    schedule: Schedule, ranks: int, answers: int, program: int, *, read: bool = False, patience: int | None = None
) -> list[int]:
    """What the schedule answers to a made-up program, whose ranks wait for a while after most of their turns."""
    rng = random.Random(program)
    free_at, passed = [0] * ranks, [0] * ranks
    current: int | None = None
    given: list[int] = []
    schedule.begin(ranks)
    while len(given) < answers:
        if read:
            _check_text(schedule)
        if rng.random() < 0.2:
            given.append(_number(schedule, 1 + int(rng.random() * 9)))
            continue
        now = max(len(given), min(free_at))
        runnable = [rank for rank in range(ranks) if free_at[rank] <= now]
        current = _next(schedule, runnable, current)
        given.append(current)
        free_at[current] = now + int(rng.random() * 5)
        passed = [passed[rank] + 1 if rank in runnable and rank != current else 0 for rank in range(ranks)]
        if patience is not None and max(passed) >= patience:
            rank = passed.index(max(passed))
            _fail(schedule, f"rank {rank} could run, and was passed over {patience} times in a row")
    return given


def _next(schedule: Schedule, runnable: list[int], current: int | None) -> int:
    shown = list(runnable)
    rank = schedule.next(runnable, current)
    if runnable != shown:
        _fail(schedule, f"next({shown}, current={current}) changed the list to {runnable}")
    if type(rank) is not int or rank not in runnable:
        _fail(schedule, f"next({shown}, current={current}) answers {rank!r}, which is none of those that can run")
    return rank


def _number(schedule: Schedule, below: int) -> int:
    number = schedule.number(below)
    if type(number) is not int or not 0 <= number < below:
        _fail(schedule, f"number(below={below}) answers {number!r}, which is no int from 0 to {below - 1}")
    return number


def _check_text(schedule: Schedule) -> None:
    text = schedule.text
    if not isinstance(text, str) or not text.isprintable() or not text.strip():
        _fail(schedule, f"its text {text!r} is not one printable line")
    if len(text) > LONGEST:
        _fail(schedule, f"its text has {len(text)} characters, and {LONGEST} are the most")


def _check_replay(
    schedule: Schedule, replay: Callable[[str], Schedule], ranks: int, program: int, want: Sequence[int]
) -> None:
    text = schedule.text
    try:
        again = _run(replay(text), ranks, len(want), program)
    except LocalTensorError as error:
        raise AssertionError(f"check_schedule: {text!r}: it does not replay: {error}") from error
    _check_same(schedule, f"its text {text!r} replays another run", want, again)


def _check_same(schedule: Schedule, fault: str, first: Sequence[int], second: Sequence[int]) -> None:
    for place, (before, after) in enumerate(zip(first, second, strict=True), 1):
        if before != after:
            _fail(schedule, f"{fault}: answer {place} was {before}, and is {after} the second time")


def _fail(schedule: Schedule, fault: str) -> None:
    name = str(schedule.text)
    shown = name if len(name) <= 60 else f"{name[:57]}..."
    raise AssertionError(f"check_schedule: {shown!r}: {fault}")
