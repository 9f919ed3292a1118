"""Padding: rows are put at the ends of some dims, constants or copies of rows that are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategies.ops.lib.dim_maps import KINDS, LINEAR, filled_with, kept, mapped, pending, sharded
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "joining"


def padded(ndim: int, pad: Sequence[int]) -> list[int]:
    """The dims at whose ends rows are put or, for a negative number, taken: two numbers a dim, the last dim first.

    >>> padded(3, [0, 0, 2, 1])
    [1]
    """
    return [ndim - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]]


def with_constant(ask: Ask) -> Iterator[Line]:
    """All ranks put the same number there, and fold it: that must make the number again."""
    puts = any(number > 0 for number in ask["pad"])
    yield from pending(ask, [0], filled_with(ask["value"]) if puts else KINDS)
    ndim = ask.tensors[0].ndim
    yield from mapped(ask, kept(ndim, *padded(ndim, ask["pad"])))


def with_copies(ask: Ask) -> Iterator[Line]:
    """Rows of the dim itself.  The ops refuse tensors without elements, so no rank's piece may be empty."""
    yield from pending(ask, [0])
    ndim = ask.tensors[0].ndim
    yield from mapped(ask, kept(ndim, *padded(ndim, ask["padding"])), "filled")


def from_copies(ask: Ask) -> Iterator[Line]:
    """The gradient of a row is the sum of those of its copies; of the padded tensor only the shape counts."""
    yield from pending(ask, [0], LINEAR)
    ndim = ask.tensors[0].ndim
    for dim, _ in kept(ndim, *padded(ndim, ask["padding"])):
        yield sharded(ask, {0: dim, 1: dim}, dim, "filled")


_COPIES = [f"aten.{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]

RULES: tuple[Entry, ...] = with_variants(
    (
        *rules(FAMILY, "a dim that is padded is whole", ["aten.constant_pad_nd.default"], with_constant),
        *rules(FAMILY, "a dim that is padded is whole", [f"{op}.default" for op in _COPIES], with_copies),
        *rules(FAMILY, "the gradients of copies add up", [f"{op}_backward.default" for op in _COPIES], from_copies),
    )
)
