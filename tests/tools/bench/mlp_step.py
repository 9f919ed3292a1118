"""One DTensor training step of an MLP, 16x64 @ 64x256 @ 256x64, by each way to have many ranks.

`python -m tests.tools.bench.mlp_step WAY RANKS STEPS` runs one way in a process of its own and prints its figures.
Everything runs with torch's defaults; OMP_NUM_THREADS=1 in the environment gives each thread a team of one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.tools.bench.memory import own_peak

WARM = 3  # steps that are not counted


def train(steps: int, sets: int = 1, turn: Callable[[], None] = lambda: None) -> list[float]:
    """The seconds of each step on this rank.  Columns of the first weight and rows of the second are sharded.

    With several sets of tensors each has its turn in a step, whose seconds are those of one set on average.  `turn` is
    called at the beginning of each step, and counts in its seconds.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors, seconds = [_tensors(mesh) for _ in range(sets)], []
    for _ in range(steps + WARM):
        start = time.perf_counter()
        turn()
        for dx, d1, d2 in tensors:
            (torch.relu(dx @ d1) @ d2).sum().full_tensor().backward()
        seconds.append((time.perf_counter() - start) / sets)
        for _, d1, d2 in tensors:
            assert d1.grad is not None and d2.grad is not None
            d1.grad = d2.grad = None
    return seconds[WARM:]


def _tensors(mesh: DeviceMesh) -> tuple[DTensor, DTensor, DTensor]:
    torch.manual_seed(0)
    x, first, second = torch.randn(16, 64), torch.randn(64, 256), torch.randn(256, 64)
    return (
        distribute_tensor(x, mesh, [Replicate()]),
        distribute_tensor(first, mesh, [Shard(1)]).requires_grad_(),
        distribute_tensor(second, mesh, [Shard(0)]).requires_grad_(),
    )


def floor(ranks: int, steps: int, sets: int = 1) -> list[float]:
    """One rank alone, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    seconds = train(steps, sets)
    dist.destroy_process_group()
    return seconds


def wide_floor(ranks: int, steps: int) -> list[float]:
    """The same with the tensors of all ranks, in turn: they do not all stay in the processor's cache."""
    return floor(ranks, steps, sets=ranks)


def turns(ranks: int, steps: int) -> list[float]:
    """The floor on as many threads, of which one works at a time and hands on after each step: all ranks' seconds."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    gates, found = [threading.Semaphore(0) for _ in range(ranks)], {}

    def member(rank: int) -> None:
        def hand_on() -> None:
            gates[(rank + 1) % ranks].release()
            gates[rank].acquire()

        gates[rank].acquire()
        try:
            torch.set_num_threads(1)
            found[rank] = train(steps, turn=hand_on)
        finally:
            gates[(rank + 1) % ranks].release()

    members = [threading.Thread(target=member, args=(rank,)) for rank in range(ranks)]
    for one in members:
        one.start()
    gates[0].release()
    for one in members:
        one.join()
    dist.destroy_process_group()
    return found[0]


def ours(ranks: int, steps: int) -> list[float]:
    import localtensor as lt

    return lt.run(train, steps, ranks=ranks, timeout=None)[0]


def threaded(ranks: int, steps: int) -> list[float]:
    """torch's own threads: torch.testing._internal.distributed.multi_threaded_pg."""
    from torch.testing._internal.distributed import multi_threaded_pg as threads

    threads._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, found, failed = dist.HashStore(), {}, []

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            found[rank] = train(steps)
        except BaseException as problem:  # why: it must reach the main thread
            failed.append(problem)
            threads.ProcessLocalGroup.exception_handle(problem)

    members = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    if failed:
        raise failed[0]
    return found[0]


def _gloo_rank(rank: int, ranks: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(f"{folder}/store", ranks))
    seconds = train(steps)
    if rank == 0:
        Path(folder, "seconds").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def gloo(ranks: int, steps: int) -> list[float]:
    """Real processes, started as torch.multiprocessing starts them."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_gloo_rank, (ranks, steps, folder), nprocs=ranks)
        return list(json.loads(Path(folder, "seconds").read_text()))


WAYS = {"floor": floor, "wide_floor": wide_floor, "turns": turns, "ours": ours, "threaded": threaded, "gloo": gloo}


def main() -> None:
    way, ranks, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    start = time.perf_counter()
    seconds = WAYS[way](ranks, steps)
    figures = {"step": statistics.median(seconds), "job": time.perf_counter() - start, "peak_mib": own_peak()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
