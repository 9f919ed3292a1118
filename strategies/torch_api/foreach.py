"""DTensor's rules for ops on lists of tensors (foreach and fused ones), which treat each element as a call of its own.

| torch part (under torch.distributed.tensor)                                    | read on    | run on |
|---------------------------------------------------------------------------------|------------|--------|
| _ops.single_dim_strategy._resolve_foreach_elementwise_overload                  | by feature | 2.13   |
| name prefixes of ops that it splits into elements (`dtensor.is_foreach`):       |            |        |
| _foreach_, _amp_foreach_, _fused_, with a list of tensors as an argument        | 2.12, 2.13 | 2.13   |
| a single-dim strategy's `func(op, args_meta, kwargs_meta)` on one element       | 2.12, 2.13 | 2.13   |
| TupleStrategy.children                                                          | by feature | 2.13   |

`tests/strategies/torch_api/test_foreach.py` checks each part by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.distributed.tensor import Replicate
from torch.distributed.tensor._op_schema import OpStrategy, TupleStrategy
from torch.distributed.tensor._ops import single_dim_strategy
from torch.distributed.tensor.placement_types import Placement

from strategies.model.rule import Call, Leaf
from strategies.torch_api.dtensor import (
    LineRow,
    Outputs,
    PropagatorQuery,
    is_replicated,
    is_tensor_list,
    row_of_line,
    row_of_op_spec,
)

MAX_ROWS = 40
"""The largest number of rules validated for one sample and mesh size: a list multiplies them."""


class _Element(NamedTuple):
    """One element's arguments, and the leaf numbers of its tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[int]


def foreach_rows(query: PropagatorQuery, seeds: Sequence[Sequence[Placement]]) -> list[LineRow]:
    """The lines for the whole list: each rule on every element that has it, and on the first and the last alone.

    `seeds` are the placements of all inputs with which an op strategy is called.  Raises what a strategy raises.
    """
    single = query.op in query.prop.op_single_dim_strategy_funcs
    elements = _elements(query.sample.call)
    by_element = [_single_dim_rows(query, e) for e in elements] if single else _strategy_rows(query, elements, seeds)
    joined = (_joined(query, elements, choice) for choice in _choices(by_element))
    unique = {str(row): row for row in joined if row is not None}
    return list(unique.values())[:MAX_ROWS]


def _elements(call: Call) -> list[_Element]:
    """The elements of the call's lists.  Raises `ValueError` for lists of unequal length."""
    lengths = {len(value) for value in call.args if is_tensor_list(value)}
    if len(lengths) != 1:
        raise ValueError(f"lists of {' and '.join(map(str, sorted(lengths)))} tensors")
    found = []
    for i in range(lengths.pop()):
        args = tuple(value[i] if is_tensor_list(value) else value for value in call.args)
        leaves = [v.index for v in (*args, *dict(call.kwargs).values()) if type(v) is Leaf]
        found.append(_Element(args, dict(call.kwargs), leaves))
    return found


def _single_dim_rows(query: PropagatorQuery, element: _Element) -> list[LineRow]:
    """The lines of a single-dim strategy for one element, all-replicate included."""
    args, kwargs, leaves = element
    info = query.prop.op_single_dim_strategy_funcs[query.op]
    metas = [query.metas[leaf] for leaf in leaves]
    args_meta = tuple(_metas_of(v, query) for v in args)
    kwargs_meta = {name: _metas_of(v, query) for name, v in kwargs.items()}
    resolve = getattr(single_dim_strategy, "_resolve_foreach_elementwise_overload", None)
    element_op = (resolve and resolve(query.op)) or query.op  # `add.Tensor` for `_foreach_add.List`; a fused op itself
    lines = [row_of_line(line, len(leaves)) for line in info.func(element_op, args_meta, kwargs_meta)]
    outputs = sum("Tensor" in str(r.type) for r in element_op._schema.returns)
    if not any(map(is_replicated, lines)):
        lines.insert(0, ((Replicate(),) * len(leaves), (Replicate(),) * outputs))
    uneven = bool(getattr(info, "allow_uneven_sharding", False))
    writes = query.op._schema.name.endswith("_")
    return [
        (inputs, outs)
        for inputs, outs in lines
        if query.shardable(inputs, metas, uneven) and not (writes and outs and outs[0] != inputs[0])
    ]


def _metas_of(value: object, query: PropagatorQuery) -> object:
    """The argument with each tensor's metadata in its place."""
    if type(value) is Leaf:
        return query.metas[value.index]
    return tuple(query.metas[v.index] for v in value) if is_tensor_list(value) else value


def _strategy_rows(
    query: PropagatorQuery, elements: Sequence[_Element], seeds: Sequence[Sequence[Placement]]
) -> list[list[LineRow]]:
    """Each element's lines by an op strategy, which takes the placements of all inputs at once."""
    by_element: list[dict[str, LineRow]] = [{} for _ in elements]
    for strategy in query.strategies(seeds):
        children = strategy.children if isinstance(strategy, TupleStrategy) else ()
        for child, unique, element in zip(children, by_element, elements, strict=False):
            lines = child.strategies if isinstance(child, OpStrategy) else ()
            for row in (row_of_op_spec(line, len(element.leaves)) for line in lines):
                unique.setdefault(str(row), row)
    return [list(unique.values()) for unique in by_element]


def _choices(by_element: Sequence[Sequence[LineRow]]) -> Iterator[list[LineRow]]:
    """One line for each element: the same line on all, then on the first and on the last alone, others replicated."""
    replicated = [row for lines in by_element for row in list(filter(is_replicated, lines))[:1]]
    if len(replicated) < len(by_element):
        return
    by_name = [{str(row): row for row in lines} for lines in by_element]
    names = list(dict.fromkeys(name for lines in by_name for name in lines))
    for name in names:
        yield [lines.get(name, default) for lines, default in zip(by_name, replicated, strict=True)]
    for alone in sorted({0, len(by_element) - 1}):
        for row in by_name[alone].values():
            yield [row if i == alone else default for i, default in enumerate(replicated)]


def _joined(query: PropagatorQuery, elements: Sequence[_Element], choice: Sequence[LineRow]) -> LineRow | None:
    """The line of the whole call; None if two elements want a tensor that they share in different placements."""
    inputs: dict[int, Placement | None] = {}
    for element, (placements, _) in zip(elements, choice, strict=True):
        for leaf, placement in zip(element.leaves, placements, strict=True):
            if inputs.setdefault(leaf, placement) != placement:
                return None
    returned = len(query.op._schema.returns)
    per_element = [outs for _, outs in choice]
    outputs: Outputs = tuple(outs[k] for k in range(returned) for outs in per_element if k < len(outs))
    return tuple(inputs.get(leaf, Replicate()) for leaf in range(len(query.metas))), outputs
