"""Graphs that ranks trace on rank threads, and passes over them: right ones raise nothing, each wrong one its own error."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import localtensor as lt
from localtensor import errors

ops = torch.ops._c10d_functional
WORLD = {"0": range(2)}


class Copied(torch.autograd.Function):
    """Megatron's f: the gradient is summed over the ranks."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        return functional.all_reduce(grad, "sum", dist.group.WORLD)


class Summed(torch.autograd.Function):
    """Megatron's g: the value is summed over the ranks."""

    @staticmethod
    def forward(_, x):
        return functional.all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(_, grad):
        return grad.clone()


def megatron_step(x, w1, w2):
    y = Summed.apply(torch.relu(Copied.apply(x) @ w1) @ w2)
    return (y, *torch.autograd.grad(y.pow(2).sum(), [x, w1, w2]))


def megatron():
    sizes = [(4, 8), (8, 6), (6, 8)]
    return make_fx(megatron_step, tracing_mode="fake")(*(torch.ones(size, requires_grad=True) for size in sizes))


def sharded_layers(x, *shards):
    """FSDP: the weight of each layer is gathered, its gradient scattered."""
    for shard in shards:
        x = torch.relu(x @ ops.wait_tensor(ops.all_gather_into_tensor(shard, 2, "0")))
    return x, ops.wait_tensor(ops.reduce_scatter_tensor(x.sum(0), "avg", 2, "0"))


def fsdp():
    return make_fx(sharded_layers, tracing_mode="fake")(torch.ones(3, 8), *(torch.ones(4, 8) for _ in range(3)))


def on_two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def step(x):
        double, more = x * 2, x + 1
        across = functional.all_reduce(double, "sum", mesh.get_group("tp"))
        along = functional.all_reduce(more, "max", mesh.get_group("dp"))
        return across, along

    names = {mesh.get_group(axis).group_name: mesh.get_group(axis) for axis in ("dp", "tp")}
    groups = {name: tuple(dist.get_process_group_ranks(group)) for name, group in names.items()}
    return make_fx(step, tracing_mode="fake")(torch.ones(4)), groups


def traced(program, ranks=2):
    return list(lt.run(program, ranks=ranks, leftovers="ignore"))


@pytest.fixture(scope="module")
def megatron_graphs():
    return traced(megatron)


@pytest.fixture(scope="module")
def fsdp_graphs():
    return traced(fsdp)


@pytest.fixture(scope="module")
def axes_graphs():
    made = traced(on_two_axes, 4)
    return [graph for graph, _ in made], {name: ranks for _, groups in made for name, ranks in groups.items()}


def starts(graph):
    return [node for node in graph.graph.nodes if "_c10d_functional" in str(node.target) and not is_wait(node)]


def is_wait(node):
    return str(node.target).startswith("_c10d_functional.wait_tensor")  # torch 2.15 has one for a list


def wait_of(node):
    return next(user for user in node.users if is_wait(user))


def move_before(node, other):
    other.prepend(node)


def changed(graphs, change, ranks):
    """Copies of the graphs, with the change of a pass on these ranks."""
    copies = [copy.deepcopy(graph) for graph in graphs]
    for rank in ranks:
        change(copies[rank])
        copies[rank].graph.lint()
        copies[rank].recompile()
    return copies


def wait_late(graph):
    """Each wait moves to just before the first node that uses it."""
    for node in [one for one in graph.graph.nodes if is_wait(one)]:
        order = {one: at for at, one in enumerate(graph.graph.nodes)}
        move_before(node, min(node.users, key=order.__getitem__))


def start_early(graph):
    """Each gather starts at the top of the graph, in the order of the graph."""
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for node in starts(graph):
        if "all_gather" in str(node.target) and node is not first:
            move_before(node, first)


def prefetch_one(graph):
    """Each gather but the first starts before the wait of the one before it."""
    gathers = [node for node in starts(graph) if "all_gather" in str(node.target)]
    for before, node in pairwise(gathers):
        move_before(node, wait_of(before))


