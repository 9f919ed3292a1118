"""Rules of a book as DTensor's own tables hold rules: a strategy for each op, for those who ask its propagator.

An overlay does not need them: it is asked before the tables are.  They are for what reads the tables instead: our
validator, which takes claims from them, and DTensor's decompositions.

| torch part (under torch.distributed.tensor)                                    | read on     | run on |
|---------------------------------------------------------------------------------|-------------|--------|
| DTensor._op_dispatcher.sharding_propagator: register_op_strategy                | 2.11 - 2.15 | 2.13   |
| .op_single_dim_strategy_funcs, .op_to_rules, .op_to_shape_and_stride_idx,       |             |        |
| .op_to_schema_info_for_single_dim_strategy: what would be asked before is taken |             |        |
| out; .op_to_scalar_shape_adjuster, .squeeze_op_to_dims_variant by feature, and  |             |        |
| left in for ops whose ranks make calls of their own                             | 2.11 - 2.15 | 2.13   |
| _op_schema.OpSchema, OpSpec, OpStrategy, TupleStrategy, RuntimeSchemaInfo       | 2.11 - 2.15 | 2.13   |
| _ops.utils.generate_redistribute_costs                                          | 2.11 - 2.15 | 2.13   |

`tests/strategies/test_overlay_strategy.py` names each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor.placement_types import Placement

from strategies.model.rule import Call, Leaf, overload
from strategies.ops.semantics.local_call import unfit
from strategies.ops.semantics.rulebook import Ask, Entry, Line
from strategies.propagation.overlay.call_plan import Lines, global_metas, plan_of, question

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
