"""Redistribution on rank threads, on gloo, and by plain arithmetic.

Many cases to a run: a program with a mesh of two axes leaves groups behind, and costs gloo other processes.
"""

from itertools import product

import pytest
import torch

from tests.end_to_end.programs.redistributions import pieces, there_and_back, values, walks
from tests.end_to_end.programs.three_ways import assert_same_bits, on_both

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
ROW = ("R", "S(0)", "S(1)")
GRID = ("R, R", "S(0), R", "R, S(0)", "S(0), S(1)", "S(1), S(0)", "S(0), S(0)", "S(1), R")
STRIDED = "SS(0,2), S(0)"


def every_pair(names):
    """One path with each of these right after each other."""
    return tuple(name for first in names for other in names for name in (first, other))


def check_walks(mesh_shape, cases):
    for rank, walked in enumerate(on_both(walks, mesh_shape, tuple(cases), ranks=4)):
        for (shape, dtype, path), (*local, whole) in zip(cases, walked, strict=True):
            x = values(shape, dtype)
            assert_same_bits(whole, x)
            for step, mine in zip(path, local, strict=True):
                if "P(" not in step:
                    assert_same_bits(mine, pieces(mesh_shape, x, step)[rank])


def test_every_way_on_a_row_of_four():
    dtypes = [F64, C64, C128, torch.bfloat16, torch.int64, torch.bool]
    check_walks((4,), [((5, 3), dtype, every_pair(ROW)) for dtype in dtypes])


@pytest.mark.parametrize("shape", [(5, 3), *(pytest.param(s, marks=pytest.mark.slow) for s in ((8, 4), (1, 7)))])
def test_every_way_on_a_grid(shape):
    check_walks((2, 2), [(shape, dtype, every_pair(GRID)) for dtype in (F32, C64)])


def test_a_pending_sum_on_a_row():
    check_walks((4,), [((5, 3), dtype, ("P(sum)", end)) for dtype, end in product([F64, C64, C128, torch.int64], ROW)])


def test_a_pending_sum_on_a_grid():
    ends = ("R, R", "S(0), S(1)", "S(0), S(0)", "P(sum), R")
    check_walks((2, 2), [((5, 3), dtype, ("P(sum), P(sum)", end)) for dtype, end in product([F64, C64], ends)])


def test_strided_shards_to_others_and_back():
    check_walks((2, 2), [(shape, F64, (STRIDED, end, STRIDED)) for shape, end in product([(8, 4), (5, 3)], GRID)])


def test_gradients_go_back_the_way():
    paths = [("S(0), S(1)", "R, R", "S(1), S(0)"), (STRIDED, "S(0), S(0)"), ("S(1), R", STRIDED)]
    cases = [((8, 4), dtype, path) for dtype, path in product([F64, C128], paths)]
    for rank, gradients in enumerate(on_both(there_and_back, (2, 2), tuple(cases), ranks=4)):
        for (shape, dtype, path), gradient in zip(cases, gradients, strict=True):
            assert gradient["placements"] == path[0]
            assert_same_bits(gradient["local"], pieces((2, 2), values(shape, dtype, seed=1), path[0])[rank])
