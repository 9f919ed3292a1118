"""A program as a line, and the same program of the line again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.errors import BadPlacement
from strategies.mesh_draws import draw_programs
from strategies.programs import Program
from strategies.replay import describe, parse_program
from strategies.sources import claims
from strategies.truth import tell
from tests.strategies.cases import numbers, sample

ADD = sample("add.Tensor", numbers(7, 6), numbers(7, 6, seed=1))
PROGRAM = Program(ADD, (2, 3), ((Shard(0), Replicate()), (Partial(), Replicate())), seed=7, draw=3)


def test_a_line_says_op_mesh_seed_draw_and_every_placement():
    assert describe(PROGRAM) == "aten.add.Tensor on (2,3), seed 7 draw 3: (S(0), R), (P(sum), R)"
    more = replace(PROGRAM, flattened=True, then="again(x0, [1], alpha=2)")
    assert describe(more) == (
        "aten.add.Tensor on (2,3), flattened, seed 7 draw 3: (S(0), R), (P(sum), R), then again(x0, [1], alpha=2)"
    )


def test_one_axis_is_written_as_a_tuple_of_one():
    alone = Program(ADD, (2,), ((Shard(0),), (Replicate(),)))
    assert describe(alone) == "aten.add.Tensor on (2,), seed 0 draw 0: (S(0)), (R)"
    assert parse_program(describe(alone), ADD) == alone


@pytest.mark.parametrize("then", ["", "sum 0", "again(x0, (1, 2))", "grad S(0)"])
def test_a_line_makes_the_same_program(then):
    claimed = {size: claims(ADD, size, tell(ADD).raw) for size in (2, 3)}
    for mesh in ((2, 2), (2, 3), (2, 2, 2)):
        for program in draw_programs(ADD, claimed, mesh, seed=4, budget=16):
            asked = replace(program, then=then)
            assert parse_program(describe(asked), ADD) == asked


@pytest.mark.parametrize("line", [
    "", "aten.add.Tensor", "aten.add.Tensor on (2,3): (R, R), (R, R)", describe(PROGRAM) + ", (R",
    describe(PROGRAM).replace("add", "mul"), describe(PROGRAM).replace(", (P(sum), R)", ""),
    describe(PROGRAM).replace("(S(0), R)", "(S(0))"), describe(PROGRAM).replace("P(sum)", "P(median)"),
])  # fmt: skip
def test_a_line_that_describes_no_program_of_the_sample_is_refused(line):
    with pytest.raises(BadPlacement):
        parse_program(line, ADD)
