"""Importing this module registers all our rules with DTensor, permanently and for the whole process.

As an argument of `--rules` it validates our rules as DTensor applies them, end to end:

    localtensor validate --rules strategies.propagation.overlay.autoload
    localtensor validate cumsum --rules strategies.propagation.overlay.autoload
    localtensor gate --rules strategies.propagation.overlay.autoload

Import it before the first call of DTensor: earlier results of its tables stay in each thread's cache, for callers of
the propagator itself.  `with strategies.overlay_dtensor():` is temporary, and has no such limit.
"""

from __future__ import annotations

from torch.distributed.tensor._op_schema import OpSchema, OpStrategy

from strategies.ops.semantics.rule_registry import OpRule
from strategies.propagation.overlay.context import Strategy, op_strategy, overlay_dtensor, register_strategies


def by_our_rule(entry: OpRule) -> Strategy:
    """The rule as a strategy function defined in this module, by which `user_modules` recognises who registered it."""

    def ours(schema: OpSchema) -> OpStrategy:
        return op_strategy(entry, schema)

    return ours


OVERLAY = overlay_dtensor()
OVERLAY.everywhere()
register_strategies(OVERLAY.entries, by_our_rule)
