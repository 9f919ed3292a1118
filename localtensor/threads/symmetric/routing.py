"""Kernels of `torch.ops.symm_mem` that move unequal numbers of rows, or blocks along two dims, between all ranks."""

import torch
from torch import Tensor

from localtensor.errors import OutsideBuffer
from localtensor.threads.symmetric.handle import handle_of, peers_of


def all_to_all_vdev(x: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor, group: str) -> None:
    """The ranks exchange splits and offsets, then each reads its rows from every peer."""
    _route("all_to_all_vdev", (x, out, in_splits, out_splits_offsets), group, to_experts=True)


def all_to_all_vdev_2d(
    x: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor, group: str, major_align: int | None = None
) -> None:
    align = 1 if major_align is None else major_align
    _route("all_to_all_vdev_2d", (x, out, in_splits, out_splits_offsets), group, to_experts=True, align=align)


def all_to_all_vdev_2d_offset(
    x: Tensor, out: Tensor, in_splits_offsets: Tensor, out_splits_offsets: Tensor, group: str
) -> None:
    _route("all_to_all_vdev_2d_offset", (x, out, in_splits_offsets, out_splits_offsets), group, to_experts=False)


def _check_rows(call: str, out_end: int, out_rows: int, end: int, rows: int) -> None:
    """Raises `OutsideBuffer` where splits add up to more rows than the output has, or name rows that a peer lacks."""
    if out_end > out_rows:
        problem = f"the rows that this rank receives end at row {out_end}"
        raise OutsideBuffer(call, "out", f"{out_rows} rows", problem)
    if end > rows:
        raise OutsideBuffer(call, "in_splits", f"splits that end at row {end}", f"the input has {rows} rows")


def _route(call: str, parts: tuple[Tensor, ...], group: str, *, to_experts: bool, align: int | None = None) -> None:
    """Rows to the experts of all ranks, or back: as NVSHMEM's kernels do it, in two phases.

    First each rank writes how many rows it has for each peer, and where they begin, into the peer's table; then each rank
    reads its rows.  The second line of the table becomes the offsets in the output.
    """
    x, out, sent, table = parts
    handles = [
        handle_of(call, part, group, name) for part, name in zip(parts, ("input", "out", "in_splits", "out_splits"))
    ]
    ranks, me = handles[0].world_size, handles[0].rank
    splits, begins = (sent[0], sent[1]) if sent.dim() == 2 else (sent, sent.cumsum(0) - sent)
    experts = splits.numel() // ranks
    for handle in handles:
        handle.barrier()
    for peer, theirs in enumerate(peers_of(handles[3], table)):
        own = slice(peer * experts, (peer + 1) * experts) if to_experts else slice(peer, None, ranks)
        at = slice(me, None, ranks) if to_experts else slice(me * experts, (me + 1) * experts)
        theirs[0, at].copy_(splits[own])
        theirs[1, at].copy_(begins[own])
    handles[3].barrier()
    counts, sources, rows = table[0].tolist(), table[1].tolist(), peers_of(handles[0], x)
    majors, minors = (experts, ranks) if to_experts else (ranks, experts)
    offset = 0
    for major in range(majors):
        first = offset
        for minor in range(minors):
            entry, peer = major * minors + minor, minor if to_experts else major
            count, begin = counts[entry], sources[entry]
            _check_rows(call, offset + count, len(out), begin + count, len(rows[peer]))
            out[offset : offset + count].copy_(rows[peer][begin : begin + count])
            table[1, entry].fill_(offset)
            offset += count
        if align is not None:
            offset = first + max(-(-(offset - first) // align) * align, align)
    handles[0].barrier()


def _joined_blocks(held: list[Tensor], rank: int, scatter_dim: int, gather_dim: int) -> Tensor:
    """What a rank gets of `all_to_all_nd`: its block along `scatter_dim` of each rank, joined along `gather_dim`.

    The dims are 0 and 1; of a tensor with three dims, the first two are one where rows are scattered, else the last two.

    >>> _joined_blocks([torch.arange(4).view(2, 2), torch.arange(4, 8).view(2, 2)], 1, 1, 0).flatten()
    tensor([1, 3, 5, 7])
    """
    flat = [x.flatten(1) if scatter_dim else x.flatten(0, -2) for x in held]
    return torch.cat([x.chunk(len(held), scatter_dim)[rank] for x in flat], gather_dim)


def nccl_all_to_all_nd(x: Tensor, out: Tensor, scatter_dim: int, gather_dim: int, group: str) -> None:
    """Each rank reads its block of every peer's tensor along one dim, and lays them out along the other."""
    handle = handle_of("nccl_all_to_all_nd", x, group)
    if (scatter_dim, gather_dim) not in ((1, 0), (0, 1)):
        dims = f"scatter_dim={scatter_dim}, gather_dim={gather_dim}"
        raise RuntimeError(
            f"symm_mem.all_to_all_nd: {dims}: torch has this for 0 and 1, and for 1 and 0. Use one of these."
        )
    handle.barrier()
    out.copy_(_joined_blocks(peers_of(handle, x), handle.rank, scatter_dim, gather_dim).view(out.shape))
    handle.barrier()
