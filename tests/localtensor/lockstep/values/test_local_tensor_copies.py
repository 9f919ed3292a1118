"""LocalTensors copied, pickled, saved and loaded; their data and gradients replaced."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from localtensor.lockstep.mode import rank_map, tensor_map
from tests.localtensor.lockstep.conftest import on_all

# Torch's own word, since 2.14, of what looking at them costs.
pytestmark = [
    pytest.mark.usefixtures("mode"),
    pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning"),
]


def saved(value, **how):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **how)


# -- copies and files


def test_deepcopy(x):
    weight = nn.Parameter(x)
    weight.mark = [1]
    weight.grad = x * 2
    twin = copy.deepcopy(weight)
    x.zero_()
    assert on_all(twin)[1] == [1, 2, 3] and isinstance(twin, nn.Parameter) and twin.requires_grad
    assert on_all(twin.grad)[1] == [2, 4, 6] and twin.mark == [1] and twin.mark is not weight.mark
    with pytest.raises(RuntimeError, match="created explicitly by the user"):
        copy.deepcopy(weight * 2)


def test_deepcopy_of_a_module_with_a_shared_weight():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    twin = copy.deepcopy(module)
    assert twin[1].weight is twin[0].weight is not module[0].weight and len(list(twin.parameters())) == 3
    assert torch.equal(twin[0].weight, module[0].weight)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def views_of(base):
    return {"base": base, "row": base[1:], "twin": base.detach(), "of a view": base[1:].t()}


def with_a_change_of_each(found):
    found["row"].add_(1)
    found["of a view"].mul_(2)
    return found


@pytest.mark.parametrize(
    "through", [saved, copy.deepcopy, pickled, copy.copy, lambda x: {k: copy.copy(v) for k, v in x.items()}]
)
@pytest.mark.parametrize("weight", [False, True])
def test_copies_share_memory_as_those_of_a_rank(through, weight, mode):
    def base(rank):
        x = torch.arange(6.0).view(3, 2) + rank
        return nn.Parameter(x) if weight else x

    with torch.no_grad():
        mine = rank_map(base)
        mine = nn.Parameter(mine) if weight else mine
        given = views_of(mine)
        found = with_a_change_of_each(through(given))
        found["base"].add_(torch.arange(4)[mode.rank()])  # finer values
        for rank in range(4):
            with mode.disable():
                given_alone = views_of(base(rank))
                alone = with_a_change_of_each(through(given_alone))
                alone["base"].add_(rank)
            for name in given:
                assert found[name].on(rank).tolist() == alone[name].tolist(), (rank, name)
                assert given[name].on(rank).tolist() == given_alone[name].tolist(), (rank, name)


@pytest.mark.parametrize("through", [pickled, saved, lambda x: saved(x, weights_only=False)])
def test_pickled_in_the_mode(x, uneven, through, mode):
    holed = tensor_map(x, lambda rank, own: own if rank else None)
    for one in (x, uneven, torch.ones(2), x.to_sparse(), holed):
        back = through(one)
        assert back._mode is mode and back.ranks == one.ranks and repr(back) == repr(one) and back.layout == one.layout
    assert on_all(through(x) + x)[3] == [6, 8, 10]
    module = nn.Linear(2, 2)
    back = through(module.state_dict())
    module.load_state_dict(back)
    assert isinstance(through(module.weight), nn.Parameter) and through(module.weight).requires_grad


def test_pickled_in_the_mode_and_read_outside(x, mode):
    text = pickle.dumps({"x": x, "p": nn.Parameter(x)})
    mode.__exit__(None, None, None)
    try:
        back = pickle.loads(text)
        assert on_all(back["x"] + 1)[2] == [3, 4, 5] and isinstance(back["p"], nn.Parameter)
        assert on_all(pickle.loads(pickle.dumps(back["x"])))[1] == [1, 2, 3]
    finally:
        mode.__enter__()
    assert on_all(pickle.loads(text)["x"] + x)[1] == [2, 4, 6]


def test_a_file_of_plain_tensors_is_read_in_the_mode(mode, x):
    with mode.disable():
        base = torch.arange(6.0)
        file = io.BytesIO()
        torch.save({"base": base, "tail": base[3:], "module": nn.Linear(2, 2).state_dict()}, file)
        file.seek(0)
    back = torch.load(file)
    back["tail"].add_(x)  # the two share memory, as they did when they were saved
    assert on_all(back["base"])[2] == [0, 1, 2, 5, 7, 9] and back["module"]["weight"].shape == (2, 2)


def test_the_state_of_sharded_weights_is_saved_and_loaded_as_torch_does_by_default(mode):
    """The mesh holds each rank's coordinate, an int that differs between ranks."""
    layer = nn.Linear(6, 5)
    mesh = init_device_mesh("cpu", (mode.world,))
    weight = distribute_tensor(layer.weight.detach(), mesh, [Shard(0)])
    back = saved({"weight": weight})["weight"]
    assert back.placements == weight.placements and back.device_mesh == mesh
    assert torch.equal(back.full_tensor(), layer.weight)
    assert [back.to_local().on(rank).shape for rank in range(4)] == [
        weight.to_local().on(rank).shape for rank in range(4)
    ]


