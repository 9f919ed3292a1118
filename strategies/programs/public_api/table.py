"""All public names of DTensor: which have programs, and which have none, with the reason.

The names are those in `__all__` of `torch.distributed.tensor`, of its packages `experimental` and `parallel`, of every public
module within them, and of `torch.distributed.device_mesh`, the public methods of `DTensor`, the classes of `torch.optim` and the
functions of `torch.nn.functional`, so that a name of a later torch is one without programs until it is listed here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import operator
import pickle
import pkgutil
import re
from typing import Any

import torch
import torch.distributed.tensor.debug
from torch import nn
from torch.distributed import device_mesh
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, experimental, parallel
from torch.nn import functional as F  # noqa: N812  # its usual name, which scripts have, too

from strategies.model.rule import PUBLIC
from strategies.programs.public_api import (
    function_calls,
    module_calls,
    optimizer_calls,
    python_calls,
    tensor_calls,
    varied_calls,
)
from strategies.programs.public_api.function_steps import FAMILIES, FUNCTION_STEPS, FUNCTIONS_LEFT_OUT, function_names
from strategies.programs.public_api.module_steps import MODULE_STEPS
from strategies.programs.public_api.python_steps import PYTHON_STEPS
from strategies.programs.public_api.submesh_steps import SUBMESH_STEPS
from strategies.programs.public_api.tensor_steps import TENSOR_STEPS, Generator, PublicStep
from strategies.programs.public_api.varied_steps import VARIED_STEPS
from strategies.programs.run.step_functions import whole

STEPS: dict[str, Generator] = {
    **TENSOR_STEPS, **MODULE_STEPS, **VARIED_STEPS, **PYTHON_STEPS, **SUBMESH_STEPS, **FUNCTION_STEPS,
}  # fmt: skip
"""A generator of steps for each public name that has programs; what of a name it tries may follow it after a comma."""
OF_TORCH = ("optim.", "utils.", "amp.", "torch.")
"""Names of torch's own functions and classes that take DTensors, too, begin so."""
ONE_AXIS = frozenset(
    name
    for name in STEPS
    if name.startswith(("parallel.", "experimental.context")) and not name.startswith("parallel.loss_parallel")
)
"""Names whose calls take a mesh of one axis."""
TWO_AXES = frozenset(name for name in STEPS if ", rows" in name)
"""Names whose calls take a mesh of two axes, and use a submesh."""
WITHOUT_PROGRAMS = {
    "tensor.DTensor": "a class: its methods have programs",
    "DTensor.device_mesh": "an attribute, which every program reads",
    "DTensor.placements": "an attribute, which every program reads",
    "tensor.Placement": "the base class of Replicate, Shard and Partial, which have programs",
    "parallel.ParallelStyle": "the base class of the styles, which have programs",
    "optim.Optimizer": "the base class of the optimizers, which have programs",
    "optim.LBFGS": "its step takes a function, and flattens all parameters into one tensor",
    "optim.Muon": "it rounds to bfloat16 in between: sums in another order are not equal",
    "optim.SparseAdam": "it takes sparse gradients, which DTensor does not have",
    "debug.visualize_sharding": "it prints, and has no result",
    "parallel.fsdp.DTensorExtensions": "what the older FSDP calls; users do not",
    **{f"functional.{name}": why for name, why in FUNCTIONS_LEFT_OUT.items() if hasattr(F, name)},
}
"""Public names without programs of their own, and the reason."""
_PACKAGES = {"tensor": dtensor, "experimental": experimental, "parallel": parallel, "device_mesh": device_mesh}
_PACKAGES_OF_TORCH = {"optim": torch.optim, "utils": nn.utils, "amp": torch.amp, "torch": torch}
MOST_AXES = 2
"""Steps have layouts for meshes of one axis up to so many."""


@functools.cache
def public_modules() -> dict[str, Any]:
    """The public modules within `torch.distributed.tensor`, by their names in it: `parallel.input_reshard`."""
    found: dict[str, Any] = {}
    paths = [("", list(dtensor.__path__))]
    for prefix, path in paths:
        for one in pkgutil.iter_modules(path):
            if not one.name.startswith("_"):
                found[prefix + one.name] = module = importlib.import_module(f"{dtensor.__name__}.{prefix}{one.name}")
                paths += [(f"{prefix}{one.name}.", list(module.__path__))] if one.ispkg else []
    return found


def public_names() -> list[str]:
    """Each public name of the installed torch, by its package: `tensor.zeros`, `parallel.ColwiseParallel`; or `DTensor.to_local`."""
    names = [f"{package}.{name}" for package, module in _PACKAGES.items() for name in module.__all__]
    offered = [
        getattr(module, name) for module in _PACKAGES.values() for name in module.__all__ if hasattr(module, name)
    ]
    for package, module in public_modules().items():
        rest = (name for name in getattr(module, "__all__", ()) if package not in _PACKAGES)
        names += [f"{package}.{name}" for name in rest if not any(getattr(module, name) is one for one in offered)]
    names += [f"functional.{name}" for name in function_names()]
    names += [f"DTensor.{name}" for name in vars(DTensor) if not name.startswith("_")]
    optimizers = (name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type))
    return [*names, *(f"optim.{name}" for name in optimizers)]


def without_programs() -> dict[str, str]:
    """The public names of the installed torch that have no program, with the reason."""
    new = "it is public in this torch, and has no program yet"
    known = {*map(base_name, STEPS), *(f"functional.{name}" for uses in FAMILIES.values() for name in uses)}
    return {name: WITHOUT_PROGRAMS.get(name, new) for name in public_names() if name not in known}


