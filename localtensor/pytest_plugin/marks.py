"""The settings of a rank test from its marks, the command line and the ini file: the number of ranks, and how they run.

This module does not import torch, so that a session without rank tests never loads it.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from localtensor.errors.base import LocalTensorError, refusal_sentence
from localtensor.errors.runs import DAY, MOST_RANKS

Check = Callable[[str, str, Any], Any]
RANK_BACKENDS = ("threads", "gloo", "nccl")
LEFTOVERS = ("ignore", "warn", "raise")
RANKS = 2  # the number of ranks where neither the mark nor the command line gives one
_UNSAFE = re.compile(r"[^\w.\[\]=-]+")  # what a file's name should not have of a test's
# Of a file's name, to which a digest, a rank and an ending are added; file systems take 255 bytes.
MOST_LETTERS, MOST_BYTES = 150, 220
_NUMBER = f"a number of ranks is a whole number from 1 up to {MOST_RANKS:,}"


def file_name(text: str) -> str:
    """The name of a file for a text, another one for each text.

    >>> file_name("test_it[2]"), file_name("test_it[a/b]"), file_name("test_it[a_b]")
    ('test_it[2]', 'test_it[a_b]-306b0382', 'test_it[a_b]')
    """
    safe = _UNSAFE.sub("_", text)[:MOST_LETTERS].encode()[:MOST_BYTES].decode(errors="ignore")
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _trace_name(nodeid: str) -> str:
    file, _, name = nodeid.partition("::")
    return file_name(f"{file.replace('/', '_')}_{name.replace('::', '_')}")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """A session's settings for its rank tests; None is not set.  `typed` are the names set on the command line."""

    ranks: int | None = None
    on: str = "threads"
    schedule: str | None = None
    seed: int | None = None
    flaky: int | None = None
    timeout: float | None = None
    leftovers: str | None = None
    trace: Path | None = None
    snapshots: str = "check"
    typed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RankPlan:
    """How one test runs.  `words` are the options, beside schedule and seed, of the command that repeats it."""

    ranks: int
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None
    on: str = "threads"
    schedule: str = "round_robin"
    seed: int = 0
    flaky: int = 1
    timeout: float | None = None
    leftovers: str = "ignore"
    trace: Path | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a test, the closest first: its numbers of ranks, its mesh, and keywords."""

    there: bool = False
    numbers: tuple[Any, ...] = ()
    mesh: pytest.Mark | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)


PLAN = pytest.StashKey[RankPlan]()
SETTINGS = pytest.StashKey[SessionSettings]()


def collect_marks(pairs: Iterable[tuple[Any, pytest.Mark]]) -> Marks:
    """The marks `ranks` and `mesh` among the pairs of node and mark, the closest node first.

    The closest node that sets the number of ranks decides: by `ranks` with numbers, by `mesh`, or by both.  A mesh of a
    node farther out applies if it has as many ranks.  Of each keyword the closest applies.
    """
    found = [(node, mark) for node, mark in pairs if mark.name in ("ranks", "mesh")]
    numbers: tuple[Any, ...] = ()
    mesh, decided = None, None
    keywords: dict[str, Any] = {}
    for node, mark in found:
        if mark.name == "ranks":
            keywords = {**mark.kwargs, **keywords}
            if mark.args and not numbers and decided in (None, node):
                numbers, decided = mark.args, node
        elif mesh is None and (decided in (None, node) or mesh_ranks(mark) in numbers):
            mesh = mark
            decided = decided or node
    return Marks(bool(found), numbers, mesh, keywords)


def mesh_ranks(mesh: pytest.Mark) -> int | None:
    """The number of ranks of a mesh mark, or None if its shape is invalid."""
    shape = _shape(mesh)
    return math.prod(shape) if shape and all(map(is_rank_count, shape)) else None


def is_rank_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_RANKS


def plan_test(nodeid: str, marks: Marks, settings: SessionSettings, chosen: int | None) -> RankPlan:
    """The plan of a test; `chosen` is its number, where the mark has several.

    Raises `pytest.UsageError`, in a sentence, for invalid marks.
    """
    for number in marks.numbers:
        if not is_rank_count(number):
            remedy = "Write for instance @pytest.mark.ranks(4)."
            raise usage_error(nodeid, "@pytest.mark.ranks", repr(number), _NUMBER, remedy)
    if len(set(marks.numbers)) < len(marks.numbers):
        problem = "each number makes a test, and one is there twice"
        raise usage_error(nodeid, "@pytest.mark.ranks", str(marks.numbers), problem, "Leave one out.")
    if len(marks.numbers) > 1 and chosen is None:
        problem = "several numbers make a test of each,"
        problem += " which goes with functions and methods that pytest can parametrize"
        remedy = "Give one number, or write the mark as a decorator of a function."
        raise usage_error(nodeid, "@pytest.mark.ranks", str(marks.numbers), problem, remedy)
    number = chosen or (marks.numbers[0] if marks.numbers else None)
    shape, names = _mesh(nodeid, marks.mesh) if marks.mesh else (None, None)
    if shape is not None and number is not None and math.prod(shape) != number:
        problem = f"that is a mesh of {math.prod(shape)} ranks, and @pytest.mark.ranks says {number}"
        remedy = "Make them agree, or leave one of the marks out."
        raise usage_error(nodeid, "@pytest.mark.mesh", str(shape), problem, remedy)
    by_option = shape is None and number is None
    ranks = math.prod(shape) if shape is not None else number or settings.ranks or RANKS
    keywords = _keywords(nodeid, marks.keywords)
    words = ["--ranks", str(ranks)] if by_option and "ranks" in settings.typed else []
    words += ["--ranks-on", settings.on] if settings.on != "threads" else []
    leftovers = _setting("leftovers", keywords, settings) or "ignore"
    words += ["--rank-leftovers", leftovers] if "leftovers" in settings.typed else []
    schedule = _setting("schedule", keywords, settings) or "round_robin"
    return RankPlan(
        ranks,
        shape or (ranks,),
        names,
        settings.on,
        schedule,
        _setting("seed", keywords, settings) or 0,
        _schedule_count(keywords, settings),
        _setting("timeout", keywords, settings),
        leftovers,
        None if settings.trace is None else settings.trace / f"{_trace_name(nodeid)}.json",
        tuple(words),
    )


def _setting(name: str, keywords: Mapping[str, Any], settings: SessionSettings) -> Any:
    """The value from the command line, where a replay is typed; else from the mark; else from the ini file."""
    general = getattr(settings, name)
    return general if name in settings.typed else keywords.get(name, general)


def _schedule_count(keywords: Mapping[str, Any], settings: SessionSettings) -> int:
    """The number of schedules: 1 if a schedule is typed, whatever the mark or the ini file says, and for processes."""
    if "flaky" in settings.typed:
        return settings.flaky or 1
    if "schedule" in settings.typed:
        return 1
    return (keywords.get("schedules") if settings.on == "threads" else None) or settings.flaky or 1


def _shape(mesh: pytest.Mark) -> tuple[Any, ...]:
    shape = mesh.args[0] if mesh.args else mesh.kwargs.get("shape", ())
    return tuple(shape) if isinstance(shape, tuple | list) else (shape,)


def _mesh(nodeid: str, mesh: pytest.Mark) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    shape, call = _shape(mesh), "@pytest.mark.mesh"
    if set(mesh.kwargs) - {"shape", "names"} or len(mesh.args) > 1 or ("shape" in mesh.kwargs and mesh.args):
        takes = ", ".join([*map(repr, mesh.args), *mesh.kwargs])
        remedy = 'Write @pytest.mark.mesh((2, 2), names=("dp", "tp")).'
        raise usage_error(nodeid, call, takes, "it takes a shape and names=", remedy)
    if not shape or not all(map(is_rank_count, shape)) or math.prod(shape) > MOST_RANKS:
        remedy = "Write for instance @pytest.mark.mesh((2, 2))."
        raise usage_error(
            nodeid, call, str(shape), f"a shape is whole numbers from 1 up, of {MOST_RANKS:,} ranks at most", remedy
        )
    names = mesh.kwargs.get("names")
    if names is None:
        return shape, None
    names = tuple(names) if isinstance(names, tuple | list) else (names,)
    if len(names) != len(shape) or len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
        problem = f"a mesh of {len(shape)} dim{'s' * (len(shape) != 1)} has as many names, and no two alike"
        raise usage_error(nodeid, call, f"names={names} of {shape}", problem, "Give one name for each dim.")
    return shape, names


def _keywords(nodeid: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    checks: dict[str, Check] = {
        "schedule": check_schedule, "schedules": check_flaky, "seed": check_seed, "timeout": check_timeout,
        "leftovers": check_leftovers,
    }  # fmt: skip
    unknown = sorted(set(keywords) - set(checks))
    if unknown:
        problem = f"the keywords are {', '.join(checks)}"
        remedy = "Leave it out; a number of ranks has no keyword: @pytest.mark.ranks(4)."
        raise usage_error(nodeid, "@pytest.mark.ranks", ", ".join(unknown), problem, remedy)
    return {name: checks[name](nodeid, f"@pytest.mark.ranks: {name}", value) for name, value in keywords.items()}


def usage_error(call: str, argument: str, value: str, problem: str, remedy: str) -> pytest.UsageError:
    return pytest.UsageError(refusal_sentence(call, argument, value, problem, remedy))


def _count(problem: str, most: float, call: str, argument: str, value: object) -> int:
    number = _whole_number(value)
    if number is None or not 1 <= number <= most:
        raise usage_error(call, argument, str(value), problem, "Write for instance 4.")
    return number


check_ranks = partial(_count, _NUMBER, MOST_RANKS)
check_flaky = partial(_count, "a number of schedules is a whole number from 1 up", math.inf)


def check_seed(call: str, argument: str, value: object) -> int:
    number = _whole_number(value)
    if number is None or not 0 <= number < 2**63:
        problem = "a seed is a whole number from 0 to 2**63 - 1"
        raise usage_error(call, argument, str(value), problem, "Write for instance 7.")
    return number


def check_timeout(call: str, argument: str, value: object) -> float:
    """Seconds; 0 is no limit."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # what is none is refused
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds <= DAY:
        problem = "a limit is a number of seconds up to a day, and 0 is no limit"
        raise usage_error(call, argument, str(value), problem, "Write for instance 60.")
    return seconds


