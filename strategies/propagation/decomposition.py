"""Lines of an op that has no rule, from the rules of the ops that it is made of.

The decomposition is run once on meta tensors and written down.  A line of the whole is a line of each inner op such that
every value lies where the next op wants it: nothing is redistributed inside, so each rank may run the op itself on its
pieces.  Then it is run on the pieces' shapes, too, for every different piece of the axis: each inner call must be the
one that its own rule means.  So a count that was a number of rows, a size in an argument or an uneven piece that an
inner op cannot have excludes the line by itself.

| torch part                                                     | why                               | read on     | run on |
|----------------------------------------------------------------|-----------------------------------|-------------|--------|
| torch._decomp.decomposition_table                              | what an op is made of             | 2.11 - 2.15 | 2.13   |
| OpOverload._can_decompose, .decompose                          | the same for composite ops        | 2.11 - 2.15 | 2.13   |
| torch.utils._python_dispatch.TorchDispatchMode                 | sees the inner ops, on one thread | 2.11 - 2.15 | 2.13   |
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

from strategies.model.rule import Call, call_of, frozen, overload, results
from strategies.ops.semantics.local_call import (
    all_replicated,
    checked_own,
    local_meta,
    made_instead,
    offer_of,
    places,
    unfit,
)
from strategies.ops.semantics.rulebook import Ask, Book, Entry, Line, Meta, bound
from strategies.propagation.meta_run import calm, on_meta

MOST = 2000
"""So many ways through the inner ops are followed; lines beyond them are not offered."""

Offer = Callable[[Ask, int], tuple[Line, ...]]
Ways = dict[int, Placement | None]


@dataclass(frozen=True, slots=True)
class Inner:
    """One inner op: the question about it, and the numbers of the values that it takes and makes."""

    ask: Ask
    takes: tuple[int, ...]
    makes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What an op is made of: its tensors are the first values, its results these."""

    inner: tuple[Inner, ...]
    outputs: tuple[int | None, ...]


def decomposition(book: Book, ask: Ask) -> Offer | str:
    """The lines of an op by way of its decomposition; or why there are none."""
    how = _how(overload(ask.op))
    if how is None:
        return "it has none"
    trace = _traced(book, ask)
    if isinstance(trace, str):
        return trace
    missing = sorted({inner.ask.op for inner in trace.inner if inner.ask.op not in book and inner.ask.tensors})
    if missing:
        return f"no rule for {', '.join(missing)}"

    def offer(asked: Ask, ranks: int) -> tuple[Line, ...]:
        found = _traced(book, asked)
        return (
            (all_replicated(asked),)
            if isinstance(found, str)
            else tuple(dict.fromkeys(_lines(book, asked, found, ranks)))
        )

    return offer


