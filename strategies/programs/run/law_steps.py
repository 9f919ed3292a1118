"""Steps that test a random op by law: each returns numbers that are 0 where the op keeps the law.

Values of a random op differ from run to run, so they are compared with what must hold for each run: ranks that replicate
a result hold equal values, no shard is a copy of another, values are possible and distributed as those of the op on whole
tensors, and the gradient uses the mask of the forward.  A step means the same for plain tensors and for DTensors; scripts
that reproduce a finding contain its source: they need torch alone.

What torch 2.13 promises.  On a mesh of a device with `set_rng_state` (CUDA), `_random.OffsetBasedRNGTracker` gives each
shard its own part of one stream, for ranks that are seeded alike.  On CPU there is no tracker, and DTensor warns of it:
each rank draws from its own generator.  Run on gloo, torch 2.13: `rand_like`, `dropout`, `normal_` and `bernoulli` of S(0)
give the same values on all ranks that are seeded alike, and replicas differ where ranks are seeded apart;
`torch.distributed.tensor.rand` raises AssertionError.  So replicas are compared with ranks seeded alike, and all else with
ranks seeded apart, which holds on each device; a single device's stream is not compared.

The probability that a right op breaks a law is below `RISK` for each comparison, of which a program makes at most a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from strategies.programs.run.step_functions import spread, uneven, whole

Op = Callable[[Sequence[Any]], list[Any]]
RISK = 1e-11
"""The probability of a false alarm of one comparison, at most; a program makes fewer than a hundred."""
LAWS = {
    "law: replicas that differ": "unequal_replicas(op, x)",
    "law: shards that are copies": "copied_shards(op, x)",
    "law: impossible values": "impossible_values(op, x, packet, arguments)",
    "law: other distributions": "other_distributions(op, x)",
    "law: gradients off the mask": "other_gradients(op, x)",
}
"""Expressions of the function `op`, its tensors `x`, its name `packet` and its numeric `arguments`, by what they count."""


def copied(x: Any) -> Any:
    """A copy of the tensor with its own placements.  torch 2.13: `clone` of partial values adds them up."""
    if not isinstance(x, DTensor):
        return x.detach().clone()
    local = x.to_local().detach().clone()
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def random_run(op: Op, x: Sequence[Any], seed: int, apart: bool = True) -> tuple[list[Any], list[Any]]:
    """The op's results with a fixed seed, and the copies of its tensors that it got; ranks are seeded `apart` or alike."""
    rank = dist.get_rank() if apart and any(isinstance(one, DTensor) for one in x) else 0
    given = [copied(one) for one in x]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1_000_003 * seed + rank)
        return op(given), given


def locals_of_ranks(out: DTensor) -> list[tuple[list[int], Tensor]]:
    """The coordinate and the local tensor of each rank."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, (list(out.device_mesh.get_coordinate() or ()), out.to_local().detach().cpu()))
    return held


def unequal_replicas(op: Op, x: Sequence[Any]) -> list[Tensor]:
    """For each result the number of this rank's elements that differ from a replica of it, all ranks being seeded alike."""
    counts = []
    for out in random_run(op, x, 1, apart=False)[0]:
        count = 0
        if isinstance(out, DTensor):
            own, mine = list(out.device_mesh.get_coordinate() or ()), out.to_local().detach().cpu()
            for place, other in locals_of_ranks(out):
                apart = [
                    a for a, b, p in zip(place, own, out.placements, strict=True) if a != b and not p.is_replicate()
                ]
                if not apart and other.shape != mine.shape:
                    count = max(count, mine.numel(), 1)
                elif not apart:
                    count = max(count, int((~torch.isclose(other, mine, rtol=0, atol=0, equal_nan=True)).sum()))
        counts.append(torch.tensor(count))
    return counts


def copied_shards(op: Op, x: Sequence[Any]) -> list[Tensor]:
    """For each result the number of pairs of shards with equal values, ranks being seeded apart.

    Two independent draws of an element are equal with probability c, which two runs on whole tensors measure as m of N
    elements; Hoeffding (1963): c <= m + sqrt(ln(1 / RISK) / 2N) but for a probability of RISK.  Shards of n elements are
    equal by chance with c^n.  A pair counts where that is below RISK.  Elements must be alike, i.e. inputs constant.
    """
    full = [whole(one).cpu() for one in x]
    once, again = (random_run(op, full, seed)[0] for seed in (2, 3))
    counts = []
    for out, a, b in zip(random_run(op, x, 4)[0], once, again, strict=True):
        count = 0
        if isinstance(out, DTensor) and a.numel():
            held = locals_of_ranks(out)
            chance = float((a == b).double().mean()) + math.sqrt(-math.log(RISK) / (2 * a.numel()))
            cut = [i for i, p in enumerate(out.placements) if not (p.is_replicate() or p.is_partial())]
            pairs = [(s, t) for i, s in enumerate(held) for t in held[:i] if any(s[0][k] != t[0][k] for k in cut)]
            for (_, one), (_, other) in pairs:
                unlikely = chance < 1 and one.numel() * -math.log(chance) > -math.log(RISK)
                count += unlikely and one.shape == other.shape and bool((one == other).all())
        counts.append(torch.tensor(count))
    return counts


