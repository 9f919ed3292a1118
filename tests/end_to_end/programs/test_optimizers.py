"""Optimizers over DTensor parameters on rank threads, on gloo, and on one device.

Of the fused kernels that the CPU has, DTensor has rules for those of Adam and AdamW; the last test holds it to that.
"""

import pytest
import torch

from tests.device import ON_CPU
from tests.end_to_end.programs.optimizers import NOT_FUSED, OPTIMIZERS, on_one_device, refused, train
from tests.end_to_end.programs.three_ways import on_both

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64; a norm is a sum over ranks
LAYOUTS = {
    "a row of four": ((4,), ("S(0)", "S(1)", "S(0)", "R")),
    "two by two": ((2, 2), ("S(0), S(1)", "S(0), R", "S(0), S(0)", "R, R")),
    "strided": ((2, 2), ("SS(0,2), S(0)", "S(1), S(0)", "SS(0,2), S(0)", "SS(0,2), S(0)")),
}
STEPS = 2
EVERYWHERE = ("SGD", "AdamW")  # the others on one mesh: each new operator costs DTensor a search


@pytest.mark.parametrize(
    "layout", ["a row of four", *(pytest.param(name, marks=pytest.mark.slow) for name in ("two by two", "strided"))]
)
def test_optimizers_move_as_on_one_device(layout):
    mesh_shape, placed = LAYOUTS[layout]
    names = tuple(OPTIMIZERS) if layout == "two by two" else EVERYWHERE
    for result in on_both(train, names, mesh_shape, placed, STEPS, ranks=4):
        assert {"SGD, foreach", "AdamW, one by one", "AdamW, foreach", "AdamW, fused"} <= set(result)
        for name, moved in result.items():
            expected = on_one_device(name.partition(",")[0], len(placed), STEPS)
            torch.testing.assert_close(moved["whole"], expected["whole"], **CLOSE)
            torch.testing.assert_close(moved["norms"], expected["norms"], **CLOSE)


@ON_CPU
@pytest.mark.parametrize("name", NOT_FUSED)
def test_fused_kernels_without_a_rule_are_refused(name):
    refusal = f"Operator aten._fused_{NOT_FUSED[name]}_.default does not have a sharding strategy registered."
    assert on_both(refused, name, "fused", ranks=2) == [refusal] * 2
