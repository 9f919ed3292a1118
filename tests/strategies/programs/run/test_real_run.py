"""Before a real_runs of real gloo processes, started once for this file."""

import re
from pathlib import Path

import pytest
import torch

from localtensor._util import pickling
from localtensor._util.events import Died, Raised, Returned, Waiting
from localtensor.errors import BadPlacement
from strategies.model.oracle import run_oracle
from strategies.model.rule import overload
from strategies.programs.run import real_run
from strategies.programs.run.program_oracle import oracle_of_program
from strategies.programs.run.rank_run import ProgramRankResult
from strategies.programs.run.real_run import (
    Confirmation,
    ProgramRealRuns,
    case_confirmation,
    case_tasks,
    run_simulated_programs,
)
from strategies.programs.run.verdict import program_rank_diagram, rank_diagram
from strategies.torch_api import rank_runs
from strategies.torch_api.rank_runs import CALL_SECONDS
from strategies.validation.sources.dtensor import claims
from tests.strategies import planted_ops
from tests.strategies.cases import numbers, probe, rule, sample
from tests.strategies.planted_ops import planted
from tests.strategies.programs_of import on
from tests.strategies.wrong_here import CUMPROD, if_cumprod_is_wrong

HOME = (planted_ops.__name__, str(Path(__file__).parents[4]))
X = numbers(4, 6)


@pytest.fixture(scope="module")
def real_runs():
    with ProgramRealRuns("gloo", home=HOME) as real_runs:
        yield real_runs


def case_of(one, line, ranks=2, draw=0):
    return probe(one, ranks).case(rule(one, line), draw)


def assert_wrong(found, reason):
    assert re.fullmatch(reason, found.wrong, re.DOTALL), found
    assert (found.note, found.failed) == ("", "")


def assert_cleared(found, note):
    assert (found.wrong, found.failed) == ("", "")
    assert re.fullmatch(note, found.note), found


# Wrong rules are confirmed.


@if_cumprod_is_wrong
def test_a_wrong_rule_of_torchs_own_is_confirmed(real_runs):
    one = CUMPROD
    found = real_runs.confirm(case_of(one, "S(1) -> S(1)"))
    assert_wrong(
        found, r"rank 0: result gathered from S\(1\) differs at \[0, 2\]: got 3, expected 6 \(2 of 4 elements differ\)"
    )
    assert (found.got, found.want) == ("[1, 2, 3, 12] of shape (1, 4)", "[1, 2, 6, 24] of shape (1, 4)")


@if_cumprod_is_wrong
def test_the_picture_shows_which_ranks_hold_what_before_and_after(real_runs):
    case = case_of(CUMPROD, "S(1) -> S(1)")
    assert rank_diagram(case, real_runs.confirm(case).rank_results).splitlines() == [
        "argument 0, S(1)",
        "  rank 0  [1, 2] of shape (1, 2)",
        "  rank 1  [3, 4] of shape (1, 2)",
        "result 0, S(1)",
        "  rank 0  [1, 2] of shape (1, 2)",
        "  rank 1  [3, 12] of shape (1, 2)",
        "  together  [1, 2, 3, 12] of shape (1, 4)",
        "the op gives [1, 2, 6, 24] of shape (1, 4)",
    ]


def test_a_rank_that_raises_while_its_peers_do_not_is_reported_as_such(real_runs):
    found = real_runs.confirm(case_of(planted("one_raises", X), "S(0) -> S(0)"))
    assert_wrong(
        found, "rank 1 raises ValueError: not on this rank; its peers go on and wait for it at the next collective"
    )


def test_an_empty_shard_that_torch_cannot_reduce_raises_on_its_rank_alone(real_runs):
    found = real_runs.confirm(case_of(sample("amax.default", numbers(4, 3), [0]), "S(0) -> P(max)", ranks=3))
    assert_wrong(found, "rank 2 raises IndexError: amax.*; its peers go on .*")


def test_a_rank_that_holds_another_shape_than_its_placement_says_is_wrong(real_runs):
    found = real_runs.confirm(case_of(planted("one_grows", X), "S(0) -> S(0)"))
    assert_wrong(found, r"rank 1 holds shape \(3, 6\), S\(0\) of \(4, 6\) is \(2, 6\)")


