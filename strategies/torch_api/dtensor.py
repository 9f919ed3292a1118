"""DTensor's sharding propagator: which rules it holds, and what it answers for one call on a one-axis mesh.

| torch part (under torch.distributed.tensor unless named)      | read on        | run on |
|----------------------------------------------------------------|----------------|--------|
| DTensor._op_dispatcher.sharding_propagator                      | 2.11 - 2.15    | 2.13   |
| .op_single_dim_strategy_funcs, .op_strategy_funcs, .op_to_rules | 2.11 - 2.15    | 2.13   |
| .op_to_schema_info[_for_single_dim_strategy]                    | 2.11 - 2.15    | 2.13   |
| .op_to_shape_and_stride_idx                                     | 2.11 - 2.15    | 2.13   |
| .op_to_scalar_shape_adjuster, .squeeze_op_to_dims_variant       | by feature     | 2.13   |
| ._propagate_tensor_meta_non_cached (set on a copy)              | 2.11 - 2.15    | 2.13   |
| ._wrap_with_op_strategy, .propagate_op_sharding_non_cached      | 2.11 - 2.15    | 2.13   |
| _op_dispatcher._custom_op_handlers                              | 2.11 - 2.15    | 2.13   |
| _op_schema.OpSchema, OpStrategy, TupleStrategy                  | 2.11 - 2.15    | 2.13   |
| _op_schema.OutputSharding: output_spec, redistribute_schema,    |                |        |
| use_val_from_redistribute_schema                                | 2.11 - 2.15    | 2.13   |
| _dtensor_spec.DTensorSpec, TensorMeta                           | 2.11 - 2.15    | 2.13   |
| _ops.single_dim_strategy._ShardingPlaceholder                   | 2.11 - 2.15    | 2.13   |
| _ops.single_dim_strategy._SingleDimStrategyInfo, its fields     | by feature     | 2.14   |
| device_mesh.DeviceMesh(_init_backend=False, _rank=r)            | 2.11 - 2.15    | 2.13   |
| torch._C._dispatch_has_kernel, OpOverload._can_decompose        | 2.11 - 2.15    | 2.13   |

`tests/strategies/torch_api/test_dtensor.py` checks each part by name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops import single_dim_strategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from strategies.model.kernels import REJECTIONS
from strategies.model.rule import Call, Leaf, Sample, overload
from strategies.torch_api.decompositions import candidates_set, decompositions

Outputs = tuple[Placement | None, ...]
LineRow = tuple[tuple[Placement | None, ...], Outputs]
"""The input placements and the output placements of one line of a strategy, each on one mesh axis."""
BY_NAME = "DTensor takes this op for one in place, by its name"
_FOREACH_FAMILIES = ("_foreach_", "_amp_foreach_", "_fused_")
_INFO = getattr(single_dim_strategy, "_SingleDimStrategyInfo", None)
ONE_PLACEMENT_PER_LIST_ITEM = "full_mesh_strategy_filter" in getattr(_INFO, "__dataclass_fields__", {})
"""Whether a line has one placement for each item of a list of results: since torch 2.14, which added this field."""


def propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def registry_of(op: torch._ops.OpOverload) -> str:
    """The first registry, in DTensor's lookup order, that has a rule for the op; empty if none has."""
    prop = propagator()
    if op in prop.op_single_dim_strategy_funcs:
        return "single-dim strategy"
    if op in prop.op_strategy_funcs:
        return "op strategy"
    if op not in prop.op_to_rules and decompositions(prop).has_decomp(op):
        return "decomposition"
    return "rule" if op in prop.op_to_rules else ""


def registered_overloads() -> set[torch._ops.OpOverload]:
    """Every overload with an entry in one of the three registries."""
    return {op for _, op in registered_functions()}


def has_unused_strategy(op: torch._ops.OpOverload) -> bool:
    """Whether the op has an op strategy that DTensor never calls, because a single-dim strategy takes precedence."""
    prop = propagator()
    return op in prop.op_strategy_funcs and op in prop.op_single_dim_strategy_funcs


