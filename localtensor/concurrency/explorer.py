"""Interleavings of a small concurrent program, tried one by one: all with few preemptions, or many by priorities.

A program is a function of a `Sync`.  It makes what its threads share, with the locks and gates of that sync, and
returns them with a check.  Between two yield points (a lock, a gate, a step) a thread is alone, so that a run is a
function of its schedule: what fails once fails again by its text.

>>> def program(sync):
...     box = {"n": 0}
...     def add():
...         seen = box["n"]
...         sync.step("writes")
...         box["n"] = seen + 1
...     def check():
...         assert box["n"] == 2, f"two additions made {box['n']}"
...     return Program(threads=[add, add], check=check)
>>> found = explore(program, policy="bounded", bound=1)
>>> print(found.failure)
check: two additions made 1
  thread 1: begins
  thread 0: begins, writes
  thread 1: writes
Replay: bounded:0:1:1:0
>>> replay(program, found.failure.text) == found.failure
True
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from localtensor.concurrency import schedule as schedules_of
from localtensor.concurrency.bounded_search import Bounded, Frontier, read
from localtensor.concurrency.controlled_run import Crew, Stage
from localtensor.concurrency.controlled_sync import Scheduled
from localtensor.concurrency.policies import Pct, Shuffled
from localtensor.concurrency.results import Explored, Failure, Program
from localtensor.concurrency.schedule import Diary, Schedule
from localtensor.errors.exploration import BadExploration, BadProgram

POLICIES = ("bounded", "pct", "shuffled")
STEPS = 10_000
"""So many steps in one run are a livelock, unless the caller knows better."""
Maker = Callable[[Scheduled], Program]


def explore(
    program: Maker,
    *,
    schedules: int = 1000,
    policy: str = "pct",
    bound: int = 2,
    depth: int = 3,
    seed: int = 0,
    seconds: float | None = None,
    steps: int = STEPS,
    told: Callable[[int], object] | None = None,
) -> Explored:
    """The first failure among at most so many schedules, or none.

    policy: "bounded" tries every schedule with at most `bound` preemptions, the fewest first, and is `complete` when it
    has; "pct" and "shuffled" draw schedules by `seed`, `seed` + 1 and so on (see `localtensor.concurrency.schedule`), `depth` is
    that of pct.  `seconds`: no new run begins after them.  `steps` in one run are a livelock.  `told` is called now
    and then with the number of schedules run so far.

    Raises `BadExploration` for a setting that is none, `BadProgram` if `program` returns no `Program` with threads.
    """
    _check(policy, schedules=schedules, bound=bound, depth=depth, steps=steps)
    end = None if seconds is None else time.monotonic() + seconds
    frontier = Frontier(bound, schedules) if policy == "bounded" else None
    count = longest = 0
    with Crew() as crew:
        drawn = _drawn(policy, seed, depth, lambda: longest)
        while count < schedules and (end is None or time.monotonic() < end):
            schedule = frontier.take() if frontier else next(drawn)
            if schedule is None:
                break
            failure, ran = _run(crew, program, schedule, steps)
            count, longest = count + 1, max(longest, ran)
            if failure is not None:
                return Explored(count, False, _again(crew, program, schedule, steps, failure), longest)
            if frontier and isinstance(schedule, Bounded):
                frontier.grow(schedule)
            if told and count % 256 == 0:
                told(count)
        complete = frontier is not None and frontier.take() is None  # it keeps more than can be run, if it drops any
    return Explored(count, complete, None, longest)


def replay(program: Maker, text: str, *, steps: int = STEPS) -> Failure | None:
    """What the program comes to under the schedule of that text; None if all is well.

    Raises `BadSchedule` for a text that cannot be read, `ReplayDiverged` if the program is another one by now.
    """
    schedule = read(text) if text.startswith("bounded") else schedules_of.replay(text)
    with Crew() as crew:
        failure, _ = _run(crew, program, schedule, steps)
    return failure and Failure(failure.kind, failure.said, text, failure.steps)


def _run(crew: Crew, program: Maker, schedule: Schedule, steps: int) -> tuple[Failure | None, int]:
    """One run: how it failed, if it did, and the number of its steps."""
    stage = Stage(crew, schedule, steps)
    made = program(Scheduled(stage))
    if not isinstance(made, Program) or not made.threads:
        raise BadProgram(repr(made), "it is no Program with threads")
    ending = stage.perform(made.threads)
    kind, said = ending.kind, ending.said
    if not kind:
        try:
            made.check()
        except Exception as error:  # why: whatever the check raises is what the run came to
            kind, said = "check", _said(error)
    if not kind:
        return None, len(stage.trace)
    return Failure(kind, said, schedule.text, tuple(stage.trace)), len(stage.trace)


def _said(error: Exception) -> str:
    """One line: an assertion's own words, or what else was raised, and by what name."""
    words = str(error).partition("\n")[0]
    return words if words and isinstance(error, AssertionError) else f"{type(error).__name__}: {words}"


def _again(crew: Crew, program: Maker, schedule: Schedule, steps: int, failure: Failure) -> Failure:
    """The failure with a text that writes its answers down, after a second run that has to fail likewise."""
    if crew.lost:
        return failure
    noted = schedule if isinstance(schedule, Bounded) else Diary(schedule)
    second, _ = _run(crew, program, noted, steps)
    same = second is not None and (second.kind, second.said, second.steps) == (
        failure.kind,
        failure.said,
        failure.steps,
    )
    return Failure(failure.kind, failure.said, noted.text if same else failure.text, failure.steps, same)


def _drawn(policy: str, seed: int, depth: int, longest: Callable[[], int]) -> Iterator[Schedule]:
    """Schedules by seeds.  The steps that pct spreads its changes over are those of the longest run so far."""
    if policy == "pct":
        yield Bounded()
    while True:
        yield Shuffled(seed) if policy == "shuffled" else Pct(seed, depth, max(longest(), 1))
        seed += 1


def _check(policy: str, **settings: int) -> None:
    if policy not in POLICIES:
        raise BadExploration("policy", repr(policy), "there is no such policy", f"Use {', '.join(POLICIES)}.")
    for name, value in settings.items():
        least = 0 if name == "bound" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            problem = f"it has to be a whole number from {least}"
            raise BadExploration(name, f"{name}={value!r}", problem, f"Pass {least} or more.")
