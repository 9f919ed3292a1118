"""Functions that use the public calls of DTensor which distribute modules, `loss_parallel` and `context_parallel`, each beside its plain twin.

Each takes the tensor `x`, plain or distributed, and returns a list of tensors to be compared: the result, the gradients of x
and of every parameter, and the parameters after a step of an optimizer.  Scripts that reproduce a finding contain their
source: they need torch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    distribute_module,
    distribute_tensor,
    experimental,
    parallel,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F  # noqa: N812  # its usual name, which scripts have, too

from strategies.programs.public_api.tensor_calls import (
    eighths,
    is_even,
    layout_text,
    leaf_of,
    number_along,
    on_mesh,
    pulled_back,
)
from strategies.programs.run.step_functions import whole


class Two(nn.Module):
    """A module of two tensors with two results, with a scale for each feature if it is `scaled`."""

    def __init__(self, features: int, scaled: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features)) if scaled else None

    def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
        scale = 3 if self.scale is None else self.scale
        return x * scale * 2, y * scale + y


def module_for(x: Any, make: Callable[[int], nn.Module]) -> nn.Module:
    """A module for the last dim of the tensor, whose parameters are multiples of 1/8."""
    module = make(x.shape[-1])
    for parameter in module.parameters():
        parameter.data = eighths(parameter.shape, x)
    return module


def trained_once(module: nn.Module, out: Any, leaves: Sequence[Any]) -> list[Any]:
    """The result, the gradients of the leaves and of the parameters by name (zeros for none), and the parameters after a step of SGD."""
    named = [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = pulled_back(out, [*leaves, *parameters])
    first = len(found) - len(parameters)
    for parameter, gradient in zip(parameters, found[first:], strict=True):
        parameter.grad = gradient
    if parameters:
        torch.optim.SGD(parameters, lr=0.5).step()
    gradients = [torch.zeros_like(p.detach()) if p.grad is None else p.grad for p in named]
    return [*found[:first], *gradients, *(parameter.detach() for parameter in named)]


def cut_meanwhile(x: Any, views: Callable[[Any], Sequence[Any]], dim: int) -> list[Any]:
    """The sum and the sum of squares of buffers within `context_parallel`, which cuts them along a dim, and all buffers after it.

    The pieces of all ranks have these sums in whatever order the sequence is cut.
    """
    base = whole(x.detach()).clone()
    buffers = list(views(base))
    sums = [torch.stack([v.sum(), (v * v).sum()]) for v in buffers]
    if isinstance(x, DTensor):
        mesh = x.device_mesh
        with experimental.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[dim] * len(buffers)):
            parts = [torch.stack([v.sum(), (v * v).sum()]) for v in buffers]
        sums = [DTensor.from_local(v, mesh, [Partial()]).full_tensor() for v in parts]
    return [*sums, *buffers, base]


def unlike_on_ranks(module: nn.Module, mesh: Any) -> None:
    """Give each rank but the first parameters of its own: the first rank's should count."""
    number = torch.stack([number_along(mesh, axis) for axis in range(mesh.ndim)]).sum()
    made: dict[int, tuple[Any, nn.Parameter]] = {}  # with the old parameters, whose ids stay theirs
    for part in module.modules():
        for key, value in list(part.named_parameters(recurse=False)):
            other = nn.Parameter(value.detach() + number.to(value.dtype), value.requires_grad)
            part.register_parameter(key, made.setdefault(id(value), (value, other))[1])


def fed(given: Any, placement: Placement | None) -> Any:
    """A DTensor in this layout, as a plain tensor of each rank where all pieces have one shape; itself without a layout."""
    if placement is None:
        return given
    moved = given.redistribute(placements=[placement])
    return moved.to_local() if is_even(moved) else moved


def gathered(out: Any, like: Any, mesh: Any, placement: Placement) -> Any:
    """The DTensor whose pieces a module gave, in the shape of the plain result `like`."""
    if isinstance(out, DTensor):
        return out
    return DTensor.from_local(out, mesh, [placement], shape=like.shape, stride=like.stride())


def parallelized(
    x: Any,
    make: Callable[[int], nn.Module],
    plan: Any,
    takes: Placement | None,
    gives: Placement,
    *,
    alike: bool = False,
    sequence: bool = False,
    **options: Any,
) -> list[Any]:
    """A module under `parallelize_module`, of plain pieces of x in the layout `takes`; its result has the layout `gives`.

    The parameters of all ranks but the first are others than the first rank's, unless they are `alike`.  A `sequence` has
    three dims, and of its result no layout is promised.  Raises ValueError for a sequence of fewer dims.
    """
    if sequence and x.ndim < 3:
        raise ValueError(f"a sequence has three dims, and this tensor has {x.ndim}")
    module, given = module_for(x, make), leaf_of(x)
    with torch.enable_grad():
        if not isinstance(x, DTensor):
            out = module(given)
            named = torch.tensor(True) if sequence else layout_text(out, [gives])
            return [named, *trained_once(module, out, [given])]
        like = module(x.full_tensor())
        if not alike:
            unlike_on_ranks(module, x.device_mesh)
        module = parallel.parallelize_module(module, x.device_mesh, plan, **options)
        out = module(fed(given, takes))
        named = torch.tensor(True) if sequence else layout_text(out, [gives])
        return [named, *trained_once(module, gathered(out, like, x.device_mesh, gives), [given])]


