"""The oracle: the results of an op on whole tensors, and the tolerance within which a right rule must reproduce them.

The tolerance is measured (see `localtensor.layout.tolerance`): the op runs again with noise of one ulp in its inputs,
in double for single precision, and on strided copies of its inputs, for which torch uses scalar kernels instead of
vectorised ones.  Where those disagree (Chebyshev polynomials of infinite degree, the gradient of logit at NaN), the
length of a shard decides which kernel runs, and no rule is wrong.  Some kernels ignore the strides of an argument and
compute something else: with a strided copy of it every result would be unstable and every rule right.  Such arguments
are copied without gaps.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localtensor.layout import (
    DOUBLE_OF,
    MAX_JUMP_SHARE,
    all_within_slack,
    is_float8,
    is_inexact,
    measured_slack,
    widen_slack,
    within_slack,
)
from strategies.model.arguments import argument_names, argument_values, trusts_caller
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.rule import WRITTEN_UNDECLARED, Call, Sample, out_leaves, overload

STATISTICS = ("mean", "rstd", "save")
"""Prefixes of the names of arguments that the forward kernel saves for the backward.  torch 2.13: the gradients of
layer norm ignore their strides."""
IGNORES_STRIDES = (
    "_fused_", "as_strided", "native_group_norm", "native_batch_norm", "_native_batch_norm",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip
"""Prefixes of the names of ops that ignore the strides of other arguments, too.  Measured on torch 2.13 for all
overloads with a rule of our own: fused optimizers all arguments; group norm weight and bias, and backward all; batch
norm its input if it has `out=`; attention the inputs of the forward.  `as_strided` reads memory by definition."""


def strided(x: Tensor) -> Tensor:
    """A copy with a gap after each element."""
    return torch.stack([x, x], -1)[..., 0]


def ignoring_strides(call: Call, tensors: Sequence[Tensor]) -> frozenset[int]:
    """The tensors of a call, by leaf number, whose strides its kernel ignores.

    Besides those above: `out=` tensors (torch 2.13: `_softmax.out`), and integers of ops that trust their caller (torch
    2.13: `_embedding_bag`).
    """
    outs = out_leaves(call)
    trusting, every = trusts_caller(call.op), call.op.split(".")[1].startswith(IGNORES_STRIDES)

    def ignores_strides(leaf: int, x: Tensor, name: str) -> bool:
        integers = trusting and not (x.dtype.is_floating_point or x.dtype.is_complex)
        return every or integers or leaf in outs or name.startswith(STATISTICS)

    named = zip(tensors, argument_names(Sample(call, tuple(tensors), "")), strict=True)
    return frozenset(i for i, (x, name) in enumerate(named) if ignores_strides(i, x, name))


def strided_copies(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Strided copies of a call's tensors, contiguous where the kernel ignores strides."""
    dense = ignoring_strides(call, tensors)
    return [x.clone(memory_format=torch.contiguous_format) if i in dense else strided(x) for i, x in enumerate(tensors)]


Function = Callable[[Sequence[Tensor]], Sequence[Any]]
"""From the tensors of a call to its flat results."""


@dataclass(frozen=True, slots=True)
class OracleResult:
    """Results of one call on whole tensors; `slack[i]` is the tolerance of result i, a scalar, or inf at unstable elements;
    None for a result whose values are not compared.

    `unstable` is the largest share of unstable elements in a result.  `metadata_only` is the reason why values cannot
    be compared, or empty.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Any, ...]
    slack: tuple[Tensor | None, ...]
    raw: Any
    metadata_only: str = ""
    unstable: float = 0.0


def resizes_out(sample: Sample) -> bool:
    """Whether the op gives another shape to a tensor with elements that it gets as `out=`: torch warns that this is deprecated."""
    leaves = out_leaves(sample.call)
    if not any(sample.tensors[leaf].numel() for leaf in leaves):
        return False
    given = [t.clone() for t in sample.tensors]
    with contextlib.suppress(*REJECTIONS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample.call(given)
    return any(sample.tensors[leaf].numel() and given[leaf].shape != sample.tensors[leaf].shape for leaf in leaves)


def mutates(name: str) -> bool:
    """Whether the op writes to any argument, by its schema or without its saying so."""
    return overload(name)._schema.is_mutable or name.rpartition(".")[0] in WRITTEN_UNDECLARED


def metadata_only(name: str) -> str:
    """The reason why values of this op cannot be compared, or empty."""
    packet = name.split(".")[1]
    if torch.Tag.nondeterministic_seeded in overload(name).tags:
        return RANDOM
    if packet.startswith(("empty", "new_empty", "_empty")) or packet in ("resize_", "resize", "resize_as_"):
        return "uninitialised: judged by metadata only"
    return ""


RANDOM = "random: judged by metadata only"
RANDOM_STATE = frozenset({"rng_state", "unused", "philox_seed", "philox_offset"})
"""Names of results of attention kernels that are states of a generator: uninitialised where there is no dropout."""


def metadata_only_call(sample: Sample) -> str:
    """As `metadata_only`, of one call: attention without dropout draws nothing, whatever the tag of its op; with it, backward
    masks what the state of a generator says, which is of the whole tensors."""
    dropout = argument_values(sample).get("dropout_p")
    return "" if dropout == 0 else metadata_only(sample.op) or (RANDOM if dropout else "")


def random_states(name: str) -> frozenset[int]:
    """The numbers of the op's results that are states of a random generator."""
    return frozenset(i for i, result in enumerate(overload(name)._schema.returns) if result.name in RANDOM_STATE)


