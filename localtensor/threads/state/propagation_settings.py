"""The ambient settings that change how a call is propagated, though they are no argument of it, each with its reason.

All caches of propagated results use this list: DTensor's, shared by rank threads or kept between programs, and that of
the propagator without DTensor.  `ambient_settings()` is read at each lookup and is part of the key, so all getters
together take a fraction of a microsecond.  Importing this module imports DTensor, which takes a second.

Left out: `torch.use_deterministic_algorithms` (chooses kernels; neither shapes nor rules), a default device (a spec has
none), TF32 and oneDNN switches (digits only), and torch-function modes: they may do anything, so a propagator computes
its results without them.

torch's private parts are touched through `PRIVATE`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import _redistribute
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch.distributed.tensor._redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN": "a switch of its planner",
    "torch.distributed.tensor._redistribute._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION": "a switch of its planner",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "which modes an op would meet",
    "torch._C._len_torch_dispatch_stack": "whether there are any, quickly",
    "torch._C._is_any_autocast_enabled": "whether autocast is on for any device, quickly",
}
_SWITCHES = ("_FORCE_MIN_COST_REDISTRIBUTION_PLAN", "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION")
AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `get()` is a hashable value; `why` says what would go wrong without it, `changes` what it affects."""

    name: str
    get: Callable[[], Hashable]
    why: str
    changes: str


def _modes() -> Hashable:
    """The classes of this thread's dispatch modes, outermost first, and whether each has a shape environment."""
    if not _modes_open():
        return None
    modes = _get_current_dispatch_mode_stack()
    return tuple((type(mode), getattr(mode, "shape_env", None) is not None) for mode in modes)


def _autocast() -> Hashable:
    """The devices on which autocast is on, with their dtypes; None if it is off everywhere."""
    if not _any_autocast():
        return None
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
    )


_modes_open = torch._C._len_torch_dispatch_stack
_any_autocast = torch._C._is_any_autocast_enabled

SETTINGS = (
    Setting(
        "grad mode",
        torch.is_grad_enabled,
        "composite ops take another way where a gradient is wanted",
        "which overloads a composite op is made of",
    ),
    Setting(
        "inference mode",
        torch.is_inference_mode_enabled,
        "views and composite ops are not taken apart as they are outside of it",
        "which overloads a composite op is made of",
    ),
    Setting(
        "default dtype",
        torch.get_default_dtype,
        "integers divided, and whatever is made without a dtype, are of this one",
        "the dtypes of results",
    ),
    Setting(
        "dispatch modes",
        _modes,
        "fake tensors have a device where meta tensors have none, and sizes that may be symbols",
        "the shapes and dtypes of results",
    ),
    Setting(
        "autocast",
        _autocast,
        "a product of float32 is bfloat16 under it, once the tensors have a device",
        "the dtypes of results",
    ),
    Setting(
        "planner switches",
        partial(operator.attrgetter(*_SWITCHES), _redistribute),
        "torch plans a redistribution by cost or by rule of thumb, and that has a cost of its own",
        "which inputs are wanted",
    ),
)
_a, _b, _c, _d, _e, _f = [setting.get for setting in SETTINGS]  # unrolled: a loop over them is 1.5 times as slow


def ambient_settings() -> tuple[Any, ...]:
    """The value of each setting, in the order of `SETTINGS`.

    >>> with torch.no_grad():
    ...     without = ambient_settings()
    >>> [setting.name for setting, a, b in zip(SETTINGS, ambient_settings(), without) if a != b]
    ['grad mode']
    """
    return (_a(), _b(), _c(), _d(), _e(), _f())
