"""torch.compile and AOTAutograd in lockstep: one graph, compiled once, right for all ranks, forward and backward."""

import copy
import subprocess
import sys
import warnings
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from functorch.compile import aot_function
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from localtensor.errors import NotTraceable
from localtensor.lockstep.collectives_api import all_reduce
from localtensor.lockstep.comms.collectives import stacked_value
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.patches import kernels
from localtensor.lockstep.patches.shard_offsets import own_chunk
from localtensor.lockstep.values import partition
from localtensor.lockstep.values.local_tensor import wrap
from strategies import overlay_dtensor
from tests.localtensor.lockstep.conftest import on_all
from tests.properties.dtensor_programs import Program
from tests.tools.compiled import draws

RANKS = 4
slow_kernels = pytest.param("inductor", marks=pytest.mark.slow)  # it runs a C++ compiler
BACKENDS = ["eager", "aot_eager", slow_kernels]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Dynamo does not know:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


@pytest.fixture
def mode():
    with LocalTensorMode(RANKS) as opened:
        yield opened


def rows(start=1.0):
    return rank_map(lambda rank: torch.arange(4.0).view(2, 2) + rank + start)


def uneven():
    return rank_map(lambda rank: torch.ones(rank + 1, 2))


def close(found, wanted):
    for mine, right in zip(on_all(found), on_all(wanted), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(right), rtol=1e-5, atol=1e-4)
    return True


# -- one graph


def pointwise(x):
    return (x * x.exp() + torch.ones(2)).relu()


def communicating(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) * x


def with_a_module(x):
    return nn.functional.layer_norm(x, (2,)) @ x.t()


def dropping(x):
    return nn.functional.dropout(x, 0.5) * x


@pytest.mark.few(5)
@pytest.mark.parametrize("function", [pointwise, communicating, with_a_module, dropping])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_has_the_values_and_gradients_of_the_function(mode, function, backend):
    counter, found = CompileCounterWithBackend(backend), []
    for run in (function, torch.compile(function, backend=counter, fullgraph=True)):
        torch.manual_seed(dist.get_rank())
        x = rows().requires_grad_()
        y = run(x)
        y.square().sum().backward()
        found.append((y, x.grad))
    (y, grad), (compiled_y, compiled_grad) = found
    assert counter.frame_count == 1 and close(compiled_y, y) and close(compiled_grad, grad)


