"""Accounts of ranks against the oracle, without any run."""

from dataclasses import replace

import pytest
import torch

from strategies.model.oracle import OracleResult, run_oracle
from strategies.programs.run.program_oracle import oracle_of_program
from strategies.programs.run.rank_run import ProgramRankResult
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import (
    Confirmation,
    confirmation_of,
    is_claimed,
    layout_or_none,
    program_rank_diagram,
    raises,
    rank_diagram,
    with_refusal,
)
from strategies.sweep.report.html_pictures import parse_picture
from strategies.validation.finding import refused_program
from tests.strategies.cases import numbers, placements, probe, rule, sample
from tests.strategies.programs_of import on

X = numbers(4, 2)
ORACLE = run_oracle(sample("neg.default", X))
RIGHT = [-X[:2, :1], -X[:2, 1:], -X[2:, :1], -X[2:, 1:]]


def validated(pieces, placement="(S(0), S(1))", whole=None, failed="", errors=()):
    whole = -X if whole is None else whole
    return [
        ProgramRankResult(failed, errors, (placement,), (tuple(p.shape),), (p,), () if failed else (whole,))
        for p in pieces
    ]


def test_right_pieces_on_two_axes_are_right():
    found = confirmation_of(ORACLE, (2, 2), validated(RIGHT))
    assert (found.wrong, found.note) == ("", "DTensor's own run is right")


def test_a_piece_of_the_wrong_shape_is_reported_with_both_placements():
    found = confirmation_of(ORACLE, (2, 2), validated([*RIGHT[:3], -X[2:]]))
    assert found.wrong == "rank 3 holds shape (2, 2), (S(0), S(1)) of (4, 2) is (2, 1)"


def test_each_rank_is_asked_for_the_shape_of_its_own_piece():
    x = numbers(5, 2)
    oracle = run_oracle(sample("neg.default", x))
    pieces = validated([-x[:3], -x[3:]], "S(0)", whole=-x)
    assert confirmation_of(oracle, (2,), pieces).wrong == ""
    assert confirmation_of(oracle, (2,), pieces[::-1]).wrong == "rank 0 holds shape (2, 2), S(0) of (5, 2) is (3, 2)"


def test_a_rank_with_placements_that_have_no_arithmetic_here_does_not_hide_the_next():
    ranks = validated(RIGHT[:1], "_MaskPartial(0)") + validated([-X[2:]], "(S(0), S(1))")
    assert confirmation_of(ORACLE, (1, 2), ranks).wrong == "rank 1 holds shape (2, 2), (S(0), S(1)) of (4, 2) is (4, 1)"


def test_a_wrong_whole_is_reported_with_its_placements():
    found = confirmation_of(ORACLE, (2, 2), validated(RIGHT, whole=X))
    assert found.wrong.startswith("rank 0: result gathered from (S(0), S(1)) ")
    assert "(8 of 8 elements differ)" in found.wrong


@pytest.mark.parametrize(("x", "each", "wrong"), [
    (torch.tensor(6.0), (6.0, 6.0), ""),
    (torch.tensor(6.0), (1.0, 5.0), "rank 0: result is no tensor: got 1.0, expected 6.0"),
    (torch.tensor(6.0), (6.0, 6.0000005), ""),  # the ranks may have added in another order
    (torch.tensor(6.0), (6.0, 6.1), "rank 1: result is no tensor: got 6.1, expected 6.0"),
    (torch.tensor(torch.nan), (torch.nan, torch.nan), ""),
    (torch.tensor(True), (True, False), "rank 1: result is no tensor: got False, expected True"),
    (torch.tensor(True), (True, 1), "rank 1: result is no tensor: got 1, expected True"),
    (torch.tensor(7), (7, 8), "rank 1: result is no tensor: got 8, expected 7"),
])  # fmt: skip
def test_numbers_that_the_ranks_return_are_compared(x, each, wrong):
    oracle = run_oracle(sample("_local_scalar_dense.default", x))
    ranks = [ProgramRankResult("", (), ("-",), (None,), (number,), (number,)) for number in each]
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    assert confirmation_of(oracle, (2,), ranks, coarse=eps).wrong == wrong


TIED, PAIR = "second.weight is first.weight", "no parameter is shared"
FLAGS = ", ".join(f"layers.{i}.weight" for i in range(20))


