"""`explore_ranks(fn, *args, ranks=2)`: a program on rank threads under every schedule with few preemptions."""

import time
from collections.abc import Callable
from typing import Any

from localtensor.concurrency.bounded import Frontier
from localtensor.concurrency.explorer import ExplorationResult, check_settings
from localtensor.errors.runs import BadExploration
from localtensor.runner.api import run


def explore_ranks(
    fn: Callable[..., Any],
    *args: object,
    ranks: int,
    bound: int = 2,
    schedules: int = 1000,
    seconds: float | None = None,
    **options: Any,
) -> ExplorationResult:
    """Runs `fn(*args)` on rank threads under every schedule with at most `bound` preemptions, the least changed first.

    A rank may be preempted wherever ranks meet: at a collective, a message, a wait, and at each access to symmetric
    memory.  At most `schedules` are run, and none begins after `seconds`; `options` are those of `run`.  Returns how
    many were run, whether those were all, and the steps of the longest.

    Raises what `run` raises under the first schedule that fails; its message has the schedule's text, as
    `bounded:12:1`, with which `run` repeats it.  Raises `BadExploration` for a setting that is none.

    >>> import torch
    >>> print(explore_ranks(lambda: torch.distributed.barrier(), ranks=2, bound=1))
    all 4 schedules, at most 4 steps each: nothing found
    """
    check_settings("bounded", schedules=schedules, bound=bound)
    if options.keys() & {"schedule", "on"}:
        remedy = "Leave it out, or call localtensor.run."
        raise BadExploration("options", "schedule= or on=", "the schedules are searched on rank threads", remedy)
    end = None if seconds is None else time.monotonic() + seconds
    frontier = Frontier(bound, schedules)
    count = longest = 0
    while count < schedules and (end is None or time.monotonic() < end):
        schedule = frontier.take()
        if schedule is None:
            break
        run(fn, *args, ranks=ranks, schedule=schedule, **options)
        count, longest = count + 1, max(longest, schedule.steps)
        frontier.grow(schedule)
    return ExplorationResult(count, frontier.take() is None, None, longest)
