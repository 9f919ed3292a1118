"""Inductor in lockstep: a compiled kernel takes the memory of plain tensors, so it runs once for each different value.

A graph that communicates, draws random numbers or writes to its inputs runs op by op instead, on all ranks' tensors, as inductor
got it from AOTAutograd; its kernels are compiled and not run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from localtensor._util.call_sites import Args, Fn
from localtensor.lockstep.dispatch.dispatcher import Operands, plain_dispatch
from localtensor.lockstep.dispatch.execute import CellReader, row_args
from localtensor.lockstep.patches.rank_queries import patch_attribute
from localtensor.lockstep.values.local_tensor import Mode, wrap
from localtensor.lockstep.values.partition import one_cell_per_row
from localtensor.lockstep.values.stacks import cells_of_rows

_HIGHER = torch.ops.higher_order
_LONE_VIEW = "as_strided not supported with DTensor"
_FUNCTIONS = (_HIGHER.flex_attention, _HIGHER.flex_attention_backward)  # operators that take graphs, and only compute


@contextmanager
def compiling(mode: Mode) -> Iterator[None]:
    """While inside, a backend compiles for the mode: on plain tensors, and not into torch's caches of compiled programs.

    Its kernels write to no input: what is saved for gradients may be shared by ranks.  torch's cache has kernels that do, for the same graph.
    """
    from torch._functorch import config as aot_config  # lazy: it takes seconds
    from torch._inductor import config

    apart = aot_config.patch(enable_autograd_cache=False, donated_buffer=False)
    with mode.disable(), apart, config.patch(fallback_random=True, fx_graph_cache=False):
        yield


class LockstepKernel:
    """A graph that inductor has compiled, as a function of the list of its inputs, which it empties."""

    def __init__(self, mode: Mode, graph: fx.GraphModule, kernel: Any) -> None:
        self._mode, self._graph, self._kernel = mode, graph, kernel
        self._boxed_call = True  # torch copies what an instance has
        self._op_by_op = not _is_pure(graph)

    def __call__(self, inputs: list[Any]) -> Any:
        args = list(inputs)
        inputs.clear()
        if self._op_by_op:
            return self._graph(*args)
        final = Operands(self._mode, self._kernel, args, {}).final or self._mode.everyone
        with plain_dispatch():
            cells = range(len(final.sizes))
            rows = [each for cell in cells for each, _ in row_args(CellReader(final, cell), args, {})]
            places = {id(x): place for place, x in enumerate(rows[0]) if isinstance(x, Tensor)}
            results = [self._kernel(list(each)) for each in rows]
            whole = one_cell_per_row(final)
            return [
                args[places[id(one[0])]] if id(one[0]) in places else self._joined(one, whole)  # saved for gradients
                for one in zip(*results, strict=True)
            ]

    def _joined(self, values: Sequence[Any], whole: Any) -> object:
        """One output of all rows, with the strides that the kernels of gradients are compiled for."""
        if not isinstance(values[0], Tensor):
            return values[0]  # None, or a size, which is the same for all ranks
        return wrap(*cells_of_rows(values, whole, keep_gaps=True), self._mode)


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, which inductor changes."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def _is_pure(graph: fx.GraphModule) -> bool:
    """Whether a graph has only inputs, outputs, constants that all ranks share, and ops of one rank that only compute."""
    return all(_computes(graph, node) for node in graph.graph.nodes)


def _computes(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        held = operator.attrgetter(str(node.target))(graph)
        return _is_pure(held) if isinstance(held, fx.GraphModule) else type(held) is Tensor
    op: Any = node.target
    if op.__module__ == "_operator" or op in _FUNCTIONS:
        return True
    return (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace in ("aten", "prims")
        and not op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
    )


def _compile_fx(mode: Mode, original: Fn, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> object:
    """Inductor, whose kernels run in lockstep."""
    from torch._inductor.compile_fx import compile_fx_inner

    compile_kernel = args[0] if args else kwargs.pop("inner_compile", compile_fx_inner)

    def inner(graph: fx.GraphModule, *inputs: Any, **options: Any) -> object:
        before = fx.GraphModule(graph, _copied(graph.graph))
        with mode.disable():
            return LockstepKernel(mode, before, compile_kernel(graph, *inputs, **options))

    return original(graph, inputs, inner, *args[1:], **kwargs)


@cache
def install() -> None:
    """Patch inductor, if this torch has it."""
    from torch._inductor import compile_fx

    patch_attribute(compile_fx, "compile_fx", _compile_fx)


def or_as_recorded(compiled: Fn, graph: Any) -> Fn:
    """What was compiled of a part of a function that a rank compiles whole; a part that only makes a view runs as it was recorded.

    A function that returns nothing but a view of a DTensor ends on a rank, too, in an error of AOTAutograd, behind its graph.
    """

    def run(*inputs: Any) -> Any:
        before = _versions(inputs)
        try:
            return compiled(*inputs)
        except RuntimeError as error:
            if _LONE_VIEW not in str(error) or _versions(inputs) != before:
                raise
            return graph.forward(*inputs)

    return run


def _versions(inputs: Args) -> list[int]:
    """How often each tensor was written."""
    return [x._version for x in inputs if isinstance(x, Tensor) and not x.is_inference()]
