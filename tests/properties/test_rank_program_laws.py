"""Whole rank programs: a right one gives what its slow twin gives, under every schedule; one fault is found and placed.

CI runs the same few programs each time; `--hypothesis-profile=nightly` draws others, and many more.
"""

import itertools
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import localtensor as lt
from localtensor.errors import CollectiveFailed, EarlyReturn, GroupMismatch, NeverEnded, ProgramFault
from tests.properties.programs.model import IN_PLACE, KINDS, MESSAGES, REDUCING, Event, Step
from tests.properties.programs.program import RankProgram
from tests.properties.programs.reference import IllegalProgram
from tests.properties.programs.strategy import DTYPES, OPS_OF, rank_programs
from tests.properties.rank_draws import PLANTS, Fault, faults, planted
from tests.properties.rank_gradients import adjoint, chains, gradients
from tests.properties.rank_programs import simulated

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch renames all_gather_into_tensor and others

SECONDS = 1.0  # of processor time, for one diagnosis
ACCUSED = 0.95  # of the faults: the error names the rank that has it, or a line of that rank

RIGHT = rank_programs(10, ranks=(1, 2, 3, 4, 5, 6), for_gloo=False)
Seeds = st.integers(0, 2**32)
nightly = settings.get_current_profile_name() == "nightly"
whole_programs = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def schedules(seed: int) -> list[Any]:
    return [lt.round_robin(), lt.shuffled(seed), lt.pct(seed)]


def check_values(run: lt.Run, want: list[Any]) -> None:
    """Each rank holds what the twin says: the same numbers, of the same shapes and dtypes."""
    for rank, ((acc, out), (wanted_acc, wanted_out)) in enumerate(zip(run, want, strict=True)):
        assert out.keys() == wanted_out.keys()
        for id, results in out.items():  # noqa: A001
            expected = [plain(x) for x in wanted_out[id]]
            assert [plain(x) for x in results] == expected, f"rank {rank}, step {id}"
        assert acc.tolist() == wanted_acc.tolist(), f"rank {rank}"


def plain(x: Any) -> Any:
    x = x.numpy() if isinstance(x, Tensor) else x
    return (x.dtype, x.shape, x.tolist()) if isinstance(x, np.ndarray) else x


# -- right programs


@settings(whole_programs, max_examples=1000 if nightly else 15)
@given(program=RIGHT, seed=Seeds)
def test_a_right_program_gives_what_its_twin_gives_under_every_schedule_and_again_when_replayed(program, seed):
    want = program.played()
    for schedule in schedules(seed):
        run = simulated(program, schedule)
        check_values(run, want)
        again = simulated(program, run.replay)
        assert again.calls == run.calls
        assert again.replay == run.replay


@whole_programs
@given(program=rank_programs(10, ranks=2, kinds=MESSAGES), seed=Seeds)
def test_messages_between_two_ranks_meet_by_their_tags_in_whatever_order(program, seed):
    check_values(simulated(program, lt.shuffled(seed)), program.played())


@settings(whole_programs, max_examples=500 if nightly else 6)
@given(program=RIGHT, seed=Seeds)
def test_one_schedule_gives_one_diary(program, seed):
    for first, second in zip(schedules(seed), schedules(seed), strict=True):
        runs = simulated(program, first), simulated(program, second)
        assert runs[0].calls == runs[1].calls
        assert runs[0].replay == runs[1].replay


def test_every_reduction_of_every_dtype_gives_what_the_twin_gives():
    """The draws would come upon each of them some day; this is today."""
    steps = []
    for kind, dtype in itertools.product(REDUCING, DTYPES):
        for op in (*OPS_OF[dtype.rstrip("0123456789")], *(["avg"] if "float" in dtype else [])):
            style = ("sync", "async")[len(steps) % 2]
            fed = (len(steps) % 9 + 1, len(steps) % 11)
            steps.append(Step(len(steps), kind, 0, (0, 1, 2), style, dtype, (2, 2), op, root=1, feed=fed))
    program = in_turn(((0, 1, 2),), steps)
    check_values(simulated(program), program.played())


