"""Interleavings of a small concurrent program, tried one by one: all with few preemptions, or many by priorities.

A program is a function of a `Sync`.  It makes what its threads share, with the locks and gates of that sync, and
returns them with a check.  Between two yield points (a lock, a gate, a step) only one thread runs, so that a run is a
function of its schedule: a failure is repeated by the text of its schedule.

The policy "bounded" runs every schedule with at most so many preemptions (`localtensor.concurrency.bounded`).  `by_lines` makes every line, or
every bytecode, of a module a yield point: races at unmarked places are explored, too.

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
  thread 0: begins
  thread 1: begins, writes
  thread 0: writes
Replay: bounded:1:1
>>> replay(program, found.failure.text) == found.failure
True
>>> class Count:
...     hits = 0
...     def add(self):
...         self.hits = self.hits + 1
>>> def program(sync):
...     count = Count()
...     def check():
...         assert count.hits == 2, f"two additions made {count.hits}"
...     return Program([count.add, count.add], check)
>>> print(explore(by_lines(program, Count, opcodes=True), policy="bounded").failure.detail)
two additions made 1
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from textwrap import wrap
from types import CodeType, FrameType, ModuleType
from typing import Any

from localtensor.concurrency import schedule as schedules_of
from localtensor.concurrency.bounded import BoundedSchedule, Frontier
from localtensor.concurrency.controlled_run import ControlledRun, ThreadGroup
from localtensor.concurrency.schedule import PctSchedule, RecordedSchedule, Schedule, ShuffledSchedule
from localtensor.concurrency.sync import ScheduledSync
from localtensor.errors.runs import BadExploration, BadProgram

_ADDRESS = re.compile(r"(?<= at )0x[0-9a-fA-F]+")  # in the repr of an object: another one in each run
LINE_WIDTH = 110  # characters of one line of an interleaving


@dataclass(frozen=True, slots=True)
class Program:
    """Threads that share the objects of one call, and a check that raises unless all is well after they have ended."""

    threads: Sequence[Callable[[], object]]
    check: Callable[[], object] = lambda: None  # for threads that check everything themselves


@dataclass(frozen=True, slots=True)
class Failure:
    """One interleaving that went wrong.

    kind: "raised" by a thread, "check" failed, "deadlock", "livelock" (past the limit of steps) or "hung" (a thread
    ran for seconds without a yield point).
    detail: what happened, in one sentence.
    text: the schedule, which `replay` takes to repeat the failure.
    steps: pairs (thread, action), in order.
    repeats: whether a second run of the same schedule failed in the same way.

    >>> print(Failure("check", "2 is not 3", "pct:7", ((0, "reads"), (0, "writes"), (1, "reads"))))
    check: 2 is not 3
      thread 0: reads, writes
      thread 1: reads
    Replay: pct:7
    """

    kind: str
    detail: str
    text: str
    steps: tuple[tuple[int, str], ...]
    repeats: bool = True

    def __str__(self) -> str:
        flaky = "\nThe same schedule did not fail again: something else than the schedule decides."
        by_thread = groupby(self.steps, lambda step: step[0])
        steps = "\n".join(line for who, steps in by_thread for line in _thread_lines(who, steps))
        return f"{self.kind}: {self.detail}\n{steps}\nReplay: {self.text}{'' if self.repeats else flaky}"


def _thread_lines(who: int, steps: Iterable[tuple[int, str]]) -> list[str]:
    """`  thread 0: takes lock 1, spins 40 times`, in lines that fit."""
    words = [(what, sum(1 for _ in same)) for what, same in groupby(what for _, what in steps)]
    detail = ", ".join(what if times == 1 else f"{what} {times} times" for what, times in words)
    head = f"  thread {who}: "
    return wrap(detail, LINE_WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class ExplorationResult:
    """schedules: how many were run.  complete: all within the bound were run.  longest: steps of the longest run."""

    schedules: int
    complete: bool
    failure: Failure | None
    longest: int = 0

    def __str__(self) -> str:
        if not self.schedules:
            return "no schedule was run"
        if self.failure is None:
            every = "all " if self.complete else ""
            return f"{every}{self.schedules} schedules, at most {self.longest} steps each: nothing found"
        return f"schedule {self.schedules}: {self.failure}"


POLICIES = ("bounded", "pct", "shuffled")
LIVELOCK_STEPS = 10_000
"""The default limit of steps in one run; beyond it the run is a livelock."""
ProgramMaker = Callable[[ScheduledSync], Program]
Fn = Callable[..., Any]


def explore(
    program: ProgramMaker,
    *,
    schedules: int = 1000,
    policy: str = "pct",
    bound: int = 2,
    depth: int = 3,
    seed: int = 0,
    seconds: float | None = None,
    steps: int = LIVELOCK_STEPS,
    progress: Callable[[int], object] | None = None,
) -> ExplorationResult:
    """The first failure among at most `schedules` schedules, or none.

    policy: "bounded" tries every schedule with at most `bound` preemptions, the least changed first, and is `complete` when it
    has; "pct" and "shuffled" draw schedules by `seed`, `seed` + 1 and so on (see `localtensor.concurrency.schedule`),
    `depth` is that of pct.  No new run begins after `seconds`.  More than `steps` steps in one run are a livelock.
    `progress` is called every 256 schedules with the number of schedules run so far.

    Raises `BadExploration` for an invalid setting, `BadProgram` if `program` returns no `Program` with threads.
    """
    check_settings(policy, seconds, schedules=schedules, bound=bound, depth=depth, steps=steps)
    end = None if seconds is None else time.monotonic() + seconds
    frontier = Frontier(bound, schedules) if policy == "bounded" else None
    count = longest = 0
    with ThreadGroup() as group:
        drawn = _random_schedules(policy, seed, depth, lambda: longest)
        while count < schedules and (end is None or time.monotonic() < end):
            schedule = frontier.take() if frontier else next(drawn)
            if schedule is None:
                break
            failure, ran = _run(group, program, schedule, steps)
            count, longest = count + 1, max(longest, ran)
            if failure is not None:
                return ExplorationResult(count, False, _confirmed(group, program, schedule, steps, failure), longest)
            if frontier and isinstance(schedule, BoundedSchedule):
                frontier.grow(schedule)
            if progress and count % 256 == 0:
                progress(count)
        complete = frontier is not None and frontier.take() is None  # also False if the frontier dropped any
    return ExplorationResult(count, complete, None, longest)


def replay(program: ProgramMaker, text: str, *, steps: int = LIVELOCK_STEPS) -> Failure | None:
    """The failure of the program under the schedule of that text; None if it passes.

    Raises `BadSchedule` for a text that cannot be read, `ReplayDiverged` if the program no longer matches the text.
    """
    with ThreadGroup() as group:
        failure, _ = _run(group, program, schedules_of.replay(text), steps)
    return failure and replace(failure, text=text)


def _run(group: ThreadGroup, program: ProgramMaker, schedule: Schedule, steps: int) -> tuple[Failure | None, int]:
    """One run: its failure, if any, and the number of its steps."""
    run = ControlledRun(group, schedule, steps)
    made = program(ScheduledSync(run))
    if not isinstance(made, Program) or not made.threads:
        raise BadProgram(repr(made), "it is no Program with threads")
    ending = run.run(made.threads)
    kind, detail = ending.kind, ending.detail
    if not kind:
        try:
            made.check()
        except Exception as error:  # why: any error of the user's check is the outcome of the run
            words = str(error).partition("\n")[0]
            plain = bool(words) and isinstance(error, AssertionError)
            kind, detail = "check", words if plain else f"{type(error).__name__}: {words}"
    if not kind:
        return None, len(run.trace)
    return Failure(kind, _ADDRESS.sub("0x...", detail), schedule.text, tuple(run.trace)), len(run.trace)


def _confirmed(group: ThreadGroup, program: ProgramMaker, schedule: Schedule, steps: int, failure: Failure) -> Failure:
    """The failure with a text that lists the schedule's answers, if a second run fails in the same way."""
    if group.lost:
        return failure
    recorded = schedule if isinstance(schedule, BoundedSchedule) else RecordedSchedule(schedule)
    second, _ = _run(group, program, recorded, steps)
    same = second is not None and replace(second, text=failure.text) == failure
    return replace(failure, text=recorded.text if same else failure.text, repeats=same)


