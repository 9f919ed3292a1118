"""The one room of `strategies` that touches DTensor's private parts.

| torch part (under torch.distributed.tensor unless named)      | read on        | run on |
|----------------------------------------------------------------|----------------|--------|
| DTensor._op_dispatcher.sharding_propagator                      | 2.11 - 2.15    | 2.13   |
| .op_single_dim_strategy_funcs, .op_strategy_funcs, .op_to_rules | 2.11 - 2.15    | 2.13   |
| .op_to_schema_info[_for_single_dim_strategy]                    | 2.11 - 2.15    | 2.13   |
| .op_to_shape_and_stride_idx                                     | 2.11 - 2.15    | 2.13   |
| .op_to_scalar_shape_adjuster, .squeeze_op_to_dims_variant       | by feature     | 2.13   |
| ._propagate_tensor_meta_non_cached (set on a copy)              | 2.11 - 2.15    | 2.13   |
| ._wrap_with_op_strategy, .propagate_op_sharding_non_cached      | 2.11 - 2.15    | 2.13   |
| .decomp_strategy.has_decomp, .propagate_strategy                | by feature     | 2.13   |
| _op_dispatcher._custom_op_handlers, ._random_ops                | 2.11 - 2.15    | 2.13   |
| _op_schema.OpSchema, OpStrategy, TupleStrategy                  | 2.11 - 2.15    | 2.13   |
| _op_schema.OutputSharding: output_spec, redistribute_schema,    |                |        |
| use_val_from_redistribute_schema                                | 2.11 - 2.15    | 2.13   |
| _dtensor_spec.DTensorSpec, TensorMeta                           | 2.11 - 2.15    | 2.13   |
| _ops.single_dim_strategy._ShardingPlaceholder                   | 2.11 - 2.15    | 2.13   |
| _ops.single_dim_strategy._SingleDimStrategyInfo, its fields     | by feature     | 2.14   |
| device_mesh.DeviceMesh(_init_backend=False, _rank=r)            | 2.11 - 2.15    | 2.13   |

`tests/strategies/torch_api/test_dtensor.py` names each part and says which one went when torch changes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops import single_dim_strategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from strategies.model.rule import Call, Leaf, Sample, overload

Outputs = tuple[Placement | None, ...]
Row = tuple[tuple[Placement | None, ...], Outputs]
"""The input placements and the output placements of one line of a strategy."""
_INFO = getattr(single_dim_strategy, "_SingleDimStrategyInfo", None)
COUNTS_ITEMS = "full_mesh_strategy_filter" in getattr(_INFO, "__dataclass_fields__", {})
"""Whether torch counts the items of a result: since 2.14, with which this field came; no registration changes it."""


def propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def source_of(op: torch._ops.OpOverload) -> str:
    """Which registry answers for the op, in the order in which DTensor asks them; empty if none."""
    prop = propagator()
    if op in prop.op_single_dim_strategy_funcs:
        return "single-dim strategy"
    if op in prop.op_strategy_funcs:
        return "op strategy"
    if _decomposes(op):
        return "decomposition"
    return "rule" if op in prop.op_to_rules else ""


def registered() -> set[torch._ops.OpOverload]:
    """Every overload that one of the three registries names."""
    prop = propagator()
    return {*prop.op_single_dim_strategy_funcs, *prop.op_strategy_funcs, *prop.op_to_rules}


def ignored(op: torch._ops.OpOverload) -> bool:
    """Whether an op strategy was registered that torch never asks, since a single-dim one comes first."""
    prop = propagator()
    return op in prop.op_strategy_funcs and op in prop.op_single_dim_strategy_funcs


def strategies_now() -> dict[tuple[str, torch._ops.OpOverload], Any]:
    """Each registered function by registry and overload; two of these tell what a module registered."""
    prop = propagator()
    tables = {
        "single-dim strategy": prop.op_single_dim_strategy_funcs,
        "op strategy": prop.op_strategy_funcs,
        "rule": prop.op_to_rules,
    }
    return {(name, op): func for name, table in tables.items() for op, func in table.items()}


def _decomposes(op: torch._ops.OpOverload) -> bool:
    strategy = getattr(propagator(), "decomp_strategy", None)
    if strategy is None or op in propagator().op_to_rules:
        return False
    return bool(strategy.has_decomp(op))


def own_dispatch(op: torch._ops.OpOverload) -> str:
    """Why each rank's result is not DTensor's result, or empty."""
    handler = DTensor._op_dispatcher._custom_op_handlers.get(op)
    if handler is not None:  # that of an overlay gives each rank's results as they are
        return "" if getattr(handler, "by_lines", False) else "DTensor has a handler of its own for this op"
    if op._schema.name.endswith("_") and not _writes_first(op):  # `x << 1` is `__lshift__`, and gives x back (2.13)
        return "DTensor takes this op for one in place, by its name"
    return "DTensor makes one number of what each rank gets" if gives_numbers(op) else ""


def _writes_first(op: torch._ops.OpOverload) -> bool:
    alias = op._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def gives_numbers(op: torch._ops.OpOverload) -> bool:
    """Whether the op returns something, and no tensor: `equal`, `item`."""
    returned = [str(r.type) for r in op._schema.returns]
    return bool(returned) and not any("Tensor" in text for text in returned)


def rewrites(op: torch._ops.OpOverload) -> bool:
    """Whether DTensor may change the arguments of the local call."""
    prop = propagator()
    tables = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant")
    return any(op in getattr(prop, table, {}) for table in tables)


def random(op: torch._ops.OpOverload) -> bool:
    return op in DTensor._op_dispatcher._random_ops


@functools.cache
def mesh_for(ranks: int, rank: int) -> DeviceMesh:
    """A one-axis mesh as that rank sees it, without a process group."""
    return DeviceMesh("cpu", torch.arange(ranks), _init_backend=False, _rank=rank)


class Question:
    """One sample on one mesh size, put to DTensor's propagator.

    The answers are those of `propagate_op_sharding_non_cached` on a copy of the propagator that
    knows the output's metadata from the truth instead of tracing it with fake tensors, which is
    what nearly all of the time would go into.
    """

    def __init__(self, sample: Sample, ranks: int, outputs: Any, alone: Question | None = None) -> None:
        self.sample, self.ranks, self.op, self.outputs = sample, ranks, overload(sample.op), outputs
        self.traced: list[Row] | None = None
        self.partials = True
        self._alone = alone
        self._specs: dict[tuple[int, Placement | None, int], DTensorSpec] = {}
        self._asking: tuple[object, ...] = ()
        self._offered: dict[tuple[object, ...], Any] = {}
        self.metas = [_meta(t) for t in sample.tensors]
        self.prop = copy.copy(propagator())
        meta = pytree.tree_map(lambda t: _meta(t) if isinstance(t, torch.Tensor) else None, outputs)
        self.prop._propagate_tensor_meta_non_cached = lambda schema: meta
        self.out_meta = meta
        if self.op in self.prop.op_strategy_funcs:  # propagation asks again what `strategy_rows` has asked
            self.prop.op_strategy_funcs = {self.op: self._remembered(self.prop.op_strategy_funcs[self.op])}

    def _remembered(self, function: Any) -> Any:
        def ask(schema: OpSchema) -> Any:
            if self._asking not in self._offered:
                self._offered[self._asking] = function(schema)
            return self._offered[self._asking]

        return ask

    def _spec(self, leaf: int, placement: Placement | None, rank: int) -> DTensorSpec:
        key = (leaf, placement, rank)
        if key not in self._specs:
            mesh = mesh_for(self.ranks, rank)
            self._specs[key] = DTensorSpec(mesh, (placement,), tensor_meta=self.metas[leaf])  # type: ignore[arg-type]
        return self._specs[key]

    def alone(self) -> Question:
        """The same question on a mesh of one rank."""
        if self._alone is None:
            self._alone = Question(self.sample, 1, self.outputs)
        return self._alone

    def fits(self, row: Row) -> bool:
        return self._fits(row[0], False) and self._keeps_place(row)

    def schema(self, placements: Sequence[Placement | None], rank: int = 0) -> OpSchema:
        self._asking = (tuple(placements), rank)
        specs = [self._spec(leaf, p, rank) for leaf, p in enumerate(placements)]
        args = _filled(self.sample.call.args, specs)
        kwargs = {name: _filled(value, specs) for name, value in self.sample.call.kwargs}
        info = self.prop.op_to_schema_info.get(self.op)
        info = info or self.prop.op_to_schema_info_for_single_dim_strategy.get(self.op)
        return OpSchema(self.op, args, kwargs, schema_info=info)

    def single_dim_rows(self) -> list[Row]:
        """The lines of a single-dim strategy, Shard where it has its placeholder, all-R included."""
        info = self.prop.op_single_dim_strategy_funcs[self.op]
        wrapped = self.prop._wrap_with_op_strategy(self.schema([Replicate()] * len(self.metas)))
        lines = info.func(self.op, wrapped.args_meta, wrapped.kwargs_meta)
        uneven = bool(getattr(info, "allow_uneven_sharding", False))
        count = len(self.metas)
        self._check_lines(lines)
        rows = [line_row(line, count) for line in lines]
        if not any(all(p is None or p == Replicate() for p in (*i, *o)) for i, o in rows):
            rows.insert(0, self._replicate_row(len(lines[0]) - count if lines else 1))
        return [row for row in rows if self._fits(row[0], uneven) and self._keeps_place(row)]

    def _check_lines(self, lines: Sequence[Sequence[Any]]) -> None:
        """Torch refuses a line of the wrong length at each call; a negative dim it meets later, and refuses too."""
        outputs = self._results()
        for line in lines:
            if len(line) != outputs + len(self.metas):
                need = f"{outputs} results and {len(self.metas)} tensor arguments"
                raise ValueError(f"a line of {len(line)} placements, for {need}")
            if any(getattr(p, "dim", 0) < 0 for p in line):
                raise ValueError(f"a line names a negative shard dim: {list(line)}")

    def _results(self) -> int:
        """How many placements of results a line has: one for each that the schema names, a list being one of them.

        Since 2.14 of a list each tensor has one, and each of several results, with a tensor or without.
        """
        if COUNTS_ITEMS and type(self.out_meta) in (list, tuple):
            return len(self.out_meta)
        return sum("Tensor" in str(r.type) for r in self.op._schema.returns)

    def strategy_rows(self, seeds: Sequence[Sequence[Placement]]) -> list[Row]:
        """The lines that an op strategy or a decomposition offers when the inputs come as in `seeds`."""
        rows: dict[str, Row] = {}
        refusals: list[Exception] = []
        for seed in seeds:
            try:
                strategy = self._strategy(self.schema(seed))
            except (
                RuntimeError,
                ValueError,
                AssertionError,
                NotImplementedError,
                IndexError,
                KeyError,
                TypeError,
            ) as no:
                refusals.append(no)  # an op may refuse some inputs in so many words (unbind along a shard)
                continue
            for line in strategy.strategies if isinstance(strategy, OpStrategy) else ():
                row = specs_row(line, len(seed))
                if row is not None:
                    rows.setdefault(str(row), row)
        if refusals and len(refusals) == len(seeds):
            raise refusals[0]
        return list(rows.values())

    def _strategy(self, schema: OpSchema) -> OpStrategy | TupleStrategy | None:
        function = self.prop.op_strategy_funcs.get(self.op)
        if function is not None:
            return function(self.prop._wrap_with_op_strategy(schema))  # type: ignore[no-any-return]
        return self.prop.decomp_strategy.propagate_strategy(schema)  # type: ignore[no-any-return]

    def propagate(self, placements: Sequence[Placement | None], rank: int = 0) -> tuple[Outputs, Call | None] | None:
        """What DTensor does for inputs that come like this: the output placements and, if it changes
        the arguments, this rank's own call.  None if it would redistribute the inputs first."""
        schema = self.schema(placements, rank)
        answer = self.prop.propagate_op_sharding_non_cached(schema)
        wanted = answer.redistribute_schema
        if wanted is not None:
            pairs = zip(schema.args_spec, wanted.args_spec, strict=True)
            if any(have.placements != want.placements for have, want in pairs):
                return None
        specs = answer.output_spec if isinstance(answer.output_spec, (tuple, list)) else (answer.output_spec,)
        changed = wanted is not None and answer.use_val_from_redistribute_schema
        return tuple(_only(s) for s in specs), self._changed(wanted) if changed else None

    def _changed(self, schema: OpSchema) -> Call:
        counter = iter(range(len(self.metas)))
        args = pytree.tree_map_only(DTensorSpec, lambda _: Leaf(next(counter)), schema.args_schema)
        own = _filled(self.sample.call.kwargs, [Leaf(i) for i in range(len(self.metas))])
        return Call(str(schema.op), _plain(tuple(args)), own)

    def _replicate_row(self, outputs: int) -> Row:
        metas = pytree.tree_leaves(self.out_meta, is_leaf=lambda m: isinstance(m, TensorMeta))
        masked = [i < len(metas) and metas[i] is None for i in range(outputs)]
        return (Replicate(),) * len(self.metas), tuple(None if m else Replicate() for m in masked)

    def _fits(self, inputs: Sequence[Placement | None], uneven: bool) -> bool:
        return self.shardable(inputs, self.metas, uneven)

    def shardable(self, inputs: Sequence[Placement | None], metas: Sequence[TensorMeta], uneven: bool) -> bool:
        """DTensor drops a line that would leave a rank without a row, unless the op says it may."""

        def fits(p: Placement | None, meta: TensorMeta) -> bool:
            if not isinstance(p, Shard):
                return True
            return 0 <= p.dim < len(meta.shape) and (uneven or meta.shape[p.dim] >= self.ranks)

        return all(fits(p, m) for p, m in zip(inputs, metas, strict=True))

    def _keeps_place(self, row: Row) -> bool:
        """An in-place op cannot redistribute the tensor that it writes to."""
        name = self.sample.op.split(".")[1]
        return not (name.endswith("_") and not name.endswith("__")) or not row[1] or row[0][0] == row[1][0]


