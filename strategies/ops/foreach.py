"""Foreach ops whose elements are calls of elementwise ops, and the few whose elements are norms, maxima or products."""

from __future__ import annotations

from strategies.ops.lib.foreach_lift import on_lists
from strategies.ops.linalg import matmul
from strategies.ops.pointwise import creation as factory
from strategies.ops.pointwise import linear
from strategies.ops.pointwise import unary_binary as pointwise
from strategies.ops.reduce import reductions
from strategies.ops.reduce import vector_norms as reductions_norms

RULES = on_lists(
    (*linear.RULES, *pointwise.RULES, *factory.RULES, *matmul.RULES, *reductions.RULES, *reductions_norms.NORMS)
)
