"""What DTensor calls while a program runs, and the same program with one of these calls replaced by a right one.

`traced` records every propagation, handler and redistribution of the ranks, and compares each redistribution with a plain
one.  `op_replaced`, `rules_replaced`, `decomposition_replaced` and `redistribution_replaced` replace one part for a while.

| torch part (under torch.distributed.tensor)                              | read on     | run on |
|---------------------------------------------------------------------------|-------------|--------|
| DTensor._op_dispatcher: _custom_op_handlers, unwrap_to_op_info            | 2.11 - 2.15 | 2.13   |
| .sharding_propagator: propagate_op_sharding, _non_cached,                 |             |        |
| _propagate_tensor_meta_non_cached                                         | 2.11 - 2.15 | 2.13   |
| ._sharding_prop.LocalLRUCache                                             | 2.11 - 2.15 | 2.13   |
| _redistribute.redistribute_local_tensor, by every module that imports it  | 2.11 - 2.15 | 2.13   |
| _op_schema.OpSchema, OutputSharding                                       | 2.11 - 2.15 | 2.13   |
| _dtensor_spec.DTensorSpec, TensorMeta; DTensor(local, spec,               |             |        |
| requires_grad=), ._local_tensor, ._spec                                   | 2.11 - 2.15 | 2.13   |
| placement_types: the methods in `STEPS` of Shard, _StridedShard, Partial  | by feature  | 2.13   |
| torch._decomp.decomposition_table, OpOverload._can_decompose, .decompose  | 2.11 - 2.15 | 2.13   |
| torch.utils._mode_utils.no_dispatch, for DTensor.resize_                  | 2.11 - 2.15 | all    |

`tests/strategies/torch_api/test_counterfactuals.py` checks each part by name.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._decomp import decomposition_table
from torch.distributed.tensor import DTensor, Replicate, _redistribute, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from localtensor._util.patching import replaced, wrapped
from localtensor.errors import WrongPieces
from localtensor.layout import is_supported, shorts
from strategies.model.kernels import REJECTIONS
from strategies.torch_api.code_places import CodePlace, place_of, registered_place
from strategies.torch_api.dtensor import propagator, registry_of
from strategies.torch_api.handler_table import HANDLERS_ATTRIBUTE, torch_handlers
from strategies.torch_api.mesh_and_caches import clear_dtensor_caches
from strategies.torch_api.redistribute_plans import alike, gathered, parts, piece, redistributed
from strategies.torch_api.specs import makes_view_of_copy, sums_bools

STEPS = {
    "Partial": ("_reduce_value", "_reduce_shard_value", "_partition_value"),
    "Shard": ("_to_replicate_tensor", "_replicate_to_shard", "_to_new_shard_dim"),
    "_StridedShard": ("_to_replicate_tensor", "_replicate_to_strided_shard"),
    "_MaskPartial": ("_reduce_value", "_reduce_shard_value", "_partition_value"),
}
"""The methods of placements of which redistributions consist."""
HANDLER, DECOMPOSITION = "handler", "decomposition"
_DISPATCHER: Any = DTensor._op_dispatcher
_REDISTRIBUTE = "redistribute_local_tensor"


@dataclass(frozen=True, slots=True)
class OpStep:
    """One op as DTensor ran it first: the part that decided its placements, and these placements as text.

    `how` is the registry, or "handler"; `outer` is the op whose decomposition was traced meanwhile, or "".  `sums_bools`: it
    makes a pending sum of booleans, which has no meaning: where two ranks hold True, what reads it gets 2.  `of_copy`: it makes
    views, of inputs that DTensor redistributes first, so that they are views of a copy.
    """

    op: str
    how: str
    place: CodePlace | None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    outer: str = ""
    sums_bools: bool = False
    of_copy: bool = False

    @property
    def detail(self) -> str:
        """Its placements: `S(0); R -> S(0)`."""
        return " -> ".join("; ".join(side) or "()" for side in (self.inputs, self.outputs))


@dataclass(frozen=True, slots=True)
class Transform:
    """One redistribution: placements before and after, the methods that ran, and whether its result was wrong, or it raised."""

    source: str
    target: str
    methods: tuple[CodePlace, ...]
    wrong: bool


@dataclass(slots=True)
class Trace:
    """What rank 0 did, in order, each op once with the same placements; and the wrong redistributions of all ranks."""

    steps: list[OpStep] = field(default_factory=list)
    wrong: list[Transform] = field(default_factory=list)


@contextlib.contextmanager
def traced() -> Iterator[Trace]:  # noqa: C901  # five short functions that share the trace
    """While active, what DTensor does is recorded in the trace."""
    found, running, methods = Trace(), _StackByRank(), _StackByRank()

    def add(step: OpStep) -> None:
        if step not in found.steps:  # the rank that asks first: the others find the answer in the cache
            found.steps.append(step)

    def propagate(original: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
        how = registry_of(schema.op)
        outer = running.innermost()
        with running.entered(str(schema.op) if how == DECOMPOSITION else outer):
            try:
                answer = original(schema)
            except Exception:  # why: a refusal is recorded, and goes on
                add(OpStep(str(schema.op), how, registered_place(schema.op), _texts(schema.args_schema), (), outer))
                raise
        place, inputs, outputs = registered_place(schema.op), _texts(schema.args_schema), _texts(answer.output_spec)
        made = sums_bools(answer.output_spec) and not sums_bools(schema.args_schema)
        add(OpStep(str(schema.op), how, place, inputs, outputs, outer, made, makes_view_of_copy(schema, answer)))
        return answer

    def handler(original: Callable[..., Any], op: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(original, _Replacement):
            add(OpStep(str(op), HANDLER, place_of(original)))
        return original(op, args, kwargs)

    def redistribute(original: Callable[..., Any], local: Tensor, source: Any, target: Any, **kwargs: Any) -> Any:
        names = shorts(source.placements), shorts(target.placements)
        with methods.entered([]):
            ran: list[CodePlace] = methods.innermost()
            try:
                out = original(local, source, target, **kwargs)
            except Exception:  # why: any error of the redistribution is recorded, and raised on
                found.wrong.append(Transform(*names, tuple(ran), True))
                raise
        with contextlib.suppress(*REJECTIONS, WrongPieces):  # pieces of the caller's that do not fit
            right = redistributed(local, source, target)
            if not alike(out, right) if right is not None else parts(out, local, source, target) is not None:
                found.wrong.append(Transform(*names, tuple(ran), True))
        return out

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (ran := methods.innermost()) is not None:
            ran.append(place_of(original))
        return original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner, name in _step_methods():
            stack.enter_context(wrapped(owner, name, step))
        stack.enter_context(_handlers({op: _around(handler, run) for op, run in torch_handlers().items()}))
        stack.enter_context(_propagation(propagate))
        stack.enter_context(_redistribution(redistribute))
        yield found


def _step_methods() -> Iterator[tuple[Any, str]]:
    """The methods in `STEPS` that this torch has, by their class."""
    for kind, names in STEPS.items():
        own = vars(getattr(placement_types, kind, object))
        yield from ((getattr(placement_types, kind), name) for name in names if inspect.isfunction(own.get(name)))


class _Replacement:
    """A handler of ours, which a trace leaves out."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:
        return self._run(op, args, kwargs)


