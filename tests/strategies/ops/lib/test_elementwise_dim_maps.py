"""Which reductions a number written in the same places on all ranks survives."""

import pytest
import torch

from localtensor.layout.reductions import fold_partials as fold
from localtensor.layout.spec import PARTIAL_KINDS
from strategies.ops.lib.elementwise import reductions_keeping


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("value", [0, 1, -1, 2.5])
@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_a_kind_goes_with_a_number_if_ranks_that_all_hold_it_hold_it_together(kind, value, ranks):
    together = fold(torch.full((ranks, 1), value, dtype=torch.float64), kind)
    by_chance = kind == "product" and value == -1 and ranks % 2 == 1
    assert (kind in reductions_keeping(value) or by_chance) == (together.item() == value)
