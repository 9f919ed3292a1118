"""One call along one mesh axis: the pieces of the ranks, the call that each rank makes, and the checks of rules.

A rule is checked when it is queried, so that the error names the file and line of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import Refusal
from localtensor.layout import is_reducible, is_supported, local_shape, shard_cut, short
from strategies.model.rule import Call, frozen, leaf_numbers, overload
from strategies.ops.semantics.rule_registry import (
    Cut,
    Meta,
    OpRule,
    OwnArguments,
    PlacementRule,
    RuleQuery,
    RuleRegistry,
    bind_arguments,
    overload_exists,
)

ALIGNMENT = 16
"""The number of bytes of which kernels on 16-byte vectors require strides to be multiples."""
LocalCallKey = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...] | None, ...]]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """The call that a rank makes on its pieces, and its query."""

    query: RuleQuery
    call: Call

    @property
    def key(self) -> LocalCallKey:
        """The shapes, which distinguish the local calls of one call."""
        return tuple(m.shape for m in self.query.tensors), tuple(m.shape if m else None for m in self.query.outputs)


def local_meta(meta: Meta, placement: Placement | None, ranks: int, rank: int) -> Meta:
    """The shape and dtype of a rank's piece of a tensor along one mesh axis."""
    if placement is None or shard_cut(placement) is None:
        return meta
    return Meta(local_shape(meta.shape, placement, ranks, rank), meta.dtype)


def placed_tensors(line: PlacementRule, query: RuleQuery) -> list[tuple[Placement, Meta]]:
    """Each tensor and result with its placement, without masked results."""
    both = [*zip(line.inputs, query.tensors, strict=True), *zip(line.outputs, query.outputs, strict=True)]
    return [(p, meta) for p, meta in both if p is not None and meta is not None]


def why_inapplicable(line: PlacementRule, query: RuleQuery, ranks: int) -> str:
    """The reason why the placement rule does not apply to that many ranks (its `cut`, or a reduction), or empty."""
    for placement, meta in placed_tensors(line, query):
        if isinstance(placement, Partial) and not is_reducible(placement.reduce_op, meta.dtype):
            return f"P({placement.reduce_op}) of {meta} means nothing"
        cut = shard_cut(placement)
        if cut is None or line.cut == "any":
            continue
        size = meta.shape[cut[0]]
        if line.cut in ("even", "aligned") and (size % (ranks * cut[1]) or not size):
            return f"{size} rows on {ranks} ranks are not even"
        if line.cut == "aligned" and size // ranks * meta.dtype.itemsize % ALIGNMENT:
            return f"{size} rows on {ranks} ranks are no multiples of {ALIGNMENT} bytes"
        if line.cut == "filled" and not local_meta(meta, placement, ranks, ranks - 1).shape[cut[0]]:
            return f"{size} rows on {ranks} ranks leave one without any"
    return ""


def representative_coordinates(line: PlacementRule, query: RuleQuery, ranks: int) -> Sequence[int]:
    """Coordinates along the axis at which every different piece occurs.

    A dim has full pieces, then at most one short one, then empty ones.
    """
    found = {0}
    for placement, meta in placed_tensors(line, query):
        cut = shard_cut(placement)
        if cut is not None and meta.shape[cut[0]] % (ranks * cut[1]) == 0:
            continue  # all are alike
        if cut is not None and cut[1] > 1:
            return range(ranks)
        if cut is not None:
            size = meta.shape[cut[0]]
            full = size // max(-(-size // ranks), 1)
            found |= {full, full + 1}
    return sorted(place for place in found if place < ranks)


def local_call_at(piece: LocalCall, line: PlacementRule, ranks: int, rank: int, own: OwnArguments) -> LocalCall:
    """The call that the rank at one coordinate of the axis makes; `own` returns its own arguments."""
    query = piece.query
    tensors = tuple(local_meta(m, p, ranks, rank) for m, p in zip(query.tensors, line.inputs, strict=True))
    outputs = tuple(m and local_meta(m, p, ranks, rank) for m, p in zip(query.outputs, line.outputs, strict=True))
    local = RuleQuery(query.op, query.arguments, tensors, outputs)
    given = own(local, query)
    if not given:
        return LocalCall(local, piece.call)
    return LocalCall(replace(local, arguments={**query.arguments, **given}), with_arguments(piece.call, given))


