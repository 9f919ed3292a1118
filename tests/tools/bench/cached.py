"""Two calls of one op that DTensor's cache takes for one: rules that look at a scalar which the cache's key leaves out.

DTensor remembers what a rule said by the call's tensors and by the scalars that `RuntimeSchemaInfo` names.  A rule that
looks at another scalar is right when it is asked, and wrong when the answer to an earlier call is given instead: that
shows in the second call, through DTensor itself.  `python -m tests.tools.bench.cached` runs each pair on two gloo processes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder, register_single_dim_strategy
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Cached:
    """An op with one scalar, the two values of it, and the placements with which both calls are made."""

    name: str
    func: Callable[..., Tensor]
    scalar: str
    values: tuple[Any, Any]
    placement: Placement
    rules: Callable[[Any], list[list[Any]]]


def _scaled(factor: float) -> list[list[Any]]:
    return [[Partial("max"), Partial("max")]] if factor > 0 else [[_ShardingPlaceholder(0), _ShardingPlaceholder(0)]]


def _filled(value: float) -> list[list[Any]]:
    return [[Partial("sum"), Partial("sum")]] if value == 0 else []


def _kept(keepdim: bool) -> list[list[Any]]:
    return [[_ShardingPlaceholder(1 if keepdim else 0), _ShardingPlaceholder(1)]]


CACHED = (
    Cached("scaled", lambda x, factor: x * factor, "float factor", (2.0, -3.0), Partial("max"), _scaled),
    Cached("shifted", lambda x, value: x + value, "float value", (0.0, 1.5), Partial("sum"), _filled),
    Cached("summed", lambda x, keepdim: x.sum(0, keepdim=keepdim), "bool keepdim", (False, True), Shard(1), _kept),
)


def plant(one: Cached, *, forgets: bool) -> torch._ops.OpOverload:
    """The op, its rule registered with the scalar in the cache's key or without."""
    name = f"{one.name}_{'forgets' if forgets else 'knows'}"
    torch.library.define(f"cached::{name}", f"(Tensor x, {one.scalar}) -> Tensor")
    torch.library.impl(f"cached::{name}", ("cpu", "cuda"), one.func)
    torch.library.register_fake(f"cached::{name}", one.func)
    op: torch._ops.OpOverload = getattr(torch.ops.cached, name).default

    @register_single_dim_strategy(op, schema_info=None if forgets else RuntimeSchemaInfo(1))
    def rule(op: Any, args: Any, kwargs: Any) -> list[Any]:
        return one.rules(args[1])

    return op


@functools.cache
def planted() -> tuple[tuple[Cached, torch._ops.OpOverload], ...]:
    """Each op twice, planted once in a process.  Call it before rank threads start: what a rank registers is its own."""
    return tuple((one, plant(one, forgets=forgets)) for one in CACHED for forgets in (False, True))


def second_call(one: Cached, op: torch._ops.OpOverload) -> str:
    """What is wrong with the second call after the first, on two ranks; empty if nothing.  Run on every rank."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12, dtype=torch.float64).reshape(3, 4) - 5
    rank = mesh.get_rank()
    if isinstance(one.placement, Shard):
        local = whole.chunk(2, one.placement.dim)[rank].contiguous()
    elif one.placement == Partial("max"):
        local = whole - 3 * ((torch.arange(12).reshape(3, 4) + rank) % 2)
    else:
        local = whole * 3 if rank else whole * -2
    for value in one.values:
        given = DTensor.from_local(
            local, mesh, [one.placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        try:
            got = op(given, value).redistribute(mesh, [Replicate()]).to_local()
        except (RuntimeError, IndexError, AssertionError) as error:
            return f"{value}: {str(error).splitlines()[0]}"
        want = one.func(whole, value)
        if got.shape != want.shape or not torch.allclose(got, want):
            return (
                f"{value}: {got.flatten()[:4].tolist()} of shape {tuple(got.shape)}, not {want.flatten()[:4].tolist()}"
            )
    return ""


def job() -> dict[str, str]:
    """Every pair with the scalar in the key and without: what is wrong."""
    return {str(op): second_call(one, op) for one, op in planted()}


def main() -> int:
    """Print the verdicts; 1 if a rule whose key is whole goes wrong, or one whose key is not goes right."""
    import localtensor as lt

    found = lt.run(job, ranks=2, on="gloo")[0]
    for op, wrong in found.items():
        sys.stdout.write(f"{op}: {wrong or 'right'}\n")
    return int(any(bool(wrong) != ("forgets" in op) for op, wrong in found.items()))


if __name__ == "__main__":
    sys.exit(main())
