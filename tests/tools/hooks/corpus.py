"""A hundred hooks that are right and a hundred that are wrong, by the class of the mistake: five classes of twenty."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as torch's own pages call it)
from spmd_types import I, P, R, S, rules

from tests.tools.hooks.kernels import draw, function, gathered, piece, scattered, total, vjp

FORWARD, BACKWARD, UNEVEN, ONE_DIM, KIND = "forward", "backward", "uneven only", "one dim", "R for I"
CLASSES = (FORWARD, BACKWARD, UNEVEN, ONE_DIM, KIND)
"""The classes of mistakes."""
MN, MK, KN, NK = draw(6, 4), draw(6, 4, seed=1), draw(4, 8, seed=2), draw(8, 4, seed=3)
BMN, N = draw(2, 6, 4, seed=4), draw(4, seed=5)


@dataclass(frozen=True)
class Hook:
    """A Function with a hook, arguments for it, and its class of mistakes; "" if it is right."""

    name: str
    function: type
    args: tuple[Any, ...]
    mistake: str = ""


NONLINEAR: dict[str, Callable] = {
    "gelu": F.gelu, "tanh": torch.tanh, "exp": torch.exp, "silu": F.silu, "sigmoid": torch.sigmoid, "relu": F.relu,
    "square": torch.square, "softplus": F.softplus, "abs": torch.abs, "cos": torch.cos, "cube": lambda x: x**3, "elu": F.elu,
}  # fmt: skip
ALONG: dict[str, Callable] = {
    "softmax": torch.softmax, "log_softmax": torch.log_softmax,
    "normalize": lambda x, d: x / x.norm(dim=d, keepdim=True), "center": lambda x, d: x - x.mean(d, keepdim=True),
    "cumsum": lambda x, d: x.cumsum(d), "flip": lambda x, d: x.flip(d), "roll": lambda x, d: x.roll(1, d),
    "ramp": lambda x, d: x * (1 + torch.arange(x.shape[d], dtype=x.dtype)).view([-1 if i == d else 1 for i in range(x.ndim)]),
}  # fmt: skip
REDUCED: dict[str, Callable] = {
    "amax": lambda x, d: x.amax(d), "logsumexp": lambda x, d: x.logsumexp(d), "mean": lambda x, d: x.mean(d),
    "norm": lambda x, d: x.norm(dim=d), "prod": lambda x, d: x.prod(d), "var": lambda x, d: x.var(d, unbiased=False),
}  # fmt: skip
LINEAR: dict[str, Callable] = {
    "neg": torch.neg,
    "halve": lambda x: x / 2,
    "triple": lambda x: 3 * x,
    "same": lambda x: x.clone(),
}
PRODUCTS: dict[str, tuple[Callable, str, tuple[Any, ...]]] = {
    "matmul": (lambda x, w: x @ w, "mk,kn->mn", (MK, KN)), "linear": (lambda x, w: x @ w.t(), "mk,nk->mn", (MK, NK)),
    "outer": (lambda x, w: x[:, None] * w[None], "m,n->mn", (draw(6), N)), "mv": (lambda x, w: x @ w, "mk,k->m", (MK, N)),
    "dot": (lambda x, w: (x * w).sum(), "m,m->", (draw(6), draw(6, seed=9))), "scale": (lambda x, w: x * w, "mn,n->mn", (MN, N)),
    "bmm": (lambda x, w: x @ w, "bmk,bkn->bmn", (BMN, draw(2, 4, 8))), "frobenius": (lambda x, w: (x * w).sum(-1), "mn,mn->m", (MN, MK)),
}  # fmt: skip


def along(dim: int, ndim: int = 2) -> str:
    """`m_->m_` for dim 1 of two."""
    letters = "".join("_" if i == dim else "bmn"[i] for i in range(ndim))
    return f"{letters}->{letters}"


def unary(
    name: str,
    forward: Callable,
    equation: str,
    linear: tuple = (),
    x: torch.Tensor = MN,
    backward: Any = None,
    mistake: str = "",
) -> Hook:
    made = function(name, "x", forward, lambda x: rules.einsum(equation, x, linear_in=linear), backward)
    return Hook(name, made, (x,), mistake)


def binary(
    name: str, forward: Callable, equation: str, linear: tuple, args: tuple, backward: Any = None, mistake: str = ""
) -> Hook:
    made = function(name, "x w", forward, lambda x, w: rules.einsum(equation, x, w, linear_in=linear), backward)
    return Hook(name, made, args, mistake)


def grouped(
    name: str, params: str, forward: Callable, hook: Callable, backward: Callable, args: tuple, mistake: str = ""
) -> Hook:
    return Hook(name, function(name, params, forward, hook, backward), (*args, "tp"), mistake)


def right() -> list[Hook]:
    """The hooks that are right."""
    found = [unary(f"{n}", f, "...->...") for n, f in NONLINEAR.items()]
    found += [unary(f"{n}_rank_3", f, "...->...", x=BMN) for n, f in NONLINEAR.items()]
    found += [unary(f"{n}_{d}", lambda x, f=f, d=d: f(x, d), along(d)) for n, f in ALONG.items() for d in (0, 1)]
    found += [
        unary(f"{n}_of_three_{d}", lambda x, f=f, d=d: f(x, d), along(d, 3), x=BMN)
        for n, f in ALONG.items()
        for d in (1, 2)
    ]
    found += [
        unary(f"{n}_{d}", lambda x, f=f, d=d: f(x, d), ("_n->n", "m_->m")[d])
        for n, f in REDUCED.items()
        for d in (0, 1)
    ]
    found += [unary(n, f, "...->...", (0,)) for n, f in LINEAR.items()]
    found += [binary(n, f, eq, (0, 1), args) for n, (f, eq, args) in PRODUCTS.items()]
    found += [
        binary("add", torch.add, "mn,mn->mn", ((0, 1),), (MN, MK)), binary("sub", torch.sub, "mn,mn->mn", ((0, 1),), (MN, MK)),
        unary("total", torch.sum, "mn->", (0,)), unary("sum_0", lambda x: x.sum(0), "mn->n", (0,)),
        unary("transpose", lambda x: x.t().clone(), "mn->nm", (0,)), unary("sum_of_squares", lambda x: (x * x).sum(), "mn->"),
        binary("divide", torch.div, "mn,mn->mn", (0,), (MN, MK.abs() + 1)), binary("maximum", torch.maximum, "mn,mn->mn", (), (MN, MK)), binary("hypot", torch.hypot, "mn,mn->mn", (), (MN, MK)),
        unary("swap_of_three", lambda x: x.transpose(0, 2).clone(), "bmn->nmb", (0,), x=BMN),
    ]  # fmt: skip
    return [*found, *collectives()][:100]


def collectives(mistake: str = "") -> list[Hook]:
    """Kernels with collectives, and their right hooks."""
    return [
        grouped("reduce_to_I", "x group", total, lambda x, group: rules.all_reduce(x, group, src=P, dst=I), lambda x, group, g: (g, None), (MN,)),
        grouped("reduce_to_R", "x group", total, lambda x, group: rules.all_reduce(x, group, src=P, dst=R), lambda x, group, g: (total(g, group), None), (MN,)),
        grouped("copy_to_R", "x group", lambda x, group: x.clone(), lambda x, group: rules.convert(x, group, src=I, dst=R), lambda x, group, g: (total(g, group), None), (MN,)),
        grouped("gather_to_R", "x group", gathered, lambda x, group: rules.all_gather(x, group, src=S(0), dst=R), lambda x, group, g: (scattered(g, group), None), (MN,)),
        grouped("gather_to_I", "x group", gathered, lambda x, group: rules.all_gather(x, group, src=S(0), dst=I), lambda x, group, g: (piece(g, group), None), (MN,)),
        grouped("scatter", "x group", scattered, lambda x, group: rules.reduce_scatter(x, group, src=P, dst=S(0)), lambda x, group, g: (gathered(g, group), None), (draw(12, 4),)),
        grouped("gather_dim_1", "x group", lambda x, group: gathered(x, group, 1), lambda x, group: rules.all_gather(x, group, src=S(1), dst=R), lambda x, group, g: (scattered(g, group, 1), None), (draw(4, 6),)),
        grouped("row_linear", "x w group", row_linear, row_hook(I), lambda x, w, group, g: (g @ w, g.t() @ x, None), (MK, NK)),
        grouped("row_linear_to_R", "x w group", row_linear, row_hook(R), lambda x, w, group, g: (total(g, group) @ w, total(g, group).t() @ x, None), (MK, NK)),
        grouped("mean_of_rows", "x group", mean_of_rows, mean_hook, mean_back, (MN,)),
    ]  # fmt: skip


def row_linear(x, w, group):
    return total(x @ w.t(), group)


def row_hook(dst):
    return lambda x, w, group: rules.all_reduce(rules.einsum("mk,nk->mn", x, w), group, src=P, dst=dst)


def rows_of(x, group):
    return total(torch.tensor(float(x.shape[0]), dtype=x.dtype), group)


def mean_of_rows(x, group):
    return total(x.sum(0), group) / rows_of(x, group)


def mean_hook(x, group):
    return rules.all_reduce(rules.einsum("mn->n", x), group, src=P, dst=I)


def mean_back(x, group, g):
    return (g / rows_of(x, group)).expand_as(x).clone(), None


def wrong() -> list[Hook]:
    """The hooks that are wrong, twenty of each class."""
    every = {
        FORWARD: wrong_forward(),
        BACKWARD: wrong_backward(),
        UNEVEN: wrong_uneven(),
        ONE_DIM: wrong_dim(),
        KIND: wrong_kind(),
    }
    assert all(len(found) >= 20 for found in every.values()), {k: len(v) for k, v in every.items()}
    return [
        Hook(f"{hook.name}", hook.function, hook.args, mistake)
        for mistake, found in every.items()
        for hook in found[:20]
    ]


def wrong_forward() -> list[Hook]:
    """A part taken through what is not linear, a sum of parts with a constant, products that take both in parts."""
    found = [unary(f"linear_{n}", f, "...->...", (0,)) for n, f in NONLINEAR.items()]
    found += [binary(f"joint_{n}", f, eq, ((0, 1),), args) for n, (f, eq, args) in list(PRODUCTS.items())[:3]]
    found += [
        binary("add_of_part_and_whole", torch.add, "mn,mn->mn", (0, 1), (MN, MK)),
        unary("plus_one", lambda x: x + 1, "...->...", (0,)), binary("divisor_in_parts", torch.div, "mn,mn->mn", (1,), (MN, MK.abs() + 1)),
        unary("largest_as_sum", lambda x: x.amax(1), "mn->m"), unary("mean_as_sum", lambda x: x.mean(0), "mn->n"),
        binary("sub_of_part_and_whole", torch.sub, "mn,mn->mn", (0, 1), (MN, MK)),
    ]  # fmt: skip
    return found


def wrong_backward() -> list[Hook]:
    """The forward pass is right; the gradient is that of the pieces, lacks a sum over the ranks, or has one too many."""

    def by_own_size(dim):  # the gradient of a sum over the whole, divided by the size of the piece
        return lambda x, g: (g.unsqueeze(dim).expand_as(x) * (10.0 / x.shape[dim]),)

    found = [
        unary(f"sized_sum_{d}", lambda x, d=d: x.sum(d), ("mn->n", "mn->m")[d], (0,), backward=by_own_size(d))
        for d in (0, 1)
    ]
    for name, (f, eq, args) in list(PRODUCTS.items())[:6]:

        def centred(x, w, g, f=f):
            gx, gw = vjp(f, (x, w), g)
            return gx - gx.mean(), gw

        found.append(binary(f"centred_{name}", f, eq, (0, 1), args, centred))
    for name, f in list(NONLINEAR.items())[:4]:

        def clipped(x, g, f=f):
            (gx,) = vjp(f, (x,), g)
            return (gx / gx.norm().clamp(min=1e-3),)

        found.append(unary(f"clipped_{name}", f, "...->...", backward=clipped))
    collective = {hook.name: hook for hook in collectives()}
    changes: list[tuple[str, str, Callable, Callable, Callable]] = [
        ("reduce_to_I", "x group", total, lambda x, group: rules.all_reduce(x, group, src=P, dst=I), lambda x, group, g: (total(g, group), None)),
        ("reduce_to_R", "x group", total, lambda x, group: rules.all_reduce(x, group, src=P, dst=R), lambda x, group, g: (g, None)),
        ("copy_to_R", "x group", lambda x, group: x.clone(), lambda x, group: rules.convert(x, group, src=I, dst=R), lambda x, group, g: (g, None)),
        ("gather_to_R", "x group", gathered, lambda x, group: rules.all_gather(x, group, src=S(0), dst=R), lambda x, group, g: (piece(g, group), None)),
        ("gather_to_I", "x group", gathered, lambda x, group: rules.all_gather(x, group, src=S(0), dst=I), lambda x, group, g: (scattered(g, group), None)),
        ("scatter", "x group", scattered, lambda x, group: rules.reduce_scatter(x, group, src=P, dst=S(0)), lambda x, group, g: (gathered(g, group) / 2, None) if dist.get_world_size(group) > 1 else (g, None)),
        ("row_linear", "x w group", row_linear, row_hook(I), lambda x, w, group, g: (total(g @ w, group), g.t() @ x, None)),
        ("row_linear_weight", "x w group", row_linear, row_hook(I), lambda x, w, group, g: (g @ w, total(g.t() @ x, group), None)),
    ]  # fmt: skip
    for name, params, forward, hook, backward in changes:
        args = collective[name.removesuffix("_weight")].args[:-1]
        found.append(grouped(f"{name}_wrong_gradient", params, forward, hook, backward, args))
    return found


def wrong_uneven() -> list[Hook]:
    """Right where all pieces have one size: means of means, offsets by the own size, counts from the own size."""

    def mean_of_means(f):
        def forward(x, group):
            return total(f(x), group) / dist.get_world_size(group)

        return forward

    def back(f):
        def backward(x, group, g):
            return vjp(f, (x,), g / dist.get_world_size(group))[0], None

        return backward

    own = {
        "mean": lambda x: x.mean(0), "square_mean": lambda x: (x * x).mean(0), "abs_mean": lambda x: x.abs().mean(0), "exp_mean": lambda x: x.exp().mean(0),
        "half_mean": lambda x: x.mean(0) / 2, "tanh_mean": lambda x: x.tanh().mean(0), "cube_mean": lambda x: (x**3).mean(0), "relu_mean": lambda x: x.relu().mean(0),
        "cos_mean": lambda x: x.cos().mean(0), "gelu_mean": lambda x: F.gelu(x).mean(0),
    }  # fmt: skip
    found = [
        grouped(f"mean_of_{n}", "x group", mean_of_means(f), lambda x, group: rules.all_reduce(rules.einsum("mn->n", x), group, src=P, dst=I), back(f), (MN,))
        for n, f in own.items()
    ]  # fmt: skip

    def ramp(step):
        def forward(x, group):
            start = dist.get_rank(group) * x.shape[0]
            return x * (1 + step * (start + torch.arange(x.shape[0], dtype=x.dtype)))[:, None]

        return forward

    def shifted(scale):
        def forward(x, group):
            start = dist.get_rank(group) * x.shape[0]
            return x + scale * (start + torch.arange(x.shape[0], dtype=x.dtype))[:, None]

        return forward

    for step in (1.0, 0.5, 2.0, -1.0, 3.0):
        forward = ramp(step)
        found.append(
            grouped(
                f"ramp_by_{step}",
                "x group",
                forward,
                ramp_hook,
                lambda x, group, g, f=forward: (f(g, group), None),
                (MN,),
            )
        )
    found += [
        grouped(f"positions_by_{step}", "x group", shifted(step), ramp_hook, lambda x, group, g: (g, None), (MN,))
        for step in (1.0, 0.5, 2.0, -1.0, 3.0)
    ]
    return found


def ramp_hook(x, group):
    """Sharded along dim 0, as the positions are those of the pieces."""
    return rules.convert(x, group, src=S(0), dst=S(0))


def wrong_dim() -> list[Hook]:
    """A label where the dim must be whole, transposed labels, and sums that are no sums."""
    found = [
        unary(f"{n}_as_pointwise_{d}", lambda x, f=f, d=d: f(x, d), "mn->mn") for n, f in ALONG.items() for d in (0, 1)
    ]
    found += [
        unary("transpose_in_place", lambda x: x.t().clone(), "mn->mn", x=draw(6, 6)),
        unary("largest_of_rows", lambda x: x.amax(0), "mn->n"), unary("logsumexp_of_rows", lambda x: x.logsumexp(0), "mn->n"),
        binary("swapped", lambda x, w: x @ w, "mk,kn->nm", (0, 1), (draw(6, 6), draw(6, 6, seed=2))),
        binary("weight_of_other_dim", lambda x, w: x * w[:, None], "mn,n->mn", (0, 1), (draw(6, 6), draw(6, seed=2))),
    ]  # fmt: skip
    return found


def wrong_kind() -> list[Hook]:
    """R for I and I for R: the values are right, and the gradients are counted once for each rank or for one alone."""
    found = []
    scales = (1.0, 2.0, 0.5, -1.0)
    for c in scales:
        found.append(
            grouped(
                f"reduce_by_{c}_as_R",
                "x group",
                lambda x, group, c=c: total(c * x, group),
                lambda x, group: rules.all_reduce(x, group, src=P, dst=R),
                lambda x, group, g, c=c: (c * g, None),
                (MN,),
            )
        )
        found.append(
            grouped(
                f"reduce_by_{c}_as_I",
                "x group",
                lambda x, group, c=c: total(c * x, group),
                lambda x, group: rules.all_reduce(x, group, src=P, dst=I),
                lambda x, group, g, c=c: (total(c * g, group), None),
                (MN,),
            )
        )
        found.append(
            grouped(
                f"copy_by_{c}_as_I",
                "x group",
                lambda x, group, c=c: c * x,
                lambda x, group: rules.convert(x, group, src=I, dst=I),
                lambda x, group, g, c=c: (total(c * g, group), None),
                (MN,),
            )
        )
        found.append(
            grouped(
                f"gather_by_{c}_as_I",
                "x group",
                lambda x, group, c=c: gathered(c * x, group),
                lambda x, group: rules.all_gather(x, group, src=S(0), dst=I),
                lambda x, group, g, c=c: (scattered(c * g, group), None),
                (MN,),
            )
        )
        found.append(
            grouped(
                f"row_linear_by_{c}_as_R",
                "x w group",
                lambda x, w, group, c=c: c * row_linear(x, w, group),
                row_hook(R),
                lambda x, w, group, g, c=c: (c * g @ w, c * g.t() @ x, None),
                (MK, NK),
            )
        )
    return found


def every() -> list[Hook]:
    return list(itertools.chain(right(), wrong()))