def test_the_graph_has_a_node_an_op_and_functional_collectives(mode):
    counter = CompileCounterWithBackend("eager")
    torch.compile(communicating, backend=counter)(rows())
    (graph,) = counter.graphs
    ops = [str(node.target).rpartition(".")[2] for node in graph.graph.nodes if node.op == "call_function"]
    assert len(ops) == 4 and "all_reduce" in str(graph.code) and "wait_tensor" in str(graph.code)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_module_trains_like_the_module(mode, backend):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    twin = copy.deepcopy(module)
    for one, run in ((module, module), (twin, torch.compile(twin, backend=backend))):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for step in range(2):
            optimizer.zero_grad()
            run(rows(step)).square().mean().backward()
            optimizer.step()
    pairs = zip([*module.parameters(), *module.buffers()], [*twin.parameters(), *twin.buffers()], strict=True)
    assert all(close(mine, right) for mine, right in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_of_a_dtensor_are_compiled_too(mode, backend):
    mesh = init_device_mesh("cpu", (RANKS,))

    def product(x, weight):
        return (DTensor.from_local(x, mesh, [Shard(1)]) @ weight).redistribute(mesh, [Replicate()]).to_local()

    counter, grads, found = CompileCounterWithBackend(backend), [], []
    for run in (product, torch.compile(product, backend=counter, fullgraph=True)):
        weight = distribute_tensor(torch.arange(24.0).view(8, 3), mesh, [Shard(0)]).requires_grad_()
        found.append(run(rows(), weight))
        found[-1].sum().backward()
        grads.append(weight.grad.to_local())
    assert counter.frame_count == 1 and close(found[1], found[0]) and close(grads[1], grads[0])


@pytest.mark.parametrize("sharded", [False, True], ids=["local", "dtensor"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_a_compiled_module_can_be_replaced_and_moved(mode, backend, sharded):
    """Module.to_empty() swaps the tensors of DTensors, which torch refuses while Dynamo remembers the old ones weakly."""
    mesh, module = init_device_mesh("cpu", (RANKS,)), nn.Linear(2, 4, bias=False)
    fresh = rank_map(lambda rank: torch.arange(8.0).view(4, 2) * (1 if sharded else rank))
    fresh = nn.Parameter(distribute_tensor(fresh, mesh, [Shard(0)]) if sharded else fresh)
    if sharded:
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    compiled = torch.compile(module, backend=backend)
    x = DTensor.from_local(rows(), mesh, [Shard(0)]) if sharded else rows()
    with torch.no_grad():
        compiled(x)
        torch.utils.swap_tensors(module.weight, fresh)
        found, wanted = compiled(x), module(x)
    assert close(found.to_local() if sharded else found, wanted.to_local() if sharded else wanted)
    assert module.to_empty(device="cpu").weight.shape == (4, 2)


def written(x):
    x[0].mul_(3)
    return x + 1


def viewed(x):
    return x.view(-1), x[0], x


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_and_views_of_an_input_are_kept(mode, backend):
    x, y = rows(), rows()
    assert close(torch.compile(written, backend=backend)(x), written(y)) and close(x, y)
    flat, row, same = torch.compile(viewed, backend=backend)(x)
    flat.zero_()
    assert same is x and on_all(row) == [[0, 0]] * RANKS and x.on(2).tolist() == [[0, 0], [0, 0]]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0]


def summed_in_place(x):
    total = x.clone()
    dist.all_reduce(total)
    return total


KINDS = {
    "a gradient of torch.func": torch.func.grad(lambda x: (x * x).sum()),
    "vmap": torch.vmap(lambda row: row * 2 + row.sum()),
    "a checkpoint": lambda x: checkpoint(lambda y: (y * 2).sin().relu(), x, use_reentrant=False),
    "an autograd function": lambda x: Squared.apply(x.clone().requires_grad_()),
    "a collective in place": summed_in_place,
    "a number of all ranks": lambda x: x * torch.ones(3).sum().item(),
    "a graph within": lambda x: torch.compile(lambda y: y * 2, backend="eager")(x) + 1,
}


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:.*torch.compile:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_many_kinds_are_compiled(mode, kind):
    compiled = torch.compile(KINDS[kind], backend="aot_eager", dynamic=kind == "vmap")
    for start in (1, 2):
        assert close(compiled(rows(start)), KINDS[kind](rows(start)))


# -- what differs between ranks


def by_rank(x):
    return x * dist.get_rank() + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_differs_between_ranks_runs_op_by_op(mode, backend):
    compiled = torch.compile(by_rank, backend=backend)
    assert close(compiled(rows()), by_rank(rows()))
    assert close(torch.compile(pointwise, backend=backend)(uneven()), pointwise(uneven()))


def branching(x):
    y = x * 2
    rank = dist.get_rank()
    if rank == 0:
        y = y * 7
    return y + 1


def branching_in_a_call(x):
    return branching(x * 3) - 1


def branching_behind_a_break(x):
    y = x * 2
    torch._dynamo.graph_break()
    z = y + 1
    rank = dist.get_rank()
    if rank > 1:
        y = y * z
    else:
        z = z * 5
    return y + z


def test_nothing_of_ours_is_compiled_behind_a_graph_break(mode, monkeypatch):
    class Empty(dict):  # each partition is made anew, by the `__init__` of a dataclass
        def get(self, key, default=None):
            return default

    monkeypatch.setattr(partition, "_known", Empty())
    function = torch.compile(branching_behind_a_break, backend="eager")
    assert close(function(rows()), branching_behind_a_break(rows()))
    generated = [code for _, compiler in mode.compilers for code in compiler._codes if code.co_filename == "<string>"]
    assert generated == []  # files of ours are skipped by their names


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [branching, branching_in_a_call, branching_behind_a_break])
def test_a_branch_on_the_rank_runs_as_it_is_written(mode, function, backend):
    compiled = torch.compile(function, backend=backend)
    for start in (1, 5):
        assert close(compiled(rows(start)), function(rows(start)))


def test_what_differs_between_ranks_is_refused_by_name_in_a_full_graph(mode):
    with pytest.raises(
        Exception, match=r"One graph serves all ranks, and it cannot hold RankInts\(0, 1, 2, 3\): a number"
    ):
        torch.compile(by_rank, backend="eager", fullgraph=True)(rows())
    with pytest.raises(
        Exception, match=r"cannot hold float32\[RankInts\(1, 2, 3, 4\),2\]: its shape or strides differ"
    ):
        torch.compile(pointwise, backend="eager", fullgraph=True)(uneven())


def test_even_and_uneven_tensors_take_turns(mode):
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(pointwise, backend=counter)
    for x in (rows(), uneven(), rows(2), uneven(), rank_map(lambda rank: torch.ones(3, 2)), rows(3)):
        assert close(compiled(x), pointwise(x))
    assert counter.frame_count == 1  # what Dynamo has run op by op once, it does not compile again


def test_views_of_one_memory_run_op_by_op(mode):
    def both(x, row):
        x.add_(1)
        return row * 2

    def shared(run):
        x = rows()
        return run(x, x[0])

    assert close(shared(torch.compile(both, backend="aot_eager")), shared(both))


def cut_and_scaled(x, mesh):
    """Each rank cuts its own shard out of a tensor that all have."""
    whole = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=[Shard(0)] + [Replicate()] * (mesh.ndim - 1)).to_local() * 2


