"""Rules of our own in the running DTensor, for a while: `with overlay_dtensor():`.

    with overlay_dtensor():                   # our whole book
        y = distributed.cumsum(0)             # right, where DTensor's own rule is not

Inside, an op that the book has goes by the book's lines, expanded to the mesh by `strategies.propagation.mesh_expansion`; DTensor's own
lines for that op are not asked, its caches neither read nor filled.  Other ops go their own way.  Outside, all is as it
was, also after an exception.

Who sees it: the thread and asyncio task that entered it; a backward inside (it stays in that thread); the ranks of a
`localtensor.run` that is called inside; a `LocalTensorMode` inside.  A rank of a program may enter one of its own.
Threads that are started inside, and real processes, do not see it.  Where overlays are nested, the inner goes first.

What it cannot mend: DTensor's own redistribution (`full_tensor`, `redistribute`), which is no op and has no rule; ops that
torch takes apart before DTensor sees them, but for what they are taken apart into; ops that the book has not.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor.placement_types import Placement

from localtensor._util import ambient
from localtensor.errors import Refusal
from strategies.model.rule import Call, Leaf, overload
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics.local_call import fault_of, unfit
from strategies.ops.semantics.rulebook import Ask, Book, Entry, Line
from strategies.propagation.overlay import call
from strategies.propagation.overlay.call_plan import CallPlanner, Lines, global_metas, plan_of, question
from strategies.torch_api import dtensor, handler_table


class BadOverlay(Refusal, call="overlay_dtensor"):
    """Rules that cannot be put over DTensor's, or names of none."""


def overlay_dtensor(
    book: Book | None = None, *, only: Iterable[object] | None = None, add: bool = True, replace: bool = True
) -> Overlay:
    """A context manager: inside, DTensor goes by the rules of `book`; without one, by `OUR_RULES`.

    `only` names overloads, or globs of them: just those are taken from the book.  `add=False` leaves out what DTensor
    has no rule for, `replace=False` what it has.  The same object may be entered again, inside itself and in others'
    threads.

    Raises `BadOverlay` for what is no book, names an op or an argument that torch has not, or comes to no rule; and at
    use `strategies.ops.semantics.local_call.BadRule`, with file and line, where a rule says nonsense.

    >>> from strategies.ops.semantics.rulebook import Book, rules
    >>> rows = rules("scans", "each column by itself", ["aten.cumsum.default"], lambda ask: [])
    >>> with overlay_dtensor(Book.of(*rows)) as there:
    ...     there.ops
    ('aten.cumsum.default',)
    """
    return Overlay(OUR_RULES if book is None else book, only=only, add=add, replace=replace)


class Overlay:
    """What `overlay_dtensor` returns: a context manager that may be entered again and again, by any thread."""

    def __init__(
        self, book: Book, *, only: Iterable[object] | None = None, add: bool = True, replace: bool = True
    ) -> None:
        if not isinstance(book, Book):
            raise BadOverlay(
                "book",
                repr(book),
                "this is no Book",
                "Make one: strategies.ops.semantics.rulebook.Book.of(*rules(...)).",
            )
        entries = [entry for entry in _among(book, only) if _wanted(overload(entry.op), add=add, replace=replace)]
        if not entries:
            raise BadOverlay("book", f"{len(book)} rules", "none of them is left", "Ask for more: only, add, replace.")
        planner = CallPlanner()
        self.entries = tuple(entries)
        self.handlers = {overload(entry.op): handler_table.Ours(call.Runner(planner, entry)) for entry in entries}
        self.plans = planner

    @property
    def ops(self) -> tuple[str, ...]:
        """The overloads that go by our rules inside, in the book's order."""
        return tuple(entry.op for entry in self.entries)

    def __enter__(self) -> Overlay:
        stack = handler_table.Stack(self, self.handlers, ambient.rules())
        with contextlib.ExitStack() as undo:  # should any of it fail
            ambient.begin_rules(handler_table.begin)
            undo.callback(ambient.end_rules, handler_table.end)
            # a GPU's backward has a thread of its own
            ambient.hold_backward(lambda: torch.autograd.set_multithreading_enabled(False))
            ambient.put_rules(stack)
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = ambient.own_rules()
        if stack is not None:
            rest = stack.without(self)
            ambient.put_rules(None if rest is not None and rest.everywhere else rest)
        ambient.release_backward()
        ambient.end_rules(handler_table.end)

    def everywhere(self) -> None:
        """For good, in every thread of the process that has no overlay of its own."""
        ambient.begin_rules(handler_table.begin)
        ambient.put_process_rules(handler_table.Stack(self, self.handlers, ambient.process_rules(), everywhere=True))

    def __repr__(self) -> str:
        return f"Overlay({len(self.entries)} rules)"


