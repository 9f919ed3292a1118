"""Redistribution on rank threads, on gloo, and by plain arithmetic."""

import pytest
import torch

from tests.programs.redistributions import pieces, placements, there_and_back, values, walk
from tests.programs.three_ways import assert_same_bits, on_both

ROW = ("R", "S(0)", "S(1)")
GRID = ["R, R", "S(0), R", "R, S(0)", "S(0), S(1)", "S(1), S(0)", "S(0), S(0)", "S(1), R"]
STRIDED = "SS(0,2), S(0)"
DTYPES = [torch.float64, torch.complex64, torch.complex128, torch.bfloat16, torch.int64, torch.bool]


def every_pair(names):
    """One path with each of these right after each other."""
    return tuple(name for first in names for other in names for name in (first, other))


def check_walk(mesh_shape, shape, dtype, path, ranks):
    x = values(shape, dtype)
    for rank, seen in enumerate(on_both(walk, mesh_shape, shape, dtype, path, ranks=ranks)):
        *local, full = seen
        assert_same_bits(full, x)
        for step, mine in zip(path, local, strict=True):
            if "P(" not in step:
                assert_same_bits(mine, pieces(mesh_shape, x, step)[rank])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_on_a_row_of_four(dtype):
    check_walk((4,), (5, 3), dtype, every_pair(ROW), ranks=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 7)])
def test_every_way_on_a_grid(dtype, shape):
    check_walk((2, 2), shape, dtype, every_pair(GRID), ranks=4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128, torch.int64], ids=str)
@pytest.mark.parametrize("end", ROW)
def test_a_pending_sum_on_a_row(dtype, end):
    check_walk((4,), (5, 3), dtype, ("P(sum)", end), ranks=4)


@pytest.mark.parametrize("end", ["R, R", "S(0), S(1)", "S(0), S(0)", "P(sum), R"])
def test_a_pending_sum_on_a_grid(end):
    check_walk((2, 2), (5, 3), torch.complex64, ("P(sum), P(sum)", end), ranks=4)


@pytest.mark.parametrize("end", GRID)
@pytest.mark.parametrize("shape", [(8, 4), (5, 3)])
def test_strided_shards_to_others_and_back(shape, end):
    check_walk((2, 2), shape, torch.float64, (STRIDED, end, STRIDED), ranks=4)


@pytest.mark.parametrize("path", [("S(0), S(1)", "R, R", "S(1), S(0)"), (STRIDED, "S(0), S(0)"), ("S(1), R", STRIDED)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradients_go_back_the_way(path, dtype):
    weights = values((8, 4), dtype, seed=1)
    per_rank = on_both(there_and_back, (2, 2), (8, 4), dtype, path, ranks=4)
    start = pieces((2, 2), weights, path[0])
    for result, mine in zip(per_rank, start, strict=True):
        assert placements(", ".join(result["placements"])) == placements(path[0])
        assert_same_bits(result["local"], mine)
