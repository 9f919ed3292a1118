"""Rules of matrix products, written in the letters of an einsum.

A letter of the result is sharded in the result and in the operands that have it.  The other letters are summed over, so
their shards give partial sums; an added tensor must then be a partial sum, too, or each rank would add all of it.  A
product is linear in each operand while the others are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.lib.elementwise import AVG, SUM, aligned, linear_partials
from strategies.ops.lib.overload_variants import rule_of_variant, with_variants
from strategies.ops.semantics.rule_registry import Cut, OpRule, PlacementRule, RuleQuery, rules

BATCH = "abcdefgh"
"""Letters of the batch dims of matmul and linear, the last letter for the last of them."""


@dataclass(frozen=True, slots=True)
class Product:
    """The letters of each operand, by leaf number, and of the result; and the leaf number of an added tensor, if any."""

    terms: Mapping[int, str]
    result: str
    added: int | None = None
    ignored: bool = False
    """Whether only the shape of the added tensor matters, since beta is 0."""
    cut: Cut = "any"
    summed: Cut = "any"
    """The condition on shards of a letter of the result, and of one that is summed over."""
    whole: str = ""
    """Letters that are not sharded: offsets into their dim are of the whole."""

    @property
    def letters(self) -> str:
        return "".join(letter for letter in dict.fromkeys("".join(self.terms.values())) if letter not in self.whole)

    def shape(self, query: RuleQuery) -> tuple[int, ...]:
        """The shape of the product if no operand is broadcast."""
        sizes = {letter: query.tensors[i].shape[d] for i, term in self.terms.items() for d, letter in enumerate(term)}
        return tuple(sizes[letter] for letter in self.result)


def product(query: RuleQuery, equation: str, names: Sequence[str], added: str = "") -> Iterator[PlacementRule]:
    """The rule of an op with operands of these names and an equation such as `mk,kn->mn`; `added` is scaled by `beta`."""
    terms, result = equation.split("->")
    letters = dict(zip((query.given(name) for name in names), terms.split(","), strict=True))
    leaf = query.leaf(added) if added else None
    cut: Cut = "any"
    if leaf is not None and query.op == "aten.addmv.default" and query.tensors[leaf] != query.outputs[0]:
        cut = "filled"  # addmv of torch 2.13 does not broadcast the added tensor for an empty matrix
    summed: Cut = cut if _exact(query, leaf) else "filled"
    made = Product(letters, result, leaf, query.get("beta") == 0, cut, summed)
    if query.outputs[0] is not None and query.outputs[0].shape == made.shape(query):
        yield from lines(query, made)  # addmv without columns has the shape of the added tensor


def _exact(query: RuleQuery, added: int | None) -> bool:
    """Whether the scales suit the dtype: torch 2.13 rejects integers scaled by a float if there is nothing to sum."""
    (meta,) = query.outputs
    if added is None or meta is None or meta.dtype.is_floating_point or meta.dtype.is_complex:
        return True
    return all(isinstance(scale, int) for scale in (query["beta"], query["alpha"]))


def lines(query: RuleQuery, product: Product, *, linearly: bool = True) -> Iterator[PlacementRule]:
    """The placement rules of a product; `linearly` tells whether the result is the product, not a function of it."""
    for letter in product.letters:
        if letter in product.result:
            yield _cut(query, product, letter)
        elif linearly:
            spots = {i: Shard(d) for i, d in _spots(query, product, letter).items()}
            yield from _summed(query, product, spots, product.summed)
    if linearly:
        yield from _parts(query, product)


def _cut(query: RuleQuery, product: Product, letter: str) -> PlacementRule:
    place = product.result.index(letter)
    held: dict[int, Placement] = {i: Shard(d) for i, d in _spots(query, product, letter).items()}
    (result,) = query.outputs
    if product.added is not None and result is not None:
        dim = aligned(query.tensors[product.added], result, place)
        held |= {product.added: Shard(dim)} if dim is not None else {}
    return query.line(held, [Shard(place)], product.cut)


def _spots(query: RuleQuery, product: Product, letter: str) -> dict[int, int]:
    """The dim of that letter in each operand that has it and is not broadcast along it."""
    found = {i: term.index(letter) for i, term in product.terms.items() if letter in term}
    size = max(query.tensors[i].shape[d] for i, d in found.items())
    return {i: d for i, d in found.items() if size <= 1 or query.tensors[i].shape[d] != 1}


def _summed(
    query: RuleQuery, product: Product, held: Mapping[int, Placement], cut: Cut = "any"
) -> Iterator[PlacementRule]:
    """The placement rules in which the product is a partial sum, and the added tensor, too."""
    (meta,) = query.outputs
    added = product.added
    if added is None or product.ignored:
        yield query.line(held, [SUM], cut)
    if added is not None and meta is not None and SUM in linear_partials(query.tensors[added].dtype, meta.dtype):
        yield query.line({**held, added: SUM}, [SUM], cut)


def _parts(query: RuleQuery, product: Product) -> Iterator[PlacementRule]:
    """The placement rules in which one operand, or the added tensor, is partial; avg(c + x) is c + avg(x)."""
    (meta,) = query.outputs
    for leaf in product.terms:
        for part in linear_partials(query.tensors[leaf].dtype, meta.dtype) if meta is not None else ():
            if part == SUM:
                yield from _summed(query, product, {leaf: part})
            else:
                yield query.line({leaf: part}, [part])
                if product.added is not None:
                    yield query.line({leaf: part, product.added: part}, [part])
    added = product.added
    if added is not None and meta is not None and AVG in linear_partials(query.tensors[added].dtype, meta.dtype):
        yield query.line({added: AVG}, [AVG])


def matmul(query: RuleQuery) -> Iterator[PlacementRule]:
    """Vectors, matrices, or batches of them, broadcast against each other."""
    first, second = (query.meta(name).ndim for name in ("self", "other"))
    one = _batch(first - 2) + "mk" if first > 1 else "k"
    two = _batch(second - 2) + "kn" if second > 1 else "k"
    batch = _batch(max(first, second) - 2)
    result = batch + ("m" if first > 1 else "") + ("n" if second > 1 else "")
    return lines(query, Product({query.given("self"): one, query.given("other"): two}, result))


def linear(query: RuleQuery) -> Iterator[PlacementRule]:
    """`input @ weight.T + bias`; a weight of one dim is one row, which the result does not have."""
    batch = _batch(query.meta("input").ndim - 1)
    rows = "n" if query.meta("weight").ndim > 1 else ""
    terms = {query.given("input"): batch + "k", query.given("weight"): rows + "k"}
    return lines(query, Product(terms, batch + rows, query.leaf("bias")))


def scaled(query: RuleQuery) -> Iterator[PlacementRule]:
    """`_scaled_mm` with one scale, or one for each row and column, which are sharded with them.

    Kernels require multiples of 16, so shards must be even.  A bias is added once, and results rounded to 8 bits do not add.
    """
    rows, columns = query.meta("self").shape[0], query.meta("mat2").shape[1]
    of_row, of_column = (query.meta(name).shape for name in ("scale_a", "scale_b"))
    if any(shape not in ((), (1,), (1, 1), whole) for shape, whole in ((of_row, (rows, 1)), (of_column, (1, columns)))):
        return  # blockwise scales
    single = [("self", 0)] + [("scale_a", 0)] * (of_row == (rows, 1) and rows > 1)
    double = [("mat2", 1), ("bias", 0)] + [("scale_b", 1)] * (of_column == (1, columns) and columns > 1)
    spots = {0: single, 1: double, None: [("self", 1), ("mat2", 0)]}
    result = query.outputs[0]
    adds = result is not None and result.dtype in (torch.float32, torch.bfloat16, torch.float16)
    for place, names in spots.items():
        held = {leaf: Shard(dim) for name, dim in names if (leaf := query.leaf(name)) is not None}
        if place is not None:
            yield query.line(held, [Shard(place)], "even")
        elif query.leaf("bias") is None and query.leaf("scale_result") is None and adds:
            yield query.line(held, [SUM], "even")


GROUPED = {(2, 3): ("mk", "gkn", "mn", "mg"), (3, 2): ("gmk", "kn", "mn", "ng"),
           (2, 2): ("mk", "kn", "gmn", "k"), (3, 3): ("gmk", "gkn", "gmn", "g")}  # fmt: skip
"""By the dims of both operands of a grouped product: their letters, those of the result, and the grouped ones.