def test_sparse_tensors_that_are_looked_at_when_read(mode):
    """As newer torch does with `weights_only`, and any torch if it is asked to."""
    rows = rank_map(lambda rank: torch.arange(6.0).view(2, 3) + rank)
    with torch.sparse.check_sparse_tensor_invariants():
        back = saved({"ours": rows.to_sparse(), "plain": torch.eye(2).to_sparse()}, weights_only=False)
    assert back["ours"].on(3).to_dense().tolist() == [[3, 4, 5], [6, 7, 8]]
    assert back["plain"].to_dense().on(1).tolist() == [[1, 0], [0, 1]]


def test_a_sparse_tensor_that_is_spoiled_on_one_rank_is_refused_when_read(mode):
    def own(rank):
        places = torch.tensor([[0, 1 if rank != 2 else 9]])
        return torch.sparse_coo_tensor(places, torch.ones(2), (3,), check_invariants=False)

    with torch.sparse.check_sparse_tensor_invariants(), pytest.raises(RuntimeError, match="size is inconsistent"):
        saved(rank_map(own))


def test_a_tensor_is_no_wrapper_to_the_compiler(uneven):
    """To torch.compile it is the plain tensor of one rank: with inner tensors, a graph would have the ops of each."""
    assert not is_traceable_wrapper_subclass(uneven)
    with pytest.raises(AttributeError, match="'LocalTensor' object has no attribute 'nonsense'"):
        uneven.nonsense  # noqa: B018


# -- data and gradients


def test_data_shares_memory_both_ways(x):
    weight = nn.Parameter(torch.zeros(3))
    weight.data.add_(x)
    assert on_all(weight)[2] == [2, 3, 4] and not weight.data.requires_grad
    weight.data = x
    x.mul_(2)
    assert on_all(weight)[1] == [2, 4, 6] and weight.requires_grad and weight.is_leaf
    weight.data = torch.ones(5, 5)
    assert weight.shape == (5, 5) and on_all(x)[1] == [2, 4, 6]


def test_data_of_another_size_on_each_rank(uneven, mode):
    weight = nn.Parameter(torch.zeros(3))
    weight.data = uneven
    assert weight.shape == uneven.shape and (weight * 2).on(2).shape == (2, 2)
    with mode.disable():
        outside = torch.ones(2)
    weight.data = outside
    assert weight.shape == (2,) and on_all(weight)[0] == [1, 1]


def test_grad(x):
    weight = nn.Parameter(torch.ones(3))
    assert weight.grad is None
    (weight * x).sum().backward()
    (weight * x).sum().backward()
    assert on_all(weight.grad)[3] == [6, 8, 10]
    weight.grad = x.clone()
    weight.grad.zero_()
    assert on_all(weight.grad)[3] == [0, 0, 0]
    weight.grad = None
    assert weight.grad is None


def test_a_tensor_from_outside_is_copied_to_one_that_ranks_write_apart(x):
    with x._mode.disable():
        outside = torch.ones(3, requires_grad=True)
        outside.grad = torch.full((3,), 5.0)
    twin, same = copy.deepcopy([outside, outside])
    assert twin is same and twin.requires_grad and on_all(twin.grad)[0] == [5, 5, 5]
    with torch.no_grad():
        twin.add_(x)
    assert on_all(twin)[1] == [2, 3, 4] and outside.tolist() == [1, 1, 1]
