"""Functions that use a tensor as Python does, besides its ops, each beside its plain twin: numbers, attributes, copies, hooks, items.

Each takes the tensor `x`, plain or distributed, and returns a list of tensors to be compared.  Scripts that reproduce a
finding contain their source: they need torch alone.
"""

from __future__ import annotations

import io
import operator
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.programs.public_api.tensor_calls import layout_text, leaf_of, on_mesh
from strategies.programs.run.step_functions import whole


def told(*values: Any) -> list[Any]:
    """What Python gets: numbers as tensors, floats in float64; a dtype as text; a list by its length and elements."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value.detach())
        elif isinstance(value, (bool, int)):
            found.append(torch.tensor(value))
        elif isinstance(value, (float, complex)):
            found.append(torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.complex128))
        elif isinstance(value, (list, tuple)):
            found += [torch.tensor(len(value)), *told(*value)]
        else:
            found.append(str(value))
    return found


def small(like: Any, placements: Sequence[Placement]) -> Any:
    """Numbers from 1 to 3 in the shape and dtype of x, in this layout."""
    steps = torch.arange(like.numel(), device=like.device) % 3 + 1
    return on_mesh(steps.reshape(tuple(like.shape)).to(like.dtype), like, placements)


def set_on(x: Any, placements: Sequence[Placement], assign: Callable[[Any, Any], Any]) -> list[Any]:
    """A leaf like x after `assign(leaf, y)`, where y is in this layout: values, gradient, flags, and the gradient of a use of it."""
    given, other = leaf_of(x.detach().clone()), small(x, placements)
    assign(given, other)
    found = told(given, given.requires_grad, given.is_leaf, given.shape, given.dtype)
    if given.grad is not None:
        found.append(given.grad.detach().clone())
    if given.requires_grad:
        with torch.enable_grad():
            (given * 2).sum().backward()
        found.append(given.grad.detach())
    return found


def copied(x: Any, copy_of: Callable[[Any], Any], shares: bool = False) -> list[Any]:
    """A copy of a leaf: values, class, mesh, layout; what is written to it is in the leaf if it `shares`."""
    given = leaf_of(x.detach().clone())
    with torch.enable_grad():
        made = copy_of(given)
    layout, on_one = "the layout of the leaf", isinstance(made, DTensor) is isinstance(x, DTensor)
    if isinstance(x, DTensor) and isinstance(made, DTensor):
        on_one = made.device_mesh == x.device_mesh
        if made.placements != given.placements:
            layout = f"{layout_text(made, ())}, those of the leaf are {given.placements}"
    found = [layout, *told(on_one, made.requires_grad, made.is_leaf, made.clone())]
    before = whole(given.detach()).clone()
    made.detach().mul_(2)
    return [*found, *told(shares or (whole(given.detach()) == before).all())]


def saved_and_loaded(value: Any, **options: Any) -> Any:
    """The value from `torch.load` of what `torch.save` has written."""
    written = io.BytesIO()
    torch.save(value, written)
    written.seek(0)
    return torch.load(written, **options)


def checkpointed(x: Any, placements: Sequence[Placement], made: Callable[[Any], Any], rows: bool = False) -> list[Any]:
    """What `torch.distributed.checkpoint` loads of a tensor that is `made` of x into one that is so made in this layout.

    What is saved lies as x does, or in `rows`.
    """
    want = made(whole(x.detach()).clone())
    if not isinstance(x, DTensor):
        return [want]
    into = made(on_mesh(torch.zeros_like(whole(x.detach())), x, placements))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        saved = on_mesh(want, x, [Shard(0)] * x.device_mesh.ndim) if rows else made(x.detach())
        checkpoint.save({"x": saved}, checkpoint_id=folder[0])
        checkpoint.load({"x": into}, checkpoint_id=folder[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    return [into]


def restored(x: Any, placements: Sequence[Placement], change: Callable[[Any, Any], Any]) -> list[Any]:
    """The weight of a layer after `change(layer, other)`, where the weight of the other layer lies in another layout."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    layers[0].weight, layers[1].weight = nn.Parameter(x.detach().clone()), nn.Parameter(small(x, placements))
    layers[0].weight.grad = small(x, placements)
    change(*layers)
    weight = layers[0].weight
    return told(isinstance(weight, nn.Parameter), weight.requires_grad, weight.dtype, weight, weight.grad is None)


