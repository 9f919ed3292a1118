"""Softmax and its kin: every row goes by itself, so any dim but that of the rows may be cut.

None is linear in its input.  The gradients are linear in the gradient that comes in, given the result of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from strategies.ops.lib.linear_parts import linear
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules


def rows(ask: Ask) -> Iterator[Line]:
    """All tensors and the result have one shape, and are cut alike."""
    normalised = ask.dims("dim") if ask["dim"] is not None else ()
    for dim in range(ask.tensors[0].ndim):
        if dim not in normalised:
            yield ask.line(dict.fromkeys(range(len(ask.tensors)), Shard(dim)), [Shard(dim)])


def gradients(ask: Ask) -> Iterator[Line]:
    """The same, and what is linear in the gradient: grad * y - y * sum(grad * y), and grad - exp(y) * sum(grad)."""
    yield from rows(ask)
    yield from linear(ask, ask.leaf("grad_output"))


RULES: tuple[Entry, ...] = with_variants((
    *rules("softmax", "each row is normalised by itself",
           ["aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default",
            "aten.softmax.int", "aten.log_softmax.int"], rows),
    *rules("softmax", "each row has its own gradient, linear in that of the result",
           ["aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default"], gradients),
))  # fmt: skip
