"""Drawn rank programs: right by construction, the same on every way of running, printed as code that runs."""

import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

import localtensor as lt
from localtensor.errors import RankRaised
from localtensor.testing import assert_same
from tests.properties.programs.model import COLLECTIVES, KINDS, MESSAGES, Event, Step
from tests.properties.programs.program import RankProgram
from tests.properties.programs.reference import IllegalProgram
from tests.properties.programs.strategy import LOCAL, NoProgram, rank_programs
from tests.tools import warm

few = settings(max_examples=25, suppress_health_check=list(HealthCheck))
TOTAL = Step(0, "all_reduce", 0, (0, 1), "async", shape=(2, 1))
PROGRAM = RankProgram(((0, 1),), ((Event("launch", TOTAL), Event("wait", TOTAL), Event("mix", TOTAL)),) * 2)


def smallest(condition, **options):
    drawn = rank_programs(3, ranks=(1, 2, 3), kinds=("all_reduce", "broadcast", "message", LOCAL), **options)
    return find(drawn, condition, settings=settings(few, max_examples=500, derandomize=True))


def steps(program):
    return {event.step.id: event.step for events in program.events for event in events if event.what == "launch"}


@few
@given(program=rank_programs(), seed=st.integers(0, 9))
def test_a_drawn_program_leaves_what_it_expects_under_any_schedule_and_no_group(program, seed):
    ran = lt.run(program, ranks=program.ranks, schedule=lt.shuffled(seed), leftovers="raise")
    assert_same(ran, program.expected())


def test_real_processes_agree():
    programs = []

    @settings(few, max_examples=4, derandomize=True, database=None)
    @given(program=rank_programs(ranks=2))
    def collect(program):
        programs.append(program)

    collect()
    assert len(programs) == 4
    for program in programs:
        assert_same(lt.run(program, ranks=2, on="gloo", timeout=120), program.expected())


@few
@given(program=rank_programs(3, ranks=(2, 3)))
def test_a_program_is_small_and_is_a_value(program):
    assert program.ranks in (2, 3)
    assert len(steps(program)) <= 3
    assert pickle.loads(pickle.dumps(program)) == program
    assert hash(program) == hash(pickle.loads(pickle.dumps(program)))


def test_its_print_runs_without_us(tmp_path):
    (tmp_path / "program.py").write_text(
        f"{PROGRAM}\n\ndist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "print(rank0()[1])\n"
    )
    ran = warm.run([sys.executable, "program.py"], cwd=tmp_path)
    assert "{0: [tensor([[-5],\n        [-4]])]}" in ran.stdout, ran.stderr
    assert "localtensor" not in str(PROGRAM)


def test_what_hypothesis_shows_of_it_is_its_print():
    from hypothesis.vendor.pretty import pretty

    assert pretty(PROGRAM) == str(PROGRAM) == repr(PROGRAM)


def test_it_says_on_how_many_ranks_it_runs():
    with pytest.raises(RankRaised, match="this program is for 2 ranks, and there are 3"):
        lt.run(PROGRAM, ranks=3)


def test_a_place_in_its_print_is_the_event_that_the_line_is_of():
    for at in range(len(PROGRAM.events[1]) + 1):
        events = [*PROGRAM.events[1][:at], Event("raise"), *PROGRAM.events[1][at:]]
        broken = PROGRAM.changed(1, events)
        with pytest.raises(RankRaised) as caught:
            lt.run(broken, ranks=2)
        assert broken.rendered().events_at(list(caught.value.where.values())) == {(1, at)}


def test_what_it_expects_is_worked_out_by_hand():
    fed = [(torch.arange(2) * rank) % 11 - 5 for rank in (1, 2)]
    for rank, (acc, out) in enumerate(PROGRAM.expected(), 1):
        total = (fed[0] + fed[1]).reshape(2, 1)
        assert torch.equal(out[0][0], total)
        before = torch.arange(48) * rank
        assert acc.tolist() == [*((before[:2] * 3 + total.flatten()) % 1009).tolist(), *(before[2:] % 1009).tolist()]


def test_a_wrong_program_has_no_expectation():
    alone = PROGRAM.changed(1, [])
    with pytest.raises(IllegalProgram):
        alone.expected()


@pytest.mark.slow  # hundreds of draws
def test_the_draws_reach_every_kind_subgroups_and_async_work():
    seen, styles, sub = set(), set(), set()

    @settings(few, max_examples=180, derandomize=True, database=None)
    @given(program=rank_programs())
    def look(program):
        for events in program.events:
            seen.update(event.step.kind if event.step else event.what for event in events)
            styles.update(event.step.style for event in events if event.step)
        sub.update(len(step.members) < program.ranks for step in steps(program).values())

    look()
    assert set(KINDS) | {LOCAL} <= seen
    assert styles == {"sync", "async", "functional"}
    assert sub == {True, False}


def test_it_shrinks_to_few_ranks_and_one_op():
    found = smallest(lambda program: any(step.kind == "broadcast" for step in steps(program).values()))
    assert found.ranks == 1
    [step] = steps(found).values()
    assert (step.kind, step.dtype, step.shape, step.style, step.group) == ("broadcast", "int64", (1, 1), "sync", 0)


@pytest.mark.slow
def test_it_shrinks_to_two_ranks_where_a_message_is_needed():
    found = smallest(lambda program: any(step.kind in MESSAGES for step in steps(program).values()))
    assert found.ranks == 2
    assert [step.pairs for step in steps(found).values()] == [((0, 1),)]


@pytest.mark.slow  # shrinking takes seconds
def test_it_shrinks_to_the_sum_of_ones_kind():
    found = smallest(lambda program: any(step.op == "max" for step in steps(program).values()))
    assert [(step.kind, step.op) for step in steps(found).values()] == [("all_reduce", "max")]


def test_averages_come_if_gloo_need_not_serve_them():
    ops = set()

    @settings(few, max_examples=60, derandomize=True, database=None)
    @given(program=rank_programs(kinds=("all_reduce",), for_gloo=False))
    def look(program):
        ops.update(step.op for step in steps(program).values())

    look()
    assert "avg" in ops


@pytest.mark.parametrize(("options", "says"), [
    ({"max_ops": 0}, "max_ops=0: a program has at least one op"),
    ({"max_ops": True}, "max_ops=True: a program has at least one op"),
    ({"ranks": 0}, "ranks=0: a program has at least one rank"),
    ({"ranks": ()}, "ranks=(): a program has at least one rank"),
    ({"kinds": ("all_reduce", "shout")}, "no op is called 'shout'"),
    ({"kinds": ()}, "there is no kind to draw"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(options, says):
    with pytest.raises(NoProgram) as told:
        rank_programs(**options)
    assert says in str(told.value)
    assert str(told.value).startswith("rank_programs: ")


def test_the_kinds_are_names_of_torch():
    assert all(hasattr(dist, kind) for kind in COLLECTIVES if kind != "permute")