def _among(book: Book, only: Iterable[object] | None) -> list[Entry]:
    """The entries that are asked for, each looked at."""
    if isinstance(only, str):
        raise BadOverlay("only", repr(only), "this is one name, and no list of names", f"Write [{only!r}].")
    names = [entry.op for entry in book]
    globs = None if only is None else list(map(str, only))
    for glob in globs or ():
        if not fnmatch.filter(names, glob):
            raise BadOverlay("only", repr(glob), "the book has no such overload", "Write them as `aten.add.Tensor`.")
    kept = [entry for entry in book if globs is None or any(fnmatch.fnmatchcase(entry.op, glob) for glob in globs)]
    for entry in kept:
        _check(entry)
    return kept


def _check(entry: Entry) -> None:
    fault = fault_of(entry.op, entry)
    if fault is not None:
        values, problem, remedy = fault
        raise BadOverlay("book", f"the rule of {entry.op} at {entry.where}: {values}", problem, remedy)


def _wanted(op: torch._ops.OpOverload, *, add: bool, replace: bool) -> bool:
    known = bool(dtensor.source_of(op)) or op in handler_table.torch_handlers()
    return replace if known else add


# Rules of a book as DTensor's own tables hold rules: a strategy for each op, for those who ask its propagator.
#
# An overlay does not need them: it is asked before the tables are.  They are for what reads the tables instead: our
# validator, which takes claims from them, and DTensor's decompositions.
#
# | torch part (under torch.distributed.tensor)                                    | read on     | run on |
# |---------------------------------------------------------------------------------|-------------|--------|
# | DTensor._op_dispatcher.sharding_propagator: register_op_strategy                | 2.11 - 2.15 | 2.13   |
# | .op_single_dim_strategy_funcs, .op_to_rules, .op_to_shape_and_stride_idx,       |             |        |
# | .op_to_schema_info_for_single_dim_strategy: what would be asked before is taken |             |        |
# | out; .op_to_scalar_shape_adjuster, .squeeze_op_to_dims_variant by feature, and  |             |        |
# | left in for ops whose ranks make calls of their own                             | 2.11 - 2.15 | 2.13   |
# | _op_schema.OpSchema, OpSpec, OpStrategy, TupleStrategy, RuntimeSchemaInfo       | 2.11 - 2.15 | 2.13   |
# | _ops.utils.generate_redistribute_costs                                          | 2.11 - 2.15 | 2.13   |
#
# `tests/strategies/propagation/overlay/test_context_strategies.py` names each part.

Strategy = Callable[[OpSchema], OpStrategy]
_PREEMPTING = (
    "op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy", "op_to_rules",
    "op_to_shape_and_stride_idx",
)  # fmt: skip
_REWRITING = ("op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant")
"""What DTensor itself changes in the call of a rank: a number of rows, the dims that are squeezed."""


