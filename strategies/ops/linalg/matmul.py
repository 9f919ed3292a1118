"""Rules of matrix products, written in the letters of an einsum.

A letter of the result is sharded in the result and in the operands that have it.  The other letters are summed over, so their
shards give partial sums; an added tensor must then be a partial sum, too, or each rank would add all of it.  A product is
linear in each operand while the others are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.lib.elementwise import AVG, SUM, aligned, through
from strategies.ops.lib.overload_variants import with_variants, written_as
from strategies.ops.semantics.rulebook import Ask, Cut, Entry, Line, Meta, rules

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

    @property
    def letters(self) -> str:
        return "".join(dict.fromkeys("".join(self.terms.values())))

    def shape(self, ask: Ask) -> tuple[int, ...]:
        """The shape of the product if no operand is broadcast."""
        sizes = {letter: ask.tensors[i].shape[d] for i, term in self.terms.items() for d, letter in enumerate(term)}
        return tuple(sizes[letter] for letter in self.result)


def product(ask: Ask, equation: str, names: Sequence[str], added: str = "") -> Iterator[Line]:
    """The rule of an op with operands of these names and an equation such as `mk,kn->mn`; `added` is scaled by `beta`."""
    terms, result = equation.split("->")
    letters = dict(zip((ask.given(name) for name in names), terms.split(","), strict=True))
    leaf = ask.leaf(added) if added else None
    cut: Cut = "any" if _as_long(ask, leaf) else "filled"
    summed: Cut = cut if _exact(ask, leaf) else "filled"
    made = Product(letters, result, leaf, ask.get("beta") == 0, cut, summed)
    if ask.outputs[0] is not None and ask.outputs[0].shape == made.shape(ask):
        yield from lines(ask, made)  # addmv without columns has the shape of the added tensor


def _as_long(ask: Ask, added: int | None) -> bool:
    """Whether the added tensor is not broadcast: addmv of torch 2.13 does not broadcast it for an empty matrix."""
    return added is None or ask.op != "aten.addmv.default" or ask.tensors[added] == ask.outputs[0]


def _exact(ask: Ask, added: int | None) -> bool:
    """Whether the scales suit the dtype: torch 2.13 rejects integers scaled by a float if there is nothing to sum."""
    (meta,) = ask.outputs
    if added is None or meta is None or meta.dtype.is_floating_point or meta.dtype.is_complex:
        return True
    return all(isinstance(scale, int) for scale in (ask["beta"], ask["alpha"]))


def lines(ask: Ask, product: Product, *, linearly: bool = True) -> Iterator[Line]:
    """The placement rules of a product; `linearly` tells whether the result is the product, not a function of it."""
    for letter in product.letters:
        if letter in product.result:
            yield _cut(ask, product, letter)
        elif linearly:
            spots = {i: Shard(d) for i, d in _spots(ask, product, letter).items()}
            yield from _summed(ask, product, spots, product.summed)
    if linearly:
        yield from _parts(ask, product)


def _cut(ask: Ask, product: Product, letter: str) -> Line:
    place = product.result.index(letter)
    held: dict[int, Placement] = {i: Shard(d) for i, d in _spots(ask, product, letter).items()}
    (result,) = ask.outputs
    if product.added is not None and result is not None:
        dim = aligned(ask.tensors[product.added], result, place)
        held |= {product.added: Shard(dim)} if dim is not None else {}
    return ask.line(held, [Shard(place)], product.cut)


def _spots(ask: Ask, product: Product, letter: str) -> dict[int, int]:
    """The dim of that letter in each operand that has it and is not broadcast along it."""
    found = {i: term.index(letter) for i, term in product.terms.items() if letter in term}
    size = max(ask.tensors[i].shape[d] for i, d in found.items())
    return {i: d for i, d in found.items() if size <= 1 or ask.tensors[i].shape[d] != 1}


def _summed(ask: Ask, product: Product, held: Mapping[int, Placement], cut: Cut = "any") -> Iterator[Line]:
    """The placement rules in which the product is a partial sum, and the added tensor, too."""
    (meta,) = ask.outputs
    added = product.added
    if added is None or product.ignored:
        yield ask.line(held, [SUM], cut)
    if added is not None and meta is not None and SUM in through(ask.tensors[added].dtype, meta.dtype):
        yield ask.line({**held, added: SUM}, [SUM], cut)


def _parts(ask: Ask, product: Product) -> Iterator[Line]:
    """The placement rules in which one operand, or the added tensor, is partial; avg(c + x) is c + avg(x)."""
    (meta,) = ask.outputs
    for leaf in product.terms:
        for part in through(ask.tensors[leaf].dtype, meta.dtype) if meta is not None else ():
            if part == SUM:
                yield from _summed(ask, product, {leaf: part})
            else:
                yield ask.line({leaf: part}, [part])
                if product.added is not None:
                    yield ask.line({leaf: part, product.added: part}, [part])
    added = product.added
    if added is not None and meta is not None and AVG in through(ask.tensors[added].dtype, meta.dtype):
        yield ask.line({added: AVG}, [AVG])


def matmul(ask: Ask) -> Iterator[Line]:
    """Vectors, matrices, or batches of them, broadcast against each other."""
    first, second = (ask.meta(name).ndim for name in ("self", "other"))
    one = _batch(first - 2) + "mk" if first > 1 else "k"
    two = _batch(second - 2) + "kn" if second > 1 else "k"
    batch = _batch(max(first, second) - 2)
    result = batch + ("m" if first > 1 else "") + ("n" if second > 1 else "")
    return lines(ask, Product({ask.given("self"): one, ask.given("other"): two}, result))


def linear(ask: Ask) -> Iterator[Line]:
    """`input @ weight.T + bias`; a weight of one dim is one row, which the result does not have."""
    batch = _batch(ask.meta("input").ndim - 1)
    rows = "n" if ask.meta("weight").ndim > 1 else ""
    terms = {ask.given("input"): batch + "k", ask.given("weight"): rows + "k"}
    return lines(ask, Product(terms, batch + rows, ask.leaf("bias")))


def scaled(ask: Ask) -> Iterator[Line]:
    """`_scaled_mm` with one scale, or one for each row and column, which are sharded with them.

    Kernels require multiples of 16, so shards must be even.  A bias is added once, and results rounded to 8 bits do not add.
    """
    rows, columns = ask.meta("self").shape[0], ask.meta("mat2").shape[1]
    of_row, of_column = (ask.meta(name).shape for name in ("scale_a", "scale_b"))
    if any(shape not in ((), (1,), (1, 1), whole) for shape, whole in ((of_row, (rows, 1)), (of_column, (1, columns)))):
        return  # blockwise scales
    single = [("self", 0)] + [("scale_a", 0)] * (of_row == (rows, 1) and rows > 1)
    double = [("mat2", 1), ("bias", 0)] + [("scale_b", 1)] * (of_column == (1, columns) and columns > 1)
    spots = {0: single, 1: double, None: [("self", 1), ("mat2", 0)]}
    for place, names in spots.items():
        held = {leaf: Shard(dim) for name, dim in names if (leaf := ask.leaf(name)) is not None}
        if place is not None:
            yield ask.line(held, [Shard(place)], "even")
        elif ask.leaf("bias") is None and ask.leaf("scale_result") is None and _adds(ask.outputs[0]):
            yield ask.line(held, [SUM], "even")


def _adds(meta: Meta | None) -> bool:
    return meta is not None and meta.dtype in (torch.float32, torch.bfloat16, torch.float16)


def activation(ask: Ask) -> Iterator[Line]:
    """A nonlinear function of addmm."""
    terms = {ask.given("mat1"): "mk", ask.given("mat2"): "kn"}
    return lines(ask, Product(terms, "mn", ask.leaf("self")), linearly=False)


def _batch(count: int) -> str:
    return BATCH[len(BATCH) - count :] if count > 0 else ""


def _rule(equation: str, names: Sequence[str], ops: Sequence[str], added: str = "") -> tuple[Entry, ...]:
    reason = f"{equation}: letters of the result are cut, the others summed over"
    return rules(
        "matmul", reason, [f"aten.{op}" for op in ops], partial(product, equation=equation, names=names, added=added)
    )


def unresized(ask: Ask, written: Entry) -> Iterator[Line]:
    """The rule of `addbmm_` if the result has the written tensor's shape: torch 2.13 resizes that instead of raising."""
    if ask.outputs == (ask.meta("self"),):
        yield from written.lines(ask)