def registered_functions() -> dict[tuple[str, torch._ops.OpOverload], Any]:
    """Every registered function by registry and overload; two such snapshots differ in what a module registered."""
    prop = propagator()
    tables = {
        "single-dim strategy": prop.op_single_dim_strategy_funcs,
        "op strategy": prop.op_strategy_funcs,
        "rule": prop.op_to_rules,
    }
    return {(name, op): func for name, table in tables.items() for op, func in table.items()}


_TABLES = (
    "op_single_dim_strategy_funcs", "op_strategy_funcs", "op_to_rules", "op_to_schema_info",
    "op_to_schema_info_for_single_dim_strategy",
)  # fmt: skip
"""The tables of a propagator that registrations write to."""


@contextlib.contextmanager
def registrations_restored() -> Iterator[None]:
    """After it DTensor has the rules that it had before."""
    before = {name: dict(getattr(propagator(), name)) for name in _TABLES if hasattr(propagator(), name)}
    try:
        yield
    finally:
        for name, content in before.items():
            table = getattr(propagator(), name)  # rank threads put tables of theirs there
            table.clear()
            table.update(content)


def is_overlaid(op: torch._ops.OpOverload) -> bool:
    """Whether an overlay's handler serves the op: it applies rules, and returns each rank's results unchanged."""
    return bool(getattr(DTensor._op_dispatcher._custom_op_handlers.get(op), "applies_rules", False))


def special_dispatch_reason(op: torch._ops.OpOverload) -> str:
    """Why DTensor's result is not simply each rank's result with placements from a rule; empty if it is."""
    if op in DTensor._op_dispatcher._custom_op_handlers:
        return "" if is_overlaid(op) else "DTensor has a handler of its own for this op"
    # `x << 1` is `__lshift__`, and returns x itself (2.13).
    if op._schema.name.endswith("_") and not getattr(op._schema.arguments[0].alias_info, "is_write", False):
        return BY_NAME
    return "DTensor makes one number of what each rank gets" if returns_no_tensor(op) else ""


def has_own_dispatch(op: torch._ops.OpOverload) -> bool:
    """Whether DTensor's dispatcher treats calls of the op in a way of its own, apart from a write to the first argument."""
    by_keyword = any(a.kwarg_only and "Tensor" in str(a.type) for a in op._schema.arguments)
    return bool(special_dispatch_reason(op)) or by_keyword or not op._schema.is_mutable


def returns_no_tensor(op: torch._ops.OpOverload) -> bool:
    """Whether the op returns values but no tensor, such as `equal` and `item`."""
    returned = [str(r.type) for r in op._schema.returns]
    return bool(returned) and not any("Tensor" in text for text in returned)


def rewrites_arguments(op: torch._ops.OpOverload) -> bool:
    """Whether DTensor may change the arguments of the local call."""
    prop = propagator()
    tables = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant")
    return any(op in getattr(prop, table, {}) for table in tables)


def is_foreach(sample: Sample) -> bool:
    """Whether DTensor splits this call into one call for each element of its lists."""
    packet = sample.op.split(".")[1]
    return packet.startswith(_FOREACH_FAMILIES) and any(map(is_tensor_list, sample.call.args))


