import pytest
import torch

from strategies.model.code_text import tensor_text
from strategies.programs.run.rank_run import ProgramRankResult
from strategies.programs.run.verdict import rank_diagram
from tests.strategies.cases import probe, rule, sample

ONE = sample("neg.default", torch.tensor([1.0, 2.0, 3.0, 4.0]))
NEG = probe(ONE).case(rule(ONE, "S(0) -> S(0)"), 0)


@pytest.mark.parametrize(("value", "shown"), [
    (torch.tensor([[1.5, -2.0]]), "[1.5, -2] of shape (1, 2)"),
    (torch.tensor(True), "[True] of shape ()"),
    (torch.arange(30), f"[{', '.join(map(str, range(24)))}, ...] of shape (30,)"),
    (torch.tensor([1 + 2j]), "[1+2j] of shape (1,)"),
    (torch.empty(0, 3), "[] of shape (0, 3)"),
    (None, "None"),
], ids=["float", "bool", "long", "complex", "empty", "none"])  # fmt: skip
def test_a_tensor_is_shown_on_one_line(value, shown):
    assert tensor_text(value) == shown


def test_a_picture_of_a_case_that_could_not_be_assembled_says_so():
    lone = ProgramRankResult("full_tensor", ("no", "no"), ("S(0)",), ((2,),), (torch.tensor([1.0, 2.0]),))
    assert "  together  could not be assembled" in rank_diagram(NEG, [lone, lone]).splitlines()


def test_a_picture_of_a_case_that_raised_shows_what_went_in_and_what_should_come_out():
    shown = rank_diagram(NEG, [ProgramRankResult("op", ("no", ""))] * 2).splitlines()
    assert [line.split()[0] for line in shown] == ["argument", "rank", "rank", "the"]
