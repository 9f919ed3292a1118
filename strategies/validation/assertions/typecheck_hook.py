"""`assert_typecheck_hook`: the `spmd_typecheck` hook of an autograd Function, tested against what its kernel computes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

from localtensor.errors import error_in_one_line
from localtensor.layout import MAX_JUMP_SHARE, shape_text, short
from strategies.model.kernels import REJECTIONS
from strategies.model.oracle import OracleResult, run_oracle
from strategies.model.rule import Claim, Sample
from strategies.model.verdict import Evidence
from strategies.validation.assertions.rule import NotARule, NothingTested
from strategies.validation.difference import tensor_text
from strategies.validation.probe import Probe, check_claims
from strategies.validation.sources.functions import tensor_results
from strategies.validation.sources.spmd_types.hooks import HookSource, Kernel, axis_among, has_hook

CALL = "assert_typecheck_hook"
SMALLER = 40
"""Smaller calls that are tried for a wrong claim."""
RAISES = re.compile(r"\branks? (\d+ raises|raise) ")
"""How the evidence of a rank that raises begins."""
Args = tuple[Any, ...]


class WrongHook(AssertionError):
    """A hook types a result, or a gradient, as what its kernel does not compute."""


@dataclass(frozen=True)
class _Example:
    """Arguments of a call, a number of ranks, and whether the sizes are the caller's own."""

    args: Args
    ranks: int
    own: bool

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in pytree.tree_leaves(self.args) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class _Wrong:
    """A claim about an example that is wrong: its sample, in the claimant's words, and the evidence."""

    example: _Example
    sample: Sample
    oracle: OracleResult
    claim: Claim
    evidence: Evidence


def assert_typecheck_hook(
    function: type[torch.autograd.Function],
    args: Sequence[Any],
    *,
    axis: str = "",
    ranks: Sequence[int] = (2, 3),
    uneven: bool = True,
    seed: int = 0,
) -> None:
    """Assert that the `spmd_typecheck` hook of `function` types what its kernel computes, forward and backward.

    function  an autograd Function with a hook of `spmd_types`.
    args      the arguments of a call, `(x, weight, "tp")`: whole tensors.  Further calls are drawn from it: dims of equal
              sizes stay equal, and values are drawn anew.
    axis      the string among the arguments that stands for the process group; by default the only one.
    ranks     numbers of ranks.
    uneven    whether ranks may hold shards of different sizes, none of them empty.
    seed      the same seed tests the same calls.

    Every layout of the arguments that the hook accepts is tested: the results of the ranks must make what the kernel
    gives on whole tensors, and so must the gradients, in the layouts that follow from the types (R: a part; I: the same;
    P: the same; S: a shard).  Raises `WrongHook`, an `AssertionError`, for the smallest call that was found, `NotARule` for
    wrong arguments, and `NothingTested` if the hook accepts no call.
    """
    own = _checked(function, args, ranks)
    name = axis or axis_among(own)
    skipped: Counter[str] = Counter()
    judged = 0
    for example in _examples(own, tuple(ranks), uneven, seed):
        for found in _judged(function, name, example, seed, skipped):
            if found is not None:
                raise WrongHook(_message(function, _smallest(function, name, found, seed)))
            judged += 1
    if not judged:
        why = skipped.most_common(1)[0][0] if skipped else "the hook accepts no layout of these arguments"
        raise NothingTested(CALL, function.__name__, why, "Pass arguments that the Function and its hook take.")


def _checked(function: Any, args: Any, ranks: Any) -> Args:
    if not has_hook(function):
        remedy = "Pass a torch.autograd.Function with a static method spmd_typecheck."
        raise NotARule(CALL, "function", str(function)[:80], "it is no autograd Function with a hook", remedy)
    if not isinstance(args, (tuple, list)) or not any(isinstance(x, Tensor) for x in args):
        problem = "a tensor is not the arguments" if isinstance(args, Tensor) else "there is no tensor in it"
        shown = shape_text(args.shape, args.dtype) if isinstance(args, Tensor) else str(args)[:80]
        raise NotARule(CALL, "args", shown, problem, "Pass the arguments of a call: (x, weight).")
    counts = ranks if isinstance(ranks, Sequence) else ()
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 2 for n in counts):
        raise NotARule(
            CALL, "ranks", repr(ranks), "these are no counts of 2 ranks or more", "Give some, as ranks=(2, 3)."
        )
    return tuple(args)