@pytest.mark.parametrize("part", ["row", "grid", "a"])
def test_a_shard_that_each_rank_cuts_is_a_node_of_the_graph(mode, part):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = {"row": init_device_mesh("cpu", (RANKS,)), "grid": grid, "a": grid["a"]}[part]
    counter = CompileCounterWithBackend("aot_eager")
    same = rank_map(lambda rank: torch.arange(8.0).view(4, 2))
    assert close(torch.compile(cut_and_scaled, backend=counter, fullgraph=True)(same, mesh), cut_and_scaled(same, mesh))
    graph = make_fx(lambda x: cut_and_scaled(x, mesh))(same)
    assert counter.frame_count == 1 and "torch.ops.localtensor.own_chunk.default(" in graph.code
    assert close(graph(same + 1), cut_and_scaled(same + 1, mesh))


def test_shards_of_sizes_of_their_own_run_op_by_op(mode):
    mesh = init_device_mesh("cpu", (RANKS,))
    same, counter = rank_map(lambda rank: torch.arange(5.0)), CompileCounterWithBackend("aot_eager")
    found, wanted = torch.compile(cut_and_scaled, backend=counter)(same, mesh), cut_and_scaled(same, mesh)
    assert [found.on(rank).tolist() for rank in range(RANKS)] == [wanted.on(rank).tolist() for rank in range(RANKS)]
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"a size of 5 .*4 ranks cut it, and not all of them take a chunk of one size"):
        torch.compile(cut_and_scaled, backend="eager", fullgraph=True)(same, mesh)


def test_a_function_of_torch_is_compiled_as_a_whole_or_runs_op_by_op(mode):
    """Its parts ask whether they are compiled, and return other values then."""
    mesh, learnt = init_device_mesh("cpu", (RANKS,)), []
    for compiled in (False, True):
        weight = nn.Parameter(distribute_tensor(torch.arange(5.0).view(5, 1), mesh, [Shard(0)]))  # of uneven shards
        optimizer = torch.optim.AdamW([weight], 0.1, foreach=True)

        def step(weight=weight, optimizer=optimizer):
            (weight * weight).sum().backward()
            optimizer.step()

        (torch.compile(step, backend="eager") if compiled else step)()
        learnt.append(weight.full_tensor().reconcile())
    assert torch.equal(*learnt)


