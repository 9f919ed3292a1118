"""The collectives of `spmd_types` on a mesh of two axes: over one of them, of tensors that have a layout on the other, too.

As in `two_axes`, a rank of the first axis is a row of ranks of the second, whose results make that rank's by their types there.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

import localtensor as lt
from localtensor.errors import error_in_one_line
from strategies.model.kernels import REJECTIONS
from strategies.validation.sources.functions import FunctionCall, gradients
from strategies.validation.sources.protocol import Answer, NamedLayout, RefusedLayouts, sharded
from strategies.validation.sources.spmd_types import collectives, rank_group, two_axes, typed
from strategies.validation.sources.spmd_types.collectives import Collective
from strategies.validation.sources.spmd_types.two_axes import SIZES

AXES = ("first", "second")
LAYOUTS = (typed.R, typed.I, typed.P, sharded(0), sharded(1))
OTHERS = (typed.R, typed.P, sharded(0), sharded(1))
"""Layouts on the axis over which the ranks do not communicate."""


IMPORTS = f"""from torch.distributed.device_mesh import init_device_mesh


def group(name):
    return init_device_mesh("cpu", {SIZES}, mesh_dim_names={AXES}).get_group(name)

"""
"""What the script of a finding has before its calls."""


@dataclass(frozen=True)
class OnOneOfTwo:
    """A collective from one type over one of two axes; calls have the type that it makes, and the layout on the other axis."""

    name: str
    src: NamedLayout
    axis: int

    @property
    def label(self) -> str:
        """`all_reduce(P) over the first of two axes`."""
        return f"{self.name}({self.src}) over the {AXES[self.axis]} of two axes"

    def one(self, dst: str) -> Collective:
        """The collective to that type."""
        return Collective(self.name, self.src, next(x for x in LAYOUTS if x.name == dst), SIZES[self.axis])

    def code(self, dst: str) -> str:
        """The call in Python on a rank's piece `x[0]`, for a script."""
        return self.one(dst).code(f"group({AXES[self.axis]!r})")

    def __call__(self, x: Tensor, *, dst: str, other: str) -> Tensor:
        del other
        return self.one(dst)(x)


@functools.cache
def functions() -> Mapping[str, OnOneOfTwo]:
    """Every function with every type that it may take, by its label."""
    every = itertools.product(collectives.NAMES, LAYOUTS, range(len(AXES)))
    return {one.label: one for one in itertools.starmap(OnOneOfTwo, every)}


def calls(names: Sequence[str]) -> Iterator[FunctionCall]:
    """A call for each type that the function makes of this one on an axis alone, and each layout on the other axis."""
    for label, one in functions().items():
        if names and label not in names and one.name not in names:
            continue
        for dst, other in itertools.product(_taken(one.name, one.src), OTHERS):
            x = torch.randn((8, 8, 2), generator=torch.Generator().manual_seed(8), dtype=torch.float64)
            yield FunctionCall(label, one, (x,), {"dst": dst, "other": other.name}, "definition")


@functools.cache
def _taken(name: str, src: NamedLayout) -> tuple[str, ...]:
    """The types that the function makes of this one on an axis alone, right ones: a wrong one is a finding there."""
    found = []
    for dst in LAYOUTS:
        one = Collective(name, src, dst, SIZES[0])
        if name == "all_to_all" and src == dst:
            continue
        try:
            collectives.answer(FunctionCall(one.label, one, (one.sample(),)), one)
        except RefusedLayouts:
            continue
        found.append(dst.name)
    return tuple(found)


def layouts(call: FunctionCall) -> tuple[NamedLayout, NamedLayout]:
    """The layouts of the tensor on both axes."""
    one = call.function
    assert isinstance(one, OnOneOfTwo), f"{one} is over no axis"
    other = next(x for x in OTHERS if x.name == call.kwargs["other"])
    return (one.src, other) if one.axis == 0 else (other, one.src)


def answer(call: FunctionCall) -> Answer:
    """The layout of the result on the first axis, as the checker types it; the run joins those on the second.

    Raises `RefusedLayouts`.
    """
    one: Any = call.function
    given, collective = layouts(call), one.one(call.kwargs["dst"])
    first, second = _typed_result(call, given, collective, one.axis)
    if any(x is typed.V for x in (first, second)):
        raise RefusedLayouts("the result is V, which names no dim")
    placed, made = [given[1].meaning], [second.meaning]
    if call.wrt:
        placed, made = [*placed, two_axes.gradient_of(second)], [two_axes.gradient_of(given[1])]
    run = CollectiveRun(collective, one.axis, placed, made, call.wrt)
    return Answer((first,), run=run, parts=any(isinstance(p, Partial) for p in placed))


def _typed_result(
    call: FunctionCall, given: Sequence[NamedLayout], collective: Collective, axis: int
) -> tuple[NamedLayout, ...]:
    spmd, (x,) = typed.package(), call.tensors
    piece = typed.piece(typed.piece(x, given[0], SIZES[0], 0), given[1], SIZES[1], 0)
    with rank_group.lockstep_mesh(SIZES, AXES) as mesh:
        axes = [spmd.MeshAxis.of(mesh.get_group(name)) for name in AXES]
        own = typed.typed_on(lt.rank_map(lambda _: piece.clone()), given, axes, grad=bool(call.wrt))
        is_global = importlib.import_module(f"{typed.PACKAGE}.checker").typecheck(local=False)
        try:
            with spmd.set_current_mesh(mesh), is_global:
                made = collective.called(own, mesh.get_group(AXES[axis]))
                return typed.layouts_on(made, axes)
        except (*REJECTIONS, spmd.SpmdTypeError) as error:
            raise RefusedLayouts(error_in_one_line(error)) from None


@dataclass(frozen=True)
class CollectiveRun:
    """The run of all ranks: `held[i][rank]` are the pieces along the first axis.

    axis    the axis over which the ranks communicate.
    inputs  the placements on the second axis of the tensor, and of the cotangent behind it.
    outputs that of the result, or of the gradient.
    """

    collective: Collective
    axis: int
    inputs: Sequence[Placement]
    outputs: Sequence[Placement]
    wrt: Sequence[int] = ()

    def __call__(self, held: Sequence[Sequence[Tensor]], ranks: int) -> list[tuple[Any, ...]]:
        rows = [
            [piece for x in column for piece in two_axes.inner_pieces(x, placement, i)]
            for i, (column, placement) in enumerate(zip(held, self.inputs, strict=True))
        ]
        found = rank_group.run_on_mesh(self._on_a_rank, rows, SIZES, AXES, AXES[self.axis])
        size = SIZES[1]
        return [two_axes.joined(found[rank * size : (rank + 1) * size], self.outputs) for rank in range(ranks)]

    def _on_a_rank(self, tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
        call: Callable[[Tensor], Tensor] = lambda x: self.collective.called(x, group)  # noqa: E731
        if self.wrt:
            return gradients(call, tensors, "x0", self.wrt)
        with torch.no_grad():
            return [call(tensors[0])]
