"""Plans of calls under our rules: the placements that a call wants its tensors in, and those of its results.

A plan depends on shapes, dtypes, placements, arguments and the sizes of the mesh, and not on the rank: each rank makes
the same plan for itself.  Plans are cached by all of that, each argument with its type, so that 1, 1.0 and True differ.

| torch part (under torch.distributed.tensor)             | read on     | run on |
|---------------------------------------------------------|-------------|--------|
| _dtensor_spec.DTensorSpec, TensorMeta                   | 2.11 - 2.15 | 2.13   |
| DTensorSpec.shard_order, .is_default_device_order       | 2.11 - 2.15 | 2.13   |

`tests/strategies/torch_api/test_dtensor.py` checks both by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from localtensor.concurrency import THREAD_SYNC, IdentityKey, SingleFlightCache
from localtensor.errors import Refusal
from localtensor.layout import NETWORK, is_standard, short, shorts
from strategies.model.call_signature import NoKey
from strategies.model.rule import Call, flat_results, frozen, out_leaves, overload
from strategies.ops.semantics import local_call
from strategies.ops.semantics.rule_registry import Meta, OpRule, PlacementRule, RuleQuery, bind_arguments
from strategies.propagation.cache import value_token
from strategies.propagation.mesh_expansion import ExpansionProblem, Grid, expand
from strategies.propagation.meta_run import fake_mode_lock, no_caller_modes, on_meta_device, output_metas
from strategies.propagation.symbolic import (
    all_numbers,
    all_symbolic,
    has_symbols,
    symbolic,
    symbolic_metas,
    why_concrete,
)
from strategies.torch_api.dtensor import meta_of, returns_no_tensor
from strategies.torch_api.specs import contiguous_strides

_STATELESS = (Replicate, Shard, Partial)


class NoSizes(Refusal, RuntimeError, call="{op} under overlay_dtensor", argument="tensors"):
    """A tensor without sizes, or with one that depends on values; a `RuntimeError`, as DTensor's refusals are."""

    PROBLEM = "its sizes are neither integers nor symbols with an example"
    REMEDY = "Trace with an example of each size, or outside of the overlay."


class TurnedAxes(Refusal, RuntimeError, call="{op} under overlay_dtensor", argument="tensors"):
    """A tensor whose axes do not cut a dim from left to right; a `RuntimeError`, as DTensor's own refusals are."""

    PROBLEM = "its axes do not cut from left to right, the order that rules assume"
    REMEDY = "Redistribute it to replicas first: to the same placements DTensor moves nothing, and the order stays."


