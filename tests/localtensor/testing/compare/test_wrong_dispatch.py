"""Where a call on DTensors gives what one device has not, DTensor's own rule is tested on that very call."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import localtensor as lt
from localtensor.errors import Diverged
from localtensor.testing.compare.op_stream import Dispatch, Op, OpStream, ValueAt
from localtensor.testing.compare.suspects import wrong_dispatch
from strategies.torch_api.dtensor import registrations_restored


@torch.library.custom_op("compare_tests::running", mutates_args=())
def running(x: torch.Tensor) -> torch.Tensor:
    """The running sum along dim 1."""
    return x.cumsum(1)


@running.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.fixture
def wrong_rule():
    with registrations_restored():

        @register_sharding(torch.ops.compare_tests.running.default)
        def rule(x):
            return [([Replicate()], [Replicate()]), ([Shard(1)], [Shard(1)])]

        yield


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return torch.ops.compare_tests.running(self.up(x)) * 2


class SumsOfShards(Sums):
    """The running sum of a DTensor that is sharded along the mesh axis `tp`; `times` is a fault of the program's own."""

    def __init__(self, whole, mesh, placement, times):
        super().__init__()
        self.up, self.mesh, self.placement, self.times = whole.up, mesh, placement, times

    def forward(self, x):
        whole = DTensor.from_local(self.up(x), self.mesh, [Replicate()], run_check=False)
        return (
            torch.ops.compare_tests.running(whole.redistribute(placements=[self.placement])).full_tensor() * self.times
        )


def because(placement, mesh, times=2):
    with pytest.raises(Diverged) as told:
        lt.compare(
            Sums, lambda model, mesh: SumsOfShards(model, mesh["tp"], placement, times), lambda: torch.randn(4, 8),
            mesh=mesh,
        )  # fmt: skip
    print(told.value)
    return told.value.comparison


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp", "dp and tp"])
def test_a_wrong_rule_is_named_with_its_function(wrong_rule, mesh):
    done = because(Shard(1), mesh)
    assert done.divergence.what.startswith("DTensor is wrong for compare_tests.running.default of S(1), from ")
    assert "test_wrong_dispatch.py" in done.divergence.what and "differs at [0, 4]" in done.divergence.what
    assert done.calls[0].startswith("running, test_wrong_dispatch.py:")


def test_a_right_rule_is_not_blamed(wrong_rule):
    assert "DTensor" not in because(Replicate(), {"tp": 2}, times=3).divergence.what


def said_of(placement, ranks, numbers=()):
    """What is said of `running` on pieces that two ranks hold with this placement, the ranks of its mesh being these."""
    x = torch.arange(8.0).reshape(2, 4)
    made = Dispatch(torch.ops.compare_tests.running.default, (ValueAt(0),), {}, ((placement,),), ranks, (2,))
    op = Op("running", 0, (0,), (), (), dispatch=made)
    held = [SimpleNamespace(ops=OpStream([op], [piece])) for piece in x.chunk(2, 1)]
    return wrong_dispatch(SimpleNamespace(ranks=held, numbers=numbers), op)


def test_a_call_that_cannot_be_made_again_says_nothing(wrong_rule):
    assert said_of(Shard(1), (0, 1)).startswith("DTensor is wrong for compare_tests.running.default of S(1)")
    assert said_of(Shard(1), (4, 6), numbers=(4, 6)) == said_of(Shard(1), (0, 1))
    assert said_of(Partial("max"), (0, 1)) == ""  # not put together
    assert said_of(Shard(1), (0, 5)) == said_of(Shard(1), (0, 1), numbers=(4, 6)) == ""  # ranks that are not compared
