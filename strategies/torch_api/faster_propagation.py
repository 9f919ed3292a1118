"""Parts of DTensor's propagation that a sweep calls millions of times, with the same answers in less time.

| torch part (under torch.distributed.tensor)                              | read on     | run on     |
|----------------------------------------------------------------------------|-------------|------------|
| _dtensor_spec.DTensorSpec.__init__(mesh, placements, tensor_meta): all     | 2.11 - 2.15 | 2.11, 2.13,|
| that it sets beside mesh and tensor_meta depends on the placements alone,  |             | 2.15       |
| and on use_strided_shard_as_shard_order where that is given                |             |            |
| _ops._view_ops.view_groups(from_size, to_size), a function of numbers      | 2.11 - 2.15 | the same   |
| _decompositions.tree_map, from torch.utils._pytree                         | 2.11 - 2.15 | the same   |
| _ops.utils.redistribute_cost(current_spec, target_spec): of a mesh, of the | 2.11 - 2.15 | 2.11, 2.13,|
| placements on it, and of the shape and dtype of the first spec             |             | 2.15       |

`tests/strategies/torch_api/test_faster_propagation.py` compares each part with torch's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, _decompositions
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor._ops import utils as _rule_utils
from torch.utils import _pytree

from localtensor._util.patching import replaced

_FLAG = "use_strided_shard_as_shard_order"
"""The argument of a spec that most rules give besides: how strided shards are read, of which it has none here."""
_PLAIN = frozenset({Shard, Replicate, Partial})
_LEAVES = frozenset({Tensor, DTensorSpec, int, float, bool, complex, str, type(None), torch.dtype, torch.device})
"""Types that are no containers to a pytree, whatever is registered there."""
VIEWS = 4096
"""Pairs of shapes of which the answer of `view_groups` is kept."""
COSTS = 1 << 14
"""Costs of redistributions that are kept at most."""


@contextmanager
def faster_propagation() -> Iterator[None]:
    """While active, specs are made from what an equal one was made of before, views are compared once for the same two shapes,
    a redistribution along one axis has its cost once for the same placements, and the tracer of decompositions walks plain tuples, lists and dicts without torch's registry of containers.

    Each answer is that of torch's own function.  Where a torch has no such part, that part stays as it is.
    """
    with ExitStack() as stack:
        if list(inspect.signature(DTensorSpec).parameters)[:3] == ["mesh", "placements", "tensor_meta"]:
            stack.enter_context(replaced(DTensorSpec, "__init__", _remembered_specs(DTensorSpec.__init__)))
        if list(inspect.signature(getattr(_view_ops, "view_groups", len)).parameters) == ["from_size", "to_size"]:
            stack.enter_context(replaced(_view_ops, "view_groups", _remembered_views(_view_ops.view_groups)))
        cost: Any = getattr(_rule_utils, "redistribute_cost", len)
        if list(inspect.signature(cost).parameters) == ["current_spec", "target_spec"]:
            stack.enter_context(replaced(_rule_utils, "redistribute_cost", _remembered_costs(cost)))
        if getattr(_decompositions, "tree_map", None) is _pytree.tree_map:
            stack.enter_context(replaced(_decompositions, "tree_map", plain_tree_map))
        yield


def _remembered_specs(made: Callable[..., None]) -> Callable[..., None]:
    by_flag: dict[Any, dict[Any, dict[str, Any]]] = {flag: {} for flag in (None, False, True)}

    def init(
        self: DTensorSpec, mesh: Any, placements: Any, tensor_meta: TensorMeta | None = None, *args: Any, **kwargs: Any
    ) -> None:
        known = by_flag.get(kwargs.get(_FLAG)) if len(kwargs) == (_FLAG in kwargs) else None
        plain = type(placements) is tuple and (tensor_meta is None or type(tensor_meta) is TensorMeta)
        if args or known is None or not plain:
            return made(self, mesh, placements, tensor_meta, *args, **kwargs)
        if not _PLAIN.issuperset(map(type, placements)):  # others may have a state, and no hash
            return made(self, mesh, placements, tensor_meta, **kwargs)
        own = self.__dict__
        if placements in known:
            own.update(known[placements])
            own["mesh"], own["placements"], own["tensor_meta"] = mesh, placements, tensor_meta
            return None
        made(self, mesh, placements, tensor_meta, **kwargs)
        known[placements] = dict(own)
        return None

    return init


def _remembered_views(compared: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    kept = lru_cache(maxsize=VIEWS)(compared)

    def view_groups(from_size: Any, to_size: Any) -> Any:
        if not (isinstance(from_size, (tuple, list)) and isinstance(to_size, (tuple, list))):
            return compared(from_size, to_size)
        sizes = (*from_size, *to_size)
        if any(type(size) is not int for size in sizes):  # symbols, and sizes in a tuple of their own
            return compared(from_size, to_size)
        return kept(tuple(from_size), tuple(to_size))

    return view_groups


def _remembered_costs(computed: Callable[[DTensorSpec, DTensorSpec], float]) -> Callable[[Any, Any], float]:
    known: dict[Any, tuple[DeviceMesh, float]] = {}  # with the mesh, whose number is of no other one while it is there

    def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
        mesh, before, after = current_spec.mesh, current_spec.placements, target_spec.placements
        one_axis = len(before) == len(after) == 1 and target_spec.mesh is mesh  # of several, shards may have any order
        if not one_axis or type(before[0]) not in _PLAIN or type(after[0]) not in _PLAIN:
            return computed(current_spec, target_spec)
        key = id(mesh), before, after, current_spec.tensor_meta
        if key not in known:
            if len(known) >= COSTS:
                known.clear()
            known[key] = mesh, computed(current_spec, target_spec)
        return known[key][1]

    return redistribute_cost


def plain_tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`torch.utils._pytree.tree_map` of one tree."""
    kind = type(tree)
    if kind in _LEAVES:
        return function(tree)
    if kind is tuple or kind is list:
        return kind([plain_tree_map(function, one) for one in tree])
    if kind is dict:
        return {key: plain_tree_map(function, one) for key, one in tree.items()}
    return _pytree.tree_map(function, tree)
