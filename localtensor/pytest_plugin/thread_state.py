"""What fixtures put in place for pytest's own thread, in the threads of the ranks: modes of torch, context variables.

A fixture such as `with torch.no_grad(): yield` is set up once, in pytest's thread, and a rank begins as a process forked from
it would.  A mode is one object for all ranks, as any value of a fixture.

torch's private parts (for: tried on 2.13):
    overrides: _get_current_function_mode_stack, _push_mode, _pop_mode       modes of torch functions, as a default device
    utils._python_dispatch: _get_current_dispatch_mode_stack, _push_mode, _pop_mode       modes of ops
    _C._autograd: _top_saved_tensors_default_hooks, _push_..., _pop_...      hooks of the tensors that autograd saves
"""

from __future__ import annotations

import contextvars
import decimal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

_saved: Any = torch._C._autograd


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast of one type of device."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def of(device: str) -> Autocast:
        return Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def put(self) -> None:
        torch.set_autocast_enabled(self.device, self.enabled)
        torch.set_autocast_dtype(self.device, self.dtype)


@dataclass(frozen=True, slots=True)
class ThreadState:
    """The state of the thread that calls `of_this_thread`."""

    variables: tuple[tuple[contextvars.ContextVar[Any], Any], ...]
    precision: decimal.Context
    gradients: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    caches_casts: bool
    functions: tuple[Any, ...]
    ops: tuple[Any, ...]
    saved_tensors: Any

    @staticmethod
    def of_this_thread() -> ThreadState:
        return ThreadState(
            tuple(contextvars.copy_context().items()),
            decimal.getcontext().copy(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(map(Autocast.of, ("cpu", "cuda"))),
            torch.is_autocast_cache_enabled(),
            tuple(overrides._get_current_function_mode_stack()),
            tuple(dispatch._get_current_dispatch_mode_stack()),
            _saved._top_saved_tensors_default_hooks(True),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While inside, another thread has this state, where it has none of its own."""
        own = contextvars.copy_context()
        for variable, value in self.variables:
            if variable not in own:  # else it is the rank's own
                variable.set(value)
        decimal.setcontext(self.precision.copy())
        before = torch.is_autocast_cache_enabled()
        with ExitStack() as stack:
            stack.callback(torch.set_autocast_cache_enabled, before)
            torch.set_autocast_cache_enabled(self.caches_casts)
            for one in self.autocast:
                if (mine := Autocast.of(one.device)) != one:
                    stack.callback(mine.put)
                    one.put()
            # Entered where it changes nothing, it would still let autograd start threads.
            if self.inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            if self.saved_tensors is not None:
                stack.callback(_saved._pop_saved_tensors_default_hooks)
                _saved._push_saved_tensors_default_hooks(*self.saved_tensors)
            for mode in self.ops:
                stack.callback(dispatch._pop_mode)
                dispatch._push_mode(mode)
            for mode in self.functions:
                stack.callback(overrides._pop_mode)
                overrides._push_mode(mode)
            yield
