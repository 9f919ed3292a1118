"""`with overlay_dtensor():` runs DTensor's ops under our rules.

    with overlay_dtensor():                   # all our rules
        y = distributed.cumsum(0)             # right, where DTensor's own rule is not

Inside, an op with a rule in the book runs by the rule's lines, expanded to the mesh by
`strategies.propagation.mesh_expansion`.  DTensor's own rule for that op is not called, and its caches are neither read
nor filled.  Other ops run as usual.  Afterwards, also after an exception, DTensor is as before.

The overlay applies to the thread and asyncio task that entered it; to a backward inside (it stays in that thread); to
the ranks of a `localtensor.run` that is called inside; to a `LocalTensorMode` inside.  A rank of a program may enter
one of its own.  It does not apply to threads that are started inside, nor to real processes.  The inner of nested
overlays takes precedence.

It does not change DTensor's own redistribution (`full_tensor`, `redistribute`), which is no op and has no rule; ops that
torch decomposes before DTensor sees them, except for the ops that they decompose into; ops without a rule in the book.

An overlay takes precedence over DTensor's tables of strategies.  `register_strategies` writes rules to these tables,
for code that reads them: our validator, and DTensor's decompositions.

| torch part (under torch.distributed.tensor)                                    | read on     | run on |
|---------------------------------------------------------------------------------|-------------|--------|
| DTensor._op_dispatcher.sharding_propagator: register_op_strategy                | 2.11 - 2.15 | 2.13   |
| .op_single_dim_strategy_funcs, .op_to_rules, .op_to_shape_and_stride_idx,       |             |        |
| .op_to_schema_info_for_single_dim_strategy: entries that take precedence are    |             |        |
| removed; .op_to_scalar_shape_adjuster, .squeeze_op_to_dims_variant by feature,  |             |        |
| kept for ops whose ranks make calls of their own                                | 2.11 - 2.15 | 2.13   |
| _op_schema.OpSchema, OpSpec, OpStrategy, TupleStrategy, RuntimeSchemaInfo       | 2.11 - 2.15 | 2.13   |
| _ops.utils.generate_redistribute_costs                                          | 2.11 - 2.15 | 2.13   |

`tests/strategies/propagation/overlay/test_context_findings.py` checks each part by name.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor.placement_types import Placement

from localtensor._util import ambient
from localtensor.errors import Refusal
from strategies.model.rule import Call, Leaf, overload
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics.local_call import find_fault, why_inapplicable
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, RuleRegistry
from strategies.propagation.overlay import call, call_plan
from strategies.torch_api import dtensor, handler_table


class BadOverlay(Refusal, call="overlay_dtensor"):
    """Arguments of `overlay_dtensor` that select no rules, or invalid ones."""


def overlay_dtensor(
    book: RuleRegistry | None = None, *, only: Iterable[object] | None = None, add: bool = True, replace: bool = True
) -> Overlay:
    """A context manager: inside, DTensor uses the rules of `book`, by default those of `OUR_RULES`.

    `only` restricts the rules to these overloads, or globs of them.  `add=False` leaves out ops without a rule of
    DTensor's, `replace=False` those with one.  The same object may be entered again, inside itself and in other threads.

    Raises `BadOverlay` if `book` is no book, if a rule names an op or an argument that torch does not have, or if no rule
    is left; and at a call `strategies.ops.semantics.local_call.InvalidRule`, with file and line, for an invalid line.

    >>> from strategies.ops.semantics.rule_registry import RuleRegistry, rules
    >>> rows = rules("scans", "each column by itself", ["aten.cumsum.default"], lambda query: [])
    >>> with overlay_dtensor(RuleRegistry.of(*rows)) as there:
    ...     there.ops
    ('aten.cumsum.default',)
    """
    return Overlay(OUR_RULES if book is None else book, only=only, add=add, replace=replace)


class Overlay:
    """The reentrant context manager of `overlay_dtensor`.  Thread-safe."""

    def __init__(
        self, book: RuleRegistry, *, only: Iterable[object] | None = None, add: bool = True, replace: bool = True
    ) -> None:
        if not isinstance(book, RuleRegistry):
            remedy = "Make one: strategies.ops.semantics.rule_registry.RuleRegistry.of(*rules(...))."
            raise BadOverlay("book", repr(book), "this is no RuleRegistry", remedy)
        entries = [entry for entry in _selected(book, only) if _wanted(overload(entry.op), add=add, replace=replace)]
        if not entries:
            raise BadOverlay("book", f"{len(book)} rules", "none of them is left", "Ask for more: only, add, replace.")
        self.entries, self.plans = tuple(entries), call_plan.CallPlanner()
        handler = handler_table.OverlayHandler
        self.handlers = {overload(entry.op): handler(call.RuleRunner(self.plans, entry)) for entry in entries}

    @property
    def ops(self) -> tuple[str, ...]:
        """The overloads that run by our rules inside, in the book's order."""
        return tuple(entry.op for entry in self.entries)

    def __enter__(self) -> Overlay:
        stack = handler_table.OverlayStack(self, self.handlers, ambient.rules())
        with contextlib.ExitStack() as undo:  # if a step fails
            ambient.begin_rules(handler_table.install_property)
            undo.callback(ambient.end_rules, handler_table.remove_property)
            # a GPU's backward has a thread of its own
            ambient.hold_backward(lambda: torch.autograd.set_multithreading_enabled(False))
            ambient.set_rules(stack)
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        stack = ambient.own_rules()
        if stack is not None:
            rest = stack.without(self)
            ambient.set_rules(None if rest is not None and rest.everywhere else rest)
        ambient.release_backward()
        ambient.end_rules(handler_table.remove_property)

    def everywhere(self) -> None:
        """Activate the overlay permanently, in every thread of the process without an overlay of its own."""
        ambient.begin_rules(handler_table.install_property)
        stack = handler_table.OverlayStack(self, self.handlers, ambient.process_rules(), everywhere=True)
        ambient.set_process_rules(stack)

    def __repr__(self) -> str:
        return f"Overlay({len(self.entries)} rules)"


