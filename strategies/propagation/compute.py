"""One propagation, computed: checks, the whole call's metadata, lines, the cheapest combination, each rank's own call.

This module keeps no state that another thread may see; `strategies.propagation.propagator` has the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from localtensor.concurrency import Sync
from localtensor.errors import OtherRows
from localtensor.layout import Mesh, Network, Spec, StridedShard, is_reducible, is_standard, short, strided
from strategies.model.rule import Call, Leaf, frozen, overload
from strategies.ops.semantics.local_call import (
    InvalidCall,
    InvalidRule,
    LocalCall,
    MissingRuleError,
    WouldMoveWritten,
    all_replicated,
    checked_rule,
    local_calls_by_rank,
    no_own_arguments,
    own_arguments_function,
    replacement_call,
    written_leaves,
)
from strategies.ops.semantics.rule_registry import (
    Meta,
    OwnArguments,
    RuleQuery,
    RuleRegistry,
    bind_arguments,
    overload_exists,
)
from strategies.propagation.mesh_expansion import ExpansionProblem, LineSource, Propagation, expand, grid_text
from strategies.propagation.meta_run import no_caller_modes, output_metas
from strategies.propagation.symbolic import (
    all_numbers,
    all_symbolic,
    contiguous,
    has_symbols,
    in_numbers,
    symbolic_metas,
    why_concrete,
)

Decompose = Callable[[RuleRegistry, RuleQuery], LineSource | str]
"""A function that returns the source of an op's lines by way of its decomposition; or why there is none."""


