"""Where a program makes its model parallel: by module and parameter, the user's lines that set it, hook it or wrap it.

A profile function sees each call of torch by the user's code, with its arguments, while the program is set up.  It is on
only in the second run, after a divergence.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from localtensor._util.call_sites import is_user_file
from localtensor._util.events import Place
from localtensor.testing.compare.op_stream import lines_text, user_places

SEEDS = "(seeds)"
"""The name under which the lines stand that seed torch's generator."""
SEEDING = ("manual_seed", "set_rng_state", "seed")
MOST_SHOWN = 3  # calls that a report names for one value
READING = (
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children", "named_children",
    "state_dict", "get_submodule", "get_parameter", "register_parameter", "__getattr__", "__getitem__", "__iter__", "__len__",
    "__contains__", "__init__", "__repr__", "__dir__", "__hash__", "__getstate__", "__reduce_ex__", "__deepcopy__", "size", "forward", "__call__",
    "_call_impl", "_wrapped_call_impl",
)  # fmt: skip
"""Functions of torch that change nothing of what they get."""


@dataclass(slots=True)
class SetupLines:
    """The calls of a set-up, in order: what each got, and the lines that made it."""

    calls: list[tuple[list[object], tuple[Place, ...]]] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes the calls of this thread inside the block."""
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _event(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
            changes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
            if isinstance(owner, Tensor) and changes and is_user_file(frame.f_code.co_filename):
                self.calls.append(([owner], user_places(frame)))
            return
        caller = frame.f_back
        if event == "call" and frame.f_code.co_name in SEEDING and _of_torch(frame):
            self.calls.append(([SEEDS], user_places(caller)))
            return
        if event != "call" or caller is None or not _of_torch(frame) or not is_user_file(caller.f_code.co_filename):
            return
        code, given = frame.f_code, frame.f_locals
        wraps = code.co_name == "__init__" and ("module" in given or not isinstance(given.get("self"), nn.Module))
        if code.co_name in READING and not wraps:  # DDP and the like take another module
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        names = code.co_varnames[:count]
        values = [given[name] for name in names if name in given]
        if code.co_name == "__setattr__":
            values = values[-1:]
        got = [x for value in values for x in _things(value)]
        if got:
            self.calls.append((got, user_places(caller)))

    def by_name(self, model: nn.Module, plain: Any) -> dict[str, tuple[str, ...]]:
        """The lines by the name of the parameter, buffer or module that they are about, the last first."""
        names: dict[object, str] = {id(SEEDS): SEEDS}
        for name, one in [*model.named_modules(), *model.named_parameters(), *model.named_buffers()]:
            for identity in _identities(one):
                names.setdefault(identity, plain(name))
        found: dict[str, list[str]] = {}
        for got, places in reversed(self.calls):
            for thing in got:
                name = next((names[x] for x in _identities(thing) if x in names), None)
                text = lines_text(places)
                if name is not None and text and text not in found.setdefault(name, []):
                    found[name].append(text)
        return {name: tuple(lines[: 2 * MOST_SHOWN]) for name, lines in found.items()}


def _of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _things(value: object) -> Iterable[object]:
    """The modules and tensors that an argument is, or holds."""
    if isinstance(value, nn.Module | Tensor):
        return [value]
    if isinstance(value, torch.optim.Optimizer):
        return [x for group in getattr(value, "param_groups", ()) for x in group["params"]]
    if isinstance(value, list | tuple):
        return [x for one in value if not isinstance(one, list | tuple) for x in _things(one)]
    return []


def _identities(thing: object) -> list[object]:
    """By what a thing is known again: itself; of a tensor also its memory, which `x.data` shares."""
    if not isinstance(thing, Tensor):
        return [id(thing)]
    local = thing._local_tensor if isinstance(thing, DTensor) else thing
    try:
        where = local.untyped_storage().data_ptr() if local.layout == torch.strided else 0
    except RuntimeError:  # a subclass that wraps others, as fake tensors do, has no memory
        where = 0
    return [id(thing), *([("at", where)] if where else [])]


def setup_lines_of(lines: Mapping[str, tuple[str, ...]], name: str) -> tuple[str, ...]:
    """The lines about a parameter or a module: its own, or those of the nearest module around it that has some.

    >>> setup_lines_of({"": ("a.py:3 in f",), "up.weight": ("b.py:1 in g",)}, "up.bias")
    ('a.py:3 in f',)
    """
    while True:
        if name in lines:
            return lines[name][:MOST_SHOWN]
        if not name:
            return ()
        name = name.rpartition(".")[0]