def _selected(book: RuleRegistry, only: Iterable[object] | None) -> list[OpRule]:
    """The checked rules for the overloads that `only` names."""
    if isinstance(only, str):
        raise BadOverlay("only", repr(only), "this is one name, and no list of names", f"Write [{only!r}].")
    if only is not None and not isinstance(only, Iterable):
        raise BadOverlay("only", repr(only), "this is no list of names", 'Write ["aten.add.Tensor"].')
    names = [entry.op for entry in book]
    globs = None if only is None else list(map(str, only))
    for glob in globs or ():
        if not fnmatch.filter(names, glob):
            raise BadOverlay("only", repr(glob), "the book has no such overload", "Write them as `aten.add.Tensor`.")
    kept = [entry for entry in book if globs is None or any(fnmatch.fnmatchcase(entry.op, glob) for glob in globs)]
    for entry in kept:
        fault = find_fault(entry.op, entry)
        if fault is not None:
            values, problem, remedy = fault
            raise BadOverlay("book", f"the rule of {entry.op} at {entry.where}: {values}", problem, remedy)
    return kept


def _wanted(op: torch._ops.OpOverload, *, add: bool, replace: bool) -> bool:
    if dtensor.returns_no_tensor(op):  # DTensor itself makes one number of what each rank gets
        return False
    known = bool(dtensor.registry_of(op)) or op in handler_table.torch_handlers()
    return replace if known else add


Strategy = Callable[[OpSchema], OpStrategy]
_PREEMPTING = (
    "op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy", "op_to_rules",
    "op_to_shape_and_stride_idx",
)  # fmt: skip
_REWRITING = ("op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant")
"""Tables by which DTensor changes a rank's call: a number of rows, the dims that are squeezed."""