def pulled(x: Any, run: Callable[[Any, Any], Sequence[Any]], placements: Sequence[Placement]) -> list[Any]:
    """What `run(leaf, gradient)` gives, where the gradient that comes in has this layout, and the gradient of the leaf."""
    given = leaf_of(x)
    with torch.enable_grad():
        found = run(given, small(x, placements))
    return [*told(*found), *([] if given.grad is None else [given.grad.detach()])]


class Doubled(torch.autograd.Function):
    """A function of the user's own: twice its argument, with three times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * 3 + x * 0


def doubled(x: Any) -> Any:
    """The user's own function of the tensor."""
    return Doubled.apply(x)


def augmented(x: Any, name: str, placements: Sequence[Placement]) -> list[Any]:
    """`x += y` and its like, where y is in this layout: whether x is the same object, and its values."""
    given = x.detach().clone()
    out = getattr(operator, name)(given, small(x, placements))
    return told(out is given, out, given)


def item_set(x: Any, index: Callable[[Any], Any], value: Callable[[Any], Any]) -> list[Any]:
    """A copy of x after `x[index] = value`."""
    given = x.detach().clone()
    given[index(given)] = value(given)
    return [given]


def indices(numbers: Sequence[int], like: Any) -> Any:
    """Numbers of rows, replicated on the mesh of x."""
    axes = like.device_mesh.ndim if isinstance(like, DTensor) else 1
    return on_mesh(torch.tensor(numbers), like, [Replicate()] * axes)


def out_given(x: Any, function: Callable[[Any, Any], Any], placements: Sequence[Placement]) -> list[Any]:
    """The result of a function that is given a view as `out`, the view, and its base, which lies in this layout."""
    like = function(whole(x.detach()).clone(), None)
    base = on_mesh(torch.zeros((2, *like.shape), dtype=like.dtype, device=like.device), x, placements)
    view = base[0]
    return [function(x.detach(), view), view, base]


def holds(check: Callable[..., None], x: Any, place: int) -> list[Any]:
    """Whether a check of `torch.testing` takes the tensor and one that has another value at one place for equal."""
    other = changed(x, getattr(x, "placements", ()), place)
    try:
        check(x, other)
    except AssertionError as error:
        if "not close" not in str(error):
            raise  # one of DTensor's own
        return told(False)
    return told(True)


def finite_in_half(x: Any, most: float, function: Callable[[Any], Any]) -> list[Any]:
    """Whether a function of positive float16 numbers from half of `most` up to it has finite results, as text."""
    values = whole(x.detach()).abs()
    values = ((values / values.amax().clamp(min=1e-6) + 1) * (most / 2)).to(torch.float16)
    out = whole(function(on_mesh(values, x, x.placements if isinstance(x, DTensor) else ())))
    return ["all results are finite" if bool(out.isfinite().all()) else "a result is infinite or NaN"]


def contains(x: Any) -> list[Any]:
    """Whether the first and the last element of the tensor are in it, and a number that is not."""
    values = [float(value) for value in whole(x.detach()).flatten()[[0, -1]]]
    return told(*(value in x for value in (*values, 1000.0)))


def changed(x: Any, placements: Sequence[Placement], place: int) -> Any:
    """The tensor in this layout, with another value at one place."""
    values = whole(x.detach()).clone()
    values.view(-1)[place % values.numel()] += 1
    return on_mesh(values, x, placements)
