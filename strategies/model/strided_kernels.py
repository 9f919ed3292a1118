"""The same values with gaps between them, for which torch takes its scalar kernels instead of the vectorised ones.

Where the two disagree (Chebyshev polynomials of infinite degree, the gradient of logit at NaN) a shard's length decides
which is used, and no rule is to blame.  Some kernels read an argument as if it had no gaps, whatever its strides say, and
compute something else; a judge who put gaps there would find every result unstable, and every rule right.  So those
arguments are copied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.model.arguments import names, trusts
from strategies.model.rule import Call, Sample, overload

STATISTICS = ("mean", "rstd", "save")
"""How the names of arguments begin that one kernel leaves for another.  2.13: the gradients of layer norm read them
without their strides."""
BLIND = ("_fused_", "as_strided", "native_group_norm", "native_batch_norm", "_native_batch_norm",
         "_scaled_dot_product_flash_attention_for_cpu_backward")  # fmt: skip
"""How the names of ops begin that read other arguments so, too.  Measured on 2.13, of all overloads that have a rule of
our own: fused optimizers all of theirs; group norm what is learned, and backward all; batch norm its input if it has
`out=`; attention what the forward was given.  `as_strided` reads memory by its nature."""


def strided(x: Tensor) -> Tensor:
    """A copy with gaps between its elements."""
    return torch.stack([x, x], -1)[..., 0]


def blind(call: Call, tensors: Sequence[Tensor]) -> frozenset[int]:
    """The tensors of a call, by number, that its kernel reads or writes as if they had no gaps.

    Besides those above: what `out=` is given (2.13: `_softmax.out`); and, of ops that trust their caller, numbers that
    are places (2.13: `_embedding_bag`).
    """
    outs = {a.name for a in overload(call.op)._schema.arguments if a.is_out}
    trusting, every = trusts(call.op), call.op.split(".")[1].startswith(BLIND)

    def reads_on(x: Tensor, name: str) -> bool:
        places = trusting and not (x.dtype.is_floating_point or x.dtype.is_complex)
        return every or places or name in outs or name.startswith(STATISTICS)

    named = zip(tensors, names(Sample(call, tuple(tensors), "")), strict=True)
    return frozenset(i for i, (x, name) in enumerate(named) if reads_on(x, name))


def gapped(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of a call's tensors, with gaps but for those that its kernel reads as if they had none."""
    without = blind(call, tensors)
    return [
        x.clone(memory_format=torch.contiguous_format) if i in without else strided(x) for i, x in enumerate(tensors)
    ]
