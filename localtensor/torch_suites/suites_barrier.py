"""The barrier of torch's own DistributedTest, which counts files that processes write.

It keeps its count on a class, once for each process, and so once for all rank threads.  Here ranks count in the
store of their simulation.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from localtensor._util.ambient import running
from localtensor._util.patching import replaced
from localtensor.torch_suites.stores import step_aside

# Private part of torch: why it is needed.  Tried on torch 2.13.0.
PRIVATE = {
    "torch.testing._internal.distributed.distributed_test.Barrier.sync": "it counts once for each process",
}
_HOME = "torch.testing._internal.distributed.distributed_test"


@contextmanager
def counted() -> Iterator[None]:
    """While inside, that barrier is met by rank threads; nothing happens if nobody has imported it."""
    barrier = getattr(sys.modules.get(_HOME), "Barrier", None)
    if barrier is None:
        yield
        return
    counts: dict[int, Any] = {}

    def sync(cls: Any, wait_for: int | None = None, timeout: float = 10) -> None:
        simulation: Any = running()
        number = next(counts.setdefault(simulation.rank(), itertools.count()))
        key, wanted, end = f"barrier {number}", wait_for or simulation.ranks, time.monotonic() + timeout
        simulation.store.add(key, 1)
        while simulation.store.add(key, 0) < wanted:
            if time.monotonic() > end:
                raise RuntimeError("barrier timeout")
            step_aside()

    with replaced(barrier, "sync", classmethod(sync)):
        yield