def _random_schedules(policy: str, seed: int, depth: int, longest: Callable[[], int]) -> Iterator[Schedule]:
    """Schedules by seeds.  pct spreads its priority changes over the steps of the longest run so far."""
    if policy == "pct":
        yield BoundedSchedule()
    while True:
        yield ShuffledSchedule(seed) if policy == "shuffled" else PctSchedule(seed, depth, max(longest(), 1))
        seed += 1


def check_settings(policy: str, seconds: float | None, **settings: int) -> None:
    """Raises `BadExploration` for an unknown policy, a time that is none, and for a setting below its least value."""
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0):
        remedy = "Pass 60, or None for no limit."
        raise BadExploration("seconds", f"{seconds=!r}", "it has to be a number of seconds", remedy)
    if policy not in POLICIES:
        raise BadExploration("policy", repr(policy), "there is no such policy", f"Use {', '.join(POLICIES)}.")
    for name, value in settings.items():
        least = 0 if name == "bound" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            problem = f"it has to be a whole number from {least}"
            raise BadExploration(name, f"{name}={value!r}", problem, f"Pass {least} or more.")


def by_lines(program: ProgramMaker, *where: ModuleType | type | Fn, opcodes: bool = False) -> ProgramMaker:
    """The program with a yield point at each line of `where` (modules, classes or functions).

    With `opcodes` each bytecode is one: a schedule may switch threads between the read and the write of one `+=`.
    """
    files = {one.__file__ for one in where if hasattr(one, "__file__")}
    codes = {code for one in where if not hasattr(one, "__file__") for code in _codes(one)}

    def wanted(code: CodeType) -> bool:
        return code.co_filename in files or code in codes

    def made(sync: ScheduledSync) -> Program:
        plain = program(sync)
        tracer = _Tracer(sync, wanted, opcodes)
        return Program([partial(tracer.run, thread) for thread in plain.threads], plain.check)

    return made


class _Tracer:
    def __init__(self, sync: ScheduledSync, wanted: Callable[[CodeType], bool], opcodes: bool) -> None:
        self._sync, self._wanted, self._opcodes = sync, wanted, opcodes

    def run(self, thread: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            thread()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if not self._wanted(frame.f_code):
            return None
        frame.f_trace_opcodes = self._opcodes
        return self._within

    def _within(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "line":
            self._sync.step(f"{frame.f_code.co_name} line {frame.f_lineno}")
        elif event == "opcode":
            self._sync.step(f"{frame.f_code.co_name} line {frame.f_lineno} at {frame.f_lasti}")
        return self._within


def _codes(one: object) -> list[CodeType]:
    """The code objects of a function, or of all functions of a class."""
    if isinstance(one, type):
        return [code for member in vars(one).values() for code in _codes(member)]
    code = getattr(one, "__code__", None)
    return [code] if isinstance(code, CodeType) else []
