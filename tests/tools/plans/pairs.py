"""Specs to plan between: all there are on a small mesh, or some at random on a larger one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import torch

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.planner.steps.alpha_beta import partials_commute

PLAIN = ("R", "S(0)", "S(1)", "P(sum)")


def every_spec(
    sizes: Sequence[int], shape: tuple[int, ...], names: Sequence[str] = PLAIN, dtype: torch.dtype = torch.float32
) -> list[Spec]:
    """All specs with these placements, in every order in which their axes may cut."""
    mesh, known = Mesh.of(*sizes), [parse(name) for name in names]
    fits = [p for p in known if getattr(p, "dim", 0) < len(shape) or not hasattr(p, "dim")]
    found = []
    for placements in itertools.product(fits, repeat=len(sizes)):
        if all(partials_commute(one, other, dtype) for one, other in itertools.combinations(placements, 2)):
            found += orders_of(Spec(mesh, placements, shape, dtype))
    return found


def orders_of(spec: Spec) -> Iterator[Spec]:
    """The spec with its dims cut in every order."""
    stacks = [(dim, spec.cut_by(dim)) for dim in range(len(spec.shape))]
    for orders in itertools.product(*[itertools.permutations(axes) for _, axes in stacks]):
        order = tuple((dim, axes) for (dim, _), axes in zip(stacks, orders, strict=True) if axes)
        yield Spec(spec.mesh, spec.placements, spec.shape, spec.dtype, order)


def drawn(
    rng: random.Random, mesh: Mesh, shape: tuple[int, ...], *, partial: bool = True, ordered: bool = True
) -> Spec:
    """A spec at random: replicated, sharded or, where asked, partial on each axis, the axes in any order."""
    kinds = ["R", *[f"S({dim})" for dim in range(len(shape))] * 2, *["P(sum)"] * partial]
    spec = Spec(mesh, tuple(parse(rng.choice(kinds)) for _ in mesh.sizes), shape, torch.float32)
    if not ordered:
        return spec
    order = [(dim, tuple(rng.sample(axes, len(axes)))) for dim in range(len(shape)) if (axes := spec.cut_by(dim))]
    return Spec(mesh, spec.placements, shape, torch.float32, tuple(order))
