"""Running sums, products and extremes: a row hangs on all rows before it, so the scanned dim is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from strategies.ops.lib.dim_maps import LINEAR, kept, mapped, pending
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "scans"


def scanned(*kinds: str) -> Callable[[Ask], Iterator[Line]]:
    """The lines of a scan that goes with these reductions, where it does not change the dtype.

    The running sum of parts is a part of the running sum; but what is widened first, as booleans and small integers are,
    may have wrapped before.
    """

    def lines(ask: Ask) -> Iterator[Line]:
        given = ask.tensors[0]
        yield from pending(ask, [0], kinds)
        yield from mapped(ask, kept(given.ndim, ask["dim"] % max(given.ndim, 1)))

    return lines


_WHOLE = "the scanned dim is whole"

RULES: tuple[Entry, ...] = with_variants(
    (
        *rules(FAMILY, _WHOLE, ["aten.cumsum.default"], scanned(*LINEAR)),
        *rules(FAMILY, _WHOLE, ["aten.cumprod.default"], scanned("product")),
        *rules(FAMILY, _WHOLE, ["aten.cummax.default", "aten.cummin.default"], scanned()),
        *rules(FAMILY, _WHOLE, ["aten.logcumsumexp.default", "aten._logcumsumexp.default"], scanned()),
    )
)
