"""The bytes of a small graph, counted by hand; the table of two graphs, before and after a pass."""

import copy
import io

import pytest
import torch
from rich.console import Console
from torch.fx.experimental.proxy_tensor import make_fx

import localtensor as lt
from localtensor import errors

ops = torch.ops._c10d_functional


def step(x, shard, other):
    for one in (shard, other):
        x = x @ ops.wait_tensor(ops.all_gather_into_tensor(one, 2, "0"))
    return x


def traced():
    return make_fx(step, tracing_mode="fake")(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4))


@pytest.fixture(scope="module")
def graph():
    return lt.run(traced, ranks=2)[0]


@pytest.fixture(scope="module")
def prefetched(graph):
    after = copy.deepcopy(graph)
    gathers = [node for node in after.graph.nodes if "all_gather" in str(node.target)]
    next(iter(gathers[0].users)).prepend(gathers[1])
    return after


def test_memory_and_bytes_in_flight_are_those_counted_by_hand(graph):
    cost = lt.graph_cost(graph)
    inputs, gathered, product = 3 * 32, 64, 32
    assert [(node.memory, node.in_flight, node.collectives) for node in cost.nodes] == [
        *[(inputs, 0, 0)] * 3,
        (inputs + gathered, 32, 1),
        (inputs + gathered, 0, 0),
        (inputs + gathered + product, 0, 0),
        (inputs + product + gathered, 32, 1),
        (inputs + product + gathered, 0, 0),
        (inputs + product + gathered + product, 0, 0),
        (inputs + product, 0, 0),
    ]
    assert (cost.peak_memory.name, cost.peak_memory.memory) == ("mm_1", 224)
    assert cost.between == {"all_gather_into_tensor": 0, "all_gather_into_tensor_1": 0}


def test_a_prefetch_costs_memory_and_bytes_in_flight(graph, prefetched):
    cost = lt.graph_cost(prefetched)
    assert (cost.peak_memory.name, cost.peak_memory.memory) == ("mm", 96 + 64 + 64 + 32)
    assert (cost.peak_in_flight.in_flight, cost.most_collectives) == (64, 2)
    assert cost.between == {"all_gather_into_tensor": 1, "all_gather_into_tensor_1": 2}


def test_views_in_place_results_and_what_a_collective_reads_are_counted_once():
    def program(x):
        y = x + 1
        flat = y.view(8)
        flat.mul_(2)
        total = ops.all_reduce(flat, "sum", "0")
        z = x * 2
        return ops.wait_tensor(total).sum() + z.sum()

    graph = lt.run(lambda: make_fx(program, tracing_mode="fake")(torch.ones(2, 4)), ranks=2)[0]
    memory = {node.name: node.memory for node in lt.graph_cost(graph).nodes}
    assert [memory[name] for name in ("add", "view", "mul_", "all_reduce", "mul", "sum_1")] == [
        64,
        64,
        64,
        96,
        128,
        100,
    ]


def test_the_table_has_both_graphs_side_by_side(graph, prefetched):
    text = io.StringIO()
    lt.print_graph_costs(graph, prefetched, console=Console(file=text, width=80))
    rows = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in text.getvalue().splitlines()
    ]
    assert ["memory, peak bytes", "224", "256"] in rows
    assert ["at node", "mm_1", "mm"] in rows
    assert ["in flight, peak bytes", "32", "64"] in rows
    assert ["all_gather_into_tensor_1", "0", "2"] in rows


def test_what_is_no_graph_is_refused():
    with pytest.raises(errors.WrongType, match=r"graph_cost: graph: 3: a torch\.fx\.GraphModule is expected"):
        lt.graph_cost(3)
