"""One call along one mesh axis: which pieces its ranks get, and the call that each piece is left with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from localtensor.errors import Refusal
from localtensor.layout import cuts, is_defined, reducible, short
from strategies.model.rule import Call, Leaf, frozen, overload
from strategies.ops.semantics.rulebook import Ask, Book, Cut, Entry, Line, Meta, OwnArguments, bound, exists

Key = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...] | None, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A call as it is left at some place of the mesh: the question about it, and the call itself."""

    ask: Ask
    call: Call

    @property
    def key(self) -> Key:
        """Its shapes, which tell it from the other pieces of the same call."""
        return tuple(m.shape for m in self.ask.tensors), tuple(m.shape if m else None for m in self.ask.outputs)


def length(size: int, factor: int, ranks: int, rank: int) -> int:
    """The rows that a rank has of a dim which is cut into `factor` blocks first, as `localtensor.layout.shards` cuts it.

    >>> [length(5, 1, 4, rank) for rank in range(4)], [length(5, 2, 2, rank) for rank in range(2)]
    ([2, 2, 1, 0], [3, 2])
    """
    if factor > 1:
        blocks = [length(size, 1, factor, block) for block in range(factor)]
        return sum(length(block, 1, ranks, rank) for block in blocks)
    step = -(-size // ranks)
    return max(0, min(step, size - step * rank))


def local_meta(meta: Meta, placement: Placement | None, ranks: int, rank: int) -> Meta:
    """What a rank has of a tensor along one axis."""
    cut = cuts(placement)
    if cut is None:
        return meta
    dim, factor = cut
    shape = (*meta.shape[:dim], length(meta.shape[dim], factor, ranks, rank), *meta.shape[dim + 1 :])
    return Meta(shape, meta.dtype)


def pairs(line: Line, ask: Ask) -> list[tuple[Placement, Meta]]:
    """Each tensor and result with its placement, masked results left out."""
    both = [*zip(line.inputs, ask.tensors, strict=True), *zip(line.outputs, ask.outputs, strict=True)]
    return [(p, meta) for p, meta in both if p is not None and meta is not None]


def unfit(line: Line, ask: Ask, ranks: int) -> str:
    """Why the line cannot be had on that many ranks: its `cut` does not hold, or a reduction means nothing; or empty."""
    for placement, meta in pairs(line, ask):
        if isinstance(placement, Partial) and not reducible(placement.reduce_op, meta.dtype):
            return f"P({placement.reduce_op}) of {meta} means nothing"
        cut = cuts(placement)
        if cut is None or line.cut == "any":
            continue
        size = meta.shape[cut[0]]
        if line.cut == "even" and (size % (ranks * cut[1]) or not size):
            return f"{size} rows on {ranks} ranks are not even"
        if line.cut == "filled" and not length(size, cut[1], ranks, ranks - 1):
            return f"{size} rows on {ranks} ranks leave one without any"
    return ""


def places(line: Line, ask: Ask, ranks: int) -> Sequence[int]:
    """Coordinates that stand for all: each piece that there is lies at one of them.

    A dim of n rows has full pieces, then at most one short one, then empty ones.
    """
    found = {0}
    for placement, meta in pairs(line, ask):
        cut = cuts(placement)
        if cut is not None and cut[1] > 1:
            return range(ranks)
        if cut is not None:
            size = meta.shape[cut[0]]
            full = size // max(-(-size // ranks), 1)
            found |= {full, full + 1}
    return sorted(place for place in found if place < ranks)


def piece_at(piece: Piece, line: Line, ranks: int, rank: int, own: OwnArguments) -> Piece:
    """The call that one coordinate of the axis is left with; `own` gives the arguments that it has of its own."""
    ask = piece.ask
    tensors = tuple(local_meta(m, p, ranks, rank) for m, p in zip(ask.tensors, line.inputs, strict=True))
    outputs = tuple(m and local_meta(m, p, ranks, rank) for m, p in zip(ask.outputs, line.outputs, strict=True))
    local = Ask(ask.op, ask.arguments, tensors, outputs)
    given = own(local, ask)
    if not given:
        return Piece(local, piece.call)
    return Piece(replace(local, arguments={**ask.arguments, **given}), with_arguments(piece.call, given))


def pieces(whole: Iterable[Piece], line: Line, ranks: int, own: OwnArguments) -> tuple[Piece, ...]:
    """The different calls that the coordinates of an axis are left with, where each of `whole` is one before."""
    found: dict[Key, Piece] = {}
    for piece in whole:
        for rank in places(line, piece.ask, ranks):
            made = piece_at(piece, line, ranks, rank, own)
            found.setdefault(made.key, made)
    return tuple(found.values())


def pieces_by_rank(
    whole: Piece, lines: Sequence[Line], sizes: Sequence[int], own: OwnArguments
) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """The different calls on the whole mesh, and by rank number which of them that rank makes."""
    known: list[Piece] = [whole]
    whose = [0]
    for line, ranks in zip(lines, sizes, strict=True):
        found: dict[Key, int] = {}
        made: list[Piece] = []
        table = []
        for piece in known:
            row = []
            for rank in range(ranks):
                one = piece_at(piece, line, ranks, rank, own)
                if found.setdefault(one.key, len(made)) == len(made):
                    made.append(one)
                row.append(found[one.key])
            table.append(row)
        known, whose = made, [place for which in whose for place in table[which]]
    return tuple(known), tuple(whose)


def nothing_own(piece: Ask, whole: Ask) -> Mapping[str, Any]:
    """For ops whose calls on pieces have the arguments of the whole call."""
    return {}


def with_arguments(call: Call, given: Mapping[str, Any]) -> Call:
    """The same call with these as the arguments of these names, each where it stands; one that is not there is added."""
    spots = {a.name: i for i, a in enumerate(overload(call.op)._schema.arguments)}
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in given.items():
        if spots[name] < len(args):
            args[spots[name]] = frozen(value)
        else:
            kwargs[name] = frozen(value)
    return replace(call, args=tuple(args), kwargs=tuple(kwargs.items()))


def written_leaves(call: Call) -> dict[int, int | None]:
    """The tensors that the call writes to, by leaf number, each with the result that it becomes, or None."""
    schema = overload(call.op)._schema
    given = dict(call.kwargs) | {schema.arguments[i].name: value for i, value in enumerate(call.args)}
    returned = {
        name: number
        for number, result in enumerate(schema.returns)
        if result.alias_info
        for name in result.alias_info.before_set
    }
    found: dict[int, int | None] = {}
    for argument in schema.arguments:
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        result = next((returned[name] for name in alias.before_set if name in returned), None)
        leaves = [leaf.index for leaf in pytree.tree_leaves(given.get(argument.name)) if isinstance(leaf, Leaf)]
        # A written list stands for as many results: nothing that is known returns one beside others.
        found.update(dict.fromkeys(leaves, result if len(leaves) == 1 else None))
    return found


# A book as a propagator takes it: entries that can be called, and lines that make sense for the call they were asked about.
#
# What a rule says is checked where it is said, so that the error names the rule's own file and line.

# What a propagator refuses: calls that it cannot answer, and rules that say what cannot be.


class BadCall(Refusal, call="propagate {op}"):
    """Specs or arguments that are no call of the op on one mesh."""


class NoRule(Refusal, call="propagate {op}", argument="op"):
    """Nothing says how this op may be sharded; the message lists what was tried."""

    PROBLEM = "there is no rule for it; tried: {tried}"


class BadRule(Refusal):
    """A rule that says nonsense; `where` is its file and line."""

    def __init__(self, op: str, where: str, values: str, problem: str, remedy: str) -> None:
        self.where = where
        super().__init__(f"rule of {op} at {where}", "line", values, problem, remedy)


class WouldMoveWritten(Refusal, call="propagate {op}"):
    """The call writes to a tensor that would have to be redistributed first, so that its owner would not see it."""

    PROBLEM = "the op writes to it, so it stays where it lies, and no line of the rule leaves it there"


class NoMetadata(Refusal, call="propagate {op}", argument="outputs"):
    """The shapes of the results cannot be known before the op runs."""


_AS_DOCUMENTED = "Let it yield Line(inputs, outputs, cut), as strategies.ops.semantics.rulebook has it."


def check_book(book: Book) -> None:
    """Raises `BadRule` for an entry of an op that is not there, whose functions cannot be called, or whose `shapes` name
    no argument.

    >>> check_book(Book({"aten.mm.default": Entry("aten.mm.default", lambda ask: [], "mm", "none", ("size",))}))
    Traceback (most recent call last):
    ...
    strategies.ops.semantics.local_call.BadRule: rule of aten.mm.default at <doctest ...: line: shapes=('size',): ...
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