def test_a_shard_of_one_element_is_compiled_with_the_strides_that_it_says():
    """A drawn program: in one of its graphs a tensor of shape (1, 1) has the strides (4, 1), where its values lie by (1, 1)."""
    ends = ("reduce", 0, ("R",), True, 4), ("cat", 1, ("S1",), True, 7)
    steps = (("matmul", 1, ("S0",), True, 2), ("linear", 1, ("S0",), False, 3), *ends)
    found = draws.Found()
    draws.of_dtensors(Program("row", "whole", (7, 6), ("R",), "distributed", steps, backward=False), found)
    assert found.counts["DTensors, aot_eager: equal"] == 1 and not found.differences


def transposed(x):
    return x.transpose(0, -1)


def normed(x):
    return nn.functional.layer_norm(x, x.shape[-1:])


def normed_twice(x):
    for step in (normed, transposed, normed):
        x = step(x)
    return x


def test_a_view_alone_between_breaks_that_no_rank_has_is_not_compiled_by_itself(mode, monkeypatch):
    apart, original = [], kernels.or_as_recorded
    monkeypatch.setattr(kernels, "or_as_recorded", lambda made, graph: apart.append(graph) or original(made, graph))
    mesh = init_device_mesh("cpu", (RANKS,))
    x = distribute_tensor(torch.arange(75.0).sin().view(5, 3, 5), mesh, [Shard(1)])  # no row for the last
    x.requires_grad_()
    found, wanted = torch.compile(normed_twice, backend="aot_eager")(x), normed_twice(x)
    assert found.placements == wanted.placements
    assert torch.equal(found.full_tensor().reconcile(), wanted.full_tensor().reconcile())
    torch.compiler.reset()
    apart.clear()
    even = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with suppress(RuntimeError):  # up to torch 2.13, as on a rank: as_strided not supported with DTensor
        torch.compile(transposed, backend="aot_eager")(even)
    assert not apart


@pytest.mark.parametrize("writes", [True, False])
def test_a_part_that_ends_in_a_view_is_run_again_as_it_is_written_unless_it_writes(writes):
    x, runs = torch.zeros(3), []

    def compiled(x):
        runs.append("compiled")
        if writes:
            x.add_(1)
        raise RuntimeError("as_strided not supported with DTensor!")

    class Recorded:
        @staticmethod
        def forward(x):
            runs.append("recorded")
            return x

    run = kernels.or_as_recorded(compiled, Recorded)
    with pytest.raises(RuntimeError, match="as_strided") if writes else nullcontext():
        run(x)
    assert runs == ["compiled"] if writes else runs == ["compiled", "recorded"]


def summed_by_us(x):
    y = x * 2
    return all_reduce(y, "sum") + y * rank_map(torch.tensor)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_call_of_ours_breaks_the_graph_around_itself(mode, backend):
    counter = CompileCounterWithBackend(backend)
    assert close(torch.compile(summed_by_us, backend=counter)(rows()), summed_by_us(rows()))
    assert counter.frame_count == 2  # before and behind; what our functions call of others is not compiled


@pytest.mark.parametrize(
    ("function", "name"), [(summed_by_us, "all_reduce"), (lambda x: x + rank_map(torch.tensor), "rank_map")]
)
def test_a_call_of_ours_is_refused_by_name_in_a_full_graph(mode, function, name):
    with pytest.raises(Exception, match=rf"it cannot hold a call of localtensor\.{name}\.\n.*this call runs op by op"):
        torch.compile(function, backend="eager", fullgraph=True)(rows())


def looked_up(words, weight):
    """Rows of a weight that is cut by rows."""
    return nn.functional.embedding(words, weight).redistribute(placements=[Replicate()]).to_local() * 2


def words_and_rows(mode):
    mesh = init_device_mesh("cpu", (RANKS,))
    weight = distribute_tensor(torch.arange(24.0).view(8, 3), mesh, [Shard(0)]).requires_grad_()
    return distribute_tensor(torch.tensor([[1, 5], [7, 0]]), mesh, [Replicate()]), weight


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_weight_that_is_cut_by_rows_are_looked_up_in_one_graph(mode, backend):
    counter, grads, found = CompileCounterWithBackend(backend), [], []
    for run in (looked_up, torch.compile(looked_up, backend=counter, fullgraph=True)):
        words, weight = words_and_rows(mode)
        found.append(run(words, weight))
        found[-1].square().sum().backward()
        grads.append(weight.grad.to_local())
    assert counter.frame_count == 1 and close(found[1], found[0]) and close(grads[1], grads[0])