@pytest.mark.parametrize(("want", "got", "slack", "wrong"), [
    (TIED, TIED, 0.0, ""),
    (TIED, PAIR, 0.0, f"rank 1: result is '{PAIR}', expected '{TIED}'"),
    (TIED, 2, 0.0, f"rank 1: result is '2', expected '{TIED}'"),
    (TIED, PAIR, None, ""),  # another text with any noise
    (FLAGS, FLAGS.replace("9.w", "9.b"), 0.0, "rank 1: result is '...layers.8.weight, layers.9.beight, "),
])  # fmt: skip
def test_texts_are_compared_and_the_place_where_they_differ_is_in_the_reason(want, got, slack, wrong):
    oracle = OracleResult((), (want,), (None if slack is None else torch.tensor(slack),), want)
    ranks = [ProgramRankResult("", (), ("-",), (None,), (text,), (text,)) for text in (want, got)]
    found = confirmation_of(oracle, (2,), ranks)
    assert found.wrong.startswith(wrong) and bool(found.wrong) == bool(wrong) and len(found.wrong) < 260
    assert (found.got, found.want) == ((repr(got), repr(want)) if wrong else ("", ""))


def test_one_rank_that_raises_is_wrong_and_all_ranks_are_not():
    lone = [ProgramRankResult("op", ("", "ValueError: no"))] * 2
    assert confirmation_of(ORACLE, (2,), lone).wrong.startswith("rank 1 raises ValueError: no; its peers go on")
    every = confirmation_of(ORACLE, (2,), [ProgramRankResult("op", ("ValueError: no",) * 2)] * 2)
    assert (every.wrong, every.refused) == ("", "ValueError: no")


def test_ranks_that_have_the_same_whole_are_looked_at_once_and_another_is_reported():
    ranks = validated(RIGHT)
    ranks[2] = validated(RIGHT[2:3], whole=-X + 1)[0]
    assert confirmation_of(ORACLE, (2, 2), ranks).wrong.startswith("rank 2: result gathered")


def test_large_parts_on_any_axis_are_given_room():
    off = -X + 1e-6
    parts = [torch.full((4, 2), sign * 1e8, dtype=torch.float64) for sign in (1, -1, 1, -1)]
    assert confirmation_of(ORACLE, (2, 2), validated(parts, "(R, P(sum))", whole=off)).wrong == ""
    assert confirmation_of(ORACLE, (2, 2), validated([-X] * 4, "(R, R)", whole=off)).wrong


def test_parts_that_come_of_coarser_numbers_are_given_the_room_of_those():
    off = -X + 1e-6
    parts = [torch.full((4, 2), 10.0, dtype=torch.float64)] * 4
    ranks = validated(parts, "(R, P(sum))", whole=off)
    assert confirmation_of(ORACLE, (2, 2), ranks).wrong
    assert confirmation_of(ORACLE, (2, 2), ranks, coarse=torch.finfo(torch.float32).eps).wrong == ""
    whole = validated([-X] * 4, "(R, R)", whole=off)
    assert confirmation_of(
        ORACLE, (2, 2), whole, coarse=torch.finfo(torch.float32).eps
    ).wrong  # nothing was added up there


def test_what_was_claimed_is_compared_with_what_it_took():
    note = confirmation_of(ORACLE, (2,), validated([-X] * 2, "R"), ["S(0)"]).note
    assert note == "DTensor does not follow it: it gives R, which is right"


@pytest.mark.parametrize(("text", "read"), [
    ("S(0)", "S(0)"), ("(S(0), S(1))", "S(0), S(1)"), ("(SS(0,2), R)", None), ("(R, P(avg))", "R, P(avg)"),
    ("-", None), ("P(norm)", None), ("(R, P(mask))", None),
])  # fmt: skip
def test_placements_are_read_back(text, read):
    if read is None and not text.startswith("(SS"):
        assert layout_or_none(text) is None
    else:
        assert layout_or_none(text) == (placements(read) if read else layout_or_none("(SS(0,2), R)"))


def test_none_where_a_tensor_should_be_is_wrong():
    found = confirmation_of(ORACLE, (2,), [ProgramRankResult("", (), ("-",), (None,), (None,), (None,))] * 2)
    assert "is None, expected a tensor" in found.wrong


def test_what_a_float_beyond_int64_becomes_is_not_compared():
    least = torch.iinfo(torch.int64).min
    oracle = run_oracle(sample("neg.default", torch.tensor([5, 7])))
    for value, wrong in ((least, False), (least + 1, True)):
        whole = torch.tensor([-5, value])
        account = [ProgramRankResult("", (), ("R",), ((2,),), (whole,), (whole,)) for _ in range(2)]
        assert bool(confirmation_of(oracle, (2,), account).wrong) is wrong


