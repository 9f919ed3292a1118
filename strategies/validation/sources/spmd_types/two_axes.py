"""Calls of the op table on a mesh of two axes, whose tensors have a type on each.

The second axis is inside of the function: a rank of the first axis is here a row of ranks of the second.  What the results of a row
make by their types on the second axis is the result of that rank, so the judge of one axis judges both.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import assemble_axis, local_shapes_on, split_axis
from strategies.model.kernels import REJECTIONS
from strategies.model.rule import Claim
from strategies.validation.difference import near
from strategies.validation.probe import Case
from strategies.validation.sources import functions
from strategies.validation.sources.functions import FunctionCall
from strategies.validation.sources.protocol import Answer, NamedLayout, RefusedLayouts, SourceRaises, layout_tuples
from strategies.validation.sources.script import Sides
from strategies.validation.sources.spmd_types import typed

SIZES = (2, 2)
"""The ranks of the first and of the second axis."""
SUFFIX = " on two axes"
MOST_FIRST = 4
"""Tuples of layouts on the first axis that are tried with each on the second."""
_MOST_KEPT = 64
_DRAWN: dict[str, tuple[list[tuple[NamedLayout, ...]], int]] = {}
"""What `first` gave for the last calls: a call and its gradients ask for the same."""
_FACTORS = (2.0, 0.5, -1.0, 0.0, 1.0)
"""A part of a value is the value times one of these, so that both parts are exact."""


@dataclass(frozen=True)
class OnTwoAxes:
    """A function whose calls have the layouts on the second axis as a keyword argument: `second_axis="S(0), R"`."""

    label: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, second_axis: str = "", **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def calls(label: str, function: Callable[..., Any], given: Sequence[FunctionCall]) -> Iterator[FunctionCall]:
    """A call of a function with floats, of those whose sizes both axes divide if there is one, once for each kind of layouts
    on the second axis that the checker takes: one with a shard, one with parts, and one that is replicated."""
    exact = [call for call in given if all(x.dtype in (torch.float64, torch.int64) for x in call.tensors)]
    for call in sorted(exact, key=_sizes_left)[:1]:
        for row in _second(call):
            kwargs = {**call.kwargs, "second_axis": ", ".join(map(str, row))}
            yield FunctionCall(label + SUFFIX, OnTwoAxes(label, function), call.args, kwargs, call.origin)


def _sizes_left(call: FunctionCall) -> tuple[bool, int]:
    """A key that puts calls with integers alone last, and those first that have the most sizes that both axes divide."""
    sizes = [size for x in call.tensors for size in x.shape]
    divided = sum(not size % (SIZES[0] * SIZES[1]) for size in sizes)
    return not any(x.is_floating_point() for x in call.tensors), len(sizes) - divided


def _second(call: FunctionCall) -> Iterator[tuple[NamedLayout, ...]]:
    wanted: list[type] = [Shard, Partial, Replicate]
    for row in _rows(call):
        kind = _kind(row)
        if kind in wanted and _takes(call, row):
            wanted.remove(kind)
            yield row
        if not wanted:
            return


def _rows(call: FunctionCall) -> list[tuple[NamedLayout, ...]]:
    return layout_tuples([typed.layouts(x, SIZES[1]) for x in call.tensors])


def _kind(row: Sequence[NamedLayout]) -> type:
    return next((type(one.meaning) for one in row if not isinstance(one.meaning, Replicate)), Replicate)


def _takes(call: FunctionCall, row: Sequence[NamedLayout]) -> bool:
    """Whether the checker takes these layouts on an axis alone, and the results are what it says.  Where they are not, the claim on one
    axis is the finding."""
    pieces = [typed.piece(x, one, SIZES[1], 0) for x, one in zip(call.tensors, row, strict=True)]
    text = functions.call_text(call.args, call.kwargs)
    try:
        found = typed.result_layouts(
            lambda given: call.on(given)(), pieces, [(one,) for one in row], (typed.mesh_axis(2),)
        )
        if any(one is typed.V for (one,) in found):
            return False
        run = FunctionRun(call.function, text, [one.meaning for one in row], [one.meaning for (one,) in found])
        made = run([[x] for x in call.tensors], 1)[0]
    except (RefusedLayouts, SourceRaises, *REJECTIONS):
        return False
    return all(
        x.shape == y.shape and near(x, y) for x, y in zip(functions.tensor_results(call.whole), made, strict=True)
    )


def is_one(call: FunctionCall) -> bool:
    """Whether it is a call on two axes."""
    return isinstance(call.function, OnTwoAxes)


def plain(call: FunctionCall) -> FunctionCall:
    """The call without its layouts on the second axis."""
    kwargs = {name: value for name, value in call.kwargs.items() if name != "second_axis"}
    assert isinstance(call.function, OnTwoAxes), f"{call.function} has no second axis"
    return FunctionCall(call.function.label, call.function.function, call.args, kwargs, call.origin, call.wrt)


def second(call: FunctionCall) -> list[NamedLayout]:
    """The layouts of its tensors on the second axis."""
    names = call.kwargs["second_axis"].split(", ")
    choices = [typed.layouts(x, SIZES[1]) for x in call.tensors]
    return [next(one for one in row if one.name == name) for row, name in zip(choices, names, strict=True)]


def first(call: FunctionCall) -> tuple[list[tuple[NamedLayout, ...]], int]:
    """The tuples of layouts on the first axis that are tried, drawn, those of another kind than on the second first; and the
    number of those that the checker takes alone."""
    own = plain(call)
    name = f"{call.label} {functions.call_text(call.args, call.kwargs)} {[x.shape for x in call.tensors]}"
    if name in _DRAWN:
        return _DRAWN[name]
    taken = [row for row in _rows(own) if _takes(own, row)]
    order: list[int] = torch.randperm(
        len(taken), generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
    ).tolist()
    kind = _kind(second(call))
    ranked = sorted(order, key=lambda i: _kind(taken[i]) is kind)
    if len(_DRAWN) == _MOST_KEPT:
        _DRAWN.clear()
    return _DRAWN.setdefault(name, ([taken[i] for i in ranked[:MOST_FIRST]], len(taken)))


def result_rows(call: FunctionCall, inputs: Sequence[NamedLayout]) -> list[tuple[NamedLayout, ...]]:
    """The layouts of each result on both axes, for these of the tensors on the first.  Raises as `answer`."""
    own, inner = plain(call), second(call)
    for x, one, two in zip(own.tensors, inputs, inner, strict=True):
        if isinstance(one.meaning, Shard) and one == two and x.shape[one.meaning.dim] < SIZES[0] * SIZES[1]:
            raise RefusedLayouts("a rank has an empty piece")
    grads = [i in call.wrt for i in range(len(inputs))]
    rows = list(zip(inputs, inner, strict=True))
    found = typed.result_layouts(lambda given: own.on(given)(), _pieces(own, inputs, inner), rows, mesh_axes(), grads)
    if any(one is typed.V for row in found for one in row):
        raise RefusedLayouts("a result is V, which names no dim")
    return list(found)


def _pieces(own: FunctionCall, inputs: Sequence[NamedLayout], inner: Sequence[NamedLayout]) -> list[Tensor]:
    """The pieces of rank 0, for their shapes."""
    return [
        typed.piece(typed.piece(x, one, SIZES[0], 0), two, SIZES[1], 0)
        for x, one, two in zip(own.tensors, inputs, inner, strict=True)
    ]


def answer(call: FunctionCall, inputs: Sequence[NamedLayout]) -> Answer:
    """The layouts that the checker gives to the results on the first axis; the run joins those on the second.

    Raises `RefusedLayouts` and `SourceRaises`.
    """
    own, inner, found = plain(call), second(call), result_rows(call, inputs)
    text = functions.call_text(own.args, own.kwargs)
    placed, made = [one.meaning for one in inner], [two.meaning for _, two in found]
    if call.wrt:
        traits = functions.result_traits(own.function, own.tensors, text, call.wrt)
        asked = [i for i, one in enumerate(traits) if one.requires_grad]
        pieces = _pieces(own, inputs, inner)
        _check_pieces(own, text, pieces, [found[i] for i in asked], [traits[i].shape for i in asked])
        placed += [gradient_of(found[i][1]) for i in asked]
        made = [gradient_of(inner[i]) for i in call.wrt]
    split = any(isinstance(p, Partial) for p in placed)
    return Answer(
        tuple(one for one, _ in found), run=FunctionRun(own.function, text, placed, made, call.wrt), parts=split
    )


def gradient_of(layout: NamedLayout) -> Placement:
    """The placement of the gradient of a tensor with this layout; the results with V are refused."""
    assert layout.gradient is not None, f"{layout} has no gradient"
    return layout.gradient


def _check_pieces(
    own: FunctionCall, text: str, pieces: Sequence[Tensor], rows: Sequence[Sequence[NamedLayout]], wholes: Sequence[Any]
) -> None:
    """Raise `RefusedLayouts` where a rank's results have other sizes than the pieces of the whole ones: the call itself is
    judged; its gradient has no cotangents of these sizes."""
    try:
        mine = [one for one in functions.result_traits(own.function, pieces, text, own.wrt) if one.requires_grad]
    except REJECTIONS as error:
        raise RefusedLayouts(str(error)) from None
    want = [
        local_shapes_on(shape, [one.meaning for one in row], SIZES)[0] for shape, row in zip(wholes, rows, strict=True)
    ]
    if want != [one.shape for one in mine]:
        raise RefusedLayouts("the results have no pieces of these sizes")


def mesh_axes() -> tuple[Any, Any]:
    """The two axes, without a process group."""
    return typed.package().MeshAxis.of(SIZES[0], SIZES[1]), typed.package().MeshAxis.of(SIZES[1], 1)


def inner_pieces(x: Tensor, placement: Placement, leaf: int) -> list[Tensor]:
    """The piece of each rank of a row; parts are exact multiples of the value, element by element."""
    if not isinstance(placement, Partial):
        return split_axis(x, placement, SIZES[1])
    rng = torch.Generator().manual_seed(leaf + 1)
    if x.is_floating_point():
        factors = torch.tensor(_FACTORS, dtype=x.dtype)[torch.randint(len(_FACTORS), x.shape, generator=rng)]
        part = torch.where(x.isfinite(), x * factors, x)
        return [part, torch.where(x.isfinite(), x - part, torch.zeros_like(x))]
    part = torch.randint(-3, 4, x.shape, generator=rng, dtype=x.dtype)
    return [part, x - part]


def joined(every: Sequence[Sequence[Tensor]], outputs: Sequence[Placement]) -> tuple[Tensor, ...]:
    """What the results of the ranks of one row make.  Raises `RuntimeError` where ranks differ whose results are typed as the same."""
    made = []
    for placement, held in zip(outputs, zip(*every, strict=True), strict=True):
        if isinstance(placement, Replicate) and any(not near(held[0], x) for x in held[1:]):
            raise RuntimeError("the ranks of the second axis have other values where it is typed as the same")
        if isinstance(placement, Shard) and len({x.ndim for x in held}) != 1:
            raise RuntimeError("the pieces of the second axis make no whole")
        made.append(assemble_axis(held, placement))
    return tuple(made)


def sides(claim: Claim, case: Case) -> Sides:
    """The pieces and placements of a case on each process."""
    run: Any = claim.run
    pieces = [
        [piece for x in column for piece in inner_pieces(x, placement, i)]
        for i, (column, placement) in enumerate(zip(case.held, run.inputs, strict=True))
    ]
    inputs = list(zip(case.rule.inputs, run.inputs, strict=True))
    return Sides(SIZES, inputs, list(zip(case.rule.outputs, run.outputs, strict=True)), pieces)


@dataclass(frozen=True)
class FunctionRun:
    """The run of all ranks: `held[i][rank]` are the pieces along the first axis.

    inputs  the placements on the second axis of the tensors, and of the cotangents behind them.
    outputs those of the results, or of the gradients of the tensors `wrt`.
    """

    function: Callable[..., Any]
    text: str
    inputs: Sequence[Placement]
    outputs: Sequence[Placement]
    wrt: Sequence[int] = ()

    def __call__(self, held: Sequence[Sequence[Tensor]], ranks: int) -> list[tuple[Any, ...]]:
        return [self._row([column[rank] for column in held]) for rank in range(ranks)]

    def _row(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the results of one row make.  Raises as `joined`."""
        columns = [inner_pieces(x, p, i) for i, (x, p) in enumerate(zip(tensors, self.inputs, strict=True))]
        every = [self._rank([column[rank].clone() for column in columns]) for rank in range(SIZES[1])]
        return joined(every, self.outputs)

    def _rank(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.wrt:
            return functions.gradients(self.function, tensors, self.text, self.wrt)
        args, kwargs = functions.arguments(self.text, tensors)
        with torch.no_grad():
            return functions.tensor_results(self.function(*args, **kwargs))