def _how(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table

    if op._can_decompose():
        return op.decompose
    return decomposition_table.get(op)


class _Recorder(TorchDispatchMode):
    """Writes down every op that has a rule, and takes apart those that have none."""

    def __init__(self, book: Book, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.book = book
        self.kept: list[Tensor] = list(tensors)  # so that no id is used twice
        self.number = {id(x): i for i, x in enumerate(tensors)}
        self.inner: list[Inner] = []
        self.writes = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        how = None if str(func) in self.book else _how(func)
        if how is not None:
            with self:
                out = how(*args, **kwargs)
            if out is not NotImplemented:
                return out
        call, tensors = call_of(func, args, kwargs)
        out = on_meta(call)(tensors)
        if func._schema.is_mutable:
            self.writes = str(func)
        metas = tuple(_meta(x) if isinstance(x, Tensor) else None for x in results(out))
        ask = Ask(str(func), bound(call.op, call.args, dict(call.kwargs)), tuple(map(_meta, tensors)), metas)
        made = tuple(self._new(x) if isinstance(x, Tensor) else None for x in results(out))
        self.inner.append(Inner(ask, tuple(self.number.get(id(x), -1) for x in tensors), made))
        return out

    def _new(self, x: Tensor) -> int:
        self.kept.append(x)
        return self.number.setdefault(id(x), len(self.kept) - 1)


def _meta(x: Tensor) -> Meta:
    return Meta(tuple(x.shape), x.dtype)


def _traced(book: Book, ask: Ask) -> Trace | str:
    """The decomposition on tensors of these shapes; or why it cannot be followed."""
    call, how = _call(ask), _how(overload(ask.op))
    with calm():
        tensors = [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in ask.tensors]
        recorder = _Recorder(book, tensors)
        args, kwargs = on_meta(call).filled(tensors)
        try:
            with recorder:
                out = how(*args, **kwargs) if how else NotImplemented
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError) as error:
            return f"it cannot be traced: {type(error).__name__}"
    numbers = [recorder.number.get(id(x), -1) if isinstance(x, Tensor) else None for x in results(out)]
    if out is NotImplemented or any(-1 in inner.takes for inner in recorder.inner) or -1 in numbers:
        return "it makes tensors out of sight"
    if recorder.writes:
        return f"it writes to a tensor by {recorder.writes}"
    return Trace(tuple(recorder.inner), tuple(numbers))


def _call(ask: Ask) -> Call:
    schema = overload(ask.op)._schema.arguments
    args = tuple(ask[a.name] for a in schema if not a.kwarg_only)
    return Call(ask.op, args, tuple((a.name, ask[a.name]) for a in schema if a.kwarg_only))


def _lines(book: Book, ask: Ask, trace: Trace, ranks: int) -> Iterator[Line]:
    yield all_replicated(ask)
    whole = Replicate()
    for ways, taken in _ways(book, trace, ranks):
        inputs = tuple(ways.get(i) or whole for i in range(len(ask.tensors)))
        outputs = tuple(None if number is None else ways.get(number, whole) for number in trace.outputs)
        line = Line(inputs, outputs)
        if all(_holds(book, ask, trace, line, taken, ranks, rank) for rank in places(line, ask, ranks)):
            yield line


def _ways(book: Book, trace: Trace, ranks: int) -> Iterator[tuple[Ways, tuple[Line, ...]]]:
    """Each way to take a line for every inner op such that all values lie as they are wanted."""
    begun: list[tuple[Ways, tuple[Line, ...]]] = [({}, ())]
    for inner in trace.inner:
        entry = book.get(inner.ask.op)
        lines = offer_of(entry)(_meant(entry, inner.ask), ranks) if entry else (all_replicated(inner.ask),)
        longer = [
            (more, (*taken, line))
            for ways, taken in begun
            for line in lines
            if not unfit(line, inner.ask, ranks) and (more := _follow(inner, line, ways)) is not None
        ]
        begun = longer[:MOST]
    yield from begun


def _meant(entry: Entry, ask: Ask) -> Ask:
    """The question that the rule is asked.  The op itself runs on pieces all the same, and `_holds` looks at what it makes."""
    return made_instead(entry, ask, _call(ask))[0]


def _follow(inner: Inner, line: Line, ways: Ways) -> Ways | None:
    found = dict(ways)
    for number, placement in zip(inner.takes, line.inputs, strict=True):
        want = placement or Replicate()
        if found.setdefault(number, want) != want:
            return None
    for made, placement in zip(inner.makes, line.outputs, strict=True):
        if made is not None and found.setdefault(made, placement) != placement:
            return None
    return found


def _holds(book: Book, ask: Ask, trace: Trace, line: Line, taken: Sequence[Line], ranks: int, rank: int) -> bool:
    """Whether the op on that rank's pieces is made of the calls which the inner rules mean."""
    tensors = tuple(local_meta(m, p, ranks, rank) for m, p in zip(ask.tensors, line.inputs, strict=True))
    local = _traced(book, Ask(ask.op, ask.arguments, tensors, ask.outputs))
    if isinstance(local, str) or local.outputs != trace.outputs or len(local.inner) != len(trace.inner):
        return False
    return all(
        _same(book, whole, piece, one, ranks, rank)
        for whole, piece, one in zip(trace.inner, local.inner, taken, strict=True)
    )


def _same(book: Book, whole: Inner, piece: Inner, line: Line, ranks: int, rank: int) -> bool:
    asked, got = whole.ask, piece.ask
    if (asked.op, whole.takes, whole.makes) != (got.op, piece.takes, piece.makes):
        return False
    tensors = tuple(local_meta(m, p, ranks, rank) for m, p in zip(asked.tensors, line.inputs, strict=True))
    outputs = tuple(m and local_meta(m, p, ranks, rank) for m, p in zip(asked.outputs, line.outputs, strict=True))
    if (tensors, outputs) != (got.tensors, got.outputs):
        return False
    entry = book.get(asked.op)
    meant = {**asked.arguments, **(checked_own(entry)(got, asked) if entry else {})}
    return all(frozen(got.arguments[name]) == frozen(value) for name, value in meant.items())
