"""What a program catches although not all ranks have raised it is reported when the mode ends."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import LocalTensorError, NotInLockstep, RanksDiverge
from localtensor.lockstep.caught_errors import MOST_NOTED


def raise_error():
    raise ValueError("no data")


def raised_on_rank_2():
    rank, value = dist.get_rank(), torch.ones(1)
    try:
        if rank == 2:
            raise_error()
    except ValueError:
        value = torch.zeros(1)
    return value


def refused_and_caught():
    value = torch.ones(1)
    try:
        if bool(torch.ones(1) * dist.get_rank() > 1):
            dist.barrier()
    except Exception:  # why: what is tested
        value = torch.zeros(1)
    return value


def helper():
    if bool(torch.ones(1) * dist.get_rank() > 1):
        dist.barrier()


def caught_further_out():
    try:
        helper()
    except:  # noqa: E722  # what is tested
        return torch.zeros(1)


def suppressed():
    with contextlib.suppress(Exception):
        helper()


def wrong_test():
    with pytest.raises(Exception):  # noqa: B017, PT011  # what is tested
        helper()


def inside_of_a_handler():
    try:

        def inner():
            with contextlib.suppress(Exception):
                helper()

    except RanksDiverge:
        return
    inner()


def of_the_last_rank():
    mine = torch.ones(7).chunk(4)[dist.get_rank()]
    try:
        return mine.view(2)
    except RuntimeError:
        return mine


def caught_in_a_loop():
    for _ in range(2 * MOST_NOTED):
        with contextlib.suppress(Exception):
            helper()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (raised_on_rank_2, "an error of rank 2 was caught at test_caught_errors.py:21 in raised_on_rank_2, `ValueError: no data`"),
        (refused_and_caught, "a refusal was caught at test_caught_errors.py:31 in refused_and_caught, `RanksDiverge: bool: "),
        (caught_further_out, "a refusal was caught at test_caught_errors.py:45 in caught_further_out"),
        (suppressed, "in suppressed, `RanksDiverge"),
        (wrong_test, "in wrong_test, `RanksDiverge"),
        (inside_of_a_handler, "in inner, `RanksDiverge"),
        (of_the_last_rank, "an error of some ranks was caught at"),
        (caught_in_a_loop, "in caught_in_a_loop, `RanksDiverge"),
    ],
)  # fmt: skip
def test_what_the_program_has_caught_is_reported(program, words):
    with pytest.raises(NotInLockstep, match="all ranks have gone on behind it") as found, lt.LocalTensorMode(4):
        program()
    assert words in str(found.value)


def expected_by_name():
    with pytest.raises(RanksDiverge):
        helper()
    try:
        helper()
    except (KeyError, LocalTensorError):
        return torch.ones(1)


def any_rank_may_raise():
    with pytest.raises(ValueError, match="no data"):
        raised_and_not_caught()
    return torch.ones(1)


def raised_on_all_ranks():
    try:
        if dist.get_rank() >= 0:
            raise_error()
    except ValueError:
        return torch.ones(1)


def caught_where_it_is_raised():
    rank, value = dist.get_rank(), torch.zeros(1)
    if rank == 2:
        try:
            raise_error()
        except ValueError:
            value = torch.ones(1)
    return value


def of_no_rank():
    mine = torch.ones(7).chunk(4)[dist.get_rank()]
    try:
        return mine.view(3)
    except RuntimeError:
        return mine[:1]


def of_the_program():
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError:
        return torch.ones(1)


@pytest.mark.parametrize(
    "program",
    [expected_by_name, any_rank_may_raise, raised_on_all_ranks, caught_where_it_is_raised, of_no_rank, of_the_program],
    ids=lambda f: f.__name__,
)
def test_what_is_expected_and_what_all_ranks_raise_is_not(program):
    with lt.LocalTensorMode(4):
        value = program()
    assert value.sum() == 1 if program is not caught_where_it_is_raised else value.on(2) == 1 and value.on(0) == 0


def raised_and_not_caught():
    with contextlib.suppress(TypeError):
        if dist.get_rank() == 2:
            raise_error()


def test_an_error_that_ends_the_program_is_that_error():
    with pytest.raises(ValueError, match="no data"), lt.LocalTensorMode(4):
        raised_and_not_caught()


def fails_behind_it():
    suppressed()
    raise KeyError


def test_a_mode_that_is_entered_again_has_forgotten():
    mode = lt.LocalTensorMode(4)
    with pytest.raises(KeyError), mode:
        fails_behind_it()
    with mode:
        assert dist.get_world_size() == 4
    with pytest.raises(NotInLockstep), mode:
        suppressed()
    with mode:
        assert dist.get_world_size() == 4
