"""`run(fn, *args, ranks=8)`: a torch.distributed program on any number of ranks."""

import copy
import inspect
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import index
from typing import Any, overload

import torch

from localtensor._util.ambient import refuse_inside_mode
from localtensor._util.events import Call
from localtensor.collectives.trace.events import Recording
from localtensor.collectives.trace.output import trace_path
from localtensor.concurrency.bounded import Frontier
from localtensor.concurrency.explorer import ExplorationResult, check_settings
from localtensor.concurrency.schedule import Schedule, replay, round_robin
from localtensor.errors import (
    BadFaults,
    ModeBusy,
    NoRanks,
    NotCallableWith,
    NotCopyable,
    NoTime,
    PiecesDiffer,
    Refusal,
    ThreadsOnly,
    UnknownWay,
    WrongType,
)
from localtensor.errors.runs import DAY, MOST_RANKS, BadExploration
from localtensor.processes.job import to_device
from localtensor.runner.trace.files import TraceOptions, recorded
from localtensor.runner.trace.tables import RunMemory, Waited, waits
from localtensor.threads.faults import Faults
from localtensor.threads.replicas import MODES
from localtensor.threads.run import limit_from_environment, run_in_threads

DEFAULT_TIMEOUT = 300.0  # seconds; LOCALTENSOR_TIMEOUT in the environment says otherwise, 0 is no limit
RUN_MODES = ("threads", "gloo", "nccl")
_LEFTOVERS = ("warn", "raise", "ignore")
_SHARE_VALUES = (True, False, None)


class NotTraced(Refusal, call="Run", argument="{what}", values="a run without a recording"):
    """What only a recorded run has."""

    PROBLEM = "it was not recorded"
    REMEDY = "Pass trace=True, or the name of a file, to run."


class LeftoverWarning(UserWarning):
    """The program did not destroy process groups that it had made."""


@dataclass(frozen=True)
class Run(Sequence[Any]):
    """The result of a program on each rank: `run[2]` is what rank 2 returned.

    `calls` are the ranks' collectives and messages, in order (on threads only; a long run keeps the last million);
    `replay` is the text that repeats the run when passed as `schedule=`; `recording` has its events if it was traced.

    >>> sim = run(torch.distributed.get_rank, ranks=3)
    >>> list(sim), sim[2]
    ([0, 1, 2], 2)
    """

    values: tuple[Any, ...]
    calls: tuple[Call, ...] = field(default=(), repr=False)
    replay: str = "round_robin"
    recording: Recording | None = field(default=None, repr=False, compare=False)

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        return self.values[rank]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def memory(self) -> RunMemory:
        """The memory of each rank.  Raises `NotTraced`."""
        return RunMemory(self._traced("memory").peaks)

    @property
    def waits(self) -> list[Waited]:
        """Who waits how long for whom on the modelled clock, the longest first.  Raises `NotTraced`."""
        return waits(self._traced("waits"))

    def _traced(self, what: str) -> Recording:
        if self.recording is None:
            raise NotTraced(what)
        return self.recording


