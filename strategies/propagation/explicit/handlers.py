"""The hooks in DTensor through which guards detect implicit communication.

While any guard is active, three attributes of torch are replaced.  Each replacement consults the guard of the current
thread and task, and does what torch's own does where there is none.  Two are called before the arguments of an op are
redistributed, and before the gradient of `from_local` is.  The third is the table of op handlers: DTensor's `argmax`,
convolution, `loss_parallel`, context parallelism and gradient scaling have handlers that call collectives or
`redistribute` themselves, and `torch.equal` all-reduces its result.  These are watched while they run, and refused at
their first collective.

| torch part                                                            | read on     | run on |
|------------------------------------------------------------------------|-------------|--------|
| torch.utils._python_dispatch.TorchDispatchMode: sees the collectives   | 2.11 - 2.15 | 2.13   |
| distributed_c10d._resolve_process_group: the group of a name           | 2.13        | 2.13   |
| aten.equal's tail in DTensor's dispatcher: an all-reduce in the world  | 2.13        | 2.13   |

| DTensor's hooks (under torch.distributed.tensor)                                          | read on     | run on |
|-------------------------------------------------------------------------------------------|-------------|--------|
| DTensor._op_dispatcher.redistribute_local_args(op_info, schema, ...): called through self | 2.13        | 2.13   |
| OpInfo.schema, .flat_args_schema, .args_tree_spec; OpSchema.op, .args_schema              | 2.11 - 2.15 | 2.13   |
| _api.redistribute_local_tensor: only `from_local`'s backward calls it                     | 2.13        | 2.13   |
| torch.utils._pytree: how DTensor flattens lists of tensors                                | 2.11 - 2.15 | 2.13   |

`tests/strategies/propagation/explicit/test_handlers.py` and `test_handlers_hooks.py` check each part by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor, _api
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor._util import ambient
from localtensor.errors import refusal_sentence
from localtensor.layout import shape_text
from strategies.propagation.explicit.redistribution_text import (
    ALLOW,
    ImplicitCommunication,
    ImplicitRedistribution,
    argument_names,
    call_text,
    spec_text,
    user_line,
)
from strategies.torch_api import handler_table
from strategies.torch_api.handler_table import Handler, HandlerTableView, OverlayHandler

Overload = torch._ops.OpOverload
Report = Callable[[ImplicitCommunication], None]
"""A function that raises the error, or warns."""

EQUAL = torch.ops.aten.equal.default
SIZE_OPS = (torch.ops.aten.is_same_size.default, torch.ops.aten.is_pinned.default, torch.ops.aten.as_strided.default)
"""Ops whose handlers only read sizes."""
REPLICATE_FIRST = ("aten.argmax.default", "aten.argmin.default", "aten.convolution.default")
"""Ops whose handlers communicate only tensors that are not replicated."""
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
_WAITS = ("wait_tensor", "_wrap_tensor_autograd")


class WatchedHandler(OverlayHandler):
    """A handler of torch's that is watched.  As an `OverlayHandler` it is never written to torch's own table."""

    applies_rules = False
    __slots__ = ("report",)

    def __init__(self, run: Handler, report: Report) -> None:
        super().__init__(run)
        self.report = report

    def __call__(self, op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        with _Watch(op, [*args, *kwargs.values()], self.report, sys._getframe()):
            return self.run(op, args, kwargs)


class EqualHandler(OverlayHandler):
    """`torch.equal`, which DTensor's dispatcher computes itself: reported, then passed on to it."""

    applies_rules = False
    __slots__ = ("report",)

    def __init__(self, report: Report) -> None:
        super().__init__(self.passed_on)
        self.report = report

    def passed_on(self, op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        world = dist.get_world_size()
        if world > 1:
            does = f"all-reduces one integer of all {world} ranks"
            self.report(_refused(op, [*args, *kwargs.values()], does, sys._getframe()))
        guard = ambient.guard()
        assert guard is not None, "the table of a guard outside of it"
        ambient.set_guard(guard.without_handlers())
        try:
            return op(*args, **kwargs)
        finally:
            ambient.set_guard(guard)


def watched_table(table: dict[Any, Any], report: Report) -> HandlerTableView:
    """A table of handlers as seen by a guarded thread.  Handlers of an overlay consult the guard themselves."""
    seen = {
        op: handler if isinstance(handler, OverlayHandler) or op in SIZE_OPS else WatchedHandler(handler, report)
        for op, handler in table.items()
    }
    seen.setdefault(EQUAL, EqualHandler(report))
    return HandlerTableView(table.table if isinstance(table, HandlerTableView) else table, seen)


class _Watch(TorchDispatchMode):
    """Reports the first collective of more than one rank that a handler calls."""

    def __init__(self, op: Overload, given: Sequence[Any], report: Report, frame: FrameType) -> None:
        super().__init__()
        self.op, self.given, self.report, self.frame = op, given, report, frame

    def __torch_dispatch__(
        self, func: Overload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if _communicates(func, args, kwargs):
            moved = [shape_text(x.shape, x.dtype) for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
            self.report(_refused(self.op, self.given, f"calls {func} of {', '.join(moved)}", self.frame))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first: its local calls come here again
        return func(*args, **kwargs)


def _communicates(func: Overload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if func.namespace not in _COLLECTIVES or func._schema.name.partition("::")[2] in _WAITS:
        return False
    arguments = func._schema.arguments
    given = list(zip(arguments, args, strict=False))
    given += [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]
    sizes = [_group_size(value) for argument, value in given if _is_group(argument, value)]
    return all(size != 1 for size in sizes)


def _is_group(argument: torch._C.Argument, value: object) -> bool:
    """Whether an argument of a collective is its group, or the group's name."""
    return "ProcessGroup" in str(argument.type) or (argument.name == "group_name" and isinstance(value, str))


def _group_size(group: str | dist.ProcessGroup | torch.ScriptObject) -> int:
    if isinstance(group, str):
        name: Any = group  # torch's type for it is not public
        return c10d._resolve_process_group(name).size()
    return (group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)).size()


def _refused(op: Overload, given: Sequence[Any], does: str, frame: FrameType) -> ImplicitCommunication:
    line, name = user_line(frame), str(op)
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, DTensor)]
    pairs = zip(op._schema.arguments, given, strict=False)
    names = tuple(argument.name for argument, value in pairs if any(x is value for x in tensors))
    held = "; ".join(spec_text(x._spec) for x in tensors)
    replicas = ", ".join("Replicate()" for _ in tensors[0].placements) if tensors else ""
    whole = (
        f"Write {names[0]}.redistribute(placements=[{replicas}]) before it, or put"
        if name in REPLICATE_FIRST
        else "Put"
    )
    problem = f"DTensor's own code for this op {does}"
    text = refusal_sentence(call_text(name, line), ", ".join(names), held, problem, f"{whole} it in `with {ALLOW}:`.")
    return ImplicitCommunication(name, names, line, text)


ARGS_HOOK, LOCAL_HOOK = "redistribute_local_args", "redistribute_local_tensor"
_TORCH_ARGS: Any = getattr(type(DTensor._op_dispatcher), ARGS_HOOK)
_TORCH_LOCAL: Any = vars(_api).get(LOCAL_HOOK)


def install_hooks() -> None:
    """Install the hooks."""
    ambient.begin_rules(handler_table.install_property)
    setattr(DTensor._op_dispatcher, ARGS_HOOK, _redistribute_local_args)
    if _TORCH_LOCAL is not None:
        setattr(_api, LOCAL_HOOK, _redistribute_local_tensor)


def remove_hooks() -> None:
    """Restore torch's own attributes."""
    delattr(DTensor._op_dispatcher, ARGS_HOOK)
    if _TORCH_LOCAL is not None:
        setattr(_api, LOCAL_HOOK, _TORCH_LOCAL)
    ambient.end_rules(handler_table.remove_property)


def _redistribute_local_args(op_info: OpInfo, schema: OpSchema, *rest: object, **options: object) -> object:
    guard = ambient.guard()
    if guard is not None and not guard.allows:
        wanted = schema.args_schema if op_info.args_tree_spec is None else pytree.tree_leaves(schema.args_schema)
        changed = [
            (leaf, was, now)
            for leaf, (was, now) in enumerate(zip(op_info.flat_args_schema, wanted, strict=False))
            if isinstance(was, DTensorSpec) and isinstance(now, DTensorSpec) and was != now
        ]
        if any(guard.moves(was, now) for _, was, now in changed):
            op = (op_info.schema or schema).op
            guard.check(str(op), _needs(op, op_info, changed))
    return _TORCH_ARGS(op_info, schema, *rest, **options)


def _redistribute_local_tensor(
    local: Tensor, src: DTensorSpec, dst: DTensorSpec, *rest: object, **options: object
) -> object:
    guard = ambient.guard()
    if guard is not None:
        guard.check("DTensor.from_local", [ImplicitRedistribution("gradient", src, dst)])
    return _TORCH_LOCAL(local, src, dst, *rest, **options)


def _needs(
    op: torch._ops.OpOverload, op_info: OpInfo, changed: list[tuple[int, DTensorSpec, DTensorSpec]]
) -> list[ImplicitRedistribution]:
    """The redistributions of a call's tensors, by the names of its arguments."""
    tree = op_info.args_tree_spec
    numbers: Any = tuple(range(len(op_info.flat_args_schema)))
    args = numbers if tree is None else pytree.tree_unflatten(list(numbers), tree)
    names = argument_names(op, args, {}, lambda value: value if type(value) is int else None)
    return [ImplicitRedistribution(names[leaf][0], was, now, names[leaf][1]) for leaf, was, now in changed]
