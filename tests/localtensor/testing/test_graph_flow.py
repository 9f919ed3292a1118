"""What one graph does with the buffers of its collectives: views, lists, in-place and out forms, each built node by node."""

import operator

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import localtensor as lt
from localtensor import errors
from localtensor.testing.graph_flow import follow, line_of, place_of

aten, ops = torch.ops.aten, torch.ops._c10d_functional


class Builder:
    """A graph of two inputs, f32[4], to which `call` adds nodes."""

    def __init__(self):
        self.graph, self.value = fx.Graph(), FakeTensorMode().from_tensor(torch.ones(4))
        self.x, self.y = (self.graph.placeholder(name) for name in "xy")
        self.x.meta["val"] = self.y.meta["val"] = self.value

    def call(self, target, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.value
        return node

    def flow(self, *modules):
        self.graph.output(())
        root = torch.nn.Module()
        for name, module in modules:
            root.add_module(name, module)
        return follow(fx.GraphModule(root, self.graph), "test")


def fault_of(build):
    """The target of the node that is at fault, and whether it writes; None if the graph is right."""
    builder = Builder()
    build(builder, builder.call)
    fault = builder.flow().fault
    return fault and (fault.node.target, fault.writes)


def view_of_a_result(b, call):
    view = call(aten.view.default, call(ops.all_reduce.default, b.x, "sum", "0"), [2, 2])
    call(aten.sin.default, view)
    call(ops.wait_tensor.default, view)


def chunk_of_a_result(b, call):
    chunks = call(aten.split.Tensor, call(ops.all_reduce.default, b.x, "sum", "0"), 2)
    call(aten.cos.default, call(operator.getitem, chunks, 1))


def other_item(b, call):
    both = call(ops.all_reduce_coalesced.default, [b.x, b.y], "sum", "0")
    items = [call(operator.getitem, both, i) for i in range(2)]
    call(ops.wait_tensor.default, items[0])
    call(aten.exp.default, items[1])


def result_written(b, call):
    call(aten.zero_.default, call(ops.all_reduce.default, b.x, "sum", "0"))


def list_written(b, call):
    call(ops.all_reduce.default, b.y, "sum", "0")
    call(aten._foreach_add_.Scalar, [b.x, b.y], 1)


def out_read(b, call):
    call(ops.all_gather_into_tensor_out.default, b.x, 2, "0", out=b.y)
    call(aten.tan.default, b.y)


def python_read(b, call):
    call(operator.add, call(ops.broadcast.default, b.x, 0, "0"), 1)


def second_in_place(b, call):
    call(ops.all_reduce_.default, b.x, "sum", "0")
    call(ops.all_reduce_.default, b.x, "sum", "1")


@pytest.mark.parametrize(
    ("build", "fault"),
    [
        (view_of_a_result, (aten.sin.default, False)),
        (chunk_of_a_result, (aten.cos.default, False)),
        (other_item, (aten.exp.default, False)),
        (result_written, (aten.zero_.default, True)),
        (list_written, (aten._foreach_add_.Scalar, True)),
        (out_read, (aten.tan.default, False)),
        (python_read, (operator.add, False)),
        (second_in_place, (ops.all_reduce_.default, True)),
    ],
)
def test_uses_of_a_buffer_before_the_wait_are_found(build, fault):
    assert fault_of(build) == fault


def waited_through_a_view(b, call):
    result = call(ops.all_reduce.default, b.x, "sum", "0")
    call(ops.wait_tensor.default, call(aten.view.default, result, [2, 2]))
    call(aten.sin.default, result)


def input_read_on_the_way(b, call):
    result = call(ops.all_reduce.default, b.x, "sum", "0")
    call(aten.sin.default, b.x)
    call(aten.sym_size.int, result, 0)
    call(aten.zero_.default, b.y)
    call(ops.wait_tensor.default, result)
    call(aten.zero_.default, b.x)


def in_place_then_read(b, call):
    call(ops.all_reduce_.default, b.x, "sum", "0")
    call(ops.wait_tensor.default, b.x)
    call(aten.sin.default, b.x)


def moved_at_once(b, call):
    call(aten.sin.default, call(torch.ops._dtensor.shard_dim_alltoall.default, b.x, 0, 0, "0"))


@pytest.mark.parametrize("build", [waited_through_a_view, input_read_on_the_way, in_place_then_read, moved_at_once])
def test_uses_that_no_collective_can_disturb_are_right(build):
    assert fault_of(build) is None


def test_results_without_a_wait_are_listed_in_order():
    builder = Builder()
    starts = [builder.call(ops.broadcast.default, one, 0, "0") for one in (builder.x, builder.y, builder.x)]
    builder.call(ops.wait_tensor.default, starts[1])
    flow = builder.flow()
    assert [start.node for start in flow.unwaited] == [starts[0], starts[2]]
    assert [(step.node, len(step.waits)) for step in flow.steps[:3]] == [(start, 0) for start in starts]


def test_a_line_has_its_position_and_its_place_in_the_program():
    builder = Builder()
    node = builder.call(ops.all_reduce.default, builder.x, "sum", group_name="0")
    assert line_of(node) == "line 2: all_reduce_default = _c10d_functional.all_reduce.default(x, sum, group_name=0)"
    assert place_of(node) is None
    node.meta["stack_trace"] = (
        '  File "/a/model.py", line 3, in forward\n    f()\n  File "/a/b.py", line 7, in f\n    y = 1'
    )
    assert str(place_of(node)) == "b.py:7 in f"


def test_collectives_in_a_graph_inside_of_the_graph_are_refused():
    inner = Builder()
    inner.call(ops.all_reduce.default, inner.x, "sum", "0")
    inner.graph.output(())
    outer = Builder()
    outer.graph.create_node("get_attr", "branch")
    with pytest.raises(errors.NotCheckable, match=r"branch has line 2: all_reduce.*Inline that graph first"):
        outer.flow(("branch", fx.GraphModule(torch.nn.Module(), inner.graph)))


def test_a_symbolic_size_counts_as_the_example():
    def program(x, parts):
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(x * 2, 2, "0"))
        sizes = [parts.shape[0], x.shape[0] - parts.shape[0]]
        return gathered, ops.wait_tensor(ops.all_to_all_single(x, sizes, sizes, "0"))

    graph = lt.run(lambda: make_fx(program, tracing_mode="symbolic")(torch.ones(6, 3), torch.ones(2)), ranks=2)[0]
    gather, moved = (step.start for step in follow(graph, "test").steps if step.start)
    assert gather.tensors == ((torch.float32, torch.Size([6, 3])),)
    assert (moved.input_splits, moved.output_splits) == ([2, 4], [2, 4])