def distinct_local_calls(
    whole: Iterable[LocalCall], line: PlacementRule, ranks: int, own: OwnArguments
) -> tuple[LocalCall, ...]:
    """The different calls along one more axis, made from those before it."""
    found: dict[LocalCallKey, LocalCall] = {}
    for piece in whole:
        for rank in representative_coordinates(line, piece.query, ranks):
            made = local_call_at(piece, line, ranks, rank, own)
            found.setdefault(made.key, made)
    return tuple(found.values())


def local_calls_by_rank(
    whole: LocalCall, lines: Sequence[PlacementRule], sizes: Sequence[int], own: OwnArguments
) -> tuple[tuple[LocalCall, ...], tuple[int, ...]]:
    """The different calls on the whole mesh, and for each rank the position of its call among them."""
    known: list[LocalCall] = [whole]
    whose = [0]
    for line, ranks in zip(lines, sizes, strict=True):
        found: dict[LocalCallKey, int] = {}
        made: list[LocalCall] = []
        table = []
        for piece in known:
            row = []
            for rank in range(ranks):
                one = local_call_at(piece, line, ranks, rank, own)
                if found.setdefault(one.key, len(made)) == len(made):
                    made.append(one)
                row.append(found[one.key])
            table.append(row)
        known, whose = made, [place for which in whose for place in table[which]]
    return tuple(known), tuple(whose)


def no_own_arguments(piece: RuleQuery, whole: RuleQuery) -> Mapping[str, Any]:
    """No own arguments: the call on a piece has those of the whole call."""
    return {}


def with_arguments(call: Call, given: Mapping[str, Any]) -> Call:
    """The call with these arguments replaced by name, or added as keywords."""
    spots = {a.name: i for i, a in enumerate(overload(call.op)._schema.arguments)}
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in given.items():
        if spots[name] < len(args):
            args[spots[name]] = frozen(value)
        else:
            kwargs[name] = frozen(value)
    return replace(call, args=tuple(args), kwargs=tuple(kwargs.items()))


def written_leaves(call: Call) -> dict[int, int | None]:
    """The tensors that the call writes to, by leaf number, each with the number of the result that it becomes, or None."""
    schema, given = overload(call.op)._schema, call.named()
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
        leaves = leaf_numbers(given.get(argument.name))
        # A written list becomes as many results: no known op returns one beside others.
        found.update(dict.fromkeys(leaves, result if len(leaves) == 1 else None))
    return found


class InvalidCall(Refusal, call="propagate {op}"):
    """Specs or arguments that are not a call of the op on one mesh."""


class MissingRuleError(Refusal, call="propagate {op}", argument="op"):
    """The op has no rule; the message lists what was tried."""

    PROBLEM = "there is no rule for it; tried: {tried}"


class InvalidRule(Refusal):
    """An invalid rule; `where` is its file and line."""

    def __init__(self, op: str, where: str, values: str, problem: str, remedy: str) -> None:
        self.where = where
        super().__init__(f"rule of {op} at {where}", "line", values, problem, remedy)


class WouldMoveWritten(Refusal, call="propagate {op}"):
    """The call writes to a tensor that would have to be redistributed first, which its owner would not see."""

    PROBLEM = "the op writes to it, so it stays where it lies, and no line of the rule leaves it there"


class NoMetadata(Refusal, call="propagate {op}", argument="outputs"):
    """The shapes of the results cannot be known before the op runs."""


_AS_DOCUMENTED = "Let it yield Line(inputs, outputs, cut), as strategies.ops.semantics.rule_registry has it."


