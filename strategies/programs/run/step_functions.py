"""Each rank's piece of each tensor of a program, and the functions that its steps use, on tensors or DTensors.

A function means the same for a plain tensor and for a DTensor, so that both runs of a program use the same code.  Scripts
that reproduce a finding contain its source: they need torch alone.

torch 2.13 has context parallelism for three kernels of CUDA only.  `CpuKernels` runs the CPU's flash attention in place of
CUDA's on each rank's piece; all else is torch's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor.errors import BadPlacement
from localtensor.layout import COMMUTING_KINDS, RandomNumbers, is_standard, partial_values, shorts, split_axis
from localtensor.layout import split_by_axes as spread_shards
from strategies.model.rule import Program


def local_inputs_of(program: Program) -> tuple[tuple[Tensor, ...], ...]:
    """`held[leaf][rank]`, ranks numbered row by row: each rank's piece of each tensor.

    The pieces depend on the program alone.  Raises `NotReducible` for a partial placement that is not defined for the
    dtype, `NoSuchDim` for a shard of a dim that does not exist, and `BadPlacement` for a placement of DTensor's own, or
    two kinds of partial placements that do not commute.
    """
    return tuple(_held(program, leaf, x) for leaf, x in enumerate(program.sample.tensors))


def _held(program: Program, leaf: int, x: Tensor) -> tuple[Tensor, ...]:
    placements = program.inputs[leaf]
    _check(placements, program.mesh, x)
    mesh = "x".join(map(str, program.mesh))
    # On one axis `probe` uses the same name for the same split, so that both have the same values.
    name = f"{program.seed} {program.sample.op} {leaf} {shorts(placements)} {mesh} {program.draw}"
    rng = RandomNumbers(zlib.crc32(name.encode()))
    sparse = program.draw % 2 == 1

    def cut(whole: Tensor, placement: Placement, ranks: int) -> Sequence[Tensor]:
        if isinstance(placement, Partial) and is_standard(placement):
            return partial_values(whole, placement.reduce_op, ranks, rng, sparse=sparse).unbind()
        return split_axis(whole, placement, ranks)

    return tuple(spread_shards(x, placements, program.mesh, cut))


def _check(placements: Sequence[Placement], mesh: Sequence[int], x: Tensor) -> None:
    if len(placements) != len(mesh):
        raise BadPlacement("held_of", shorts(placements), f"{len(placements)} placements for {len(mesh)} mesh axes")
    partial = [p.reduce_op for p in placements if isinstance(p, Partial)]
    kinds = set(partial)
    if len(partial) > 1 and "avg" in kinds and not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise BadPlacement("held_of", shorts(placements), f"averages of {x.dtype} round, so the order of axes matters")
    if len(kinds) > 1 and kinds != COMMUTING_KINDS:
        raise BadPlacement("held_of", shorts(placements), f"{' and '.join(sorted(kinds))} do not commute")


def whole(x: Tensor) -> Tensor:
    """The whole tensor, a copy, where it is spread over ranks; else the tensor itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def laid(x: Tensor, placement: Placement | list[Placement]) -> Tensor:
    """The same tensor with this placement on each mesh axis, or with these, one for each axis."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=placement if isinstance(placement, list) else [placement] * x.device_mesh.ndim)


def spread(values: Tensor, like: Tensor, placement: Placement) -> Tensor:
    """These values on the mesh of a DTensor, with this placement on its first axis and replicas on the others."""
    if not isinstance(like, DTensor):
        return values
    first = placement if values.ndim else Replicate()
    placements = [first, *[Replicate() for _ in range(like.device_mesh.ndim - 1)]]
    return distribute_tensor(values, like.device_mesh, placements, src_data_rank=None)


def uneven(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values of both signs, of which no two are alike: what a gradient should come in with."""
    count = torch.Size(shape).numel()
    steps = torch.arange(count, dtype=torch.float64, device=device)
    return (torch.cos(steps * 1.7 + 0.3) + steps * 0.01).reshape(shape).to(dtype)


def coming_gradients(outs: Sequence[Tensor], placement: Placement | None) -> list[Tensor]:
    """For each result a gradient that is not uniform, and a DTensor with this placement where the result is one.

    Without a placement it is what `backward()` of a loss begins with: ones like the result, with a placement that DTensor chooses.
    """
    if placement is None:
        return [torch.ones_like(out) for out in outs]
    return [spread(uneven(out.shape, out.dtype, out.device), out, placement) for out in outs]


def gradients(
    op: Callable[[Sequence[Any]], list[Any]],
    tensors: Sequence[Any],
    placement: Placement | None,
    writes: bool,
    twice: bool = False,
    only: int | None = None,
) -> list[Any]:
    """The gradient of each tensor that can have one; None where the result does not depend on it.

    What comes in has this placement, or that of ones like the results.  With `twice`, the gradients of the gradients are appended.  With `only`, no tensor but
    that of this number requires a gradient.  An op that `writes` to its arguments gets copies.  Raises RuntimeError where
    the call has no gradient, as autograd does.
    """
    real = [x.dtype.is_floating_point or x.dtype.is_complex for x in tensors]
    real = [has and only in (None, i) for i, has in enumerate(real)]
    leaves = [x.detach().requires_grad_(has) for x, has in zip(tensors, real, strict=True)]
    asked = [x for x in leaves if x.requires_grad]
    with torch.enable_grad():
        outs = op([x.clone() if writes else x for x in leaves])
        outs = [out for out in outs if isinstance(out, Tensor) and out.requires_grad]
        if not outs:
            raise RuntimeError("no result of this call has a gradient")
        coming = coming_gradients(outs, placement)
        first = list(torch.autograd.grad(outs, asked, coming, allow_unused=True, create_graph=twice))
        if not twice:
            return first
        again = [g for g in first if g is not None and g.requires_grad]
        if not again:
            raise RuntimeError("no gradient of this call has a gradient")
        return first + list(torch.autograd.grad(again, asked, coming_gradients(again, placement), allow_unused=True))


