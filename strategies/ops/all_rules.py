"""Our own rules, family by family: one room for each idea, one entry for each overload, and the book of them all."""

from __future__ import annotations

from collections.abc import Iterable

from localtensor.errors import Refusal
from strategies.ops.index import indexing, scatter, sorting
from strategies.ops.lib.overload_variants import on_lists
from strategies.ops.linalg import matmul, matrix_ops, reductions
from strategies.ops.nn import attention, losses, normalization
from strategies.ops.nn import spatial as pooling
from strategies.ops.pointwise import creation, linear, unary_binary
from strategies.ops.semantics.rulebook import Book, Entry
from strategies.ops.shape import joining, slices, views

FOREACH_RULES = on_lists(
    (
        *linear.RULES,
        *unary_binary.UNARY_BINARY_RULES,
        *creation.CREATION_RULES,
        *matmul.RULES,
        *reductions.REDUCTIONS_RULES,
        *reductions.NORMS,
    )
)
"""Foreach ops whose elements are calls of elementwise ops, and the few whose elements are norms, maxima or products."""


CALL = "strategies.ops.collected"


class TwoRules(Refusal):
    """Two entries for one overload: which of them holds would depend on the order of the imports."""

    def __init__(self, first: Entry, second: Entry) -> None:
        value = f"{first.op} of the families {first.family} ({first.where}) and {second.family} ({second.where})"
        problem = "an overload has one rule, and these are two"
        super().__init__(CALL, "entries", value, problem, "Take it out of one of the two families.")


def collected(entries: Iterable[Entry]) -> Book:
    """The book of these entries.  Raises `TwoRules` where two of them are for one overload."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.op in found:
            raise TwoRules(found[entry.op], entry)
        found[entry.op] = entry
    return Book(found)


MODULES = (
    attention,
    creation,
    indexing,
    joining,
    linear,
    losses,
    matmul,
    matrix_ops,
    normalization,
    pooling,
    reductions,
    scatter,
    slices,
    sorting,
    unary_binary,
    views,
)
"""The modules that hold rules in a table `RULES`."""
OUR_RULES: Book = collected((*FOREACH_RULES, *(entry for module in MODULES for entry in module.RULES)))
"""Every rule of our own, by overload."""