def test_rows_that_were_looked_up_before_are_reduced_op_by_op(mode):
    def reduced(rows):
        return rows.redistribute(placements=[Replicate()]).to_local() * 2

    words, weight = words_and_rows(mode)
    found = torch.compile(reduced, backend="aot_eager")(nn.functional.embedding(words, weight))
    assert close(found, looked_up(words, weight))


@pytest.mark.slow
def test_a_kernel_of_gradients_gets_an_input_with_its_strides(mode):
    def products(x, weight):
        return (x * 2) @ weight

    grads = []
    for run in (products, torch.compile(products, backend="inductor")):
        weight = torch.ones(4, 3, requires_grad=True)
        whole = rank_map(lambda rank: torch.arange(10.0).view(2, 5) + rank)
        run(whole[:, :-1], weight).square().sum().backward()
        grads.append(weight.grad)
    assert close(grads[1], grads[0])


def test_outputs_of_kernels_have_the_strides_that_they_were_compiled_with(mode):
    graph = make_fx(lambda x: x * 2)(torch.ones(2))
    with mode.disable():
        apart = torch.arange(10.0).view(2, 5)
    kernel = kernels.LockstepKernel(
        mode,
        graph,
        lambda inputs: [
            inputs[0],
            inputs[0].expand(3, 2),
            apart[:, :4] + 0 * inputs[0][0],
            (apart + inputs[0][0])[:, :4],
        ],
    )
    x = rank_map(lambda rank: torch.tensor([rank, 1.0]))
    itself, spread, dense, gaps = kernel([x])
    assert itself is x and [one.stride() for one in (spread, dense, gaps)] == [(0, 1), (4, 1), (5, 1)]
    assert on_all(spread)[2] == [[2, 1]] * 3 and on_all(gaps)[1] == [[1, 2, 3, 4], [6, 7, 8, 9]]


def test_what_a_kernel_makes_of_tensors_from_outside_is_made_inside(mode):
    graph = make_fx(lambda x: x * 2)(torch.ones(2))
    with mode.disable():
        outside = torch.ones(2)
    itself, made, number = kernels.LockstepKernel(mode, graph, lambda inputs: [inputs[0], inputs[0] * 3, 7])([outside])
    made += dist.get_rank()
    assert itself is outside and on_all(made) == [[3 + rank] * 2 for rank in range(RANKS)] and number == 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_attention_and_constants_are_kernels_of_inductor(mode, monkeypatch):
    made = []
    monkeypatch.setattr(
        kernels, "_is_pure", lambda graph, known=kernels._is_pure: made.append(known(graph)) or made[-1]
    )
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu")
    query = rank_map(lambda rank: torch.randn(1, 2, 32, 8, generator=torch.Generator().manual_seed(rank)))
    compiled = torch.compile(flex.flex_attention, backend="inductor")
    assert close(
        compiled(query, query, query, block_mask=mask), flex.flex_attention(query, query, query, block_mask=mask)
    )
    assert made and all(made)
    torch.compile(constants, backend="inductor")(rows())
    assert made[-1]


VIEWS = {
    "a part": lambda x: x.view(-1)[1:],
    "columns": lambda x: x[:, ::2],
    "turned": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(3, 2),
    "a view of a row that is not the first": lambda x: x[1],
}


def strided(x):
    return x * x.stride(0) + x.sum()


@pytest.mark.few(4)
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_compiled_with_its_strides(mode, view, leaf):
    x = VIEWS[view](rows() if leaf else rows().requires_grad_() * 1)
    counter = CompileCounterWithBackend("aot_eager")
    assert close(torch.compile(strided, backend=counter, fullgraph=True)(x), strided(x)) and counter.frame_count == 1