def check_registry(book: RuleRegistry) -> None:
    """Raises `InvalidRule` for a rule whose op does not exist, whose functions are not callable, or with unknown `shapes`.

    >>> entry = OpRule("aten.mm.default", lambda query: [], "mm", "none", ("size",))
    >>> check_registry(RuleRegistry.of(entry))
    Traceback (most recent call last):
    ...
    strategies.ops.semantics.local_call.InvalidRule: rule of aten.mm.default at <doctest ...: line: shapes=('size',): ...
    """
    for op, entry in book.entries.items():
        fault = find_fault(op, entry)
        if fault is not None:
            raise InvalidRule(op, getattr(entry, "where", repr(entry)), *fault)


def find_fault(op: str, entry: object) -> tuple[str, str, str] | None:
    """The fault in the definition of a rule as (value, problem, remedy), or None."""
    if not isinstance(entry, OpRule) or entry.op != op:
        return f"entry {entry!r}", "it is no entry of this op", "Make the registry with RuleRegistry.of."
    if not callable(entry.lines):
        return f"lines={entry.lines!r}", "it is no function", "Give RuleQuery -> Iterable[PlacementRule]."
    for name in ("own", "instead"):
        function = getattr(entry, name)
        if function is not None and not callable(function):
            return f"{name}={function!r}", "it is no function", "Give a function of the RuleQuery, or nothing."
    if op.count(".") != 2 or not overload_exists(op):
        remedy = "Write namespace.name.overload, or make entries with strategies.ops.semantics.rule_registry.rules."
        return f"op={op!r}", "this torch has no such overload", remedy
    names = [argument.name for argument in overload(op)._schema.arguments] if entry.shapes else []
    if not set(entry.shapes) <= set(names):
        return f"shapes={entry.shapes}", "the op has no such argument", f"Name some of {', '.join(names)}."
    return None


def checked_rule(entry: OpRule) -> Callable[[RuleQuery, int], tuple[PlacementRule, ...]]:
    """The checked placement rules of a rule, including the all-replicated one.  The function raises `InvalidRule`."""

    def offer(query: RuleQuery, ranks: int) -> tuple[PlacementRule, ...]:
        try:
            found = tuple(entry.lines(query))
        except Exception as error:  # why: any error of the author's function, reported with its file and line
            problem = f"it raised when asked about {query.tensors}"
            remedy = "Let it yield nothing for calls that it does not know."
            raise _bad(entry, f"{type(error).__name__}: {error}", problem, remedy) from error
        for line in found:
            check_line(entry, line, query)
        return tuple(dict.fromkeys((all_replicated(query), *found)))

    return offer


def replacement_call(entry: OpRule, query: RuleQuery, call: Call) -> tuple[RuleQuery, Call]:
    """The query and call that every rank makes in place of this one, if the rule has an `instead`, else this one.

    Raises `InvalidRule` for a call that this torch does not have, and for one of other tensors.
    """
    if entry.instead is None:
        return query, call
    try:
        made = entry.instead(query)
        given = bind_arguments(made.op, made.args, dict(made.kwargs))
    except Exception as error:  # why: any error of the author's function, reported with its file and line
        problem = f"it raised when asked about {query.tensors}"
        remedy = "Let it return a Call of an overload that torch has."
        raise _bad(entry, f"instead: {type(error).__name__}: {error}", problem, remedy) from error
    leaves = set(leaf_numbers((made.args, dict(made.kwargs))))
    if leaves != set(range(len(query.tensors))):
        problem = f"the call has {len(query.tensors)} tensors, that one leaves {sorted(leaves) or 'none'}"
        raise _bad(entry, f"instead: {made}", problem, "Put each Leaf of the call into it.")
    frozen_call = Call(made.op, frozen(made.args), tuple((name, frozen(value)) for name, value in made.kwargs))
    return RuleQuery(made.op, given, query.tensors, query.outputs), frozen_call


