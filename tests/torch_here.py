"""What the torch that runs claims and does, for tests that need it: marks by what it has, not by its version."""

import pytest
import torch
from torch.distributed.tensor import Shard

from strategies.sources import claims
from strategies.truth import tell
from tests.strategies.cases import sample

CUMPROD = sample("cumprod.default", torch.tensor([[1.0, 2.0, 3.0, 4.0]]), -1)


def claimed(one):
    return [str(claim.rule) for claim in claims(one, 2, tell(one).raw)]


if_cumprod_is_wrong = pytest.mark.skipif(
    "aten.cumprod.default: S(1) -> S(1)" not in claimed(CUMPROD),
    reason=f"torch {torch.__version__} does not claim what is wrong for the last dim, counted from behind",
)
before_2_14 = pytest.mark.skipif(
    hasattr(Shard, "_to_partial_tensor"),  # came with all the rest that such tests quote
    reason=f"quotes what torch did before 2.14; this is {torch.__version__}",
)