def test_a_view_beside_its_base_runs_op_by_op(mode):
    def both(row, x):
        x.add_(1)
        return row * 2

    def shared(run):
        x = rows()
        return run(x[0], x)

    assert close(shared(torch.compile(both, backend="aot_eager")), shared(both))


def test_a_dtensor_of_values_in_another_order_than_ranks_is_compiled(mode):
    """The row of rank 0 is not the first one of the memory."""
    mesh = init_device_mesh("cpu", (RANKS,))
    with mode.disable():
        stack = torch.arange(4.0)
    local = wrap((stack,), partition.partition(np.array([2, 0, 3, 1]), [4]), mode)
    x = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    assert close(torch.compile(lambda x: x.detach().clone(), backend="aot_eager")(x).to_local(), local)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_number_of_each_rank_is_no_guard(mode, dtype):
    own, counter = rank_map(lambda rank: torch.tensor(rank + 2, dtype=dtype)), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x * 3, backend=counter, dynamic=True)
    mesh = init_device_mesh("cpu", (RANKS,))
    shard = DTensor.from_local(own, mesh, [Replicate()], run_check=False)
    assert close(compiled(own), own * 3) and close(compiled(own + 1), (own + 1) * 3) and counter.frame_count == 1
    assert close(compiled(shard).to_local(), own * 3)


def test_an_int_of_each_rank_in_an_op_on_fake_tensors_breaks_the_graph(mode):
    mesh = init_device_mesh("cpu", (RANKS,))

    def scattered(x):
        parts = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Shard(0)]).to_local() * 2

    x = rank_map(lambda rank: torch.arange(5.0) + rank)
    found, wanted = torch.compile(scattered, backend="aot_eager")(x), scattered(x)
    assert [found.on(rank).tolist() for rank in range(RANKS)] == [wanted.on(rank).tolist() for rank in range(RANKS)]


def test_a_break_within_an_autograd_function_breaks_the_graph(mode):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0), Shard(1)]).requires_grad_()

    def moved(x):
        return x.redistribute(placements=[Shard(1), Replicate()])

    assert close(torch.compile(moved, backend="aot_eager")(x).to_local(), moved(x).to_local())


# -- dynamic shapes

SHAPED = {
    "a product": lambda x, w: (x.relu() * 2 @ w).sum(0),
    "a scan": lambda x, w: (x @ w).cumsum(0).softmax(1),
    "sizes": lambda x, w: (x @ w).reshape(-1, 2).sum(1) * x.shape[0],
    "a redistribution": lambda x, w: (x @ w).redistribute(placements=[Replicate()]).to_local() * 2,
}


def frames(function, placement, dynamic, marked, rules=nullcontext, first=4):
    """How many graphs four sizes take, 4, 8, 12, 16 by default, and that their results are right; or the kind of error."""
    torch.compiler.reset()
    counter, mesh = CompileCounterWithBackend("eager"), init_device_mesh("cpu", (RANKS,))
    compiled = torch.compile(function, backend=counter, dynamic=dynamic)
    with rules():
        for size in range(first, first + 16, 4):
            x = distribute_tensor(torch.arange(size * 4.0).view(size, 4), mesh, [placement])
            weight = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
            if marked:
                torch._dynamo.mark_dynamic(x, 0)
            try:
                found, wanted = compiled(x, weight), function(x, weight)
            except torch.fx.experimental.symbolic_shapes.ConstraintViolationError as error:
                return type(error)
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(whole, wanted.full_tensor() if isinstance(wanted, DTensor) else wanted)
    return counter.frame_count


@pytest.mark.few(12)
@pytest.mark.parametrize(("dynamic", "marked"), [(None, False), (True, False), (None, True)])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("function", [pytest.param(f, marks=() if f == "sizes" else pytest.mark.slow) for f in SHAPED])
def test_sizes_take_as_many_graphs_as_on_one_rank(function, placement, dynamic, marked):
    cut = (function, placement) == ("a scan", Shard(1))  # our rule cuts 4 rows to 1, a size of its own to torch
    sizes = partial(frames, SHAPED[function], placement, dynamic, marked, first=8 if cut else 4)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        alone = sizes()
    finally:
        dist.destroy_process_group()
    with LocalTensorMode(RANKS):
        assert sizes() == alone and sizes(rules=overlay_dtensor) == alone


