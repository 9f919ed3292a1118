"""Ordinary DTensor code gives in lockstep what it gives on rank threads, on every rank; and is refused where it is.

CI runs the same few programs each time; `--hypothesis-profile=nightly` draws others, and many more.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from localtensor.errors import LocalTensorError, RankRaised
from tests.end_to_end.programs.lockstep_ways import assert_bits, in_lockstep, on_threads
from tests.properties.dtensor_programs import STEPS, Program, play, programs

nightly = settings.get_current_profile_name() == "nightly"
whole_programs = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
WORDS = 60  # of an error's first line, which must be the same


def outcome(ways: Any, program: Program) -> Any:
    try:
        return ways(play, program, ranks=program.ranks)
    except Exception as error:  # why: whatever torch raises, it must raise in both
        return error


def said_alike(lockstep: Exception, threads: Exception) -> bool:
    """The same words; or, of ranks that bring what does not fit together, ours on either side."""
    if isinstance(lockstep, LocalTensorError):
        return isinstance(threads, LocalTensorError) and not isinstance(threads, RankRaised)
    return str(lockstep).strip().partition("\n")[0][:WORDS] in str(threads)


def check(program: Program) -> str:
    lockstep, threads = outcome(in_lockstep, program), outcome(on_threads, program)
    if isinstance(lockstep, Exception) or isinstance(threads, Exception):
        assert isinstance(lockstep, Exception), f"only threads raise: {threads}"
        assert isinstance(threads, Exception), f"only lockstep raises: {lockstep!r}"
        assert said_alike(lockstep, threads), f"{lockstep!r} in lockstep, {threads!r} on threads"
        return "raises"
    for rank, (mine, theirs) in enumerate(zip(lockstep, threads, strict=True)):
        assert_bits(mine, theirs, f"rank {rank}", exact=program.exact)
    return "equal"


def test_a_program_gives_in_lockstep_what_it_gives_on_rank_threads():
    counted: Counter[str] = Counter()

    @settings(whole_programs, max_examples=2000 if nightly else 10)
    @given(program=programs())
    def law(program: Program) -> None:
        counted[check(program)] += 1

    law()
    assert counted["equal"] > 2 * counted["raises"], counted


@pytest.mark.slow  # hundreds of draws
def test_the_draws_reach_every_step_mesh_and_source():
    seen = set()

    @settings(max_examples=400, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(programs())
    def look(program: Program) -> None:
        seen.update((program.mesh, program.part, program.source, *(step[0] for step in program.steps)))
        seen.update(text[:2] for text in program.placed)

    look()
    assert {*STEPS, "row", "three", "grid", "oblong", "cube", "whole", "dp", "tp", "flat"} <= seen
    assert {"distributed", "alone", "from local", "factory", "R", "S0", "SS"} <= seen


# -- what this law has found, each in its smallest form

FOUND = {
    "sizes that differ between the groups of an axis, one of them none": Program(
        "oblong", "whole", (4, 5), ("S1", "R"), "factory", (("cat", 1, ("R", "S0"), True, 1),), False
    ),
    "a strided shard that is short": Program(
        "grid", "whole", (5, 3), ("SS0,2", "S0"), "alone", (("redistribute", 0, ("S0", "S0"), True, 0),), True
    ),
    "two cuts of one dim, uneven": Program(
        "oblong", "whole", (7, 3), ("S0", "S0"), "distributed", (("redistribute", 0, ("S1", "S0"), True, 0),), True
    ),
    "one row for six ranks": Program(
        "oblong", "whole", (1, 7), ("S0", "S0"), "alone", (("reduce", 0, ("R", "R"), False, 1),), True
    ),
    "rows of an embedding, which the ranks share unevenly": Program(
        "three", "whole", (7, 4), ("S0",), "distributed", (("embedding", 0, ("R",), False, 1),), True
    ),
    "shards of which some have as many rows as there are ranks, moved to another dim": Program(
        "oblong",
        "whole",
        (5, 4, 4),
        ("SS0,2", "S0"),
        "alone",
        (
            ("redistribute", 0, ("R", "R"), False, 0),
            ("matmul", 0, ("S1", "R"), False, 2),
            ("where", 0, ("S1", "R"), False, 0),
        ),
        False,
    ),
    "a number, partial": Program("grid", "whole", (), ("R", "R"), "alone", (("draw", 0, ("R", "R"), False, 0),), True),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    assert check(FOUND[name]) == "equal"


def test_what_torch_refuses_is_refused_in_the_same_words():
    uneven = Program("row", "whole", (7, 4), ("S0",), "distributed", (("flatten", 0, ("R",), True, 0),), False)
    wrong = Program("row", "whole", (3, 4), ("R",), "distributed", (("narrow", 5, ("R",), True, 0),), False)
    assert [check(uneven), check(wrong)] == ["raises", "raises"]


def test_a_wrong_number_is_seen(monkeypatch):
    """The law is not blind: one rank's last bit, and it is red."""
    program = Program("row", "whole", (4,), ("S0",), "distributed", (), False)
    found = outcome(in_lockstep, program)
    found[2][0][0] += 2**-50
    monkeypatch.setitem(globals(), "in_lockstep", lambda *args, **kwargs: found)
    with pytest.raises(AssertionError, match=r"rank 2\[0\]\[0\]"):
        check(program)
