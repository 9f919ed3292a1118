"""What the torch that runs claims and does, for tests that need it."""

import pytest
import torch
from torch.distributed.tensor import Shard

since_2_12 = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 hashes the stride of each rank's gradient: lockstep refuses it",
)
before_2_14 = pytest.mark.skipif(
    hasattr(Shard, "_to_partial_tensor"),  # it came with all the rest that such tests quote
    reason=f"quotes what torch did before 2.14; this is {torch.__version__}",
)
