"""Which ops read memory that no rank has written: what they only overwrite, move or describe is no read."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import localtensor as lt
from localtensor.errors import ReadUnwritten

SILENT = {"ranks": 2, "leftovers": "ignore"}


def fresh(*size, dtype=torch.float32):
    mine = symm_mem.empty(*size, dtype=dtype, device="cpu")
    symm_mem.rendezvous(mine, dist.group.WORLD)
    return mine


def half():
    mine = fresh(8)
    mine[:4] = 1.0
    return mine


ONES = torch.ones(4)
OVERWRITTEN = {
    "_foreach_copy_": lambda: torch._foreach_copy_([fresh(4)], [ONES]),
    "_foreach_zero_": lambda: torch._foreach_zero_([fresh(4)]),
    "add out": lambda: torch.add(ONES, 1, out=fresh(4)),
    "max out": lambda: torch.max(ONES.view(2, 2), 0, out=(fresh(2), fresh(2, dtype=torch.int64))),
    "cat out": lambda: torch.cat([ONES], out=fresh(4)),
    "all_gather": lambda: dist.all_gather(list(fresh(8).chunk(2)), ONES),
    "all_to_all_single": lambda: dist.all_to_all_single(fresh(4), ONES),
    "init": lambda: torch.nn.init.trunc_normal_(fresh(4, 4)),
    "mask": lambda: fresh(4).masked_fill_(ONES > 0, 1.0),
}
DESCRIBED = {
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(0),
    "transpose_": lambda x: x.view(2, 4).transpose_(0, 1).t_(),
    "as_strided_": lambda x: x.as_strided_((2,), (2,)),
    "detach_": torch.Tensor.detach_,
    "resize_": lambda x: x.resize_(4, 2),
    "empty_like": torch.empty_like,
    "view": lambda x: x.view(torch.int32)[2:].chunk(2),
    "Parameter": torch.nn.Parameter,
    "data_ptr": torch.Tensor.data_ptr,
}
MOVED = {
    "clone": torch.clone,
    "cat": lambda x: torch.cat([x, x]),
    "repeat": lambda x: x.repeat(2),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 1)),
    "index": lambda x: x[torch.tensor([0, 7])],
    "gather": lambda x: x.gather(0, torch.tensor([7, 0])),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), torch.tensor(1.0)),
    "slice_scatter": lambda x: x.slice_scatter(torch.ones(2), 0, 0, 2),
    "to": lambda x: x.to(torch.float64),
    "_foreach_copy_": lambda x: torch._foreach_copy_([torch.ones(8)], [x]),
}
READ = {"sum": torch.sum, "mul": lambda x: x * 0, "add_": lambda x: x.add_(1), "max": torch.max, "_foreach_add_": lambda x: torch._foreach_add_([x], 1.0)}  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("op", OVERWRITTEN)
def test_what_is_overwritten_is_not_read(op):
    def program():
        OVERWRITTEN[op]()

    assert lt.run(program, **SILENT).values == (None, None)


@pytest.mark.few(4)
@pytest.mark.parametrize("op", DESCRIBED)
def test_a_new_shape_is_neither_a_read_nor_a_write(op):
    def program():
        mine = fresh(8)
        handle = symm_mem.rendezvous(mine, dist.group.WORLD)
        handle.barrier()
        DESCRIBED[op](handle.get_buffer(0, (8,), torch.float32))  # both ranks: it would race
        handle.barrier()

    assert lt.run(program, **SILENT).values == (None, None)


@pytest.mark.few(4)
@pytest.mark.parametrize("op", MOVED)
def test_what_is_moved_may_be_unwritten_in_part_and_not_as_a_whole(op):
    def program(memory):
        MOVED[op](memory())

    assert lt.run(program, half, **SILENT).values == (None, None)
    with pytest.raises(ReadUnwritten):
        lt.run(program, lambda: fresh(8), **SILENT)


@pytest.mark.parametrize("op", READ)
def test_what_is_computed_with_may_not(op):
    with pytest.raises(ReadUnwritten, match="16 of them were not written"):
        lt.run(lambda: READ[op](half()), **SILENT)
