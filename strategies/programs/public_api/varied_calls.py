"""Functions that compare a module of many kinds, and what a caller gave, after a public call of DTensor with its plain twin.

Each takes the tensor `x`, plain or distributed, and returns a list of tensors to be compared.  Scripts that reproduce a
finding contain their source: they need torch alone.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, experimental, parallel
from torch.distributed.tensor.placement_types import Placement

from strategies.programs.public_api.module_calls import gathered, module_for, trained_once, unlike_on_ranks
from strategies.programs.public_api.tensor_calls import (
    eighths,
    layout_text,
    leaf_of,
    number_along,
    on_mesh,
    pulled_back,
)
from strategies.programs.run.step_functions import whole


def numbered(shape: Sequence[int], most: int) -> Tensor:
    """Class numbers below `most`, unlike on neighbouring places."""
    return (torch.arange(torch.Size(shape).numel()) * 5 % most).reshape(tuple(shape))


class ScaledLinear(nn.Linear):
    """A linear layer whose `forward` takes further arguments: `linear(x) * scale + shift`."""

    def forward(self, x: Any, scale: float = 1.0, *, shift: float = 0.0) -> Any:
        return super().forward(x) * scale + shift


class ScaledNorm(nn.LayerNorm):
    """A layer norm whose `forward` takes further arguments: `norm(x) * scale + shift`."""

    def forward(self, x: Any, scale: float = 1.0, *, shift: float = 0.0) -> Any:
        return super().forward(x) * scale + shift


class Tied(nn.Module):
    """Two linear layers that share one weight, and a buffer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, features), nn.Linear(features, features, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class TiedNorms(nn.Module):
    """Two layer norms that share one weight, and a buffer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(features), nn.LayerNorm(features, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class Seen(nn.Module):
    """A module that keeps what it was given, and gives its first argument."""

    given: tuple[Any, ...] = ()

    def forward(self, x: Any, y: Any = None) -> Any:
        self.given = x, y
        return x


def kept_by(module: nn.Module) -> list[Any]:
    """Of a module, as texts: which parameters are one, which require a gradient, which parts train, the names; and the values."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first = {id(value): name for name, value in reversed(named)}
    ones = [f"{name} is {first[id(value)]}" for name, value in named if first[id(value)] != name]
    return [
        ", ".join(ones) or "no parameter is shared",
        f"requires_grad: {', '.join(name for name, value in named if value.requires_grad) or 'none'}",
        f"training: {', '.join(name or 'the module' for name, part in module.named_modules() if part.training) or 'no part'}",
        f"parameters and buffers: {', '.join(name for name, _ in named)}",
        *(value.detach() for _, value in named),
    ]


def only_own_pieces(module: nn.Module, mesh: Any, dim: int) -> None:
    """Let a rank have right parameters in its own piece along a dim alone: of no other part its values may count."""
    number = number_along(mesh, 0)
    for part in module.modules():
        for key, value in list(part.named_parameters(recurse=False)):
            if value.ndim > dim:
                cut = on_mesh(value.detach(), DTensor.from_local(value.detach(), mesh, [Replicate()]), [Shard(dim)])
                mine = cut.to_local() * 0 + number.to(value.dtype)
                owner = DTensor.from_local(mine, mesh, [Shard(dim)], shape=cut.shape, stride=cut.stride()).full_tensor()
                own = torch.where(owner == number, value.detach(), value.detach() + 1)
                part.register_parameter(key, nn.Parameter(own, value.requires_grad))


def varied(
    x: Any,
    make: Callable[[int], nn.Module],
    plan: Any,
    takes: Placement | None,
    gives: Placement,
    *,
    looks: bool = False,
    frozen: str = "",
    training: bool = True,
    more: Sequence[Any] = (),
    named: dict[str, Any] | None = None,
    source: int | None = 0,
    own: int | None = None,
    alike: bool = False,
) -> list[Any]:
    """A module under `parallelize_module` beside its plain twin: what it keeps if the program only `looks`, else a step of training.

    It gets plain pieces of x in the layout `takes`, of one shape or not, or x itself, and `more` and `named` arguments.
    Parameters whose names match `frozen` need no gradient.  Ranks have parameters of their own but where they are `alike`,
    or right in the rank's `own` piece along that dim.  Without a plan, `distribute_module` makes replicas.
    """
    module, given = module_for(x, make).train(training), leaf_of(x)
    for name, value in module.named_parameters(remove_duplicate=False):
        value.requires_grad_(value.requires_grad and not fnmatch.fnmatch(name, frozen))
    with torch.enable_grad():
        like = None if looks else module(whole(given), *more, **(named or {}))
        if isinstance(x, DTensor):
            mesh = x.device_mesh
            if own is not None:
                only_own_pieces(module, mesh, own)
            elif not alike:
                unlike_on_ranks(module, mesh)
            if plan is None:
                module = distribute_module(module, mesh)
            else:
                module = parallel.parallelize_module(module, mesh, plan, src_data_rank=source)
        if looks:
            return kept_by(module)
        if not isinstance(x, DTensor):
            return trained_once(module, like, [given])
        piece = given if takes is None else given.redistribute(placements=[takes]).to_local()
        out = module(piece, *more, **(named or {}))
        return trained_once(module, gathered(out, like, mesh, gives), [given])


def layouts_ensured(
    x: Any, plan: Any, coming: Placement, *, seen: Placement | None = None, given: Placement | None = None,
    keyword: bool = False,
) -> list[Any]:  # fmt: skip
    """A style that prepares a module, for a DTensor in any layout: what the module has `seen`, and what it has `given`.

    Both have the layouts that the style promises, and the values of x.
    """
    sides = [p for p in (seen, given) if p is not None]
    if not isinstance(x, DTensor):
        return [v for placement in sides for v in (layout_text(x, [placement]), x)]
    mesh, moved = x.device_mesh, x.redistribute(placements=[coming])
    inner = Seen()
    module = parallel.parallelize_module(inner, mesh, plan)
    out = module(moved, y=moved) if keyword else module(moved)
    got = ([] if seen is None else [inner.given[int(keyword)]]) + ([] if given is None else [out])
    pairs = [(one, placement) for one, placement in zip(got, sides, strict=True)]
    return [v for one, p in pairs for v in (layout_text(one, [p]), gathered(one, x, mesh, p))]


def unchanged(x: Any, call: Callable[..., Any], placements: Sequence[Placement], pieces: bool = False) -> list[Any]:
    """Whether a tensor of the caller and a list of placements are as they were after a call, on each rank, as texts.

    The tensor has other values on each rank; it is whole, or a piece in that layout if the call takes `pieces`.
    """
    same, kept = "the caller's tensor is as it was", "the caller's list is as it was"
    if not isinstance(x, DTensor):
        return [same, kept]
    mesh, listed = x.device_mesh, list(placements)
    mine = whole(x.detach()).clone()
    if pieces:
        mine = x.redistribute(placements=placements).to_local().detach().clone()
    for axis in range(mesh.ndim):
        mine = mine + number_along(mesh, axis).to(mine.dtype)
    before = mine.clone()
    call(mine, mesh, listed, x)
    for place in (mine != before).nonzero().tolist()[:1]:
        was, is_ = before[tuple(place)].item(), mine[tuple(place)].item()
        same = f"element {place} of the caller's tensor was {was} and is {is_}"
    return [same, kept if listed == list(placements) else f"the caller's list was {list(placements)} and is {listed}"]


def left_alone(x: Any, call: Callable[[Any], Any]) -> list[Any]:
    """Whether the pieces of a DTensor, its layout and what it requires are as they were after a call, as texts."""
    as_it_was = ["the pieces are as they were", "layout and requires_grad are as they were"]
    if not isinstance(x, DTensor):
        return as_it_was
    given = leaf_of(x)
    before, placements, needs = given.to_local().detach().clone(), given.placements, given.requires_grad
    with torch.enable_grad():
        call(given)
    after = given.to_local().detach()
    if not torch.equal(after, before):
        as_it_was[0] = f"the piece was {before.tolist()} and is {after.tolist()}"
    if (given.placements, given.requires_grad) != (placements, needs):
        as_it_was[1] = f"was {placements}, {needs}, and is {given.placements}, {given.requires_grad}"
    return as_it_was


def in_order(v: Any) -> list[int]:
    """The dims of more than one element, the one of the largest stride first."""
    return sorted((d for d in range(v.ndim) if v.shape[d] > 1), key=lambda d: -v.stride(d))


def strides_agree(x: Any, move: Callable[[Any], Any]) -> list[Any]:
    """Whether the pieces of a moved DTensor lie in memory in the order of dims that its own strides tell, as text."""
    out, agree = move(x), "the piece lies in memory as x.stride() tells"
    if not isinstance(out, DTensor):
        return [agree]
    order, local = in_order(out), out.to_local()
    held = [d for d in order if local.shape[d] > 1]
    if local.numel() and held != in_order(local):
        agree = f"x.stride() is {out.stride()}, and that of the piece of shape {tuple(local.shape)} is {local.stride()}"
    return [agree]


def mapped_freely(
    x: Any, function: Callable[..., Any], named: Callable[[Any], dict[str, Any]], **options: Any
) -> list[Any]:
    """`local_map` of a function of any pieces of the tensor, with arguments by keyword: all results, and the gradient of x."""
    given = leaf_of(x)
    with torch.enable_grad():
        run = (
            experimental.local_map(function, redistribute_inputs=True, **options)
            if isinstance(x, DTensor)
            else function
        )
        outs = run(given, **named(x))
        outs = list(outs) if isinstance(outs, (tuple, list)) else [outs]
        first = pulled_back(outs[0], [given])
    return [*first, *(v.detach() if isinstance(v, Tensor) else torch.tensor(v) for v in outs[1:])]


def registered_with(x: Any, kind: str, off: Any, on: Any, keyword: bool = False) -> list[Any]:
    """An op of the user's own with an argument of any type, called with two values: with `on` it sums along dim 0.

    Its rules, which `register_sharding` registers, let dim 0 be sharded only where it does not.
    """
    text = f"by {kind} {keyword} {off} {on}"
    name = "".join(c if c.isalnum() else "_" for c in text) + "_it"  # a name that ends with "_" is of an op in place

    def sums(v: Any) -> bool:
        return bool(v is not None if off is None else list(v) == on if isinstance(on, list) else v == on)

    def work(x: Any, v: Any = None) -> Any:
        return x.cumsum(0) if sums(v) else x * 2

    def rules(x: Any, v: Any = None) -> list[Any]:
        rest = [Replicate() if kind == "Tensor?" and v is not None else None]
        every = [Replicate(), *(Shard(d) for d in range(int(sums(v)), x.ndim))]
        return [([p], [p, *rest]) for p in every]

    if not hasattr(torch.ops.public_calls, name):
        torch.library.define(f"public_calls::{name}", f"(Tensor x, {'*, ' if keyword else ''}{kind} v) -> Tensor")
        torch.library.impl(f"public_calls::{name}", "CompositeExplicitAutograd")(work)
    op = getattr(torch.ops.public_calls, name)
    experimental.register_sharding(op.default)(rules)
    values = [on_mesh(eighths((2,), x), x, [Replicate()] * (x.device_mesh.ndim if isinstance(x, DTensor) else 1))
              if v == "a tensor" else v for v in (off, on)]  # fmt: skip
    return [op(x.detach(), v=v) if keyword else op(x.detach(), v) for v in values]


def overridden(x: Any, name: str, *args: Any) -> list[Any]:
    """An op of torch whose rules `register_sharding` replaces by replicas alone: the result is one, and right."""
    op = getattr(torch.ops.aten, name).default
    replicas = [Replicate()]
    if isinstance(x, DTensor):
        experimental.register_sharding(op)(lambda x, *rest: [(replicas, [*replicas, *(None for _ in rest)])])
    out = op(x.detach(), *args)
    return [layout_text(out, replicas * (x.device_mesh.ndim if isinstance(x, DTensor) else 1)), out]


def mapped_to_partial(x: Any, function: Callable[..., Any], kind: str) -> list[Any]:
    """`local_map` of a reduction of the rows of each rank, whose results are parts of that of all rows, and the gradient of x."""
    rest = [Replicate()] * (x.device_mesh.ndim - 1) if isinstance(x, DTensor) else []
    given = leaf_of(x.redistribute(placements=[Shard(0), *rest]) if isinstance(x, DTensor) else x)
    with torch.enable_grad():
        if isinstance(x, DTensor):
            function = experimental.local_map(function, [Partial(kind), *rest], ([Shard(0), *rest],))
        return pulled_back(function(given), [given])


def within(
    x: Any, context: Callable[[], Any], times: int, function: Callable[..., Any], *layouts: Sequence[Placement]
) -> list[Any]:
    """A function of the tensor within context managers that are entered so many times, each left in turn, and its gradient.

    The function runs once within all of them, and once more where all but the first are left.
    """
    given = leaf_of(x.redistribute(placements=layouts[0]) if isinstance(x, DTensor) and layouts else x)
    found: list[Any] = []
    failed = None
    with context() if isinstance(x, DTensor) else contextlib.nullcontext():
        try:
            if times > 1:
                found += within(x, context, times - 1, function, *layouts)
            with torch.enable_grad():
                found += pulled_back(function(given), [given])
        except Exception as error:  # why: torch 2.13 leaves loss_parallel on after one; it is raised again below
            failed = error
    if failed is not None:
        raise failed
    return found
