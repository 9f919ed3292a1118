"""make_fx in lockstep: the graph that a rank would have, right for all ranks; what a graph cannot hold is refused by name."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import localtensor as lt
from localtensor.errors import NotTraceable, RanksDisagree
from localtensor.lockstep.mode import LocalTensorMode, rank_map, tensor_map
from tests.localtensor.lockstep.conftest import on_all

RANKS = 4


@pytest.fixture(autouse=True)
def mode():
    with LocalTensorMode(RANKS) as opened:
        yield opened


@pytest.fixture
def x():
    return rank_map(lambda rank: torch.full((2,), rank + 1.0))


def ops(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


# -- what is recorded


def scaled(x):
    return x * 2 + torch.ones(2)


def summed(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def summed_in_place(x):
    dist.all_reduce(x)
    return x + 1


def gathered(x):
    return functional.all_gather_single(x, 0, dist.group.WORLD) if hasattr(functional, "all_gather_single") else (
        functional.all_gather_tensor(x, 0, dist.group.WORLD)
    )  # fmt: skip


def squared_gradient(x):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad((leaf * leaf).sum(), leaf)[0]


def written(x):
    y = x.clone()
    y[0] = 7
    return y.view(2, 1).mul_(3)


def with_a_constant(x):
    return x + torch.tensor([1.0, 2.0]) * torch.tensor(3.0).item()


FUNCTIONS = [scaled, summed, summed_in_place, gathered, squared_gradient, written, with_a_constant]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ["real", "pre_dispatch", "fake", "symbolic"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_graph_gives_what_the_function_gives_on_other_values_too(x, function, how):
    options = {"pre_dispatch": True} if how == "pre_dispatch" else {"tracing_mode": how}
    graph = make_fx(function, **options)(x.clone())
    for other in (x, rank_map(lambda rank: torch.tensor([rank * 3.0, -rank]))):
        assert on_all(graph(other.clone())) == on_all(function(other.clone()))


def test_one_node_an_op_whatever_the_number_of_ranks(x):
    graph = make_fx(summed)(x)
    assert ops(graph) == [
        "aten.mul.Tensor", "_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default", "aten.add.Tensor",
    ]  # fmt: skip
    assert next(iter(graph.graph.nodes)).meta["val"].shape == (2,)


def test_ops_of_dtensors_are_recorded_as_those_of_their_shards(x):
    mesh = init_device_mesh("cpu", (RANKS,))

    def whole(x):
        shards = DTensor.from_local(x, mesh, [Shard(0)], run_check=False) * 2
        return shards.redistribute(mesh, [Replicate()]).to_local()

    graph = make_fx(whole)(x)
    assert on_all(graph(x + 1)) == on_all(whole(x + 1))
    names = [op.split(".")[1] for op in ops(graph)]
    assert names.count("mul") == names.count("all_gather_into_tensor") == 1 and "split" not in names


def test_a_random_op_draws_anew_in_each_rank_s_stream(x, mode):
    graph = make_fx(lambda x: x + torch.rand(2))(x)
    torch.manual_seed(dist.get_rank())
    found = graph(x)
    torch.manual_seed(dist.get_rank())
    assert on_all(found) == on_all(x + torch.rand(2)) and found.on(0).tolist() != (found.on(1) - 1).tolist()


def test_a_tensor_made_before_the_trace_is_an_attribute_of_the_graph(x):
    graph = make_fx(lambda other: other * x)(torch.ones(2))
    assert on_all(graph(torch.ones(2) * 3)) == on_all(x * 3)
    assert graph._tensor_constant0 is x


def test_uneven_tensors_are_recorded_where_no_size_enters_the_graph():
    uneven = rank_map(lambda rank: torch.arange(rank + 1.0))
    graph = make_fx(lambda x: (x * 2 + x.sum()).reshape(-1, 1))(uneven)
    assert on_all(graph(uneven + 1)) == on_all(((uneven + 1) * 2 + (uneven + 1).sum()).reshape(-1, 1))


def test_a_tensor_can_be_printed_while_a_graph_is_recorded(x, capsys):
    make_fx(lambda x: print(x) or x)(x)
    assert "LocalTensor(4 ranks" in capsys.readouterr().out


def test_the_mode_records_no_more_when_the_trace_ends(x, mode):
    with pytest.raises(NotTraceable):
        make_fx(lambda x: x * dist.get_rank())(x)
    assert mode.tracing is None and x.on(3).tolist() == [4, 4] and on_all(rank_map(torch.tensor))[2] == 2


# -- what is refused

BESIDE = "no recorded op made it, so its values would be constants in the graph"


def on_one_rank(x):
    rank = dist.get_rank()
    if rank == 0:
        x = x * 7
    return x + 1


def with_data_replaced(x):
    x.data = x * 2
    return x


REFUSED = [
    (lambda x: x * dist.get_rank(), r"RankInts\(0, 1, 2, 3\) at .*test_tracing\.py:\d+ in .*this one differs between"),
    (lambda x: (x + 1, dist.get_rank()), r"RankInts\(0, 1, 2, 3\)"),
    (on_one_rank, r"RankBools\(True, False, False, False\) at .*: a graph has one control flow for all ranks"),
    (lambda x: lt.all_reduce(x, "sum") + 1, BESIDE),
    (lambda x: lt.all_reduce(x, "sum"), BESIDE),
    (lambda x: x + rank_map(torch.tensor), "rank_map or tensor_map at .* its tensors would be constants"),
    (lambda x: tensor_map(x, lambda rank, x: x + rank), "rank_map or tensor_map at .* its tensors would be constants"),
    (lambda x: x + x.on(0), r"LocalTensor\.on at .* its values would be constants"),
    (lambda x: x * torch.tensor((x * 0).tolist()), r"LocalTensor\.reconcile at .* its values would be constants"),
    (with_data_replaced, r"aten\.set_\.source_Tensor at .* it runs beside the recorded ops"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_what_would_be_a_constant_is_refused_by_name(x, function, message):
    with pytest.raises(NotTraceable, match=rf"^make_fx: a graph for all ranks: .*{message}"):
        make_fx(function)(x)


def test_a_size_that_differs_is_refused_by_name():
    with pytest.raises(NotTraceable, match=r"RankInts\(1, 2, 3, 4\) at"):
        make_fx(lambda x: x * x.shape[0])(rank_map(lambda rank: torch.ones(rank + 1)))


@pytest.mark.parametrize("how", ["fake", "symbolic"])
def test_fake_tensors_of_uneven_ones_are_refused_by_name(how):
    with pytest.raises(NotTraceable, match=r"^torch\.compile: .*shape or strides differ between ranks"):
        make_fx(lambda x: x * 2, tracing_mode=how)(rank_map(lambda rank: torch.ones(rank + 1)))


def test_a_number_read_from_a_traced_tensor_is_refused_by_torch(x):
    with pytest.raises(RuntimeError, match="trying to get value out of a tracing tensor"):
        make_fx(lambda x: x * (x * 0).sum().item())(x)


def test_the_values_of_what_is_not_in_the_graph_may_be_read(x):
    same = torch.ones(2) * 3
    assert on_all(make_fx(lambda x: x * same.reconcile())(x)(x)) == on_all(x * 3)
    with pytest.raises(RanksDisagree):
        make_fx(lambda y: y * x.reconcile())(same)


def test_a_graph_of_a_plain_tensor_is_recorded_as_ever():
    assert ops(make_fx(lambda a: a * 2)(torch.ones(2))) == ["aten.mul.Tensor"]