def gather_all_first(graph):
    """Every gather and its wait stand at the top of the graph."""
    gathers = [node for node in starts(graph) if "all_gather" in str(node.target)]
    for before, node in pairwise(gathers):
        wait_of(before).append(node)
        node.append(wait_of(node))


def wait_in_reverse(graph):
    """Every gather starts at the top of the graph; the last is waited for first."""
    start_early(graph)
    gathers = [node for node in starts(graph) if "all_gather" in str(node.target)]
    for node in gathers:
        gathers[-1].append(wait_of(node))


def swap_first_two(graph):
    first, second = starts(graph)[:2]
    move_before(second, first)


def swap_first_two_with_waits(graph):
    first, second = starts(graph)[:2]
    move_before(wait_of(second), first)
    move_before(second, wait_of(second))


def make_in_place(graph):
    for node in starts(graph):
        if node.target is ops.all_reduce.default:
            node.target = ops.all_reduce_.default


def both(*changes):
    def change(graph):
        for one in changes:
            one(graph)

    return change


def test_graphs_of_ranks_as_traced_pass(megatron_graphs, fsdp_graphs, axes_graphs):
    calls = lt.check_graphs(megatron_graphs, groups=WORLD)
    assert [(call.kind, call.op, call.tensors) for call in calls] == [("all_reduce", "sum", ("f32[4,8]",))] * 2
    assert [call.kind for call in lt.check_graphs(dict(enumerate(fsdp_graphs)), groups=WORLD)] == [
        *["all_gather_into_tensor"] * 3,
        "reduce_scatter_tensor",
    ]
    graphs, groups = axes_graphs
    assert sorted(call.group for call in lt.check_graphs(graphs, groups=groups)) == [(0, 1), (0, 2), (1, 3), (2, 3)]


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("change", [start_early, prefetch_one, gather_all_first, wait_in_reverse])
def test_reorderings_that_keep_each_group_in_order_pass(fsdp_graphs, change, ranks):
    graphs = changed(fsdp_graphs, change, ranks)
    assert len(lt.check_graphs(graphs, groups=WORLD)) == 4
    order = [[node.name for node in graph.graph.nodes] for graph in (graphs[ranks[0]], fsdp_graphs[0])]
    assert order[0] != order[1]


@pytest.mark.parametrize(
    ("change", "ranks"),
    [
        (swap_first_two, [0, 1, 2, 3]),
        (swap_first_two, [0, 3]),  # both are on the way before one is waited for
        (swap_first_two_with_waits, [0, 1, 2, 3]),
        (make_in_place, [2]),
    ],
)
def test_reorderings_across_groups_that_no_rank_waits_in_pass(axes_graphs, change, ranks):
    graphs, groups = axes_graphs
    late = changed(graphs, both(wait_late, change) if change is swap_first_two else change, ranks)
    if change is swap_first_two:
        late = changed(late, wait_late, range(4))
    assert len(lt.check_graphs(late, groups=groups)) == 4


def test_a_backward_pass_that_waits_late_on_one_rank_passes(megatron_graphs):
    assert len(lt.check_graphs(changed(megatron_graphs, wait_late, [1]), groups=WORLD)) == 2


def test_two_collectives_of_one_group_that_one_rank_swaps_are_a_mismatch(fsdp_graphs):
    def swap(graph):
        gather, scatter = starts(graph)[2:]
        use = wait_of(scatter)
        scatter.args = (
            placeholders(graph)[1],
            *scatter.args[1:],
        )
        move_before(scatter, gather)
        move_before(use, gather)

    with pytest.raises(errors.KindMismatch) as caught:
        lt.check_graphs(changed(fsdp_graphs, swap, [1]), groups=WORLD)
    text = str(caught.value)
    assert "call #2 in group 0: kind: all_gather_into_tensor on rank 0, reduce_scatter_tensor on rank 1" in text
    assert "Graphs:\n  rank 0: line " in text
    assert "reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor.default(" in text


