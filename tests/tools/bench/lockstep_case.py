"""One piece of work in lockstep, by one way, in a process of its own: prints its figures as JSON.

`python -m tests.tools.bench.lockstep_case WORK WAY RANKS` where WORK is step, first or pointwise, and WAY is ours, peer
(torch.distributed._local_tensor) or floor (one rank alone, whose collectives do nothing).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.tools.bench.memory import own_peak
from tests.tools.bench.mlp_step import train

ENOUGH = 1.5  # seconds of steps; at least MIN_STEPS of them
MIN_STEPS, MOST_STEPS = 3, 60
INNER = 200  # pointwise ops in one timing, at most


@contextmanager
def mode(way: str, ranks: int) -> Iterator[None]:
    """All ranks, by this way."""
    if way == "ours":
        import localtensor as lt

        with lt.LocalTensorMode(ranks):
            yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    if way == "peer":
        from torch.distributed._local_tensor import LocalTensorMode

        with LocalTensorMode(ranks):
            yield
    else:
        yield
    dist.destroy_process_group()


def step(ranks: int) -> float:
    """Seconds of a training step, the median."""
    start = time.perf_counter()
    train(1)
    first = (time.perf_counter() - start) / 4  # three steps to warm up, and one
    return statistics.median(train(max(MIN_STEPS, min(MOST_STEPS, int(ENOUGH / first)))))


def first(ranks: int) -> float:
    """Seconds of the first distribute_tensor, S(0) and R, of a product of the two, and of gathering it."""
    start = time.perf_counter()
    mesh = init_device_mesh("cpu", (ranks,))
    rows = distribute_tensor(torch.randn(ranks, 64), mesh, [Shard(0)])
    whole = distribute_tensor(torch.randn(64, 32), mesh, [Replicate()])
    result = (rows @ whole).full_tensor()
    assert result.shape == (ranks, 32)
    return time.perf_counter() - start


def pointwise(ranks: int) -> float:
    """Seconds of `x + 1` on a value that all ranks share, the median; within a mode, `x` is a LocalTensor, by either."""
    x = torch.randn(64, 64)
    start = time.perf_counter()
    x + 1
    x + 1
    inner = max(1, min(INNER, int(ENOUGH / 30 / (time.perf_counter() - start))))
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(inner):
            x + 1
        seconds.append((time.perf_counter() - start) / inner)
    return statistics.median(seconds)


WORK: dict[str, Callable[[int], float]] = {"step": step, "first": first, "pointwise": pointwise}


def main() -> None:
    work, way, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with mode(way, ranks):
        seconds = WORK[work](ranks)
    peak = own_peak()
    print(json.dumps({"seconds": seconds, "peak_mib": peak}))


if __name__ == "__main__":
    main()
