"""The samples of one of torch's OpInfos, for somebody who is no test of torch's.

| torch part (under torch.testing._internal)       | why                                            | read on     | run on |
|--------------------------------------------------|------------------------------------------------|-------------|--------|
| extract_test_fn, in common_utils and opinfo.core | looks for a TestCase among its callers, by     | 2.13, 2.14  | 2.13   |
|                                                  | `inspect.stack`, whenever samples are drawn    | by feature  |        |
| OpInfo.sample_inputs                             | the samples                                    | 2.11 - 2.15 | 2.13   |
| the switch set_seed of the iterator it returns   | it seeds all devices before each sample, alike | by feature  | 2.13   |

`inspect.stack` reads a source file per frame and walks all modules: some 10 ms in a test of pytest's, beside the
microseconds that most samples take.  `tests/localtensor/_util/test_opinfo.py` names each part.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

ASKS = "extract_test_fn"
HOMES = ("torch.testing._internal.common_utils", "torch.testing._internal.opinfo.core")


@contextmanager
def drawn(info: Any, device: str, dtype: torch.dtype, *, requires_grad: bool = False) -> Iterator[Iterator[Any]]:
    """An iterator over `info.sample_inputs(...)` that has to be used inside; whoever seeds torch decides what it draws.

    Raises what torch raises for a device or dtype that the OpInfo has no samples of.
    """
    try:
        for home in _theirs():
            setattr(home, ASKS, _no_test)
        samples = iter(info.sample_inputs(device, dtype, requires_grad=requires_grad))
        if hasattr(samples, "set_seed"):
            samples.set_seed = False
        yield samples
    finally:
        for home, theirs in _theirs().items():  # not what was there before: another thread may be inside
            setattr(home, ASKS, theirs)


def _no_test() -> None:
    """What torch's function says where no TestCase is running."""


@functools.cache
def _theirs() -> Mapping[Any, Any]:
    """The function of torch's in each module that has one."""
    return {home: getattr(home, ASKS) for home in map(importlib.import_module, HOMES) if hasattr(home, ASKS)}