def is_tensor_list(value: object) -> TypeGuard[Sequence[Leaf]]:
    """Whether an argument is a list of tensors, and not empty."""
    return isinstance(value, (list, tuple)) and bool(value) and all(type(v) is Leaf for v in value)


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether torch computes the op by other ops before DTensor is asked; False for an op of TorchScript alone."""
    return torch._C._dispatch_has_kernel(op.name()) and op._can_decompose()


@functools.cache
def one_axis_mesh(ranks: int, rank: int) -> DeviceMesh:
    """A one-axis CPU mesh as seen by that rank, without a process group."""
    return DeviceMesh("cpu", torch.arange(ranks), _init_backend=False, _rank=rank)


class PropagatorQuery:
    """Queries to DTensor's propagator about one sample on a one-axis mesh of `ranks` ranks.

    The answers are those of `propagate_op_sharding_non_cached` on a copy of the propagator that takes the
    metadata of the results from `outputs`, the results on whole tensors.  Tracing them with fake tensors would
    take nearly all of the time.
    """

    def __init__(self, sample: Sample, ranks: int, outputs: object, alone: PropagatorQuery | None = None) -> None:
        self.sample, self.ranks, self.op, self.outputs = sample, ranks, overload(sample.op), outputs
        self.traced: list[LineRow] | None = None
        self.drawn: tuple[int, int] | None = None
        """How many of how many placement tuples of a decomposition were traced, if not all."""
        self.partials = True
        self._alone = alone
        self._specs: dict[tuple[int, Placement | None, int], DTensorSpec] = {}
        self._schema_key: tuple[object, ...] = ()
        self._strategies: dict[tuple[object, ...], Any] = {}
        self.metas = [meta_of(t) for t in sample.tensors]
        self.prop = copy.copy(propagator())
        meta = pytree.tree_map(lambda t: meta_of(t) if isinstance(t, torch.Tensor) else None, outputs)
        self.prop._propagate_tensor_meta_non_cached = lambda schema: meta
        self.out_meta = meta
        if self.op in self.prop.op_strategy_funcs:  # propagation repeats the calls of `strategy_rows`
            self.prop.op_strategy_funcs = {self.op: self._memoized(self.prop.op_strategy_funcs[self.op])}

    def _memoized(self, function: Callable[[OpSchema], Any]) -> Callable[[OpSchema], Any]:
        def strategy(schema: OpSchema) -> object:
            if self._schema_key not in self._strategies:
                self._strategies[self._schema_key] = function(schema)
            return self._strategies[self._schema_key]

        return strategy

    def _spec(self, leaf: int, placement: Placement | None, rank: int) -> DTensorSpec:
        key = (leaf, placement, rank)
        if key not in self._specs:
            mesh = one_axis_mesh(self.ranks, rank)
            self._specs[key] = DTensorSpec(mesh, (placement,), tensor_meta=self.metas[leaf])  # type: ignore[arg-type]
        return self._specs[key]

    def trace_at_most(self, most: int) -> None:
        """Let one trace of a decomposition cover at most so many placement tuples, drawn by the op's name.

        Those that leave all tensors but one replicated come first: one rule differs from the next in them.
        """
        strategy = copy.copy(decompositions(self.prop))
        every = strategy._get_candidate_placements

        def drawn(schema: OpSchema) -> list[Any]:
            found: list[Any] = every(schema)
            if len(found) <= most:
                return found
            self.drawn = most, len(found)
            found = sorted(found, key=str)
            random.Random(zlib.crc32(self.sample.op.encode())).shuffle(found)
            return sorted(found, key=lambda row: min(2, sum(p is not None and p != Replicate() for p in row)))[:most]

        strategy._get_candidate_placements = drawn
        self.prop.decomp_strategy = strategy

    def alone(self) -> PropagatorQuery:
        """The same queries on a mesh of one rank."""
        if self._alone is None:
            self._alone = PropagatorQuery(self.sample, 1, self.outputs)
        return self._alone

    def fits(self, row: LineRow) -> bool:
        """Whether the sizes allow the row's shards, and an in-place op leaves the tensor that it writes to in place."""
        return self.shardable(row[0], self.metas, False) and self._keeps_place(row)

    def schema(self, placements: Sequence[Placement | None], rank: int = 0) -> OpSchema:
        """The call as DTensor's propagator takes it, with inputs of these placements as seen by that rank."""
        self._schema_key = (tuple(placements), rank)
        specs: list[Any] = [self._spec(leaf, p, rank) for leaf, p in enumerate(placements)]
        args, kwargs = self.sample.call.filled(specs)
        info = self.prop.op_to_schema_info.get(self.op)
        info = info or self.prop.op_to_schema_info_for_single_dim_strategy.get(self.op)
        return OpSchema(self.op, args, kwargs, schema_info=info)

    def single_dim_rows(self) -> list[LineRow]:
        """The lines of a single-dim strategy that fit, with Shard for its placeholder, and all-replicate."""
        info = self.prop.op_single_dim_strategy_funcs[self.op]
        wrapped = self.prop._wrap_with_op_strategy(self.schema([Replicate()] * len(self.metas)))
        lines = info.func(self.op, wrapped.args_meta, wrapped.kwargs_meta)
        uneven = bool(getattr(info, "allow_uneven_sharding", False))
        count = len(self.metas)
        self._check_lines(lines)
        rows = [row_of_line(line, count) for line in lines]
        if not any(map(is_replicated, rows)):
            rows.insert(0, self._replicate_row(len(lines[0]) - count if lines else 1))
        return [row for row in rows if self.shardable(row[0], self.metas, uneven) and self._keeps_place(row)]

    def _check_lines(self, lines: Sequence[Sequence[Any]]) -> None:
        """Raise ValueError for a line of the wrong length or with a negative shard dim, as torch does at each call."""
        outputs = self._result_count()
        for line in lines:
            if len(line) != outputs + len(self.metas):
                need = f"{outputs} results and {len(self.metas)} tensor arguments"
                raise ValueError(f"a line of {len(line)} placements, for {need}")
            if any(getattr(p, "dim", 0) < 0 for p in line):
                raise ValueError(f"a line names a negative shard dim: {list(line)}")

    def _result_count(self) -> int:
        """The number of output placements in a line: one for each result in the schema, a list counting as one.

        Since torch 2.14 each tensor of a list has one, and each of several results, tensor or not.
        """
        if ONE_PLACEMENT_PER_LIST_ITEM and type(self.out_meta) in (list, tuple):
            return len(self.out_meta)
        return sum("Tensor" in str(r.type) for r in self.op._schema.returns)

    def strategy_rows(self, seeds: Sequence[Sequence[Placement]]) -> list[LineRow]:
        """The lines of an op strategy or a decomposition for inputs placed as in `seeds`.  Raises as `strategies`."""
        rows: dict[str, LineRow] = {}
        for strategy in self.strategies(seeds):
            for line in strategy.strategies if isinstance(strategy, OpStrategy) else ():
                row = row_of_op_spec(line, len(self.metas))
                rows.setdefault(str(row), row)
        return list(rows.values())

    def strategies(self, seeds: Sequence[Sequence[Placement]]) -> list[OpStrategy | TupleStrategy | None]:
        """The strategies for inputs placed as in `seeds`, without the seeds that the op refuses (unbind along a shard).

        Raises the first refusal if the op refuses all of them.
        """
        found: list[OpStrategy | TupleStrategy | None] = []
        refusals: list[Exception] = []
        for seed in seeds:
            try:
                found.append(self._strategy(self.schema(seed)))
            except REJECTIONS as refusal:
                refusals.append(refusal)
        if refusals and not found:
            raise refusals[0]
        return found

    def _strategy(self, schema: OpSchema) -> OpStrategy | TupleStrategy | None:
        function = self.prop.op_strategy_funcs.get(self.op)
        if function is not None:
            return function(self.prop._wrap_with_op_strategy(schema))  # type: ignore[no-any-return]
        return decompositions(self.prop).propagate_strategy(schema)  # type: ignore[no-any-return]

    def propagate(self, placements: Sequence[Placement | None], rank: int = 0) -> tuple[Outputs, Call | None] | None:
        """The output placements for inputs with these placements, and this rank's call if DTensor changes its arguments.

        None if DTensor would redistribute the inputs first.
        """
        schema = self.schema(placements, rank)
        with candidates_set(self.prop):
            answer = self.prop.propagate_op_sharding_non_cached(schema)
        wanted = answer.redistribute_schema
        if wanted is not None:
            pairs = zip(schema.args_spec, wanted.args_spec, strict=True)
            if any(have.placements != want.placements for have, want in pairs):
                return None
        specs = answer.output_spec if isinstance(answer.output_spec, (tuple, list)) else (answer.output_spec,)
        changed = wanted is not None and answer.use_val_from_redistribute_schema
        return tuple(_placement(s) for s in specs), self._changed(wanted) if changed else None

    def _changed(self, schema: OpSchema) -> Call:
        counter = iter(range(len(self.metas)))
        args = pytree.tree_map_only(DTensorSpec, lambda _: Leaf(next(counter)), schema.args_schema)
        return Call(str(schema.op), _without_subclasses(tuple(args)), self.sample.call.kwargs)

    def _replicate_row(self, outputs: int) -> LineRow:
        metas = pytree.tree_leaves(self.out_meta, is_leaf=lambda m: isinstance(m, TensorMeta))
        masked = [i < len(metas) and metas[i] is None for i in range(outputs)]
        return (Replicate(),) * len(self.metas), tuple(None if m else Replicate() for m in masked)

    def shardable(self, inputs: Sequence[Placement | None], metas: Sequence[TensorMeta], uneven: bool) -> bool:
        """Whether DTensor keeps a line: without `uneven` it drops one that would leave a rank without a row."""

        def fits(p: Placement | None, meta: TensorMeta) -> bool:
            if not isinstance(p, Shard):
                return True
            return 0 <= p.dim < len(meta.shape) and (uneven or meta.shape[p.dim] >= self.ranks)

        return all(fits(p, m) for p, m in zip(inputs, metas, strict=True))

    def _keeps_place(self, row: LineRow) -> bool:
        """Whether an in-place op leaves the tensor that it writes to where it lies: it cannot redistribute it."""
        name = self.sample.op.split(".")[1]
        return not (name.endswith("_") and not name.endswith("__")) or not row[1] or row[0][0] == row[1][0]


