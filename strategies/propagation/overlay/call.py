"""One call of an op on DTensors under our rules: tensors are redistributed as planned, each rank runs its own call on
its pieces, and the results become DTensors.

This is what DTensor's dispatcher does, without its errors: keyword arguments are redistributed, too; the schema decides
whether an op is in place, not the name; a written tensor is brought back if no line leaves it where it lies; and a
replicated value becomes a partial one exactly, in its own dtype.

| torch part (under torch.distributed.tensor)                                  | read on     | run on |
|-------------------------------------------------------------------------------|-------------|--------|
| DTensor._op_dispatcher: _try_replicate_spec_for_scalar_tensor,                | 2.11 - 2.15 | 2.13   |
| _dispatch_get_local_results_slow_path (random state; ranks outside the mesh)  | 2.13        | 2.13   |
| DTensor(local, spec, requires_grad=), ._local_tensor, ._spec                  | 2.11 - 2.15 | 2.13   |
| _dtensor_spec.DTensorSpec                                                     | 2.11 - 2.15 | 2.13   |
| _op_schema.OpInfo, OpSchema, OutputSharding                                   | 2.11 - 2.15 | 2.13   |
| _redistribute.redistribute_local_tensor                                       | 2.11 - 2.15 | 2.13   |
| _utils.ExplicitRedistributionContext.observe_redistribution (by feature)      | 2.12 - 2.15 | 2.13   |
| _utils.compute_local_shape_and_global_offset                                  | 2.11 - 2.15 | 2.13   |
| torch.utils._python_dispatch.return_and_correct_aliasing                      | 2.11 - 2.15 | 2.13   |
| torch.utils._mode_utils.no_dispatch                                           | 2.11 - 2.15 | 2.13   |

`tests/strategies/propagation/overlay/test_call.py` checks each part by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import return_and_correct_aliasing

from localtensor._util import ambient, left_alone_by_the_compiler
from localtensor.errors import Refusal
from localtensor.layout import shard_cut
from strategies.model.rule import Call, Leaf, call_of, overload
from strategies.ops.semantics.local_call import own_arguments, with_arguments
from strategies.ops.semantics.rule_registry import Meta, OpRule, RuleQuery
from strategies.propagation.explicit.redistribution_text import ImplicitRedistribution, argument_names
from strategies.propagation.overlay.call_plan import CallPlan, CallPlanner, MeshCallPlan, layout_text

Overload = torch._ops.OpOverload
_DISPATCHER: Any = DTensor._op_dispatcher
_Placements = Sequence[Placement]


class TwoMeshes(Refusal, RuntimeError, call="{op} under overlay_dtensor", argument="tensors"):
    """A call of tensors on different meshes; a `RuntimeError`, as DTensor's own refusals are."""

    PROBLEM = "they are on two meshes"
    REMEDY = "Redistribute to one of them first."


