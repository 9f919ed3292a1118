"""The ops of a region: what they read and give, and the user's lines, also of the backward pass."""

import torch
import torch.distributed as dist
from torch import nn

import localtensor as lt
from localtensor._util.module_names import plain_name
from localtensor.testing.compare.op_stream import OpRecorder
from localtensor.testing.compare.setup_lines import SetupLines, setup_lines_of
from localtensor.testing.compare.watch import FORWARD, IN_STEP, Key, Region, region_of


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 2

    @staticmethod
    def backward(_, grad):
        return grad * 2


def recorded(run):
    recorder = OpRecorder(lambda: True)
    with recorder:
        run()
    return recorder.finish()


def test_an_op_of_the_backward_pass_has_the_lines_of_its_forward_call():
    layer, x = nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True)
    stream = recorded(lambda: Doubled.apply(layer(x)).sum().backward())
    assert [op.name for op in stream.ops[:4]] == ["t", "addmm", "mul", "sum"]
    backward = [op for op in stream.ops if op.name == "mm"]
    assert len(backward) == 2 and all(op.places[0].function == "<lambda>" for op in backward)
    doubled = [op for op in stream.ops if op.name == "mul"][1]
    assert [place.function for place in doubled.places[:2]] == ["backward", "forward"]


def test_values_are_followed_through_views_and_writes():
    def run():
        x = torch.arange(6.0).view(2, 3)
        y = x.t() * 2
        y.add_(1)
        return y.sum()

    stream = recorded(run)
    total = stream.ops[-1]
    assert total.name == "sum" and stream.ops[stream.made_by[total.reads[0]]].name == "add_"
    assert torch.equal(stream.values[total.gives[0]], (torch.arange(6.0) * 2 + 1).sum())


def test_a_collective_has_its_ranks_and_the_value_that_it_left():
    def body():
        recorder = OpRecorder(lambda: True)
        with recorder:
            x = torch.full((2,), float(dist.get_rank() + 1))
            dist.all_reduce(x)
            parts = [torch.empty(2) for _ in range(2)]
            dist.all_gather(parts, x)
            parts[0] + parts[1]
        stream = recorder.finish()
        reduced, gathered = (next(op for op in stream.ops if op.name == name) for name in ("all_reduce", "all_gather"))
        last = stream.ops[-1]
        return reduced.group, [stream.values[i].tolist() for i in reduced.gives], gathered.gives == last.reads

    assert lt.run(body, ranks=2).values == (((0, 1), [[3.0, 3.0]], True),) * 2


def test_a_view_of_what_a_collective_is_writing_has_the_value_that_it_left():
    def body():
        recorder = OpRecorder(lambda: True)
        with recorder:
            x = torch.full((2,), float(dist.get_rank() + 1))
            work = dist.all_reduce(x, async_op=True)
            first, _ = x.split(1)
            work.wait()
            first.mul(2)
        stream = recorder.finish()
        (split,) = [op for op in stream.ops if op.name == "split"]
        return [stream.values[i].tolist() for i in split.gives]

    assert lt.run(body, ranks=2).values == ([[3.0], [3.0]],) * 2


def test_the_region_of_a_value_is_where_it_is_computed():
    calls = {(1, "layers.0"): 1, (1, ""): 1}
    assert region_of(Key(1, "output", "layers.0.up"), calls) == Region(1, FORWARD, "layers.0.up")
    assert region_of(Key(1, "input", "layers.0.up"), calls) == Region(1, FORWARD, "layers.0")
    assert region_of(Key(1, "input", "layers.0"), calls) == Region(1, FORWARD, "")
    assert region_of(Key(1, IN_STEP, "w"), calls).phase == "update"


def test_the_lines_that_set_a_parameter_are_found_by_its_name():
    model, lines = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), SetupLines()
    with lines.watched():
        model[1].weight.register_hook(lambda grad: grad)
        model[0].bias.data.zero_()
        model[1] = nn.utils.skip_init(nn.Linear, 2, 2)
        model.parameters()
    found = lines.by_name(model, plain_name)
    assert "test_op_stream.py" in found["1"][0] and "test_op_stream.py" in found["0.bias"][0]
    assert setup_lines_of(found, "1.weight") == found["1"]
