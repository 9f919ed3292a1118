"""`make_fx` in lockstep: one graph for all ranks, the one that a rank would have, with LocalTensors as example values.

torch records ops above the mode, which then runs them on all ranks' tensors; a LocalTensor stands for "the tensor of my rank".
A graph is right for all ranks if everything in it is either recorded or the same on all ranks.  The rest is refused by name
(`NotTraceable`): an int of each rank, and a tensor that was made or is read or written beside the recorded ops, whose values
would be constants.  A LocalTensor that was made before the trace is lifted as an attribute of the graph module, as on a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch

from localtensor._util.call_sites import Args, Fn, Kwargs, place_of_frame
from localtensor.errors import NotTraceable
from localtensor.lockstep.patches.rank_queries import Patch, patch_attribute
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode
from localtensor.lockstep.values.sym_nodes import RankBools, RankInts

_OUTSIDE = "Do it before the trace, and pass what it makes as an input."
_KEYS = torch._C._TorchDispatchModeKey
_PROXY, _FAKE, _FUNCTIONAL = _KEYS.PROXY, _KEYS.FAKE, _KEYS.FUNCTIONAL


def refused(problem: str, seen: object, remedy: str) -> NotTraceable:
    """The error for a value that a graph cannot hold."""
    return NotTraceable(recorder("make_fx"), str(seen), problem, remedy, place_of_frame(sys._getframe(2)))


def recorder(otherwise: str) -> str:
    """The function of torch that records a graph now; `otherwise` where that cannot be seen."""
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch._guards.TracingContext.try_get() is not None:
        return "torch.compile"
    functional = torch._C._get_dispatch_mode(_FUNCTIONAL) is not None
    return "AOTAutograd" if functional else otherwise


def is_recording() -> bool:
    """Whether a graph is recorded in this thread, or tensors without values are computed."""
    found = map(torch._C._get_dispatch_mode, (_PROXY, _FAKE, _FUNCTIONAL))
    return proxy_tensor._CURRENT_MAKE_FX_TRACER is not None or any(mode is not None for mode in found)


def check_one_control_flow(question: str) -> None:
    """Raises `NotTraceable` for a statement that would run for some ranks while a graph is recorded."""
    if is_recording():
        problem = "a graph has one control flow for all ranks, and this differs between them"
        raise refused(problem, question, "Choose by torch.where, or record only what does not depend on it.")


def check_ranks_apart(mode: Mode) -> None:
    """Raises `NotTraceable` for a function that runs for each rank in turn while a graph is recorded."""
    if is_recording() and (mode.tracing is None or mode.tracing.depth == 0):
        raise refused("its tensors would be constants in the graph", "rank_map or tensor_map", _OUTSIDE)


class Trace:
    """One recording of a graph under a mode; `depth` counts the recorded ops that are running, one within the other."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self.depth = 0

    def records(self) -> bool:
        """Whether an op of this thread is to be recorded: not while the recorder runs one, and not of fake tensors."""
        return torch._C._get_dispatch_mode(_PROXY) is not None and torch._C._get_dispatch_mode(_FAKE) is None

    def holds(self, x: LocalTensor) -> bool:
        """Whether the tensor is in the graph, or was made since the recording began."""
        recorded = proxy_tensor.has_proxy_slot(x, self._tracer.fx_tracer)
        return recorded or x.__dict__.get("_traced") is self

    def check_read(self, x: LocalTensor, call: str) -> None:
        """Raises `NotTraceable` if the values of a tensor of the graph are read."""
        if self.depth == 0 and self.holds(x):
            raise refused("its values would be constants in the graph", call, "Read it before or after the trace.")

    def check_write(self, call: str) -> None:
        """Raises `NotTraceable` for a write that no recorded op makes."""
        if self.depth == 0:
            raise refused("it writes to a tensor beside the recorded ops", call, _OUTSIDE)


def check_graph_value(mode: Mode, value: object) -> None:
    """Raises `NotTraceable` for what differs between ranks and is not recorded in the mode's trace."""
    if isinstance(value, torch.SymInt | torch.SymBool) and type(value.node) in (RankInts, RankBools):
        raise refused(
            "a graph has one number for all ranks, and this one differs between them",
            value.node,
            "Pass it as a tensor, rank_map(torch.tensor) for the rank, or record only what does not depend on it.",
        )
    if type(value) is LocalTensor and mode.tracing is not None and value.__dict__.get("_traced") is mode.tracing:
        raise refused(
            "no recorded op made it, so its values would be constants in the graph",
            f"a LocalTensor of {value.dtype} with {value.dim()} dims",
            _OUTSIDE,
        )


