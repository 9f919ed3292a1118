"""Autograd Functions with typecheck hooks, made from a kernel, its gradient and a hook; and the collectives that kernels use."""

import inspect

import torch
import torch.distributed as dist
from torch import Tensor

POSITIONAL, NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def vjp(forward, args, grad):
    """The gradients of the tensors among the arguments, by autograd."""
    with torch.enable_grad():
        own = [a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in args]
        leaves = [a for a in own if isinstance(a, Tensor) and a.requires_grad]
        found = iter(torch.autograd.grad(forward(*own), leaves, grad))
    return tuple(next(found) if isinstance(a, Tensor) and a.requires_grad else None for a in own)


def function(name, params, forward, hook, backward=None):
    """An autograd Function with these parameters.

    forward   the kernel.
    hook      the type of the result from the types of the parameters that it names.
    backward  from the arguments and the gradient of the result to those of the parameters; by default autograd's.
    """
    names = params.split()

    def run(ctx, *args):
        ctx.args = args
        return forward(*args)

    def back(ctx, grad):
        return backward(*ctx.args, grad) if backward else vjp(forward, ctx.args, grad)

    def typecheck(**given):
        return hook(**given)

    run.__signature__ = inspect.Signature([inspect.Parameter(one, POSITIONAL) for one in ("ctx", *names)])
    wanted = inspect.signature(hook).parameters
    typecheck.__signature__ = inspect.Signature([inspect.Parameter(one, NAMED) for one in wanted])
    body = {"forward": staticmethod(run), "backward": staticmethod(back), "spmd_typecheck": staticmethod(typecheck)}
    return type(name, (torch.autograd.Function,), body)


def total(x, group):
    """The sum of the ranks' tensors."""
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out


def gathered(x, group, dim=0):
    """The ranks' tensors of one size, put together along a dim."""
    ranks = dist.get_world_size(group)
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty((ranks * first.shape[0], *first.shape[1:]))
    dist.all_gather_into_tensor(out, first, group=group)
    return out.movedim(0, dim)


def scattered(x, group, dim=0):
    """This rank's piece of the sum of the ranks' tensors."""
    ranks = dist.get_world_size(group)
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty((first.shape[0] // ranks, *first.shape[1:]))
    dist.reduce_scatter_tensor(out, first, group=group)
    return out.movedim(0, dim)


def piece(x, group, dim=0):
    """This rank's piece of a tensor that is the same on each rank."""
    full = torch.zeros_like(scattered(x, group, dim))
    return scattered(x, group, dim) / dist.get_world_size(group) + full


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
