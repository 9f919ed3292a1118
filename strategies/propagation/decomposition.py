"""Lines of an op that has no rule, derived from the rules of the ops in its decomposition.

The decomposition is run once on meta tensors and recorded.  A line of the whole op is a line of each inner op such that
every value has the placement that the next op wants: nothing is redistributed inside, so each rank may run the op
itself on its pieces.  The decomposition is then run on the shapes of every different piece of the axis, too: each inner
call must be the one that its own rule means.  That excludes lines under which an argument that was a number of rows or
a size no longer fits, and uneven pieces that an inner op cannot have.

| torch part                                                     | why                               | read on     | run on |
|----------------------------------------------------------------|-----------------------------------|-------------|--------|
| torch._decomp.decomposition_table                              | decompositions                    | 2.11 - 2.15 | 2.13   |
| OpOverload._can_decompose, .decompose                          | those of composite ops            | 2.11 - 2.15 | 2.13   |
| torch.utils._python_dispatch.TorchDispatchMode                 | records inner ops of the thread   | 2.11 - 2.15 | 2.13   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.model.rule import Call, call_of, flat_results, frozen, overload
from strategies.ops.semantics import local_call
from strategies.ops.semantics.rule_registry import Meta, PlacementRule, RuleQuery, RuleRegistry, bind_arguments
from strategies.propagation.mesh_expansion import LineSource
from strategies.propagation.meta_run import no_caller_modes, on_meta_device

MAX_COMBINATIONS = 2000
"""The largest number of combinations of inner lines that are followed; lines beyond them are not offered."""

Overload = torch._ops.OpOverload
ValuePlacements = dict[int, Placement | None]
"""The placement of each value of a trace, by its number."""


@dataclass(frozen=True, slots=True)
class InnerCall:
    """One inner op: the rule query about it, and the numbers of the values that it takes and makes."""

    query: RuleQuery
    takes: tuple[int, ...]
    makes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class DecompositionTrace:
    """A recorded decomposition: the op's tensors are the first values, its results are `outputs`."""

    inner: tuple[InnerCall, ...]
    outputs: tuple[int | None, ...]


def decomposition(book: RuleRegistry, query: RuleQuery) -> LineSource | str:
    """The source of an op's lines by way of its decomposition; or why there is none."""
    if _decomposition_of(overload(query.op)) is None:
        return "it has none"
    trace = _traced(book, query)
    if isinstance(trace, str):
        return trace
    missing = sorted({inner.query.op for inner in trace.inner if inner.query.op not in book and inner.query.tensors})
    if missing:
        return f"no rule for {', '.join(missing)}"

    def offer(piece: RuleQuery, ranks: int) -> tuple[PlacementRule, ...]:
        found = _traced(book, piece)
        if isinstance(found, str):
            return (local_call.all_replicated(piece),)
        return tuple(dict.fromkeys(_lines(book, piece, found, ranks)))

    return offer


def _decomposition_of(op: Overload) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table

    if op._can_decompose():
        return op.decompose
    return decomposition_table.get(op)


