"""The contract test of a `Schedule`, for policies of any origin."""

import random
from collections.abc import Callable, Sequence

from localtensor.concurrency import schedule as policies
from localtensor.concurrency.schedule import MOST_TEXT, Schedule
from localtensor.errors import LocalTensorError

_RUNS = [(1, 3), (2, 12), (5, 60), (64, 700)]  # ranks, answers: from texts that list all to those that cannot


def check_schedule(
    make: Callable[[], Schedule],
    *,
    patience: int | None = 1000,
    replay: Callable[[str], Schedule] = policies.replay,
) -> None:
    """Raises `AssertionError` with the first requirement of `Schedule` that the schedules of `make` violate.

    A rank that can run may be passed over fewer than `patience` times in a row; None is for policies that starve ranks,
    as `pct` does.  `replay` reads the texts, for policies with a text format of their own.

    >>> check_schedule(lambda: policies.shuffled(42))
    >>> check_schedule(policies.round_robin, patience=5)
    Traceback (most recent call last):
    AssertionError: check_schedule: 'round_robin': rank 3 could run, and was passed over 5 times in a row
    """
    for program, (ranks, answers) in enumerate(_RUNS):
        schedule = make()
        first = _run(schedule, ranks, answers, program, read=True)
        _run(schedule, ranks + 1, answers // 2, program)  # another run, abandoned half way, must leave no trace
        again = _run(schedule, ranks, answers, program)
        _check_same(schedule, "begin does not repeat the run, or reading the text changed it", first, again)
        for so_far in (0, 1, answers // 2, answers):
            want = _run(schedule, ranks, so_far, program)
            _check_replay(schedule, replay, ranks, program, want)
    if patience is not None:
        _run(make(), 5, 4 * patience + 100, 0, patience=patience)


def _run(
    schedule: Schedule, ranks: int, answers: int, program: int, *, read: bool = False, patience: int | None = None
) -> list[int]:
    """The schedule's answers for an artificial program, whose ranks wait for a while after most of their turns."""
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
    if len(text) > MOST_TEXT:
        _fail(schedule, f"its text has {len(text)} characters, and {MOST_TEXT} are the most")


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
