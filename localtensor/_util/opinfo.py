"""The samples of one of torch's OpInfos, drawn outside torch's own test suite.

| torch part (under torch.testing._internal)       | why                                            | read on     | run on |
|--------------------------------------------------|------------------------------------------------|-------------|--------|
| extract_test_fn, in common_utils and opinfo.core | looks for a TestCase among its callers, by     | 2.13, 2.14  | 2.13   |
|                                                  | `inspect.stack`, whenever samples are drawn    | by feature  |        |
| OpInfo.sample_inputs                             | the samples                                    | 2.11 - 2.15 | 2.13   |
| the switch set_seed of the iterator it returns   | it seeds all devices before each sample, alike | by feature  | 2.13   |

`inspect.stack` reads a source file per frame and walks all modules: some 10 ms under pytest, where most samples take
microseconds.  `tests/localtensor/_util/test_opinfo.py` names each part.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

TEST_LOOKUP = "extract_test_fn"
LOOKUP_MODULES = ("torch.testing._internal.common_utils", "torch.testing._internal.opinfo.core")


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
