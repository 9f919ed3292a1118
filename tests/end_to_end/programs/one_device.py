"""The third way for programs whose first argument is the shape of a mesh: on the shape () they run on one device."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

import localtensor as lt
from tests.device import DEVICE

Record = dict[str, Tensor]
FEW_BITS = {"rtol": 1e-11, "atol": 1e-12}  # of float64; the bar for sums in another order


def alone(program: Callable[..., Record], *args: object) -> Record:
    """What the program says on one device.  The caller's generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        return program((), *args)


def assert_three_ways(program: Callable[..., Record], mesh: tuple[int, ...], *args: object, **close: float) -> Any:
    """Threads say what gloo says, rank by rank, and each rank says what one device says.  Returns the run on threads.

    On two ranks to the last bit.  On more, gloo adds round a ring: a few bits; there, threads that share nothing agree.
    """
    ranks = prod(mesh)
    threads = lt.run(program, mesh, *args, ranks=ranks, device=DEVICE)
    gloo = lt.run(program, mesh, *args, ranks=ranks, on="gloo", device=DEVICE)
    expected = alone(program, *args)
    if ranks > 2:
        for_itself = lt.run(program, mesh, *args, ranks=ranks, share=False, device=DEVICE)
        torch.testing.assert_close(list(threads), list(for_itself), rtol=0, atol=0, equal_nan=True)
    for rank in range(ranks):
        between = {"rtol": 0, "atol": 0} if ranks == 2 else close or FEW_BITS
        torch.testing.assert_close(threads[rank], gloo[rank], **between)
        torch.testing.assert_close(threads[rank], expected, **(close or FEW_BITS))
    return threads
