"""Gated halves of a dim: `a * sigmoid(b)`, where a and b are the two halves.  Every other dim is a batch."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.lib.shared_dims import along, parts_of
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules


def gated(ask: Ask) -> Iterator[Line]:
    (halved,) = ask.dims("dim", ask.leaf("self") or 0)
    for dim in range(ask.meta("self").ndim):
        if dim != halved:
            yield along(ask, {"self": dim}, [dim])


def gated_backward(ask: Ask) -> Iterator[Line]:
    """Linear in the gradient."""
    (halved,) = ask.dims("dim", ask.leaf("self") or 0)
    for dim in range(ask.meta("self").ndim):
        if dim != halved:
            yield along(ask, {"grad_output": dim, "self": dim}, [dim])
    yield from parts_of(ask, ["grad_output"])


RULES: tuple[Entry, ...] = with_variants((
    *rules("gates", "the two halves meet element by element", ["aten.glu.default"], gated),
    *rules("gates", "the two halves meet element by element", ["aten.glu_backward.default"], gated_backward),
))  # fmt: skip
