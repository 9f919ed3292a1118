"""Attention under context parallelism, on a CPU: torch's own rules, handlers, ring and load balancer, with a CPU kernel.

torch 2.13 has context parallelism for three kernels of CUDA only.  `CpuKernels` runs the CPU's flash attention in place of
CUDA's on each rank's piece; all else is torch's.  A step means the same for plain tensors and for DTensors; scripts that
reproduce a finding contain its source: they need torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.programs.run.local_inputs import uneven, whole

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
