"""A rule as text and back."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.errors import BadPlacement
from strategies.validation.assertions.rule import AssertedRule, NotARule, read_layouts, shard_dim

TEXTS = ["S(0), R -> S(0)", "P(sum) -> P(max), -", "SS(0,2), R -> SS(1,3)", "R -> -", "R ->"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_rule_prints_as_it_is_read(text):
    rule = AssertedRule.read(text)
    assert str(rule) == text
    assert eval(repr(rule)) == rule


def test_it_is_made_of_torchs_placements():
    assert AssertedRule.read("S(1), P(avg)->R,-") == AssertedRule((Shard(1), Partial("avg")), (Replicate(), None))
    assert AssertedRule.read(((Shard(1), "P(avg)"), (Replicate(), "-"))) == AssertedRule.read("S(1), P(avg) -> R, -")


@pytest.mark.parametrize(
    "rule", ["", "R", "R -> R -> R", "R R -> R", "R,, R -> R", "S(0 -> R", None, (), ("R",), ("R", 3)]
)
def test_what_has_no_two_sides_is_refused(rule):
    with pytest.raises((NotARule, BadPlacement)):
        AssertedRule.read(rule)


def test_several_tensors_on_one_axis_or_on_several():
    assert read_layouts("S(0), R", "c", "a") == ((Shard(0),), (Replicate(),))
    assert read_layouts([Shard(0), "R"], "c", "a") == ((Shard(0),), (Replicate(),))
    assert read_layouts([("S(0)", "R"), "P(sum), S(1)"], "c", "a") == ((Shard(0), Replicate()), (Partial(), Shard(1)))


@pytest.mark.parametrize("side", [[], [("S(0)", "R"), "R"], "-", 4, [()]])
def test_tensors_on_different_numbers_of_axes_are_refused(side):
    with pytest.raises(NotARule, match="call: placed: "):
        read_layouts(side, "call", "placed")


def test_only_shards_cut():
    assert [shard_dim(p) for p in AssertedRule.read("S(1), SS(0,2), R, P(sum) -> -").inputs] == [1, 0, None, None]