@functools.cache
def public_steps(name: str, axes: int) -> tuple[PublicStep, ...]:
    """The steps of a public name on a mesh of so many axes, each once."""
    if axes > (1 if name in ONE_AXIS else MOST_AXES):
        return ()
    return tuple({step.call: step for step in STEPS[name](axes)}.values())


@functools.cache
def _by_call() -> dict[str, tuple[str, PublicStep]]:
    return {
        step.call: (name, step)
        for name in STEPS
        for axes in range(1, MOST_AXES + 1)
        for step in public_steps(name, axes)
    }


def public_step(then: str) -> tuple[str, PublicStep]:
    """The public name and the step of a program's `then`.  Raises ValueError for a text that is none."""
    found = _by_call().get(then.removeprefix(PUBLIC))
    if not then.startswith(PUBLIC) or found is None:
        raise ValueError(f"no public call of DTensor is written {then.removeprefix(PUBLIC)!r} here")
    return found


def base_name(name: str) -> str:
    """The public name of a key of `STEPS`.

    >>> base_name("parallel.ColwiseParallel, modules kept"), base_name("tensor.zeros")
    ('parallel.ColwiseParallel', 'tensor.zeros')
    """
    return name.partition(",")[0]


def step_name(then: str) -> str:
    """The name of a program's `then` and what of it the program tries.  Raises ValueError as `public_step`."""
    name, step = public_step(then)
    return f"{name}, {step.aspect}" if step.aspect else name


_USES = {
    "modules kept": "the module's state afterwards", "modules trained": "a training step", "hidden sizes": "sizes of layers",
    "tied": "shared parameters", "frozen": "frozen parameters", "pieces": "uneven shards", "arguments": "further arguments",
    "of any DTensor": "a DTensor in another placement", "what the caller gave": "the caller's tensor afterwards",
    "strides": "strides of pieces", "of any pieces": "pieces of any sizes", "what is within": "", "twice": "entered twice",
    "set": "assignment", "in a layer": "parameters of a layer", "numbers": "as Python numbers", "what it tells": "attributes",
}  # fmt: skip


def use_in_words(name: str) -> str:
    """What of a public call the programs of that `step_name` try, for a title; "" for the call itself.

    >>> use_in_words("parallel.ColwiseParallel, modules trained, tied"), use_in_words("tensor.zeros")
    ('a training step, shared parameters', '')
    """
    _, _, rest = name.partition(", ")
    uses, _, text = rest.partition(", ") if rest.startswith("rows: ") else ("", "", rest)
    text = re.sub(r"pulled_back\(\(+([\w.]+)\(.*", r"the gradient of \1", text)
    words = [text] if uses else [_USES.get(use, use) for use in text.split(", ")]
    return ", ".join(filter(None, ["a submesh" if uses else "", *words]))


def is_further_use(then: str) -> bool:
    """Whether a program's `then` is a use of a public call that has a name of its own: more than that call with its arguments."""
    return then.startswith(PUBLIC) and "," in step_name(then)


def public_object(then: str) -> Any:
    """The function or class that is public under the name of a program's `then`.  Raises ValueError as `public_step`.

    Of a call of a Python function of torch's own, such as `torch.testing.assert_close(x, y)`, it is that function.
    """
    key, step = public_step(then)
    called = re.match(r"torch\.([\w.]+)\(", step.call)
    if called and inspect.isfunction(function := operator.attrgetter(called[1])(torch)):
        return function
    package, _, name = base_name(key).rpartition(".")
    if name == "functional":
        return getattr(F, step.aspect)
    return getattr({**public_modules(), **_PACKAGES, **_PACKAGES_OF_TORCH, "DTensor": DTensor}[package], name)


IMPORTS = """\
import contextlib
import copy
import fnmatch
import io
import operator
import pickle
import shutil
import tempfile

import torch.distributed as dist
import torch.distributed.tensor.debug
import torch.utils.checkpoint
from torch import nn
from torch.distributed import checkpoint
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module, experimental, parallel
from torch.distributed.tensor.parallel.input_reshard import input_reshard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F
"""
"""What the functions of steps need besides torch, DTensor, `distribute_tensor` and the placements."""
MODULES = (tensor_calls, module_calls, varied_calls, optimizer_calls, python_calls, function_calls)
"""Modules of the functions that steps use."""
FUNCTIONS: dict[str, Any] = {
    name: value
    for module in MODULES
    for name, value in vars(module).items()
    if getattr(value, "__module__", "") == module.__name__
} | {"whole": whole}
"""All functions and classes that steps use, by name."""


def scope() -> dict[str, Any]:
    """The names that the code of a step may use besides `x`."""
    named = {"torch": torch, "nn": nn, "F": F, "experimental": experimental, "parallel": parallel}
    named |= {"contextlib": contextlib, "copy": copy, "operator": operator, "pickle": pickle, "dtensor": dtensor}
    return {
        **FUNCTIONS,
        **named,
        "on_mesh": tensor_calls.on_mesh,  # which a caller may have wrapped
        "DTensor": DTensor,
        "DeviceMesh": device_mesh.DeviceMesh,
        "Partial": Partial,
        "Replicate": Replicate,
        "Shard": Shard,
        "distribute_tensor": dtensor.distribute_tensor,
    }


def sources(code: str) -> list[str]:
    """The text that a script needs for the code of a step: the imports, then each function that it uses and those that these use."""
    used: dict[str, str] = {}
    texts = [code]
    while texts:
        text = texts.pop()
        for name, value in FUNCTIONS.items():
            if name not in used and re.search(rf"(?<![\w.]){name}\(", text):
                used[name] = inspect.getsource(value)
                texts.append(used[name])
    return [IMPORTS, *(used[name] for name in sorted(used, key=list(FUNCTIONS).index))]
