"""In which order values are folded: eight in a row, more of them in pairs; and stacks are folded in the same order."""

import numpy as np
import pytest
import torch

from localtensor.layout.reductions import fold, fold_in_pairs
from localtensor.lockstep.comms import stacked_collectives


@pytest.mark.parametrize(("held", "said"), [
    ("a", "a"), ("ab", "(ab)"), ("abcdefgh", "(((((((ab)c)d)e)f)g)h)"),
    ("abcdefghi", "(((((ab)(cd))(ef))(gh))i)"), ("abcdefghij", "(((((ab)(cd))(ef))(gh))(ij))"),
])  # fmt: skip
def test_eight_are_folded_one_after_the_other_and_more_in_pairs(held, said):
    assert fold_in_pairs(lambda a, b: f"({a}{b})", held) == said


@pytest.mark.parametrize("members", [7, 8, 9, 10, 16, 17, 18, 33])
def test_a_stack_is_folded_in_the_same_order_to_the_bit(members):
    rows = torch.randn(members, 50, generator=torch.Generator().manual_seed(members)) * 1e3
    done = stacked_collectives.reduce_rows(rows, stacked_collectives.fold_plan(np.arange(members)[None]), "sum")
    assert torch.equal(done[0], fold(list(rows), "sum"))
