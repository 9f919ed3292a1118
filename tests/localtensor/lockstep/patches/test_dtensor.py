"""Each form of DTensor's functions against torch's own, which is run for every rank with that rank's arguments."""

import inspect
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _collective_utils,
    _utils,
    distribute_tensor,
    zeros,
)
from torch.distributed.tensor import placement_types as types
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor.errors import LocalTensorError
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.patches import dtensor
from localtensor.lockstep.values.rank_int import rank_int
from tests.end_to_end.programs.lockstep_ways import assert_bits, assert_both, in_lockstep, of_rank, on_threads

RANKS = 4
ASKED = (  # of a strided shard: no index; before 2.13 there is only the first, or all
    {"offset_mode": types._StridedShardOffsetMode.NONE}
    if hasattr(types, "_StridedShardOffsetMode")
    else {"return_first_offset": True}
)
WHOLE = {"even": (8, 3), "uneven": (7, 3), "one short": (9, 3), "two for four": (2, 3), "one for four": (1, 3)}
PLACED = {"plain": Shard(0), "columns": Shard(1), "strided": _StridedShard(0, split_factor=2)}


@pytest.fixture(autouse=True, scope="module")
def _forms_are_installed():
    """A method taken from its class before the first mode is entered is torch's own for ever."""
    dtensor.install()


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def check_both(form: Any, *args: Any, **kwargs: Any) -> None:
    """The function in lockstep, and by torch for each rank alone, outside of any mode: the same."""
    with LocalTensorMode(RANKS) as mode:
        mine = form(*(of(arg) for arg in args), **kwargs) if (of := _lifted(mode)) else None
    for rank in range(RANKS):
        theirs = form(*(arg.on(rank) if isinstance(arg, Each) else arg for arg in args), **kwargs)
        assert_bits(of_rank(mine, rank), of_rank(theirs, rank), f"rank {rank}")


