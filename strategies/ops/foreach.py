"""Foreach ops whose elements are calls of elementwise ops, and the few whose elements are norms, maxima or products."""

from __future__ import annotations

from strategies.ops import factory, linear, matmul, pointwise, reductions, reductions_norms
from strategies.ops.variants_lists import on_lists

RULES = on_lists(
    (*linear.RULES, *pointwise.RULES, *factory.RULES, *matmul.RULES, *reductions.RULES, *reductions_norms.NORMS)
)