def register(entries: Iterable[Entry], strategy: Callable[[Entry], Strategy]) -> None:
    """Each entry is what DTensor's propagator answers by, for good; nothing that it would ask before is left."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for entry in entries:
        op = overload(entry.op)
        served = in_tables(entry)
        for name in (*_PREEMPTING, *([] if served.own or served.instead else _REWRITING)):
            getattr(propagator, name, {}).pop(op, None)
        propagator.register_op_strategy(op, strategy(served), schema_info(entry.op))
        names = [argument.name for argument in op._schema.arguments]
        if entry.shapes:
            propagator.op_to_shape_and_stride_idx[op] = names.index(entry.shapes[0])


def in_tables(entry: Entry) -> Entry:
    """The entry as DTensor's tables can serve it: where each rank makes a call of its own that DTensor does not make by
    itself, no line but all-replicate is left.  An overlay serves all of them."""
    if entry.own is None and entry.instead is None:
        return entry
    op, propagator = overload(entry.op), DTensor._op_dispatcher.sharding_propagator
    if any(op in getattr(propagator, name, {}) for name in _REWRITING):
        return entry
    return replace(entry, lines=_no_lines, own=None, instead=None)


def _no_lines(ask: Ask) -> Iterable[Line]:
    return ()


def schema_info(op: str) -> RuntimeSchemaInfo:
    """What DTensor's memory is to tell calls apart by: every argument that is no tensor."""
    arguments = overload(op)._schema.arguments
    words = [a.name for a in arguments if a.kwarg_only]
    lists = any("Tensor" in str(a.type) and "List" in str(a.type) for a in arguments)
    return RuntimeSchemaInfo(0, words or None, needs_pytree=lists)


def strategy_of(entry: Entry, schema: OpSchema) -> OpStrategy:
    """All lines that fit, on a mesh of one axis; on a larger one the combination of them that costs least.

    `schema` is as DTensor's propagator hands it to strategies.  Raises `BadRule` where the rule says nonsense.
    """
    given: list[OpStrategy] = []
    args = tuple(_taken(value, given) for value in schema.args_schema)
    call = Call(entry.op, args, tuple((name, _taken(value, given)) for name, value in schema.kwargs_schema.items()))
    specs = [one.strategies[0].output_spec for one in given]
    metas = [_meta(spec) for spec in specs]
    mesh = specs[0].mesh
    outputs = global_metas(call, metas)
    if mesh.ndim > 1:
        plan = plan_of(entry, call, specs, mesh)
        return OpStrategy([_spec(given, plan.inputs, plan.outputs, metas, outputs, mesh)])
    ask = question(call, metas, outputs)
    lines = [line for line in Lines(entry, ask)(ask, mesh.size()) if not unfit(line, ask, mesh.size())]
    return OpStrategy([_line_spec(given, line, metas, outputs, mesh) for line in lines])


def _taken(value: Any, given: list[OpStrategy]) -> Any:
    if isinstance(value, OpStrategy):
        given.append(value)
        return Leaf(len(given) - 1)
    if isinstance(value, TupleStrategy):
        return [_taken(v, given) for v in value.children]
    if isinstance(value, (list, tuple)):
        made = [_taken(v, given) for v in value]
        return made if isinstance(value, list) else tuple(made)
    return value


def _meta(spec: DTensorSpec) -> TensorMeta:
    if spec.tensor_meta is None:
        raise ValueError("a spec without sizes")
    return spec.tensor_meta


def _line_spec(
    given: Sequence[OpStrategy],
    line: Line,
    metas: Sequence[TensorMeta],
    outputs: Sequence[TensorMeta | None],
    mesh: Any,
) -> OpSpec:
    inputs = [((p if p is not None else Replicate()),) for p in line.inputs]
    return _spec(given, inputs, [None if p is None else (p,) for p in line.outputs], metas, outputs, mesh)


def _spec(
    given: Sequence[OpStrategy], inputs: Sequence[tuple[Placement, ...]], outs: Sequence[tuple[Placement, ...] | None],
    metas: Sequence[TensorMeta], outputs: Sequence[TensorMeta | None], mesh: Any,
) -> OpSpec:  # fmt: skip
    wanted = [DTensorSpec(mesh, row, tensor_meta=meta) for row, meta in zip(inputs, metas, strict=True)]
    made = [
        None if row is None or meta is None else DTensorSpec(mesh, row, tensor_meta=meta)
        for row, meta in zip(outs, outputs, strict=True)
    ]
    costs = [generate_redistribute_costs(one, spec) for one, spec in zip(given, wanted, strict=True)]
    results: Any = None if not any(made) else made[0] if len(made) == 1 else tuple(made)
    return OpSpec(results, input_specs=wanted, redistribute_cost=costs)