def _examples(args: Args, ranks: tuple[int, ...], uneven: bool, seed: int) -> Iterator[_Example]:
    """The calls to test, small ones first: even shards, uneven ones, and the caller's own sizes."""
    sizes = sorted({size for x in args if isinstance(x, Tensor) for size in x.shape if size > 1})
    for count in ranks:
        even = {size: count * (i + 1) for i, size in enumerate(sizes)}
        yield _Example(resized(args, even, seed), count, own=False)
        if uneven:
            odd = itertools.islice(uneven_sizes(count), len(sizes))
            yield _Example(resized(args, dict(zip(sizes, odd, strict=True)), seed + 1), count, own=False)
        yield _Example(args, count, own=True)


def uneven_sizes(ranks: int) -> Iterator[int]:
    """Sizes that give ranks different shards, none of them empty.

    >>> list(itertools.islice(uneven_sizes(3), 4))
    [5, 7, 8, 10]
    """
    return (n for n in itertools.count(ranks + 1) if n % ranks and -(-n // ranks) * (ranks - 1) < n)


def resized(args: Args, sizes: dict[int, int], seed: int) -> Args:
    """The same arguments with other sizes and values: positive tensors stay positive, and integers stay below the sizes."""
    rng = torch.Generator().manual_seed(seed)
    most = min(sizes.values(), default=1)

    def drawn(x: Tensor) -> Tensor:
        shape = [sizes.get(size, size) for size in x.shape]
        if x.dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=rng).bool()
        if not (x.is_floating_point() or x.is_complex()):
            return torch.randint(0, max(1, most), shape, generator=rng).to(x.dtype)
        made = torch.randn(shape, generator=rng, dtype=x.dtype)
        return made.abs() + 0.1 if x.is_floating_point() and x.numel() and bool((x > 0).all()) else made

    made: Args = pytree.tree_map_only(Tensor, drawn, args)
    return made


def _judged(function: type, axis: str, example: _Example, seed: int, skipped: Counter[str]) -> Iterator[_Wrong | None]:
    """None for each claim that is sound on this example, and what is wrong with the others."""
    if reason := _unusable(function, axis, example):
        skipped[reason] += 1
        return
    source = HookSource("typecheck_hooks", [(function, example.args)], axis)
    for sample in source.samples((), seed):
        try:
            oracle = run_oracle(sample, seed=seed)
        except REJECTIONS as error:
            skipped[f"the kernel refuses it: {error_in_one_line(error)}"] += 1
            continue
        if oracle.unstable > MAX_JUMP_SHARE:
            skipped["the kernel is ill-conditioned on these values"] += 1
            continue
        about = source.about(sample, oracle, 0)
        claims = about.claims(example.ranks)
        skipped.update(about.failures)
        for claim in claims:
            yield _wrong(example, sample, oracle, claim, seed)


def _wrong(example: _Example, sample: Sample, oracle: OracleResult, claim: Claim, seed: int) -> _Wrong | None:
    (instance,) = check_claims(sample, oracle, example.ranks, [claim], seed=seed)
    reason = instance.evidence.reason
    if instance.verdict.value != "unsound":
        return None
    if RAISES.search(reason) and not (example.own and _is_even(claim, sample, example.ranks)):
        return None  # the kernel may take no pieces of these sizes
    return _Wrong(example, sample, oracle, claim, instance.evidence)


def _is_even(claim: Claim, sample: Sample, ranks: int) -> bool:
    pairs = zip(sample.tensors, claim.rule.inputs, strict=True)
    return all(x.shape[p.dim] % ranks == 0 for x, p in pairs if isinstance(p, Shard))


def _unusable(function: type, axis: str, example: _Example) -> str:
    """Why the kernel cannot be tested on these arguments, or empty: it refuses them, or is random."""
    kernel = Kernel(function, axis)
    try:
        with torch.no_grad():
            runs = [tensor_results(kernel(*pytree.tree_map_only(Tensor, torch.clone, example.args))) for _ in range(2)]
    except Exception as error:  # why: the kernel is the user's own code, and may raise anything for drawn arguments
        if example.own:
            problem = f"{function.__name__} raises {error_in_one_line(error)}"
            raise NotARule(CALL, "args", _shown(example.args), problem, "Pass arguments that it takes.") from error
        return f"the kernel refuses it: {error_in_one_line(error)}"
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*runs, strict=True))
    return "" if same else "two runs of the kernel differ: it draws random numbers"


