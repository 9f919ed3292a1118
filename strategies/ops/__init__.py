"""Our own rules, family by family: one room for each idea, one entry for each overload, and the book of them all."""

from __future__ import annotations

from collections.abc import Iterable

from localtensor.errors import LocalTensorError, refusal
from strategies.book import Book, Entry
from strategies.ops import (
    attention,
    convolution,
    distances,
    embedding,
    embedding_bags,
    factory,
    fft,
    foreach,
    fused,
    gates,
    indexing,
    indexing_many,
    indexing_scatter,
    indexing_whole,
    joining,
    joining_pads,
    linalg,
    linear,
    losses,
    matmul,
    norms,
    pointwise,
    pooling,
    pooling_resized,
    random,
    reductions,
    scans,
    softmax,
    sorting,
    views,
    views_pieces,
    views_shape,
)

CALL = "strategies.ops.collected"


class TwoRules(LocalTensorError):
    """Two entries for one overload: which of them holds would depend on the order of the imports."""

    def __init__(self, first: Entry, second: Entry) -> None:
        value = f"{first.op} of the families {first.family} ({first.where}) and {second.family} ({second.where})"
        problem = "an overload has one rule, and these are two"
        super().__init__(refusal(CALL, "entries", value, problem, "Take it out of one of the two families."))


def collected(entries: Iterable[Entry]) -> Book:
    """The book of these entries.  Raises `TwoRules` where two of them are for one overload."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.op in found:
            raise TwoRules(found[entry.op], entry)
        found[entry.op] = entry
    return Book(found)


FAMILIES = (
    attention,
    convolution,
    distances,
    embedding,
    embedding_bags,
    factory,
    fft,
    foreach,
    fused,
    gates,
    indexing,
    indexing_many,
    indexing_scatter,
    indexing_whole,
    joining,
    joining_pads,
    linalg,
    linear,
    losses,
    matmul,
    norms,
    pointwise,
    pooling,
    pooling_resized,
    random,
    reductions,
    scans,
    softmax,
    sorting,
    views,
    views_pieces,
    views_shape,
)
"""The rooms that have rules."""
OUR_RULES: Book = collected(entry for family in FAMILIES for entry in family.RULES)
"""Every rule of our own, by overload."""
