"""What a caller may get wrong: each is refused with the call, the argument, its value and what to do."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

import localtensor as lt
from localtensor.errors import ForeignHandle, NoSuchPeer, NoTime, NotServed, OutsideBuffer, RankRaised, WrongType
from localtensor.threads.symmetric.handle import SymmetricHandle

OPS = torch.ops.symm_mem


def share(*size, dtype=torch.float32, fill=0):
    mine = symm_mem.empty(*size, dtype=dtype, device="cpu").fill_(fill)
    return mine, symm_mem.rendezvous(mine, dist.group.WORLD)


def world():
    return dist.group.WORLD.group_name


def refusal(body):
    with pytest.raises(RankRaised) as caught:
        lt.run(body, ranks=2, leftovers="ignore")
    return caught.value.__cause__


HANDLES = {
    "a channel that is no int": (lambda h: h.barrier(channel=1.5), WrongType, "symm_mem.barrier: channel: 1.5"),
    "a limit that is no int": (lambda h: h.wait_signal(1, timeout_ms="5"), WrongType, "wait_signal: timeout_ms: '5'"),
    "a limit below 0": (lambda h: h.barrier(timeout_ms=-5), NoTime, "symm_mem.barrier: timeout_ms: timeout_ms=-5"),
    "a peer that is no int": (lambda h: h.put_signal("1"), WrongType, "symm_mem.put_signal: dst_rank: '1'"),
    "sizes that are an int": (lambda h: h.get_buffer(1, 4, torch.float32), WrongType, "symm_mem.get_buffer: sizes: 4"),
    "a dtype that is a text": (lambda h: h.get_buffer(1, (4,), "float32"), WrongType, "get_buffer: dtype: 'float32'"),
    "an offset that is no int": (
        lambda h: h.get_buffer(1, (1,), torch.float32, 0.5),
        WrongType,
        "symm_mem.get_buffer: storage_offset: 0.5",
    ),
    "a pad of no dtype": (lambda h: h.get_signal_pad(1, (1,), int), WrongType, "symm_mem.get_signal_pad: dtype"),
    "a handle for a kernel": (lambda h: SymmetricHandle.__getattr__(h, "get_peer_cft_handle"), NotServed, "get_peer_cft"),
}  # fmt: skip


@pytest.mark.parametrize("case", HANDLES)
def test_a_bad_argument_of_a_handle_is_named(case):
    call, kind, words = HANDLES[case]
    error = refusal(lambda: call(share(4)[1]))
    assert type(error) is kind
    assert words in str(error)


def test_an_element_that_cannot_begin_where_the_tensor_does_is_refused():
    """torch counts in bytes from where the tensor begins: byte 12 holds no 8-byte number."""

    def program():
        handle = symm_mem.rendezvous(share(8)[0][3:], dist.group.WORLD)
        assert handle.get_remote_tensor(1, (2,), torch.int32).storage_offset() == 3
        handle.get_remote_tensor(1, (2,), torch.float64)

    error = refusal(program)
    assert type(error) is OutsideBuffer
    assert "begins at byte 12" in str(error)


def test_a_handle_of_another_rank_is_refused():
    handles = []

    def program():
        handle = share(4)[1]
        if dist.get_rank() == 0:
            handles.append(handle)
        handle.barrier()
        if dist.get_rank() == 1:
            handles[0].put_signal(1)

    error = refusal(program)
    assert type(error) is ForeignHandle
    assert "the handle of rank 0: rank 1 uses it" in str(error)


def test_symmetric_memory_cannot_be_resized():
    error = refusal(lambda: share(4)[0].resize_(8))
    assert type(error) is RuntimeError
    assert "not resizable" in str(error)


def test_memory_of_no_device_is_refused():
    error = refusal(lambda: symm_mem.empty(4, device="meta"))
    assert type(error) is NotServed
    assert "device 'meta'" in str(error)


ROOTS = {
    "multimem_one_shot_reduce_out": lambda: OPS.multimem_one_shot_reduce_out(
        share(4)[0], "sum", 2, world(), torch.zeros(4)
    ),
    "tile_reduce": lambda: OPS.tile_reduce(share(2, 2)[0], torch.zeros(2, 2), -1, world()),
    "multi_root_tile_reduce": lambda: OPS.multi_root_tile_reduce([share(2, 2)[0]], torch.zeros(2, 2), [5], world()),
    "nvshmem_broadcast": lambda: OPS.nvshmem_broadcast(share(4)[0], 7, world()),
}


@pytest.mark.parametrize("op", ROOTS)
def test_a_root_that_the_group_does_not_have_is_named(op):
    error = refusal(ROOTS[op])
    assert type(error) is NoSuchPeer
    assert f"symm_mem.{op}: root" in str(error)


@pytest.mark.parametrize(
    ("rows", "room", "words"),
    [(4, 2, "out: 2 rows: .* end at row 4"), (2, 9, "splits that end at row 4: .* has 2 rows")],
)
def test_rows_that_are_not_there_and_rows_without_room_are_named(rows, room, words):
    def program():
        splits, table = share(2, dtype=torch.int64, fill=2)[0], share(2, 2, dtype=torch.int64)[0]
        OPS.all_to_all_vdev(share(rows)[0], share(room)[0], splits, table, world())

    with pytest.raises(OutsideBuffer, match=words):
        raise refusal(program)


def test_an_unknown_reduction_is_refused_with_those_that_there_are():
    error = refusal(lambda: OPS.one_shot_all_reduce(share(4)[0], "max", world()))
    assert str(error).endswith("op: 'max': there is no such reduction. Write 'sum'.")
