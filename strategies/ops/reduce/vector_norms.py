"""Norms of vectors: which are made of the pieces' norms.

Of the p-norms those of 0 (how many are not zero) and of 1 are sums, and those of the infinities extremes.  A root of a
sum is no sum of roots: of the others no piece is a part.  None is linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from torch.distributed.tensor import Partial

from strategies.ops.lib.reduced_dims import cuts, folds, kept
from strategies.ops.semantics.rulebook import Ask, Cut, Entry, Line, rules

SUM, MAX, MIN = Partial("sum"), Partial("max"), Partial("min")


def norm(ask: Ask, order: str = "ord") -> Iterator[Line]:
    """The norm over some dims; of no order given it is 2."""
    places = kept(ask)
    yield from cuts(ask, places)
    value = ask.get(order)
    part, cut = norm_part(2.0 if value is None else value)
    if part is not None:
        yield from folds(ask, places, [part], cut=cut)


def norm_part(order: float) -> tuple[Partial | None, Cut]:
    """What the norm of a piece is of the whole one, and the cut that it takes: nothing at all has no extreme.

    >>> norm_part(1), norm_part(math.inf), norm_part(2)
    ((Partial(sum), 'any'), (Partial(max), 'filled'), (None, 'any'))
    """
    if order in (0, 1):
        return SUM, "any"
    if math.isinf(order):
        return (MAX if order > 0 else MIN), "filled"
    return None, "any"


def powers(ask: Ask) -> Iterator[Line]:
    """The sum of the elements' powers, without the root: a sum, if the power is finite.

    Asked for complex numbers in a real dtype, torch 2.13 drops the imaginary part first if there is one row only.
    """
    places = kept(ask)
    yield from cuts(ask, places)
    if math.isfinite(ask["ord"]) and not (ask.tensors[0].dtype.is_complex and ask["dtype"] is not None):
        yield from folds(ask, places, [SUM])


NORMS: tuple[Entry, ...] = (
    *rules("reductions", "norms of order 0 and 1 add up", ["aten.linalg_vector_norm.default"], norm),
    *rules("reductions", "norms of order 0 and 1 add up",
           [f"aten.norm.{w}" for w in ("Scalar", "ScalarOpt_dim", "ScalarOpt_dim_dtype", "ScalarOpt_dtype")],
           partial(norm, order="p")),
    *rules("reductions", "powers add up", ["aten.linalg__powsum.default"], powers),
)  # fmt: skip
"""Norms over dims; `strategies.ops.reduce.reductions` has them among its rules."""
