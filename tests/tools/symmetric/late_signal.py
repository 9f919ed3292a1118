"""A producer that signals before its last write: the program of the page on symmetric memory, and of its picture."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem


def late_signal() -> None:
    data = symm_mem.empty(8, device="cpu").zero_()
    handle = symm_mem.rendezvous(data, dist.group.WORLD)
    handle.barrier()
    right = (handle.rank + 1) % handle.world_size
    theirs = handle.get_buffer(right, (8,), torch.float32)
    theirs[:4] = 1.0
    handle.put_signal(right)
    theirs[4:] = 1.0  # too late: the signal has been put
    handle.wait_signal((handle.rank - 1) % handle.world_size)
    data.sum()
    handle.barrier()
