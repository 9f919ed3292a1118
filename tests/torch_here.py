"""What the torch that runs claims and does, for tests that need it."""

import pytest
import torch
from torch.distributed.tensor import Shard

before_2_14 = pytest.mark.skipif(
    hasattr(Shard, "_to_partial_tensor"),  # it came with all the rest that such tests quote
    reason=f"quotes what torch did before 2.14; this is {torch.__version__}",
)