def line_row(line: Sequence[Any], inputs: int) -> Row:
    """A line of a single-dim strategy, outputs first, as a row; `Shard` where it has its placeholder."""
    full = tuple(Shard(p.dim) if isinstance(p, _ShardingPlaceholder) else p for p in line)
    return full[len(full) - inputs :], full[: len(full) - inputs]


def specs_row(line: Any, inputs: int) -> Row | None:
    """A line of an op strategy as a row; None if it says nothing of the outputs.

    DTensor reads a line without inputs as: all of them come as the output goes.
    """
    if line.output_specs is None:
        return None
    specs = line.output_specs if isinstance(line.output_specs, tuple) else (line.output_specs,)
    outputs = tuple(_only(s) for s in specs)
    if line.input_specs is None:
        return (outputs[0],) * inputs, outputs
    return tuple(s.placements[0] for s in line.input_specs), outputs


def _only(spec: Any) -> Placement | None:
    return spec.placements[0] if isinstance(spec, DTensorSpec) else None


def _meta(t: torch.Tensor) -> TensorMeta:
    return TensorMeta(t.shape, t.stride(), t.dtype)


def _filled(value: Any, specs: Sequence[Any]) -> Any:
    if type(value) is Leaf:
        return specs[value.index]
    return type(value)(_filled(v, specs) for v in value) if type(value) in (list, tuple) else value


def _plain(value: Any) -> Any:
    """torch.Size and the like as plain tuples, which is what a `Call` walks."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value] if type(value) is list else tuple(_plain(v) for v in value)
    return value
