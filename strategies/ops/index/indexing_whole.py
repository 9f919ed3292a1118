"""Ops whose result has a size that its values decide, or that speak of memory: each rank has everything whole.

A rank's piece would give a result of some length, which says nothing of where the others' begin; and numbers of rows,
steps and offsets in memory are those of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "indexing"


def whole(ask: Ask) -> Iterator[Line]:
    """No line but the one that always holds."""
    yield from ()


_COUNTED = ["aten.nonzero.default", "aten._unique2.default", "aten.unique_dim.default",
            "aten.unique_consecutive.default", "aten.bincount.default", "aten.repeat_interleave.Tensor"]  # fmt: skip

RULES: tuple[Entry, ...] = with_variants(
    (
        *rules(FAMILY, "values decide how long the result is", _COUNTED, whole),
        *rules(FAMILY, "steps and offsets are those of the whole in memory", ["aten.as_strided.default"], whole),
    )
)