@pytest.mark.slow  # hundreds of draws
def test_the_draws_reach_every_kind_and_style():
    seen = set()

    @settings(max_examples=220, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(program=RIGHT)
    def look(program: RankProgram) -> None:
        seen.update((event.step.kind, event.step.style) for events in program.events for event in events if event.step)

    look()
    assert {kind for kind, _ in seen} == set(KINDS)
    assert {(kind, style) for kind in IN_PLACE for style in ("sync", "async")} | {("all_reduce", "functional")} <= seen


# -- programs with one fault

SANE = RankProgram(
    ((0, 1),), tuple((Event("launch", step := Step(0, "all_reduce", 0, (0, 1))), Event("mix", step)) for _ in range(2))
)
"""A right program, to be run after a wrong one."""


def verdict(fault: Fault, seed: int) -> str:
    """ "harmless", or how well the error names who has the fault; raises if the engine is wrong about this program."""
    want, why = refereed(fault.program)
    begin, run, error = time.process_time(), None, None
    try:
        run = simulated(fault.program, schedules(seed)[seed % 3])
    except ProgramFault as said:
        error = said
    seconds = time.process_time() - begin
    of = f"{fault.name} on rank {fault.rank} ({why or 'harmless'})\n{error}\n{fault.program}"
    assert bool(error) == bool(why), f"{'a false alarm' if error else 'silent'} about {of}"
    assert not isinstance(error, NeverEnded), f"it hangs: {of}"
    if error is None:
        check_values(run, want)
        return "harmless"
    assert seconds < SECONDS or simulated_again(fault) < SECONDS, f"{seconds} s for {of}"
    return accused(fault, error)


def refereed(program: RankProgram) -> tuple[Any, str]:
    """What the ranks must hold, and why they cannot."""
    try:
        return program.played(), ""
    except IllegalProgram as illegal:
        return None, str(illegal)


def accused(fault: Fault, error: ProgramFault) -> str:
    by_line = any(rank == fault.rank for rank, _ in fault.program.rendered().events_at(error.places))
    if error.ranks[:1] == (fault.rank,):
        return "first"
    return "named" if by_line or fault.rank in error.ranks else "not named"


def simulated_again(fault: Fault) -> float:
    """What the diagnosis takes when it does not also pay for what torch imports on first use."""
    begin = time.process_time()
    with pytest.raises(ProgramFault):
        simulated(fault.program)
    return time.process_time() - begin


def test_one_fault_is_reported_at_once_unless_the_twin_shows_it_to_be_harmless(capsys):
    """What is harmless, the referee says: a program that is right after all, whose values are then the twin's."""
    counted: Counter[tuple[str, str]] = Counter()

    @settings(whole_programs, max_examples=1000 if nightly else 50)
    @given(fault=faults(), seed=Seeds)
    def law(fault: Fault, seed: int) -> None:
        counted[fault.name, verdict(fault, seed)] += 1
        check_values(simulated(SANE), SANE.played())

    law()
    faulty = sum(many for (_, said), many in counted.items() if said != "harmless")
    named = faulty - sum(many for (_, said), many in counted.items() if said == "not named")
    with capsys.disabled():
        if nightly:
            print("\n", sorted(counted.items()), f"\n{named} of {faulty} accused")
    assert faulty > len(PLANTS)
    assert named >= ACCUSED * faulty, counted


@pytest.mark.few(5)
@pytest.mark.parametrize("name", PLANTS)
def test_each_kind_of_fault_is_seen(name):
    """In one program that has something of everything, at every place where the fault can be; by default at some fifteen."""
    places = list(enumerate(planted(everything(), name)))
    told = [verdict(fault, at) for at, fault in (places if nightly else places[:: len(places) // 15 + 1])]
    assert any(said != "harmless" for said in told)
    assert told.count("not named") <= (1 - ACCUSED) * len(told)


def everything() -> RankProgram:
    """Three ranks, two groups besides the world, and steps of every style."""
    groups = ((0, 1, 2), (0, 1), (1, 2))
    splits = ((1, 0, 2), (0, 1, 1), (2, 1, 0))
    steps = [
        Step(0, "all_reduce", 0, groups[0], "async", shape=(2, 2)),
        Step(1, "all_gather", 1, groups[1], "sync"),
        Step(2, "reduce", 2, groups[2], "sync", root=2),
        Step(3, "all_to_all_single", 0, groups[0], "functional", splits=splits),
        Step(4, "message", 0, groups[0], "async", pairs=((2, 0),)),
        Step(5, "barrier", 0, groups[0]),
        Step(6, "broadcast_object_list", 1, groups[1], root=1),
        Step(7, "batch", 0, groups[0], pairs=((0, 1), (1, 2), (2, 0)), tag=1),
        Step(8, "reduce_scatter_tensor", 0, groups[0], "async", op="max"),
    ]
    return in_turn(groups, steps)


def in_turn(groups: tuple[tuple[int, ...], ...], steps: list[Step]) -> RankProgram:
    """Each step waits for the one before, and has used what it got."""
    ranks = []
    for rank in groups[0]:
        events = [Event("group", how=str(g)) for g in range(1, len(groups))]
        for step in (step for step in steps if rank in step.involved):
            events.append(Event("launch", step))
            events += [Event("wait", step)] * (step.style == "async") + [Event("mix", step)] * step.gets(rank)
        ranks.append(tuple(events))
    return RankProgram(groups, tuple(ranks))


def test_that_program_is_right():
    check_values(simulated(everything()), everything().played())


# -- gradients


@whole_programs
@given(chain=chains(), seed=Seeds)
def test_the_gradient_through_collectives_is_the_adjoint_of_the_twin(chain, seed):
    want = adjoint(chain)
    for schedule in schedules(seed):
        assert gradients(chain, schedule) == want


# -- what these laws have found, each in its smallest form


def ranks_mix(first: Any, others: Any) -> Any:
    def body() -> Any:
        return others() if dist.get_rank() else first()

    return lt.run(body, ranks=2, timeout=20, leftovers="ignore")


def plain_gather() -> list[float]:
    x, whole = torch.full((1,), float(dist.get_rank())), torch.zeros(2)
    dist.all_gather_into_tensor(whole, x)
    return whole.tolist()


def functional_gather() -> list[float]:
    return functional.all_gather_tensor(torch.full((1,), float(dist.get_rank())), 0, dist.group.WORLD).tolist()


def test_a_functional_collective_meets_the_plain_one():
    assert ranks_mix(functional_gather, plain_gather).values == ([0.0, 1.0], [0.0, 1.0])


def poll() -> None:
    work = dist.barrier(async_op=True)
    while not work.is_completed():
        pass


def test_a_loop_that_asks_for_ever_is_reported():
    with pytest.raises(EarlyReturn) as told:
        ranks_mix(lambda: None, poll)
    assert told.value.ranks == (0, 1)


def test_a_group_that_one_of_its_members_never_makes_is_reported():
    with pytest.raises(GroupMismatch) as told:
        ranks_mix(lambda: None, lambda: dist.new_group([0, 1]) and None)
    assert told.value.groups == {0: (), 1: (0, 1)}
    assert ranks_mix(lambda: None, lambda: dist.new_group([1]) and None).values == (None, None)


def swap_pieces(rows: list[int]) -> None:
    dist.all_to_all([torch.zeros(1), torch.zeros(1)], [torch.ones(many) for many in rows])


def test_who_sends_a_piece_that_does_not_fit_is_named():
    with pytest.raises(CollectiveFailed, match="which rank 0 sends") as told:
        ranks_mix(lambda: swap_pieces([1, 2]), lambda: swap_pieces([1, 1]))
    assert set(told.value.ranks) == {0, 1}
