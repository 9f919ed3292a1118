"""What of one device a value of the ranks' op streams is, by search; and what an op that only moves elements inherits."""

import warnings

import torch

from localtensor.testing.compare import op_values
from localtensor.testing.compare.divergence import Sides
from localtensor.testing.compare.op_stream import Op, OpStream
from localtensor.testing.compare.op_values import OpValues
from localtensor.testing.compare.watch import Key, Watch

WHOLE = torch.arange(8.0)


def values(*of_ranks):
    """A value on each of two ranks, which an op reads to give it in another shape."""
    streams = [
        OpStream(ops=[Op("view", 0, (0,), (1,), ())], values=[x, x.view(1, -1)], made_by={1: 0}) for x in of_ranks
    ]
    sides = Sides(Watch(), {}, (Watch(), Watch()), {"tp": 2}, ())
    total = float(WHOLE.sum())
    return OpValues(sides, Key(0, "output", "up"), streams, [(WHOLE, None, total, total)])


def test_a_value_is_a_shard_a_pending_sum_or_nothing_of_one_device():
    assert str(values(*WHOLE.chunk(2)).match((0, 0)).layout) == "S(0)"
    pending = values(WHOLE * 0.25, WHOLE * 0.75)
    assert str(pending.match((0, 0)).layout) == "P(sum)" and pending.is_pending((0, 0))
    assert values(WHOLE + 1, WHOLE - 2).match((0, 0)) is None


def test_another_shape_is_what_it_was_made_of():
    found = values(*WHOLE.chunk(2))
    assert found.own_match((1, 1)) is None and found.match((1, 1)).reshaped
    assert found.made((1, 1))[1].name == "view" and found.likely_layout((1, 1)) is None


def test_the_axes_of_a_group_are_those_along_which_its_ranks_differ():
    found = values(WHOLE, WHOLE)
    assert found.axes_of((0, 1)) == {0} and found.axes_of((1,)) == set()
    assert found.agree((0, 0), [0]) and not values(WHOLE, WHOLE + 1).agree((0, 0), [0])


def test_both_parts_of_complex_numbers_count():
    x = torch.tensor([1 + 2j, -3j]).conj()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(op_values._numbers(x).sum()) == 1 - 2 + 3
    assert op_values._numbers(torch.tensor([1, 2])).dtype == torch.float64
