"""torch's OpInfos, imported in less time, and the samples of one of them, drawn outside torch's own test suite.

| torch part (under torch.testing._internal)       | why                                            | read on     | run on |
|--------------------------------------------------|------------------------------------------------|-------------|--------|
| common_methods_invocations.op_db                 | the OpInfos                                    | 2.11 - 2.15 | 2.13   |
| asdict, in opinfo.core                           | copies all arguments of each of 1,099 OpInfos, | by feature  | 2.13   |
|                                                  | for references that are derived from them      |             |        |
| common_device_type imports torch._inductor.utils | for GPU_TYPES alone; that imports torch._dynamo | by feature  | 2.13   |
| extract_test_fn, in common_utils and opinfo.core | looks for a TestCase among its callers, by     | 2.13, 2.14  | 2.13   |
|                                                  | `inspect.stack`, whenever samples are drawn    | by feature  |        |
| OpInfo.sample_inputs                             | the samples                                    | 2.11 - 2.15 | 2.13   |
| the switch set_seed of the iterator it returns   | it seeds all devices before each sample, alike | by feature  | 2.13   |

Without the copies and without torch._dynamo the import takes less than half of the time.
`inspect.stack` reads a source file per frame and walks all modules: some 10 ms under pytest, where most samples take
microseconds.  `tests/localtensor/_util/test_opinfo.py` names each part.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from localtensor._util.patching import replaced

OPINFOS = "torch.testing._internal.common_methods_invocations"
COMPILER = ("torch._dynamo.", "torch._inductor.")
INDUCTOR = ("torch._inductor", "torch._inductor.utils")

TEST_LOOKUP = "extract_test_fn"
LOOKUP_MODULES = ("torch.testing._internal.common_utils", "torch.testing._internal.opinfo.core")


def opinfo_list() -> list[Any]:
    """torch's OpInfos, in torch's order.  The first call imports them, which takes a second or more."""
    if OPINFOS not in sys.modules:
        _import_opinfos()
    return list(sys.modules[OPINFOS].op_db)


def _import_opinfos() -> None:
    before = {*sys.modules}
    builds = logging.getLogger("torch.utils.cpp_extension")  # it warns of a CUDA toolkit without a GPU
    try:
        with _gpu_types_alone(), replaced(builds, "disabled", True):
            core = importlib.import_module("torch.testing._internal.opinfo.core")
            with replaced(core, "asdict", _shallow) if hasattr(core, "asdict") else nullcontext():
                importlib.import_module(OPINFOS)
    except ImportError:  # a torch whose OpInfos import more of torch._inductor, as 2.11: as torch does it
        # Modules that are left of a package that was not imported whole keep it from being imported.
        for name in {*sys.modules} - before:
            if name.startswith(COMPILER):
                del sys.modules[name]
        importlib.import_module(OPINFOS)


def _shallow(instance: Any) -> dict[str, Any]:
    """`dataclasses.asdict` without its copies: the values are the instance's own."""
    return {one.name: getattr(instance, one.name) for one in dataclasses.fields(instance)}


@contextmanager
def _gpu_types_alone() -> Iterator[None]:
    """A context in which `from torch._inductor.utils import GPU_TYPES` imports nothing, if torch's source has a literal."""
    gpu_types = None if INDUCTOR[0] in sys.modules else _gpu_types()
    if gpu_types is None:
        yield
        return
    package, utils = map(ModuleType, INDUCTOR)
    package.__path__ = []
    vars(utils)["GPU_TYPES"] = gpu_types
    sys.modules.update(zip(INDUCTOR, (package, utils), strict=True))
    try:
        yield
    finally:
        for name, module in zip(INDUCTOR, (package, utils), strict=True):
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _gpu_types() -> list[str] | None:
    """The value of GPU_TYPES in the source of torch._inductor.utils; None if there is no source, or no literal."""
    source = Path(torch.__file__).parent / "_inductor" / "utils.py"
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
        (text,) = [line.partition("=")[2] for line in lines if line.startswith("GPU_TYPES =")]
        found = ast.literal_eval(text.strip())
    except (OSError, ValueError, SyntaxError):
        return None
    return found if isinstance(found, list) else None


@contextmanager
def drawn_samples(
    info: Any, device: str, dtype: torch.dtype, *, requires_grad: bool = False
) -> Iterator[Iterator[Any]]:
    """An iterator over `info.sample_inputs(...)`, to be used inside the block; torch's global seed decides the samples.

    Raises what torch raises for a device or dtype for which the OpInfo has no samples.
    """
    try:
        for home in _original_lookups():
            setattr(home, TEST_LOOKUP, _no_test)
        samples = iter(info.sample_inputs(device, dtype, requires_grad=requires_grad))
        if hasattr(samples, "set_seed"):
            samples.set_seed = False
        yield samples
    finally:
        for home, theirs in _original_lookups().items():  # not the value found at entry: another thread may be inside
            setattr(home, TEST_LOOKUP, theirs)


def _no_test() -> None:
    """The value of torch's function where no TestCase is running."""


@functools.cache
def _original_lookups() -> Mapping[Any, Any]:
    """torch's own function, by module that has it."""
    homes = map(importlib.import_module, LOOKUP_MODULES)
    return {home: getattr(home, TEST_LOOKUP) for home in homes if hasattr(home, TEST_LOOKUP)}
