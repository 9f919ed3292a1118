import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import localtensor as lt
from localtensor.errors import Deadlock, EarlyReturn, KindMismatch, ProgramFault, RankRaised, ReplayDiverged

SEEDS = range(20)
EXPLORE = [*(f"shuffled:{seed}" for seed in SEEDS), *(f"pct:{seed}" for seed in SEEDS)]


def busy():
    """A bit of everything whose values no schedule can change."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([0, ranks - 1])
    x = torch.rand(3) + rank
    work = dist.all_reduce(x, async_op=True)
    ring = torch.zeros(1)
    posted = dist.irecv(ring, (rank - 1) % ranks)
    dist.send(torch.tensor([float(rank)]), (rank + 1) % ranks)
    if rank in (0, ranks - 1):
        y = torch.tensor([rank + 1.0])
        dist.all_reduce(y, group=group)
    posted.wait()
    work.wait()
    mesh = init_device_mesh("cpu", (ranks,))
    z = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
    held = [None] * ranks
    dist.all_gather_object(held, (rank, torch.rand(1).item()))
    dist.destroy_process_group(group)
    return x.tolist(), ring.item(), y.item() if rank in (0, ranks - 1) else None, z.tolist(), held


def test_no_schedule_changes_what_a_right_program_computes():
    expected = lt.run(busy, ranks=3).values
    assert [value[1:4] for value in expected] == [
        (2.0, 4.0, list(range(7))), (0.0, None, list(range(7))), (1.0, 4.0, list(range(7))),
    ]  # fmt: skip
    texts = set()
    for text in EXPLORE:
        run = lt.run(busy, ranks=3, schedule=text)
        assert run.values == expected, text
        texts.add(run.replay)
    assert len(texts) == len(EXPLORE)


@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:7", "pct:7"])
def test_a_run_is_the_same_twice(schedule):
    first, second = (lt.run(busy, ranks=3, schedule=schedule) for _ in range(2))
    assert first == second and first.calls and [call.rank for call in first.calls] == [c.rank for c in second.calls]


def test_schedules_do_change_who_runs_when():
    orders = {tuple(call.rank for call in lt.run(busy, ranks=3, schedule=text).calls) for text in EXPLORE[:10]}
    assert len(orders) > 5


# -- programs that depend on the schedule


def first_come():
    """Whose message comes first depends on who runs first."""
    if dist.get_rank() == 0:
        received = [torch.zeros(1) for _ in range(3)]
        return [dist.recv(each) for each in received]
    dist.send(torch.ones(1), 0)
    return None


def test_whom_a_receive_from_anyone_hears_is_repeated_by_its_replay():
    outcomes = {}
    for seed in SEEDS:
        run = lt.run(first_come, ranks=4, schedule=lt.shuffled(seed))
        assert sorted(run[0]) == [1, 2, 3]
        outcomes[tuple(run[0])] = run.replay
    assert len(outcomes) > 2
    for outcome, text in outcomes.items():
        for again in (text, lt.replay(text)):
            run = lt.run(first_come, ranks=4, schedule=again)
            assert (tuple(run[0]), run.replay) == (outcome, text)


def error_of(program, schedule):
    """What ends the run, or None."""
    try:
        lt.run(program, ranks=4, schedule=schedule)
    except ProgramFault as failure:
        return failure
    return None


def wrong_if_two_is_received_first():
    received = first_come()
    if received and received[0] == 2:
        raise ValueError(f"received {received}")


def long_and_wrong():
    for _ in range(300):
        dist.barrier()
    wrong_if_two_is_received_first()


@pytest.mark.few(1)
@pytest.mark.parametrize("program", [wrong_if_two_is_received_first, long_and_wrong])
def test_the_replay_line_of_a_failure_is_short_and_repeats_it(program):
    failures = [error for seed in range(8) if (error := error_of(program, f"shuffled:{seed}"))]
    assert 0 < len(failures) < 8
    for failure in failures:
        line = str(failure).splitlines()[-1]
        assert line.startswith("Replay: schedule='shuffled:") and len(line) <= 200
        again = error_of(program, line.removeprefix("Replay: schedule=").strip("'"))
        assert type(again) is RankRaised and str(again) == str(failure)


def deadlocks_if_two_is_received_first():
    received = first_come()
    if received and received[0] == 2:
        dist.recv(torch.zeros(1), 2)
    dist.barrier()


def test_a_deadlock_that_only_some_schedules_meet_is_repeated_by_its_line():
    program = deadlocks_if_two_is_received_first
    found = [error for seed in range(8) if (error := error_of(program, f"pct:{seed}"))]
    assert 0 < len(found) < 8
    for failure in found:
        again = error_of(program, failure.replay.removeprefix("schedule=").strip("'"))
        assert type(again) is type(failure) and str(again) == str(failure)


def test_a_failure_that_every_schedule_meets_under_the_default_has_no_replay_line():
    with pytest.raises(Deadlock) as caught:
        lt.run(lambda: dist.recv(torch.zeros(1), 1 - dist.get_rank()), ranks=2)
    assert caught.value.replay is None and "Replay:" not in str(caught.value)


def test_a_replay_of_another_program_is_reported():
    text = lt.run(first_come, ranks=4, schedule="shuffled:3").replay
    with pytest.raises(lt.LocalTensorError) as caught:
        lt.run(busy, ranks=4, schedule=text)
    told = caught.value if isinstance(caught.value, ReplayDiverged) else caught.value.__cause__
    assert isinstance(told, ReplayDiverged)


def test_a_replay_with_another_number_of_ranks_is_reported():
    text = lt.run(first_come, ranks=4, schedule="shuffled:3").replay
    with pytest.raises(ReplayDiverged) as caught:
        lt.run(busy, ranks=3, schedule=text)
    assert "the text is of a run of 4 ranks, and this one has 3" in str(caught.value)
    assert lt.run(busy, ranks=3).values == lt.run(busy, ranks=3).values


# -- how fast, and in which order of blame


def wait_for_the_next():
    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())


def one_returns():
    if dist.get_rank() != 3:
        dist.barrier()


def one_asks_for_less():
    dist.all_reduce(torch.ones(1)) if dist.get_rank() != 63 else dist.barrier()


def none_sets_the_key():
    dist.distributed_c10d._get_default_store().get("nobody")


def one_raises():
    if dist.get_rank() == 40:
        raise ValueError("forty")
    dist.barrier()


@pytest.mark.parametrize(("program", "kind"), [
    (wait_for_the_next, Deadlock), (none_sets_the_key, Deadlock), (one_returns, EarlyReturn),
    (one_asks_for_less, KindMismatch), (one_raises, RankRaised),
])  # fmt: skip
def test_sixty_four_ranks_that_cannot_go_on_are_reported_with_a_second_of_work(program, kind):
    lt.run(dist.get_rank, ranks=2)  # the first use imports
    began = time.process_time()  # the machine may be busy with something else
    with pytest.raises(kind) as caught:
        lt.run(program, ranks=64, timeout=60)
    assert time.process_time() - began < 1 and len(str(caught.value).splitlines()) < 30
    assert type(caught.value) is kind


def test_the_circle_of_a_deadlock_is_shown():
    with pytest.raises(Deadlock) as caught:
        lt.run(wait_for_the_next, ranks=3)
    line = wait_for_the_next.__code__.co_firstlineno + 1
    first, *rest = str(caught.value).splitlines()
    assert first == (
        "ranks 0, 1, 2 wait: no rank can go on, they wait for each other in a circle: 0 -> 1 -> 2 -> 0. "
        "Let one of the ranks send before it receives."
    )
    assert rest == [
        f"  rank {rank} waits for rank {(rank + 1) % 3} in recv #0 from {(rank + 1) % 3} "
        f"at test_simulation.py:{line} in wait_for_the_next"
        for rank in range(3)
    ]


def test_an_exception_is_blamed_rather_than_those_who_wait_for_its_rank():
    with pytest.raises(RankRaised) as caught:
        lt.run(one_raises, ranks=64, schedule="shuffled:1")
    assert type(caught.value.__cause__) is ValueError and str(caught.value.__cause__) == "forty"
    assert [raised.rank for raised in caught.value.raised] == [40] and len(caught.value.waits) == 63


def test_a_mismatch_is_blamed_rather_than_the_exceptions_that_it_leads_to():
    def program():
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True) if dist.get_rank() else dist.barrier(async_op=True)
        work.wait()

    with pytest.raises(KindMismatch):
        lt.run(program, ranks=3)


def test_the_exceptions_of_all_ranks_are_there_in_the_order_in_which_they_happened():
    def program():
        for _ in range(3 - dist.get_rank()):
            dist.distributed_c10d._get_default_store().check(["nobody"])
        raise ValueError(f"rank {dist.get_rank()}")

    with pytest.raises(RankRaised) as caught:
        lt.run(program, ranks=3)
    assert sorted(raised.rank for raised in caught.value.raised) == [0, 1, 2]
    assert str(caught.value.__cause__) == caught.value.raised[0].message
