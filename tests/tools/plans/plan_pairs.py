"""Pairs of specs for the tests of DTensor's own plans, written in a line each."""

import torch

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.planner.audit.pairs import Pair


def spec(placements, sizes=(2, 2), shape=(8, 8), dtype=torch.float64, order=()):
    """`spec("S(0) R")` on a mesh of 2 x 2."""
    return Spec(Mesh.of(*sizes), tuple(map(parse, placements.split())), tuple(shape), dtype, order)


def pair(src, dst, sizes=(2, 2), shape=(8, 8), dtype=torch.float64, flattened=(), src_order=(), dst_order=()):
    """`pair("S(0) R", "R S(0)")`."""
    return Pair(spec(src, sizes, shape, dtype, src_order), spec(dst, sizes, shape, dtype, dst_order), tuple(flattened))
