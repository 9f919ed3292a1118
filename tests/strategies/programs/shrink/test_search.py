"""The search alone, with examples of few words; what it does to rules stands in test_oracle.  What a worker makes
of one suspicion."""

import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor._util import pickling
from strategies.model.oracle import resizes_out
from strategies.model.rule import Program, Rule
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.programs.chained import _candidate
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.shrink import search
from strategies.programs.shrink.search import (
    MAX_SMALLER,
    ShrinkTask,
    element_count,
    shrink,
    smaller_candidates,
    smaller_instances,
)
from strategies.validation.finding import Candidate, OverloadTask, case_of, refused_program
from strategies.validation.overload import validate_overload
from tests.strategies.cases import judged, numbers, sample, silent
from tests.strategies.planted_ops import plant, planted
from tests.strategies.wrong_here import if_cumprod_is_wrong

START = Program(sample("add.Tensor", numbers(6, 5), numbers(6, 5), alpha=3), (4,), ((Shard(0),), (Shard(0),)))


def shapes(program):
    return [tuple(x.shape) for x in program.sample.tensors]


def test_what_shows_with_anything_shrinks_to_next_to_nothing():
    found = shrink(START, lambda p: True)
    assert (found.smallest.mesh, shapes(found.smallest)) == ((2,), [(2,), (2,)])  # a row for each rank
    assert [x.tolist() for x in found.smallest.sample.tensors] == [[1.0, 2.0], [1.0, 2.0]]
    assert {x.dtype for x in found.smallest.sample.tensors} == {torch.float32}
    assert found.smallest.sample.call.kwargs == ()
    assert found.steps[-1] is found.smallest and len(found.stages) == len(found.steps)


@pytest.mark.parametrize(("shows", "ranks", "want"), [
    (lambda first, ranks: ranks >= 3, 3, (3,)),
    (lambda first, ranks: first[0] % ranks, 2, (3,)),
    (lambda first, ranks: first[0] % ranks and first[0] > ranks, 2, (3,)),
    (lambda first, ranks: first[0] > 4, 2, (6,)),
    (lambda first, ranks: len(first) == 2 and first[0] * first[1] > 3, 2, (4, 1)),
    (lambda first, ranks: first == (6, 5), 2, (6, 5)),
], ids=["three ranks", "uneven", "uneven, none empty", "five rows, evenly", "four in two dims", "all"])  # fmt: skip
def test_what_is_needed_stays(shows, ranks, want):
    found = shrink(START, lambda p: bool(shows(shapes(p)[0], p.ranks)))
    assert (found.smallest.ranks, shapes(found.smallest)[0]) == (ranks, want)


def test_the_stages_come_in_their_order_and_again_until_nothing_helps():
    found = shrink(START, lambda p: True)
    once = [s for i, s in enumerate(found.stages) if i == 0 or found.stages[i - 1] != s]
    assert once == ["dtypes", "ranks", "dims", "scalars", "values"]
    needy = shrink(START, lambda p: p.sample.call.kwargs == () or p.sample.tensors[0].numel() >= 4)
    again = [s for i, s in enumerate(needy.stages) if i == 0 or needy.stages[i - 1] != s]
    assert again == ["dtypes", "ranks", "dims", "scalars", "values", "dims", "values"]


def test_every_step_shows_is_no_larger_and_is_asked_once():
    asked = []

    def shows(program):
        asked.append(pickling.dumps(program))
        return bool(program is START or zlib.crc32(asked[-1]) % 3)

    found = shrink(START, shows)
    sizes = [element_count(START), *map(element_count, found.steps)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(asked)) == len(asked) == found.tried
    assert all(zlib.crc32(pickling.dumps(step)) % 3 for step in found.steps) and found.steps


def test_twice_the_same_to_the_last_bit():
    def shows(program):
        return element_count(program) > 7

    one, two = shrink(START, shows), shrink(START, shows)
    assert pickling.dumps(one.steps) == pickling.dumps(two.steps) and one.tried == two.tried


@pytest.mark.parametrize("budget", [1, 2, 7, 15])
def test_the_budget_is_kept_and_what_was_found_by_then_comes_back(budget):
    asked = []

    def shows(program):
        asked.append(program)
        return program is START or element_count(program) > 12

    found = shrink(START, shows, budget=budget)
    assert len(asked) == found.tried == budget
    assert found.smallest is START if budget == 1 else shows(found.smallest)


def test_what_does_not_show_at_all_comes_back_as_it_is():
    found = shrink(START, lambda p: False)
    assert (found.smallest, found.tried, found.steps, found.to_try()) == (START, 1, (), [])


