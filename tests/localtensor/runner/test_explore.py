"""`explore_ranks`: programs of ranks under every schedule with few preemptions."""

import re

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors.runs import BadExploration
from tests.tools.symmetric import measure  # noqa: F401  # it registers the programs
from tests.tools.symmetric.labels import FAULTY, RIGHT

SILENT = {"leftovers": "ignore"}
IN_SOME_ORDERS = [program for program in FAULTY if program.schedules]
SMALL = ["every_other_byte", "order_by_a_message", "put_with_signal_and_wait"]


def first_of_two_senders(expected):
    """Ranks 1 and 2 send to rank 0, which takes any."""
    if dist.get_rank():
        dist.send(torch.tensor([dist.get_rank()]), 0)
        return
    got = torch.zeros(1, dtype=torch.int64)
    firsts = [dist.recv(got) for _ in range(2)]
    assert firsts[0] in expected


@pytest.mark.few(3)
@pytest.mark.parametrize("program", IN_SOME_ORDERS, ids=lambda program: program.name)
def test_a_race_of_some_orders_is_found_and_its_text_repeats_it(program):
    with pytest.raises(lt.errors.SymmetricRace) as found:
        lt.explore_ranks(program.body, ranks=program.ranks, **SILENT)
    assert {place.line for place in found.value.places} == program.lines
    text = re.search(r"schedule='(bounded[:0-9]*)'", str(found.value))[1]
    with pytest.raises(lt.errors.SymmetricRace) as again:
        lt.run(program.body, ranks=program.ranks, schedule=text, **SILENT)
    assert str(again.value) == str(found.value)


@pytest.mark.parametrize("program", [p for p in RIGHT if p.name in SMALL], ids=lambda program: program.name)
def test_every_access_to_symmetric_memory_is_a_place_to_preempt_a_rank(program):
    alone = lt.explore_ranks(program.body, ranks=program.ranks, bound=0, **SILENT)
    once = lt.explore_ranks(program.body, ranks=program.ranks, bound=1, **SILENT)
    assert alone.complete
    assert once.complete
    assert once.schedules > alone.schedules
    assert once.longest >= 10


@pytest.mark.slow
def test_the_orders_of_messages_are_searched():
    assert lt.explore_ranks(first_of_two_senders, (1, 2), ranks=3).complete
    with pytest.raises(lt.errors.RankRaised, match=r"bounded:\d"):
        lt.explore_ranks(first_of_two_senders, (1,), ranks=3)


def test_the_search_ends_at_its_limits():
    def barriers():
        for _ in range(6):
            dist.barrier()

    found = lt.explore_ranks(barriers, ranks=3, schedules=7)
    assert (found.schedules, found.complete) == (7, False)
    assert str(lt.explore_ranks(barriers, ranks=3, seconds=0.0)) == "no schedule was run"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bound": -1}, "bound=-1"),
        ({"schedules": 0}, "schedules=0"),
        ({"on": "gloo"}, "on="),
        ({"schedule": "pct"}, "schedule="),
    ],
)
def test_a_setting_that_is_none_is_refused(options, named):
    with pytest.raises(BadExploration, match=named):
        lt.explore_ranks(dist.barrier, ranks=2, **options)


def test_a_time_that_is_none_is_refused():
    with pytest.raises(BadExploration, match="seconds=nan: it has to be a number of seconds"):
        lt.explore_ranks(dist.barrier, ranks=2, seconds=float("nan"))