def run(
    fn: Callable[..., Any],
    *args: object,
    ranks: int,
    on: str = "threads",
    schedule: Schedule | str | None = None,
    seed: int = 0,
    timeout: float | None = DEFAULT_TIMEOUT,
    device: str | torch.device | None = None,
    leftovers: str = "warn",
    share: bool | None = None,
    isolate: bool = False,
    faults: Faults | None = None,
    replicas: str | None = None,
    races: bool = True,
    trace: str | os.PathLike[str] | bool | None = None,
) -> Run:
    """Run `fn(*args)`, ordinary torch.distributed code, on every rank; returns what each rank returned.

    The default process group exists when `fn` begins; `fn` may also call `init_process_group` itself.  Each rank gets
    its own copy of the arguments, as a process would; of a list, which must have one item per rank, it gets its item.
    To share an object between ranks, refer to it by closure.  Every rank's random generators (torch, Python, numpy)
    start from `seed`.

    on         "threads": all ranks in this process, one at a time, deterministic.  "gloo", "nccl": real processes,
               which find `fn` by its module and name.
    schedule   which rank thread runs next: `round_robin()` if None, `shuffled(seed)`, `pct(seed, depth)`, or a text.
    timeout    seconds for the whole run, None for no limit; a debugger that holds a rank stops the clock.
               The environment variable LOCALTENSOR_TIMEOUT replaces the default; 0 is no limit.
    device     the device of tensor arguments, and the default device of each rank: "cpu", "cuda".
    leftovers  on process groups that `fn` made and did not destroy, on threads: "warn", "raise" or "ignore".
               Real processes remove them.
    share      whether ranks on threads share DTensor's propagation where it cannot depend on the rank, so that it is
               computed once; True if None, unless LOCALTENSOR_SHARE in the environment is 0.
    isolate    whether each rank on threads has its own globals, class attributes and caches of the module of `fn` and of
               what that leads to, as processes have; after the run they are as before.  A change of rank costs more then.
    faults     `Faults(...)`, on threads: ranks that die and programs that start again, late ranks, lost messages, a
               network that falls apart.  What a rank that has died would have returned is None.
    replicas   None: parameters whose gradients one call has all_reduced must be equal on all ranks at each step of an
               optimizer, else `RanksDisagree`.  "check": so must all parameters of all optimizers, which are counted in
               the order of their first steps.  "ignore": nothing is compared.  On threads.
    races      whether accesses to symmetric memory are checked for races and for reads of what no rank has written.
               On threads.
    trace      a file for a trace of the run in the Chrome trace event format, also if it fails; True records it without a
               file.  On threads.

    Raises `BadFaults`, `CannotWrite`, `NotCallableWith`, `NoRanks`, `NoTime`, `PiecesDiffer`, `NotCopyable`, `UnknownWay`, `TooFewGpus`,
    `NestedRun`, `ModeBusy`, `BadSchedule` for bad input; `RankRaised` if ranks raise (the first exception is its
    `__cause__`); and, where a real run would hang or be silently wrong, one of localtensor.errors.ProgramFault.

    >>> def total(x):
    ...     torch.distributed.all_reduce(x)
    ...     return x
    >>> run(total, [torch.tensor(1), torch.tensor(2)], ranks=2).values
    (tensor(3), tensor(3))
    """
    _check(fn, args, ranks, on, seed, timeout, leftovers, share)
    if replicas not in MODES:
        raise UnknownWay(replicas, MODES, "replicas")
    refuse_inside_mode(ModeBusy)
    pieces = arguments_of_ranks(fn, args, ranks, device if on == "threads" else None)
    if faults is not None:
        _check_faults(faults, ranks, on)
    tracing = TraceOptions(trace_path("run", trace))
    tracing.check("run", on)
    if on != "threads":
        if trace:
            raise ThreadsOnly("trace", trace, on)
        from localtensor.processes.pool import run_in_processes

        return Run(run_in_processes(fn, pieces, on, seed, timeout_limit(timeout), device))
    schedule = _read_schedule(schedule)
    if device is not None and torch.device(device).type == "cuda":
        torch.cuda.init()  # now each rank has its own generators there, and DeviceMesh does not choose a GPU by LOCAL_RANK

    def body(rank: int) -> object:
        if device is not None:
            torch.set_default_device(device)
        if faults is not None:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
        return fn(*pieces[rank])

    start, limit, roots = 0, timeout_limit(timeout), (fn,) if isolate else ()
    options: dict[str, Any] = {"share": share, "roots": roots, "faults": faults, "replicas": replicas, "races": races}
    with recorded(tracing, ranks) if trace else nullcontext() as recorder:
        ran = run_in_threads(body, ranks, schedule, seed, limit, **options, observer=recorder)
        while not ran.values:  # a rank has died
            start, pieces = start + 1, arguments_of_ranks(fn, args, ranks, device)
            ran = run_in_threads(body, ranks, schedule, seed, limit, **options, observer=recorder, start=start)
    if ran.groups_left is not None and leftovers == "raise":
        raise ran.groups_left
    if ran.groups_left is not None and leftovers == "warn":
        warnings.warn(str(ran.groups_left), LeftoverWarning, stacklevel=2)
    return Run(ran.values, ran.calls, ran.replay, None if recorder is None else recorder.recording)