def placeholders(graph):
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def test_collectives_of_two_groups_that_ranks_swap_are_a_deadlock(axes_graphs):
    graphs, groups = axes_graphs
    with pytest.raises(errors.Deadlock) as caught:  # ranks 0 and 3 on the other diagonal than 1 and 2
        lt.check_graphs(changed(graphs, swap_first_two_with_waits, [0, 3]), groups=groups)
    assert caught.value.circle == (0, 2, 3, 1)
    assert "they wait for each other in a circle: 0 -> 2 -> 3 -> 1 -> 0" in str(caught.value)
    lines = str(caught.value).partition("Graphs:\n")[2]
    assert lines.count("all_reduce") >= 4
    assert "wait_tensor" in lines


def test_a_read_that_moves_before_its_wait_is_found(megatron_graphs):
    def read_early(graph):
        start = starts(graph)[0]
        user = next(user for user in wait_of(start).users if user.op != "output")
        user.replace_input_with(wait_of(start), start)
        move_before(user, wait_of(start))

    with pytest.raises(errors.ReadBeforeWait) as caught:
        lt.check_graphs(changed(megatron_graphs, read_early, [1]), groups=WORLD)
    assert (caught.value.call.rank, caught.value.call.kind, caught.value.op) == (
        1,
        "all_reduce",
        "aten.pow.Tensor_Scalar",
    )
    assert "Graphs:\n  rank 1: line " in str(caught.value)


def test_a_wait_that_a_pass_drops_is_found(megatron_graphs):
    def drop(graph, keep_readers):
        start = starts(graph)[-1]
        wait = wait_of(start)
        wait.replace_all_uses_with(start if keep_readers else start.args[0])
        graph.graph.erase_node(wait)

    with pytest.raises(errors.WorkNotWaited) as caught:
        lt.check_graphs(changed(megatron_graphs, lambda graph: drop(graph, True), [0]), groups=WORLD)
    assert [call.number for call in caught.value.calls] == [1]
    with pytest.raises(errors.WorkNotWaited, match=r"all_reduce #1 in group 0: async_op: not waited for on rank 0"):
        lt.check_graphs(changed(megatron_graphs, lambda graph: drop(graph, False), [0, 1]), groups=WORLD)


def other_argument(place, value, at=0):
    def change(graph):
        node = starts(graph)[at]
        node.args = (*node.args[:place], value, *node.args[place + 1 :])

    return change


def other_shape(graph):
    start = starts(graph)[0]
    start.args[0].meta["val"] = start.args[0].meta["val"].new_empty(5, 8)


def other_dtype(graph):
    start = starts(graph)[0]
    start.args[0].meta["val"] = start.args[0].meta["val"].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (other_argument(1, "max"), errors.ReduceOpMismatch, "max on rank 0, sum on rank 1"),
        (other_shape, errors.ShapeMismatch, r"\[5,8\] on rank 0, \[4,8\] on rank 1"),
        (other_dtype, errors.DtypeMismatch, "bf16 on rank 0, f32 on rank 1"),
    ],
)
def test_another_argument_on_one_rank_is_a_mismatch(megatron_graphs, change, error, text):
    with pytest.raises(error, match=text) as caught:
        lt.check_graphs(changed(megatron_graphs, change, [0]), groups=WORLD)
    lines = str(caught.value).partition("\nGraphs:\n")[2]
    assert lines.count("= _c10d_functional.all_reduce.default(") == (2 if error is errors.ReduceOpMismatch else 1)


def drop_call(at):
    def change(graph):
        start = starts(graph)[at]
        wait = wait_of(start)
        wait.replace_all_uses_with(start.args[0])
        graph.graph.erase_node(wait)
        graph.graph.erase_node(start)

    return change


def test_a_collective_that_one_rank_lacks_is_a_call_that_others_wait_for(megatron_graphs):
    with pytest.raises(errors.EarlyReturn, match="rank 1 returned while rank 0 waits for it") as caught:
        lt.check_graphs(changed(megatron_graphs, drop_call(1), [1]), groups=WORLD)
    assert [(wait.rank, wait.ranks, wait.call.number) for wait in caught.value.waits] == [(0, (1,), 1)]
    assert "Graphs:\n  rank 1: line " in str(caught.value)


