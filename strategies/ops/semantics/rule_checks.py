"""A book as a propagator takes it: entries that can be called, and lines that make sense for the call they were asked about.

What a rule says is checked where it is said, so that the error names the rule's own file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from localtensor.layout.spec import cuts, is_defined, short
from strategies.model.rule import Call, Leaf, frozen, overload
from strategies.ops.semantics.errors import BadRule
from strategies.ops.semantics.rulebook import Ask, Book, Cut, Entry, Line, Meta, OwnArguments, bound, exists

_AS_DOCUMENTED = "Let it yield Line(inputs, outputs, cut), as strategies.ops.semantics.rulebook has it."


def check_book(book: Book) -> None:
    """Raises `BadRule` for an entry of an op that is not there, whose functions cannot be called, or whose `shapes` name
    no argument.

    >>> check_book(Book({"aten.mm.default": Entry("aten.mm.default", lambda ask: [], "mm", "none", ("size",))}))
    Traceback (most recent call last):
    ...
    strategies.ops.semantics.errors.BadRule: rule of aten.mm.default at <doctest ...: line: shapes=('size',): ...
    """
    for op, entry in book.entries.items():
        fault = fault_of(op, entry)
        if fault is not None:
            raise BadRule(op, getattr(entry, "where", repr(entry)), *fault)


def fault_of(op: str, entry: object) -> tuple[str, str, str] | None:
    """What is wrong with the entry of an overload whatever it is asked: what it has, why that does not fit, what to do."""
    if not isinstance(entry, Entry) or entry.op != op:
        return f"entry {entry!r}", "it is no entry of this op", "Make the book with Book.of."
    if not callable(entry.lines):
        return f"lines={entry.lines!r}", "it is no function", "Give Ask -> Iterable[Line]."
    for name in ("own", "instead"):
        function = getattr(entry, name)
        if function is not None and not callable(function):
            return f"{name}={function!r}", "it is no function", "Give a function of the Ask, or nothing."
    if op.count(".") != 2 or not exists(op):
        remedy = "Write namespace.name.overload, or make entries with strategies.ops.semantics.rulebook.rules."
        return f"op={op!r}", "this torch has no such overload", remedy
    names = [argument.name for argument in overload(op)._schema.arguments] if entry.shapes else []
    if not set(entry.shapes) <= set(names):
        return f"shapes={entry.shapes}", "the op has no such argument", f"Name some of {', '.join(names)}."
    return None


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


def made_instead(entry: Entry, ask: Ask, call: Call) -> tuple[Ask, Call]:
    """The call that every rank makes in place of this one, where the entry knows another, and the question about it.

    Raises `BadRule` for what is no call of this torch, and for one of other tensors.
    """
    if entry.instead is None:
        return ask, call
    try:
        made = entry.instead(ask)
        given = bound(made.op, made.args, dict(made.kwargs))
    except Exception as error:  # why: whatever it raises, its author has to learn where
        raise _bad(entry, f"instead: {type(error).__name__}: {error}", f"it raised when asked about {ask.tensors}",
                   "Let it return a Call of an overload that torch has.") from error  # fmt: skip
    leaves = {leaf.index for leaf in pytree.tree_leaves((list(made.args), dict(made.kwargs))) if isinstance(leaf, Leaf)}
    if leaves != set(range(len(ask.tensors))):
        problem = f"the call has {len(ask.tensors)} tensors, that one leaves {sorted(leaves) or 'none'}"
        raise _bad(entry, f"instead: {made}", problem, "Put each Leaf of the call into it.")  # fmt: skip
    frozen_call = Call(made.op, frozen(made.args), tuple((name, frozen(value)) for name, value in made.kwargs))
    return Ask(made.op, given, ask.tensors, ask.outputs), frozen_call


def checked_own(entry: Entry) -> OwnArguments:
    """The arguments that the call on a piece has of its own: none where the piece is all that there is.

    >>> entry = Entry("aten.new_zeros.default", lambda ask: [], "factory", "all the same", shapes=("size",))
    >>> import torch
    >>> from dataclasses import replace
    >>> whole = Ask(entry.op, {"size": [-1]}, (), (Meta((4,), torch.float32),))
    >>> checked_own(entry)(replace(whole, outputs=(Meta((2,), torch.float32),)), whole)
    {'size': [2]}
    """

    def own(piece: Ask, whole: Ask) -> Mapping[str, Any]:
        if piece.tensors == whole.tensors and piece.outputs == whole.outputs:
            return {}
        return own_of(entry, piece, reshaped=piece.outputs[:1] != whole.outputs[:1])

    return own


def own_of(entry: Entry, piece: Ask, *, reshaped: bool) -> Mapping[str, Any]:
    """The arguments that a piece has of its own; those that are the shape of the first result if that is `reshaped`.

    Raises `BadRule` where the entry names an argument that the op has not.
    """
    if not reshaped and entry.own is None:
        return {}
    first = piece.outputs[0] if entry.shapes and reshaped and piece.outputs else None
    given = {name: list(first.shape) for name in entry.shapes} if first is not None else {}
    if entry.own is None:
        return given
    try:
        more = dict(entry.own(piece))
    except Exception as error:  # why: whatever it raises, its author has to learn where
        raise _bad(entry, f"own: {type(error).__name__}: {error}", f"it raised when asked about {piece.tensors}",
                   "Let it return the arguments by name.") from error  # fmt: skip
    unknown = sorted(map(str, more.keys() - piece.arguments.keys()))
    if unknown:
        raise _bad(entry, f"own: {', '.join(unknown)}", "the op has no such argument",
                   f"Name some of {', '.join(piece.arguments)}.")  # fmt: skip
    return {**given, **more}


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
