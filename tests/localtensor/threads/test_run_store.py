import queue
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import localtensor as lt
from localtensor.errors import Deadlock, EarlyReturn, NotServed


def store():
    return c10d._get_default_store()


@pytest.mark.ranks(4, schedules=4)
def test_who_asks_for_a_key_waits_until_another_rank_sets_it(rank):
    after = store().get(f"from {rank - 1}") if rank else b""
    store().set(f"from {rank}", f"{after.decode()}{rank}")
    assert after == (b"", b"0", b"01", b"012")[rank]


@pytest.mark.ranks(3, schedules=21)
def test_who_waits_for_many_keys_waits_for_the_last(rank):
    alone = [dist.new_group([one]) for one in range(3)]
    if rank == 0:
        store().wait(["a 1", "a 2"], timedelta(seconds=1))
        assert store().check(["a 1", "a 2"]) and not store().check(["a 1", "nobody's"])
    else:
        dist.barrier(alone[rank])  # where another may run
        store().set(f"a {rank}", "here")


@pytest.mark.ranks(3, schedules=4)
def test_everybody_counts_and_no_one_is_lost(rank):
    mine, everybody = [store().add("count", rank + 1) for _ in range(3)], [None] * 3
    dist.all_gather_object(everybody, mine)
    assert store().get("count") == b"18" and store().add("count", 0) == 18
    assert len({number for each in everybody for number in each}) == 9
    assert mine == sorted(mine)


@pytest.mark.ranks(4, schedules=4)
def test_one_rank_wins_a_compare_and_set_and_all_know_it(rank):
    told, everybody = store().compare_set("leader", "", f"rank {rank}"), [None] * 4
    dist.all_gather_object(everybody, told)
    assert set(everybody) == {told} < {b"rank 0", b"rank 1", b"rank 2", b"rank 3"}


@pytest.mark.ranks(4, schedules=4)
def test_who_asks_in_a_loop_lets_the_others_run(rank):
    mine, alone = f"rank {rank}".encode(), [dist.new_group([one]) for one in range(4)]
    while store().compare_set("lock", "", mine) != mine:
        pass
    count = int(store().get("count")) if store().check(["count"]) else 0
    dist.barrier(alone[rank])  # where others might run, but for the lock
    store().set("count", str(count + 1))
    store().set("lock", "")
    store().add("done", 1)
    while store().add("done", 0) < 4:
        pass
    while not store().check(["count"]):
        pass
    assert store().get("count") == b"4"


POLLS = {
    "check": lambda: not store().check(["key"]),
    "add": lambda: store().add("count", 0) == 0,
    "compare_set": lambda: store().compare_set("key", "set", "seen") != b"seen",
}


@pytest.mark.ranks(3, timeout=20)
@pytest.mark.parametrize("name", POLLS)
def test_a_question_in_a_loop_ends(name, rank):
    if rank == 2:
        store().add("count", 1)
        store().set("key", "set")
    else:
        while POLLS[name]():
            pass
        assert store().get("key") in {b"set", b"seen"}


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
        kept.delete_key("p"), kept.check(["p"]), kept.delete_key("p"), kept.check(["q"]),
    ]  # fmt: skip


@pytest.mark.ranks(1)
def test_it_answers_as_torchs_own_store_does():
    assert answers(store()) == answers(dist.PrefixStore("0", dist.HashStore()))


@pytest.mark.ranks(1)
def test_keys_are_counted_those_of_all_prefixes():
    kept, alone = store(), dist.HashStore()
    before = kept.num_keys()
    for each in (kept, alone):
        each.set("one", "1")
        each.set("one", "2")
        dist.PrefixStore("deep", each).set("two", "2")
    assert kept.num_keys() - before == alone.num_keys() == 2
    assert kept.delete_key("one") is alone.delete_key("one") is True
    assert kept.num_keys() - before == alone.num_keys() == 1


@pytest.mark.ranks(2)
def test_a_clone_of_a_store_has_its_keys(rank):
    store().clone().set(f"from {rank}", "here")
    assert store().get(f"from {1 - rank}") == b"here"