def record(mode: Any, func: Any, types: Any, args: Args, kwargs: Kwargs) -> object:
    """Record an op, then run it under the mode: torch calls a recorder after all other modes, and it is to come first."""
    with proxy_tensor.disable_proxy_modes_tracing() as recorder:
        _python_dispatch._push_mode(mode)
        try:
            if isinstance(func, HigherOrderOperator):
                return func.python_key_table[type(recorder)](recorder, *args, **kwargs)
            return recorder.__torch_dispatch__(func, types, tuple(args), kwargs)
        finally:
            _python_dispatch._pop_mode()


def run_faked(mode: Mode, func: Any, types: Any, args: Args, kwargs: Kwargs) -> object:
    """Let torch compute the shapes of an op.  Raises `NotTraceable` for a LocalTensor, or an int of each rank, among fake tensors."""
    if LocalTensor in types:
        raise refused(
            "it is used beside fake tensors, and none stands for it", f"a LocalTensor in {func}", "Pass it as an input."
        )
    check_numbers(mode, args, kwargs)
    return func(*args, **kwargs)


def check_numbers(mode: Mode, args: Args, kwargs: Kwargs) -> None:
    """Raises `NotTraceable` for an int of each rank among the arguments of an op."""
    for value in (*args, *kwargs.values()):
        for number in value if type(value) in (list, tuple) else (value,):
            if isinstance(number, torch.SymInt):
                check_graph_value(mode, number)


def run_traced(mode: Mode, route: Fn, func: Any, args: Args, kwargs: Kwargs) -> object:
    """Run an op while a graph is recorded.  Raises `NotTraceable` if the op itself was not recorded."""
    trace = mode.tracing
    if trace is None:
        raise refused("no LocalTensorMode was entered when the trace began", func, "Enter it around make_fx.")
    if trace.depth == 0 and torch._C._get_dispatch_mode(_PROXY) is not None:
        raise refused("it runs beside the recorded ops", func, _OUTSIDE)
    trace.depth += 1
    try:
        return route(mode, func, args, kwargs)
    finally:
        trace.depth -= 1


@contextmanager
def _tracer_set(mode: Mode, original: Fn, tracer: Any) -> Iterator[None]:
    before, mode.tracing = mode.tracing, Trace(tracer)
    try:
        with original(tracer):
            yield
    finally:
        mode.tracing = before


def _create_arg(mode: Mode, original: Fn, tracer: Any, value: Any) -> object:
    check_graph_value(mode, value)
    return original(tracer, value)


def _proxy_slot(mode: Mode, original: Fn, value: Any, *args: Any, **kwargs: Any) -> object:
    if isinstance(value, torch.SymInt | torch.SymBool):
        check_graph_value(mode, value)
    return original(value, *args, **kwargs)


def _sym_proxy(mode: Mode, original: Fn, tracer: Any) -> object:
    inner = original(tracer)

    def checked(number: Any) -> object:
        check_graph_value(mode, number)
        return inner(number)

    return checked


def is_uneven(x: Tensor) -> bool:
    """Whether a size or stride differs between ranks."""
    strides = x.stride() if x.layout is torch.strided else ()
    return any(type(number) is not int for number in (*x.shape, *strides))


def _example(mode: Mode, original: Fn, value: Any, *args: Any, **kwargs: Any) -> object:
    """The example value in a node's meta: one rank's metadata; none where ranks have different sizes."""
    return None if type(value) is LocalTensor and is_uneven(value) else original(value, *args, **kwargs)


PATCHES: list[tuple[Any, str, Patch]] = [
    (proxy_tensor, "_set_make_fx_tracer", _tracer_set),
    (proxy_tensor.PythonKeyTracer, "create_arg", _create_arg),
    (proxy_tensor, "get_proxy_slot", _proxy_slot),
    (proxy_tensor, "fetch_sym_proxy", _sym_proxy),
    (proxy_tensor, "extract_val", _example),
    (proxy_tensor, "_extract_tensor_metadata", _example),
]


@cache
def install() -> None:
    """Let the proxies of `make_fx` take LocalTensors; patch what puts a value into a graph."""
    proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, LocalTensor)  # type: ignore[assignment]
    for owner, name, replacement in PATCHES:
        patch_attribute(owner, name, replacement)
