"""Importing this module puts our whole book into DTensor, for good and for the whole process.

It is what `--rules` names, so that the validator judges our rules as DTensor would apply them, end to end:

    localtensor validate --rules strategies.propagation.overlay.autoload
    localtensor validate cumsum --rules strategies.propagation.overlay.autoload
    localtensor gate --rules strategies.propagation.overlay.autoload

Import it before DTensor has seen any call: what DTensor's tables answered before stays in the memory of each thread, for
those who ask the propagator itself.  `with strategies.overlay_dtensor():` is for a while, and has no such limit.
"""

from __future__ import annotations

from typing import Any

from strategies.ops.semantics.rulebook import Entry
from strategies.propagation.overlay.context import Strategy, overlay_dtensor, register, strategy_of


def by_our_rule(entry: Entry) -> Strategy:
    """The entry as a function of this module, by which it is known who registered it."""

    def ours(schema: Any) -> Any:
        return strategy_of(entry, schema)

    return ours


OVERLAY = overlay_dtensor()
OVERLAY.everywhere()
register(OVERLAY.entries, by_our_rule)
