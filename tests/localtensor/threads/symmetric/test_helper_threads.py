"""Threads that a rank has started: their accesses are the rank's, in the streams that are current there."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import localtensor as lt
from localtensor.errors import SymmetricRace
from localtensor.threads.symmetric.watch import SymmetricWatch

SCHEDULES = ["round_robin", "shuffled:1", "shuffled:2", "pct:3"]


def share():
    mine = symm_mem.empty(8, device="cpu").zero_()
    return mine, symm_mem.rendezvous(mine, dist.group.WORLD)


def in_thread(*bodies):
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def peer_of(handle):
    return handle.get_buffer(1 - handle.rank, (8,), torch.float32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_access_of_a_helper_thread_races(schedule):
    def program():
        mine, handle = share()
        handle.barrier()
        in_thread(lambda: mine.fill_(1))
        peer_of(handle).sum()
        handle.barrier()

    with pytest.raises(SymmetricRace) as caught:
        lt.run(program, ranks=2, schedule=schedule)
    assert {caught.value.first.op, caught.value.second.op} == {"fill_", "sum"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_access_of_a_helper_thread_before_a_barrier_of_its_rank_is_in_order(schedule):
    def program():
        mine, handle = share()
        handle.barrier()
        in_thread(lambda: mine.fill_(1), lambda: None)
        handle.barrier()
        found = peer_of(handle).sum().item()
        in_thread(handle.barrier)
        mine.fill_(2)
        return found

    assert lt.run(program, ranks=2, schedule=schedule).values == (8.0, 8.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own streams")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_thread_has_a_current_stream_of_its_own(schedule):
    def program():
        mine, handle = share()
        handle.barrier()
        streams = [torch.cuda.Stream() for _ in range(2)]
        seen = {}

        def work(number):
            with torch.cuda.stream(streams[number]):
                dist.distributed_c10d._get_default_store().set(f"{handle.rank} {number}", "here")  # others run
                mine[4 * number : 4 * number + 4].fill_(number)
                handle.get_signal_pad(handle.rank)[2000 + number].item()
                seen[number] = torch.cuda.current_stream() == streams[number]

        in_thread(lambda: work(0), lambda: work(1))
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.current_stream().wait_stream(streams[0])
        mine[:4].sum()
        torch.cuda.current_stream().wait_stream(streams[1])
        mine.sum()
        handle.barrier()
        return seen

    assert lt.run(program, ranks=2, schedule=schedule).values == ({0: True, 1: True},) * 2


def test_a_helper_thread_that_is_the_first_to_share_leaves_no_mode_on_its_thread():
    ends = []
    end = SymmetricWatch.end

    def look(watch):
        end(watch)
        ends.append(_get_current_dispatch_mode_stack())

    def program(racy=False):
        found = []
        in_thread(lambda: found.append(share()))
        mine, handle = found[0]
        handle.barrier()
        peer_of(handle).zero_() if racy else peer_of(handle).sum()
        if not racy:
            handle.barrier()
        return mine.sum().item()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SymmetricWatch, "end", look)
        assert lt.run(program, ranks=2).values == (0.0, 0.0)
        with pytest.raises(SymmetricRace):  # the ranks' own threads are watched, too
            lt.run(lambda: program(racy=True), ranks=2)
    assert ends == [[]] * 8