class RuleRunner:
    """The handler of one op under its rule.  It reads the schema once."""

    def __init__(self, planner: CallPlanner, entry: OpRule) -> None:
        self.planner, self.entry = planner, entry
        self.op = overload(entry.op)
        schema = self.op._schema
        self.random = self.op in _DISPATCHER._random_ops
        self.view = schema._is_view_op()
        self.writes = {
            argument.name: argument.alias_info.before_set
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.in_place = bool(self.writes) and not any(a.is_out for a in schema.arguments) and bool(schema.returns)

    def __call__(self, op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run the op on these arguments, at least one of which is a DTensor."""
        call, tensors = call_of(self.op, args, kwargs)
        mesh = _mesh_of(call.op, tensors)
        # A plain tensor has one element, or any number under `implicit_replication`; DTensor raises for others.
        replicated = _DISPATCHER._try_replicate_spec_for_scalar_tensor
        specs = [x._spec if isinstance(x, DTensor) else replicated(op, x, mesh) for x in tensors]
        local = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
        ready = self.planner.ready(self.entry, call, specs, mesh)
        plan, used = ready.plan, local
        guard = ambient.guard()
        if guard is not None and not guard.allows and (ready.moves or plan.settled):
            guard.check(call.op, _needs(self.op, call, specs, ready))
        if ready.moves or plan.resized:
            used = list(local)
            for leaf in ready.moves:
                used[leaf] = redistributed_piece(local[leaf], specs[leaf], plan.inputs[leaf], call.op)
            for leaf, becomes in plan.resized:
                used[leaf] = _empty(local[leaf], ready.outputs[becomes])
        raw = self.on_ranks(_rank_call(self.entry, call, plan, mesh), used, ready, specs)
        for leaf, result in plan.settled:
            _bring_back(local[leaf], used[leaf], specs[leaf], plan, leaf, result)
        for leaf, becomes in plan.reshaped:  # its old local tensor, if it has moved, would not fit its new spec
            tensors[leaf]._local_tensor, tensors[leaf]._spec = used[leaf], ready.outputs[becomes]  # type: ignore[attr-defined]
        for leaf, becomes in plan.resized:
            _set_result(tensors[leaf], used[leaf], ready.outputs[becomes])
        if not self.writes and not self.view:
            return _wrapped(raw, iter(ready.outputs))
        return self.returned(args, kwargs, raw, ready)

    def on_ranks(self, call: Call, used: Sequence[Tensor], ready: MeshCallPlan, specs: Sequence[DTensorSpec]) -> Any:
        """The result of this rank's own call; for a rank outside of the mesh, DTensor's result for such a rank."""
        args, kwargs = call.filled(used)
        if not self.random and ready.mesh.get_coordinate() is not None:
            return (self.op if call.op == self.entry.op else overload(call.op))(*args, **kwargs)
        info = OpInfo(ready.mesh, OpSchema(self.op, (), {}), [], args, kwargs, None)
        outputs = ready.outputs
        info.output_sharding = OutputSharding(outputs[0] if len(outputs) == 1 else outputs or None, None, False)
        placements = ready.plan.inputs[0] if specs else ()
        first = DTensorSpec(ready.mesh, placements, tensor_meta=specs[0].tensor_meta)
        first_argument = SimpleNamespace(_spec=first)  # the random state depends on the redistributed first argument
        return _DISPATCHER._dispatch_get_local_results_slow_path(self.op, (first_argument,), info)

    def returned(self, args: tuple[Any, ...], kwargs: dict[str, Any], raw: Any, ready: MeshCallPlan) -> object:
        """The results; one that is an argument is that same object."""
        schema = self.op._schema
        if not schema.returns:
            return None
        given = kwargs | {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
        written = {alias: given.get(name) for name, aliases in self.writes.items() for alias in aliases}
        specs = iter(ready.outputs)
        made = []
        for one, value in zip(schema.returns, (raw,) if len(schema.returns) == 1 else raw, strict=True):
            wrapped = _wrapped(value, specs)
            names = one.alias_info.before_set if one.alias_info is not None else ()
            same = [written[name] for name in names if written.get(name) is not None]
            made.append(same[0] if same else wrapped)
        out = made[0] if len(made) == 1 else tuple(made)
        if (self.view or self.in_place) and ready.mesh.get_coordinate() is not None:
            return return_and_correct_aliasing(self.op, args, kwargs, out)
        return out


left_alone_by_the_compiler(RuleRunner.__call__)  # where a graph breaks, it would compile the rules


def _empty(x: Tensor, spec: DTensorSpec | None) -> Tensor:
    """An uninitialised tensor for this rank's piece of a result."""
    if spec is None or spec.tensor_meta is None:
        return x
    shape, _ = dtensor_utils.compute_local_shape_and_global_offset(
        spec.tensor_meta.shape, spec.mesh, spec.placements, skip_offset=True
    )
    return x.new_empty(shape)


def _set_result(out: Tensor, local: Tensor, spec: DTensorSpec | None) -> None:
    """Make a DTensor given as `out=` the result, its sizes included."""
    if spec is not None and isinstance(out, DTensor):
        made = DTensor(local, spec, requires_grad=False)
        out._local_tensor, out._spec = local, spec
        with no_dispatch():
            out.set_(made)  # type: ignore[call-overload]


def _mesh_of(op: str, tensors: Sequence[Tensor]) -> DeviceMesh:
    first = None
    for x in tensors:
        if isinstance(x, DTensor):
            mesh = x._spec.mesh
            if first is None:
                first = mesh
            elif mesh is not first and mesh != first:
                raise TwoMeshes(op, f"{first} and {mesh}")
    assert first is not None, f"{op}: no argument is a DTensor"
    return first


def redistributed_piece(x: Tensor, spec: DTensorSpec, want: _Placements, op: str = "") -> Tensor:
    """The rank's piece of the tensor after a redistribution.  Ranks communicate."""
    middle = _whole_first(spec.placements, want)
    x, spec = _multiplied(x, spec, middle)
    if middle != spec.placements:
        there = DTensorSpec(spec.mesh, middle, tensor_meta=spec.tensor_meta)
        _observe(spec, there, op)
        x = redistribute_local_tensor(x, spec, there)
    for axis, (old, new) in enumerate(zip(middle, want, strict=True)):
        if old != new:
            x = partial_piece(x, new, spec.mesh, axis)
    return x


def _needs(op: Overload, call: Call, specs: Sequence[DTensorSpec], ready: MeshCallPlan) -> list[ImplicitRedistribution]:
    """The redistributions that a guard has to allow: tensors that must move, and those that are brought back."""
    names = argument_names(op, call.args, dict(call.kwargs), lambda value: value.index if type(value) is Leaf else None)
    plan, needs = ready.plan, []
    for leaf in ready.moves:
        want = _whole_first(specs[leaf].placements, plan.inputs[leaf])
        there = DTensorSpec(ready.mesh, want, tensor_meta=specs[leaf].tensor_meta)
        needs.append(ImplicitRedistribution(names[leaf][0], specs[leaf], there, names[leaf][1]))
    for leaf, result in plan.settled:
        now = plan.outputs[result] if result is not None else plan.inputs[leaf]
        if now is not None:
            back = DTensorSpec(ready.mesh, now, tensor_meta=specs[leaf].tensor_meta)
            needs.append(ImplicitRedistribution(f"{names[leaf][0]} (brought back)", back, specs[leaf], True))
    return needs


def _multiplied(x: Tensor, spec: DTensorSpec, want: _Placements) -> tuple[Tensor, DTensorSpec]:
    """The tensor and its spec with complex products, for which there is no collective, gathered and multiplied."""
    if not x.dtype.is_complex:
        return x, spec
    for axis, (old, new) in enumerate(zip(spec.placements, want, strict=True)):
        if isinstance(old, Partial) and old.reduce_op == "product" and new != old:
            size = spec.mesh.size(axis)
            stack = TensorMeta(torch.Size((size, *x.shape)), (x.numel(), *x.contiguous().stride()), x.dtype)
            rest = (Replicate(),) * spec.mesh.ndim
            cut = DTensorSpec(spec.mesh, (*rest[:axis], Shard(0), *rest[axis + 1 :]), tensor_meta=stack)
            gathered = DTensorSpec(spec.mesh, rest, tensor_meta=stack)
            x = redistribute_local_tensor(x.contiguous().unsqueeze(0), cut, gathered).prod(0)
            placements = (*spec.placements[:axis], Replicate(), *spec.placements[axis + 1 :])
            spec = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    return x, spec


def _whole_first(given: _Placements, want: _Placements) -> tuple[Placement, ...]:
    """The target of the redistribution: a tensor that is to be partial is replicated first; `partial_piece` does the rest."""
    pairs = zip(given, want, strict=True)
    return tuple(Replicate() if isinstance(new, Partial) and new != old else new for old, new in pairs)


def _observe(spec: DTensorSpec, there: DTensorSpec, op: str) -> None:
    context = getattr(dtensor_utils, "ExplicitRedistributionContext", None)
    if context is not None and hasattr(context, "observe_redistribution"):
        was, new = layout_text(spec.placements), layout_text(there.placements)
        text = f"Implicit redistribution occurred for {op}: {was} -> {new}"
        context.observe_redistribution(spec, there, text)


def partial_piece(x: Tensor, placement: Placement, mesh: DeviceMesh, axis: int) -> Tensor:
    """The rank's part of a replicated value: the first rank has a sum or product, the others its neutral element."""
    kind = placement.reduce_op if isinstance(placement, Partial) else ""
    if kind in ("avg", "min", "max") or mesh.get_coordinate() is None:
        return x
    first = torch.zeros(mesh.size(axis), dtype=torch.bool, device=x.device)
    first[0] = True
    whole = TensorMeta(first.shape, first.stride(), first.dtype)
    replicas = (Replicate(),) * mesh.ndim
    held = DTensorSpec(mesh, replicas, tensor_meta=whole)
    cut = DTensorSpec(mesh, (*replicas[:axis], Shard(0), *replicas[axis + 1 :]), tensor_meta=whole)
    mine = redistribute_local_tensor(first, held, cut)
    neutral = torch.ones_like(x) if kind == "product" else torch.zeros_like(x)
    if kind == "sum" and x.dtype.is_floating_point:
        neutral = -neutral  # -0.0 + x is x, whatever its sign
    return torch.where(mine.reshape(()), x, neutral)


def _rank_call(entry: OpRule, call: Call, plan: CallPlan, mesh: DeviceMesh) -> Call:
    """The call of this rank on its pieces: the call itself, or its substitute, with the rank's own arguments."""
    made = call if entry.instead is None else plan.whole.call
    if entry.own is None and not entry.shapes:
        return made
    query = plan.whole.query
    reshaped = bool(plan.outputs) and _is_sharded(plan.outputs[0])
    if not reshaped and (entry.own is None or not any(map(_is_sharded, (*plan.inputs, *plan.outputs)))):
        return made
    tensors = (
        [_piece(m, p, mesh) for m, p in zip(query.tensors, plan.inputs, strict=True)] if entry.own else query.tensors
    )
    outputs = [meta and _piece(meta, p, mesh) for meta, p in zip(query.outputs, plan.outputs, strict=True)]
    piece = RuleQuery(query.op, query.arguments, tuple(tensors), tuple(outputs))
    return with_arguments(made, own_arguments(entry, piece, reshaped=reshaped))


def _is_sharded(placements: _Placements | None) -> bool:
    return placements is not None and any(shard_cut(p) is not None for p in placements)


def _piece(meta: Meta, placements: _Placements | None, mesh: DeviceMesh) -> Meta:
    """The metadata of this rank's piece of a tensor."""
    if placements is None or not _is_sharded(placements):
        return meta
    shape, _ = dtensor_utils.compute_local_shape_and_global_offset(meta.shape, mesh, placements, skip_offset=True)
    return Meta(tuple(shape), meta.dtype)


def _bring_back(mine: Tensor, used: Tensor, spec: DTensorSpec, plan: CallPlan, leaf: int, result: int | None) -> None:
    """Redistribute the copy that the op wrote to, and copy it into the tensor itself."""
    now = plan.outputs[result] if result is not None else plan.inputs[leaf]
    if now is None or (now == spec.placements and used is mine):
        return
    mine.copy_(redistributed_piece(used, DTensorSpec(spec.mesh, now, tensor_meta=spec.tensor_meta), spec.placements))


def _wrapped(value: object, specs: Iterator[DTensorSpec | None]) -> object:
    if isinstance(value, (list, tuple)):
        return type(value)([_wrapped(v, specs) for v in value])
    spec = next(specs, None)
    if isinstance(value, Tensor) and spec is not None:
        return DTensor(value, spec, requires_grad=value.requires_grad)
    return value
