"""Rules with a verdict that was reached on paper: which hold, which do not, and why.

`Row("add.Tensor", "R, P(max) -> P(max)", True, "alpha > 0", ...)`: for calls of which the condition is true.
In a condition `ndims[i]` is how many dims tensor i has, and arguments go by their names, as in `strategies.validation.rule_inference`.
Nothing here was ever decided by asking a validator.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Row:
    """One rule of an overload of aten, for the calls of which `where` is true."""

    op: str
    rule: str
    holds: bool
    where: str
    why: str

    def __str__(self) -> str:
        return f"aten.{self.op}: {self.rule}{f' where {self.where}' if self.where else ''}"


def rows() -> list[Row]:
    """All of them, each once."""
    found = [
        Row(op, rule.strip(), holds, where, why)
        for holds, why, ops, rules in TABLE
        for (op, where), rule in product(map(_apart, ops.split("; ")), rules.split("; "))
    ]
    return list(dict.fromkeys(found))


def _apart(text: str) -> tuple[str, str]:
    op, _, where = text.strip().partition(" if ")
    return op, where.strip()


def _each(ops: str, where: str) -> str:
    return "; ".join(f"{op} if {where}" for op in ops.split("; "))


SELECTS = (
    "clone.default; flip.default; roll.default; transpose.int; permute.default; t.default; select.int; "
    "unsqueeze.default; diagonal.default"
)
TRIANGLES = "tril.default; triu.default"
MONOTONE = (
    "exp.default; sigmoid.default; tanh.default; relu.default; atan.default; erf.default; sinh.default; expm1.default"
)

TABLE: tuple[tuple[bool, str, str, str], ...] = (
    # -- one tensor
    (True, "each element of the result is one of the input's", SELECTS,
     "P(sum) -> P(sum); P(avg) -> P(avg); P(max) -> P(max); P(min) -> P(min)"),
    (False, "the greatest of parts that are put elsewhere is not their least, nor their sum", SELECTS, "P(max) -> P(min)"),
    (True, "an element is the input's or 0, and 0 on all ranks is 0 in any reduction", TRIANGLES,
     "P(sum) -> P(sum); P(avg) -> P(avg); P(max) -> P(max); P(min) -> P(min)"),
    (False, "the diagonal of a rank's rows starts at its first row", "tril.default if ndims[0] == 2; triu.default if ndims[0] == 2",
     "S(0) -> S(0)"),
    (True, "-x turns the order round, and is linear", "neg.default",
     "P(sum) -> P(sum); P(avg) -> P(avg); P(max) -> P(min); P(min) -> P(max)"),
    (False, "-max(x) is min(-x)", "neg.default", "P(max) -> P(max); P(min) -> P(min)"),
    (True, "f grows with x, so it commutes with max and min", MONOTONE, "P(max) -> P(max); P(min) -> P(min)"),
    (False, "f(a + b) is not f(a) + f(b), nor is the mean of f f of the mean", MONOTONE, "P(sum) -> P(sum); P(avg) -> P(avg)"),
    (False, "f grows here and falls there", "abs.default; cos.default; sin.default; pow.Tensor_Scalar if exponent > 0",
     "P(max) -> P(max); P(sum) -> P(sum)"),
    (False, "f falls for negative x where the exponent is even", "pow.Tensor_Scalar if exponent > 0", "P(min) -> P(min)"),
    (True, "sums of sums", "sum.dim_IntList; mean.dim; cumsum.default", "P(sum) -> P(sum); P(avg) -> P(avg)"),
    (False, "the sum of maxima is not the maximum of sums", "sum.dim_IntList; mean.dim; cumsum.default",
     "P(max) -> P(max); P(min) -> P(min)"),
    (False, "a later rank lacks what came before its rows",
     "cumsum.default if ndims == [2] and dim == 0; cumprod.default if ndims == [2] and dim == 0", "S(0) -> S(0)"),
    (True, "each column runs on its own", "cumsum.default if ndims == [2] and dim == 0; cumprod.default if ndims == [2] and dim == 0",
     "S(1) -> S(1)"),
    (False, "a product of sums is not a sum of products", "cumprod.default; prod.dim_int", "P(sum) -> P(sum); P(avg) -> P(avg)"),
    (False, "parts may be negative: their products have no order", "cumprod.default; prod.dim_int", "P(max) -> P(max)"),
    # -- reductions
    (True, "the greatest of the greatest", "amax.default", "P(max) -> P(max)"),
    (True, "the least of the least", "amin.default", "P(min) -> P(min)"),
    (False, "the least of maxima is not the maximum of least ones", "amax.default", "P(min) -> P(min); P(sum) -> P(sum)"),
    (False, "the mirror image", "amin.default", "P(max) -> P(max); P(sum) -> P(sum)"),
    (True, "what is reduced is folded, by the reduction itself", "sum.dim_IntList if ndims == [2] and list(dim) == [0]", "S(0) -> P(sum)"),
    (False, "a sum is not an average", "sum.dim_IntList if ndims == [2] and list(dim) == [0]", "S(0) -> P(avg); S(0) -> R"),
    (False, "ranks may hold unequal numbers of rows", "mean.dim if ndims == [2] and list(dim) == [0]", "S(0) -> P(avg); S(0) -> P(sum)"),
    (True, "a column is reduced on its own; its place is one less where dim 0 has gone",
     _each("sum.dim_IntList; mean.dim; logsumexp.default", "ndims == [2] and list(dim) == [0] and not keepdim"), "S(1) -> S(0)"),
    (True, "a column is reduced on its own, and dim 0 stays",
     _each("logsumexp.default; amax.default", "ndims == [2] and list(dim) == [0] and keepdim"), "S(1) -> S(1)"),
    (False, "indices of a rank's own rows start at 0", "argmax.default; argmin.default", "S(0) -> P(max); S(0) -> P(min); P(max) -> P(max)"),
    (False, "a norm is no sum of norms, and sign is lost", "linalg_vector_norm.default", "P(sum) -> P(sum); P(max) -> P(max)"),
    (False, "the place of the greatest is not the greatest place", "max.dim", "P(max) -> P(max), P(max)"),
    # -- two tensors, element by element
    (True, "linear in both together", "add.Tensor; sub.Tensor", "P(sum), P(sum) -> P(sum); P(avg), P(avg) -> P(avg)"),
    (True, "the mean of x is x", "add.Tensor; sub.Tensor", "P(avg), R -> P(avg); R, P(avg) -> P(avg)"),
    (True, "x + y grows with y", "add.Tensor if alpha > 0", "P(max), R -> P(max); P(min), R -> P(min); R, P(max) -> P(max); R, P(min) -> P(min)"),
    (True, "x - y falls with y", "sub.Tensor if alpha > 0; add.Tensor if alpha < 0", "R, P(max) -> P(min); R, P(min) -> P(max)"),
    (False, "x - y falls with y", "sub.Tensor if alpha > 0; add.Tensor if alpha < 0", "R, P(max) -> P(max); R, P(min) -> P(min)"),
    (False, "x + y grows with y", "add.Tensor if alpha > 0", "R, P(max) -> P(min); R, P(min) -> P(max)"),
    (False, "x is counted once for each rank", "add.Tensor; sub.Tensor", "P(sum), R -> P(sum); R, P(sum) -> P(sum)"),
    (False, "max x + max y may come from two ranks", "add.Tensor", "P(max), P(max) -> P(max); P(min), P(min) -> P(min); P(max), P(min) -> P(avg)"),
    (True, "linear in each alone", "mul.Tensor", "P(sum), R -> P(sum); R, P(sum) -> P(sum); P(avg), R -> P(avg); R, P(avg) -> P(avg)"),
    (False, "products of parts of two sums", "mul.Tensor", "P(sum), P(sum) -> P(sum); P(avg), P(avg) -> P(avg)"),
    (False, "a negative factor turns the order round", "mul.Tensor; div.Tensor", "P(max), R -> P(max); P(max), R -> P(min); P(min), R -> P(min)"),
    (True, "linear in what is divided", "div.Tensor if ndims == [2, 2]", "P(sum), R -> P(sum); P(avg), R -> P(avg)"),
    (False, "1 / (a + b)", "div.Tensor", "R, P(sum) -> P(sum); R, P(avg) -> P(avg)"),
    (True, "row by row", "add.Tensor if ndims == [2, 2]; mul.Tensor if ndims == [2, 2]; maximum.default if ndims == [2, 2]", "S(0), S(0) -> S(0)"),
    (False, "rows beside columns", "add.Tensor if ndims == [2, 2]; mul.Tensor if ndims == [2, 2]; maximum.default if ndims == [2, 2]",
     "S(0), S(1) -> S(0); S(1), S(0) -> S(0)"),
    (True, "max(x, y) grows with both", "maximum.default", "P(max), P(max) -> P(max); R, P(max) -> P(max); R, P(min) -> P(min); P(min), R -> P(min)"),
    (True, "min(x, y) grows with both", "minimum.default", "P(min), P(min) -> P(min); R, P(min) -> P(min); R, P(max) -> P(max); P(max), R -> P(max)"),
    (False, "two ranks may hold the two least", "maximum.default", "P(min), P(min) -> P(min); P(max), P(min) -> P(max); P(sum), R -> P(sum); R, P(max) -> R"),
    (False, "two ranks may hold the two greatest", "minimum.default", "P(max), P(max) -> P(max); P(min), P(max) -> P(min); P(sum), R -> P(sum)"),
    # -- products of matrices
    (True, "rows of the one, columns of the other, or addends", "mm.default", "S(0), R -> S(0); R, S(1) -> S(1); S(1), S(0) -> P(sum)"),
    (True, "linear in each alone", "mm.default; bmm.default; mv.default", "P(sum), R -> P(sum); R, P(sum) -> P(sum); P(avg), R -> P(avg); R, P(avg) -> P(avg)"),
    (False, "products of parts of two sums; a sum of maxima", "mm.default; bmm.default; mv.default", "P(sum), P(sum) -> P(sum); P(max), R -> P(max)"),
    (False, "inner sizes do not meet, or inner rows do not", "mm.default", "S(0), S(0) -> S(0); S(1), S(0) -> P(avg); S(1), R -> S(1)"),
    (True, "matrix by matrix", "bmm.default", "S(0), S(0) -> S(0)"),
    (True, "linear in the bias and each factor, as the mean of the rest is the rest", "addmm.default", "P(avg), R, R -> P(avg); R, P(avg), R -> P(avg)"),
    (True, "it grows with the bias", "addmm.default if beta > 0", "P(max), R, R -> P(max); P(min), R, R -> P(min)"),
    (False, "the other addend is counted once for each rank", "addmm.default", "P(sum), R, R -> P(sum); R, P(sum), R -> P(sum)"),
    # -- choosing and ordering
    (True, "an element is one of the two", "where.self", "R, P(sum), P(sum) -> P(sum); R, P(max), P(max) -> P(max); R, P(avg), R -> P(avg); R, R, P(max) -> P(max)"),
    (False, "where the other is chosen it is counted once for each rank", "where.self", "R, P(sum), R -> P(sum); R, R, P(sum) -> P(sum); R, P(max), P(min) -> P(max)"),
    (True, "an element is the input's", "gather.default; index_select.default", "P(sum), R -> P(sum); P(max), R -> P(max)"),
    (False, "indices are no values", "gather.default; index_select.default", "R, P(sum) -> P(sum); R, P(max) -> P(max)"),
    (True, "linear in self and source together", "scatter_add.default", "P(sum), R, P(sum) -> P(sum); P(avg), R, P(avg) -> P(avg)"),
    (False, "self is counted once for each rank", "scatter_add.default", "R, R, P(sum) -> P(sum); P(sum), R, R -> P(sum)"),
    (True, "a row on its own", "_softmax.default if ndims == [2] and dim == 1", "S(0) -> S(0)"),
    (False, "a row cut in two is not normalised", "_softmax.default if ndims == [2] and dim == 1", "S(1) -> S(1); P(sum) -> P(sum); P(max) -> P(max)"),
    (True, "a row on its own", "sort.default if ndims == [2] and dim == 1; topk.default if ndims == [2] and dim == 1", "S(0) -> S(0), S(0)"),
    (False, "a row cut in two is not ordered; nor are maxima of what is", "sort.default if ndims == [2] and dim == 1",
     "S(1) -> S(1), S(1); P(max) -> P(max), P(max); P(sum) -> P(sum), P(sum)"),
    (True, "linear in the gradient", "tanh_backward.default; sigmoid_backward.default", "P(sum), R -> P(sum); P(avg), R -> P(avg)"),
    (False, "not linear in the output, and not ordered by the gradient", "tanh_backward.default; sigmoid_backward.default", "R, P(sum) -> P(sum); P(max), R -> P(max)"),
)  # fmt: skip
"""(holds, why, "overload if condition; ...", "rule; ..."): every overload with every rule."""
