"""Our own rules, family by family: one room for each idea, one entry for each overload, and the book of them all."""

from __future__ import annotations

from collections.abc import Iterable

from localtensor.errors import LocalTensorError, refusal
from strategies.ops import foreach
from strategies.ops.index import advanced_indexing as indexing_many
from strategies.ops.index import embedding, embedding_bags, indexing, indexing_whole, sorting
from strategies.ops.index import scatter as indexing_scatter
from strategies.ops.linalg import distances, fft, matmul
from strategies.ops.linalg import matrix_ops as linalg
from strategies.ops.nn import attention, convolution, losses, pooling
from strategies.ops.nn import glu as gates
from strategies.ops.nn import normalization as norms
from strategies.ops.nn import resizing as pooling_resized
from strategies.ops.pointwise import creation as factory
from strategies.ops.pointwise import linear, random
from strategies.ops.pointwise import optimizers as fused
from strategies.ops.pointwise import unary_binary as pointwise
from strategies.ops.reduce import reductions, scans
from strategies.ops.reduce import rowwise as softmax
from strategies.ops.semantics.rulebook import Book, Entry
from strategies.ops.shape import joining, joining_pads, views
from strategies.ops.shape import reshape as views_shape
from strategies.ops.shape import slices as views_pieces

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