def test_the_ends_of_the_stages_are_there_to_fall_back_on_smallest_first():
    found = shrink(START, lambda p: True)
    tries = found.to_try()
    assert tries[0] is found.smallest and len(tries) == 4
    assert [(p.mesh, shapes(p)[0], bool(p.sample.call.kwargs)) for p in tries] == [
        ((2,), (2,), False), ((2,), (2,), False), ((2,), (2,), True), ((2,), (6, 5), True)
    ]  # fmt: skip
    assert [element_count(p) for p in found.to_try(2)] == [4, 4]


def test_what_is_larger_is_not_even_asked():
    larger = replace(START, sample=sample("add.Tensor", numbers(7, 5), numbers(7, 5)))
    found = shrink(START, lambda p: True, stages=[("ranks", lambda p: iter([larger]))])
    assert (found.smallest, found.tried) == (START, 1)


def test_an_out_tensor_keeps_the_shape_of_the_result():
    """torch resizes one of another shape, and says that it will not for long."""
    start = Program(sample("neg.out", numbers(4, 6), out=numbers(4, 6)), (2,), ((Shard(0),), (Replicate(),)))
    found = shrink(start, lambda p: True)
    assert shapes(found.smallest) == [(2,), (2,)] and not resizes_out(found.smallest.sample)
    resized = replace(start, sample=sample("neg.out", numbers(4, 6), out=numbers(4)))
    assert resizes_out(resized.sample) and element_count(shrink(resized, lambda p: True).smallest) == 3


def test_a_stage_that_cannot_go_on_with_a_dtype_is_left_there():
    def stumbling(program):
        yield replace(program, mesh=(2,))
        raise RuntimeError("not implemented for 'Float8_e4m3fn'")

    found = shrink(START, lambda p: True, stages=[("ranks", stumbling)])
    assert found.smallest.mesh == (2,)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.complex32, torch.uint8, torch.bool])
def test_any_dtype_can_be_shrunk(dtype):
    x = numbers(4, 4).abs().to(torch.bool if dtype == torch.bool else torch.float32)
    start = Program(sample("clone.default", x.to(dtype)), (2,), ((Replicate(),),))
    assert shapes(shrink(start, lambda p: True).smallest) == [()]


plant("edges(Tensor x) -> Tensor", lambda x: x * (2 if x.shape[0] * x.shape[1] > 9 else 3), "S")
EDGES = planted("edges", numbers(6, 6))
"""Wrong where the pieces have nine elements or fewer: of 6 by 6 on (2, 2), and not on (2,)."""
CUT = (Shard(0), Shard(1))
CUMPROD = sample("cumprod.default", numbers(4, 6), -1)


def suspected(one, layout, mesh, **more):
    """A program that goes wrong, as a suspect."""
    program = Program(one, mesh, (layout,), **more)
    (found,) = run_simulated_programs([program])
    assert found.wrong
    return _candidate((program, found))


def tried(one, *, whole=False):
    """All suspects of the trial of one sample on two ranks, by rule."""
    validated = validate_overload(OverloadTask(one.op, (one,), ((2,),), 0), silent)
    return {name: found for h in validated for name, found in (h.whole if whole else h.suspects).items()}


def offered(name, found, *, judged=True):
    return smaller_candidates(ShrinkTask(name, tuple(found), judged, 0), silent)


# One suspicion.


@if_cumprod_is_wrong
def test_a_rule_for_one_axis_comes_with_a_smaller_case_first_and_what_was_given_last():
    found = tried(CUMPROD)["aten.cumprod.default: S(1) -> S(1)"]
    first, *_, last = offered("a", found)
    assert last is found[-1]
    assert (first.name, first.program, first.instance.ranks) == (last.name, None, 2)
    assert first.instance.sample.size == 4 < min(s.instance.sample.size for s in found)
    assert first.instance.sample.tensors[0].tolist() == [[1, 2, 3, 4]]  # 1 and 2 alone are their own products
    case = case_of(first.instance, 0)
    assert case.held[0][0].tolist() == [[1, 2]]  # it can be run for real


def wrong_at_nan(op, x):
    """A rule that DTensor has been given by hand, wrong where a NaN is among the values."""
    return judged(planted(op, x), "S(0) -> S(0)", ranks=3)


def with_a_nan():
    x = numbers(9, 4)
    x[4, 2] = float("nan")
    return x


def test_a_few_instances_of_the_same_rule_are_offered_the_smallest_first():
    given = wrong_at_nan("patched", with_a_nan())
    found = smaller_instances(given)
    sizes = [instance.sample.size for instance in found]
    assert sizes == sorted(sizes) and sizes[0] <= 4 and 1 < len(found) <= MAX_SMALLER
    assert found[0].ranks == 2 and sizes[-1] <= given.sample.size
    assert {(i.verdict, str(i.rule)) for i in found} == {(Verdict.UNSOUND, str(given.rule))}


