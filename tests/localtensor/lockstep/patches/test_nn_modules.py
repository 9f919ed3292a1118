"""What torch.nn and FSDP2 hold of LocalTensors, against torch's own for each rank; and outside of a mode nothing changes."""

import importlib
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel

from localtensor.errors import NotInLockstep, RanksDiverge
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.patches import nn_modules
from localtensor.lockstep.values.formatting import as_if_padded
from localtensor.lockstep.values.rank_int import rank_int
from tests.end_to_end.programs.lockstep_ways import assert_both


@pytest.fixture(autouse=True, scope="module")
def _forms_are_installed():
    nn_modules.install()


# -- modules


def converted():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    with torch.no_grad():
        model[0].weight.add_(1)
    first = model[0].weight
    model.double().requires_grad_(False)
    return [first is model[0].weight, [part.clone() for part in model.parameters()], model.bfloat16()[0].bias.clone()]


def test_a_module_takes_another_dtype():
    same, *_ = assert_both(converted, ranks=3)[0]
    assert same is True


def test_swapped_tensors_have_each_others_memory():
    with LocalTensorMode(2):
        a, b = rank_map(lambda rank: torch.full((2,), rank)), rank_map(lambda rank: torch.full((3,), 10 + rank))
        memories = [x[:1] is not None and x._memory for x in (a, b)]  # of views that are gone
        torch.utils.swap_tensors(a, b)
        assert [b._memory, a._memory] == memories
        a[:1].add_(1)
    assert [a.on(1).tolist(), b.on(1).tolist()] == [[12, 11, 11], [1, 1]]


def test_a_module_of_local_tensors_takes_another_dtype_after_the_mode_too():
    with LocalTensorMode(2):
        model = nn.Linear(2, 2)
    assert model.double().weight.dtype is torch.float64


def test_plain_tensors_are_swapped_as_ever():
    a, b = torch.ones(1), torch.zeros(2)
    torch.utils.swap_tensors(a, b)
    assert (a.tolist(), b.tolist()) == ([0, 0], [1])


# -- keys


def test_an_int_of_each_rank_is_no_key():
    with pytest.raises(NotInLockstep, match=r"hash\(RankInts\(0, 1\)\)"):
        hash(rank_int([0, 1]))
    assert {rank_int([2, 2]): "x"} == {2: "x"}


# -- FSDP2


@pytest.mark.parametrize("rows", [8, 7, 5, 2, 1])
def test_each_rank_has_the_chunk_that_torch_gives_it(rows):
    x, mine = torch.arange(rows * 3.0).reshape(rows, 3), rank_int([0, 1, 2, 3])
    theirs = _fsdp_param._chunk_with_empty(x, 4, 0)
    with LocalTensorMode(4):
        chunks = _fsdp_param._chunk_with_empty(x, 4, 0)
        chunk = chunks[mine]
        size = _fsdp_param._get_dim_chunked_size(chunk, x.size(), 0)
    assert len(chunks) == 4
    for rank in range(4):
        assert torch.equal(chunk.on(rank).reshape(-1), theirs[rank].reshape(-1))
        expected = _fsdp_param._get_dim_chunked_size(theirs[rank], x.size(), 0)
        assert tuple(lockstep_modules_on(part, rank) for part in size) == tuple(expected)


def lockstep_modules_on(size, rank):
    return size if type(size) is int else int(size.node.values[rank])


def sharded(rows, meta):
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(3)
    model = nn.Linear(3, rows)
    fully_shard(model, mesh=mesh)
    if meta:
        model.double()
    return {name: [part.to_local().detach(), part.stride()] for name, part in model.named_parameters()}


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("rows", [8, 7, 5, 2, 1])
def test_weights_are_sharded_as_on_rank_threads(rows, meta):
    found = assert_both(sharded, rows, meta, ranks=4)
    assert sum(rank["weight"][0].shape[0] for rank in found) == rows


def test_what_is_padded_for_some_ranks_is_padded_for_all():
    sizes = rank_int([2, 2, 0])
    with as_if_padded():
        assert sizes > 0
        assert not sizes == 2  # noqa: SIM201
        with pytest.raises(RanksDiverge):
            bool(sizes < 2)
    with pytest.raises(RanksDiverge):
        bool(sizes > 0)


# -- refusals, and the patches themselves


def test_what_cannot_run_says_so_and_where_it_can():
    with LocalTensorMode(2), pytest.raises(NotInLockstep, match=r"reads the bytes of gradients.*localtensor\.run"):
        DistributedDataParallel(nn.Linear(1, 1))


def test_every_name_is_still_there():
    """What breaks first when torch changes."""
    for module, kind, name, _ in nn_modules.PATCHES:
        owner = importlib.import_module(module)
        owner = getattr(owner, kind) if kind else owner
        assert hasattr(owner, name), f"torch has no {module}.{kind}.{name} any more, see lockstep_modules.FORMS"
    for module, kind, _ in nn_modules.REFUSED:
        assert inspect.isclass(getattr(importlib.import_module(module), kind)), kind
    utils = vars(torch._utils)
    assert "_get_sparse_tensors_to_validate" in utils or "_sparse_tensors_to_validate" in utils, "see _waiting"
    for name in nn_modules.OP_HANDLERS:
        namespace, op = name.split("::")
        assert hasattr(getattr(torch.ops, namespace), op), f"torch has no op {name} any more"