def row_of_line(line: Sequence[Any], inputs: int) -> LineRow:
    """A line of a single-dim strategy, which has outputs first, as a row; its placeholder becomes `Shard`."""
    full = tuple(Shard(p.dim) if isinstance(p, _ShardingPlaceholder) else p for p in line)
    return full[len(full) - inputs :], full[: len(full) - inputs]


def is_replicated(row: LineRow) -> bool:
    """Whether all inputs and outputs of the row are replicated or masked."""
    return all(p is None or p == Replicate() for p in (*row[0], *row[1]))


def row_of_op_spec(line: OpSpec, inputs: int) -> LineRow:
    """A line of an op strategy as a row; it has no outputs for an op that only writes to its arguments.

    DTensor reads a line without input specs as: every input has the placement of the output.
    """
    specs = line.output_specs if isinstance(line.output_specs, (tuple, list)) else (line.output_specs,)
    outputs = () if line.output_specs is None else tuple(_placement(s) for s in specs)
    if line.input_specs is None:
        return outputs[:1] * inputs, outputs
    return tuple(s.placements[0] for s in line.input_specs), outputs


def _placement(spec: object) -> Placement | None:
    return spec.placements[0] if isinstance(spec, DTensorSpec) else None


def meta_of(x: torch.Tensor) -> TensorMeta:
    """Shape, strides and dtype of a tensor."""
    return TensorMeta(x.shape, x.stride(), x.dtype)


def _without_subclasses(value: object) -> Any:
    """The value with torch.Size and other subclasses as plain tuples, the only ones in which a `Call` finds leaves."""
    if type(value) is list:
        return [_without_subclasses(v) for v in value]
    return tuple(map(_without_subclasses, value)) if isinstance(value, (list, tuple)) else value
