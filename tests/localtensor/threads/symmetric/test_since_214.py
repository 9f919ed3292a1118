"""Ops that torch has since 2.14; on an older one their kernels are called as they are."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import localtensor as lt
from localtensor.threads.symmetric.kernels import memcpy_to_multicast
from localtensor.threads.symmetric.routing import nccl_all_to_all_nd

NEWER = pytest.mark.skipif(not hasattr(symm_mem, "get"), reason="this torch has no symm_mem.get")


def share(x):
    """A symmetric copy of a tensor, known to the world."""
    mine = symm_mem.empty(*x.shape, dtype=x.dtype, device="cpu").copy_(x)
    return mine, symm_mem.rendezvous(mine, dist.group.WORLD)


def world():
    return dist.group.WORLD.group_name


@pytest.mark.parametrize(("shape", "out", "dims"), [
    ((3, 8), (12, 2), (1, 0)),
    ((3, 4, 2), (4, 3, 2), (1, 0)),
    ((8, 3), (2, 12), (0, 1)),
    ((4, 2, 3), (2, 4, 3), (0, 1)),
])  # fmt: skip
def test_blocks_are_exchanged_along_two_dims(shape, out, dims):
    held = [torch.arange(24.0).view(shape) + 100 * rank for rank in range(4)]

    def program(x):
        found = torch.zeros(out)
        nccl_all_to_all_nd(share(x)[0], found, *dims, world())
        return found

    for rank, found in enumerate(lt.run(program, held, ranks=4).values):
        whole = torch.stack([x.reshape(8, 3) if dims == (0, 1) else x.reshape(3, 8) for x in held])
        own = whole[:, 2 * rank : 2 * rank + 2, :] if dims == (0, 1) else whole[:, :, 2 * rank : 2 * rank + 2]
        assert torch.equal(found.view(-1), own.transpose(0, 1).reshape(-1) if dims == (0, 1) else own.reshape(-1))


def test_other_dims_are_refused():
    def program():
        with pytest.raises(RuntimeError, match="scatter_dim=1, gather_dim=1"):
            nccl_all_to_all_nd(share(torch.zeros(4, 4))[0], torch.zeros(4, 4), 1, 1, world())

    lt.run(program, ranks=2)


def test_a_copy_to_multicast_memory_reaches_every_rank():
    def program():
        out, handle = share(torch.zeros(4))
        handle.barrier()
        memcpy_to_multicast(out, torch.full((2,), 1.0 + handle.rank), 8 * handle.rank, world())
        handle.barrier()
        return out.tolist()

    assert lt.run(program, ranks=2).values == ([1.0, 1.0, 2.0, 2.0],) * 2


@NEWER
@pytest.mark.parametrize("backend", ["CUDA", "NVSHMEM", "NCCL"])
def test_a_part_of_a_peer_is_got(backend):
    def program():
        symm_mem.set_backend(backend)
        _, handle = share(torch.arange(4.0) + 10 * dist.get_rank())
        handle.barrier()
        part = torch.zeros(2)
        symm_mem.get(part, handle, 1, offset=1)
        handle.barrier()
        return part.tolist()

    assert lt.run(program, ranks=2).values == ([11.0, 12.0],) * 2


@NEWER
def test_an_all_gather_by_multicast_wants_a_device_that_has_it():
    def program():
        with pytest.raises(RuntimeError, match="requires multicast support"):
            torch.ops.symm_mem._low_contention_all_gather_ce_multicast_out(
                torch.ones(2), world(), share(torch.zeros(4))[0]
            )

    lt.run(program, ranks=2)