class _Recorder(TorchDispatchMode):
    """Records every op that has a rule, and decomposes those that have none."""

    def __init__(self, book: RuleRegistry, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.book = book
        self.kept: list[Tensor] = list(tensors)  # keeps them alive, so that no id is used twice
        self.number = {id(x): i for i, x in enumerate(tensors)}
        self.inner: list[InnerCall] = []
        self.writes = ""

    def __torch_dispatch__(
        self, func: Overload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        decompose = None if str(func) in self.book else _decomposition_of(func)
        if decompose is not None:
            with self:
                out = decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        call, tensors = call_of(func, args, kwargs)
        out = on_meta_device(call)(tensors)
        if func._schema.is_mutable:
            self.writes = str(func)
        metas = tuple(_meta(x) if isinstance(x, Tensor) else None for x in flat_results(out))
        arguments = bind_arguments(call.op, call.args, dict(call.kwargs))
        query = RuleQuery(str(func), arguments, tuple(map(_meta, tensors)), metas)
        made = tuple(self._new(x) if isinstance(x, Tensor) else None for x in flat_results(out))
        self.inner.append(InnerCall(query, tuple(self.number.get(id(x), -1) for x in tensors), made))
        return out

    def _new(self, x: Tensor) -> int:
        self.kept.append(x)
        return self.number.setdefault(id(x), len(self.kept) - 1)


def _meta(x: Tensor) -> Meta:
    return Meta(tuple(x.shape), x.dtype)


def _traced(book: RuleRegistry, query: RuleQuery) -> DecompositionTrace | str:
    """The decomposition on tensors of these shapes; or why it cannot be recorded."""
    call, decompose = _call(query), _decomposition_of(overload(query.op))
    with no_caller_modes():
        tensors = [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in query.tensors]
        recorder = _Recorder(book, tensors)
        args, kwargs = on_meta_device(call).filled(tensors)
        try:
            with recorder:
                out = decompose(*args, **kwargs) if decompose else NotImplemented
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError) as error:
            return f"it cannot be traced: {type(error).__name__}"
    numbers = [recorder.number.get(id(x), -1) if isinstance(x, Tensor) else None for x in flat_results(out)]
    if out is NotImplemented or any(-1 in inner.takes for inner in recorder.inner) or -1 in numbers:
        return "it makes tensors out of sight"
    if recorder.writes:
        return f"it writes to a tensor by {recorder.writes}"
    return DecompositionTrace(tuple(recorder.inner), tuple(numbers))


def _call(query: RuleQuery) -> Call:
    schema = overload(query.op)._schema.arguments
    args = tuple(query[a.name] for a in schema if not a.kwarg_only)
    return Call(query.op, args, tuple((a.name, query[a.name]) for a in schema if a.kwarg_only))


def _lines(book: RuleRegistry, query: RuleQuery, trace: DecompositionTrace, ranks: int) -> Iterator[PlacementRule]:
    def holds(line: PlacementRule, taken: Sequence[PlacementRule], rank: int) -> bool:
        """Whether the op on that rank's pieces decomposes into the calls that the inner rules mean."""
        tensors = tuple(
            local_call.local_meta(m, p, ranks, rank) for m, p in zip(query.tensors, line.inputs, strict=True)
        )
        local = _traced(book, RuleQuery(query.op, query.arguments, tensors, query.outputs))
        if isinstance(local, str) or local.outputs != trace.outputs or len(local.inner) != len(trace.inner):
            return False
        triples = zip(trace.inner, local.inner, taken, strict=True)
        return all(_same(book, one, piece, inner_line, ranks, rank) for one, piece, inner_line in triples)

    yield local_call.all_replicated(query)
    whole = Replicate()
    for placements, taken in _combinations(book, trace, ranks):
        inputs = tuple(placements.get(i) or whole for i in range(len(query.tensors)))
        outputs = tuple(None if number is None else placements.get(number, whole) for number in trace.outputs)
        line = PlacementRule(inputs, outputs)
        if all(holds(line, taken, rank) for rank in local_call.representative_coordinates(line, query, ranks)):
            yield line


def _combinations(
    book: RuleRegistry, trace: DecompositionTrace, ranks: int
) -> Sequence[tuple[ValuePlacements, tuple[PlacementRule, ...]]]:
    """Each choice of a line for every inner op under which every value has the placement that all ops want."""
    begun: list[tuple[ValuePlacements, tuple[PlacementRule, ...]]] = [({}, ())]
    for inner in trace.inner:
        entry = book.get(inner.query.op)
        # The rule's query may be about another call; `_lines` checks what the op itself makes of the pieces.
        query = local_call.replacement_call(entry, inner.query, _call(inner.query))[0] if entry else inner.query
        lines = local_call.checked_rule(entry)(query, ranks) if entry else (local_call.all_replicated(query),)
        longer = [
            (more, (*taken, line))
            for placements, taken in begun
            for line in lines
            if not local_call.why_inapplicable(line, inner.query, ranks)
            and (more := _extended(placements, inner, line)) is not None
        ]
        begun = longer[:MAX_COMBINATIONS]
    return begun


def _extended(placements: ValuePlacements, inner: InnerCall, line: PlacementRule) -> ValuePlacements | None:
    """The placements with those of one more inner op's line; None if the line wants a value elsewhere."""
    found = dict(placements)
    for number, placement in zip(inner.takes, line.inputs, strict=True):
        want = placement or Replicate()
        if found.setdefault(number, want) != want:
            return None
    for made, placement in zip(inner.makes, line.outputs, strict=True):
        if made is not None and found.setdefault(made, placement) != placement:
            return None
    return found


def _same(book: RuleRegistry, whole: InnerCall, piece: InnerCall, line: PlacementRule, ranks: int, rank: int) -> bool:
    """Whether an inner call on that rank's pieces is the one that the line means for the whole inner call."""
    want, got = whole.query, piece.query
    if (want.op, whole.takes, whole.makes) != (got.op, piece.takes, piece.makes):
        return False
    tensors = tuple(local_call.local_meta(m, p, ranks, rank) for m, p in zip(want.tensors, line.inputs, strict=True))
    pairs = zip(want.outputs, line.outputs, strict=True)
    outputs = tuple(m and local_call.local_meta(m, p, ranks, rank) for m, p in pairs)
    if (tensors, outputs) != (got.tensors, got.outputs):
        return False
    entry = book.get(want.op)
    meant = {**want.arguments, **(local_call.own_arguments_function(entry)(got, want) if entry else {})}
    return all(frozen(got.arguments[name]) == frozen(value) for name, value in meant.items())