def test_a_key_that_no_one_sets_is_a_deadlock():
    def program():
        store().get("nobody")

    place = f"{Path(__file__).name}:{program.__code__.co_firstlineno + 1}"
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


@pytest.mark.ranks(2)
def test_a_rank_may_make_a_store_of_its_own(rank):
    own = dist.HashStore()
    own.set("mine", str(rank))
    dist.barrier()
    assert own.get("mine") == str(rank).encode()


def test_a_key_that_no_one_sets_says_what_to_do():
    def waits():
        dist.distributed_c10d._get_default_store().get("never")

    with pytest.raises(Deadlock) as told:
        lt.run(waits, ranks=2)
    assert "Let one of the ranks set the key before it waits for it." in str(told.value)


def tcp(port):
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    store.set(f"of {rank}", f"value {rank}")
    seen = store.get(f"of {1 - rank}"), store.add("count", 1) in (1, 2), store.host, store.port == port
    # The server lives in rank 0: on gloo a rank that is slower would find it gone.
    dist.barrier()
    return seen


def file(path):
    rank, store = dist.get_rank(), dist.FileStore(path, 2)
    store.set(f"of {rank}", f"value {rank}")
    return store.get(f"of {1 - rank}"), dist.PrefixStore("p", store).add("own", 3) >= 3


def test_stores_that_a_program_makes_are_those_of_all_ranks_as_on_gloo(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for program, argument in ((tcp, port), (file, str(tmp_path / "store"))):
        threads = lt.run(program, argument, ranks=2, timeout=30).values
        assert threads == lt.run(program, argument, ranks=2, on="gloo").values
        assert threads[0][0] == b"value 1"


def test_a_client_whose_server_never_begins_is_a_deadlock():
    with pytest.raises(Deadlock):
        lt.run(lambda: dist.TCPStore("127.0.0.1", 29_999, 2, False), ranks=2, timeout=30)


def test_outside_of_a_rank_stores_are_torchs_own(tmp_path):
    made, todo = [], queue.Queue()
    outside = threading.Thread(target=lambda: made.append(todo.get()()))
    outside.start()

    def program():
        if dist.get_rank() == 0:
            todo.put(lambda: dist.FileStore(str(tmp_path / "own"), 1))
            outside.join()

    lt.run(program, ranks=2)
    after = dist.FileStore(str(tmp_path / "after"), 1)
    assert [type(made[0]), type(after)] == [dist.FileStore] * 2
    after.set("key", "value")
    assert after.get("key") == b"value"


def test_rpc_is_refused_by_name():
    def program():
        from torch.distributed import rpc

        with pytest.raises(NotServed, match="init_rpc"):
            rpc.init_rpc(f"worker {dist.get_rank()}", rank=dist.get_rank(), world_size=2)
        return True

    assert lt.run(program, ranks=2, timeout=30).values == (True, True)


def own_hash_store():
    """A store that a helper thread fills while its rank waits."""
    own, found = dist.HashStore(), []
    helper = threading.Thread(target=lambda: [dist.barrier(), own.set("key", f"of {dist.get_rank()}")])
    helper.start()
    found.append(own.get("key").decode())
    helper.join()
    prefixed = dist.PrefixStore("a", own)
    prefixed.set("b", "c")
    return *found, own.get("a/b"), own.add("n", 2), own.check(["nothing"])


def test_a_hash_store_lets_the_threads_of_its_rank_go_on():
    assert lt.run(own_hash_store, ranks=2).values == lt.run(own_hash_store, ranks=2, on="gloo").values


def test_a_hash_store_that_ranks_share_by_closure_lets_the_others_run():
    def program():
        if dist.get_rank() == 0:
            stores.append(dist.HashStore())
            dist.barrier()
            return stores[0].get("key")
        dist.barrier()
        stores[0].set("key", "here")
        return b"here"

    stores = []
    assert lt.run(program, ranks=3).values == (b"here",) * 3


def test_a_key_of_a_hash_store_that_none_sets_is_reported():
    with pytest.raises((Deadlock, EarlyReturn), match=r"store\.wait"):
        lt.run(lambda: dist.HashStore().get("nobody's"), ranks=2)