class Each:
    """An argument that differs between ranks: ints, or tensors."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def on(self, rank: int) -> Any:
        return self.values[rank]


def _lifted(mode: Any) -> Any:
    def of(arg: Any) -> Any:
        if not isinstance(arg, Each):
            return arg
        return (
            rank_int(list(arg.values)) if isinstance(arg.values[0], int) else mode.gather(dict(enumerate(arg.values)))
        )

    return of


S0, S1, R = Shard(0), Shard(1), Replicate()
RANK = Each(0, 1, 2, 3)
PLACE = Each(1, 0, 1, 0)  # of two

# -- cutting


@pytest.mark.parametrize(
    "options", [{"with_padding": False}, {"with_padding": True}, {"with_padding": False, "clone": False}]
)
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", WHOLE)
def test_select_split_tensor(name, placed, options):
    check_both(PLACED[placed]._select_split_tensor, numbers(*WHOLE[name]), RANKS, RANK, **options)
    pieces = Each(*(numbers(size, 3) + 100 * size for size in (4, 3, 4, 1)))
    check_both(PLACED[placed]._select_split_tensor, pieces, 2, PLACE, **options)


def test_select_split_tensor_keeps_the_order_of_dims():
    x = numbers(3, 8).t()
    with LocalTensorMode(RANKS):
        mine = Shard(0)._select_split_tensor(x, RANKS, rank_int([0, 1, 2, 3]), with_padding=False)
    theirs = Shard(0)._select_split_tensor(x, RANKS, 2, with_padding=False)
    assert mine.on(2).stride() == theirs.stride() == (1, 2)


@pytest.mark.parametrize("size", [8, 7, 2, 0])
def test_sizes_and_offsets_of_shards(size):
    check_both(Shard.local_shard_size_and_offset, size, RANKS, RANK)
    check_both(Shard.local_shard_size_and_offset, Each(size, size + 1, size, 0), 2, PLACE)


@pytest.mark.parametrize("size", [8, 7, 2, 0])
def test_sizes_and_offsets_of_strided_shards(size):
    strided = _StridedShard(0, split_factor=2)
    check_both(strided.local_shard_size_and_offset, size, RANKS, RANK)
    check_both(strided.local_shard_size_and_offset, Each(size, size + 1, size, 0), 2, PLACE)
    check_both(strided.local_shard_size_and_offset, size, RANKS, RANK, **ASKED)
    check_both(strided.local_shard_size_and_offset, size, RANKS, RANK, *ASKED.values())


def test_lists_indexed_by_rank():
    shards = list(numbers(7, 2).split(2))
    check_both(_StridedShard._select_shard, shards, RANK)
    check_both(_StridedShard._local_shard_size, shards, RANK)
    check_both(Shard._maybe_unpad_tensor_with_sizes, 0, numbers(3, 2), [0, 1, 2, 3], RANK, True)
    check_both(Shard._maybe_unpad_tensor_with_sizes, 1, numbers(3, 2), [0, 1, 0, 1], RANK, False)


def test_padding():
    pieces = Each(*(numbers(size, 2) for size in (2, 2, 1, 0)))
    check_both(_collective_utils.pad_tensor, pieces, 0, Each(0, 0, 1, 2))
    check_both(_collective_utils.unpad_tensor, numbers(2, 4), 1, Each(0, 3, 1, 4))
    check_both(_collective_utils.pad_tensor, numbers(2, 4), 1, 2)


@pytest.mark.parametrize("dim", [1, 2])
def test_chunks_that_stand_side_by_side(dim):
    check_both(torch._utils._maybe_view_chunk_cat, Each(*(numbers(4, 2, 3) + rank for rank in range(4))), 4, dim)
    check_both(torch._utils._maybe_view_chunk_cat, Each(*(numbers(4, size, 3) for size in (2, 1, 2, 0))), 4, dim)
    if not hasattr(torch._utils, "_chunk_or_narrow_cat"):
        pytest.skip("torch 2.11 has no _chunk_or_narrow_cat")
    check_both(torch._utils._chunk_or_narrow_cat, Each(*(numbers(size, 6) for size in (4, 2, 0, 4))), 2, 1, 0)
    check_both(torch._utils._chunk_or_narrow_cat, Each(*(numbers(size, 6) for size in (4, 2, 6, 4))), 2, 0, 1)


def test_the_rows_that_a_rank_does_not_have():
    check_both(_MaskPartial._mask_tensor, torch.tensor([[0, 3], [6, 2]]), Each(0, 2, 4, 6), Each(2, 2, 2, 1))
    check_both(_MaskPartial._mask_tensor, torch.tensor([0, 3, 1], dtype=torch.int32), Each(0, 2, 4, 4), 2)


class Counted(TorchDispatchMode):
    """How many ops there are."""

    def __init__(self):
        super().__init__()
        self.many = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.many += 1
        return func(*args, **(kwargs or {}))


def test_a_thousand_ranks_take_no_more_ops_than_four():
    found = []
    for ranks in (4, 1024):
        with LocalTensorMode(ranks), Counted() as counted:
            offsets = rank_int(range(ranks))
            mask, places = _MaskPartial._mask_tensor(torch.arange(5), offsets, 1)
            torch._utils._maybe_view_chunk_cat(torch.ones(2 * ranks, 3), ranks, 1)
            mesh = init_device_mesh("cpu", (ranks,))
            x = distribute_tensor(torch.ones(ranks + 1, 2), mesh, [S0], src_data_rank=None)
            x.redistribute(mesh, [R])
        found.append((counted.many, len(mask._partition.sizes), len(places._partition.sizes)))
    assert found[0] == found[1]


SPREADS = {
    "one": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "two": ((2, 2), [Shard(0), Shard(0)]),
    "crossed": ((2, 2), [Shard(1), Shard(0)]),
    "strided": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "partial": ((2, 2), [Partial(), Shard(0)]),
}


@pytest.mark.few(20)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", WHOLE)
def test_local_shapes_and_global_offsets(name, spread, skip):
    def program():
        mesh = init_device_mesh("cpu", SPREADS[spread][0])
        return list(_utils.compute_local_shape_and_global_offset(WHOLE[name], mesh, SPREADS[spread][1], skip))

    assert_both(program, ranks=RANKS)


# -- what communicates


def walk_along(shape, *layouts):
    """What a rank has after each step from one layout to the next; where the first is partial, it is a part of that."""
    mesh = init_device_mesh("cpu", (2, 2))
    first = [R if p.is_partial() else p for p in layouts[0]]
    x = distribute_tensor(numbers(*shape), mesh, first, src_data_rank=None)
    x = DTensor.from_local(x.to_local(), mesh, layouts[0], run_check=False, shape=x.shape, stride=x.stride())
    seen = [x.to_local()]
    for layout in layouts[1:]:
        x = x.redistribute(mesh, layout)
        seen.append(x.to_local())
    return seen


WALKS = {
    "to replicate": ((S0, S0), (S0, R), (R, R), (S1, S0), (R, S0)),
    "to another dim": ((S0, S1), (S1, S1), (S1, S0), (S0, S0)),
    "strided": ((_StridedShard(0, split_factor=2), S0), (R, S0), (R, R), (_StridedShard(0, split_factor=2), S0)),
    "strided behind a plain one": ((S0, _StridedShard(0, split_factor=2)), (S0, R), (R, R)),
    "from partial": ((Partial(), S0), (S0, S0)),
    "from partial to replicate": ((Partial("avg"), S0), (R, S0)),
    "from partial to another dim": ((S0, Partial()), (S0, S1), (S0, S0)),
}


@pytest.mark.few(14)
@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("shape", [(8, 4), (7, 3), (5, 3), (3, 1), (1, 1)])
def test_walks_on_a_grid(shape, walk):
    if walk == "strided" and shape == (1, 1):
        shape = (2, 1)
    if walk == "strided behind a plain one" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 refuses it: no shard order")
    assert_both(walk_along, shape, *WALKS[walk], ranks=RANKS)


@pytest.mark.parametrize("source", [0, 1, None])
@pytest.mark.parametrize("name", WHOLE)
def test_distribute_tensor_takes_the_data_of_its_source(name, source):
    """Each rank brings numbers of its own."""

    def program():
        mesh = init_device_mesh("cpu", (RANKS,))
        x = numbers(*WHOLE[name]) + 100 * dist.get_rank()
        return [distribute_tensor(x.clone(), mesh, [p], src_data_rank=source).to_local() for p in (S0, S1, R)]

    assert_both(program, ranks=RANKS)


def test_a_source_that_is_not_there_is_refused_as_on_rank_threads():
    def program():
        return distribute_tensor(numbers(8, 2), init_device_mesh("cpu", (RANKS,)), [S0], src_data_rank=9)

    for ways in (in_lockstep, on_threads):
        with pytest.raises(LocalTensorError, match="root=9: invalid root rank, the group has 4 ranks"):
            ways(program, ranks=RANKS)


@pytest.mark.parametrize("part", [None, "tp"])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (2, 1, 3, 0), (2, 1, 3, 2)])
def test_global_shapes_from_local_ones(sizes, part):
    def program():
        mesh = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))[part]
            if part
            else init_device_mesh("cpu", (4,))
        )
        mine = torch.narrow(numbers(3, 2), 0, 0, torch.sym_int(size_of_this_rank(sizes)))
        return list(_utils.compute_global_tensor_shape(mine.shape, mesh, [S0]))

    assert_both(program, ranks=RANKS)


def size_of_this_rank(sizes):
    rank = dist.get_rank()
    return sizes[rank] if type(rank) is int else rank_int(sizes)


def test_global_shapes_of_local_ones_that_do_not_fit():
    with LocalTensorMode(RANKS):
        x = rank_map(lambda rank: torch.ones(2, 1 + rank))
        with pytest.raises(RuntimeError, match="identical size across ranks"):
            _utils.compute_global_tensor_shape(x.shape, init_device_mesh("cpu", (4,)), [S0])


# -- meshes that leave ranks out


def on_two_of_four_ranks():
    mesh = DeviceMesh("cpu", [0, 2])
    whole = DTensor.from_local(numbers(4, 3), mesh, [S0])
    made = [whole, whole + 1, whole.sum(), whole.redistribute(placements=[R]), *whole.split([1, 2], dim=1)]
    made += [distribute_tensor(numbers(6), mesh, [S0]), distribute_tensor(torch.tensor(5.0), mesh, [R])]
    made += [zeros((8, 3), device_mesh=mesh, placements=[S0]), DTensor.from_local(torch.tensor(2.0), mesh, [Partial()])]
    locals_ = [x.to_local() for x in made]
    with torch.no_grad():
        locals_ += [x.to_local() for x in made]
    if dist.get_rank() in (0, 2):
        facts = [x.numel() * 10 + x.dim() + (x.dtype == torch.float32) for x in locals_]
        total = sum(x.sum() for x in locals_)
    else:
        facts = [x.numel() * 1000 + x.dim() + (x.dtype == torch.float32) for x in locals_]
        total = sum(x.sum() for x in locals_) - 1
    return facts, total


def test_ranks_outside_of_a_mesh_have_in_a_branch_what_torch_gives_them():
    assert_both(on_two_of_four_ranks, ranks=RANKS)


def equal_or_not():
    mesh, rank, same = init_device_mesh("cpu", (RANKS,)), dist.get_rank(), numbers(4, 4)
    x, part = DTensor.from_local(same, mesh, [S0]), DeviceMesh("cpu", [0, 2])
    others = [same, same + (rank == 2), same * (rank + 2)]
    found = [x.equal(DTensor.from_local(y, mesh, [S0])) for y in others]
    found += [DTensor.from_local(same, part, [S0]).equal(DTensor.from_local(y, part, [S0])) for y in others]
    return [*found, x.equal(DTensor.from_local(same.repeat(RANKS, 1), mesh, [R], run_check=False))]


def test_dtensors_are_equal_if_the_shards_of_all_ranks_are():
    assert_both(equal_or_not, ranks=RANKS)
    assert in_lockstep(equal_or_not, ranks=RANKS)[0] == [True, False, False, True, False, False, True]


def test_local_tensors_that_are_equal_on_some_ranks_are_not_answered_for_all():
    with LocalTensorMode(RANKS):
        mesh, x = init_device_mesh("cpu", (RANKS,)), rank_map(torch.tensor)
        a, b = DTensor.from_local(x, mesh, [Partial()]), DTensor.from_local(x * 2, mesh, [Partial()])
        with pytest.raises(RuntimeError, match="equal"):
            torch.equal(a, torch.ones(2))
        assert not a.equal(b)
        with pytest.raises(LocalTensorError, match=r"aten\.equal"):
            torch.equal(x, x * 2)


# -- the patches themselves


LATER = {"_chunk_or_narrow_cat"} if torch.__version__.startswith("2.11.") else set()


def test_outside_of_a_mode_the_functions_are_torchs_own():
    dtensor.install()
    for owner, name, _ in dtensor.PATCHES:
        if name in LATER and not hasattr(owner, name):
            continue
        raw = inspect.getattr_static(owner, name)
        function = getattr(raw, "__func__", raw)
        assert function.__name__ == name
        assert function.__closure__, f"{name} is not routed"
    assert Shard(0)._select_split_tensor(numbers(4, 1), 2, 1).tolist() == [[2], [3]]
    assert type(Shard(0)._select_split_tensor(numbers(4, 1), 2, 1)) is torch.Tensor


def test_every_name_is_still_there():
    """What breaks first when torch changes: each name, and whether it still has the arguments that its form reads."""
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in dtensor.PATCHES if not hasattr(owner, name)]
    assert [name for name in missing if name.rpartition(".")[2] not in LATER] == [], (
        "torch has moved these: lockstep no longer serves them, see dtensor.FORMS"
    )
    for name, place, argument in READ:
        owner, _, _ = next(form for form in dtensor.PATCHES if f"{form[0].__name__}.{form[1]}".endswith(name))
        parameters = list(inspect.signature(inspect.getattr_static(owner, name.rpartition(".")[2])).parameters)
        assert parameters[place] == argument, name


READ = [
    ("Shard._shard_tensor", 1, "tensor"),
    ("Shard._reduce_shard_tensor", 1, "tensor"),
    ("Shard._to_replicate_tensor", 4, "current_logical_shape"),
    ("Shard._to_new_shard_dim", 4, "current_logical_shape"),
]


def test_two_modes_in_two_threads_do_not_see_each_other():
    found, wait = {}, threading.Barrier(2, timeout=20)

    def body(ranks: int) -> None:
        with LocalTensorMode(ranks):
            mesh = init_device_mesh("cpu", (ranks,))
            wait.wait()
            x = distribute_tensor(numbers(7, 2), mesh, [S0])
            wait.wait()
            found[ranks] = [x.to_local().on(rank).shape[0] for rank in range(ranks)], x.full_tensor().reconcile()

    threads = [threading.Thread(target=body, args=(ranks,)) for ranks in (2, 4)]
    for thread in threads:
        thread.start()
    plain = Shard(0)._select_split_tensor(numbers(4, 1), 2, 1)
    for thread in threads:
        thread.join()
    assert [found[2][0], found[4][0]] == [[4, 3], [2, 2, 2, 1]]
    assert torch.equal(found[2][1], numbers(7, 2)) and torch.equal(found[4][1], numbers(7, 2))
    assert type(plain) is torch.Tensor


def test_sizes_of_a_whole_that_differ_are_reported():
    """Where each rank has another idea of the whole, no plan is the same on all."""
    with LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        x = DTensor.from_local(rank_map(lambda rank: torch.ones(1 + rank // 3)), mesh, [S0])
        with pytest.raises(RuntimeError, match="another key on each rank"):
            x + 1


def test_equal_shards_are_held_once():
    with LocalTensorMode(1024):
        mesh = init_device_mesh("cpu", (32, 32))
        x = distribute_tensor(numbers(32, 2), mesh, [S0, R])
        assert x.to_local()._partition.rows == 32
        assert np.unique(x.redistribute(mesh, [R, R]).to_local()._partition.row_of).tolist() == [0]
