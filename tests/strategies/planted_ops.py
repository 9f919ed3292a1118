"""Small ops of our own, with what torch's ops do not offer: they count, raise, hang, die, and depend on strides.

To DTensor this file is a user's module of rules: importing it registers the ops and what they keep.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from strategies.model.rule import Call, Leaf, Sample, overload

CALLS: Counter[str] = Counter()
LIB = torch.library.Library("planted", "FRAGMENT")  # the ops live as long as this does


def planted(name: str, *tensors: Tensor) -> Sample:
    return Sample(Call(f"planted.{name}.default", tuple(map(Leaf, range(len(tensors))))), tensors, "test")


def plant(schema: str, function: Any, *kinds: str, meta: Any = torch.empty_like) -> None:
    """Registers an op, and for DTensor the placements that it keeps: "S", and those of Partial."""
    LIB.define(schema)
    name = schema.partition("(")[0]
    LIB.impl(name, function, "CPU")
    LIB.impl(name, meta, "Meta")
    if kinds:
        register_sharding(overload(f"planted.{name}.default"))(lambda x, **_: keeps(x, kinds))


def keeps(x: Any, kinds: tuple[str, ...]) -> list[Any]:
    every: list[Any] = [Replicate()]
    every += [Shard(d) for d in range(x.ndim)] if "S" in kinds else []
    every += [Partial(kind) for kind in kinds if kind not in "SR"]
    return [([p], [p]) for p in every]


def alone_on_rank(rank: int) -> bool:
    return dist.is_initialized() and dist.get_rank() == rank


def counted(x: Tensor) -> Tensor:
    CALLS["counted"] += 1
    return x * 2


def by_lanes(x: Tensor) -> Tensor:
    """What a kernel does that is vectorised for dense data only, and not quite the same there."""
    return torch.where(x > 0, x + (1.0 if x.is_contiguous() else 1.5), x)


def by_lanes_in_place(x: Tensor) -> Tensor:
    return x.copy_(by_lanes(x))


def far_by_lanes(x: Tensor) -> Tensor:
    """As above, but of large values only, which the parts of a sum may have where the sum has none."""
    return torch.where(x.abs() > 50, x + (1.0 if x.is_contiguous() else 1.5), x)


def far_by_lanes_in_place(x: Tensor) -> Tensor:
    return x.copy_(far_by_lanes(x))


def far(x: Tensor) -> Tensor:
    """The same step in every kernel."""
    return torch.where(x.abs() > 50, x + 1.0, x)


def patched(x: Tensor) -> Tensor:
    """NaN is replaced by the sum of all the rest."""
    return torch.where(x.isnan(), x.nan_to_num(0.0, 0.0, 0.0).sum(), x)


def patched_floor(x: Tensor) -> Tensor:
    return patched(x).nan_to_num(0.0, 0.0, 0.0).floor().long()


def approximate(x: Tensor) -> Tensor:
    """A thousandth off in single precision, exact in double."""
    return x * 1.0002 if x.dtype == torch.float32 else x.clone()


def approximate_floor(x: Tensor) -> Tensor:
    return approximate(x).floor().long()


def noted(x: Tensor, sums: Tensor) -> Tensor:
    """Leaves the sum of the rows in its second argument."""
    sums.copy_(x.sum(0))
    return x * 2


def alive(x: Tensor) -> Tensor:
    """1 where there is something, else 0."""
    return x.ne(0).long()


def averaged(x: Tensor) -> Tensor:
    return x.mean(0)


def totalled(x: Tensor, *, dim: int) -> Tensor:
    return x.sum(dim)


def fussy(x: Tensor) -> Tensor:
    if (x > 1).any():
        raise ValueError("every element must be at most 1")
    return x * 2


def trips(x: Tensor) -> Tensor:
    """Fails on three elements with what no op should raise."""
    if x.numel() == 3:
        raise ZeroDivisionError("three")
    return x * 2


def one_raises(x: Tensor) -> Tensor:
    if alone_on_rank(1):
        raise ValueError("not on this rank")
    return x * 2


def one_hangs(x: Tensor) -> Tensor:
    if alone_on_rank(1):
        threading.Event().wait()
    return x * 2


def once(x: Tensor) -> Tensor:
    """A process of a rank can call it once."""
    CALLS["once"] += dist.is_initialized()
    if CALLS["once"] > 1:
        raise ValueError("once only")
    return x * 2


def spoils(x: Tensor) -> Tensor:
    """After it `spoilt` raises in the same process of a rank."""
    CALLS["spoils"] += dist.is_initialized()
    return x * 2


def spoilt(x: Tensor) -> Tensor:
    if CALLS["spoils"]:
        raise ValueError("spoilt")
    return x * 2


def unwilling(x: Tensor) -> Tensor:
    if dist.is_initialized():
        raise ValueError("never on a rank")
    return x * 2


def one_dies(x: Tensor) -> Tensor:
    if alone_on_rank(1):
        os._exit(7)
    return x * 2


def one_grows(x: Tensor) -> Tensor:
    """On one real rank it gives a row more than it should."""
    return torch.cat([x, x[:1]]) * 2 if alone_on_rank(1) else x * 2


# DTensor takes the shape of a result from the meta kernel, which this one's kernel does not keep.
plant("shorter(Tensor x) -> Tensor", lambda x: x[:, :2].clone(), "S")
plant("counted(Tensor x) -> Tensor", counted, "S", "sum", "avg", "max", "min", "product")
plant("forgotten(Tensor x) -> Tensor", lambda x: x * 2, "R")
plant("remembered(Tensor x) -> Tensor", lambda x: x * 2, "S", "sum", "avg", "max", "min")
plant("by_lanes(Tensor x) -> Tensor", by_lanes, "S")
plant("by_lanes_(Tensor(a!) x) -> Tensor(a!)", by_lanes_in_place, meta=lambda x: x)
plant("far_by_lanes(Tensor x) -> Tensor", far_by_lanes)
plant("far_by_lanes_(Tensor(a!) x) -> Tensor(a!)", far_by_lanes_in_place, meta=lambda x: x)
plant("far(Tensor x) -> Tensor", far)
for _later in (once, spoils, spoilt, unwilling):
    plant(f"{_later.__name__}(Tensor x) -> Tensor", _later, "S")
plant("patched_floor(Tensor x) -> Tensor", patched_floor)
plant("patched(Tensor x) -> Tensor", patched, "S")
plant("mislabelled(Tensor x) -> Tensor", lambda x: x.sum(), "S")
plant(
    "has_nan(Tensor x) -> Tensor",
    lambda x: x.isnan().any().double(),
    meta=lambda x: x.new_empty((), dtype=torch.float64),
)
plant("approximate(Tensor x) -> Tensor", approximate, "S")
plant("approximate_floor(Tensor x) -> Tensor", approximate_floor)
plant("alive(Tensor x) -> Tensor", alive)
plant("noted(Tensor x, Tensor(a!) sums) -> Tensor", noted, meta=lambda x, sums: torch.empty_like(x))
plant("averaged(Tensor x) -> Tensor", averaged, "R", meta=averaged)
plant("totalled(Tensor x, *, int dim) -> Tensor", totalled, "R", meta=totalled)
plant("fussy(Tensor x) -> Tensor", fussy, "S")
plant("trips(Tensor x) -> Tensor", trips, "S")
plant("one_raises(Tensor x) -> Tensor", one_raises, "S")
plant("one_hangs(Tensor x) -> Tensor", one_hangs, "S")
plant("one_dies(Tensor x) -> Tensor", one_dies, "S")
plant("one_grows(Tensor x) -> Tensor", one_grows, "S")
