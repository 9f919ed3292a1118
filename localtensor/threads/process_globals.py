"""What torch keeps once per process and no hand-over can swap: made harmless while ranks share the process, or refused.

torch.compile     Dynamo keeps what it compiled by code object and takes `get_rank()` for a constant: the second rank
                  would run the first one's code.  So compiled functions run eagerly (`torch.compiler.set_stance`).
torch.profiler    One profiler per process; a second one across a hand-over ends the process.  Refused by name.
collect_all       Waits in C++, where no other rank can run.  Our futures are waited for first; so is the one that a
                  communication hook of DistributedDataParallel returns.
fake tensors      torch 2.11, built with CUDA and run without a GPU, keeps a stand-in for the missing device in memory of
                  the thread that first made a fake tensor.  When that rank has ended, the next fake tensor kills the
                  process.  So the thread that starts the ranks comes first.
DTensor's cache   torch empties a thread's cache of shardings when the thread has ended, under a lock that each thread
                  takes at its first op, and lets other threads run meanwhile: the next rank's first op then waits
                  for ever.  So a rank empties its cache itself, as long as it runs alone.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from localtensor._util.ambient import running
from localtensor._util.patching import wrapped
from localtensor.errors import NotServed

# Private part of torch: why it is needed.  Tried on torch 2.11.0, 2.13.0 and 2.15.0.
PRIVATE = {
    "torch.autograd.profiler.profile._prepare_trace": "what ends the profiler of another rank, on torch 2.11",
    "torch.autograd.profiler.profile._start_trace": "where every profiler of torch begins",
    "torch.distributed._register_comm_hook": "where the hooks of DistributedDataParallel pass into C++",
    "torch._dynamo.eval_frame._stance": "how compiled functions are called now, to be put back",
    "torch._C._ensureCUDADeviceGuardSet": "what the first fake tensor calls: here in a thread that outlives the ranks",
    "torch._C._clear_DTensor_sharding_propagator_cache": "of this thread, before it ends",
}


@contextmanager
def kept() -> Iterator[None]:
    """While inside, the limits above hold for all ranks; afterwards everything is as it was before."""
    guard_first()
    with ExitStack() as stack:
        stack.enter_context(_eagerly())
        stack.enter_context(_one_profiler())
        for name in ("collect_all", "wait_all"):
            stack.enter_context(wrapped(torch.futures, name, _settled_first))
        stack.enter_context(wrapped(dist, "_register_comm_hook", _settling_hook))
        yield


def guard_first() -> None:
    """Threads that end may make fake tensors from here on: this thread, which must outlive them, was first."""
    if torch.__version__.startswith("2.11.") and torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def rank_over() -> None:
    """What DTensor keeps of this thread's ops is gone: nothing is left for torch to free when the thread has ended."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not every torch has it
    if clear is not None and "torch.distributed.tensor" in sys.modules:
        clear()


def _settled_first(original: Callable[..., Any], futures: Any) -> Any:
    for future in futures:
        _settle(future)
    return original(futures)


def _settling_hook(original: Callable[..., Any], reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
    @functools.wraps(hook)
    def settled(*args: Any) -> Any:
        future = hook(*args)
        _settle(future)
        return future

    return original(reducer, state, settled)


def _settle(future: Any) -> None:
    """A future of ours is done; any other is left as it is."""
    settle = getattr(future, "settle", None)
    if settle is not None:
        settle()


@contextmanager
def _eagerly() -> Iterator[None]:
    """Compiled functions run as they were written.  torch's compiler is not imported for that: it takes a second."""
    with ExitStack() as stack:
        forced: list[None] = []

        def force() -> None:
            if not forced:
                forced.append(None)
                stack.enter_context(torch.compiler.set_stance("force_eager"))

        def compiling(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            force()
            return compiled

        if "torch._dynamo" in sys.modules:
            force()
        stack.enter_context(wrapped(torch, "compile", compiling))
        yield


@contextmanager
def _one_profiler() -> Iterator[None]:
    owners: dict[Any, int] = {}

    def start(original: Callable[..., Any], self: Any) -> Any:
        rank = running().rank()  # type: ignore[union-attr]
        others = set(owners.values()) - {rank}
        if others:
            detail = f"rank {min(others)} profiles already, and torch has one profiler per process: let one rank do it"
            raise NotServed("torch.profiler", detail)
        owners[self] = rank
        return original(self)

    def leave(original: Callable[..., Any], self: Any, *exc: Any) -> Any:
        owners.pop(self, None)
        return original(self, *exc)

    with ExitStack() as stack:
        for name, around in (("_prepare_trace", start), ("_start_trace", start), ("__exit__", leave)):
            stack.enter_context(wrapped(profiler.profile, name, around))
        yield
