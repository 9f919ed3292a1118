"""The registry of all sharding rules of our own: one module for each family of ops, one rule for each overload."""

from __future__ import annotations

from collections.abc import Iterable

from localtensor.errors import Refusal
from strategies.ops.index import indexing, scatter, sorting
from strategies.ops.lib.overload_variants import on_lists
from strategies.ops.linalg import matmul, matrix_ops, reductions
from strategies.ops.nn import attention, losses, normalization, spatial
from strategies.ops.pointwise import creation, linear, monotone
from strategies.ops.semantics.rule_registry import OpRule, RuleRegistry
from strategies.ops.shape import joining, views


class TwoRules(Refusal, call="strategies.ops.collected", argument="entries"):
    """Two rules for one overload: which of them holds would depend on the order of the imports."""

    PROBLEM = "an overload has one rule, and these are two"
    REMEDY = "Take it out of one of the two families."


def collected(entries: Iterable[OpRule]) -> RuleRegistry:
    """The registry of these rules.  Raises `TwoRules` if two of them are for one overload."""
    found: dict[str, OpRule] = {}
    for entry in entries:
        if entry.op in found:
            first = found[entry.op]
            raise TwoRules(
                f"{entry.op} of the families {first.family} ({first.where}) and {entry.family} ({entry.where})"
            )
        found[entry.op] = entry
    return RuleRegistry(found)


MODULES = (
    attention, creation, indexing, joining, linear, losses, matmul, matrix_ops, monotone, normalization, reductions,
    scatter, sorting, spatial, views,
)  # fmt: skip
"""The modules that hold rules in a table `RULES`."""
FOREACH_RULES = on_lists(e for module in (linear, monotone, creation, matmul, reductions) for e in module.RULES)
"""The rules of foreach ops."""
OUR_RULES: RuleRegistry = collected((*FOREACH_RULES, *(e for module in MODULES for e in module.RULES)))
"""Every rule of our own, by overload."""