class _StackByRank:
    """A stack for each rank."""

    def __init__(self) -> None:
        self._stacks: dict[int, list[Any]] = {}

    def innermost(self) -> Any:
        stack = self._stacks.get(dist.get_rank())
        return stack[-1] if stack else None

    @contextlib.contextmanager
    def entered(self, value: Any) -> Iterator[None]:
        stack = self._stacks.setdefault(dist.get_rank(), [])
        stack.append(value)
        try:
            yield
        finally:
            stack.pop()


def _around(run: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, args, kwargs: run(original, op, args, kwargs)


def _texts(value: object) -> tuple[str, ...]:
    leaves = pytree.tree_leaves(value, is_leaf=lambda x: isinstance(x, DTensorSpec))
    return tuple(shorts(x.placements) for x in leaves if isinstance(x, DTensorSpec))


@contextlib.contextmanager
def _handlers(table: dict[Any, Any]) -> Iterator[None]:
    with replaced(_DISPATCHER, HANDLERS_ATTRIBUTE, {**torch_handlers(), **table}):
        yield


@contextlib.contextmanager
def _propagation(around: Callable[[Callable[[OpSchema], Any], OpSchema], Any]) -> Iterator[None]:
    prop = propagator()
    original = prop.propagate_op_sharding_non_cached

    def ours(schema: OpSchema) -> Any:
        return around(original, schema)

    with (
        replaced(prop, "propagate_op_sharding_non_cached", ours),
        replaced(prop, "propagate_op_sharding", LocalLRUCache(ours)),
    ):
        clear_dtensor_caches()
        yield
    clear_dtensor_caches()


@contextlib.contextmanager
def _redistribution(around: Callable[..., Any]) -> Iterator[None]:
    original = _redistribute.redistribute_local_tensor
    users = [m for name, m in list(sys.modules.items()) if name.startswith("torch.distributed.tensor")]
    with contextlib.ExitStack() as stack:
        for module in users:
            if vars(module).get(_REDISTRIBUTE) is original:
                stack.enter_context(wrapped(module, _REDISTRIBUTE, around))
        yield


@contextlib.contextmanager
def redistribution_replaced() -> Iterator[None]:
    """While active, DTensor's redistributions gather the whole tensor and cut it anew."""

    def plain(original: Callable[..., Any], local: Tensor, source: Any, target: Any, **kwargs: Any) -> Any:
        if (right := redistributed(local, source, target)) is not None:
            return right
        out = original(local, source, target, **kwargs)
        right = parts(out, local, source, target)
        return out if right is None else right

    with _redistribution(plain):
        clear_dtensor_caches()
        yield


@contextlib.contextmanager
def rules_replaced(place: CodePlace, ops: frozenset[str] = frozenset()) -> Iterator[None]:
    """While active, ops whose registered function is at this place, among `ops` if it is not empty, take and give replicas."""

    def answer(original: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
        hit = registered_place(schema.op) == place and (not ops or str(schema.op) in ops)
        return _replicated_answer(schema) if hit else original(schema)

    with _propagation(answer):
        yield


def _replicated_answer(schema: OpSchema) -> OutputSharding:
    def replicated(spec: DTensorSpec) -> DTensorSpec:
        return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)

    args, kwargs = pytree.tree_map_only(DTensorSpec, replicated, (schema.args_schema, schema.kwargs_schema))
    wanted = OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)
    mesh = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensorSpec)).mesh
    metas = propagator()._propagate_tensor_meta_non_cached(schema)

    def spec_of(meta: object) -> DTensorSpec | None:
        return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta) if isinstance(meta, TensorMeta) else None

    one = isinstance(metas, TensorMeta)
    out: Any = spec_of(metas) if one or metas is None else tuple(map(spec_of, metas))
    moves = _texts((args, kwargs)) != _texts((schema.args_schema, schema.kwargs_schema))
    return OutputSharding(out, wanted if moves else None, needs_redistribute=moves)