def test_a_process_that_dies_is_wrong_and_the_next_case_is_run(real_runs):
    found = real_runs.confirm(case_of(planted("one_dies", X), "S(0) -> S(0)"))
    assert_wrong(found, r"the process of rank 1 dies \(exit code 7\)")
    assert_cleared(real_runs.confirm(case_of(sample("neg.default", X), "S(0) -> S(0)")), "DTensor's own run is right")


# What raises is run once more in fresh processes.


def test_a_call_that_raises_only_after_others_in_the_same_processes_is_not_refused(real_runs):
    real_runs.confirm(case_of(planted("spoils", X), "S(0) -> S(0)"))
    found = real_runs.confirm(case_of(planted("spoilt", X), "S(0) -> S(0)"))
    why = "only in processes that have run other calls: DTensor refuses this call on every rank: ValueError: spoilt"
    assert_cleared(found, why)
    assert found.after_others and not found.refused
    assert not real_runs.confirm(case_of(planted("spoilt", X), "S(0) -> S(0)")).after_others  # the processes are new


def test_what_partial_inputs_add_up_to_may_leave_the_domain_of_the_op(real_runs):
    """Parts of 1.0 add up to 1.0000000000000002, a probability that torch refuses on one device, too."""
    certain = sample("bernoulli.default", torch.ones(64, dtype=torch.float64))
    assert_cleared(
        real_runs.confirm_program(on(certain, "P(sum)")),
        "plain torch itself refuses what the ranks' partial inputs add up to",
    )
    assert real_runs.confirm_program(on(planted("unwilling", X), "P(sum)")).refused == "ValueError: never on a rank"


def test_a_call_that_raises_in_fresh_processes_too_is_refused(real_runs):
    real_runs.confirm(case_of(planted("remembered", X), "S(0) -> S(0)"))
    before = real_runs._pool.pids
    found = real_runs.confirm(case_of(planted("unwilling", X), "S(0) -> S(0)"))
    assert (found.refused, found.after_others) == ("ValueError: never on a rank", False)
    assert not set(before) & set(real_runs._pool.pids)


def test_an_equal_call_before_is_part_of_a_program_that_raises_in_fresh_processes(real_runs):
    one = planted("once", X)
    assert not real_runs.confirm_program(on(one, "S(0)")).refused
    assert real_runs.confirm_program(on(one, "S(0)")).after_others
    assert real_runs.confirm_program(on(one, "S(0)", then="again(x0)")).refused == "ValueError: once only"


def test_a_call_of_which_a_probe_says_that_a_rank_raises_begins_in_fresh_processes(real_runs, monkeypatch):
    real_runs.confirm(case_of(planted("remembered", X), "S(0) -> S(0)"))
    before, runs = real_runs._pool.pids, []
    real = real_runs.run
    monkeypatch.setattr(real_runs, "run", lambda *args: runs.append(args) or real(*args))
    found = real_runs.confirm(case_of(planted("unwilling", X), "S(0) -> S(0)"), expected="rank 0 raises ValueError")
    assert found.refused == "ValueError: never on a rank" and len(runs) == 1
    assert not set(before) & set(real_runs._pool.pids)


def test_where_no_rank_raises_at_first_as_expected_an_equal_call_before_still_counts(real_runs):
    real_runs.confirm(case_of(planted("remembered", X), "S(0) -> S(0)"))
    found = real_runs.confirm_program(on(planted("once", X), "S(0)"), expected="every rank raises ValueError")
    assert found.after_others and not found.refused


@pytest.mark.parametrize("expected", ["", "no rank returns within 8 s of processor time from f (torch/x.py:3); the op"])
def test_a_call_from_which_simulated_ranks_did_not_return_gets_less_time(real_runs, monkeypatch, expected):
    sent = []
    monkeypatch.setattr(real_runs, "run", lambda play, parts: sent.extend(part.seconds for part in parts) or [])
    monkeypatch.setattr(real_run, "case_confirmation", lambda case, outcomes: Confirmation(""))
    real_runs.confirm(case_of(sample("neg.default", X), "S(0) -> S(0)"), expected=expected)
    assert sent == [real_run.SECONDS_AFTER_SIMULATION if expected else CALL_SECONDS] * 2


