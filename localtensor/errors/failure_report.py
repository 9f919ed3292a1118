"""What is said under the one failure of a test that ran on ranks: who failed how, and how to see it again.

Whoever shows the failure has shown the first cause already, with its source.  What stands here is about the others:
ranks that failed alike share a line, and no list grows with the number of ranks.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from localtensor._util.events import Call, Place, Raised
from localtensor.errors.base import (
    LocalTensorError,
    ProgramFault,
    at,
    busy_lines,
    first_line,
    folded_calls,
    minority_first,
    rank_names,
    wait_lines,
)
from localtensor.errors.programs import RankRaised

MOST_STORIES = 10  # ways to fail that are told one by one
STORY_LINES = 16  # lines for all of them together, but one each at least
ONE_STORY = 6  # lines for one of them at most
MOST_WAITS = 4
MOST_COLLECTIVES = 5
WIDTH = 140

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # pytest paints what an assertion compared, where the terminal has colours
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")  # in the repr of an object: ranks that hold alike ones agree all the same
_ADVICE = re.compile(r"^\s*(Use -v to get|Full diff:$|\.\.\.Full output truncated)")


def told(fault: LocalTensorError, ranks: int, replay: str, passed: Mapping[int, str] | None = None) -> str:
    """The text under a failure on so many ranks, at most some 30 lines, without colours.

    Of a `RankRaised`: the first cause, which ranks agree with it, how others failed, which passed and which wait.  Of
    other faults, whose own text says that, only what it does not say.  Then the last collectives, and `replay`, the
    command that brings the failure about again.  `passed` holds what the failed assertion compared on ranks where it
    went through, which may wait since, as far as somebody saw it.

    >>> raised = [Raised(1, "AssertionError", "assert 1 == 6", ""), Raised(2, "AssertionError", "assert 2 == 6", "")]
    >>> print(told(RankRaised(raised, places={1: Place("test_a.py", 7, "test_sum")}), 4, "pytest test_a.py"))
    First cause: rank 1 of 4, at test_a.py:7 in test_sum
      rank 1: assert 1 == 6
      rank 2: assert 2 == 6
      ranks 0, 3: passed
    Replay: pytest test_a.py
    """
    lines = _of_ranks(fault, ranks, passed or {}) if isinstance(fault, RankRaised) else []
    if isinstance(fault, ProgramFault) and "Last collectives:" not in str(fault):
        lines += last_lines(fault.log)
    if replay:
        lines.append(f"Replay: {replay}")
    return "\n".join(lines)


def last_lines(log: Sequence[Call], most: int = MOST_COLLECTIVES) -> list[str]:
    """The last collectives and messages of a run, in the order in which they began; ranks that did the same share
    a line."""
    names: dict[tuple[object, ...], None] = {}
    for call in reversed(log):
        names.setdefault(_name(call))
        if len(names) == most:
            break
    lines = folded_calls(call for call in log if _name(call) in names)
    return ["Last collectives:", *map(_cut, lines[-most:])] if lines else []


def _name(call: Call) -> tuple[object, ...]:
    return call.group_name, call.group, call.kind, call.number, call.root, call.peer, call.tag


def _of_ranks(fault: RankRaised, ranks: int, passed: Mapping[int, str]) -> list[str]:
    first = fault.raised[0]
    places = fault.where
    heading = f"First cause: rank {first.rank} of {ranks}{_at(places.get(first.rank))}"
    agree = [one.rank for one in fault.raised[1:] if _same(one, first, places)]
    if agree:
        heading += f"; {rank_names(agree)} agree{'s' if len(agree) == 1 else ''}"
    failed = {one.rank for one in fault.raised}
    at_work = {*(wait.rank for wait in fault.waits), *(one.rank for one in fault.busy)}
    well = [rank for rank in range(ranks) if rank not in failed and (rank not in at_work or rank in passed)]
    return [
        heading,
        *_stories(fault.raised, places),
        *_some(_passed(well, passed), MOST_WAITS),
        *_some([*wait_lines(fault.waits), *busy_lines(fault.busy)], MOST_WAITS),
    ]


def _at(place: Place | None) -> str:
    return f",{at(place)}" if place else ""


def _same(one: Raised, other: Raised, places: Mapping[int, Place | None]) -> bool:
    return _fact(one, places) == _fact(other, places)


def _fact(one: Raised, places: Mapping[int, Place | None]) -> tuple[str, str, Place | None]:
    return one.kind, plain(one.message), places.get(one.rank)


def _stories(raised: Sequence[Raised], places: Mapping[int, Place | None]) -> list[str]:
    """How each group of ranks failed: that of the first cause, then the rarest."""
    first = raised[0]
    facts = minority_first({one.rank: _fact(one, places) for one in raised})
    facts.sort(key=lambda item: first.rank not in item[1])
    shown, rest = facts[:MOST_STORIES], facts[MOST_STORIES:]
    if len(rest) == 1:
        shown, rest = facts, []
    room = max(1, min(ONE_STORY, STORY_LINES // len(shown)))
    by_rank = {one.rank: one for one in raised}
    lines = []
    for index, (_, who) in enumerate(shown):
        one = by_rank[who[0]]
        known = _words(first.message) if index else []
        elsewhere = places.get(one.rank) if places.get(one.rank) != places.get(first.rank) else None
        lines += _story(rank_names(who), one, known, elsewhere, room)
    if rest:
        others = [rank for _, who in rest for rank in who]
        lines.append(_cut(f"  and {len(rest)} other ways to fail, on {rank_names(others)}"))
    return lines


def _story(who: str, one: Raised, known: Sequence[str], elsewhere: Place | None, room: int) -> list[str]:
    """One exception in so many lines; those that the first cause has too are left out, if others remain."""
    words = _words(one.message)
    words = [line for line in words if line not in known] or words
    if room == 1 and words:
        words = ["; ".join(line.strip() for line in words)]
    kind = "" if one.kind == "AssertionError" and words else one.kind
    head = ": ".join(part for part in (kind, words[0].strip() if words else "") if part)
    place = f"{_at(elsewhere)}" if elsewhere else ""
    return [_cut(f"  {who}: {head}{place}"), *(_cut(f"      {line}") for line in words[1:room])]


def _words(message: str) -> list[str]:
    return [line.rstrip() for line in plain(message).splitlines() if line.strip() and not _ADVICE.match(line)]


def plain(text: str) -> str:
    r"""A text without terminal colours and addresses.

    >>> plain("assert \x1b[94m1\x1b[39m == <Node at 0x7f99d12bc960>")
    'assert 1 == <Node at 0x...>'
    """
    return _ADDRESS.sub("0x...", _COLOURS.sub("", text))


def _passed(well: Iterable[int], passed: Mapping[int, str]) -> list[str]:
    saw = {rank: f"passed: {first_line(plain(passed[rank]), 80)}" if rank in passed else "passed" for rank in well}
    return [_cut(f"  {rank_names(who)}: {what}") for what, who in minority_first(saw)]


def _some(lines: Sequence[str], most: int) -> list[str]:
    over = len(lines) - most
    return [*map(_cut, lines[:most]), f"  and {over} lines more"] if over > 1 else list(map(_cut, lines))


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