def _check_faults(faults: object, ranks: int, on: str) -> None:
    """Raises `BadFaults`."""
    if not isinstance(faults, Faults):
        raise BadFaults("kill", faults, "it has to be a localtensor.Faults")
    if on != "threads":
        raise BadFaults("kill", faults, f"faults are for on='threads', and this is on={on!r}")
    faults.check(ranks)


def _read_schedule(schedule: Schedule | str | None) -> Schedule:
    if schedule is None or isinstance(schedule, str):
        return round_robin() if schedule is None else replay(schedule)
    if not all(callable(getattr(schedule, name, None)) for name in ("begin", "next", "number")):
        remedy = "Pass round_robin(), shuffled(seed), pct(seed, depth), or a schedule's text."
        raise WrongType("run", "schedule", schedule, "it is no schedule", remedy)
    return schedule


def timeout_limit(timeout: float | None) -> float | None:
    """The timeout of a run in seconds, None for no limit; the environment replaces the default.  Raises `NoTime`."""
    return limit_from_environment(timeout) if timeout == DEFAULT_TIMEOUT else timeout


def _check(
    fn: object, args: Sequence[Any], ranks: object, on: object, seed: object, timeout: Any, leftovers: object,
    share: object,
) -> None:  # fmt: skip
    if not callable(fn):
        raise NotCallableWith(fn, "it is not a function")
    misfit = _signature_mismatch(fn, args)
    if misfit:
        raise NotCallableWith(fn, misfit)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 0 < ranks <= MOST_RANKS:
        raise NoRanks("run", ranks)
    if on not in RUN_MODES:
        raise UnknownWay(on, RUN_MODES)
    if not hasattr(seed, "__index__") or not -(2**63) <= index(seed) < 2**64:
        raise WrongType("run", "seed", seed, "it is no whole number that torch.manual_seed takes", "Give it 0, say.")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout <= DAY):
        raise NoTime("run", "timeout", timeout)
    if leftovers not in _LEFTOVERS:
        raise UnknownWay(leftovers, _LEFTOVERS, "leftovers")
    if share not in _SHARE_VALUES:
        raise UnknownWay(share, _SHARE_VALUES, "share")


def _signature_mismatch(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """Why the function does not take these arguments; empty if it may."""
    first = ""
    for wrapped in (True, False):  # a decorator such as mock.patch supplies arguments of its wrapped function
        try:
            inspect.signature(fn, follow_wrapped=wrapped).bind(*args)
        except TypeError as misfit:
            first = first or str(misfit)
        except ValueError:  # a C function without a signature raises by itself
            return ""
        else:
            return ""
    return first


def arguments_of_ranks(
    fn: Callable[..., Any], args: Sequence[Any], ranks: int, device: str | torch.device | None
) -> list[tuple[Any, ...]]:
    """Each rank's own copy of the arguments.  Raises `PiecesDiffer`, `NotCopyable`."""
    try:
        bound = [name for name, p in inspect.signature(fn).parameters.items() if p.kind is not p.VAR_POSITIONAL]
    except ValueError:
        bound = []
    names = [*bound[: len(args)], *(f"args[{i}]" for i in range(len(bound), len(args)))]
    for name, value in zip(names, args):
        if type(value) is list and len(value) != ranks:
            raise PiecesDiffer(name, len(value), ranks)
    return [
        tuple(_own_argument(name, value, rank, device) for name, value in zip(names, args)) for rank in range(ranks)
    ]


def _own_argument(name: str, value: object, rank: int, device: str | torch.device | None) -> object:
    if type(value) is list:
        value = value[rank]
    elif hasattr(value, "__localtensor_on__"):
        value = value.__localtensor_on__(rank)
    try:
        own = copy.deepcopy(value)
    except Exception as problem:  # why: the copying code of a user's class may raise anything
        raise NotCopyable(name, type(value).__name__, str(problem)) from problem
    return to_device(own, device)


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
    check_settings("bounded", seconds, schedules=schedules, bound=bound)
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