ONE = sample("neg.default", torch.tensor([1.0, 2.0, 3.0, 4.0]))
NEG = probe(ONE).case(rule(ONE, "S(0) -> S(0)"), 0)


def test_a_picture_of_a_case_that_could_not_be_assembled_says_so():
    lone = ProgramRankResult("full_tensor", ("no", "no"), ("S(0)",), ((2,),), (torch.tensor([1.0, 2.0]),))
    assert "  together  could not be assembled" in rank_diagram(NEG, [lone, lone]).splitlines()


def test_a_picture_of_a_case_that_raised_shows_what_went_in_and_what_should_come_out():
    shown = rank_diagram(NEG, [ProgramRankResult("op", ("no", ""))] * 2).splitlines()
    assert [line.split()[0] for line in shown] == ["argument", "rank", "rank", "the"]


def test_a_diagram_has_what_the_steps_make_between_arguments_and_results():
    program = on(sample("neg.default", numbers(2)), "S(0)", then="grad")
    (found,) = run_simulated_programs([program])
    lines = program_rank_diagram(program, oracle_of_program(program), found.rank_results).splitlines()
    heads = [line for line in lines if not line.startswith("  ")]
    assert heads[:2] == ["argument 0, S(0)", "gradient 1, R"] and heads[2].startswith("result 0, ")
    assert lines[4] == "  whole   [0.955336, -0.406147] of shape (2,)"
    arguments = [part for part in parse_picture("\n".join(lines)) if part.what == "gradient"]
    assert [(box.who, box.shape) for part in arguments for box in part.boxes] == [("whole", (2,))]


@pytest.mark.parametrize(("reason", "raised"), [
    ("rank 1 raises RuntimeError: no", True), ("DTensor refuses this call on every rank: oh", True), ("hangs: rank 0 waits", True),
    ("stops: KindMismatch", True), ("rank 1 dies by a signal", True), ("no rank returns", True), ("DTensor cannot assemble the result", True),
    ("rank 0: result gathered from R differs at [0]: got 1, expected 2", False), ("rank 0 holds shape (2,), R of (4,) is (4,)", False),
    ("the result hangs by a thread", False),
])  # fmt: skip
def test_an_error_a_hang_and_a_death_are_not_silent(reason, raised):
    assert raises(reason) is raised


@pytest.mark.parametrize(("error", "claimed"), [
    ("RuntimeError: shape '[2]' is invalid", True), ("NotImplementedError: Operator aten.roll.default has no strategy", False),
    ("RuntimeError: aten.nonzero.default", False), ("RuntimeError: as_strided not supported with DTensor", False),
])  # fmt: skip
def test_an_error_of_an_op_without_a_rule_is_no_refusal(error, claimed):
    assert is_claimed(error) is claimed


@pytest.mark.parametrize(("error", "claimed"), [
    ("RuntimeError: Dilation must be 1 for tensor parallel convolution.", False),
    ("RuntimeError: Stride must be 1 when there is padding for tensor parallel convolution.", False),
    ("RuntimeError: _scaled_mm on DTensors doesn't support scale_result", False),
    ("RuntimeError: redistribute from S(1) to P(product) not supported yet", True),
    ("RuntimeError: aten.add.Tensor got mixed torch.Tensor and DTensor", True),
])  # fmt: skip
def test_what_dtensor_says_that_it_does_not_support_is_no_refusal(error, claimed):
    assert is_claimed(error) is claimed


def test_a_view_before_which_dtensor_asks_for_a_redistribution_is_no_refusal():
    error = "RuntimeError: Cannot flatten unevenly sharded tensor: dimension 0. Please redistribute the tensor before this operation."
    outcome = Confirmation("", "DTensor refuses this call", refused=error)
    view, kron = sample("view.default", numbers(3, 2), [6]), sample("kron.default", numbers(3), numbers(3))
    for call, then, refused in ((view, "", False), (view, "grad", True), (kron, "", True)):
        candidate = refused_program(on(call, ", ".join(["S(0)"] * len(call.tensors)), then=then), error)
        assert bool(with_refusal(candidate, outcome, suspected=False).wrong) is refused
    other = replace(outcome, refused="RuntimeError: no")
    assert with_refusal(refused_program(on(view, "S(0)"), "no"), other, suspected=False).wrong