@contextlib.contextmanager
def op_replaced(op: torch._ops.OpOverload, *, keep: bool = True) -> Iterator[None]:
    """While active, the op gathers its tensors and runs on whole ones; with `keep`, its results have DTensor's placements.

    DTensor's propagation is still called for the placements, and nothing else of DTensor for this op.
    """

    def run(op: Any, args: Any, kwargs: Any) -> Any:
        return _on_whole_tensors(op, args, kwargs, keep=keep)

    with _handlers({op: _Replacement(run)}):
        clear_dtensor_caches()
        yield


@contextlib.contextmanager
def decomposition_replaced(op: torch._ops.OpOverload) -> Iterator[None]:
    """While active, the op's decomposition runs on DTensors, op by op, and is not traced for placements."""

    def run(op: Any, args: Any, kwargs: Any) -> Any:
        function = decomposition_table.get(op)
        return function(*args, **kwargs) if function else op.decompose(*args, **kwargs)

    with _handlers({op: _Replacement(run)}):
        clear_dtensor_caches()
        yield


def _on_whole_tensors(op: Any, args: Any, kwargs: Any, *, keep: bool) -> Any:
    specs = _declared(op, args, kwargs) if keep else []
    owners: dict[int, DTensor] = {}
    mesh = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DTensor)).device_mesh

    def whole(x: DTensor) -> Tensor:
        plain = all(map(is_supported, x.placements))
        made = gathered(x._local_tensor, x._spec) if plain else x.full_tensor().detach()
        owners[id(made)] = x
        return made

    given = pytree.tree_map_only(DTensor, whole, (args, kwargs))
    kept = [x for x in pytree.tree_leaves(given) if id(x) in owners]
    raw = op(*given[0], **given[1])
    if op._schema.is_mutable:
        for made in kept:
            _write_back(made, owners[id(made)])
    left = iter(specs)

    def wrap(x: Tensor) -> object:
        spec = next(left, None)
        if id(x) in owners:
            return owners[id(x)]
        meta = TensorMeta(x.shape, x.stride(), x.dtype)
        placements = spec.placements if spec is not None else (Replicate(),) * mesh.ndim
        out = DTensorSpec(mesh, placements, meta)
        return DTensor(piece(x, out), out, requires_grad=False)

    return pytree.tree_map_only(Tensor, wrap, raw)


def _declared(op: Any, args: Any, kwargs: Any) -> list[Any]:
    try:
        info = _DISPATCHER.unwrap_to_op_info(op, args, kwargs)
        found = propagator().propagate_op_sharding_non_cached(info.schema).output_spec
    except Exception:  # why: DTensor refuses the call; then its results are replicated
        return []
    leaves = found if isinstance(found, (tuple, list)) else [found]
    placed = [spec for spec in leaves if isinstance(spec, DTensorSpec)]
    return placed if all(_has_meaning(spec) for spec in placed) else []


def _has_meaning(spec: DTensorSpec) -> bool:
    meta: Any = spec.tensor_meta
    try:
        piece(torch.zeros(meta.shape, dtype=meta.dtype), spec)
    except Exception:  # why: no such placement of this shape and dtype, by errors of several classes
        return False
    return True


def _write_back(made: Tensor, owner: DTensor) -> None:
    held = piece(made, owner._spec)
    owner._local_tensor.resize_(held.shape).copy_(held)
    if made.shape != owner.shape:
        meta = TensorMeta(made.shape, made.stride(), made.dtype)
        owner._spec = DTensorSpec(owner._spec.mesh, owner._spec.placements, meta)
        with no_dispatch():
            owner.resize_(made.shape)
