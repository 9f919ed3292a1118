"""Whether a device can run an overload at all.

| torch part (torch._C)                                                     | read on     | run on |
|---------------------------------------------------------------------------|-------------|--------|
| _dispatch_has_computed_kernel_for_dispatch_key(name, key): composite      |             |        |
| kernels count                                                             | 2.11 - 2.15 | 2.13   |

`tests/strategies/test_cpu_kernels.py` names it.
"""

from __future__ import annotations

import torch

from strategies.model.rule import overload

_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def lacks_kernel(op: str, device: str = "cpu") -> str:
    """Why this device cannot run the overload of that name, or empty.  Raises as `overload` does for no such name."""
    known = getattr(torch._C, "_dispatch_has_computed_kernel_for_dispatch_key", None)
    if known is None or known(overload(op).name(), _KEYS[device]):
        return ""
    others = [name for name, key in _KEYS.items() if name != device and known(overload(op).name(), key)]
    elsewhere = f"; it has one for {others[0].upper()}" if others else ""
    return f"no kernel for {device.upper()} in this build of torch{elsewhere}"
