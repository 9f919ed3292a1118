"""Attention over a sequence that lies in pieces on the ranks: context parallel, head-tail balanced.

`context_parallel` rings with CUDA's attention kernels only.  On the CPU three things are left, and all run here:
its buffers with the mathematical kernel, which DTensor takes apart op by op; its ring with the CPU's flash kernel;
and a ring of our own over isend and irecv.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCH, HEADS, WIDTH, SEQ = 2, 2, 4, 2  # SEQ is a dim
Attention = Callable[..., Tensor]


def inputs(length: int) -> list[Tensor]:
    """Query, key and value; the batch of the key is one row, expanded."""
    torch.manual_seed(11)
    q, v = torch.randn(2, BATCH, HEADS, length, WIDTH, dtype=torch.float64)
    k = torch.randn(1, HEADS, length, WIDTH, dtype=torch.float64).expand(BATCH, -1, -1, -1)
    return [q, k, v]


def output_and_gradients(attend: Attention, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Output, then the gradients of query, key and value under a loss that tells positions apart."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output = attend(*leaves, **options)
    output.square().sum().backward()
    return [output.detach(), *[x.grad for x in leaves]]


def on_one_device(length: int, is_causal: bool) -> list[Tensor]:
    return output_and_gradients(nn.functional.scaled_dot_product_attention, inputs(length), is_causal=is_causal)


def sharded_buffers(length: int, kernel: str | None, masked: bool, backward: bool) -> dict[str, object]:
    """The public way: buffers are sharded in place, attention is replaced, the results put together again."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = before = inputs(length)
    mask = causal_mask(length, mesh).expand(BATCH, HEADS, length, length)
    buffers, originals = [q, k, v, mask], [x.clone() for x in (*before, mask)]
    only = sdpa_kernel(getattr(SDPBackend, kernel)) if kernel else nullcontext()
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[SEQ] * 4), only:
        given = {"attn_mask": mask} if masked else {}
        attend = nn.functional.scaled_dot_product_attention
        if backward:
            parts = output_and_gradients(attend, [q, k, v], **given)
        else:
            with torch.no_grad():
                parts = [attend(q, k, v, **given)]
        shapes = [tuple(x.shape) for x in buffers]
        whole = ring.context_parallel_unshard(mesh, parts, [SEQ] * len(parts))
    restored = all(torch.equal(x, original) for x, original in zip(buffers, originals))
    return {"whole": whole, "shapes": shapes, "restored": restored}


def causal_mask(length: int, mesh: DeviceMesh) -> Tensor:
    """Rows are positions of queries, in order; columns are those of keys, in the order of the balanced ring."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    balanced = length % (2 * mesh.size()) == 0
    return mask[:, _HeadTailLoadBalancer(length, mesh.size(), "cpu")._generate_indices()[0]] if balanced else mask


def what_cuda_alone_can() -> str:
    """The refusal of the public way with the kernel that the CPU would choose."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    buffers = inputs(8)
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[SEQ] * 3):
            nn.functional.scaled_dot_product_attention(*buffers, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return "no refusal"


# -- torch's own ring, around the flash kernel that the CPU has


class FlashRing(torch.autograd.Function):
    """What `context_parallel` does with CUDA's flash attention, with the CPU's in its place."""

    @staticmethod
    def forward(ctx: Any, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ctx.is_causal = is_causal
        out, logsumexp = ring._templated_ring_attention(dist.group.WORLD, SEQ, flash, q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        gradients = ring._templated_ring_attention_backward(
            dist.group.WORLD, SEQ, flash, grad, "grad_out", q, k, v, out, logsumexp, ctx.is_causal, dropout_p=0.0
        )
        return None, *gradients


def flash_ring(length: int, is_causal: bool, rotate: str) -> dict[str, object]:
    """Output and gradients, put together, and this rank's queries; `rotate` is how keys and values go round."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    balancer = _HeadTailLoadBalancer(length, mesh.size(), "cpu") if is_causal else None
    before = ring._cp_options.rotate_method, ring._cp_options.enable_load_balance, ring._cp_options.convert_to_f32
    ring.set_rotate_method(rotate)
    ring._cp_options.convert_to_f32 = False  # the inputs are float64
    try:
        local = ring._context_parallel_shard(mesh, inputs(length), [SEQ] * 3, balancer)
        parts = output_and_gradients(partial(FlashRing.apply, is_causal), local)
        return {"whole": ring.context_parallel_unshard(mesh, parts, [SEQ] * 4, balancer), "queries": local[0]}
    finally:
        ring._cp_options.rotate_method, ring._cp_options.enable_load_balance, ring._cp_options.convert_to_f32 = before


# -- a ring of our own


class Onwards(torch.autograd.Function):
    """Each rank's tensor moves so many ranks on; its gradient moves as many back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by = by
        return moved(x, by)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return moved(grad, -ctx.by), None


def moved(x: Tensor, by: int) -> Tensor:
    me, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    sent = dist.isend(x.contiguous(), (me + by) % ranks)
    dist.irecv(received, (me - by) % ranks).wait()
    sent.wait()
    return received


def positions(length: int, rank: int, ranks: int) -> Tensor:
    """Head-tail: of 2 * ranks pieces, a rank has one from the front and its mirror image from the back."""
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def own_ring(length: int, is_causal: bool) -> dict[str, object]:
    """This rank's output and gradients, by the positions that they belong to."""
    here = positions(length, dist.get_rank(), dist.get_world_size())
    parts = output_and_gradients(attend_round, [x[:, :, here] for x in inputs(length)], here=here, is_causal=is_causal)
    return {"positions": here, "parts": parts}


def attend_round(q: Tensor, k: Tensor, v: Tensor, here: Tensor, is_causal: bool) -> Tensor:
    """Softmax over all keys, though a rank meets only one piece of them at a time."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    top = q.new_full(q.shape[:-1], -torch.inf)
    total, weighted = torch.zeros_like(top), torch.zeros_like(q)
    for turn in range(ranks):
        there = positions(int(here.numel()) * ranks, (me - turn) % ranks, ranks)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        if is_causal:
            scores = scores.masked_fill(here[:, None] < there, -torch.inf)
        higher = torch.maximum(top, scores.amax(-1).detach())
        ours, theirs = (scores - higher[..., None]).exp(), (top - higher).exp()
        total = total * theirs + ours.sum(-1)
        weighted = weighted * theirs[..., None] + ours @ v
        top = higher
        if turn + 1 < ranks:
            k, v = Onwards.apply(torch.stack([k, v]), 1).unbind()
    return weighted / total[..., None]