def test_a_buffer_written_while_a_collective_has_it_is_found(axes_graphs):
    def write(graph):
        start = starts(graph)[0]
        with graph.graph.inserting_after(start):
            graph.graph.call_function(torch.ops.aten.zero_.default, (start.args[0],))

    graphs, groups = axes_graphs
    with pytest.raises(errors.BufferReused, match=r"written by aten.zero_.default on rank 2"):
        lt.check_graphs(changed(graphs, write, [2]), groups=groups)


def test_a_read_of_the_buffer_of_an_in_place_collective_is_found(axes_graphs):
    def read(graph):
        make_in_place(graph)
        start = starts(graph)[0]
        with graph.graph.inserting_after(start):
            flat = graph.graph.call_function(torch.ops.aten.view.default, (start.args[0], [2, 2]))
        with graph.graph.inserting_after(flat):
            graph.graph.call_function(torch.ops.aten.sin.default, (flat,))

    graphs, groups = axes_graphs
    with pytest.raises(errors.ReadBeforeWait, match=r"read by aten.sin.default on rank 3"):
        lt.check_graphs(changed(graphs, read, [3]), groups=groups)


def coalesced_and_split():
    def step(x, y, z):
        a, b = functional.all_reduce_coalesced([x, y], "sum", dist.group.WORLD)
        rank = dist.get_rank()
        moved = functional.all_to_all_single(z, [1, 2], [1, 2], dist.group.WORLD) if rank == 0 else z
        moved = functional.all_to_all_single(z, [2, 3], [2, 3], dist.group.WORLD) if rank else moved
        return a + 1, b, moved, functional.broadcast(x, 1, dist.group.WORLD)

    rows = 5 if dist.get_rank() else 3
    return make_fx(step, tracing_mode="fake")(torch.ones(4), torch.ones(2, 2), torch.ones(rows, 2))


def test_coalesced_collectives_splits_and_roots_are_compared():
    graphs = traced(coalesced_and_split)
    calls = lt.check_graphs(graphs, groups=WORLD)
    assert [call.kind for call in calls] == ["all_reduce_coalesced", "all_to_all_single", "broadcast"]
    assert calls[0].tensors == ("f32[4]", "f32[2,2]")
    with pytest.raises(errors.SplitMismatch, match="rank 0 sends 2 to rank 1, which makes room for 1"):
        lt.check_graphs(changed(graphs, other_argument(1, [1, 4], 1), [1]), groups=WORLD)
    with pytest.raises(errors.RootMismatch, match="root 0 on rank 0, root 1 on rank 1"):
        lt.check_graphs(changed(graphs, other_argument(1, 0, 2), [0]), groups=WORLD)


def test_one_graph_serves_all_ranks_of_a_mode():
    with lt.LocalTensorMode(1024):
        mesh = init_device_mesh("cpu", (512, 2), mesh_dim_names=("dp", "tp"))
        x = lt.rank_map(lambda rank: torch.full((4,), float(rank)))
        graph = make_fx(lambda x: functional.all_reduce(x, "sum", mesh.get_group("tp")) * 2)(x)
        calls = lt.check_graphs(graph)
    assert len(calls) == 512
    assert {call.group for call in calls} == {(rank, rank + 1) for rank in range(0, 1024, 2)}


def test_a_deadlock_of_a_thousand_ranks_names_them_in_few_lines(megatron_graphs):
    graphs = dict.fromkeys(range(1024), megatron_graphs[0]) | {700: changed(megatron_graphs, drop_call(1), [0])[0]}
    with pytest.raises(errors.EarlyReturn, match="rank 700 returned while ranks 0-699, 701-1023 wait for it") as caught:
        lt.check_graphs(graphs, groups={"0": range(1024)})
    assert len(str(caught.value).splitlines()) < 10


