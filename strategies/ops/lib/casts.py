"""Which reductions a change of dtype goes with: may each part be cast by itself?"""

from __future__ import annotations

import torch

from localtensor.layout.partials import agreed

RANGES = {torch.uint8: (0, 8), torch.int8: (1, 8), torch.int16: (1, 16), torch.int32: (1, 32), torch.int64: (1, 64)}
"""Integers: whether they have a sign, and of how many bits they are.  Others are not cast while they are partial."""
NUMBERS = (torch.int32, torch.int64)
"""Integers whose sums are taken for sums of numbers.  Those of fewer bits wrap in daily use, as `uint8` images do."""


def real(dtype: torch.dtype) -> bool:
    """Whether it stands for numbers that divide: floats of two bytes or more, and complex numbers."""
    return (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex


def carries(kind: str, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the cast of what parts make together is what their casts make together; never of an average of integers.

    >>> carries("sum", torch.float32, torch.bfloat16), carries("sum", torch.int64, torch.uint8)
    (True, True)
    >>> carries("sum", torch.float32, torch.int64), carries("sum", torch.uint8, torch.int64)  # cut off; wrapped before
    (False, False)
    >>> carries("sum", torch.bool, torch.int64), carries("max", torch.bool, torch.int64)  # the sum of booleans is "or"
    (False, True)
    >>> carries("sum", torch.bfloat16, torch.float32), carries("max", torch.float32, torch.float64)
    (True, True)
    >>> carries("max", torch.int64, torch.uint8), carries("avg", torch.int64, torch.float32)  # 256 is 0; rounded before
    (False, False)
    """
    if not (agreed(kind, source) and agreed(kind, target)):
        return False
    if source == target:
        return True
    if source == torch.bool:
        return kind in ("min", "max", "product") and (target in RANGES or real(target))
    if real(source):
        turns = kind == "product" and source.is_complex and not target.is_complex  # a factor keeps its phase
        return real(target) and not turns
    return source in RANGES and _integers(kind, source, target)


def _integers(kind: str, source: torch.dtype, target: torch.dtype) -> bool:
    (signed, bits), (wider, most) = RANGES[source], RANGES.get(target, (1, 0))
    if not (most or real(target)):
        return False
    if kind in ("min", "max"):
        return real(target) or (wider >= signed and most - wider >= bits - signed)
    return source in NUMBERS if real(target) or most > bits else True