def impossible_values(op: Op, x: Sequence[Any], packet: str, arguments: dict[str, Any]) -> list[Tensor]:
    """The number of elements with a value that the op, named `packet`, cannot give for its tensors and `arguments`."""
    full = [whole(one).cpu() for one in x]
    results, given = random_run(op, x, 5)
    outs, after = ([whole(one).detach().cpu() for one in some] for some in (results, given))
    out, first, a = outs[0], full[0], arguments
    bad: Tensor

    def far(got: Tensor, want: Tensor) -> Tensor:
        return ~torch.isclose(got, want, rtol=1e-3, atol=1e-6)

    if packet == "bernoulli":
        p = torch.full_like(first, a["p"]) if a.get("p") is not None else first
        bad = ((out != 0) & (out != 1)) | ((p == 0) & (out != 0)) | ((p == 1) & (out != 1))
    elif packet in ("native_dropout", "dropout"):
        keep = 1.0 if a["train"] is False else 1 - a["p"]
        mask = outs[1].to(first.dtype) if len(outs) > 1 else (out != 0).to(first.dtype)
        bad = far(out, first * mask / keep if keep else torch.zeros_like(first)) | ((mask != 0) & (mask != 1))
    elif packet in ("rrelu_with_noise", "rrelu_with_noise_functional"):
        slope = outs[1] if len(outs) > 1 else after[1]
        drawn = (first <= 0) & bool(a["training"])
        bad = drawn & (far(out, first * slope) | (slope < a["lower"] - 1e-6) | (slope > a["upper"] + 1e-6))
        bad = bad | ((first > 0) & (out != first))
    elif packet == "multinomial":
        bad = (out < 0) | (out >= first.shape[-1])
        bad = bad | (first.gather(-1, out.clamp(0, first.shape[-1] - 1)) == 0)
        ordered = out.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).sum() * (not a["replacement"])
        return [bad.sum() + twice]
    else:
        lowest: Any = {"uniform": a.get("from"), "randint_like": a.get("low") or 0, "geometric": 1}.get(
            packet, -math.inf
        )
        lowest = 0 if packet in ("rand_like", "exponential", "log_normal") else lowest
        highest: Any = {"uniform": a.get("to"), "rand_like": 1, "randint_like": (a.get("high") or 0) - 1}.get(
            packet, math.inf
        )
        bad = ~((out >= lowest) & (out <= highest))
        if packet in ("geometric", "randint_like"):
            bad = bad | (out != out.round())
    return [bad.sum()]


def other_distributions(op: Op, x: Sequence[Any]) -> list[Tensor]:
    """For each result the number of groups of elements whose values are not distributed as the op's on whole tensors.

    A group is the elements for which all tensors have equal values; a result of another shape is one group, of which the
    first element of each row counts, since others may depend on it.  Ranks are seeded apart, so elements are independent.
    Massart (1990): the empirical distribution of n independent values is further than e from the true one with
    probability 2 exp(-2 n e^2) at most, for any distribution.  That of the group and that of 8 runs on whole tensors are
    further apart than the sum of both e with probability 2 RISK at most.  Mean, variance, share of zeros, scale and
    probabilities are all functions of the distribution.
    """
    full = [whole(one).cpu() for one in x]
    results = [whole(out).detach().cpu() for out in random_run(op, x, 6)[0]]
    if any(isinstance(one, DTensor) for one in x) and dist.get_rank():  # one rank is enough
        return [torch.tensor(0) for _ in results]
    many = [random_run(op, full, 7 + turn)[0] for turn in range(8)]

    def sorted_values(some: Sequence[Tensor], group: Tensor | None) -> Tensor:
        values = torch.cat([(one if group is None else one[group]).flatten() for one in some])
        return values.double().nan_to_num(1e300, 2e300, -2e300).sort().values

    def shares(values: Tensor, points: Tensor) -> Tensor:
        return torch.searchsorted(values, points, right=True) / len(values)

    counts = []
    for i, out in enumerate(results):
        wants = [run[i] for run in many]
        if out.shape != wants[0].shape or not out.numel():
            counts.append(torch.tensor(int(out.shape != wants[0].shape)))
            continue
        groups: list[Tensor | None] = [None]
        result = out
        if all(one.shape == out.shape for one in full):
            keys = torch.stack([one.double().round(decimals=3) for one in full], -1)  # sums of parts are rounded
            _, number = keys.reshape(-1, len(full)).unique(dim=0, return_inverse=True)
            groups = [number.reshape(out.shape) == k for k in range(int(number.max()) + 1)]
        else:
            result, wants = out[..., 0], [want[..., 0] for want in wants]
        count = 0
        for group in groups:
            got, want = sorted_values([result], group), sorted_values(wants, group)
            points = torch.cat([got, want])
            bound = sum(math.sqrt(math.log(2 / RISK) / (2 * len(values))) for values in (got, want))
            count += float((shares(got, points) - shares(want, points)).abs().max()) > bound
        counts.append(torch.tensor(count))
    return counts


def other_gradients(op: Op, x: Sequence[Any]) -> list[Tensor]:
    """The number of elements of the gradient of the first tensor that are not the incoming one times result / tensor."""
    with torch.enable_grad():
        first, *rest = (copied(one) for one in x)
        first.requires_grad_()
        out = random_run(lambda given: op([first, *rest]), x, 31)[0][0]
        coming = spread(uneven(out.shape, out.dtype, out.device), out, Replicate())
        (grad,) = torch.autograd.grad([out], [first], [coming])
    factor = whole(out).detach().cpu() / whole(first).detach().cpu()
    return [(~torch.isclose(whole(grad).cpu(), whole(coming).cpu() * factor, rtol=1e-3, atol=1e-6)).sum()]
