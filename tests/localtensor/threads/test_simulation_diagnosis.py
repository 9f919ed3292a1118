from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor import errors

ORDERS = ["round_robin", "shuffled:0", "shuffled:1", "pct:0"]


class Speechless(Exception):
    def __str__(self):
        raise KeyError("no words")


class Incomparable:
    def __eq__(self, other):
        raise ZeroDivisionError("not with me")

    __hash__ = None


def verdict(program, ranks=3, schedule="round_robin"):
    with pytest.raises(lt.LocalTensorError) as caught:
        lt.run(program, ranks=ranks, schedule=schedule)
    return caught.value


@pytest.mark.parametrize("schedule", ORDERS)
def test_parts_that_do_not_fit_are_the_cause_of_what_is_raised_after_them(schedule):
    def program():
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        if rank < 2:
            work = dist.all_reduce(torch.ones(1 + rank), async_op=True)
            store.set(f"{rank}", "there")
            work.wait()
        store.wait(["0", "1"])
        raise ValueError("an echo")

    assert type(verdict(program, schedule=schedule)) is errors.ShapeMismatch


@pytest.mark.parametrize("schedule", ORDERS)
def test_what_was_raised_first_is_the_cause_of_parts_that_do_not_fit(schedule):
    def program():
        if dist.get_rank() == 2:
            dist.distributed_c10d._get_default_store().set("raised", "yes")
            raise ValueError("first")
        dist.distributed_c10d._get_default_store().get("raised")
        x = torch.ones(1 + dist.get_rank())
        if x.numel() == 1:
            dist.broadcast(x, 2)
        else:
            dist.recv(x, 2)

    error = verdict(program, schedule=schedule)
    assert type(error) is errors.RankRaised and str(error.__cause__) == "first"
    assert {wait.rank for wait in error.waits} == {0, 1}


@pytest.mark.parametrize("schedule", ORDERS)
def test_what_was_raised_first_is_the_cause_even_if_those_who_wait_do_not_fit(schedule):
    def program():
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 2:
            store.set("raised", "now")
            raise ValueError("first")
        store.get("raised")
        dist.all_reduce(torch.ones(1 + dist.get_rank()))

    error = verdict(program, schedule=schedule)
    assert type(error) is errors.RankRaised and str(error.__cause__) == "first"


@pytest.mark.parametrize("schedule", ORDERS)
def test_a_rank_that_returned_is_the_cause_rather_than_those_who_wait_for_each_other(schedule):
    def program():
        if dist.get_rank() == 0:
            return
        dist.recv(torch.zeros(1), 0 if dist.get_rank() == 1 else 1)

    error = verdict(program, schedule=schedule)
    assert type(error) is errors.EarlyReturn and list(error.returned) == [0]
    assert [(wait.rank, wait.ranks) for wait in error.waits] == [(1, (0,)), (2, (1,))]


def test_messages_that_never_met_come_before_works_that_no_one_waited_for():
    def program():
        dist.all_reduce(torch.ones(1), async_op=True)
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), 1)

    assert type(verdict(program)) is errors.MessagesLeftOver


def test_an_exception_comes_before_all_that_was_left_undone():
    def program():
        dist.all_reduce(torch.ones(1), async_op=True)
        if dist.get_rank() == 0:
            raise ValueError("zero")

    assert type(verdict(program)) is errors.RankRaised


def test_works_that_no_one_waited_for_are_counted_on_each_rank():
    def program():
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
        works[dist.get_rank() % 2].wait()

    error = verdict(program)
    assert type(error) is errors.WorkNotWaited
    assert sorted((call.rank, call.number) for call in error.calls) == [(0, 1), (1, 0), (2, 1)]


def test_a_group_that_a_member_never_made_is_reported():
    def program():
        if dist.get_rank() < 2:
            dist.new_group([0, 1, 2])

    error = verdict(program)
    assert type(error) is errors.GroupMismatch and {place.function for place in error.places} == {"program"}


def test_a_collective_that_refuses_what_fits_is_reported_with_its_call():
    def program():
        dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(5))

    error = verdict(program)
    assert isinstance(error, errors.CollectiveFailed | errors.RankRaised | errors.ShapeMismatch)
    assert Path(__file__).name in str(error) and "reduce_scatter_tensor" in str(error)


def test_an_exception_without_words_is_reported_all_the_same():
    def program():
        if dist.get_rank() == 1:
            raise Speechless
        dist.barrier()

    with pytest.raises(errors.RankRaised) as caught:
        lt.run(program, ranks=2)
    assert caught.value.raised[0].kind == "Speechless"
    assert "Speechless: (its own text failed: KeyError)" in str(caught.value)
    assert type(caught.value.__cause__) is Speechless


def test_what_torch_itself_refuses_is_about_all_ranks_and_not_the_last_to_come(monkeypatch):
    def program():
        dist.all_reduce(torch.ones(2))

    def full(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("localtensor.collectives.c10d_table.fold", full)
    with pytest.raises(errors.CollectiveFailed) as caught:
        lt.run(program, ranks=3)
    assert caught.value.ranks == (0, 1, 2)
    assert str(caught.value).splitlines()[0] == (
        "all_reduce #0 in group 0: tensors: of ranks 0, 1, 2: all ranks have arrived, and what they bring is refused. "
        "RuntimeError: out of memory"
    )
    assert type(caught.value.__cause__) is RuntimeError


def test_values_that_cannot_be_compared_are_reported_with_the_reason():
    with pytest.raises(errors.CollectiveFailed) as caught:
        lt.run(lambda: lt.assert_same_on_all_ranks(Incomparable()), ranks=2)
    assert type(caught.value.__cause__) is ZeroDivisionError


def test_a_crash_of_ours_is_raised_as_it_is_and_is_no_verdict(monkeypatch):
    def crashes(*arguments):
        raise AttributeError("ours")

    monkeypatch.setattr("localtensor.collectives.c10d_table.fold", crashes)
    with pytest.raises(AttributeError, match=r"^ours$"):
        lt.run(lambda: dist.all_reduce(torch.ones(2)), ranks=3)
    monkeypatch.undo()
    assert lt.run(dist.get_rank, ranks=2).values == (0, 1)


def test_a_fault_bears_what_all_ranks_called_before_it():
    def program():
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 1:
            raise ValueError("here")
        dist.barrier()

    fault = verdict(program)
    assert [call.kind for call in fault.log] == ["all_reduce"] * 3 + ["barrier"] * 2
    assert [{call.rank for call in fault.log if call.kind == kind} for kind in ("all_reduce", "barrier")] == [
        {0, 1, 2}, {0, 2},
    ]  # fmt: skip


def test_the_exceptions_of_all_ranks_that_raised_are_there_and_the_first_is_the_cause():
    def program():
        rank = dist.get_rank()
        if rank != 1:
            raise ValueError(rank)

    fault = verdict(program)
    assert {rank: error.args for rank, error in fault.errors.items()} == {0: (0,), 2: (2,)}
    assert fault.__cause__ is fault.errors[fault.raised[0].rank]