@pytest.mark.parametrize(
    ("graphs", "options", "text"),
    [
        (lambda found: found, {"groups": {}}, "group '0': there is no process group of this name now"),
        (lambda found: found[:1], {"groups": WORLD}, "not all of its ranks have a graph"),
        (lambda found: found, {"groups": {"0": [1]}}, "is none of its ranks"),
        (lambda found: [], {"groups": WORLD}, "there is no rank"),
        (lambda found: changed(found, without_meta, [0]), {"groups": WORLD}, "a node has no meta"),
        (lambda found: changed(found, with_a_send, [0]), {"groups": WORLD}, "_c10d_functional.isend at line"),
    ],
)
def test_what_cannot_be_followed_is_refused(megatron_graphs, graphs, options, text):
    with pytest.raises(errors.NotCheckable, match=text):
        lt.check_graphs(graphs(megatron_graphs), **options)


def test_a_refusal_word_for_word(megatron_graphs):
    with pytest.raises(errors.NotCheckable) as caught:
        lt.check_graphs(megatron_graphs)
    assert str(caught.value) == (
        "check_graphs: groups: group '0': there is no process group of this name now. "
        "Pass groups={'0': [0, 1]} with its ranks, or check the graphs where the group is."
    )


def without_meta(graph):
    starts(graph)[0].args[0].meta.clear()


def with_a_send(graph):
    with graph.graph.inserting_before(starts(graph)[0]):
        graph.graph.call_function(ops.isend.default, (placeholders(graph)[0], 1, 0, "0"))


def test_another_group_size_and_another_type_are_refused(fsdp_graphs):
    with pytest.raises(errors.NotCheckable, match=r"group_size=4 at line .* on rank 1: group 0 has 2 ranks"):
        lt.check_graphs(changed(fsdp_graphs, other_argument(1, 4), [1]), groups=WORLD)
    with pytest.raises(errors.WrongType, match=r"graphs\[1\]: 3: a torch\.fx\.GraphModule is expected"):
        lt.check_graphs([fsdp_graphs[0], 3], groups=WORLD)
    with pytest.raises(errors.WrongType, match=r"a torch\.fx\.GraphModule is expected"):
        lt.check_graphs(3)


class Module(torch.nn.Module):
    def forward(self, x):
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD)


def traced_with_lines():
    return make_fx(Module(), tracing_mode="fake", record_stack_traces=True)(torch.ones(4))


def test_a_mismatch_names_the_lines_of_the_program_where_the_graph_has_them():
    graphs = changed(traced(traced_with_lines), other_argument(1, "max"), [1])
    with pytest.raises(errors.ReduceOpMismatch, match=r"at test_graph_check.py:\d+ in forward") as caught:
        lt.check_graphs(graphs, groups=WORLD)
    assert len(caught.value.places) == 1


def runs_as(graphs, *inputs):
    """The class of the error with which the graphs run on rank threads; None if they run."""

    def program():
        if dist.get_world_size() == 4:
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return graphs[dist.get_rank()](*(one.clone() for one in inputs))

    try:
        lt.run(program, ranks=len(graphs), leftovers="ignore")
    except errors.LocalTensorError as error:
        return type(error)
    return None


def checked_as(graphs, groups):
    try:
        lt.check_graphs(graphs, groups=groups)
    except errors.LocalTensorError as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    ("change", "ranks", "error"),
    [
        (swap_first_two_with_waits, [0, 3], errors.Deadlock),
        (swap_first_two_with_waits, [0, 1, 2, 3], None),
        (both(wait_late, swap_first_two), [0, 3], None),
        (other_argument(1, "min"), [1], errors.ReduceOpMismatch),
        (drop_call(0), [2], errors.EarlyReturn),
        (drop_call(1), [2], errors.EarlyReturn),
        (make_in_place, [1], None),
    ],
)
def test_the_check_ends_as_the_graphs_do_on_rank_threads(axes_graphs, change, ranks, error):
    graphs, groups = axes_graphs
    graphs = changed(graphs, change, ranks)
    assert (checked_as(graphs, groups), runs_as(graphs, torch.ones(4))) == (error, error)