def constants(x):
    y = x.clone()
    for _ in range(2):
        y = y[torch.tensor([1, 0])]
    return y


def test_a_constant_in_the_graph_of_gradients_is_copied(mode):
    x = rows().requires_grad_()
    torch.compile(constants, backend="aot_eager")(x).sum().backward()
    assert on_all(x.grad) == [[[1, 1], [1, 1]]] * RANKS


@pytest.mark.parametrize("leaf", [False, True])
def test_shards_cut_in_the_graph_of_gradients_run_op_by_op(mode, leaf):
    """Each rank cuts its own; torch cuts a FunctionalTensor there, on which our kernels ended in a native crash."""
    mesh, grads = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), []

    def gathered(x):
        shards = DTensor.from_local(x if leaf else x.clone(), mesh, [Shard(0), Replicate()], run_check=False)
        return shards.redistribute(placements=[Replicate()] * 2).to_local() * 2

    for run in (gathered, torch.compile(gathered, backend="aot_eager")):
        x = rows().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the anomaly mode in which torch records
            (run(x) * torch.arange(8.0).view(4, 2)).sum().backward()
        grads.append(x.grad)
    assert close(grads[1], grads[0])


def test_a_tensor_without_values_is_no_tensor_of_all_ranks(mode):
    with pytest.raises(NotTraceable, match=r"a FakeTensor at .*: it stands for one rank's tensor"):
        stacked_value(mode, FakeTensorMode().from_tensor(torch.ones(2)))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of what torch imports when it first compiles
def test_an_error_of_ours_in_a_backend_warns_and_runs_the_graph(mode):
    def backend(graph, inputs):
        raise NotTraceable("backend", "a value", "it differs", "Nothing.")

    with pytest.warns(
        UserWarning, match=r"the graph runs op by op, as Dynamo recorded it: backend: a graph for all ranks"
    ):
        assert close(torch.compile(pointwise, backend=backend)(rows()), pointwise(rows()))


def test_another_error_in_a_backend_is_raised(mode):
    def backend(graph, inputs):
        raise ZeroDivisionError("mine")

    with pytest.raises(Exception, match="mine"):
        torch.compile(pointwise, backend=backend)(rows())


# -- modes


def of_the_world(x):
    return functional.all_reduce(x, "sum", dist.group.WORLD) * dist.get_world_size()


def test_each_mode_compiles_for_its_own_number_of_ranks():
    compiled = torch.compile(of_the_world, backend="eager", fullgraph=True)
    for ranks in (2, 3, 2, 4, 5, 6, 7, 8, 9, 10):  # more than torch recompiles one function
        with LocalTensorMode(ranks):
            assert compiled(rank_map(torch.tensor)).reconcile() == ranks * sum(range(ranks))


def test_the_compiler_works_after_the_mode():
    with LocalTensorMode(2):
        torch.compile(pointwise, backend="eager")(torch.ones(2))
    counter = CompileCounterWithBackend("eager")
    torch.compile(lambda x: torch.tensor([1.0, 2.0]) * x, backend=counter, fullgraph=True)(torch.ones(2))
    assert counter.frame_count == 1


def test_the_compiler_leaves_random_streams_as_they_were(mode):
    torch.manual_seed(dist.get_rank())
    wanted = on_all(torch.rand(3))
    torch.manual_seed(dist.get_rank())
    torch.compile(pointwise, backend="aot_eager")(rows())
    assert on_all(torch.rand(3)) == wanted


def test_local_tensors_outside_of_the_mode_run_op_by_op():
    with LocalTensorMode(2):
        x = rank_map(lambda rank: torch.ones(2) + rank)
    assert torch.compile(lambda x: x * 2, backend="aot_eager")(x).on(1).tolist() == [4, 4]
    with pytest.raises(NotTraceable, match="no LocalTensorMode was entered when the trace began"):
        make_fx(lambda x: x * 2)(x)