An operand of two dims has its groups one after the other along one dim, at the offsets `offs`.
"""


def grouped(query: RuleQuery) -> Iterator[PlacementRule]:
    """A product for each group.  Kernels require strides that are multiples of 16 bytes, so shards of a matrix must be, too."""
    one, two, result, whole = GROUPED[query.meta("self").ndim, query.meta("mat2").ndim]
    terms = {query.given("self"): one, query.given("mat2"): two}
    yield from lines(query, Product(terms, result, cut="aligned", summed="aligned", whole=whole))
    if (one[0], two[0]) == ("g", "g"):
        yield query.line(dict.fromkeys(terms, Shard(0)), [Shard(0)])


def activation(query: RuleQuery) -> Iterator[PlacementRule]:
    """A nonlinear function of addmm."""
    terms = {query.given("mat1"): "mk", query.given("mat2"): "kn"}
    return lines(query, Product(terms, "mn", query.leaf("self")), linearly=False)


def _batch(count: int) -> str:
    return BATCH[len(BATCH) - count :] if count > 0 else ""


def _rule(equation: str, names: Sequence[str], ops: Sequence[str], added: str = "") -> tuple[OpRule, ...]:
    reason = f"{equation}: letters of the result are cut, the others summed over"
    rule = partial(product, equation=equation, names=names, added=added)
    return rules("matmul", reason, [f"aten.{op}" for op in ops], rule)


def rule_if_not_resized(query: RuleQuery, written: OpRule) -> Iterator[PlacementRule]:
    """The rule of `addbmm_` if the result has the written tensor's shape: torch 2.13 resizes that instead of raising."""
    if query.outputs == (query.meta("self"),):
        yield from written.lines(query)


