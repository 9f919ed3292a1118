"""What DTensor claims of ops on lists (foreach and fused ones): each element is an op of its own.

| torch part (under torch.distributed.tensor)                                    | read on    | run on |
|---------------------------------------------------------------------------------|------------|--------|
| _ops.single_dim_strategy._resolve_foreach_elementwise_overload                  | by feature | 2.13   |
| the names by which it takes an op element by element: _foreach_, _amp_foreach_, |            |        |
| _fused_, with a list of tensors among the positional arguments                  | 2.12, 2.13 | 2.13   |
| a single-dim strategy's `func(op, args_meta, kwargs_meta)` on one element       | 2.12, 2.13 | 2.13   |
| TupleStrategy.children                                                          | by feature | 2.13   |

`tests/strategies/torch_api/test_foreach.py` names each part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._op_schema import OpStrategy, TupleStrategy
from torch.distributed.tensor._ops import single_dim_strategy
from torch.distributed.tensor.placement_types import Placement

from strategies.model.oracle import REFUSALS
from strategies.model.rule import Call, Leaf, Sample
from strategies.torch_api.dtensor import Outputs, Question, Row, line_row, specs_row

_FAMILIES = ("_foreach_", "_amp_foreach_", "_fused_")
MOST_ROWS = 40
"""Rules of one sample and mesh size that are judged: a list multiplies them."""


def on_lists(sample: Sample) -> bool:
    """Whether DTensor takes this call element by element."""
    packet = sample.op.split(".")[1]
    return packet.startswith(_FAMILIES) and any(map(_is_list, sample.call.args))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(v) is Leaf for v in value)


def rows(ask: Question, seeds: Sequence[Sequence[Placement]]) -> list[Row]:
    """The lines for the whole list: each rule on every element that has it, and on the first and the last alone.

    `seeds` are placements of all inputs to ask an op strategy about.  Raises what a strategy raises.
    """
    single = ask.op in ask.prop.op_single_dim_strategy_funcs
    elements = _elements(ask.sample.call)
    found = [_lines(ask, e) for e in elements] if single else _offered(ask, elements, seeds)
    made = (_joined(ask, elements, choice) for choice in _choices(found))
    unique = {str(row): row for row in made if row is not None}
    return list(unique.values())[:MOST_ROWS]


def _elements(call: Call) -> list[tuple[tuple[Any, ...], dict[str, Any], list[int]]]:
    """Each element's own arguments, and its tensors by leaf number.  Raises `ValueError` for lists of unequal length."""
    lengths = {len(value) for value in call.args if _is_list(value)}
    if len(lengths) != 1:
        raise ValueError(f"lists of {' and '.join(map(str, sorted(lengths)))} tensors")
    found = []
    for i in range(lengths.pop()):
        args = tuple(value[i] if _is_list(value) else value for value in call.args)
        leaves = [v.index for v in (*args, *dict(call.kwargs).values()) if type(v) is Leaf]
        found.append((args, dict(call.kwargs), leaves))
    return found


def _lines(ask: Question, element: tuple[tuple[Any, ...], dict[str, Any], list[int]]) -> list[Row]:
    """The lines of a single-dim strategy for one element, all-R included."""
    args, kwargs, leaves = element
    info = ask.prop.op_single_dim_strategy_funcs[ask.op]
    metas = [ask.metas[leaf] for leaf in leaves]
    given = tuple(_meta(v, ask) for v in args), {name: _meta(v, ask) for name, v in kwargs.items()}
    element_op = _element_op(ask.op)
    lines = [line_row(line, len(leaves)) for line in info.func(element_op, *given)]
    outputs = sum("Tensor" in str(r.type) for r in element_op._schema.returns)
    if not any(_is_replicated(row) for row in lines):
        lines.insert(0, ((Replicate(),) * len(leaves), (Replicate(),) * outputs))
    uneven = bool(getattr(info, "allow_uneven_sharding", False))
    writes = ask.op._schema.name.endswith("_")
    return [
        (inputs, outs)
        for inputs, outs in lines
        if ask.shardable(inputs, metas, uneven) and not (writes and outs and outs[0] != inputs[0])
    ]


def _meta(value: Any, ask: Question) -> Any:
    if type(value) is Leaf:
        return ask.metas[value.index]
    return tuple(ask.metas[v.index] for v in value) if _is_list(value) else value


def _element_op(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The op whose strategy speaks for one element: `add.Tensor` for `_foreach_add.List`; a fused op itself."""
    resolve = getattr(single_dim_strategy, "_resolve_foreach_elementwise_overload", None)
    return (resolve(op) if resolve is not None else None) or op


def _is_replicated(row: Row) -> bool:
    return all(p is None or p == Replicate() for p in (*row[0], *row[1]))


def _offered(
    ask: Question, elements: Sequence[tuple[Any, Any, list[int]]], seeds: Sequence[Sequence[Placement]]
) -> list[list[Row]]:
    """Each element's lines by an op strategy, which sees the placements that all inputs come with."""
    found: list[dict[str, Row]] = [{} for _ in elements]
    refusals: list[Exception] = []
    for seed in seeds:
        try:
            strategy = ask.prop.op_strategy_funcs[ask.op](ask.prop._wrap_with_op_strategy(ask.schema(seed)))
        except REFUSALS as no:
            refusals.append(no)  # an op may refuse some inputs in so many words
            continue
        children = strategy.children if isinstance(strategy, TupleStrategy) else ()
        for child, kept, (_, _, leaves) in zip(children, found, elements, strict=False):
            lines = child.strategies if isinstance(child, OpStrategy) else ()
            for row in filter(None, (specs_row(line, len(leaves)) for line in lines)):
                kept.setdefault(str(row), row)
    if refusals and len(refusals) == len(seeds):
        raise refusals[0]
    return [list(kept.values()) for kept in found]


def _choices(found: Sequence[Sequence[Row]]) -> Iterator[list[Row]]:
    """One line for each element: the same line on all, then on the first and on the last alone."""
    plain = [row for lines in found for row in list(filter(_is_replicated, lines))[:1]]
    if len(plain) < len(found):
        return
    by_name = [{str(row): row for row in lines} for lines in found]
    names = list(dict.fromkeys(name for lines in by_name for name in lines))
    for name in names:
        yield [lines.get(name, at_rest) for lines, at_rest in zip(by_name, plain, strict=True)]
    for alone in sorted({0, len(found) - 1}):
        for row in by_name[alone].values():
            yield [row if i == alone else at_rest for i, at_rest in enumerate(plain)]


def _joined(ask: Question, elements: Sequence[tuple[Any, Any, list[int]]], choice: Sequence[Row]) -> Row | None:
    """The line of the whole call; None if two elements want the tensor that they share in two ways."""
    inputs: dict[int, Placement | None] = {}
    for (_, _, leaves), (placements, _) in zip(elements, choice, strict=True):
        for leaf, placement in zip(leaves, placements, strict=True):
            if inputs.setdefault(leaf, placement) != placement:
                return None
    returned = len(ask.op._schema.returns)
    per_element = [outs for _, outs in choice]
    outputs: Outputs = tuple(outs[k] for k in range(returned) for outs in per_element if k < len(outs))
    return tuple(inputs.get(leaf, Replicate()) for leaf in range(len(ask.metas))), outputs