_ADDBMM = _rule("bmk,bkn->mn", ("batch1", "batch2"), ["addbmm.default"], "self")
_ADDBMM_ = tuple(written_as(entry, "aten.addbmm_.default") for entry in _ADDBMM)

RULES: tuple[Entry, ...] = with_variants(
    _rule("mk,kn->mn", ("self", "mat2"), ["mm.default", "_int_mm.default"]),
    _rule("bmk,bkn->bmn", ("self", "mat2"), ["bmm.default"]),
    _rule("mk,k->m", ("self", "vec"), ["mv.default"]),
    _rule("k,k->", ("self", "tensor"), ["dot.default"]),
    _rule("k,k->", ("self", "other"), ["vdot.default"]),
    _rule("m,n->mn", ("self", "vec2"), ["outer.default", "ger.default"]),
    _rule("mk,kn->mn", ("mat1", "mat2"), ["addmm.default"], "self"),
    _rule("bmk,bkn->bmn", ("batch1", "batch2"), ["baddbmm.default"], "self"),
    _ADDBMM,
    (replace(entry, lines=partial(unresized, written=entry)) for entry in _ADDBMM_),
    _rule("mk,k->m", ("mat", "vec"), ["addmv.default"], "self"),
    _rule("m,n->mn", ("vec1", "vec2"), ["addr.default"], "self"),
    rules("matmul", "an einsum, batches in front", ["aten.matmul.default"], matmul),
    rules("matmul", "an einsum with a bias", ["aten.linear.default"], linear),
    rules("matmul", "an einsum of numbers that are scaled by row and column", ["aten._scaled_mm.default"], scaled),
    rules("matmul", "a function of each element of an einsum", ["aten._addmm_activation.default"], activation),
)  # fmt: skip