@dataclass(frozen=True, slots=True)
class UncachedPropagator:
    """Propagation of calls without a cache."""

    book: RuleRegistry
    limit: int
    sync: Sync
    replicate_all: bool
    decompose: Decompose | None
    network: Network
    lock: AbstractContextManager[Any]

    def __call__(
        self, op: str, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh | None
    ) -> Propagation:
        """Raises `InvalidCall`, `MissingRuleError`, `InvalidRule`, `NoMetadata` or `WouldMoveWritten`.

        Symbolic sizes are answered once for all on which the rule answers alike, or, where a rule needs a number, for the example.
        """
        if any(has_symbols(spec.shape) for spec in specs if isinstance(spec, Spec)):
            try:
                return self.computed(op, specs, args, kwargs, mesh)
            except (TypeError, AttributeError, InvalidRule) as reason:
                why_concrete(op, reason)
            specs = [replace(spec, shape=tuple(map(int, spec.shape))) for spec in specs]
        return self.computed(op, specs, args, kwargs, mesh)

    def computed(
        self, op: str, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh | None
    ) -> Propagation:
        """The answer for these very sizes, or symbols."""
        with no_caller_modes():
            mesh = self._checked(op, specs, mesh)
            straight = [_left_to_right(op, i, spec) for i, spec in enumerate(specs)]
            problem, source = self.problem(op, straight, args, kwargs, mesh)
            self.sync.step("propagate: lines")
            found = expand(problem, self.limit)
            if found.best is None:
                raise self._refused(straight, problem)
            self.sync.step("propagate: chosen")
            best = found.best
            pieces, whose = local_calls_by_rank(problem.whole, best.lines, mesh.sizes, problem.own)
            wanted = [placements or spec.placements for placements, spec in zip(best.inputs, straight, strict=True)]
            texts = [repr(piece.call) for piece in pieces]  # arguments need not be hashable
            calls = list(dict.fromkeys(texts))
            local = [in_numbers(pieces[texts.index(text)].call) for text in calls]
            return Propagation(
                call=in_numbers(problem.whole.call),
                mesh=mesh,
                given=tuple(specs),
                inputs=tuple(replace(spec, placements=want) for spec, want in zip(straight, wanted, strict=True)),
                outputs=tuple(
                    Spec(mesh, row, all_numbers(meta.shape), meta.dtype)
                    if meta is not None and row is not None
                    else None
                    for meta, row in zip(problem.whole.query.outputs, best.outputs, strict=True)
                ),
                steps=best.steps,
                seconds=best.seconds,
                calls=tuple(local),
                whose=tuple(calls.index(texts[which]) for which in whose),
                others=found.others,
                source=source,
                unseen=found.unseen,
            )

    def problem(
        self, op: str, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any], mesh: Mesh
    ) -> tuple[ExpansionProblem, str]:
        """The expansion problem of a call, and the source of its lines in words."""
        given = tuple(args)
        leaves = [v.index for v in pytree.tree_leaves((list(given), dict(kwargs))) if isinstance(v, Leaf)]
        if sorted(set(leaves)) != list(range(len(specs))):
            shown, problem = f"{len(specs)} specs, leaves {leaves}", "each spec needs its place in the arguments"
            remedy = f"Write Leaf(0) to Leaf({len(specs) - 1}) where the tensors go."
            raise InvalidCall(op, "specs", shown, problem, remedy)
        metas = tuple(Meta(all_symbolic(spec.shape), spec.dtype) for spec in specs)
        call = Call(op, frozen(given), tuple((name, frozen(value)) for name, value in kwargs.items()))
        self.sync.step("propagate: metadata")
        if any(has_symbols(spec.shape) for spec in specs):
            found = symbolic_metas(call, [contiguous(spec.shape, spec.dtype) for spec in specs])
            outputs = tuple(meta and Meta(all_symbolic(tuple(meta.shape)), meta.dtype) for meta in found)
        else:
            outputs = output_metas(call, metas, self.lock)
        query = RuleQuery(op, copy.deepcopy(bind_arguments(op, given, kwargs)), metas, outputs)
        self.sync.step("propagate: rule")
        offer, source, own = self._offer(op, specs, query)
        entry = self.book.get(op)
        if entry is not None:
            query, call = replacement_call(entry, query, call)
        written = tuple(sorted(written_leaves(call).items()))
        placements = tuple(tuple(spec.placements) for spec in specs)
        return ExpansionProblem(
            LocalCall(query, call), mesh.sizes, placements, written, offer, own, self.network
        ), source

    def _checked(self, op: str, specs: Sequence[Spec], mesh: Mesh | None) -> Mesh:
        """The mesh of the call.  Raises `InvalidCall` for an unknown op, bad specs, or specs on different meshes."""
        if op.count(".") != 2 or not overload_exists(op):
            raise InvalidCall(op, "op", repr(op), "this torch has no such overload", "Write it as aten.add.Tensor.")
        for number, spec in enumerate(specs):
            if not isinstance(spec, Spec):
                remedy = "Give localtensor.layout.spec.Spec."
                raise InvalidCall(op, f"specs[{number}]", repr(spec), "it is no Spec", remedy)
            mesh = spec.mesh if mesh is None else mesh
            if spec.mesh != mesh:
                problem = f"its mesh is {spec.mesh}, that before it {mesh}"
                remedy = "Put all tensors of a call on one mesh."
                raise InvalidCall(op, f"specs[{number}]", repr(spec), problem, remedy)
            for placement in spec.placements:
                problem = _placement_problem(placement, spec)
                if problem:
                    raise InvalidCall(
                        op,
                        f"specs[{number}]",
                        repr(spec),
                        problem,
                        "Redistribute the tensor to R, S, P or a strided shard first.",
                    )
        if mesh is None:
            problem = "the call has no tensor that determines its mesh"
            raise InvalidCall(op, "mesh", "None", problem, "Give mesh=Mesh.of(dp=2).")
        return mesh

    def _offer(self, op: str, specs: Sequence[Spec], query: RuleQuery) -> tuple[LineSource, str, OwnArguments]:
        """The source of the op's lines, the same in words, and the function of each rank's own arguments."""
        entry = self.book.get(op)
        if entry is not None:
            source = f"the rule of {entry.family} ({entry.reason}) at {entry.where}"
            return checked_rule(entry), source, own_arguments_function(entry)
        offer = self.decompose(self.book, query) if self.decompose else "not tried"
        if not isinstance(offer, str):
            return offer, "the rules of its decomposition", no_own_arguments
        if self.replicate_all:
            return lambda query, ranks: (all_replicated(query),), "the fallback: all replicated", no_own_arguments
        tried = f"rule: none among {len(self.book)}; decomposition: {offer}; all replicated: not allowed"
        raise MissingRuleError(
            op, ", ".join(map(repr, specs)), tried, "Add an entry to the book, or allow Propagator(replicate_all=True)."
        )

    def _refused(self, specs: Sequence[Spec], problem: ExpansionProblem) -> WouldMoveWritten:
        """The error for a call without a combination: all-replicate is always right, so a written tensor must not move."""
        call, leaves = problem.whole.call, [leaf for leaf, _ in problem.written]
        free = expand(replace(problem, movable=True), self.limit).best
        names = [a.name for a in overload(call.op)._schema.arguments if a.alias_info and a.alias_info.is_write]
        remedy = "Call the op out of place."
        if free is not None:
            to = grid_text([free.inputs[leaf] for leaf in leaves])
            remedy = f"Redistribute it to {to} before the call, or call the op out of place."
        shown = ", ".join(repr(specs[leaf]) for leaf in leaves)
        return WouldMoveWritten(call.op, ", ".join(names), shown, remedy)


def _left_to_right(op: str, number: int, spec: Spec) -> Spec:
    """The spec with its axes cutting from left to right, the order that rules assume.

    Another order becomes strided shards of the same layout.  Raises `InvalidCall` if there are none.
    """
    try:
        return strided(spec)
    except OtherRows as error:
        problem = f"its axes do not cut from left to right, nor in strided shards: {str(error).removesuffix('.')}"
        raise InvalidCall(
            op, f"specs[{number}]", repr(spec), problem, "Redistribute it to a spec without a shard order first."
        ) from error


def _placement_problem(placement: Placement, spec: Spec) -> str:
    """Why a tensor of this spec cannot have the placement; or empty."""
    if isinstance(placement, Partial):
        standard = is_standard(placement) and is_reducible(placement.reduce_op, spec.dtype)
        return "" if standard or type(placement) is not Partial else f"{short(placement)} of {spec.dtype} means nothing"
    known = type(placement) in (Replicate, Shard, StridedShard)
    return "" if known else f"{type(placement).__name__} is no placement whose meaning is known"