def prepared(
    x: Any,
    plan: Any,
    takes: Sequence[Placement | None],
    gives: Sequence[Placement],
    promised: Sequence[Placement] = (),
    *,
    scaled: bool = True,
    local: bool = True,
    keyword: bool = False,
) -> list[Any]:
    """A module of two tensors under a style that prepares what it takes or what it gives.

    The tensors have the layouts `takes`, None for that of x, and come as plain pieces where they are `local`; `gives` are
    the layouts of the results that are pieces, and the style has `promised` those of the first results.  The second tensor
    may come by `keyword`.
    """
    given = [leaf_of(x), leaf_of(x)]
    module = module_for(x, lambda features: Two(features, scaled))
    with torch.enable_grad():
        if not isinstance(x, DTensor):
            outs = module(*given)
            named = [layout_text(out, [p]) for out, p in zip(outs, promised, strict=False)]
        else:
            mesh = x.device_mesh
            module = parallel.parallelize_module(distribute_module(module, mesh), mesh, plan)
            moved = [v if p is None else v.redistribute(placements=[p]) for v, p in zip(given, takes, strict=True)]
            fed_in = [fed(v, p) if local else v for v, p in zip(moved, takes, strict=True)]
            outs = module(fed_in[0], y=fed_in[1]) if keyword else module(*fed_in)
            named = [layout_text(out, [p]) for out, p in zip(outs, promised, strict=False)]
            outs = [gathered(out, x, mesh, p) for out, p in zip(outs, gives, strict=True)]
        return [*named, *pulled_back(outs[0], given[:1]), *trained_once(module, outs[1], given[1:])]


class OfOne(nn.Module):
    """A module that returns a tuple of one tensor."""

    def forward(self, x: Any) -> Any:
        return (x * 2,)


def tuple_of_one(x: Any, plan: Any) -> list[Any]:
    """A module that returns a tuple of one tensor, under a style that prepares it: of which class its result is, and the tensor."""
    module: nn.Module = OfOne()
    if isinstance(x, DTensor):
        module = parallel.parallelize_module(module, x.device_mesh, plan)
        x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    out = module(x.detach())
    return [f"a {type(out).__name__}", whole(out[0] if isinstance(out, tuple) else out)]


def module_distributed(
    x: Any,
    make: Callable[[int], nn.Module],
    cut: Callable[[Tensor, int], Sequence[Placement]] | None,
    takes: Sequence[Placement] | None = None,
    gives: Sequence[Placement] | None = None,
) -> list[Any]:
    """A module under `distribute_module`, whose parameters are laid out by `cut`, by default replicated."""
    module, given = module_for(x, make), leaf_of(x)
    with torch.enable_grad():
        if not isinstance(x, DTensor):
            return trained_once(module, module(given), [given])

        def partition(name: str, part: nn.Module, mesh: Any) -> None:
            for key, value in list(part.named_parameters(recurse=False)):
                placed = distribute_tensor(value.detach(), mesh, cut(value, mesh.ndim))  # type: ignore[misc]
                part.register_parameter(key, nn.Parameter(placed))

        def take(part: nn.Module, inputs: Any, mesh: Any) -> Any:
            return inputs[0].redistribute(placements=takes)

        def give(part: nn.Module, outputs: Any, mesh: Any) -> Any:
            return outputs.redistribute(placements=gives)

        unlike_on_ranks(module, x.device_mesh)
        module = distribute_module(
            module, x.device_mesh, partition if cut else None, take if takes else None, give if gives else None
        )
        return trained_once(module, module(given), [given])


def loss_in_parallel(
    x: Any, placements: Sequence[Placement], target_placements: Sequence[Placement] | None, **options: Any
) -> list[Any]:
    """The cross entropy of logits, whose dim 1 are classes, under `loss_parallel`, and their gradient.

    The target is a plain tensor unless it has placements.
    """
    given = leaf_of(x)
    classes, places = x.shape[1], (x.shape[0], *x.shape[2:])
    target = (torch.arange(torch.Size(places).numel(), device=x.device) * 5 % classes).reshape(places)
    if options.pop("ignored", False):
        target.view(-1)[:1], options["ignore_index"] = -100, -100
    if options.pop("weighted", False):
        options["weight"] = on_mesh(eighths((classes,), x).abs() + 0.5, x, [Replicate()] * len(placements))
    if not isinstance(x, DTensor):
        with torch.enable_grad():
            return pulled_back(F.cross_entropy(given, target, **options), [given])
    given = leaf_of(x.redistribute(placements=placements))
    target = target if target_placements is None else on_mesh(target, x, target_placements)
    failed = None
    with torch.enable_grad(), parallel.loss_parallel():
        try:
            found = pulled_back(F.cross_entropy(given, target, **options), [given])
        except Exception as error:  # why: torch 2.13 leaves loss_parallel on after one; it is raised again below
            failed = error
    if failed is not None:
        raise failed
    return found


def fails_within(context: Callable[[], Any]) -> None:
    """Leave the context manager by an exception.  Raises KeyError."""
    with context():
        raise KeyError("an error of the user's own")


def after_an_error(x: Any, context: Callable[[], Any], function: Callable[..., Any]) -> list[Any]:
    """A function of the tensor, replicated, after an exception within the context manager: it is as if nothing had been."""
    if not isinstance(x, DTensor):
        return [function(x)]
    with contextlib.suppress(KeyError):
        fails_within(context)
    try:
        return [function(x.redistribute(placements=[Replicate()] * x.device_mesh.ndim))]
    finally:
        with context():  # it ends as it should, so that later programs are not affected
            pass