def _smallest(function: type, axis: str, found: _Wrong, seed: int) -> _Wrong:
    """The same claim on smaller tensors, on fewer ranks, where it is wrong in the same way."""
    best, tries = found, 0
    for ranks in sorted({2, found.example.ranks}):
        sizes = sorted({size for x in found.example.tensors for size in x.shape if size > 1})
        grid = itertools.product(*(range(ranks, ranks + 4) for _ in sizes))
        for some in sorted(grid, key=sum):
            if tries == SMALLER or sum(some) >= sum(sizes):
                break
            tries += 1
            example = _Example(resized(found.example.args, dict(zip(sizes, some, strict=True)), seed), ranks, own=False)
            if (smaller := _still_wrong(function, axis, example, found, seed)) is not None:
                return smaller
    return best


def _still_wrong(function: type, axis: str, example: _Example, found: _Wrong, seed: int) -> _Wrong | None:
    if _unusable(function, axis, replace(example, own=False)):
        return None
    source = HookSource("typecheck_hooks", [(function, example.args)], axis)
    for sample in source.samples((), seed):
        if sample.op != found.sample.op or sample.call.args[2:] != found.sample.call.args[2:]:
            continue
        try:
            oracle = run_oracle(sample, seed=seed)
        except REJECTIONS:
            return None
        for claim in source.about(sample, oracle, 0).claims(example.ranks):
            if str(claim.rule) == str(found.claim.rule) and oracle.unstable <= MAX_JUMP_SHARE:
                return _wrong(example, sample, oracle, claim, seed)
    return None


def _shown(args: Args) -> str:
    return ", ".join(shape_text(x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in args)


def _message(function: type, wrong: _Wrong) -> str:
    """What is claimed, what the ranks hold, and what differs."""
    sample, claim, ranks = wrong.sample, wrong.claim, wrong.example.ranks
    wrt = sample.call.args[2] if len(sample.call.args) > 2 else ()
    what = f"the gradient of tensor {', '.join(map(str, wrt))}" if wrt else "the result"
    probe = Probe(sample, wrong.oracle, ranks, seed=0)
    lines = [
        f"{CALL}: {function.__name__} types {claim.source} on {ranks} ranks, and {what} is not that: {wrong.evidence.reason}",
        f"  call: {function.__name__}.apply({_shown(wrong.example.args)})",
    ]
    for i, placement in enumerate(claim.rule.inputs):
        own = "cotangent" if i >= len(wrong.example.tensors) else f"tensor {i}"
        for rank, x in enumerate(probe.held(i, placement, wrong.evidence.draw)):
            lines.append(f"  {own}, {short(placement) if placement else '-'}, rank {rank}: {tensor_text(x, 8)}")
    lines.append(f"  the kernel gives: {wrong.evidence.want or tensor_text(wrong.oracle.outputs[0], 8)}")
    lines.append(f"  the ranks make:   {wrong.evidence.got or '-'}")
    return "\n".join(lines)
