"""Rules that are right and rules that are wrong, and ops of a user's own to state them of."""

import torch
from torch import Tensor


@torch.library.custom_op("ruletests::scale", mutates_args=())
def scale(x: Tensor, by: float) -> Tensor:
    return x * by


@torch.library.custom_op("ruletests::blend", mutates_args=())
def blend(x: Tensor, y: Tensor, weight: float = 0.5) -> Tensor:
    return x * weight + y * (1 - weight)


@torch.library.custom_op("ruletests::bump", mutates_args=("x",))
def bump(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("ruletests::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, int]:
    return x / 2, x.dim()


def _pairs(rules):
    """Each rule with its op."""
    return [(op, rule) for op, texts in rules.items() for rule in texts]


RIGHT = _pairs(
    {
        "aten.add.Tensor": ["S(0), S(0) -> S(0)", "P(sum), P(sum) -> P(sum)"],
        "aten.mul.Tensor": ["S(1), S(1) -> S(1)", "P(sum), R -> P(sum)"],
        "aten.neg.default": [
            "S(0) -> S(0)",
            "SS(0,2) -> SS(0,2)",
            "P(sum) -> P(sum)",
            "P(avg) -> P(avg)",
            "P(max) -> P(min)",
        ],
        "aten.exp.default": ["P(max) -> P(max)", "P(sum) -> P(product)"],
        "aten.relu.default": ["P(max) -> P(max)", "S(1) -> S(1)"],
        "aten.abs.default": ["P(product) -> P(product)"],
        "aten.sigmoid.default": ["P(min) -> P(min)"],
        "aten.clone.default": ["P(min) -> P(min)"],
        "aten.conj.default": ["S(0) -> S(0)"],
        "aten.mm.default": ["S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P(sum)", "P(sum), R -> P(sum)"],
        "aten.bmm.default": ["S(0), S(0) -> S(0)", "S(2), S(1) -> P(sum)"],
        "aten.dot.default": ["S(0), S(0) -> P(sum)"],
        "aten.mv.default": ["S(0), R -> S(0)"],
        "aten.outer.default": ["S(0), R -> S(0)"],
        "aten.addmm.default": ["S(0), S(0), R -> S(0)"],
        "aten.sum.default": ["S(0) -> P(sum)", "P(sum) -> P(sum)"],
        "aten.amax.default": ["P(max) -> P(max)"],
        "aten.cumsum.default": ["P(sum) -> P(sum)"],
        "aten.t.default": ["P(sum) -> P(sum)"],
        "aten.tril.default": ["P(sum) -> P(sum)"],
        "aten.flip.default": ["P(sum) -> P(sum)"],
        "aten.cat.default": ["P(sum), P(sum) -> P(sum)"],
        "aten.where.self": ["S(0), S(0), S(0) -> S(0)"],
        "aten.lerp.Scalar": ["S(0), S(0) -> S(0)"],
        "aten.maximum.default": ["P(max), P(max) -> P(max)"],
        "aten.minimum.default": ["P(min), P(min) -> P(min)"],
        "aten.bitwise_and.Tensor": ["S(0), S(0) -> S(0)"],
        "aten.logical_or.default": ["S(0), S(0) -> S(0)"],
        "aten.add_.Tensor": ["S(0), S(0) -> S(0)"],
        "aten.mul.Scalar": ["P(sum) -> P(sum)"],
        "aten.index_select.default": ["P(sum), R -> P(sum)"],
        "aten.gather.default": ["P(sum), R -> P(sum)"],
        "aten.embedding.default": ["R, S(0) -> S(0)"],
        "aten.sort.default": ["R -> R, R"],
        "ruletests::scale": ["P(sum) -> P(sum)", "S(2) -> S(2)"],
        "ruletests::blend": ["P(sum), P(sum) -> P(sum)"],
        "ruletests::bump": ["S(0), S(0) -> -", "P(sum), P(sum) ->"],
        "ruletests::halves": ["S(1) -> S(1), -"],
    }
)
SOME_CALLS = [
    ("aten.softmax.int", "S(0) -> S(0)", lambda x, dim, *rest, **more: x.ndim > 0 and dim % x.ndim > 0),
    ("aten.cumsum.default", "S(1) -> S(1)", lambda x, dim, **more: dim % x.ndim != 1),
    ("aten.sum.dim_IntList", "S(0) -> S(0)", lambda x, dim, *rest, **more: dim == [-1] and not rest[0] and x.ndim > 1),
    ("aten.linear.default", "S(0), R, R -> S(0)", lambda x, w, b: x.ndim > 1 and b.ndim == 1),
    ("aten.cat.default", "S(0), S(0) -> S(0)", lambda xs, dim=0: dim == 1),
    ("aten.mul.Scalar", "P(max) -> P(max)", lambda x, by: by >= 0),
    ("aten.unsqueeze.default", "S(0) -> S(1)", lambda x, dim: dim == 0),
    ("aten.flip.default", "S(0) -> S(0)", lambda x, dims: dims == [1]),
]
"""Rules that are right of some calls, and of which."""
WRONG = _pairs(
    {
        "aten.add.Tensor": ["S(0), R -> S(0)", "P(sum), R -> P(sum)"],
        "aten.mul.Tensor": ["P(sum), P(sum) -> P(sum)", "P(max), R -> P(max)"],
        "aten.sub.Tensor": ["P(max), P(max) -> P(max)"],
        "aten.add.Scalar": ["P(sum) -> P(sum)"],
        "aten.mul.Scalar": ["P(max) -> P(max)"],
        "aten.abs.default": ["P(sum) -> P(sum)", "P(max) -> P(max)"],
        "aten.relu.default": ["P(sum) -> P(sum)"],
        "aten.exp.default": ["P(sum) -> P(sum)"],
        "aten.sqrt.default": ["P(sum) -> P(sum)"],
        "aten.round.default": ["P(sum) -> P(sum)"],
        "aten.log.default": ["P(product) -> P(sum)"],
        "aten.neg.default": [
            "P(max) -> P(max)",
            "P(product) -> P(product)",
            "S(0) -> R",
            "R -> S(0)",
            "R -> P(sum)",
            "S(0) -> SS(0,2)",
        ],
        "aten.maximum.default": ["P(max), P(max) -> P(sum)"],
        "aten.mm.default": ["S(0), R -> S(1)", "S(1), S(0) -> R", "S(1), S(0) -> P(avg)", "P(sum), P(sum) -> P(sum)"],
        "aten.sum.default": ["S(0) -> R", "S(0) -> P(avg)"],
        "aten.mean.default": ["S(0) -> P(avg)", "S(0) -> P(sum)"],
        "aten.amax.default": ["S(0) -> S(0)"],
        "aten.argmax.default": ["S(0) -> P(max)"],
        "aten.logsumexp.default": ["S(0) -> P(sum)"],
        "aten.cumsum.default": ["S(0) -> S(0)"],
        "aten.cumprod.default": ["P(sum) -> P(sum)"],
        "aten._softmax.default": ["S(0) -> S(0)"],
        "aten.native_layer_norm.default": ["S(0), R, R -> S(0), S(0), S(0)"],
        "aten.sort.default": ["S(0) -> S(0), S(0)"],
        "aten.t.default": ["S(0) -> S(0)"],
        "aten.flip.default": ["S(0) -> S(0)"],
        "aten.roll.default": ["S(0) -> S(0)"],
        "aten.cat.default": ["S(0), S(0) -> S(0)"],
        "aten.nonzero.default": ["S(0) -> S(0)"],
        "aten.add_.Tensor": ["P(sum), R -> P(sum)"],
        "ruletests::scale": ["P(max) -> P(max)"],
        "ruletests::blend": ["P(sum), R -> P(sum)"],
        "ruletests::bump": ["P(sum), R ->", "S(0), R -> -"],
        "ruletests::halves": ["P(sum) -> R, -"],
    }
)
