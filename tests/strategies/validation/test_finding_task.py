import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from strategies.model.verdict import Crash, WorkUnit
from strategies.validation import finding
from strategies.validation.finding import Candidate, OverloadTask, TaskResult, describe, keep_smallest, merge_candidates
from strategies.validation.overload import validate_overload
from tests.strategies.cases import numbers, sample
from tests.strategies.validation.test_finding_candidate import instance

X = numbers(4, 6)
UNIT = WorkUnit("aten.cumprod.default", "alone", "real", (2,))
MESHES = ((2,), (3,), (2, 2))


def suspect(columns, **more):
    return Candidate(instance(sample("cumprod.default", numbers(2, columns), -1), **more))


def there_and_back(result, seconds=0.5):
    return finding.read_task(json.loads(json.dumps(finding.task_line(result, seconds))))


# Steps.


def test_every_step_and_every_oracle_has_a_number_of_its_own():
    task_of = OverloadTask("aten.neg.default", (sample("neg.default", X),) * 4, MESHES, 0)
    steps = [task_of.step(s, m) for s in range(4) for m in range(3)] + [task_of.oracle_step(s) for s in range(4)]
    assert steps == list(range(16))


def test_a_number_tells_the_sample_and_the_mesh():
    task_of = OverloadTask("aten.neg.default", (sample("neg.default", X),) * 4, MESHES, 0)
    assert [task_of.at(task_of.step(s, m)) for s in range(4) for m in range(3)] == [
        (s, m) for s in range(4) for m in MESHES
    ]
    assert [task_of.at(task_of.oracle_step(s)) for s in range(4)] == [(s, (2,)) for s in range(4)]


def test_the_units_of_a_task_are_in_order_and_only_those_wanted():
    task_of = OverloadTask("aten.neg.default", (), MESHES, 0)
    assert len(task_of.units()) == 12 and list(task_of.units()) == sorted(task_of.units())
    wanted = frozenset(task_of.units()[3:5])
    assert set(replace(task_of, only=wanted).units()) == wanted
    assert replace(task_of, only=frozenset()).units() == ()


def test_a_sample_is_described_as_a_call():
    assert describe(sample("cumprod.default", X, -1)) == "aten.cumprod.default(f64[4,6], -1) from test"


# Lines.

FULL = TaskResult(
    UNIT, 3, 9, 40, {"b", "a"}, {"a"}, {"wrong": [suspect(3), suspect(4)]}, {"who knows": [suspect(5)]},
    [instance()], {"odd": "why"}, Counter({"too many": 2}), [Crash("op", "sample", "error", "trace")],
)  # fmt: skip


def test_a_result_comes_back_from_its_line():
    after = there_and_back(FULL)
    for name in "unit samples tried combinations sound by_metadata untestable skipped crashed".split():
        assert getattr(after, name) == getattr(FULL, name), name
    sizes = {name: [s.instance.sample.size for s in found] for name, found in {**after.suspects, **after.whole}.items()}
    assert sizes == {"wrong": [6, 8], "who knows": [10]}
    assert [i.rule for i in after.missing] == [instance().rule]


def test_what_the_validation_really_finds_comes_back():
    samples = (sample("cumprod.default", X, -1), sample("cumprod.default", numbers(4, 4, dtype=torch.int64), 0))
    for result in validate_overload(
        OverloadTask("aten.cumprod.default", samples, ((2,),), 0, search=True), lambda number: None
    ):
        again = there_and_back(result)
        assert repr(replace_samples(again)) == repr(replace_samples(result))


def replace_samples(result):
    """Tensors print shortened, but equal ones print alike."""
    return replace(result, sound=sorted(result.sound), by_metadata=sorted(result.by_metadata))


def test_an_empty_result_is_a_short_line():
    assert finding.task_line(TaskResult(UNIT), 0.12345) == {"kind": "unit", "unit": str(UNIT), "seconds": 0.123}
    assert there_and_back(TaskResult(UNIT)) == TaskResult(UNIT)


def test_a_line_is_the_same_in_any_order_of_finding():
    one = replace(FULL, skipped=Counter({"x": 1, "y": 2}), untestable={"p": "why", "q": "why"})
    other = replace(one, sound={"a", "b"}, skipped=Counter({"y": 2, "x": 1}), untestable={"q": "why", "p": "why"})
    assert json.dumps(finding.task_line(one, 1)) == json.dumps(finding.task_line(other, 1))


def test_a_suspicion_that_is_no_data_is_counted_and_never_silently_lost():
    bad = Candidate(instance(sample("bernoulli.p", X, 0.5, generator=torch.Generator())))
    result = replace(FULL, suspects={"bad": [bad], "both": [bad, suspect(3)]}, missing=[bad.instance])
    after = there_and_back(result)
    assert (list(after.suspects), after.missing) == (["both"], [])
    ((why, many),) = (after.skipped - FULL.skipped).items()
    assert (why, many) == ("a candidate cannot be kept in a journal: an argument of type Generator", 3)
    assert result.skipped == {"too many": 2}  # what was given is left as it is


# Keeping the smallest.


@pytest.mark.parametrize("order", [range(1, 7), range(6, 0, -1), (3, 1, 6, 2, 5, 4)], ids=str)
def test_the_smallest_are_kept(order):
    kept = []
    for columns in order:
        keep_smallest(kept, suspect(columns), 3)
    assert [s.instance.sample.size for s in kept] == [2, 4, 6]


def test_the_earlier_of_equals_is_kept():
    kept, equals = [], [suspect(2, reason=str(n)) for n in range(5)]
    for one in equals:
        keep_smallest(kept, one, 3)
    assert kept == equals[:3]


def test_the_suspects_of_all_results_by_rule():
    found = merge_candidates([{"b": [suspect(3)]}, {"a": [suspect(2)]}, {"b": [suspect(1), suspect(2)]}], 2)
    assert {name: [s.instance.sample.size for s in kept] for name, kept in found.items()} == {"a": [4], "b": [2, 4]}
    assert list(found) == ["a", "b"]
