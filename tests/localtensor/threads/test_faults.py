"""Faults on purpose: what the other ranks see of them, and programs that go on after them."""

import json
import multiprocessing
import os
import signal
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import BadFaults, CollectiveTimeout, Deadlock, PeerLost, RankRaised
from localtensor.threads.faults import FaultMissed, faults_from_text

CLOSED = "Connection closed by peer"


def sums_until_a_peer_is_lost(group=None):
    """The sums of the steps that went well, and whether the error after them is the one of a lost peer."""
    sums = []
    try:
        for step in range(5):
            x = torch.full((2,), float(step + dist.get_rank()))
            dist.all_reduce(x, group=group)
            sums.append(x[0].item())
    except RuntimeError as error:
        return sums, CLOSED in str(error) or "reset by peer" in str(error)
    return sums, False


def dies_in_its_third_call(rank, folder):
    """A process of gloo: that of rank 2 kills itself."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    real, calls = dist.all_reduce, []

    def all_reduce(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    dist.all_reduce = all_reduce
    Path(folder, str(rank)).write_text(json.dumps(sums_until_a_peer_is_lost()))
    os._exit(0)


@pytest.mark.slow  # beside real processes; what the peers see on threads alone has tests of its own
def test_the_peers_of_a_rank_that_dies_see_what_they_see_on_gloo(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=dies_in_its_third_call, args=(rank, str(tmp_path))) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL]
    want = [tuple(json.loads((tmp_path / str(rank)).read_text())) for rank in (0, 1)]
    assert want == [([3.0, 6.0], True)] * 2
    for seed in range(5):
        done = lt.run(sums_until_a_peer_is_lost, ranks=3, faults=lt.Faults(kill={2: 3}), schedule=lt.shuffled(seed))
        assert done.values == (*want, None)


def test_a_peer_that_is_not_caught_is_the_error_of_the_run_and_its_replay_line_repeats_it():
    def program():
        x = torch.ones(1)
        dist.broadcast(x, src=0)
        dist.all_reduce(x)

    faults = lt.Faults(kill={1: 2})
    with pytest.raises(RankRaised) as caught:
        lt.run(program, ranks=3, faults=faults, schedule=lt.shuffled(3))
    assert isinstance(caught.value.__cause__, PeerLost) and caught.value.__cause__.peer == 1
    assert "Connection closed by peer (it died in its call 2, all_reduce at test_faults.py" in str(caught.value)
    assert caught.value.replay.endswith(", faults=lt.Faults(kill={1: 2})")
    again = eval(f"dict({caught.value.replay})", {"lt": lt})
    with pytest.raises(RankRaised) as repeated:
        lt.run(program, ranks=3, **again)
    assert str(repeated.value) == str(caught.value)


def test_a_rank_that_dies_is_not_waited_for_by_works_messages_and_groups_either():
    def program():
        rank, told = dist.get_rank(), []
        pair = dist.new_group([0, 1])
        if rank == 2:
            dist.barrier()  # dies here
        works = [dist.all_reduce(torch.ones(1), async_op=True), dist.irecv(torch.zeros(1), 2)]
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                told.append(type(error).__name__)
        x = torch.ones(1)
        dist.all_reduce(x, group=pair)
        dist.destroy_process_group(pair)
        return told, x.item()

    for seed in range(5):
        done = lt.run(program, ranks=3, faults=lt.Faults(kill={2: 1}), schedule=lt.shuffled(seed))
        assert done.values == (*[(["PeerLost"] * 2, 2.0)] * 2, None)


def train(folder, steps=4):
    """Trains with a checkpoint after each step, and resumes from the last whole one."""
    rank, path = dist.get_rank(), Path(folder, "checkpoint.pt")
    weight, first = torch.ones(3), 0
    if path.exists():
        weight, first = torch.load(path)
    for step in range(first, steps):
        gradient = torch.full((3,), float(rank + step))
        dist.all_reduce(gradient)
        weight -= 0.1 * gradient
        dist.barrier()
        if rank == 0:
            torch.save((weight, step + 1), path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
    return weight.tolist(), first, os.environ.get("TORCHELASTIC_RESTART_COUNT")


@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize("rank", [0, 2])
def test_a_program_that_resumes_from_its_checkpoint_ends_as_without_a_fault(rank, call, tmp_path):
    (tmp_path / "whole").mkdir()
    want = lt.run(train, str(tmp_path / "whole"), ranks=3)[0][0]
    done = lt.run(train, str(tmp_path), ranks=3, faults=lt.Faults(kill={rank: call}, restart=True))
    weights, firsts, counts = zip(*done, strict=True)
    assert list(weights) == [want] * 3 and counts == ("1",) * 3
    assert len(set(firsts)) == 1 and (call - 1) // 2 - firsts[0] in (0, 1)  # rank 0 may not have come to its saving


def test_each_start_has_its_own_faults_and_the_restarts_are_counted(tmp_path):
    kills = [{0: 3}, {1: 3}, {2: 1}]
    done = lt.run(train, str(tmp_path), ranks=3, faults=lt.Faults(kill=kills, restart=3), schedule=lt.shuffled(4))
    assert [count for _, _, count in done] == ["3"] * 3
    (tmp_path / "again").mkdir()
    with pytest.raises(RankRaised, match=CLOSED):
        lt.run(train, str(tmp_path / "again"), ranks=3, faults=lt.Faults(kill=kills, restart=2))


def late(limit):
    group = dist.new_group(timeout=timedelta(seconds=limit))
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except CollectiveTimeout:
        return "late"
    return "in time"


def test_a_rank_that_is_late_runs_into_the_time_limits_of_the_others():
    faults = lt.Faults(delay={1: 5.0})
    assert lt.run(late, 6.0, ranks=3, faults=faults, leftovers="ignore").values == ("in time",) * 3
    done = lt.run(late, 4.0, ranks=3, faults=faults, leftovers="ignore")
    assert done[0] == done[2] == "late"


def test_the_number_of_a_message_says_which_one_is_lost():
    def program():
        got = []
        for number in range(3):
            if dist.get_rank() == 0:
                dist.send(torch.tensor(float(number)), 1)
            else:
                x = torch.zeros(())
                try:
                    dist.irecv(x, 0).wait(timedelta(seconds=1))
                except CollectiveTimeout:
                    break
                got.append(x.item())
        return got

    assert lt.run(program, ranks=2, faults=lt.Faults(drop=[(0, 1, 3)]))[1] == [0.0, 1.0]
    with pytest.warns(FaultMissed, match="rank 1 sent 0 messages to rank 0, not 3"):
        assert lt.run(program, ranks=2, faults=lt.Faults(drop=[(1, 0, 3)]))[1] == [0.0, 1.0, 2.0]

    def waits():
        dist.send(torch.ones(1), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)
        dist.barrier()

    with pytest.raises(Deadlock) as caught:
        lt.run(waits, ranks=2, faults=lt.Faults(drop=[(0, 1, 1)]))
    assert caught.value.replay == "faults=lt.Faults(drop=[(0, 1, 1)])"


def test_the_parts_of_a_split_network_go_on_by_themselves():
    def program():
        rank = dist.get_rank()
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        whole = sums_until_a_peer_is_lost()
        own = sums_until_a_peer_is_lost(halves[rank // 2])
        for group in halves:
            dist.destroy_process_group(group)
        return whole, own

    faults = lt.Faults(split=[(0, 1), (2, 3)], split_at=3)
    for seed in range(5):
        done = lt.run(program, ranks=4, faults=faults, schedule=lt.shuffled(seed))
        for rank, (whole, own) in enumerate(done):
            assert whole == ([6.0, 10.0], True)
            assert own == ([1.0 + 4 * (rank // 2) + 2 * step for step in range(5)], False)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"kill": {3: 1}}, "faults.kill: {3: 1}: it has to give ranks below 3 the number of a call from 1 on"),
        ({"kill": {0: 0}}, "faults.kill"),
        ({"kill": [{0: 1}, {0: True}]}, "faults.kill"),
        ({"restart": -1}, "faults.restart"),
        ({"delay": {0: -1.0}}, "faults.delay"),
        ({"delay": {0: float("nan")}}, "faults.delay"),
        ({"drop": [(0, 3, 1)]}, "faults.drop"),
        ({"split": [(0, 1), (1, 2)]}, "faults.split"),
        ({"split": [(0, 1), (2,)], "split_at": 0}, "faults.split_at"),
        ({"kill": 5}, "faults.kill: 5: it has to give ranks below 3 the number of a call from 1 on"),
        ({"kill": [5]}, "faults.kill"),
        ({"kill": "0"}, "faults.kill"),
        ({"kill": {"0": 1}}, "faults.kill"),
        ({"restart": "one"}, "faults.restart"),
        ({"restart": None}, "faults.restart"),
        ({"delay": 2.0}, "faults.delay"),
        ({"delay": {0: "late"}}, "faults.delay"),
        ({"delay": {"0": 1.0}}, "faults.delay"),
        ({"drop": 1}, "faults.drop"),
        ({"drop": [1]}, "faults.drop"),
        ({"drop": [(0, 1)]}, "faults.drop"),
        ({"drop": "01"}, "faults.drop"),
        ({"split": 2}, "faults.split"),
        ({"split": [0, 1]}, "faults.split"),
        ({"split": [["a"], [[1]]]}, "faults.split"),
    ],
)
def test_faults_that_a_run_cannot_have_are_refused(faults, words):
    with pytest.raises(BadFaults) as caught:
        lt.run(dist.barrier, ranks=3, faults=lt.Faults(**faults))
    assert words in str(caught.value)


def test_faults_are_for_rank_threads():
    with pytest.raises(BadFaults, match="faults are for on='threads'"):
        lt.run(dist.barrier, ranks=2, on="gloo", faults=lt.Faults())
    with pytest.raises(BadFaults):
        lt.run(dist.barrier, ranks=2, faults={2: 1})


@pytest.mark.parametrize("text", ["-" * 9_999 + "1", "kill=" + "[" * 9_999, "x" * 9_999 + "=1"])
def test_a_text_that_is_nested_too_deep_is_refused_in_few_words(text):
    with pytest.raises(BadFaults) as caught:
        faults_from_text(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("faults", "said"), [
    ({"kill": {1: 9}}, "kill: rank 1 made 1 calls, not 9"), ({"drop": [(0, 1, 2)]}, "drop: rank 0 sent 0 messages to rank 1, not 2"),
    ({"split": [(0,), (1,)], "split_at": 5}, "split: no rank made 5 calls"),
])  # fmt: skip
def test_a_fault_that_never_comes_is_a_warning(faults, said):
    with pytest.warns(FaultMissed) as warned:
        lt.run(dist.barrier, ranks=2, faults=lt.Faults(**faults))
    assert said in str(warned[0].message)


def test_a_fault_that_comes_is_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lt.run(sums_until_a_peer_is_lost, ranks=3, faults=lt.Faults(kill={2: 3}))[2] is None
