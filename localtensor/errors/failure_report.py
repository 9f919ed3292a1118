"""The text under a failed test that ran on ranks: how each rank failed, and the command that repeats the failure.

The caller prints the first cause with its source; this text is about the other ranks.  Ranks with equal failures share
a line, and no list grows with the number of ranks.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from localtensor._util.events import Call, Place, Raised
from localtensor.errors import base
from localtensor.errors.programs import RankRaised

MOST_FAILURES = 10  # different failures that are listed
MOST_FAILURE_LINES = 16  # for all of them together; each has one at least
MOST_LINES_OF_ONE = 6  # lines for one of them at most
MOST_WAITS = 4
MOST_COLLECTIVES = 5
WIDTH = 140

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # pytest colours the compared values, where the terminal has colours
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")  # in the repr of an object; failures that differ only in it are equal
_ADVICE = re.compile(r"^\s*(Use -v to get|Full diff:$|\.\.\.Full output truncated)")


def failure_text(fault: base.LocalTensorError, ranks: int, replay: str, passed: Mapping[int, str] | None = None) -> str:
    """The text under a failure on so many ranks, at most some 30 lines, without colours.

    For a `RankRaised`: the first cause, the ranks that agree with it, the failures of others, the ranks that passed and
    the ranks that wait.  Other faults state that in their own text.  Then the last collectives, and `replay`, the
    command that repeats the failure.  `passed` holds, by rank, what the failed assertion compared on the ranks where it
    passed.

    >>> raised = [Raised(1, "AssertionError", "assert 1 == 6", ""), Raised(2, "AssertionError", "assert 2 == 6", "")]
    >>> print(failure_text(RankRaised(raised, places={1: Place("test_a.py", 7, "test_sum")}), 4, "pytest test_a.py"))
    First cause: rank 1 of 4, at test_a.py:7 in test_sum
      rank 1: assert 1 == 6
      rank 2: assert 2 == 6
      ranks 0, 3: passed
    Replay: pytest test_a.py
    """
    lines = _of_ranks(fault, ranks, passed or {}) if isinstance(fault, RankRaised) else []
    if isinstance(fault, base.ProgramFault) and "Last collectives:" not in str(fault):
        lines += last_call_lines(fault.log)
    if replay:
        lines.append(f"Replay: {replay}")
    return "\n".join(lines)


def last_call_lines(log: Sequence[Call]) -> list[str]:
    """The last collectives and messages of a run, in the order in which they began; ranks that did the same share
    a line."""
    names: dict[tuple[object, ...], None] = {}
    for call in reversed(log):
        names.setdefault(_name(call))
        if len(names) == MOST_COLLECTIVES:
            break
    lines = base.call_lines(call for call in log if _name(call) in names)
    return ["Last collectives:", *map(_cut, lines[-MOST_COLLECTIVES:])] if lines else []


def _name(call: Call) -> tuple[object, ...]:
    return call.group_name, call.group, call.kind, call.number, call.root, call.peer, call.tag


def _of_ranks(fault: RankRaised, ranks: int, passed: Mapping[int, str]) -> list[str]:
    first = fault.raised[0]
    places = fault.where
    heading = f"First cause: rank {first.rank} of {ranks}{_at(places.get(first.rank))}"
    agree = [one.rank for one in fault.raised[1:] if _fact(one, places) == _fact(first, places)]
    if agree:
        heading += f"; {base.rank_names(agree)} agree{'s' if len(agree) == 1 else ''}"
    failed = {one.rank for one in fault.raised}
    busy_ranks = {*(wait.rank for wait in fault.waits), *(one.rank for one in fault.busy)}
    passed_ranks = [rank for rank in range(ranks) if rank not in failed and (rank not in busy_ranks or rank in passed)]
    return [
        heading,
        *_failure_lines(fault.raised, places),
        *base.truncate_lines(_passed_lines(passed_ranks, passed), MOST_WAITS),
        *map(_cut, base.truncate_lines([*base.wait_lines(fault.waits), *base.busy_lines(fault.busy)], MOST_WAITS)),
    ]


def _at(place: Place | None) -> str:
    return f",{base.place_suffix(place)}" if place else ""


def _fact(one: Raised, places: Mapping[int, Place | None]) -> tuple[str, str, Place | None]:
    return one.kind, strip_colours_and_addresses(one.message), places.get(one.rank)


def _failure_lines(raised: Sequence[Raised], places: Mapping[int, Place | None]) -> list[str]:
    """The failure of each group of ranks: that of the first cause, then the rarest."""
    first = raised[0]
    facts = base.minority_first({one.rank: _fact(one, places) for one in raised})
    facts.sort(key=lambda item: first.rank not in item[1])
    listed, rest = facts[:MOST_FAILURES], facts[MOST_FAILURES:]
    if len(rest) == 1:
        listed, rest = facts, []
    most = max(1, min(MOST_LINES_OF_ONE, MOST_FAILURE_LINES // len(listed)))
    by_rank = {one.rank: one for one in raised}
    lines = []
    for index, (_, ranks_alike) in enumerate(listed):
        one = by_rank[ranks_alike[0]]
        shared = _message_lines(first.message) if index else []
        elsewhere = places.get(one.rank) if places.get(one.rank) != places.get(first.rank) else None
        lines += _rank_failure_lines(base.rank_names(ranks_alike), one, shared, elsewhere, most)
    if rest:
        others = [rank for _, ranks_alike in rest for rank in ranks_alike]
        lines.append(_cut(f"  and {len(rest)} other ways to fail, on {base.rank_names(others)}"))
    return lines


def _rank_failure_lines(
    names: str, one: Raised, shared: Sequence[str], elsewhere: Place | None, most: int
) -> list[str]:
    """One exception in `most` lines; lines that the first cause has too are left out, if others remain."""
    text = _message_lines(one.message)
    text = [line for line in text if line not in shared] or text
    if most == 1 and text:
        text = ["; ".join(line.strip() for line in text)]
    kind = "" if one.kind == "AssertionError" and text else one.kind
    head = ": ".join(part for part in (kind, text[0].strip() if text else "") if part)
    return [_cut(f"  {names}: {head}{_at(elsewhere)}"), *(_cut(f"      {line}") for line in text[1:most])]


def _message_lines(message: str) -> list[str]:
    return [
        line.rstrip()
        for line in strip_colours_and_addresses(message).splitlines()
        if line.strip() and not _ADVICE.match(line)
    ]


def strip_colours_and_addresses(text: str) -> str:
    r"""A text without terminal colours and addresses.

    >>> strip_colours_and_addresses("assert \x1b[94m1\x1b[39m == <Node at 0x7f99d12bc960>")
    'assert 1 == <Node at 0x...>'
    """
    return _ADDRESS.sub("0x...", _COLOURS.sub("", text))


def _passed_lines(passed_ranks: Iterable[int], passed: Mapping[int, str]) -> list[str]:
    texts = {
        rank: f"passed: {base.first_line(strip_colours_and_addresses(passed[rank]), 80)}"
        if rank in passed
        else "passed"
        for rank in passed_ranks
    }
    return [_cut(f"  {base.rank_names(ranks_alike)}: {what}") for what, ranks_alike in base.minority_first(texts)]


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
