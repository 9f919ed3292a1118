"""Where a guard gets into DTensor: before the arguments of an op are redistributed, before a gradient of `from_local` is,
and where the handlers of ops are looked up.

While anybody has a guard, three attributes of torch's are ours; each asks the guard of the thread and task it is called
in, and does what torch's own does where there is none.  Afterwards they are torch's own.

| torch part (under torch.distributed.tensor)                                              | read on     | run on |
|-------------------------------------------------------------------------------------------|-------------|--------|
| DTensor._op_dispatcher.redistribute_local_args(op_info, schema, ...): called through self | 2.13        | 2.13   |
| OpInfo.schema, .flat_args_schema, .args_tree_spec; OpSchema.op, .args_schema              | 2.11 - 2.15 | 2.13   |
| _api.redistribute_local_tensor: `from_local`'s backward calls it, and nobody else         | 2.13        | 2.13   |
| torch.utils._pytree: how DTensor flattens lists of tensors                                | 2.11 - 2.15 | 2.13   |

`tests/plans/test_explicit_seams.py` names each part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, _api
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree

from localtensor._util import ambient as _context
from strategies.propagation.explicit.redistribution_text import Need, argument_names
from strategies.torch_api import handler_table as overlay_table

ARGS, LOCAL = "redistribute_local_args", "redistribute_local_tensor"
_THEIRS: Any = getattr(type(DTensor._op_dispatcher), ARGS)
_THEIR_LOCAL: Any = vars(_api).get(LOCAL)


def begin() -> None:
    """The attributes are ours."""
    _context.begin_rules(overlay_table.begin)
    setattr(DTensor._op_dispatcher, ARGS, _redistribute_local_args)
    if _THEIR_LOCAL is not None:
        setattr(_api, LOCAL, _redistribute_local_tensor)


def end() -> None:
    """They are torch's again."""
    delattr(DTensor._op_dispatcher, ARGS)
    if _THEIR_LOCAL is not None:
        setattr(_api, LOCAL, _THEIR_LOCAL)
    _context.end_rules(overlay_table.end)


def _redistribute_local_args(op_info: Any, schema: Any, *rest: Any, **options: Any) -> Any:
    guard = _context.guard()
    if guard is not None and not guard.allows:
        wanted = schema.args_schema if op_info.args_tree_spec is None else pytree.tree_leaves(schema.args_schema)
        changed = [
            (leaf, was, now)
            for leaf, (was, now) in enumerate(zip(op_info.flat_args_schema, wanted, strict=False))
            if isinstance(was, DTensorSpec) and isinstance(now, DTensorSpec) and was != now
        ]
        if any(guard.moves(was, now) for _, was, now in changed):
            op = (op_info.schema or schema).op
            guard.asks(str(op), _needs(op, op_info, changed))
    return _THEIRS(op_info, schema, *rest, **options)


def _redistribute_local_tensor(local: Any, src: DTensorSpec, dst: DTensorSpec, *rest: Any, **options: Any) -> Any:
    guard = _context.guard()
    if guard is not None:
        guard.asks("DTensor.from_local", [Need("gradient", src, dst)])
    return _THEIR_LOCAL(local, src, dst, *rest, **options)


def _needs(op: torch._ops.OpOverload, op_info: Any, changed: list[tuple[int, DTensorSpec, DTensorSpec]]) -> list[Need]:
    """The tensors of a call that do not lie as the op wants them, by the names of its arguments."""
    tree = op_info.args_tree_spec
    numbers: Any = tuple(range(len(op_info.flat_args_schema)))
    args = numbers if tree is None else pytree.tree_unflatten(list(numbers), tree)
    names = argument_names(op, args, {}, lambda value: value if type(value) is int else None)
    return [Need(names[leaf][0], was, now, names[leaf][1]) for leaf, was, now in changed]