def run_oracle(sample: Sample, tensors: Sequence[Tensor] | None = None, *, seed: int = 0) -> OracleResult:
    """The oracle of a call, on the sample's tensors unless others are given.  Raises one of `REJECTIONS` if the op does."""
    inputs = tuple(sample.tensors if tensors is None else tensors)
    raw, flat = run_call(sample.call, inputs, mutates=mutates(sample.op))
    outputs = tuple(flat)
    only = metadata_only_call(sample)
    if not only and any(isinstance(v, Tensor) and v.dtype == torch.complex32 for v in (*inputs, *outputs)):
        only = "complex32, which torch cannot compare: judged by metadata only"
    if only:
        return OracleResult(inputs, outputs, (None,) * len(outputs), raw, only)
    spaced = strided_copies(sample.call, inputs)
    slack = _slack(lambda given: run_call(sample.call, given, mutates=False)[1], outputs, inputs, spaced, seed)
    states = random_states(sample.op)
    slack = tuple(None if i in states else s for i, s in enumerate(slack))
    return OracleResult(inputs, outputs, slack, raw, "", share_unstable(slack))


def run_stable_oracle(sample: Sample, tensors: Sequence[Tensor] | None = None, *, seed: int = 0) -> OracleResult | None:
    """The oracle of a call; None if the op rejects the call, or too many elements of a result are unstable."""
    try:
        found = run_oracle(sample, tensors, seed=seed)
    except REJECTIONS:
        return None
    return found if found.unstable <= MAX_JUMP_SHARE else None


def run_function_oracle(function: Function, inputs: Sequence[Tensor], *, seed: int = 0) -> OracleResult:
    """The oracle of a plain function of tensors, which gets copies.  Raises what the function raises."""
    outputs = tuple(function([x.clone() for x in inputs]))
    slack = _slack(function, outputs, inputs, [strided(x) for x in inputs], seed)
    return OracleResult(tuple(inputs), outputs, slack, outputs, "", share_unstable(slack))


def _slack(
    function: Function, outputs: Sequence[Any], inputs: Sequence[Tensor], spaced: Sequence[Tensor], seed: int
) -> tuple[Tensor | None, ...]:
    """The tolerance of each result.  The function gets fresh copies only, and may write to them."""
    others = [_rerun(function, spaced, len(outputs))]
    if any(is_inexact(x) for x in inputs):
        others += [_rerun(function, moved, len(outputs)) for moved in _perturbed(inputs, seed)]
    slack = tuple(measured_slack(o, [other[i] for other in others if other]) for i, o in enumerate(outputs))
    if any(x.dtype in DOUBLE_OF for x in inputs):
        best = _rerun(function, [x.to(DOUBLE_OF.get(x.dtype, x.dtype), copy=True) for x in inputs], len(outputs))
        whole = zip(slack, outputs, best or [None] * len(outputs), strict=True)
        slack = tuple(widen_slack(s, o, b) for s, o, b in whole)
    return slack


def share_unstable(slack: Sequence[Tensor | None]) -> float:
    """The largest share of unstable elements in a result."""
    shares = [float(s.isinf().double().mean()) for s in slack if s is not None and s.ndim and s.numel()]
    return max(shares, default=0.0)


def _rerun(function: Function, tensors: Sequence[Tensor], count: int) -> Sequence[Any]:
    """The results for these inputs; empty if they are rejected, since noise moved them out of the op's domain."""
    try:
        outputs = function(tensors)
    except REJECTIONS:
        return ()
    return outputs if len(outputs) == count else ()


def _perturbed(inputs: Sequence[Tensor], seed: int) -> list[list[Tensor]]:
    """Two copies of the inputs, each element moved by at most one ulp; eight-bit floats, which torch cannot multiply, stay."""
    moved = tuple((tuple(x.shape), x.dtype, x.device) for x in inputs if is_inexact(x))
    small = sum(x.numel() for x in inputs) <= KEPT_ULPS
    found = []
    for factors in (_ulps if small else _ulps.__wrapped__)(moved, seed):
        left = iter(factors)
        found.append([x * next(left) if is_inexact(x) else x.clone() for x in inputs])
    return found


KEPT_ULPS = 1 << 12
"""Elements of a call up to which the noise for its inputs is kept, for calls of equal shapes and dtypes."""


@functools.lru_cache(maxsize=256)
def _ulps(
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...], seed: int
) -> tuple[tuple[Tensor, ...], ...]:
    """Factors for two copies of tensors of these shapes: one ulp more or less than 1 at each element."""
    rng = torch.Generator().manual_seed(zlib.crc32(f"nudge {seed}".encode()))

    def factor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        signs = torch.randint(0, 2, shape, generator=rng).to(device) * 2 - 1
        return 1 + torch.finfo(dtype).eps * signs.to(dtype)

    return tuple(tuple(factor(*one) for one in tensors) for _ in range(2))


def same_results(a: OracleResult, b: OracleResult) -> bool:
    """Whether two calls have bitwise equal results of the same shapes and dtypes (NaN equals NaN)."""
    if len(a.outputs) != len(b.outputs):
        return False
    pairs = [(x, y) for x, y in zip(a.outputs, b.outputs, strict=True) if isinstance(x, Tensor)]
    alike = all(isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)
    return alike and all(bool(within_slack(x, y, torch.zeros(())).all()) for x, y in pairs)


def equal_within(got: Tensor, want: Tensor, slack: Tensor) -> bool:
    """Whether two tensors of one shape are equal within the tolerance."""
    # torch.equal does not take float8
    return bool(within_slack(got, want, slack).all()) if is_float8(got.dtype) else all_within_slack(got, want, slack)