def test_nothing_hangs(real_runs, monkeypatch):
    right = case_of(sample("neg.default", X), "S(0) -> S(0)")
    real_runs.confirm(right)  # so that there is a pool
    monkeypatch.setattr(real_runs._pool, "timeout", 1.0)
    found = real_runs.confirm(case_of(planted("one_hangs", X), "S(0) -> S(0)"))
    assert_wrong(found, r"hangs: rank 0 waits at .*; rank 1 waits at .*")  # on a busy machine, before it came to wait()
    monkeypatch.undo()
    assert_cleared(real_runs.confirm(right), "DTensor's own run is right")


# Suspects that DTensor does not follow, or gets right, are cleared.


def test_a_suspect_that_dtensor_does_not_follow_is_cleared_with_a_note(real_runs):
    one = sample("cumsum.default", X, 0)
    found = real_runs.confirm(case_of(one, "S(0) -> S(0)"))
    assert_cleared(found, r"DTensor does not follow it: it gives R, which is right")


def test_a_suspect_whose_arguments_dtensor_rewrites_is_cleared(real_runs):
    found = real_runs.confirm(case_of(sample("expand.default", numbers(5, 1), [5, 3]), "S(0) -> S(0)"))
    assert_cleared(found, "DTensor's own run is right")


def test_a_call_that_dtensor_refuses_everywhere_is_no_wrong_rule(real_runs):
    one = sample("unbind.int", X, 0)
    found = real_runs.confirm(case_of(one, "S(0) -> R, R, R, R"))
    assert_cleared(found, "DTensor refuses this call on every rank: RuntimeError: .*")
    assert found.refused.startswith("RuntimeError: ")


def test_a_result_that_gloo_cannot_assemble_is_no_wrong_rule(real_runs):
    one = planted("remembered", numbers(4, dtype=torch.int16))
    found = real_runs.confirm(case_of(one, "P(sum) -> P(sum)"))
    assert_cleared(found, "gloo does not move this dtype, whatever the rule: RuntimeError: Invalid scalar type")
    assert not found.refused and found.rank_results[0].failed == "full_tensor"


@pytest.mark.parametrize(("one", "ranks"), [
    (sample("neg.default", X), 2),
    (sample("relu.default", numbers(5, 3)), 3),
    (sample("sum.dim_IntList", numbers(5, 3), [0]), 2),
    (sample("mean.dim", X, [0]), 2),
    (sample("aminmax.default", X, dim=0), 2),
    (sample("max.dim", X, 0), 2),
    (sample("mul_.Scalar", X, 2.0), 2),
    (sample("view.default", numbers(6, 4), [24]), 2),
    (sample("new_zeros.default", numbers(5, 2), [5, 2]), 2),
    (sample("squeeze.default", numbers(2, 1, 4)), 2),
    (sample("argmax.default", X, 0), 2),
    (sample("linalg_vector_norm.default", X), 2),
    (sample("any.dim", numbers(4, 3, dtype=torch.bool), 0), 2),
    (sample("rand_like.default", X), 2),
    (sample("cat.default", [X, X], 0), 2),
    (planted("remembered", numbers(4, 2)), 2),
], ids=lambda given: getattr(given, "op", None))  # fmt: skip
def test_what_dtensor_claims_is_what_it_does(real_runs, one, ranks):
    """Each claim about these, run for real: DTensor takes it, and is right."""
    found = claims(one, ranks, run_oracle(one).raw)
    assert found
    for claim in found:
        case = probe(one, ranks).case(claim.rule, 0)
        assert_cleared(real_runs.confirm(case), "DTensor's own run is right")


