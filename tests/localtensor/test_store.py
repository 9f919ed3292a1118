from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import localtensor as lt
from localtensor.errors import Deadlock, EarlyReturn

SCHEDULES = ["round_robin", "shuffled:1", "shuffled:2", "pct:3"]


def store():
    return c10d._get_default_store()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_who_asks_for_a_key_waits_until_another_rank_sets_it(schedule):
    def program():
        rank = dist.get_rank()
        after = store().get(f"from {rank - 1}") if rank else b""
        store().set(f"from {rank}", f"{after.decode()}{rank}")
        return after

    assert lt.run(program, ranks=4, schedule=schedule).values == (b"", b"0", b"01", b"012")


@pytest.mark.parametrize("schedule", [*SCHEDULES, *(f"shuffled:{seed}" for seed in range(3, 20))])
def test_who_waits_for_many_keys_waits_for_the_last(schedule):
    def program():
        rank, alone = dist.get_rank(), [dist.new_group([rank]) for rank in range(3)]
        if rank == 0:
            store().wait(["a 1", "a 2"], timedelta(seconds=1))
            return store().check(["a 1", "a 2"]), store().check(["a 1", "nobody's"])
        dist.barrier(alone[rank])  # where another may run
        return store().set(f"a {rank}", "here")

    assert lt.run(program, ranks=3, schedule=schedule, leftovers="ignore")[0] == (True, False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everybody_counts_and_nobody_is_lost(schedule):
    def program():
        mine = [store().add("count", dist.get_rank() + 1) for _ in range(3)]
        dist.barrier()
        return mine, store().get("count"), store().add("count", 0)

    run = lt.run(program, ranks=3, schedule=schedule)
    assert [(total, same) for _, total, same in run] == [(b"18", 18)] * 3
    assert len({number for mine, _, _ in run for number in mine}) == 9
    assert all(mine == sorted(mine) for mine, _, _ in run)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_wins_a_compare_and_set_and_all_know_it(schedule):
    def program():
        return store().compare_set("leader", "", f"rank {dist.get_rank()}")

    run = lt.run(program, ranks=4, schedule=schedule)
    assert len(set(run)) == 1 and run[0] in {b"rank 0", b"rank 1", b"rank 2", b"rank 3"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_who_asks_in_a_loop_lets_the_others_run(schedule):
    def program():
        mine, alone = f"rank {dist.get_rank()}".encode(), [dist.new_group([rank]) for rank in range(4)]
        while store().compare_set("lock", "", mine) != mine:
            pass
        count = int(store().get("count")) if store().check(["count"]) else 0
        dist.barrier(alone[dist.get_rank()])  # where others might run, but for the lock
        store().set("count", str(count + 1))
        store().set("lock", "")
        store().add("done", 1)
        while store().add("done", 0) < 4:
            pass
        while not store().check(["count"]):
            pass
        return store().get("count")

    assert lt.run(program, ranks=4, schedule=schedule, leftovers="ignore").values == (b"4",) * 4


POLLS = {
    "check": lambda: not store().check(["key"]),
    "add": lambda: store().add("count", 0) == 0,
    "compare_set": lambda: store().compare_set("key", "set", "seen") != b"seen",
}


@pytest.mark.parametrize("name", POLLS)
def test_a_question_in_a_loop_ends(name):
    def program():
        if dist.get_rank() == 2:
            store().add("count", 1)
            return store().set("key", "set")
        while POLLS[name]():
            pass
        return "seen"

    assert lt.run(program, ranks=3, timeout=20).values == ("seen", "seen", None)


def answers(kept):
    return [
        kept.set("a", "1"), kept.get("a"), kept.set("a", b"\x00\xff"), kept.get("a"),
        kept.add("n", 5), kept.add("n", -7), kept.get("n"), kept.set("m", "40"), kept.add("m", 2),
        kept.compare_set("new", "", "first"), kept.compare_set("new", "other", "second"),
        kept.compare_set("new", "first", "third"), kept.get("new"), kept.compare_set("no", "old", "new"),
        kept.append("log", "x"), kept.append("log", "y"), kept.get("log"),
        kept.multi_set(["p", "q"], ["1", "2"]), kept.multi_get(["q", "p"]),
        kept.check(["p"]), kept.check(["p", "zz"]), kept.check(["no"]), kept.wait(["p"]), kept.has_extended_api(),
        dist.PrefixStore("deep", kept).set("k", "v"), kept.get("deep/k"),
    ]  # fmt: skip


def test_it_answers_as_torchs_own_store_does():
    expected = answers(dist.PrefixStore("0", dist.HashStore()))
    assert lt.run(lambda: answers(store()), ranks=1).values == (expected,)


def test_a_key_that_nobody_sets_is_a_deadlock():
    def program():
        store().get("nobody")

    place = f"test_store.py:{program.__code__.co_firstlineno + 1}"
    with pytest.raises(Deadlock) as caught:
        lt.run(program, ranks=2)
    assert caught.value.circle == (0, 1)
    assert str(caught.value).splitlines()[1:] == [
        f"  rank {rank} waits for rank {1 - rank} in store.wait('0//nobody') #0 in group store at {place} in program"
        for rank in (0, 1)
    ]


def test_a_key_that_only_a_rank_that_has_returned_could_set_is_an_early_return():
    def program():
        if dist.get_rank() == 1:
            store().wait(["key"], timedelta(days=1))

    with pytest.raises(EarlyReturn) as caught:
        lt.run(program, ranks=2)
    assert caught.value.returned == {0: None}


def test_a_new_run_begins_with_an_empty_store():
    def program():
        before = store().check(["left"])
        dist.barrier()
        store().set("left", "here")
        return before

    assert [lt.run(program, ranks=2).values for _ in range(3)] == [(False, False)] * 3


def test_a_rank_may_make_a_store_of_its_own():
    def program():
        own = dist.HashStore()
        own.set("mine", str(dist.get_rank()))
        dist.barrier()
        return own.get("mine"), torch.ones(1).item()

    assert lt.run(program, ranks=2).values == ((b"0", 1.0), (b"1", 1.0))


def test_a_key_that_nobody_sets_says_what_to_do():
    def waits():
        dist.distributed_c10d._get_default_store().get("never")

    with pytest.raises(Deadlock) as told:
        lt.run(waits, ranks=2)
    assert "Let one of the ranks set the key before it waits for it." in str(told.value)
