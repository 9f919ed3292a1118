"""Whole programs on rank threads and on gloo processes: the same answers, and a refusal wherever gloo refuses.

Where the two differ on purpose, different_programs.py has the program and the reason.  A case that gloo starts to
treat otherwise turns red here.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import localtensor as lt
from localtensor._util import ambient
from localtensor.errors import LocalTensorError, NeverEnded, RankRaised
from localtensor.processes import pool
from tests.real import api_programs, different_programs, refused_programs
from tests.real.api_programs import WITH_FOUR, WITH_THREE
from tests.real.different_programs import BOTH_ANSWER, WE_ANSWER, WE_REFUSE
from tests.real.refused_programs import GLOO_SAYS

# torch 2.13 renames some functional collectives, and sets new names of the old ones' arguments.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

Program = Callable[[], Any]
HANGS = 1.0  # seconds after which gloo is said to hang


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """A rank that raised or returned is given up soon: nothing here computes for long."""
    before = pool.GRACE, pool.LEAVE
    ambient.close_pools()
    pool.GRACE, pool.LEAVE = 0.3, 0.4
    yield
    ambient.close_pools()
    pool.GRACE, pool.LEAVE = before


def on(way: str, program: Program, ranks: int = 2, timeout: float = 20.0) -> lt.Run:
    return lt.run(program, ranks=ranks, on=way, timeout=timeout, leftovers="ignore")


def name(program: Program) -> str:
    return program.__name__


@pytest.mark.few(24)
@pytest.mark.parametrize("program", WITH_THREE, ids=name)
def test_three_ranks_hold_the_same_both_ways(program):
    lt.testing.assert_same(on("threads", program, 3), on("gloo", program, 3))


@pytest.mark.parametrize("program", WITH_FOUR, ids=name)
def test_four_ranks_hold_the_same_both_ways(program):
    lt.testing.assert_same(on("threads", program, 4), on("gloo", program, 4))


@pytest.mark.few(35)
@pytest.mark.parametrize("program", GLOO_SAYS, ids=name)
def test_what_gloo_refuses_the_simulation_refuses(program):
    with pytest.raises(LocalTensorError):
        on("threads", program)
    words = GLOO_SAYS[program]
    if not words:
        with pytest.raises(NeverEnded):
            on("gloo", program, timeout=HANGS)
        return
    with pytest.raises(RankRaised if "hangs" not in words else (RankRaised, NeverEnded)) as refused:
        on("gloo", program, timeout=HANGS if "hangs" in words else 20.0)
    if isinstance(refused.value, RankRaised):
        said = " ".join(f"{raised.kind}: {raised.message}" for raised in refused.value.raised)
        assert any(part in said for part in words.split("|")), said


@pytest.mark.parametrize("program", WE_ANSWER, ids=name)
def test_we_answer_what_gloo_alone_refuses(program):
    answer, _why = WE_ANSWER[program]
    assert list(on("threads", program)) == answer
    with pytest.raises(RankRaised):
        on("gloo", program)


@pytest.mark.parametrize("program", WE_REFUSE, ids=name)
def test_we_refuse_what_gloo_lets_pass(program):
    word, _why = WE_REFUSE[program]
    with pytest.raises(LocalTensorError) as refused:
        on("threads", program)
    cause = refused.value.__cause__ if isinstance(refused.value, RankRaised) else refused.value
    assert type(cause).__name__ == word
    assert len(on("gloo", program)) == 2


@pytest.mark.parametrize("program", BOTH_ANSWER, ids=name)
def test_we_answer_otherwise_than_gloo(program):
    answer, _why = BOTH_ANSWER[program]
    assert list(on("threads", program)) == answer
    assert list(on("gloo", program)) != answer


def test_every_program_stands_in_a_table_and_every_difference_has_a_reason():
    tables = (*WITH_THREE, *WITH_FOUR, *GLOO_SAYS, *WE_ANSWER, *WE_REFUSE, *BOTH_ANSWER)
    assert len(set(tables)) == len(tables)
    rooms = (api_programs, refused_programs, different_programs)
    written = {
        f for room in rooms for f in vars(room).values() if inspect.isfunction(f) and f.__module__ == room.__name__
    }
    helpers = {api_programs.mine, api_programs.like, api_programs.here}
    assert written - helpers == set(tables)
    reasons = [why for table in (WE_ANSWER, WE_REFUSE, BOTH_ANSWER) for _, why in table.values()]
    assert all(re.search(r"\w+ \w+", why) for why in reasons)
