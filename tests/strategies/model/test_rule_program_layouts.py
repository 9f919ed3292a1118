"""Layouts as they are written, and on fewer axes; and the pieces that ranks are given."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

from localtensor.errors import BadPlacement
from localtensor.layout.spec import parse, shorts
from strategies.model.rule import Program, layout_on_axes, read_layout
from strategies.programs.run.local_inputs import local_inputs_of
from tests.strategies.cases import sample


def test_what_has_a_meaning_is_what_the_ranks_are_given():
    x = torch.arange(7.0)
    (held,) = local_inputs_of(Program(sample("relu.default", x), (2, 3), ((parse("SS(0,3)"), Shard(0)),)))
    assert [piece.tolist() for piece in held] == [[0, 1], [3, 4], [6], [2], [5], []]


def test_a_layout_on_fewer_axes_keeps_the_order_of_cuts():
    whole = read_layout("(SS(0,4), SS(0,2), S(0))")  # the last axis first, then the middle one
    assert shorts(layout_on_axes(whole, (2, 2, 2), (0, 1), (2, 2))) == "SS(0,2), S(0)"
    assert shorts(layout_on_axes(whole, (2, 2, 2), (0, 2), (2, 3))) == "SS(0,3), S(0)"
    assert shorts(layout_on_axes(whole, (2, 2, 2), (1,), (2,))) == "S(0)"


def test_on_fewer_axes_what_is_no_shard_stays():
    assert shorts(layout_on_axes(read_layout("(P(sum), S(0), R)"), (2, 2, 2), (0, 2), (2, 2))) == "P(sum), R"
    assert shorts(layout_on_axes(read_layout("(SS(0,4), R)"), (2, 2), (0,), (2,))) == "SS(0,4)"


@pytest.mark.parametrize("text", ["S(0)", "R", "(S(0), R)", "(SS(1,2), P(avg), R)", "(R)"])
def test_a_layout_is_read_as_it_is_written(text):
    assert shorts(read_layout(text)) == text.removeprefix("(").removesuffix(")" if text.startswith("(") else "")


def test_what_is_no_layout_is_refused():
    with pytest.raises(BadPlacement, match="no placement"):
        read_layout("(S(0), -)")
