"""The mode itself: what it leaves behind, and who may be in it at the same time."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor._util import ambient
from localtensor.errors import AnotherMode, ModeBusy, NoMode, NoRanks, NotATensor, NotHeld, ValuesDiffer
from localtensor.lockstep.mode import LocalTensorMode, rank_map, tensor_map
from localtensor.lockstep.values.local_tensor import LocalTensor
from tests.tools import warm


def is_clean():
    plain = type(torch.ones(2) + 1) is torch.Tensor and not dist.is_initialized()
    return plain and ambient.lockstep() is None and not ambient._open_modes


def test_inside_tensors_hold_all_ranks_and_afterwards_they_are_plain():
    with LocalTensorMode(4) as mode:
        assert type(torch.ones(2)) is LocalTensor and dist.get_world_size() == 4 and ambient.lockstep() is mode
    assert is_clean()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_everything_as_it_was(error):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    mode = LocalTensorMode(4)

    def program():
        with mode:
            torch.randn(3)
            dist.new_group([0, 1])
            raise error

    with pytest.raises(error):
        program()
    assert is_clean() and torch.equal(torch.get_rng_state(), before) and mode.groups.by_name == {}
    with mode:  # and it can be entered again
        x = rank_map(torch.tensor)
        dist.all_reduce(x)
        assert x.reconcile() == 6
    assert is_clean()


def test_an_exception_while_entering_leaves_everything_as_it_was(monkeypatch):
    mode = LocalTensorMode(2)
    monkeypatch.setattr(mode.groups, "open", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mode.__enter__()
    assert is_clean()


def test_the_random_stream_goes_on_where_it_was():
    torch.manual_seed(5)
    with LocalTensorMode(2):
        inside = torch.randn(4).reconcile()
        rank_map(lambda rank: torch.randn(rank + 1))
    after = torch.randn(4)
    torch.manual_seed(5)
    assert torch.equal(inside, after) and torch.equal(after, torch.randn(4))


def test_a_mode_within_a_mode():
    with LocalTensorMode(2) as outer:
        x = rank_map(torch.tensor)
        with LocalTensorMode(3) as inner:
            y = rank_map(torch.tensor)
            assert dist.get_world_size() == 3 and ambient.lockstep() is inner and y._mode is inner
            with pytest.raises(AnotherMode):
                x + 1
            with pytest.raises(ModeBusy, match="entered already"):
                outer.__enter__()
        dist.all_reduce(x)
        assert x.reconcile() == 1 and ambient.lockstep() is outer
    assert is_clean()


def test_the_same_mode_twice_is_refused_also_from_another_thread():
    mode, caught = LocalTensorMode(2), []

    def enter():
        with pytest.raises(ModeBusy, match="entered already") as error, mode:
            pass
        caught.append(error.value)

    with mode:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(20)
        assert type(torch.ones(1)) is LocalTensor
    assert len(caught) == 1 and is_clean()


def test_two_threads_have_modes_of_their_own_at_once():
    meet, found = threading.Barrier(2, timeout=20), {}

    def work(ranks):
        with LocalTensorMode(ranks) as mode:
            meet.wait()
            pairs, _ = dist.new_subgroups_by_enumeration([[0, ranks - 1], list(range(1, ranks - 1))])
            for _ in range(20):
                x, y = rank_map(torch.tensor), rank_map(torch.tensor)
                dist.all_reduce(x)
                dist.all_reduce(y, group=pairs)
            meet.wait()
            found[ranks] = (x.reconcile().item(), y.on(0).item(), dist.get_world_size(), len(mode.groups.by_name))

    threads = [threading.Thread(target=work, args=(ranks,)) for ranks in (4, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {ranks: sums[:3] for ranks, sums in found.items()} == {4: (6, 3, 4), 6: (15, 5, 6)} and is_clean()


def test_run_is_refused_inside_a_mode():
    with LocalTensorMode(2), pytest.raises(ModeBusy, match=r"localtensor\.run was called inside of a LocalTensorMode"):
        lt.run(dist.get_rank, ranks=2)
    with LocalTensorMode(2), pytest.raises(ModeBusy):
        lt.run(dist.get_rank, ranks=2, on="gloo")
    assert is_clean() and lt.run(dist.get_rank, ranks=2).values == (0, 1)


def test_run_is_refused_while_another_thread_is_in_a_mode():
    opened, leave, left = threading.Event(), threading.Event(), []

    def hold():
        with LocalTensorMode(2):
            opened.set()
            leave.wait(20)
            x = rank_map(torch.tensor)
            dist.all_reduce(x)
            left.append(x.reconcile().item())

    thread = threading.Thread(target=hold)
    thread.start()
    opened.wait(20)
    try:
        with pytest.raises(ModeBusy, match="while another thread is in a LocalTensorMode"):
            lt.run(dist.get_rank, ranks=2)
    finally:
        leave.set()
        thread.join(20)
    assert left == [1] and lt.run(dist.get_rank, ranks=2).values == (0, 1)


def test_a_mode_is_refused_in_a_rank_and_while_run_is_at_work():
    caught = []

    def enter():
        try:
            with LocalTensorMode(2):
                pass
        except ModeBusy as error:
            caught.append(str(error))

    def program():
        enter()
        if dist.get_rank() == 0:
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join(20)
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert lt.run(program, ranks=2).values == (2, 2)
    assert sum("this is a rank of localtensor.run" in text for text in caught) == 3  # a rank's thread is the rank's
    assert len(caught) == 3 and is_clean()


@pytest.mark.parametrize("ranks", [0, -1, True, 2.5, "2", None, [], [0, -1], [0, "1"], [True], 10**12])
def test_no_ranks(ranks):
    with pytest.raises(NoRanks, match="LocalTensorMode: ranks"):
        LocalTensorMode(ranks)


def test_some_ranks():
    with LocalTensorMode([5, 0, 2, 2]) as mode:
        assert mode.ranks == (0, 2, 5) and torch.ones(1).ranks == (0, 2, 5)
        assert rank_map(torch.tensor).on(5) == 5
        with pytest.raises(NotHeld):
            torch.ones(1).on(1)


def test_each_rank_by_itself():
    with LocalTensorMode(3) as mode:
        x = rank_map(lambda rank: torch.full((2,), dist.get_rank()))
        y = tensor_map(x, lambda rank, x: x * 10 + rank if rank else None)
        assert y.ranks == (1, 2) and y.on(2).tolist() == [22, 22] and str(mode.rank()) == "RankInts(0, 1, 2)"
        with mode.disable():
            assert type(torch.ones(1)) is torch.Tensor
        with pytest.raises(ZeroDivisionError):
            rank_map(lambda rank: 1 / 0)
        assert str(dist.get_rank()) == "RankInts(0, 1, 2)" and type(torch.ones(1)) is LocalTensor


@pytest.mark.parametrize(("make", "what"), [
    (lambda rank: torch.ones(2, dtype=torch.float64 if rank else torch.float32), "dtype"),
    (lambda rank: torch.ones([2] * (rank + 1)), "ndim"),
    (lambda rank: torch.ones(2, device="meta" if rank else "cpu"), "device"),
])  # fmt: skip
def test_values_that_do_not_fit_together(make, what):
    with LocalTensorMode(3), pytest.raises(ValuesDiffer, match=what):
        rank_map(make)


@pytest.mark.parametrize("odd", [0, 2])
def test_what_is_no_tensor_is_named_with_its_rank(odd):
    with LocalTensorMode(3), pytest.raises(NotATensor, match=f"rank_map: value: a NoneType on rank {odd}: each rank's"):
        rank_map(lambda rank: None if rank == odd else torch.ones(2))


def test_what_needs_a_mode_says_so_outside_of_any():
    with pytest.raises(NoMode, match=r"rank_map: mode: called at test_mode.py:\d+ in .*: no LocalTensorMode is"):
        rank_map(torch.tensor)
    with pytest.raises(NoMode, match="tensor_map: mode"):
        tensor_map(torch.ones(2), lambda rank, x: x)


def test_a_plain_tensor_is_mapped_as_one_that_all_ranks_hold():
    plain = torch.ones(2)
    with LocalTensorMode([0, 2]):
        y = tensor_map(plain, lambda rank, x: x * rank)
        assert y.ranks == (0, 2) and y.on(2).tolist() == [2, 2] and y.on(0).tolist() == [0, 0]


def test_who_holds_nothing():
    with LocalTensorMode(3) as mode:
        with pytest.raises(
            NotHeld, match="LocalTensor: ranks: ranks 0, 1, 2: no value is held there, nor anywhere else"
        ):
            mode.gather({})
        with pytest.raises(
            NotHeld, match="tensor_map: ranks: ranks 0, 1, 2: no value is held there, nor anywhere else"
        ):
            tensor_map(torch.ones(1), lambda rank, x: None)
        with pytest.raises(NotHeld, match="LocalTensor: ranks: rank 7: no value is held there, only on ranks 0, 1, 2"):
            mode.gather({7: torch.ones(1)})


def test_two_threads_that_open_their_first_mode_at_once_patch_torch_once():
    """In a process of its own, where nothing is patched: the second thread arrives while the first one patches."""
    script = (
        "import threading\n"
        "from localtensor.lockstep import mode\n"
        "made, real = [], mode.rank_queries.RoutedWorld\n"
        "def enter():\n"
        "    with mode.LocalTensorMode(2):\n"
        "        pass\n"
        "def routed(world):\n"
        "    made.append(world)\n"
        "    if len(made) == 1:\n"
        "        second.start()\n"
        "        second.join(2)\n"
        "    return real(world)\n"
        "mode.rank_queries.RoutedWorld = routed\n"
        "second = threading.Thread(target=enter)\n"
        "enter()\n"
        "second.join(60)\n"
        "print(len(made), second.is_alive())\n"
    )
    done = warm.run([sys.executable, "-c", script], timeout=120)
    assert (done.stdout, done.returncode) == ("1 False\n", 0), done.stderr


def test_backward_stays_in_the_thread_of_the_mode_and_the_setting_is_put_back(monkeypatch):
    """On a GPU torch would run it in a thread of its own, which is not in the mode."""
    enabled = torch._C._is_multithreading_enabled
    with LocalTensorMode(2):
        assert not enabled()
    assert enabled()
    mode = LocalTensorMode(2)
    monkeypatch.setattr(mode.groups, "open", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mode.__enter__()
    assert enabled()
