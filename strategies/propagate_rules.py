"""A book as a propagator takes it: entries that can be called, and lines that make sense for the call they were asked about.

What a rule says is checked where it is said, so that the error names the rule's own file and line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.placement import cuts, is_defined, short
from strategies.book import Ask, Book, Cut, Entry, Line, Meta, exists
from strategies.propagate_errors import BadRule
from strategies.rules import overload

_AS_DOCUMENTED = "Let it yield Line(inputs, outputs, cut), as strategies.book has it."


def check_book(book: Book) -> None:
    """Raises `BadRule` for an entry of an op that is not there, whose rule cannot be called, or whose `shapes` name no argument.

    >>> check_book(Book({"aten.mm.default": Entry("aten.mm.default", lambda ask: [], "mm", "none", ("size",))}))
    Traceback (most recent call last):
    ...
    strategies.propagate_errors.BadRule: rule of aten.mm.default at <doctest ...: line: shapes=('size',): ...
    """
    for op, entry in book.entries.items():
        if not isinstance(entry, Entry) or entry.op != op:
            raise BadRule(op, getattr(entry, "where", repr(entry)), f"entry {entry!r}", "it is no entry of this op",
                          "Make the book with Book.of.")  # fmt: skip
        if not callable(entry.lines):
            raise BadRule(op, entry.where, f"lines={entry.lines!r}", "it is no function", "Give Ask -> Iterable[Line].")
        if op.count(".") != 2 or not exists(op):
            raise BadRule(op, entry.where, f"op={op!r}", "this torch has no such overload",
                          "Write namespace.name.overload, or make entries with strategies.book.rules.")  # fmt: skip
        names = [argument.name for argument in overload(op)._schema.arguments] if entry.shapes else []
        if not set(entry.shapes) <= set(names):
            raise BadRule(op, entry.where, f"shapes={entry.shapes}", "the op has no such argument",
                          f"Name some of {', '.join(names)}.")  # fmt: skip


def offer_of(entry: Entry) -> Callable[[Ask, int], tuple[Line, ...]]:
    """The lines of an entry for one call, all-replicate among them.  Raises `BadRule` for what is none."""

    def offer(ask: Ask, ranks: int) -> tuple[Line, ...]:
        try:
            said = tuple(entry.lines(ask))
        except Exception as error:  # why: whatever a rule raises, its author has to learn where
            raise _bad(entry, f"{type(error).__name__}: {error}", f"it raised when asked about {ask.tensors}",
                       "Let it yield nothing for calls that it does not know.") from error  # fmt: skip
        for line in said:
            check_line(entry, line, ask)
        return tuple(dict.fromkeys((all_replicated(ask), *said)))

    return offer


def all_replicated(ask: Ask) -> Line:
    """The line that always holds."""
    whole = Replicate()
    return Line((whole,) * len(ask.tensors), tuple(whole if meta else None for meta in ask.outputs))


def check_line(entry: Entry, line: Any, ask: Ask) -> None:
    """Raises `BadRule` if this is no line for a call of these tensors and results."""
    if not isinstance(line, Line):
        raise _bad(entry, repr(line), "it is no Line", _AS_DOCUMENTED)
    for what, placements, metas in (
        ("tensors", line.inputs, ask.tensors),
        ("results", line.outputs, ask.outputs),
    ):
        if not isinstance(placements, tuple) or len(placements) != len(metas):
            count = f"the call has {len(metas)} {what}, the line speaks of {_count(placements)}"
            raise _bad(entry, _text(line), count, _AS_DOCUMENTED)
        for number, (placement, meta) in enumerate(zip(placements, metas, strict=True)):
            problem = _nonsense(placement, meta)
            if problem:
                raise _bad(entry, _text(line), f"{what[:-1]} {number}: {problem}", _AS_DOCUMENTED)
    if line.cut not in get_args(Cut):
        raise _bad(entry, f"cut={line.cut!r}", f"a cut is one of {', '.join(get_args(Cut))}", _AS_DOCUMENTED)


def _nonsense(placement: Any, meta: Meta | None) -> str:
    if placement is None:
        return ""
    if not isinstance(placement, Placement) or not is_defined(placement):
        return f"{placement!r} is no placement whose meaning is known"
    if meta is None:
        return f"{short(placement)} of what is no tensor"
    cut = cuts(placement)
    if cut is not None and not 0 <= cut[0] < meta.ndim:
        return f"{short(placement)}: there is no dim {cut[0]} in {meta}"
    return ""


def _count(placements: Any) -> str:
    return str(len(placements)) if isinstance(placements, tuple) else f"{placements!r}, which is no tuple"


def _text(line: Line) -> str:
    return f"{line.inputs} -> {line.outputs}"


def _bad(entry: Entry, values: str, problem: str, remedy: str) -> BadRule:
    return BadRule(entry.op, entry.where, values, problem, remedy)
