"""A few right rules, and what it is to be right: run on the pieces and put together, it is what the op gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from localtensor.concurrency.sync import THREAD_SYNC
from localtensor.layout import NETWORK
from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import assemble, local_shapes, split
from localtensor.layout.spec import PARTIAL_KINDS, Spec, parse
from strategies.model.rule import LEAVES, Call, flat_results
from strategies.ops.semantics.rule_registry import PlacementRule, RuleQuery, RuleRegistry, rules
from strategies.propagation.compute import UncachedPropagator
from strategies.propagation.mesh_expansion import LIMIT, ExpansionProblem

MESHES = ((2, 2), (2, 3), (3, 2), (2, 2, 2))


def together(query: RuleQuery) -> Iterator[PlacementRule]:
    """All tensors are cut in the same dim of the result, where they have it."""
    [out] = query.outputs
    for dim in range(out.ndim):
        yield PlacementRule(tuple(_under(dim, meta.shape, out.shape) for meta in query.tensors), (Shard(dim),))


def _under(dim: int, shape: Sequence[int], out: Sequence[int]) -> Any:
    own = dim - (len(out) - len(shape))
    return Shard(own) if own >= 0 and shape[own] == out[dim] else parse("R")


def added(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from together(query)
    for kind in ("sum", "avg"):
        yield PlacementRule((Partial(kind), Partial(kind)), (Partial(kind),))


def copied(query: RuleQuery) -> Iterator[PlacementRule]:
    yield from together(query)
    for kind in PARTIAL_KINDS:
        yield PlacementRule((Partial(kind),), (Partial(kind),))


def multiplied(query: RuleQuery) -> Iterator[PlacementRule]:
    yield query.line({0: Shard(0)}, [Shard(0)])
    yield query.line({1: Shard(1)}, [Shard(1)])
    yield query.line({0: Shard(1), 1: Shard(0)}, [Partial()])
    yield query.line({0: Partial()}, [Partial()])
    yield query.line({1: Partial()}, [Partial()])


def reduced(query: RuleQuery) -> Iterator[PlacementRule]:
    kind, cut = ("max", "filled") if "amax" in query.op else ("sum", "any")
    dims = query.dims("dim")
    yield PlacementRule((Partial(kind),), (Partial(kind),))
    for dim in range(query.tensors[0].ndim):
        if dim in dims:
            yield PlacementRule((Shard(dim),), (Partial(kind),), cut)
        elif not query["keepdim"]:
            yield PlacementRule((Shard(dim),), (Shard(dim - sum(d < dim for d in dims)),))


def viewed(query: RuleQuery) -> Iterator[PlacementRule]:
    (was,), (now,) = query.tensors, query.outputs
    if was.ndim and now.ndim:
        yield PlacementRule((Shard(0),), (Shard(0),), "even")
        if was.shape[-1] == now.shape[-1]:
            yield PlacementRule((Shard(was.ndim - 1),), (Shard(now.ndim - 1),))
    yield PlacementRule((Partial(),), (Partial(),))


BOOK = RuleRegistry.of(
    *rules("pointwise", "each element goes by itself", ["aten.mul.Tensor", "aten.mul_.Tensor"], together),
    *rules("linear", "a sum of sums", ["aten.add.Tensor", "aten.add_.Tensor"], added),
    *rules("copy", "each element goes by itself", ["aten.clone.default"], copied),
    *rules("matmul", "rows by columns", ["aten.mm.default"], multiplied),
    *rules("reduction", "what ranks have is reduced further", ["aten.sum.dim_IntList", "aten.amax.default"], reduced),
    *rules("view", "rows in order", ["aten.view.default"], viewed, shapes=["size"]),
)


def afresh(book: RuleRegistry = BOOK, limit: int = LIMIT, **options: Any) -> UncachedPropagator:
    given = {"replicate_all": False, "decompose": None, "network": NETWORK} | options
    return UncachedPropagator(book, limit, THREAD_SYNC, lock=threading.Lock(), **given)


def spec_of(mesh: Mesh, placements: str, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Spec:
    return Spec(mesh, tuple(map(parse, placements.split())), tuple(shape), dtype)


def whole(mesh: Mesh, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Spec:
    return spec_of(mesh, "R " * len(mesh.sizes), shape, dtype)


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, tuple(shape), generator=rng).double()


def problem_of(
    op: str, specs: Sequence[Spec], args: Sequence[Any] | None = None, book: RuleRegistry = BOOK
) -> ExpansionProblem:
    given = LEAVES[: len(specs)] if args is None else args
    return afresh(book).problem(op, specs, given, {}, specs[0].mesh)[0]


def run_on_pieces(
    calls: Sequence[Call], tensors: Sequence[Tensor], inputs: Sequence[Spec], seed: int = 0
) -> list[list[Tensor]]:
    """What each rank gets from its own call on its own pieces."""
    rng = torch.Generator().manual_seed(seed)
    held = [[x.clone() for x in split(x, spec, rng)] for x, spec in zip(tensors, inputs, strict=True)]
    return [flat_results(call([pieces[rank] for pieces in held])) for rank, call in enumerate(calls)]


def assert_right(
    call: Call, calls: Sequence[Call], tensors: Sequence[Tensor], inputs: Sequence[Spec],
    outputs: Sequence[Spec | None], seed: int = 0,
) -> None:  # fmt: skip
    """The ranks' results are the pieces of what the op gives for the whole tensors."""
    got = run_on_pieces(calls, tensors, inputs, seed)
    for number, (want, spec) in enumerate(zip(flat_results(call([x.clone() for x in tensors])), outputs, strict=True)):
        if spec is not None:
            pieces = [outs[number] for outs in got]
            assert [tuple(piece.shape) for piece in pieces] == local_shapes(spec), (inputs, outputs)
            torch.testing.assert_close(assemble(pieces, spec), want, msg=lambda said: f"{inputs} -> {outputs}: {said}")
