"""The search alone, with witnesses of few words; what it does to rules stands in test_oracle."""

import zlib
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from localtensor._util import pickling
from strategies.model.rule import Program
from strategies.programs.shrink.search import element_count, shrink
from tests.strategies.cases import numbers, sample

START = Program(sample("add.Tensor", numbers(6, 5), numbers(6, 5), alpha=3), (4,), ((Shard(0),), (Shard(0),)))


def shapes(program):
    return [tuple(x.shape) for x in program.sample.tensors]


def test_what_shows_with_anything_shrinks_to_next_to_nothing():
    found = shrink(START, lambda p: True)
    assert (found.smallest.mesh, shapes(found.smallest)) == ((2,), [(1,), (1,)])
    assert [x.tolist() for x in found.smallest.sample.tensors] == [[0.0], [0.0]]
    assert found.smallest.sample.call.kwargs == ()
    assert found.steps[-1] is found.smallest and len(found.stages) == len(found.steps)


@pytest.mark.parametrize(("shows", "ranks", "want"), [
    (lambda first, ranks: ranks >= 3, 3, (1,)),
    (lambda first, ranks: first[0] % ranks, 2, (1,)),
    (lambda first, ranks: first[0] % ranks and first[0] > ranks, 2, (3,)),
    (lambda first, ranks: first[0] > 4, 2, (5,)),
    (lambda first, ranks: len(first) == 2 and first[0] * first[1] > 3, 2, (4, 1)),
    (lambda first, ranks: first == (6, 5), 2, (6, 5)),
], ids=["three ranks", "uneven", "uneven, none empty", "five rows", "four in two dims", "all"])  # fmt: skip
def test_what_is_needed_stays(shows, ranks, want):
    found = shrink(START, lambda p: bool(shows(shapes(p)[0], p.ranks)))
    assert (found.smallest.ranks, shapes(found.smallest)[0]) == (ranks, want)


def test_the_stages_come_in_their_order_and_again_until_nothing_helps():
    found = shrink(START, lambda p: True)
    once = [s for i, s in enumerate(found.stages) if i == 0 or found.stages[i - 1] != s]
    assert once == ["ranks", "dims", "scalars", "values"]
    needy = shrink(START, lambda p: p.sample.call.kwargs == () or p.sample.tensors[0].numel() >= 4)
    again = [s for i, s in enumerate(needy.stages) if i == 0 or needy.stages[i - 1] != s]
    assert again == ["ranks", "dims", "scalars", "values", "dims"]


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


@pytest.mark.parametrize("budget", [1, 2, 7, 20])
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
        ((2,), (1,), False), ((2,), (1,), False), ((2,), (1,), True), ((2,), (6, 5), True)
    ]  # fmt: skip
    assert [element_count(p) for p in found.to_try(2)] == [2, 2]


def test_what_is_larger_is_not_even_asked():
    larger = replace(START, sample=sample("add.Tensor", numbers(7, 5), numbers(7, 5)))
    found = shrink(START, lambda p: True, stages=[("ranks", lambda p: iter([larger]))])
    assert (found.smallest, found.tried) == (START, 1)


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