def test_one_pool_at_a_time_reused_while_the_number_of_ranks_is_the_same(monkeypatch):
    log = []

    class Stand:
        """A pool without processes, in which every rank is right."""

        pids = (1, 2)

        def __init__(self, ranks, **options):
            self.ranks = ranks
            log.append(f"start {ranks}")

        def call(self, fn, args, *, idle):
            return validated(*[list(p) for p in NEG.oracle.outputs[0].chunk(self.ranks)])

        def close(self):
            log.append(f"end {self.ranks}")

    monkeypatch.setattr(rank_runs, "Pool", Stand)
    with ProgramRealRuns("gloo") as real_runs:
        for ranks in (2, 2, 4, 2):
            assert real_runs.confirm(case_of(NEG.sample, "S(0) -> S(0)", ranks)).wrong == ""
    assert log == ["start 2", "end 2", "start 4", "end 4", "start 2", "end 2"]


# Programs of more than one axis or op.


@pytest.mark.parametrize("program", [
    on(sample("mm.default", X, numbers(6, 3)), "S(0)/P(sum), R", (2, 2), "sum"),
    on(sample("mean.dim", X, [0]), "S(0)/S(0)", (2, 2), "S(0)"),
    on(sample("neg.default", X), "P(avg)/P(sum)", (2, 2), "R", flattened=True),
    on(sample("mul.Tensor", X, X), "S(0)/R, R/S(1)", (2, 2), "grad S(0)"),
    on(sample("neg.default", numbers(5, 3)), "SS(0,2)/S(0)", (2, 2)),
    on(sample("sum.dim_IntList", X, [1]), "S(0)/S(0)", (2, 2), "again(x0, [0], True)"),
], ids=str)  # fmt: skip
def test_a_right_program_is_right_on_real_processes(real_runs, program):
    found = real_runs.confirm_program(program)
    assert_cleared(found, "DTensor's own run is right")
    assert run_simulated_programs([program])[0].note == found.note


@pytest.mark.parametrize(("program", "reason"), [
    pytest.param(on(CUMPROD, "R/S(1)", (2, 2)),
        r"rank 0: result gathered from \(R, S\(1\)\) differs at \[0, 2\]: got 3, expected 6 .*", marks=if_cumprod_is_wrong,
    ),
    (on(sample("amax.default", numbers(1, 3), [0]), "R/S(0)", (2, 2), "sum"), "rank 1, 3 raises IndexError: .*"),
    (on(planted("one_raises", X), "S(0)/R", (2, 2)), "rank 1 raises ValueError: not on this rank; .*"),
], ids=str)  # fmt: skip
def test_a_wrong_program_is_wrong_on_real_processes(real_runs, program, reason):
    assert_wrong(real_runs.confirm_program(program), reason)


def test_the_picture_of_a_program_shows_all_axes(real_runs):
    program = on(sample("neg.default", torch.tensor([[1.0, 2.0], [3.0, 4.0]])), "S(0)/S(1)", (2, 2), "sum")
    found = real_runs.confirm_program(program)
    assert program_rank_diagram(program, oracle_of_program(program), found.rank_results).splitlines()[:5] == [
        "argument 0, (S(0), S(1))",
        "  rank 0  [1] of shape (1, 1)",
        "  rank 1  [2] of shape (1, 1)",
        "  rank 2  [3] of shape (1, 1)",
        "  rank 3  [4] of shape (1, 1)",
    ]
    assert program_rank_diagram(program, oracle_of_program(program), found.rank_results).endswith(
        "the op gives [-10] of shape ()"
    )


def test_what_cannot_be_held_is_no_program(real_runs):
    with pytest.raises(BadPlacement):
        real_runs.confirm_program(on(sample("neg.default", X), "P(sum)/P(max)", (2, 2)))


# What outcomes mean, without processes.

NEG = case_of(sample("neg.default", torch.tensor([1.0, 2.0, 3.0, 4.0])), "S(0) -> S(0)")


def validated(*pieces, whole=None, placement="S(0)", errors=(), failed="", trace=""):
    """The outcomes of ranks that hold these pieces of one result."""
    pieces = [torch.tensor(piece) for piece in pieces]
    whole = torch.cat(pieces) if whole is None else torch.tensor(whole)
    made = [ProgramRankResult(failed, errors, (placement,), (tuple(p.shape),), (p,), (whole,), trace) for p in pieces]
    return [Returned(rank, pickling.dumps(one)) for rank, one in enumerate(made)]


