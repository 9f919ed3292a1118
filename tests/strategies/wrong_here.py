"""A wrong claim of torch's own, for tests that need one: not every torch makes it."""

import pytest
import torch

from strategies.model.oracle import run_oracle
from strategies.torch_api.dtensor import registry_of
from strategies.validation.sources.dtensor import claims
from tests.strategies.cases import sample

CUMPROD = sample("cumprod.default", torch.tensor([[1.0, 2.0, 3.0, 4.0]]), -1)


def claimed(one):
    return [str(claim.rule) for claim in claims(one, 2, run_oracle(one).raw)]


if_cumprod_is_wrong = pytest.mark.skipif(
    "aten.cumprod.default: S(1) -> S(1)" not in claimed(CUMPROD),
    reason=f"torch {torch.__version__} does not claim what is wrong for the last dim, counted from behind",
)

if_cumprod_has_a_rule = pytest.mark.skipif(
    registry_of(torch.ops.aten.cumprod.default) == "decomposition",
    reason=f"torch {torch.__version__} traces cumprod, and traced ops have fewer turns",
)
