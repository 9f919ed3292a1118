import threading
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
import torch.distributed.tensor as dtensor
import torch.distributed.tensor.experimental
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor.threads.state.special_slots import LEFT_ALONE, PER_THREAD
from localtensor.threads.state.swap import SLOTS, OutsideState

DISPATCHER = dtensor.DTensor._op_dispatcher
OPEN: list[AbstractContextManager] = []  # the blocks that the acting thread is in


def enter(block):
    block.__enter__()
    OPEN.append(block)


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def redistribution_is_explicit():
    return getattr(dtensor._utils.ExplicitRedistributionContext._local, "_active", None)


THREADS = {
    "default_device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "grad_mode": (lambda: enter(torch.no_grad()), torch.is_grad_enabled),
    "autocast": (lambda: enter(torch.autocast("cpu", torch.float16)), lambda: torch.is_autocast_enabled("cpu")),
    "dispatch_modes": (lambda: enter(Quiet()), torch._C._len_torch_dispatch_stack),
    "function_modes": (lambda: enter(TorchFunctionMode()), torch._C._len_torch_function_stack),
    "explicit_redistribution": (lambda: enter(dtensor._utils.ExplicitRedistributionContext()),
                                redistribution_is_explicit),
    "implicit_replication": (lambda: enter(dtensor.experimental.implicit_replication()),
                             lambda: DISPATCHER._allow_implicit_replication),
    "autograd_multithreading": (lambda: torch.autograd.set_multithreading_enabled(False),
                                torch._C._is_multithreading_enabled),
    "flush_denormal": (lambda: torch.set_flush_denormal(True),
                       lambda: float(torch.tensor([1e-310], dtype=torch.float64) * 1)),
    "num_threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "mesh_stack": (lambda: setattr(torch.distributed.device_mesh._mesh_resources, "lt_mark", 1),
                   lambda: hasattr(torch.distributed.device_mesh._mesh_resources, "lt_mark")),
    "numpy_errstate": (lambda: enter(np.errstate(all="raise")), lambda: np.geterr()["divide"]),
}  # fmt: skip


def test_each_thing_that_is_not_swapped_says_why():
    assert set(THREADS) == {entry.name for entry in PER_THREAD}
    for entry in (*PER_THREAD, *LEFT_ALONE):
        assert len(entry.why) > 15, entry.name
    names = [entry.name for entry in (*PER_THREAD, *LEFT_ALONE)]
    assert len(names) == len(set(names)) and not set(names) & set(SLOTS)


def seen_by_two_threads(act, look):
    """What one thread sees before its act and after, and what another that lives all the while sees at these times."""
    seen: list[object] = []
    began, acted = threading.Barrier(2), threading.Barrier(2)

    def other():
        seen.append(look())
        began.wait(60)
        acted.wait(60)
        seen.append(look())

    def first():
        look()
        began.wait(60)
        before = look()
        act()
        seen.append((before, look()))
        acted.wait(60)
        while OPEN:
            OPEN.pop().__exit__(None, None, None)

    with OutsideState():
        threads = [threading.Thread(target=run) for run in (other, first)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch.set_num_threads(torch.get_num_threads())
    theirs, (before, mine), still = seen
    return before, mine, theirs, still


@pytest.mark.parametrize("name", THREADS)
def test_two_threads_that_live_at_once_do_not_share(name):
    before, mine, theirs, still = seen_by_two_threads(*THREADS[name])
    assert mine != before
    assert still == theirs == before


def test_what_is_process_wide_would_be_caught():
    before, mine, theirs, still = seen_by_two_threads(
        lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype
    )
    assert (before, mine, theirs, still) == (torch.float32, torch.float64, torch.float32, torch.float64)