def test_right_pieces_are_right():
    assert case_confirmation(NEG, validated([-1.0, -2.0], [-3.0, -4.0])).wrong == ""


def test_ranks_that_each_raise_before_another_ones_collective_refuse_the_call():
    """The error is about to be exchanged on each of them, and another collective is still on its way."""
    outcomes = [
        Waiting(0, "a.py:1 in f: x", "RuntimeError: shape '[1]'"),
        Waiting(1, "a.py:1 in f: x", "IndexError: no dim"),
    ]
    found = case_confirmation(NEG, outcomes)
    assert (found.wrong, found.refused) == ("", "RuntimeError: shape '[1]'") and found.note.startswith(
        "every rank raises"
    )


def test_one_wrong_element_is_reported_with_both_values():
    found = case_confirmation(NEG, validated([-1.0, -2.0], [-3.0, -5.0]))
    assert_wrong(found, r".* differs at \[3\]: got -5, expected -4 \(1 of 4 elements differ\)")


def test_rounding_is_not_a_difference():
    assert case_confirmation(NEG, validated([-1.0, -2.0], [-3.0, -4.0000005])).wrong == ""


def test_large_parts_are_given_room_for_rounding():
    off = [-1.0, -2.0, -3.0, -4.01]
    assert case_confirmation(NEG, validated([1e5] * 4, [-1e5] * 4, whole=off, placement="P(sum)")).wrong == ""
    assert case_confirmation(NEG, validated([1.0] * 4, [-5.0] * 4, whole=off, placement="P(sum)")).wrong


@pytest.mark.parametrize(("whole", "reason"), [
    ([-1.0, -2.0], r".* has shape \(2,\), expected \(4,\)"),
    ([-1, -2, -3, -4], r".* has dtype torch.int64, expected torch.float32"),
], ids=["shape", "dtype"])  # fmt: skip
def test_another_shape_or_dtype_of_the_whole_is_wrong(whole, reason):
    assert_wrong(case_confirmation(NEG, validated([-1.0, -2.0], [-3.0, -4.0], whole=whole)), reason)


def test_ranks_that_assemble_different_wholes_are_each_looked_at():
    right, wrong = validated([-1.0, -2.0], [-3.0, -4.0]), validated([-1.0, -2.0], [-3.0, -9.0])
    assert_wrong(case_confirmation(NEG, [right[0], wrong[1]]), r"rank 1: result gathered .*")


def test_a_shape_that_is_wrong_is_reported_even_if_the_whole_could_not_be_assembled():
    errors = ("RuntimeError: no", "RuntimeError: no")
    found = case_confirmation(NEG, validated([-1.0, -2.0, -3.0], [-4.0], errors=errors, failed="full_tensor"))
    assert_wrong(found, r"rank 0 holds shape \(3,\), S\(0\) of \(4,\) is \(2,\)")


def test_a_placement_of_dtensors_own_is_judged_by_its_whole_alone():
    assert (
        case_confirmation(NEG, validated([-1.0], [-2.0], whole=[-1.0, -2.0, -3.0, -4.0], placement="P(norm)")).wrong
        == ""
    )


def test_an_error_of_the_stage_is_a_failure_and_no_verdict():
    found = case_confirmation(NEG, [Raised(0, "KeyError", "'x'", "trace of 0"), Waiting(1, "nowhere")])
    assert found == Confirmation("", "the stage itself failed: KeyError: 'x'", failed="trace of 0")


def test_a_death_counts_more_than_those_who_wait_for_the_dead():
    found = case_confirmation(NEG, [Waiting(0, "a.py:1"), Died(1, -11)])
    assert_wrong(found, r"the process of rank 1 dies \(exit code -11\)")


def test_a_hang_says_where_each_rank_waits():
    found = case_confirmation(NEG, [Waiting(0, "a.py:1"), *validated([0.0])[:0], Waiting(1, "b.py:2")])
    assert_wrong(found, r"hangs: rank 0 waits at a\.py:1; rank 1 waits at b\.py:2")