def register_strategies(entries: Iterable[OpRule], strategy: Callable[[OpRule], Strategy]) -> None:
    """Register each rule with DTensor's propagator, permanently, and remove what would take precedence over it."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for entry in entries:
        op = overload(entry.op)
        served = for_dtensor_tables(entry)
        for name in (*_PREEMPTING, *([] if served.own or served.instead else _REWRITING)):
            getattr(propagator, name, {}).pop(op, None)
        propagator.register_op_strategy(op, strategy(served), schema_info(entry.op))
        names = [argument.name for argument in op._schema.arguments]
        if entry.shapes:
            propagator.op_to_shape_and_stride_idx[op] = names.index(entry.shapes[0])


def for_dtensor_tables(entry: OpRule) -> OpRule:
    """The rule as DTensor's tables can apply it: with all-replicate alone if ranks make calls of their own that DTensor
    does not make itself.  An overlay applies all lines."""
    if entry.own is None and entry.instead is None:
        return entry
    op, propagator = overload(entry.op), DTensor._op_dispatcher.sharding_propagator
    if any(op in getattr(propagator, name, {}) for name in _REWRITING):
        return entry
    return replace(entry, lines=_no_lines, own=None, instead=None)


def _no_lines(query: RuleQuery) -> Iterable[PlacementRule]:
    return ()


def schema_info(op: str) -> RuntimeSchemaInfo:
    """The key of DTensor's cache for the op: every argument that is no tensor."""
    arguments = overload(op)._schema.arguments
    words = [a.name for a in arguments if a.kwarg_only]
    lists = any("Tensor" in str(a.type) and "List" in str(a.type) for a in arguments)
    return RuntimeSchemaInfo(0, words or None, needs_pytree=lists)


def op_strategy(entry: OpRule, schema: OpSchema) -> OpStrategy:
    """All lines that fit, on a mesh of one axis; on more axes, the cheapest combination of lines.

    `schema` is as DTensor's propagator passes it to strategies.  Raises `InvalidRule` for an invalid rule.
    """
    given: list[OpStrategy] = []
    args = tuple(_with_leaves(value, given) for value in schema.args_schema)
    kwargs = tuple((name, _with_leaves(value, given)) for name, value in schema.kwargs_schema.items())
    call = Call(entry.op, args, kwargs)
    specs = [one.strategies[0].output_spec for one in given]
    metas = [_meta(spec) for spec in specs]
    mesh = specs[0].mesh
    outputs = call_plan.global_metas(call, metas)
    if mesh.ndim > 1:
        plan = call_plan.make_call_plan(entry, call, specs, mesh)
        return OpStrategy([_spec(given, plan.inputs, plan.outputs, metas, outputs, mesh)])
    query = call_plan.whole_call_query(call, metas, outputs)
    choices = []
    for line in call_plan.CheckedLines(entry, query)(query, mesh.size()):
        if not why_inapplicable(line, query, mesh.size()):
            inputs = [(p or Replicate(),) for p in line.inputs]
            results = [None if p is None else (p,) for p in line.outputs]
            choices.append(_spec(given, inputs, results, metas, outputs, mesh))
    return OpStrategy(choices)


def _with_leaves(value: object, given: list[OpStrategy]) -> object:
    """The argument with a `Leaf` for each strategy of a tensor, which is added to `given`."""
    if isinstance(value, OpStrategy):
        given.append(value)
        return Leaf(len(given) - 1)
    if isinstance(value, TupleStrategy):
        return [_with_leaves(v, given) for v in value.children]
    if isinstance(value, (list, tuple)):
        made = [_with_leaves(v, given) for v in value]
        return made if isinstance(value, list) else tuple(made)
    return value


def _meta(spec: DTensorSpec) -> TensorMeta:
    if spec.tensor_meta is None:
        raise ValueError("a spec without sizes")
    return spec.tensor_meta


def _spec(
    given: Sequence[OpStrategy], inputs: Sequence[tuple[Placement, ...]], outs: Sequence[tuple[Placement, ...] | None],
    metas: Sequence[TensorMeta], outputs: Sequence[TensorMeta | None], mesh: DeviceMesh,
) -> OpSpec:  # fmt: skip
    wanted = [DTensorSpec(mesh, row, tensor_meta=meta) for row, meta in zip(inputs, metas, strict=True)]
    made = [
        None if row is None or meta is None else DTensorSpec(mesh, row, tensor_meta=meta)
        for row, meta in zip(outs, outputs, strict=True)
    ]
    costs = [generate_redistribute_costs(one, spec) for one, spec in zip(given, wanted, strict=True)]
    results: Any = None if not any(made) else made[0] if len(made) == 1 else tuple(made)
    return OpSpec(results, input_specs=wanted, redistribute_cost=costs)
