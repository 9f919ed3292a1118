"""The op on whole tensors: its results, and how far from them a right rule may be.

The tolerance is measured, not guessed, as `localtensor.layout.tolerance` says: the op is asked again with noise of one ulp in its
inputs and, for single precision, in double.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localtensor.layout import WIDER, close, rounds, slack_of, widened
from strategies.model.arguments import names, trusts
from strategies.model.rule import Call, Sample, overload, results, written

# The same values with gaps between them, for which torch takes its scalar kernels instead of the vectorised ones.
#
# Where the two disagree (Chebyshev polynomials of infinite degree, the gradient of logit at NaN) a shard's length decides
# which is used, and no rule is to blame.  Some kernels read an argument as if it had no gaps, whatever its strides say, and
# compute something else; a judge who put gaps there would find every result unstable, and every rule right.  So those
# arguments are copied as they are.

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


Function = Callable[[Sequence[Tensor]], Sequence[Any]]
"""From the tensors of a call to all that it gives, flat."""


@dataclass(frozen=True, slots=True)
class Truth:
    """Results of one call on whole tensors; `slack[i]` is a scalar, or inf at unstable elements."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Any, ...]
    slack: tuple[Tensor | None, ...]
    raw: Any
    metadata_only: str = ""
    unstable: float = 0.0


REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AssertionError, KeyError)
"""What an op raises for arguments that it cannot take; anything else is a crash."""


def run(call: Call, tensors: Sequence[Tensor], *, mutates: bool) -> tuple[Any, list[Any]]:
    """The op's raw result, and the flat list of all that it gives: results, and arguments that it wrote to.

    It may write to its arguments only if those are copies.
    """
    given = [t.clone() for t in tensors] if mutates else tensors
    raw = call(given)
    return raw, [*results(raw), *(given[leaf] for leaf in written(call))]


def mutates(name: str) -> bool:
    return bool(overload(name)._schema.is_mutable)


def metadata_only(name: str) -> str:
    """Why values of this op cannot be compared, or empty."""
    packet = name.split(".")[1]
    if torch.Tag.nondeterministic_seeded in overload(name).tags:
        return "random: judged by metadata only"
    if packet.startswith(("empty", "new_empty", "_empty")) or packet in ("resize_", "resize", "resize_as_"):
        return "uninitialised: judged by metadata only"
    return ""


def _incomparable(values: Sequence[Any]) -> str:
    half = any(isinstance(v, Tensor) and v.dtype == torch.complex32 for v in values)
    return "complex32, which torch cannot compare: judged by metadata only" if half else ""


def tell(sample: Sample, tensors: Sequence[Tensor] | None = None, *, seed: int = 0) -> Truth:
    """The truth about a call.  Raises one of `REFUSALS` where the op itself refuses."""
    inputs = tuple(sample.tensors if tensors is None else tensors)
    writes = mutates(sample.op)
    raw, flat = run(sample.call, inputs, mutates=writes)
    outputs = tuple(flat)
    only = metadata_only(sample.op) or _incomparable((*inputs, *outputs))
    if only:
        return Truth(inputs, outputs, (None,) * len(outputs), raw, only)
    slack = _slack(
        lambda given: run(sample.call, given, mutates=False)[1], outputs, inputs, gapped(sample.call, inputs), seed
    )
    return Truth(inputs, outputs, slack, raw, "", share_unstable(slack))


def tell_function(function: Function, inputs: Sequence[Tensor], *, seed: int = 0) -> Truth:
    """The truth about a plain function of tensors, which gets copies.  Raises what the function raises."""
    outputs = tuple(function([x.clone() for x in inputs]))
    slack = _slack(function, outputs, inputs, [strided(x) for x in inputs], seed)
    return Truth(tuple(inputs), outputs, slack, outputs, "", share_unstable(slack))


def _slack(
    function: Function, outputs: Sequence[Any], inputs: Sequence[Tensor], spaced: Sequence[Tensor], seed: int
) -> tuple[Tensor | None, ...]:
    """How far each result may be off.  All that the function gets here is fresh, and it may write to it."""
    others = [_again(function, spaced, len(outputs))]
    if any(rounds(x) for x in inputs):
        others += [_again(function, moved, len(outputs)) for moved in _nudged(inputs, seed)]
    slack = tuple(slack_of(o, [other[i] for other in others if other]) for i, o in enumerate(outputs))
    if any(x.dtype in WIDER for x in inputs):
        best = _again(function, [x.to(WIDER.get(x.dtype, x.dtype), copy=True) for x in inputs], len(outputs))
        slack = tuple(widened(s, o, b) for s, o, b in zip(slack, outputs, best or [None] * len(outputs), strict=True))
    return slack


def share_unstable(slack: Sequence[Tensor | None]) -> float:
    """The share of elements that jump, of the result with the largest."""
    shares = [float(s.isinf().double().mean()) for s in slack if s is not None and s.ndim and s.numel()]
    return max(shares, default=0.0)


def _again(function: Function, tensors: Sequence[Tensor], count: int) -> Sequence[Any]:
    """The results once more, or nothing where the moved inputs are refused: they have left its domain."""
    try:
        outputs = function(tensors)
    except REFUSALS:
        return ()
    return outputs if len(outputs) == count else ()


def _nudged(inputs: Sequence[Tensor], seed: int) -> list[list[Tensor]]:
    """Two copies of the inputs, each element moved by at most one unit in the last place; floats of one byte, which
    torch cannot multiply, as they are."""
    rng = torch.Generator().manual_seed(zlib.crc32(f"nudge {seed}".encode()))

    def nudge(x: Tensor) -> Tensor:
        if not rounds(x):
            return x.clone()
        eps = torch.finfo(x.dtype).eps
        signs = torch.randint(0, 2, x.shape, generator=rng).to(x.device) * 2 - 1
        return x * (1 + eps * signs.to(x.dtype))

    return [[nudge(x) for x in inputs] for _ in range(2)]


def same_results(a: Truth, b: Truth) -> bool:
    """Whether two calls give the very same tensors: shapes, dtypes and bits (NaN equals NaN)."""
    if len(a.outputs) != len(b.outputs):
        return False
    pairs = [(x, y) for x, y in zip(a.outputs, b.outputs, strict=True) if isinstance(x, Tensor)]
    return all(isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype for x, y in pairs) and all(
        bool(close(x, y, torch.zeros(())).all()) for x, y in pairs
    )


def agrees(got: Tensor, want: Tensor, slack: Tensor) -> bool:
    """Whether two tensors of one shape are the same within the slack."""
    return torch.equal(got, want) or bool(close(got, want, slack).all())
