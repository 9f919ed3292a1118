"""The detector on programs with labels, and on random ones of which a plain oracle knows whether they race."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from hypothesis import given, settings
from hypothesis import strategies as st

import localtensor as lt
from localtensor.errors import SymmetricRace
from localtensor.threads.symmetric.memory import SymmetricMemory
from tests.tools.symmetric import measure
from tests.tools.symmetric.labels import FAULTY, RIGHT

SCHEDULES = ["round_robin", "shuffled:1", "pct:2"]
nightly = settings.get_current_profile_name() == "nightly"


def test_the_corpus_is_as_large_as_it_has_to_be():
    kinds = Counter(program.kind for program in FAULTY)
    assert len(RIGHT) >= 40
    assert len(FAULTY) >= 40
    assert sum(count >= 4 for count in kinds.values()) >= 10


@pytest.mark.few(20)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.name)
def test_a_right_program_raises_no_alarm(program):
    for schedule in SCHEDULES:
        assert measure.run(program, schedule).error is None


@pytest.mark.parametrize("program", FAULTY, ids=lambda program: program.name)
def test_a_faulty_program_is_found_with_its_lines(program):
    outcome = measure.hunt(program)
    assert outcome.recalled, outcome.error
    assert outcome.right_lines, outcome.error
    if "SymmetricRace" in outcome.names:
        assert {place.line for place in outcome.error.places} == program.lines


RANKS, BYTES = 3, 8
ACCESS = st.tuples(st.integers(0, RANKS - 1), st.booleans(), st.integers(0, BYTES - 1), st.integers(1, 3))
SIGNAL = st.tuples(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1)).filter(lambda pair: pair[0] != pair[1])
STEPS = st.lists(st.one_of(ACCESS, ACCESS, SIGNAL, st.just("barrier"), st.just("all_reduce")), max_size=14)


def racy(steps):
    """The plain way: the signals and barriers of these programs are the same in every order of the ranks."""
    kept, past = [], [set() for _ in range(RANKS)]
    for number, step in enumerate(steps):
        if isinstance(step, str):
            past = [set().union(*past) for _ in range(RANKS)]
        elif len(step) == 2:
            past[step[1]] |= past[step[0]]
        else:
            rank, writes, lo, length = step
            mine = set(range(lo, min(lo + length, BYTES)))
            if any((writes or w) and mine & theirs and n not in past[rank] for n, w, theirs in kept):
                return True
            kept.append((number, writes, mine))
            past[rank].add(number)
    return False


def obey(steps):
    mine = symm_mem.empty(BYTES, dtype=torch.uint8, device="cpu").zero_()
    handle = symm_mem.rendezvous(mine, dist.group.WORLD)
    shared = handle.get_buffer(0, (BYTES,), torch.uint8)
    handle.barrier()
    for number, step in enumerate(steps):
        if step == "barrier":
            handle.barrier()
        elif step == "all_reduce":
            dist.all_reduce(torch.ones(1))
        elif len(step) == 2:
            if handle.rank == step[0]:
                handle.put_signal(step[1], channel=1 + number)
            elif handle.rank == step[1]:
                handle.wait_signal(step[0], channel=1 + number)
        elif step[0] == handle.rank:
            part = shared[step[2] : step[2] + step[3]]
            part.fill_(number) if step[1] else part.clone()
    handle.barrier()


@given(STEPS, st.sampled_from(["round_robin", "shuffled:7", "shuffled:8", "pct:9"]))
@settings(max_examples=2000 if nightly else 40, deadline=None)
def test_a_random_program_races_if_and_only_if_the_plain_way_says_so(steps, schedule):
    try:
        lt.run(obey, tuple(steps), ranks=RANKS, schedule=schedule)
    except SymmetricRace:
        found = True
    else:
        found = False
    assert found == racy(steps)


@pytest.mark.parametrize("program", [measure.in_phases, measure.spread], ids=lambda program: program.__name__)
def test_the_programs_that_measure_the_cost_make_as_many_accesses_as_they_say(program, monkeypatch):
    touched = []
    touch = SymmetricMemory.touch

    def count(memory, *use, **how):
        touched.append(use)
        touch(memory, *use, **how)

    monkeypatch.setattr(SymmetricMemory, "touch", count)
    lt.run(program, 1008, ranks=measure.RANKS)
    assert 1008 <= len(touched) < 1050