def own_arguments_function(entry: OpRule) -> OwnArguments:
    """The function for the own arguments of the call on a piece; none if the piece is the whole.

    >>> entry = OpRule("aten.new_zeros.default", lambda query: [], "factory", "all the same", shapes=("size",))
    >>> import torch
    >>> from dataclasses import replace
    >>> whole = RuleQuery(entry.op, {"size": [-1]}, (), (Meta((4,), torch.float32),))
    >>> own_arguments_function(entry)(replace(whole, outputs=(Meta((2,), torch.float32),)), whole)
    {'size': [2]}
    """

    def own(piece: RuleQuery, whole: RuleQuery) -> Mapping[str, Any]:
        if piece.tensors == whole.tensors and piece.outputs == whole.outputs:
            return {}
        return own_arguments(entry, piece, reshaped=piece.outputs[:1] != whole.outputs[:1])

    return own


def own_arguments(entry: OpRule, piece: RuleQuery, *, reshaped: bool) -> Mapping[str, Any]:
    """The own arguments of a piece; those in `shapes` only if the first result is `reshaped`.

    Raises `InvalidRule` if the rule names an argument that the op does not have.
    """
    if not reshaped and entry.own is None:
        return {}
    first = piece.outputs[0] if entry.shapes and reshaped and piece.outputs else None
    given = {name: list(first.shape) for name in entry.shapes} if first is not None else {}
    if entry.own is None:
        return given
    try:
        more = dict(entry.own(piece))
    except Exception as error:  # why: any error of the author's function, reported with its file and line
        problem = f"it raised when asked about {piece.tensors}"
        remedy = "Let it return the arguments by name."
        raise _bad(entry, f"own: {type(error).__name__}: {error}", problem, remedy) from error
    unknown = sorted(map(str, more.keys() - piece.arguments.keys()))
    if unknown:
        remedy = f"Name some of {', '.join(piece.arguments)}."
        raise _bad(entry, f"own: {', '.join(unknown)}", "the op has no such argument", remedy)
    return {**given, **more}


def all_replicated(query: RuleQuery) -> PlacementRule:
    """The placement rule that always holds."""
    return query.line({}, query.on_each(Replicate()))


def check_line(entry: OpRule, line: object, query: RuleQuery) -> None:
    """Raises `InvalidRule` if the value is not a placement rule for a call of these tensors and results."""
    if not isinstance(line, PlacementRule):
        raise _bad(entry, repr(line), "it is no Line", _AS_DOCUMENTED)
    for what, placements, metas in (
        ("tensors", line.inputs, query.tensors),
        ("results", line.outputs, query.outputs),
    ):
        if not isinstance(placements, tuple) or len(placements) != len(metas):
            count = str(len(placements)) if isinstance(placements, tuple) else f"{placements!r}, which is no tuple"
            count = f"the call has {len(metas)} {what}, the line speaks of {count}"
            raise _bad(entry, _text(line), count, _AS_DOCUMENTED)
        for number, (placement, meta) in enumerate(zip(placements, metas, strict=True)):
            problem = _problem(placement, meta)
            if problem:
                raise _bad(entry, _text(line), f"{what[:-1]} {number}: {problem}", _AS_DOCUMENTED)
    if line.cut not in get_args(Cut):
        raise _bad(entry, f"cut={line.cut!r}", f"a cut is one of {', '.join(get_args(Cut))}", _AS_DOCUMENTED)


def _problem(placement: object, meta: Meta | None) -> str:
    """The reason why the placement does not fit the tensor, or empty."""
    if placement is None:
        return ""
    if not isinstance(placement, Placement) or not is_supported(placement):
        return f"{placement!r} is no placement whose meaning is known"
    if meta is None:
        return f"{short(placement)} of what is no tensor"
    cut = shard_cut(placement)
    if cut is not None and not 0 <= cut[0] < meta.ndim:
        return f"{short(placement)}: there is no dim {cut[0]} in {meta}"
    return ""


def _text(line: PlacementRule) -> str:
    return f"{line.inputs} -> {line.outputs}"


def _bad(entry: OpRule, values: str, problem: str, remedy: str) -> InvalidRule:
    return InvalidRule(entry.op, entry.where, values, problem, remedy)
