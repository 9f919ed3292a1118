"""A backend that the program registers: its own code runs, and it is one rank's."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._debug_utils import SimpleProfiler
from torch.futures import Future

import localtensor as lt
from localtensor.errors import BadGroup
from localtensor.threads.state.swap import SLOTS


class Work(dist._Work):
    def __init__(self, result):
        super().__init__()
        self.future = Future()
        self.future.set_result(result)

    def wait(self, timeout=None):
        return True

    def get_future(self):
        return self.future


class AddsTen(dist.ProcessGroup):
    """Its all_reduce adds ten, and talks to no other rank."""

    def allreduce(self, tensors, options=None):
        for tensor in tensors:
            tensor.add_(10)
        return Work(tensors)


def register(name):
    dist.Backend.register_backend(name, lambda store, rank, size, timeout: AddsTen(rank, size), devices=["cpu"])


def program():
    register("adds_ten")
    dist.init_process_group("adds_ten")
    x = torch.ones(2)
    dist.all_reduce(x)
    return x.tolist(), dist.get_backend(), dist.Backend.ADDS_TEN


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_backend_in_python_serves_itself():
    assert lt.run(program, ranks=2).values == (([11.0, 11.0], "adds_ten", "adds_ten"),) * 2
    assert not dist.is_backend_available("adds_ten") and not hasattr(dist.Backend, "ADDS_TEN")


def test_a_backend_of_one_rank_is_unknown_to_the_other():
    def program():
        if dist.get_rank() == 0:
            register("mine")
        dist.barrier()
        available = dist.is_backend_available("mine")
        if not available:
            with pytest.raises(BadGroup, match="mine"):
                dist.new_group([dist.get_rank()], backend="mine")
        return available

    assert lt.run(program, ranks=2).values == (True, False)


def registers_torchs_own_anew():
    """As torch does for itself since 2.15, when a group is made."""
    backend = dist.Backend
    backend._plugins["GLOO"] = backend._BackendPlugin(None, False)
    dist.barrier()
    return "GLOO" in backend._plugins and backend.GLOO


def test_torchs_own_backends_stay_on_each_rank_and_behind_the_run():
    table, before = dist.Backend._plugins, {**dist.Backend._plugins}
    assert lt.run(registers_torchs_own_anew, ranks=2).values == ("gloo", "gloo")
    assert dist.Backend.GLOO == "gloo" and dist.Backend._plugins == before
    assert dist.Backend._plugins is table


def test_tables_that_no_rank_changes_stay_those_of_the_process():
    """Of the profiler: since 2.15 torch itself registers backends when a rank makes a group."""

    def program():
        dist.barrier()
        return SimpleProfiler.profiling is table and SimpleProfiler.results is times

    table, times = SimpleProfiler.profiling, SimpleProfiler.results
    assert lt.run(program, ranks=2).values == (True, True)


def test_what_the_process_has_changed_since_a_run_that_did_not_begin_stays(monkeypatch):
    monkeypatch.setattr(SLOTS["profiler_of_fsdp"], "in_run", True)
    monkeypatch.setitem(SimpleProfiler.results, "of the process", 1.0)
    times = SimpleProfiler.results
    lt.run(dist.barrier, ranks=2)
    assert SimpleProfiler.results is times and times["of the process"] == 1.0


@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:1", "pct:2"])
def test_a_rank_that_registers_later_keeps_its_backend_beside_those_of_others(schedule):
    def program():
        rank = dist.get_rank()
        for turn in range(3):
            if turn == rank:
                register(f"of_{rank}")
            dist.barrier()
        return [dist.is_backend_available(f"of_{other}") for other in range(3)]

    expected = tuple([other == rank for other in range(3)] for rank in range(3))
    assert lt.run(program, ranks=3, schedule=schedule).values == expected
    assert not any(hasattr(dist.Backend, f"OF_{rank}") for rank in range(3))
