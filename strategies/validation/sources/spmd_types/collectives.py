"""The collectives of `spmd_types` as calls: every function with every pair of `src` and `dst` that it takes.

What a pair means is written here, on whole tensors.  The whole of a varying tensor (V) is the stack of the ranks' values:
its shard along dim 0 is a rank's value.  `convert` and the collectives keep the whole value, `reinterpret` keeps the
ranks' values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from localtensor.errors import error_in_one_line
from strategies.model.kernels import REJECTIONS
from strategies.validation.sources.functions import FunctionCall, gradients
from strategies.validation.sources.protocol import Answer, NamedLayout, RefusedLayouts, sharded
from strategies.validation.sources.spmd_types import typed
from strategies.validation.sources.spmd_types.rank_group import run_on_ranks

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reinterpret", "convert", "redistribute")
STACKED = NamedLayout("V", Shard(0), Shard(0))
LAYOUTS = (typed.R, typed.I, STACKED, typed.P, sharded(0), sharded(1))
RANKS = (2, 3)
Whole = Callable[[Tensor, int], Tensor]


def _same(x: Tensor, ranks: int) -> Tensor:
    return x


def _sum(x: Tensor, ranks: int) -> Tensor:
    return x.sum(0)


def _copies(x: Tensor, ranks: int) -> Tensor:
    return x.expand(ranks, *x.shape)


def _times(x: Tensor, ranks: int) -> Tensor:
    return x * ranks


def _joined(x: Tensor, ranks: int, dim: int) -> Tensor:
    return torch.cat(x.unbind(0), dim)


def _cut(x: Tensor, ranks: int, dim: int) -> Tensor:
    return torch.stack(x.chunk(ranks, dim))


def _exchanged(x: Tensor, ranks: int) -> Tensor:
    return x.transpose(0, 1)


def _dim(layout: NamedLayout) -> int | None:
    """The dim of S(i); V has none."""
    return layout.meaning.dim if layout is not STACKED and isinstance(layout.meaning, Shard) else None


def meaning(name: str, src: NamedLayout, dst: NamedLayout) -> Whole:
    """What a pair makes of a whole tensor, by the definition of the function."""
    stacked = src is STACKED
    if name in ("all_reduce", "reduce_scatter") and stacked:
        return _sum  # a varying value is read as a part
    if name == "all_to_all" and stacked and dst is STACKED:
        return _exchanged
    if name in ("convert", "redistribute"):  # V and S(i) are one type: the ranks' values stay
        if stacked and (dim := _dim(dst)) is not None:
            return functools.partial(_joined, dim=dim)
        if dst is STACKED and (dim := _dim(src)) is not None:
            return functools.partial(_cut, dim=dim)
    if name == "reinterpret":
        if dst is STACKED and not stacked:
            return _copies
        if dst is typed.P and src is not typed.P:
            return _sum if stacked else _times
    return _same


@dataclass(frozen=True)
class Collective:
    """One function with one pair, on so many ranks, as a function of a whole tensor."""

    name: str
    src: NamedLayout
    dst: NamedLayout
    ranks: int

    @property
    def label(self) -> str:
        """`all_reduce(P->R) on 2 ranks`."""
        return f"{self.name}({self.src}->{self.dst}) on {self.ranks} ranks"

    @property
    def whole(self) -> Whole:
        return meaning(self.name, self.src, self.dst)

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(x, self.ranks)

    def apply(self, x: Tensor, group: Any) -> Tensor:
        """The call on a rank's piece, in which V is a stack of one value."""
        own = x.squeeze(0) if self.src is STACKED else x
        made = self.called(own, group)
        return made.unsqueeze(0) if self.dst is STACKED else made

    def called(self, x: Tensor, group: Any) -> Tensor:
        found: Any = getattr(typed.package(), self.name)
        expert = {"expert_mode": True} if self.name in ("reinterpret", "convert") else {}
        made: Tensor = found(x, group, src=_type(self.src), dst=_type(self.dst), **expert)
        return made

    def code(self, group: str = "dist.group.WORLD") -> str:
        """The call in Python on a rank's piece `x[0]`, for a script; `group` is the code of the process group."""
        expert = ", expert_mode=True" if self.name in ("reinterpret", "convert") else ""
        own = "x[0].squeeze(0)" if self.src is STACKED else "x[0]"
        made = f"spmd.{self.name}({own}, {group}, src={_text(self.src)}, dst={_text(self.dst)}{expert})"
        return f"{made}.unsqueeze(0)" if self.dst is STACKED else made

    def sample(self) -> Tensor:
        """A whole tensor: of shards that have one size."""
        n = self.ranks
        cut = self.name in ("convert", "redistribute") and _dim(self.src) is not None
        shape = (n, n, 2 * n) if STACKED in (self.src, self.dst) and not cut else (n * n, n * n, 2)
        return torch.randn(shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def _type(layout: NamedLayout) -> Any:
    return typed.package().V if layout is STACKED else typed.type_of(layout)


def _text(layout: NamedLayout) -> str:
    return "V" if layout is STACKED else layout.name


@functools.cache
def functions() -> Mapping[str, Collective]:
    """Every function with every pair, by its label.  A source refuses the pairs that the function does not take."""
    every = itertools.product(NAMES, LAYOUTS, LAYOUTS, RANKS)
    made = [Collective(name, src, dst, ranks) for name, src, dst, ranks in every]
    return {one.label: one for one in made}


def calls(names: Sequence[str]) -> Iterator[FunctionCall]:
    """A call of each."""
    for label, one in functions().items():
        if not names or label in names or one.name in names:
            yield FunctionCall(label, one, (one.sample(),), {}, "definition")


def answer(call: FunctionCall, one: Collective) -> Answer:
    """The layout that the function promises, and the run of all ranks.  Raises `RefusedLayouts` for a pair that it does not
    take."""

    def run(held: Sequence[Sequence[Tensor]], ranks: int) -> list[tuple[Any, ...]]:
        return _run(one, held, ranks, call.wrt)

    if one.name == "all_to_all" and STACKED in (one.src, one.dst) and one.src is not one.dst:
        raise RefusedLayouts("the documentation defines no all_to_all between V and S(i)")
    piece = typed.piece(call.tensors[0], one.src, one.ranks, 0)
    try:
        _run(one, [[piece] * one.ranks], one.ranks, ())
    except (*REJECTIONS, typed.package().SpmdTypeError) as error:
        raise RefusedLayouts(error_in_one_line(error)) from None
    return Answer((one.dst,), run=run)


def _run(one: Collective, held: Sequence[Sequence[Tensor]], ranks: int, wrt: Sequence[int]) -> list[tuple[Any, ...]]:
    def run(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
        if wrt:
            return gradients(lambda x: one.apply(x, group), tensors, "x0", wrt)
        with torch.no_grad():
            return [one.apply(tensors[0], group)]

    return run_on_ranks(run, held, ranks, typed.AXIS)