def test_what_the_probe_does_not_find_wrong_has_nothing_smaller():
    given = wrong_at_nan("remembered", numbers(9, 4))
    suspect = replace(given, verdict=Verdict.SUSPECT, evidence=Evidence("a handler of its own"))
    assert smaller_instances(suspect) == []


def test_without_a_budget_nothing_is_shrunk():
    assert smaller_instances(wrong_at_nan("patched", with_a_nan()), budget=1) == []


@pytest.mark.slow
def test_a_program_comes_as_smaller_programs_that_go_wrong_as_it_did():
    given = suspected(EDGES, (Shard(0), Replicate(), Shard(1)), (2, 2, 2), flattened=True)
    *smaller, last = offered(given.name, [given])
    assert last is given and 0 < len(smaller) <= MAX_SMALLER
    assert not any(s.program.flattened for s in smaller)
    assert [s.instance.ranks for s in smaller] == [s.program.ranks for s in smaller]
    assert smaller[0].instance.ranks <= 4 and smaller[0].instance.sample is smaller[0].program.sample
    assert all(found.wrong for found in run_simulated_programs([s.program for s in smaller]))


def test_a_program_that_goes_wrong_no_more_stays_as_it_is():
    right = Program(sample("neg.default", numbers(4, 6)), (2, 2), ((Shard(0), Shard(1)),))
    rule = Rule(right.sample.op, (Shard(1),), ())
    given = Candidate(Instance(rule, 4, right.sample, Verdict.UNSOUND, "simulated", Evidence("rank 0 makes 1")), right)
    assert offered("a", [given]) == (given,)


def refusing(program):
    """As DTensor refuses a call whose rule raises: with the rule's message, as an error of another class."""
    few = program.sample.tensors[0].numel() > 3
    return SimpleNamespace(wrong="", refused="RuntimeError: no such dim -1" if few else "")


def test_a_refused_call_is_made_small_though_dtensor_raises_its_error_as_another(monkeypatch):
    monkeypatch.setattr(search, "run_simulated_programs", lambda programs: [refusing(programs[0])])
    whole = Program(sample("relu.default", numbers(8, 3)), (2,), ((Replicate(),),))
    first, *_, last = offered("a", [given := refused_program(whole, "AssertionError: no such dim -1")])
    assert last is given and first.program.sample.tensors[0].tolist() == [1, 2, 3, 4]
    other = refused_program(whole, "AssertionError: no such file")
    assert offered("a", [other]) == (other,)


def test_a_claim_that_only_a_run_can_judge_and_that_runs_right_stays_as_it_is():
    found = tried(sample("argmax.default", numbers(4, 6), 0), whole=True)["aten.argmax.default: S(1) -> S(0)"]
    assert offered("a", found, judged=False) == tuple(found)


@if_cumprod_is_wrong
def test_a_claim_that_only_a_run_can_judge_and_that_runs_wrong_is_made_small_with_its_inputs():
    """A rule for one axis that the probe is not asked about: DTensor's own run of it is what says that it is wrong."""
    given = Candidate(tried(CUMPROD)["aten.cumprod.default: S(1) -> S(1)"][-1].instance)
    first, *_, last = offered("a", [given], judged=False)
    assert last is given and first.program is None
    assert (first.name, first.instance.ranks) == (given.name, 2)
    assert first.instance.sample.size < given.instance.sample.size


def test_placements_of_dtensors_own_are_not_even_played(monkeypatch):
    class Odd(Partial):
        pass

    monkeypatch.setattr(search, "run_simulated_programs", lambda programs: pytest.fail("played"))
    rule = Rule(CUMPROD.op, (Odd(),), (Shard(1),))
    given = Candidate(Instance(rule, 2, CUMPROD, Verdict.SUSPECT, "test", Evidence("only a run can judge it")))
    assert offered("a", [given], judged=False) == (given,)


def test_no_more_programs_are_played_than_the_budget_allows(monkeypatch):
    given, played = suspected(EDGES, (Shard(0), Shard(1)), (2, 2)), []
    monkeypatch.setattr(search, "MAX_SIMULATED_RUNS", 3)
    monkeypatch.setattr(
        search, "run_simulated_programs", lambda programs: played.extend(programs) or run_simulated_programs(programs)
    )
    offered("a", [given])
    assert 0 < len(played) <= 3


@if_cumprod_is_wrong
def test_the_step_is_noted():
    noted = []
    smaller_candidates(
        ShrinkTask("a", tuple(tried(CUMPROD)["aten.cumprod.default: S(1) -> S(1)"]), True, 0), noted.append
    )
    assert noted == [0]