# -- AOTAutograd


def test_aot_autograd_has_one_graph_forward_and_one_backward(mode):
    graphs = []
    x, y = rows().requires_grad_(), rows().requires_grad_()
    compiled = aot_function(communicating, lambda graph, inputs: graphs.append(graph) or graph)
    (found := compiled(x)).sum().backward()
    (wanted := communicating(y)).sum().backward()
    assert len(graphs) == 2 and on_all(found) == on_all(wanted) and on_all(x.grad) == on_all(y.grad)
    assert all(node.meta["val"].shape in ((2, 2), ()) for node in graphs[0].graph.nodes if node.op == "placeholder")


@pytest.mark.parametrize(
    ("function", "message"),
    [(by_rank, r"RankInts\(0, 1, 2, 3\) at .*test_compiling\.py:\d+ in by_rank"), (None, "used beside fake tensors")],
)
def test_aot_autograd_refuses_by_name_what_differs(mode, function, message):
    captured = rows()
    with pytest.raises(NotTraceable, match=message):
        aot_function(function or (lambda x: x * captured), lambda graph, inputs: graph)(rows())


def test_an_exported_program_is_that_of_a_rank_and_serves_all(mode):
    layer = nn.Linear(2, 2)
    program = torch.export.export(layer, (rows(),))
    assert program.graph_module.code.count("torch.ops") == 1
    assert close(program.module()(rows(5)), layer(rows(5)))


# -- inductor


def compiled_by_inductor(function, *inputs):
    """The function, compiled; how often a kernel ran, and how often a graph op by op."""
    runs = []

    class Watched(kernels.LockstepKernel):
        def __init__(self, mode, graph, kernel):
            super().__init__(mode, graph, lambda args: runs.append("kernel") or kernel(args))

        def __call__(self, inputs):
            runs.append("graph" if self._op_by_op else "call")
            return super().__call__(inputs)

    before, kernels.LockstepKernel = kernels.LockstepKernel, Watched
    try:
        with warnings.catch_warnings():
            return torch.compile(function, fullgraph=True)(*inputs), runs
    finally:
        kernels.LockstepKernel = before


@pytest.mark.slow  # the C++ compiler
def test_a_kernel_of_inductor_runs_once_for_each_different_value(mode):
    twice = rank_map(lambda rank: torch.ones(2) * (rank // 2))
    found, runs = compiled_by_inductor(lambda x: x.sin() + 1, twice)
    assert close(found, twice.sin() + 1) and runs == ["call", "kernel", "kernel"]


@pytest.mark.slow
def test_a_graph_that_communicates_or_draws_runs_op_by_op(mode):
    assert compiled_by_inductor(communicating, rows())[1] == ["graph"]
    assert compiled_by_inductor(lambda x: x + torch.rand(2), rows())[1] == ["graph"]


@pytest.mark.slow
def test_a_kernel_of_gradients_does_not_write_to_what_it_was_given(mode):
    """Inductor may reuse the memory of what was saved for gradients, which here all ranks share: the dropped factor."""

    def scaled(x, factor):
        return nn.functional.dropout(factor, 0.5) * x

    found = []
    for run in (scaled, torch.compile(scaled, fullgraph=True)):
        torch.manual_seed(3)
        x = rows().requires_grad_()
        run(x, torch.arange(1.0, 5.0).view(2, 2)).square().sum().backward()
        found.append(x.grad)
    assert close(found[1], found[0])


@pytest.mark.slow
def test_a_mode_does_not_import_inductor_while_nothing_is_compiled():
    program = (
        "import sys, torch, torch._dynamo, localtensor as lt\n"
        "with lt.LocalTensorMode(2): torch.ones(2) + 1\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_fake_tensor_of_a_graph_that_is_there_is_cut_for_each_rank():
    with LocalTensorMode(4) as mode:
        x = FakeTensorMode().from_tensor(torch.empty(18, 12))
        assert own_chunk(mode, x, 0, 4, np.arange(4), keep_order=False).shape[0].node.values.tolist() == [5, 5, 5, 3]