def _one_of(words: Sequence[str], problem: str, call: str, argument: str, value: object) -> str:
    if value not in words:
        raise usage_error(call, argument, str(value), problem, f"Choose one of {', '.join(words)}.")
    return str(value)


check_backend = partial(_one_of, RANK_BACKENDS, "there is no such way to run")
check_leftovers = partial(_one_of, LEFTOVERS, "that is nothing to do about groups that a test leaves")


def check_folder(call: str, argument: str, value: str) -> Path:
    """The folder of this name, which is made if it does not exist."""
    folder = Path(value).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError for a null character
        problem = f"it cannot be made ({getattr(error, 'strerror', None) or error})"
        raise usage_error(call, argument, value, problem, "Name a folder that you may write to.") from None
    return folder


def check_schedule(call: str, argument: str, value: str) -> str:
    """A text that `localtensor.replay` reads; the policy `shuffled` without a seed gets one here, once for all."""
    from localtensor.concurrency.schedule import replay  # lazy: few sessions set a schedule

    try:
        read = replay(value)
    except LocalTensorError as problem:
        raise pytest.UsageError(f"{call}: {argument}: {str(problem).removeprefix('run: schedule: ')}") from None
    return str(value) if "=" in value or "@" in value else read.text


def _whole_number(value: object) -> int | None:
    if isinstance(value, str):
        return int(value) if value.strip().isdecimal() and len(value) < 99 else None  # int() raises for 4,301 digits
    return value if isinstance(value, int) and not isinstance(value, bool) else None