_ADDBMM = _rule("bmk,bkn->mn", ("batch1", "batch2"), ["addbmm.default"], "self")
_ADDBMM_ = tuple(rule_of_variant(entry, "aten.addbmm_.default") for entry in _ADDBMM)

RULES: tuple[OpRule, ...] = with_variants(
    _rule("mk,kn->mn", ("self", "mat2"), ["mm.default", "_int_mm.default"]),
    _rule("bmk,bkn->bmn", ("self", "mat2"), ["bmm.default"]),
    _rule("mk,k->m", ("self", "vec"), ["mv.default"]),
    _rule("k,k->", ("self", "tensor"), ["dot.default"]),
    _rule("k,k->", ("self", "other"), ["vdot.default"]),
    _rule("m,n->mn", ("self", "vec2"), ["outer.default", "ger.default"]),
    _rule("mk,kn->mn", ("mat1", "mat2"), ["addmm.default"], "self"),
    _rule("bmk,bkn->bmn", ("batch1", "batch2"), ["baddbmm.default"], "self"),
    _ADDBMM,
    (replace(entry, lines=partial(rule_if_not_resized, written=entry)) for entry in _ADDBMM_),
    _rule("mk,k->m", ("mat", "vec"), ["addmv.default"], "self"),
    _rule("m,n->mn", ("vec1", "vec2"), ["addr.default"], "self"),
    rules("matmul", "an einsum, batches in front", ["aten.matmul.default"], matmul),
    rules("matmul", "an einsum with a bias", ["aten.linear.default"], linear),
    rules("matmul", "an einsum of numbers that are scaled by row and column", ["aten._scaled_mm.default"], scaled),
    rules("matmul", "an einsum for each group", ["aten._grouped_mm.default"], grouped),
    rules("matmul", "a function of each element of an einsum", ["aten._addmm_activation.default"], activation),
)  # fmt: skip
