"""Programs that the tests of causes share."""

import torch
from torch.distributed.tensor import Shard

from strategies.model.rule import Call, Leaf, Program, Sample


def program(call, *tensors, inputs, then=""):
    """A program on two ranks."""
    return Program(Sample(call, tensors, ""), (2,), inputs, then)


CUMPROD = program(Call("aten.cumprod.default", (Leaf(0), -1)), torch.arange(1.0, 5.0), inputs=((Shard(0),),))