def test_a_rank_that_holds_an_error_while_its_peers_wait_has_raised():
    held = [Waiting(0, "a.py:1"), Waiting(1, "rank_run.py:188", raised="IndexError: no row")]
    found = case_confirmation(NEG, held)
    assert_wrong(found, r"rank 1 raises IndexError: no row; its peers go on and wait for it at the next collective")


def test_an_op_in_whose_collective_the_peers_wait_is_reported_by_the_error_of_the_rank_that_left_it(real_runs):
    """The flag by which rank 1 tells of its error is taken for its part of the collective in which rank 0 waits."""
    found = real_runs.confirm_program(on(sample("argmax.default", numbers(4, 1), -1), "S(1)"))
    assert "raises IndexError" in found.wrong and "hangs" not in found.wrong


class Slow:
    """Processes that answer these outcomes, call by call."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []
        self.ranks, self.timeout = 2, 20.0

    def call(self, work, sent, *, idle, timeout=None):
        self.asked.append(timeout)
        return self.answers.pop(0)

    def close(self):
        """There is no process."""


WAITING = [Waiting(0, "a.py:1"), Waiting(1, "b.py:2")]
RIGHT = validated([-1.0, -2.0], [-3.0, -4.0])


@pytest.mark.parametrize(("answers", "asked", "wrong"), [
    ([WAITING, RIGHT], [None, 60.0], ""),
    ([[RIGHT[0], WAITING[1]], RIGHT], [None, 60.0], ""),
    ([WAITING, WAITING], [None, 60.0], "hangs: rank 0 waits at a.py:1; rank 1 waits at b.py:2"),
    ([[WAITING[0], Died(1, -11)]], [None], "the process of rank 1 dies (exit code -11)"),
    ([RIGHT], [None], ""),
], ids=["slow", "one slow", "hangs", "dies", "right"])  # fmt: skip
def test_ranks_that_are_late_have_more_time_once_before_it_is_called_a_hang(monkeypatch, answers, asked, wrong):
    pool = Slow(*answers)
    monkeypatch.setattr(rank_runs, "Pool", lambda *_, **__: pool)
    with ProgramRealRuns("gloo") as real_runs:
        found = real_runs.confirm(NEG)
    assert (pool.asked, found.wrong) == (asked, wrong)


def test_random_results_are_compared_by_shape_alone():
    one = sample("rand_like.default", torch.zeros(4))
    case = case_of(one, "S(0) -> S(0)")
    assert case_confirmation(case, validated([9.0, 9.0], [9.0, 9.0])).wrong == ""
    assert_wrong(case_confirmation(case, validated([9.0, 9.0, 9.0], [9.0])), r"rank 0 holds shape .*")


def test_each_rank_is_sent_its_own_pieces_and_the_whole_shapes():
    one = sample("mm.default", numbers(4, 6).t(), numbers(4, 2))
    parts = case_tasks(case_of(one, "S(1), S(0) -> P(sum)"), "cpu", HOME)
    assert torch.equal(torch.cat([part.pieces[0] for part in parts], 1), one.tensors[0])
    assert {(part.shapes, part.strides) for part in parts} == {(((6, 4), (4, 2)), ((1, 6), (2, 1)))}
    assert {part.home for part in parts} == {HOME}
    assert overload(parts[0].call.op) is torch.ops.aten.mm.default


def test_over_nccl_ranks_can_tell_each_other_on_the_cpu_who_raised(monkeypatch):
    asked = []

    class Told(Exception):
        pass

    def pool(ranks, *, backend, timeout):
        asked.append((ranks, backend))
        raise Told

    monkeypatch.setattr(rank_runs, "Pool", pool)
    one = sample("relu.default", numbers(4, 6))
    with pytest.raises(Told), ProgramRealRuns("nccl", "cuda") as real_runs:
        real_runs.confirm(case_of(one, "S(0) -> S(0)"))
    assert asked == [(2, "cpu:gloo,cuda:nccl")]
