import pytest

from tests.strategies.cases import numbers, sample
from tests.strategies.programs_of import on

ADD = sample("add.Tensor", numbers(4), numbers(4))


@pytest.mark.parametrize(("program", "shown"), [
    (on(ADD, "S(0), R"), "aten.add.Tensor on (2,): S(0), R"),
    (on(ADD, "S(0)/R, R", (2, 2), "sum"), "aten.add.Tensor on (2, 2): (S(0), R), R, then sum"),
    (on(ADD, "R, P(sum)/P(avg)", (2, 3), flattened=True),
     "aten.add.Tensor on (2, 3): R, (P(sum), P(avg)), a flattened submesh present"),
])  # fmt: skip
def test_a_program_is_one_line(program, shown):
    assert str(program) == shown


def test_the_ranks_of_a_mesh_are_counted():
    assert on(ADD, "R, R", (2, 3, 2)).ranks == 12


def test_programs_are_values():
    assert on(ADD, "S(0), R") == on(ADD, "S(0), R")
    assert on(ADD, "S(0), R") != on(ADD, "S(0), R", then="sum")