def trained(
    op: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any], writes: bool, optimizer: Callable[..., Any]
) -> list[Any]:
    """The tensors as parameters after two steps of the optimizer.  Raises RuntimeError where the call has no gradient."""
    given = [torch.nn.Parameter(x.detach().clone(), x.dtype.is_floating_point) for x in tensors]
    steps = optimizer([x for x in given if x.requires_grad])
    for _ in range(2):
        steps.zero_grad()
        with torch.enable_grad():
            outs = op([x.clone() if writes else x for x in given])
        outs = [out for out in outs if isinstance(out, Tensor) and out.requires_grad]
        torch.autograd.backward(outs, coming_gradients(outs, Replicate()))
        steps.step()
    return [x.detach() for x in given]


def written(x: Any, view: Callable[[Any], Any], write: Callable[[Any], Any]) -> list[Any]:
    """A copy of x and a view of it, after the view was written in place."""
    base = x.clone()
    part = view(base)
    write(part)
    return [base, part]


def with_base_written(x: Any, view: Callable[[Any], Any]) -> list[Any]:
    """A view of a copy of x, after the copy was written in place."""
    base = x.clone()
    part = view(base)
    base.mul_(-2)
    return [part]


def through_local(x: Any) -> Any:
    """The tensor by way of its local tensors."""
    if not isinstance(x, DTensor):
        return x
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


RINGS = {
    f"context parallel{causal}{balanced}{rotated}": f"ring_attention(x, {bool(causal)}, {bool(balanced)}, {method!r})"
    for causal, balanced in (("", ""), (", causal", ""), (", causal", ", balanced"))
    for rotated, method in (("", "allgather"), (", alltoall", "alltoall"))
}
"""Expressions of the tensors `x`: query, key and value.  torch balances causal attention only."""


class CpuKernels(TorchDispatchMode):
    """While it is on, the CPU's flash attention stands for CUDA's on plain tensors; DTensor's handlers serve DTensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func not in (
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_backward.default,
        ):
            return func(*args, **kwargs)
        named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        if any(isinstance(value, DTensor) for value in named.values()):
            with self:
                return DTensor._op_dispatcher._custom_op_handlers[func](func, args, kwargs)
        q, k, v = named["query"], named["key"], named["value"]
        common = {"dropout_p": 0.0, "is_causal": named.get("is_causal", False), "scale": named.get("scale")}
        if "grad_out" in named:
            saved = named["grad_out"], q, k, v, named["out"], named["logsumexp"]
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, **common)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **common)
        seed, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return out, lse, None, None, q.shape[2], k.shape[2], seed, unused, out.new_empty(0)


def ring_attention(x: Sequence[Any], causal: bool, balanced: bool, rotate: str) -> list[Tensor]:
    """The attention of query, key and value `[batch, heads, sequence, features]`, and the gradient of each.

    DTensors are sharded along the sequence, after the load balancer's rearrangement if `balanced`; each rank then holds
    the whole results.  Of 1-D meshes only.
    """
    full = [whole(one).detach() for one in x]
    coming = uneven(full[0].shape[:-1] + full[2].shape[-1:], full[0].dtype, full[0].device)
    if not isinstance(x[0], DTensor):
        leaves = [one.clone().requires_grad_() for one in full]
        with torch.enable_grad():
            q, k, v = leaves
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return [out.detach(), *torch.autograd.grad(out, leaves, coming)]
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    mesh, length = x[0].device_mesh, full[0].shape[2]
    there, back = torch.arange(length), torch.arange(length)
    if balanced:
        balancer = _HeadTailLoadBalancer(length, mesh.size(), full[0].device)
        there, back = balancer._generate_indices(restore=False)[0], balancer._generate_indices(restore=True)[0]

    def cut(one: Tensor) -> DTensor:
        return distribute_tensor(one.index_select(2, there), mesh, [Shard(2)], src_data_rank=None)

    options = cp._cp_options.enable_load_balance, cp._cp_options.rotate_method
    dist.barrier()
    cp._cp_options.enable_load_balance = balanced
    cp.set_rotate_method(rotate)
    cp._enable_context_parallel_dispatcher()
    try:
        leaves = [cut(one).requires_grad_() for one in full]
        with torch.enable_grad(), CpuKernels():
            out = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, 0.0, causal)[0]
            results = [out.detach(), *torch.autograd.grad(out, leaves, cut(coming))]
        results = [whole(one).index_select(2, back) for one in results]
        dist.barrier()  # ranks may share the registered rules
    finally:
        cp._disable_context_parallel_dispatcher()
        cp._cp_options.enable_load_balance, cp._cp_options.rotate_method = options
    return results
