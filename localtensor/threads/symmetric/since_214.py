"""Ops of `torch.ops.symm_mem` that torch has since 2.14 and that it has not written in Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from localtensor.threads.symmetric import meaning
from localtensor.threads.symmetric.handle import handle_of, peers_of


def memcpy_to_multicast(out: Tensor, source: Tensor, byte_offset: int, group: str) -> Tensor:
    """Writes the bytes of a tensor to the same place in the output of every peer, which is symmetric."""
    handle = handle_of("memcpy_to_multicast_", out, group, "symm_mem_out")
    raw = source.contiguous().view(-1).view(torch.uint8)
    for peer in peers_of(handle, out):
        peer.view(-1).view(torch.uint8)[byte_offset : byte_offset + raw.numel()].copy_(raw)
    return out


def nccl_all_to_all_nd(x: Tensor, out: Tensor, scatter_dim: int, gather_dim: int, group: str) -> None:
    """Each rank reads its block of every peer's tensor along one dim, and lays them out along the other."""
    handle = handle_of("nccl_all_to_all_nd", x, group)
    if (scatter_dim, gather_dim) not in ((1, 0), (0, 1)):
        dims = f"scatter_dim={scatter_dim}, gather_dim={gather_dim}"
        raise RuntimeError(
            f"symm_mem.all_to_all_nd: {dims}: torch has this for 0 and 1, and for 1 and 0. Use one of these."
        )
    handle.barrier()
    out.copy_(meaning.joined_blocks(peers_of(handle, x), handle.rank, scatter_dim, gather_dim).view(out.shape))
    handle.barrier()


SINCE_214: dict[str, Callable[..., Any]] = {
    "memcpy_to_multicast_": memcpy_to_multicast,
    "nccl_all_to_all_nd": nccl_all_to_all_nd,
}