@dataclass(frozen=True, slots=True)
class CallTensor:
    """A tensor of a call: the metadata of the whole tensor, and its placements."""

    meta: TensorMeta
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The plan of a call.

    `whole` is the call on whole tensors.  `inputs` are the placements that it wants its tensors in, by leaf number;
    `outputs` those of its results, None for one that is masked or no tensor; both by axis.

    The rest are tensors that the call writes to, by leaf number, each with the number of the result that it becomes.
    `settled`: no line leaves them where they lie, so a copy is written to, and brought back.  `reshaped`: their shape
    changes in place.  `resized`: given as `out=` with another shape, they take that of the result.
    """

    whole: local_call.LocalCall
    inputs: tuple[tuple[Placement, ...], ...]
    outputs: Grid
    metas: tuple[TensorMeta | None, ...]
    settled: tuple[tuple[int, int | None], ...] = ()
    reshaped: tuple[tuple[int, int], ...] = ()
    resized: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class MeshCallPlan:
    """A plan on a mesh: the leaves that must be moved first, and the specs of the results."""

    mesh: DeviceMesh
    plan: CallPlan
    moves: tuple[int, ...]
    outputs: tuple[DTensorSpec | None, ...]


class CallPlanner:
    """The plans of one overlay, each made once.  Thread-safe.

    A rule does not communicate, so one rank may compute while the others of its process wait for it.
    """

    def __init__(self) -> None:
        self._plans: SingleFlightCache[CallPlan] = SingleFlightCache(name="plans of an overlay")
        self._ready: SingleFlightCache[MeshCallPlan] = SingleFlightCache(name="plans of an overlay on its meshes")

    def ready(self, entry: OpRule, call: Call, specs: Sequence[DTensorSpec], mesh: DeviceMesh) -> MeshCallPlan:
        """The plan of the call on this mesh.

        Raises `InvalidRule` for an invalid rule, `NoSizes` for sizes without an example, `TurnedAxes` for a shard order, and what
        the op raises for whole tensors like these.
        """
        key = _key(call, specs, mesh)
        if key is None:
            return _on(mesh, make_call_plan(entry, call, specs, mesh), specs)
        # By identity of the mesh: the ranks of one process have equal meshes of their own.
        return self._ready.get((key, IdentityKey(mesh)), self._made, key, entry, call, specs, mesh)

    def _made(
        self, key: Hashable, entry: OpRule, call: Call, specs: Sequence[DTensorSpec], mesh: DeviceMesh
    ) -> MeshCallPlan:
        return _on(mesh, self._plans.get(key, make_call_plan, entry, call, specs, mesh), specs)

    def __len__(self) -> int:
        return self._plans.stats().size


def _on(mesh: DeviceMesh, plan: CallPlan, specs: Sequence[DTensorSpec]) -> MeshCallPlan:
    anew = dict(plan.resized)
    moves = tuple(i for i, want in enumerate(plan.inputs) if specs[i].placements != want and i not in anew)
    outputs = tuple(
        None if placements is None or meta is None else DTensorSpec(mesh, placements, tensor_meta=meta)
        for placements, meta in zip(plan.outputs, plan.metas, strict=True)
    )
    return MeshCallPlan(mesh, plan, moves, outputs)


def _given(op: str, spec: DTensorSpec) -> CallTensor:
    meta = spec.tensor_meta
    if meta is None or not (all(type(size) is int for size in meta.shape) or has_symbols(meta.shape)):
        raise NoSizes(op, str(spec))
    if spec.shard_order is not None and not DTensorSpec.is_default_device_order(spec.shard_order):
        raise TurnedAxes(op, str(spec))
    return CallTensor(meta, spec.placements)


def _key(call: Call, specs: Sequence[DTensorSpec], mesh: DeviceMesh) -> Hashable | None:
    """All that a plan depends on; None if an argument is no plain value."""
    try:
        held = tuple((_typed_placements(spec.placements), spec.tensor_meta, spec.shard_order) for spec in specs)
        given = value_token(call.args), value_token(call.kwargs)
        key = call.op, given, held, tuple(mesh.shape), torch.get_default_dtype()
        hash(key)
    except (NoKey, TypeError):  # symbolic sizes cannot be hashed
        return None
    return key


def _typed_placements(placements: tuple[Placement, ...]) -> tuple[object, ...]:
    if all(type(p) in _STATELESS for p in placements):
        return placements
    return tuple(map(str, placements)), tuple(map(type, placements))


def make_call_plan(entry: OpRule, call: Call, specs: Sequence[DTensorSpec], mesh: DeviceMesh) -> CallPlan:
    """The plan of a call, computed; only the sizes of the mesh count.  Raises as `CallPlanner.ready`.

    Symbolic sizes are planned once for all on which the rule answers alike, or, where a rule needs a number, for the example.
    """
    held = [_given(call.op, spec) for spec in specs]
    if not any(has_symbols(one.meta.shape) for one in held):
        return _plan_of(entry, call, held, global_metas(call, [one.meta for one in held]), tuple(mesh.shape))
    metas = symbolic_metas(call, [one.meta for one in held])
    try:
        return _plan_of(entry, call, held, metas, tuple(mesh.shape))
    except (TypeError, AttributeError, local_call.InvalidRule) as reason:
        why_concrete(call.op, reason)
    held = [CallTensor(_concrete(one.meta), one.placements) for one in held]
    plan = _plan_of(entry, call, held, tuple(meta and _concrete(meta) for meta in metas), tuple(mesh.shape))
    return replace(plan, metas=metas)


def _concrete(meta: TensorMeta) -> TensorMeta:
    """The metadata with sizes and strides as numbers, each a guard of the graph that is recorded."""
    return TensorMeta(torch.Size(map(int, meta.shape)), tuple(map(int, meta.stride)), meta.dtype)


def _plan_of(
    entry: OpRule, call: Call, held: list[CallTensor], metas: tuple[TensorMeta | None, ...], sizes: tuple[int, ...]
) -> CallPlan:
    """The plan of a call on tensors of this metadata, whose results have these metas."""
    plain = Call(call.op, frozen(call.args), tuple((name, frozen(value)) for name, value in call.kwargs))
    written = local_call.written_leaves(plain)
    changed = tuple((leaf, r) for leaf, r in written.items() if r is not None and _differ(held[leaf].meta, metas[r]))
    outs = set(out_leaves(plain))
    resized = tuple(pair for pair in changed if pair[0] in outs)
    reshaped = tuple(pair for pair in changed if pair[0] not in outs)
    for leaf, result in resized:  # an `out=` of another shape is as the result: replicated, its old values are lost
        meta = metas[result]
        if meta is not None:
            own_dtype = TensorMeta(meta.shape, meta.stride, held[leaf].meta.dtype)
            held[leaf] = CallTensor(own_dtype, (Replicate(),) * len(sizes))
    query, plain = local_call.replacement_call(entry, whole_call_query(call, [one.meta for one in held], metas), plain)
    whole, given, own = (
        local_call.LocalCall(query, plain),
        tuple(one.placements for one in held),
        local_call.own_arguments_function(entry),
    )
    offer = CheckedLines(entry, query)
    kept = {leaf: r for leaf, r in written.items() if leaf not in dict(resized)}
    stays = tuple((leaf, None if leaf in dict(reshaped) else r) for leaf, r in kept.items())
    found = expand(ExpansionProblem(whole, sizes, given, stays, offer, own, NETWORK))
    settled: tuple[tuple[int, int | None], ...] = ()
    if found.best is None:  # no line leaves them where they lie
        settled = tuple((leaf, r) for leaf, r in written.items() if leaf not in dict(changed))
        found = expand(ExpansionProblem(whole, sizes, given, (), offer, own, NETWORK))
    assert found.best is not None, f"{call.op}: all-replicate is always right"
    inputs = tuple(row if row is not None else (Replicate(),) * len(sizes) for row in found.best.inputs)
    whole = local_call.LocalCall(_in_numbers(query), plain)
    return CallPlan(whole, inputs, found.best.outputs, metas, settled, reshaped, resized)


def _differ(given: TensorMeta, result: TensorMeta | None) -> bool:
    return result is not None and tuple(given.shape) != tuple(result.shape)


def whole_call_query(call: Call, given: Sequence[TensorMeta], outputs: Sequence[TensorMeta | None]) -> RuleQuery:
    """The rule query about a call on whole tensors."""
    tensors = tuple(Meta(tuple(map(symbolic, m.shape)), m.dtype) for m in given)
    results_of = tuple(None if m is None else Meta(tuple(map(symbolic, m.shape)), m.dtype) for m in outputs)
    arguments = bind_arguments(call.op, all_symbolic(call.args), all_symbolic(dict(call.kwargs)))
    return RuleQuery(call.op, arguments, tensors, results_of)


def _in_numbers(query: RuleQuery) -> RuleQuery:
    """The query with the SymInts themselves, of which ranks cut their pieces."""
    tensors = tuple(Meta(all_numbers(m.shape), m.dtype) for m in query.tensors)
    outputs = tuple(m and Meta(all_numbers(m.shape), m.dtype) for m in query.outputs)
    return RuleQuery(query.op, all_numbers(dict(query.arguments)), tensors, outputs)


def global_metas(call: Call, given: Sequence[TensorMeta]) -> tuple[TensorMeta | None, ...]:
    """Shape, strides and dtype of each result of the call on whole tensors, None for one that is no tensor."""
    try:
        with no_caller_modes():
            made = [torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="meta") for m in given]
            results = flat_results(on_meta_device(call)(made))
            return tuple(meta_of(x) if isinstance(x, Tensor) else None for x in results)
    except NotImplementedError:  # no meta kernel
        found = output_metas(call, [Meta(tuple(m.shape), m.dtype) for m in given], fake_mode_lock(THREAD_SYNC))
        return tuple(
            None if m is None else TensorMeta(torch.Size(m.shape), contiguous_strides(m.shape), m.dtype) for m in found
        )


class CheckedLines:
    """The checked lines of a rule for a piece of the call, all-replicate included.  Calls raise `InvalidRule`."""

    def __init__(self, entry: OpRule, whole: RuleQuery) -> None:
        self.entry, self.offer = entry, local_call.checked_rule(entry)
        self.numbers = bool(whole.outputs) and not any(whole.outputs) and returns_no_tensor(overload(entry.op))

    def __call__(self, query: RuleQuery, ranks: int) -> tuple[PlacementRule, ...]:
        if self.numbers:  # a number has no placement: it must be that of whole tensors
            return (local_call.all_replicated(query),)
        lines = self.offer(query, ranks)
        for line in lines:
            for placement in (*line.inputs, *line.outputs):  # DTensor cannot redistribute a tensor to other ones
                if placement is not None and not is_standard(placement):
                    problem = f"{short(placement)} is not R, S(dim) or one of the five P"
                    raise local_call.InvalidRule(self.entry.op, self.entry.where, str(line), problem, "Use those only.")
        return lines


def layout_text(placements: Sequence[Placement]) -> str:
    """`S(0)`, or `(S(0), R)` on more than one axis."""
    return shorts(placements) if len(placements) == 1 else f"({shorts(placements)})"
